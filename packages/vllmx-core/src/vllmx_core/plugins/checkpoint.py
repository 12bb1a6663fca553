"""Opens the checkpoint that a model name leads to, and constructs its architecture."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.config_values import nearest
from vllmx_core.errors import (
    AdapterError,
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    shown,
)
from vllmx_core.plugins.registry import Registry, architecture_names
from vllmx_core.plugins.specs import (
    ModelSourceSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)
from vllmx_core.plugins.text_part import TextWeights, text_config
from vllmx_core.records import Record, field
from vllmx_core.system.files import open_model_file

if TYPE_CHECKING:  # numpy is not worth importing to resolve a name
    from vllmx_core.adapters import Adapter
    from vllmx_core.model import Model
    from vllmx_core.weights.part import WeightSource

logger = logging.getLogger("vllmx.models")


class Checkpoint(Record):
    """An opened model, as a weight format returns it."""

    path: Path
    """The folder (or single file) that holds everything."""
    config: dict[str, Any]
    """The configuration in the terms of a Hugging Face config.json, whatever the format."""
    weights: WeightSource
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    """The tokenizer that the format itself contains (GGUF); None: files in `path`."""
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    """The image preparation that the format itself describes, in the terms of
    preprocessor_config.json; empty: files in `path`."""


def model_sources(registry: Registry) -> list[ModelSourceSpec]:
    """The model sources in the order in which they are asked."""
    return sorted(registry.all(ModelSourceSpec), key=lambda spec: (-spec.priority, spec.name))


def resolve_path(
    registry: Registry, model: str, *, revision: str | None = None, progress: bool = False
) -> Path:
    """Asks the model sources in turn. Raises ModelNotFoundError that says where was looked."""
    sources = model_sources(registry)
    for spec in sources:
        path: Path | None = spec.load()(model, revision, progress)
        if path is not None:
            return path
    looked = ", ".join(spec.name for spec in sources) or "no model source is installed"
    raise ModelNotFoundError(
        f"model {model!r} was not found (looked at: {looked}){_near_path(model)}; give"
        " a folder with config.json and *.safetensors, a GGUF file, or a Hugging Face id such as"
        " Qwen/Qwen3-0.6B or org/repo:file.gguf",
        param="model",
    )


def _near_path(model: str) -> str:
    """Suggests files of the same folder for a path that does not exist."""
    path = Path(model)
    try:
        there = [each.name for each in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, there, 1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def open_checkpoint(registry: Registry, path: Path, load_format: str = "auto") -> Checkpoint:
    """Opens a folder or file with the format that fits it. Raises ModelNotFoundError,
    UnsupportedModelError or WeightFormatError."""
    _refuse_adapter(path)
    spec = _format_of(registry, path, load_format)
    opener = spec.load()
    checkpoint: Checkpoint = opener(path, registry) if spec.needs_registry else opener(path)
    quantization = checkpoint.config.get("quantization_config")
    try:
        if quantization:
            checkpoint = _quantised(registry, checkpoint, quantization)
        return text_checkpoint(registry, checkpoint)
    except BaseException:
        checkpoint.weights.close()
        raise


def text_checkpoint(registry: Registry, checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a multimodal checkpoint whose class no plugin serves; other checkpoints as
    they are. Raises as `text_config` and `TextWeights`."""
    config = text_config(registry, checkpoint.config)
    if config is None:
        return checkpoint
    weights = checkpoint.weights
    if weights.names():
        weights = TextWeights(weights)
        # transformers ties by the outer key, whose default differs from class to class
        if checkpoint.config.get("tie_word_embeddings") is not False:
            config["tie_word_embeddings"] = "lm_head.weight" not in weights.names()
    logger.warning(
        "%s is served as %s: text alone, without its other parts",
        *(next(iter(architecture_names(each)), "model") for each in (checkpoint.config, config)),
    )
    return replace(checkpoint, config=config, weights=weights)


_MERGE = (
    "peft: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained"
    "(MERGED)"
)
_ADAPTER_CONFIG = "adapter_config.json"
_MAX_ADAPTER_CONFIG_BYTES = 4 << 20


def _refuse_adapter(path: Path) -> None:
    """Raises UnsupportedModelError for a LoRA adapter without its base model."""
    folder = path if path.is_dir() else path.parent
    config = folder / _ADAPTER_CONFIG
    if not config.is_file() or (path.is_file() and not path.name.startswith("adapter_")):
        return
    weights = (each for ending in ("safetensors", "gguf") for each in folder.glob(f"*.{ending}"))
    if path.is_dir() and any(not each.name.startswith("adapter_") for each in weights):
        return
    try:
        with open_model_file(config) as file:
            found = json.loads(file.read(_MAX_ADAPTER_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        found = None
    base = found.get("base_model_name_or_path") if isinstance(found, Mapping) else None
    raise adapter_error(path, base, _MERGE)


def adapter_error(path: Path, base: object, merge: str) -> UnsupportedModelError:
    """The error for a LoRA adapter.

    Args:
        base: the name of its base model, if it is a text.
        merge: the tool and call that merge the two.
    """
    known = f" of {shown(base)}" if isinstance(base, str) and base else ""
    return UnsupportedModelError(
        f"{path} is a LoRA adapter{known}, not a whole model: serve its base model with"
        f" --lora NAME={path}, or merge the two ({merge})",
        param="model",
    )


def open_adapter(registry: Registry, path: Path, config: Mapping[str, Any]) -> Adapter:
    """Reads a LoRA adapter with the format that fits its folder or file; `config` is the base
    model's. Raises AdapterError, ModelNotFoundError or WeightFormatError."""
    if not path.exists():
        raise ModelNotFoundError(
            f"the adapter {path} does not exist: give the folder of a PEFT adapter or a GGUF file",
            param="lora",
        )
    spec = _format_of(registry, path, "auto")
    if not spec.adapter:
        raise AdapterError(f"{path}: the format {spec.name!r} has no adapters")
    adapter: Adapter = spec.load_adapter()(path, registry, config)
    return adapter


def with_tower(
    registry: Registry, checkpoint: Checkpoint, mmproj: Path | None, load_format: str = "auto"
) -> Checkpoint:
    """The checkpoint with the tower for images that lies in a file of its own: in `mmproj`, or
    where the format finds one. Raises ConfigError where a tower was given for a model that takes
    none, and what the format raises for a file that it cannot read."""
    spec = _format_of(registry, checkpoint.path, load_format)
    if spec.tower:
        joined: Checkpoint = spec.load_tower()(checkpoint, mmproj)
        return joined
    if mmproj is not None:
        raise ConfigError(
            f"--mmproj is for models in GGUF files: {checkpoint.path} is a checkpoint of the format"
            f" {spec.name!r}, which has its tower in it where it has one; leave --mmproj out",
            param="mmproj",
        )
    return checkpoint


def _quantised(registry: Registry, checkpoint: Checkpoint, quantization: Any) -> Checkpoint:
    """The checkpoint with the weights that `quantization_config` describes."""
    path = checkpoint.path
    if not isinstance(quantization, Mapping):
        raise UnsupportedModelError(
            f"{path}: quantization_config must be an object, got {type(quantization).__name__}:"
            " repair config.json"
        )
    method = str(quantization.get("quant_method", "unknown"))
    quantised = registry.find(QuantizationSpec, method)
    if quantised is None:
        known = ", ".join(spec.name for spec in registry.all(QuantizationSpec))
        raise UnsupportedModelError(
            f"{path} is quantised with {shown(method)}, which no installed plugin reads; known:"
            f" {known or 'none'}"
        )
    return replace(checkpoint, weights=quantised.load()(checkpoint.weights, quantization))


_METHODS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
"""Names that vLLM has for one way of storing weights and its own kernels for it."""


def check_quantization(checkpoint: Checkpoint, wanted: str | None) -> None:
    """Raises ConfigError where `--quantization` does not name what the checkpoint is quantised
    with: vllmx reads that from the checkpoint, so the flag can only agree."""
    if wanted is None:
        return
    declared = checkpoint.config.get("quantization_config")
    found = declared.get("quant_method") if isinstance(declared, Mapping) else None
    if found is None and checkpoint.path.suffix == ".gguf":
        found = "gguf"
    if _METHODS.get(wanted.lower(), wanted.lower()) == found:
        return
    stored = "not quantised" if found is None else f"quantised with {found!r}"
    raise ConfigError(
        f"--quantization {wanted!r} does not agree with the checkpoint, which is {stored}: leave"
        " the flag out; --isq quantises while loading",
        param="quantization",
    )


def quantizer(registry: Registry, isq: str) -> QuantizerSpec:
    """Finds the quantiser that `--isq` names, case-insensitively. Raises ConfigError."""
    spec = registry.find(QuantizerSpec, isq.lower())
    if spec is None:
        known = [spec.name for spec in registry.all(QuantizerSpec)]
        raise ConfigError(
            f"--isq {isq!r} is not known{nearest(isq.lower(), known)}; known:"
            f" {', '.join(known) or 'none is installed'}",
            param="isq",
        )
    return spec


def quantise_in_situ(
    registry: Registry, checkpoint: Checkpoint, model: Model, isq: str
) -> Checkpoint:
    """The checkpoint with matrices that are quantised when they are read. Raises ConfigError for an
    unknown type, and for a checkpoint that is quantised already."""
    spec = quantizer(registry, isq)
    return replace(checkpoint, weights=spec.load()(spec.name, checkpoint, model, registry))


def _format_of(registry: Registry, path: Path, load_format: str) -> WeightFormatSpec:
    if not path.exists():
        raise ModelNotFoundError(
            f"{path} does not exist: check the path{_near_path(str(path))}", param="model"
        )
    if load_format != "auto":
        return registry.get(WeightFormatSpec, load_format)
    formats = sorted(registry.all(WeightFormatSpec), key=lambda spec: -spec.priority)
    for spec in formats:
        if path.is_dir() and any(next(path.glob(pattern), None) for pattern in spec.patterns):
            return spec
        if path.is_file() and any(path.match(pattern) for pattern in spec.patterns):
            return spec
    patterns = ", ".join(pattern for spec in formats for pattern in spec.patterns)
    raise ModelNotFoundError(
        f"{path} holds no weights that an installed format reads (looked for: {patterns})"
        f"{_pickled(path)}",
        param="model",
    )


def _pickled(path: Path) -> str:
    """The remedy if the weights are PyTorch pickles."""
    files = path.iterdir() if path.is_dir() else [path]
    found = sorted(each.name for each in files if each.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not found:
        return ""
    return (
        f"; {found[0]} may run code when it is read: convert the model with transformers,"
        " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def is_served(registry: Registry, config: dict[str, Any]) -> bool:
    """True if a plugin has the architecture, or the decoder whose layers it has."""
    if registry.find_model_for(config) is not None:
        return True
    architecture = next(iter(architecture_names(config)), "")
    return _with_head(registry, config, architecture) is not config


def build_model(registry: Registry, checkpoint: Checkpoint, task: str = "auto") -> Model:
    """Constructs the architecture that the checkpoint's config names, for a task of `EngineConfig`.
    A name such as Qwen3Model or LlamaForSequenceClassification that nobody serves is that of a
    decoder without its head, and a classifier that is to embed is its trunk. Raises
    UnsupportedModelError, also where the task does not fit."""
    config = checkpoint.config
    architecture = next(iter(architecture_names(config)), "")
    served = registry.find_model(architecture) is not None
    wanted = _wanted_output(config, task, architecture, served)
    if not served:
        if wanted == "tokens" and architecture.endswith(tuple(_HEADLESS)):
            raise UnsupportedModelError(
                f"--task {task}: {shown(architecture)} has no head to generate text with: leave"
                " --task out, or load another model"
            )
        config = _with_head(registry, config, architecture)
    elif wanted == "vectors":
        config = _trunk(registry, config, architecture)
    model: Model = registry.model_for(config).load()(config)
    with_head = getattr(model, "with_stored_head", None)
    if with_head is not None:
        model = with_head(checkpoint.weights)
    output = model.shape.output
    if wanted in (None, output) or (wanted == "vectors" and output.endswith(wanted)):
        return model
    answering = getattr(model, "answering", None)
    if model.shape.output != "tokens" or answering is None:
        raise UnsupportedModelError(
            f"--task {task}: architecture {shown(architecture)} gives {model.shape.output}, not"
            f" {wanted}: leave --task out, or load another model"
        )
    has_head = "score_tokens" in config or architecture.endswith(_CLASSIFIER)
    if wanted == "scores" and not has_head:
        raise UnsupportedModelError(
            f"--task {task}: architecture {shown(architecture)} has no classification head: leave"
            f" --task out, or load a model whose architecture is ...{_CLASSIFIER}"
        )
    changed: Model = answering(wanted, config)
    return changed


_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = {"Model": "vectors", _CLASSIFIER: "scores"}
"""Ends of names of architectures without a language model's head, and what they give."""


def _wanted_output(
    config: Mapping[str, Any], task: str, architecture: str, served: bool
) -> str | None:
    """None: what the architecture gives."""
    if task != "auto":
        return {"generate": "tokens", "embed": "vectors"}.get(task, "scores")
    if "score_tokens" in config:
        return "scores"
    if any(each["kind"] == "pooling" for each in config.get("modules", ())):
        return "vectors"
    ends = (given for end, given in _HEADLESS.items() if architecture.endswith(end))
    return None if served else next(ends, None)


def _trunk(registry: Registry, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The config of the model under a classifier's head, if that is served."""
    trunk = f"{architecture.removesuffix(_CLASSIFIER)}Model"
    if architecture.endswith(_CLASSIFIER) and registry.find_model(trunk) is not None:
        return config | {"architectures": [trunk]}
    return config


def _with_head(registry: Registry, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The config of the decoder that an architecture has the layers of, where it is served."""
    for end in _HEADLESS:
        whole = f"{architecture.removesuffix(end)}ForCausalLM"
        if architecture.endswith(end) and registry.find_model(whole) is not None:
            return config | {"architectures": [whole]}
    return config
