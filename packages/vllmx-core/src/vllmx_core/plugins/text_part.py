"""The text model inside a multimodal checkpoint whose class no plugin serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import UnsupportedModelError, WeightFormatError, listing, shown
from vllmx_core.plugins.registry import Registry, architecture_names

if TYPE_CHECKING:
    from vllmx_core.plugins.specs import ModelSpec
    from vllmx_core.weights.part import WeightPart, WeightSource

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys that hold the text model's config, or one that holds it in turn."""
_PARTS = ("vision_config", "audio_config")
"""Keys that mark a config whose text model is at the top level."""
_OUTER = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
    "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
"""Keys that apply to the text model unless it has its own."""
_NOT_CAUSAL = ("paligemma", "PaliGemmaForConditionalGeneration")
"""Model type and class whose prompt tokens attend to each other in both directions."""
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_LAYERS = ("layers.", "blocks.", "encoder.layers.")
"""Modules of the layers; all but the first occur where transformers saved the checkpoint."""
_HEAD = "lm_head."
_SPEECH = "talker."
"""Prefix of the model that answers in sound, behind the one that answers in text."""


def text_config(registry: Registry, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the text model with its class in `architectures`; None if a plugin serves the
    whole class around this text model, or none serves the text model. Raises UnsupportedModelError
    for a text model that is not causal."""
    names, inner = architecture_names(dict(config)), _inner(config)
    whole = next(filter(None, map(registry.find_model, names)), None)
    if whole is not None and _fits(whole, inner):
        return None
    if inner is None and not (names and any(config.get(key) for key in _PARTS)):
        return None
    text = _merged(config, inner)
    spec = _served(registry, text)
    if spec is None:
        return None
    if {config.get("model_type"), *names}.intersection(_NOT_CAUSAL):
        raise UnsupportedModelError(
            f"{listing(names) or shown(config['model_type'])} attends in both directions within its"
            " prompt, which is not served: load a model with causal attention"
        )
    defaults = spec.text_types.get(str(text.get("model_type")), {})
    text = {**defaults, **text, **_without_axes(text)}
    return {**text, "architectures": [spec.architectures[0]]}


def _fits(whole: ModelSpec, inner: Mapping[str, Any] | None) -> bool:
    kind = None if inner is None else inner.get("model_type")
    return kind is None or not whole.around or kind in whole.around


def _without_axes(text: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE options without axes of images, whose positions are equal for text."""
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if isinstance(given, Mapping):
            rest = {name: value for name, value in given.items() if "mrope" not in name}
            kinds = {name: "default" for name in ("type", "rope_type") if rest.get(name) == "mrope"}
            found[key] = {**rest, **kinds}
    return found


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    if found is None:
        return None
    return _inner(found) or found


def _merged(config: Mapping[str, Any], inner: Mapping[str, Any] | None) -> dict[str, Any]:
    if inner is None:
        kept = ("quantization_config",)
        return {k: v for k, v in config.items() if k in kept or not k.endswith("_config")}
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    given = {key: value for key, value in inner.items() if value is not None}
    return {**outer, **given}


def _served(registry: Registry, text: dict[str, Any]) -> ModelSpec | None:
    """The text model's spec: by its class, else by its model type."""
    model_type = text.get("model_type")
    claims = (text, {"model_type": model_type})
    found = (registry.find_model_for(one) for one in claims)
    return next(filter(None, found), None) or registry.find_text_part(str(model_type))


class TextWeights:
    """A `WeightSource` with the text model's tensors of a larger checkpoint, under the names that
    they have in a checkpoint of their own."""

    def __init__(self, source: WeightSource) -> None:
        """Raises WeightFormatError if no prefix of names, or more than one, has a text model."""
        self._source = source
        names = source.names()
        prefix, layers = _places(names)
        ours = "backbone." if prefix.endswith("backbone.") else "model."
        self._stored = {
            f"{ours}layers.": prefix + layers,
            ours: prefix,
            _HEAD: _head(names, prefix),
        }
        self._names = {
            mine + name.removeprefix(theirs)
            for mine, theirs in self._stored.items()
            for name in names
            if name.startswith(theirs)
        }

    def names(self) -> Collection[str]:
        """The names of the text model's tensors."""
        return self._names

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError, with the nearest names, when `name` is missing."""
        for ours, theirs in self._stored.items():
            if name.startswith(ours):
                return self._source.part(theirs + name.removeprefix(ours))
        return self._source.part(name)

    def close(self) -> None:
        """Closes the whole checkpoint."""
        self._source.close()


def _places(names: Collection[str]) -> tuple[str, str]:
    """The prefix of names with both token embeddings and layers, and the module of the layers."""
    embedded = {
        name.removesuffix(end) for name in names for end in _EMBEDDINGS if name.endswith(end)
    }
    found = [
        (prefix, module)
        for prefix in sorted(embedded)
        for module in _LAYERS
        if any(name.startswith(f"{prefix}{module}0.") for name in names)
    ]
    spoken = [one for one in found if not one[0].startswith(_SPEECH)]
    if len(spoken) != 1:
        prefixes = listing([prefix for prefix, _ in spoken]) or "none"
        raise WeightFormatError(
            "the checkpoint's text model cannot be found: one prefix with token embeddings and"
            f" layers is expected, found: {prefixes}"
        )
    return spoken[0]


def _head(names: Collection[str], prefix: str) -> str:
    """The prefix of the head's tensors: next to the text model, or further out."""
    parts = prefix.split(".")[:-1]
    outwards = (".".join((*parts[:count], _HEAD)) for count in range(len(parts), -1, -1))
    return next((one for one in outwards if any(n.startswith(one) for n in names)), _HEAD)
