"""Checks that a new file's metadata describe the same model; traits that the format cannot express
are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.plugins.registry import Registry

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import EachExpert, MoE
from vllmx_models.blocks.per_layer import PerLayerInput
from vllmx_models.blocks.recurrent import DeltaMixer, DeltaNames
from vllmx_models.blocks.rope import Rope, still
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.quantize.header import Target
from vllmx_models.formats.gguf.quantize.writer import NewTensor
from vllmx_models.trunks.decoder import DecoderSpec, LayerSpec


def check(registry: Registry, target: Target, tensors: Sequence[NewTensor], path: Path) -> None:
    """Reads the metadata back. Raises UnsupportedModelError if they describe another model."""
    header = GGUFHeader(
        path,
        target.name,
        target.metadata,
        {tensor.name: tensor.info for tensor in tensors},
        target.extra.__getitem__,
    )
    config = {
        "architectures": [target.table.architecture],
        "vocab_size": target.spec.vocab_size,
        "tie_word_embeddings": target.spec.tied_embeddings,
        "torch_dtype": "bfloat16",  # unused: each tensor has its own
        **target.table.config(header),
    }
    found = registry.model_for(config).load()(config).spec
    wanted = replace(target.spec, dtype=found.dtype, names=found.names, prediction=found.prediction)
    for name in (field.name for field in fields(DecoderSpec)):
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours != theirs and not (name == "layers" and _same_layers(wanted, found)):
            where, mine, other = _difference(name, ours, theirs)
            raise UnsupportedModelError(
                f"the GGUF architecture {target.name!r} cannot state {where} = {shown(mine)} of"
                f" this model; a reader would take {shown(other)}"
            )


def _difference(name: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Finds the first field in which two descriptions differ, and both values."""
    if isinstance(ours, LayerSpec) and isinstance(theirs, LayerSpec):
        ours, theirs = plain(ours), plain(theirs)
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        both = enumerate(zip(ours, theirs, strict=True))
        pairs = [(f"{name}[{number}]", one, other) for number, (one, other) in both]
    elif is_dataclass(ours) and type(ours) is type(theirs):
        names = [field.name for field in fields(ours)]
        pairs = [(f"{name}.{each}", getattr(ours, each), getattr(theirs, each)) for each in names]
    found = (_difference(*pair) for pair in pairs if pair[1] != pair[2])
    return next((one for one in found if one[1] != one[2]), (name, ours, theirs))


def _same_layers(one: DecoderSpec, other: DecoderSpec) -> bool:
    """True if all layers are equal, their tables compared by value."""
    if len(one.layers) != len(other.layers):
        return False
    pairs = list(zip(one.layers, other.layers, strict=True))
    if any(plain(a) != plain(b) for a, b in pairs):
        return False
    mixers = list(zip(one.mixers, other.mixers, strict=True))
    ropes = {(str(a.rope), str(b.rope)): (a.rope, b.rope) for a, b in mixers}
    return all(a.cache == b.cache for a, b in mixers) and all(
        a is b is None or (a is not None and b is not None and _same_table(one, a, b))
        for a, b in ropes.values()
    )


def plain(layer: LayerSpec) -> LayerSpec:
    """A layer without RoPE and window, which are compared separately, and without the names and
    forms of a checkpoint's tensors."""
    extra = layer.extra
    if isinstance(extra, PerLayerInput):
        extra = replace(extra, model="")
    return replace(
        layer, mixer=_mixer(layer.mixer), feed_forward=_feed(layer.feed_forward), extra=extra
    )


def _mixer(mixer: Mixer | None) -> Mixer | None:
    if isinstance(mixer, AttentionMixer):
        return replace(mixer, rope=None, window=None)
    if isinstance(mixer, DeltaMixer):
        return replace(mixer, tiled=False, names=DeltaNames())
    if isinstance(mixer, LatentMixer):
        return replace(mixer, rope=still(mixer.rope.rotary_dim, 1), cut_heads=False)
    return mixer


def _feed(feed_forward: FeedForward | None) -> FeedForward | None:
    if isinstance(feed_forward, DenseMLP):
        return replace(feed_forward, names=MLPNames())
    if not isinstance(feed_forward, MoE):
        return feed_forward
    biased = feed_forward.tensors.down("", 0, 1)[0].bias is not None
    shared = feed_forward.shared
    return replace(
        feed_forward,
        tensors=EachExpert(bias=biased),
        shared=None if shared is None else replace(shared, names=MLPNames()),
        module="",
    )


def _same_table(spec: DecoderSpec, one: Rope, other: Rope) -> bool:
    first, second = (rope.frequencies(spec.max_model_len) for rope in (one, other))
    return (
        len(first[0]) == len(second[0])
        and np.allclose(first[0], second[0], rtol=1e-5, atol=0)
        and abs(first[1] - second[1]) < 1e-5
    )
