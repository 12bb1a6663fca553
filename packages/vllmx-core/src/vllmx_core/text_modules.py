"""The modules of sentence-transformers in an embedding model's folder, read into its config.

`config["modules"]` lists what follows the layers, in order: {"kind": "pooling", "pooling":
"mean"}, {"kind": "dense", "folder": "2_Dense", "in": 768, "out": 3072, "bias": False, "activation":
"identity"} and {"kind": "normalize"}. Tensors of a dense layer are named after its folder:
`2_Dense.linear.weight`. Dense layers without a pooling make a vector of each token (ColBERT).
`config["score_tokens"]` are the ids of "no" and "yes" of a reranker, and
`config["text_limit"]` is the number of tokens of a text that the model reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllmx_core.errors import UnsupportedModelError, WeightFormatError, shown
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint
from vllmx_core.plugins.registry import Registry, architecture_names
from vllmx_core.records import Record
from vllmx_core.system.files import open_model_file
from vllmx_core.weights.part import WeightPart, WeightSource

_MAX_BYTES = 4 << 20
_MAX_MODULES = 16
_MAX_PATH = 200
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}


def with_text_modules(registry: Registry, checkpoint: Checkpoint, task: str) -> Checkpoint:
    """Adds the folder's pooling modules to the checkpoint's config, and the tensors of its dense
    layers. Raises UnsupportedModelError for an unknown module, WeightFormatError for a damaged
    file."""
    folder = checkpoint.path
    listed = None if task == "generate" else _read(folder / "modules.json")
    if _COLBERT in architecture_names(checkpoint.config):
        return replace(checkpoint, config=checkpoint.config | {"modules": [_colbert(checkpoint)]})
    if listed is None:
        return checkpoint
    if not isinstance(listed, list) or len(listed) > _MAX_MODULES:
        raise WeightFormatError(f"{folder / 'modules.json'} is not a short list: download it again")
    config = dict(checkpoint.config)
    modules = [_module(folder, each) for each in listed]
    config["modules"] = [each for each in modules if each["kind"] in _KINDS]
    for each in modules:
        if each["kind"] == "score":
            config["score_tokens"] = each["tokens"]
    settings = _read(folder / "config_sentence_transformers.json")
    if isinstance(settings, dict):
        config["text_settings"] = settings
    limit = _text_limit(folder / "sentence_bert_config.json")
    if limit is not None:
        config["text_limit"] = limit
    folders = [each["folder"] for each in config["modules"] if each["kind"] == "dense"]
    sources = {name: open_checkpoint(registry, folder / name).weights for name in folders}
    weights = JoinedSource(checkpoint.weights, sources) if sources else checkpoint.weights
    return replace(checkpoint, config=config, weights=weights)


_KINDS = ("pooling", "dense", "normalize")
_COLBERT = "HF_ColBERT"


def _colbert(checkpoint: Checkpoint) -> dict[str, Any]:
    """The one dense layer of Stanford's ColBERT, which has no modules.json."""
    rows, cols = checkpoint.weights.part("linear.weight").shape
    sizes = {"in": cols, "out": rows, "bias": False}
    return {"kind": "dense", "folder": "", "activation": "identity", **sizes}


def _text_limit(path: Path) -> int | None:
    """Reads the `max_seq_length` of a file, if it has one."""
    settings = _read(path)
    limit = settings.get("max_seq_length") if isinstance(settings, dict) else None
    if limit is not None and (type(limit) is not int or limit < 1):
        raise WeightFormatError(
            f"{path}: max_seq_length = {shown(limit)} must be a whole number of tokens above 0"
        )
    return limit


def _module(folder: Path, listed: Any) -> dict[str, Any]:
    if not isinstance(listed, dict):
        raise WeightFormatError(f"{folder / 'modules.json'} has an entry that is not an object")
    path, kind = str(listed.get("path", "")), str(listed.get("type", "")).rsplit(".", 1)[-1]
    is_within = not Path(path).is_absolute() and ".." not in Path(path).parts
    if not is_within or not path.isprintable() or len(path) > _MAX_PATH:
        raise WeightFormatError(
            f"{folder / 'modules.json'} names {shown(path)}, outside the folder or no name of one"
        )
    config = _read(folder / path / "config.json") if path else None
    settings = config if isinstance(config, dict) else {}
    match kind:
        case "Transformer" if path == "":
            return {"kind": "transformer"}
        case "Normalize":
            return {"kind": "normalize"}
        case "Pooling":
            return {"kind": "pooling", "pooling": _pooling(folder / path, settings)}
        case "MLMTransformer" if path == "":
            return {"kind": "transformer"}
        case "SpladePooling":
            return _splade(folder / path, settings)
        case "Dense":
            return _dense(folder / path, path, settings)
        case "LogitScore":
            tokens = [settings.get("false_token_id"), settings.get("true_token_id")]
            return {"kind": "score", "tokens": tokens}
    raise UnsupportedModelError(
        f"{folder / 'modules.json'} has the module {shown(kind)} at {shown(path)}, which vllmx does"
        " not run: choose a model of transformer, pooling, dense and normalize modules"
    )


def _pooling(folder: Path, settings: Mapping[str, Any]) -> str:
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _POOLING or settings.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{folder} pools by {', '.join(map(shown, modes)) or 'nothing'}: vllmx takes the first"
            " token, the last one, or the mean of all with the prompt among them"
        )
    return _POOLING[modes[0]]


def _splade(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    strategy, function = (settings.get(key) for key in ("pooling_strategy", "activation_function"))
    if strategy not in (None, "max") or function not in (None, "relu"):
        raise UnsupportedModelError(
            f"{folder} makes sparse vectors by {shown(strategy)} and {shown(function)}: vllmx has"
            " max and relu"
        )
    return {"kind": "transformer"}


def _dense(folder: Path, path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    name = str(settings.get("activation_function", "Identity")).rsplit(".", 1)[-1]
    sizes = [settings.get("in_features"), settings.get("out_features")]
    if settings.get("use_residual"):
        raise UnsupportedModelError(f"{folder} is a dense layer with a residual, use_residual")
    if name not in _ACTIVATIONS or not all(type(n) is int and 0 < n < 1 << 20 for n in sizes):
        raise UnsupportedModelError(f"{folder} is a dense layer {shown(sizes)} with {shown(name)}")
    bias = settings.get("bias", True) is not False
    return {
        "kind": "dense",
        "folder": path,
        "in": sizes[0],
        "out": sizes[1],
        "bias": bias,
        "activation": _ACTIVATIONS[name],
    }


def _read(path: Path) -> Any:
    """None where there is no such file."""
    try:
        with open_model_file(path) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise WeightFormatError(f"{path} is larger than {_MAX_BYTES} bytes: download it again")
        return json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise WeightFormatError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightFormatError(f"{path} is not valid JSON: download it again") from error


class JoinedSource(Record):
    """A `WeightSource` with the tensors of others under prefixes of their own."""

    main: WeightSource
    others: Mapping[str, WeightSource]

    def names(self) -> Collection[str]:
        more = (f"{name}.{one}" for name, source in self.others.items() for one in source.names())
        return {*self.main.names(), *more}

    def part(self, name: str) -> WeightPart:
        for prefix, source in self.others.items():
            if name.startswith(f"{prefix}."):
                return source.part(name.removeprefix(f"{prefix}."))
        return self.main.part(name)

    def close(self) -> None:
        for source in (self.main, *self.others.values()):
            source.close()
