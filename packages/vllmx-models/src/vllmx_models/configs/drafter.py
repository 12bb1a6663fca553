"""Reads the config.json of drafters, as `speculators` writes them and as their authors do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.model import DraftSpec

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
    sliding_layers,
)
from vllmx_models.configs.text import text_config
from vllmx_models.trunks.decoder import DecoderSpec, ModelNames

_TARGET, _LAYERS, _METHOD = "target_config", "transformer_layer_config", "speculators_model_type"
_POSITIONS = 32768
_NAMES = ModelNames("embed_tokens", "layers", "norm", "lm_head")
_OF_TARGET = {
    "num_target_layers": "num_hidden_layers",
    "target_hidden_size": "hidden_size",
    "hidden_size": "hidden_size",
}
"""Keys of a drafter that must have the value of the target's key."""


class DrafterConfig:
    """A drafter's config with that of its target, in one form for all authors.

    Raises:
        UnsupportedModelError: it is of another kind than `method`, or for another target.
    """

    def __init__(self, config: Mapping[str, Any], architecture: str, method: str) -> None:
        outer = ConfigReader(config, architecture)
        target = text_config(target_config(outer), {})
        if config.get(_METHOD, method) != method:
            raise outer.error(_METHOD, f"is not served; {method} is")
        inner = outer.part(_LAYERS).config
        own = {**target_dtype(target), "num_hidden_layers": 1, **inner, **config}
        if inner:
            own["model_type"] = inner.get("model_type")
        self.read = ConfigReader(own, architecture)
        self.num_target_layers = ConfigReader(target, "target").integer("num_hidden_layers")
        for key, theirs in _OF_TARGET.items():
            if self.read.has(key) and own[key] != target.get(theirs, own[key]):
                raise self.read.error(
                    key, f"does not fit the model, whose {theirs} is {target[theirs]}"
                )

    def refuse(self, *keys: str) -> None:
        """Raises UnsupportedModelError if one of these flags is set."""
        for key in keys:
            if self.read.flag(key, False):
                raise self.read.error(key, "is not served yet")

    @property
    def num_ids(self) -> int:
        """Ids that it drafts."""
        whole = self.read.integer("vocab_size")
        return self.read.integer("draft_vocab_size", whole, high=whole)

    def draft_spec(self, points: Sequence[int], **options: Any) -> DraftSpec:
        """A drafter that reads the target's hidden states at these points."""
        last = self.num_target_layers
        if not points or len({*points} & {*range(last + 1)}) < len(points):
            raise UnsupportedModelError(
                f"the drafter reads hidden states after the layers {list(points)}, which must be"
                f" distinct and at most {last} in this model: choose its drafter"
            )
        size = self.read.integer("hidden_size")
        return DraftSpec(tuple(points), (size,), size, **options)

    def decoder(self, *honoured: str, qk_norm: bool) -> DecoderSpec:
        """The layers as those of a decoder, which honours further keys than biases and windows."""
        read = self.read
        windows = ("layer_types", "sliding_window", "use_sliding_window")
        read.refuse_quirks("attention_bias", "mlp_bias", *windows, *honoured)
        bias, default = read.flag("attention_bias", False), 128 if qk_norm else None
        mixer = attention_mixer(
            read,
            head_size(read, default),
            qk_norm=rms(read) if qk_norm else None,
            qkv_bias=bias,
            o_bias=bias,
            interleaved=not read.flag("is_neox_style", True),
        )
        sliding = sliding_layers(read, [False] * num_layers(read))
        window = read.integer("sliding_window", high=1 << 31) if any(sliding) else None
        ropes = layer_ropes(read, mixer.head_size, sliding, default_positions=_POSITIONS)
        mlp = dense_mlp(read, bias=read.flag("mlp_bias", False))
        layers = layer_specs(read, mixer, mlp, ropes, sliding, window)
        spec = decoder_spec(read, layers, default_positions=_POSITIONS, names=_NAMES)
        return replace(spec, tied_embeddings=False)


def target_config(read: ConfigReader) -> Mapping[str, Any]:
    """The config of a drafter's target. Raises UnsupportedModelError for a drafter alone."""
    if not read.has(_TARGET):
        verifier = read.part("speculators_config").part("verifier").config
        raise UnsupportedModelError(
            f"this is a drafter ({read.architecture}), which answers nothing by itself: serve"
            f" {shown(verifier.get('name_or_path') or 'TARGET')} with --speculate model:DRAFTER"
        )
    found: Mapping[str, Any] = read.config[_TARGET]
    return found


def layer_ids(read: ConfigReader, key: str, offset: int = 0) -> list[int]:
    """A list of layers, each `offset` higher; empty without the key."""
    value = read.config.get(key) or ()
    return [one + offset for one in read.integers(key, len(value))] if value else []


def target_dtype(target: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a target's dtype, for drafters without one."""
    return {key: target[key] for key in ("dtype", "torch_dtype") if target.get(key)}
