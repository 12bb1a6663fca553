"""Checkpoint tensors that make up each tensor of a GGUF file: one tensor, or a layer's experts or
heads, which checkpoints store in many ways."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.records import Record
from vllmx_core.weights.map import bias_parts, parts_of, resolved
from vllmx_core.weights.part import WeightPart, WeightSource, dense_part
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.layer import FeedForward, LayerNames, renamed_part
from vllmx_models.blocks.moe import MoE
from vllmx_models.formats.gguf.places import ONE_ROW, split_name
from vllmx_models.formats.gguf.quantize.encoders import float_rows
from vllmx_models.formats.gguf.quantize.header import Target
from vllmx_models.formats.gguf.quantize.losses import of_tensors
from vllmx_models.formats.gguf.quantize.recurrent import in_file, joined
from vllmx_models.formats.gguf.tower_weights import one_below_the_other

_EXPERTS = {
    "blk.{}.ffn_gate_exps": "gate",
    "blk.{}.ffn_up_exps": "up",
    "blk.{}.ffn_down_exps": "down",
}
_HEADS = {"blk.{}.attn_k_b": 0, "blk.{}.attn_v_b": 1}
_ALL_HEADS = "blk.{}.attn_kv_b"
"""Both of `_HEADS` in one tensor, as in older files."""
_TOWER = "model.visual."
"""The prefix of Qwen's tower; the text model's is `model.`."""
_WHOLE = ("scale", "ssm_a", "ssm_d")
"""Names of tensors that are neither a weight nor a bias."""
_PREDICTION = "mtp."
"""The prefix of multi-token prediction in checkpoints with a separate module for it."""
_DENSE = {"blk.{}.ffn_gate": 0, "blk.{}.ffn_up": 1, "blk.{}.ffn_down": None}
_SHARED = {"blk.{}.ffn_gate_shexp": 0, "blk.{}.ffn_up_shexp": 1, "blk.{}.ffn_down_shexp": None}
"""The index of a tensor among the parts of a feed-forward's first matrix; None: the second matrix.
"""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Origin(Record):
    """A tensor of the checkpoint, or a part of it."""

    name: str
    """The name in the checkpoint."""
    open: Callable[[WeightSource], WeightPart]


def shape_of(target: Target, name: str, parts: Sequence[WeightPart]) -> tuple[int, ...]:
    """The shape of a tensor in the file. Raises WeightFormatError for experts of unequal shape."""
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise WeightFormatError(
            f"experts of {parts[0].name!r} have the shapes {sorted(shapes)}: the checkpoint is"
            " damaged"
        )
    (shape,) = shapes
    if is_stack(target, name):
        return (len(parts), *shape)
    return shape[1:] if split_name(name)[0] in ONE_ROW else shape


def is_stack(target: Target, name: str) -> bool:
    pattern, _, suffix = split_name(name)
    return target.table.name_of(pattern, suffix).count("{}") == 2


def stacked_rows(parts: Sequence[WeightPart], begin: int, end: int) -> RawTensor:
    """The concatenated rows of whole matrices of a stack."""
    pieces = [float_rows(part, 0, part.shape[0]) for part in parts[begin:end]]
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(piece.dtype != first.dtype for piece in pieces):
        raise WeightFormatError(f"tensor {first.name!r} has another type than its neighbours")
    rows = sum(piece.shape[0] for piece in pieces)
    stored = np.concatenate([piece.data for piece in pieces])
    return replace(first, shape=(rows, *first.shape[1:]), stored=stored)


def as_vector(part: WeightPart) -> WeightPart:
    """A matrix of one row as a vector."""
    if len(part.shape) == 1:
        return part
    return dense_part(part.name, part.dequantize().reshape(-1))


def origins_of(
    target: Target, checkpoint: Checkpoint
) -> tuple[dict[str, tuple[Origin, ...]], tuple[str, ...]]:
    """(name in the file -> where it comes from, in the order of the layers: one tensor, or those of
    a layer's experts or heads; a line for each kind of tensor that the file lacks)."""
    found: dict[str, tuple[Origin, ...]] = {}
    source = checkpoint.weights
    layers = range(len(target.layers))
    for pattern in target.table.tensors:
        stem, suffixes = _suffixes(pattern)
        for layer in layers if "{}" in pattern else [0]:
            for suffix in suffixes:
                origins = _found(target, stem, suffix, layer, source)
                if origins:
                    found[stem.format(layer) + suffix] = origins
    used = {origin.name for origins in found.values() for origin in origins}
    passed = _passed(target, checkpoint, set(source.names()) - used)
    for layer in layers:  # in one form or the other
        if f"{next(iter(_HEADS)).format(layer)}.weight" in found:
            found.pop(f"{_ALL_HEADS.format(layer)}.weight", None)
    if target.spec.tied_embeddings:
        head = found.pop("output.weight", ())
        found.setdefault("token_embd.weight", head)
    return dict(sorted(found.items(), key=lambda pair: _order(pair[0]))), passed


def _suffixes(pattern: str) -> tuple[str, tuple[str, ...]]:
    """A name in a table without its suffix, and the suffixes that it may have."""
    stem, _, end = pattern.rpartition(".")
    if end in ("weight", "bias"):
        return stem, (f".{end}",)
    return pattern, ("",) if end in _WHOLE else (".weight", ".bias")


def _passed(target: Target, checkpoint: Checkpoint, unused: Collection[str]) -> tuple[str, ...]:
    """Lines for tensors of towers and of multi-token prediction, which the file lacks. Raises
    UnsupportedModelError if it would lack another tensor."""
    names = target.spec.names
    texts = () if names.also is None else (*names.also, names.head)
    strange: list[str] = []
    towers: list[str] = []
    predicting: list[str] = []
    for name in sorted(unused):
        layer, count = _LAYER.search(name), len(target.spec.layers)
        of_tower = bool(texts) and (name.startswith(_TOWER) or not name.startswith(texts))
        predicts = name.startswith(_PREDICTION) or (layer is not None and int(layer[1]) >= count)
        if of_tower or predicts:
            (predicting if predicts else towers).append(name)
        elif not name.endswith(".rotary_emb.inv_freq"):
            strange.append(name)
    if strange:
        raise UnsupportedModelError(
            f"{checkpoint.path} has a tensor {strange[0]!r}, which the GGUF architecture"
            f" {target.name!r} has no name for"
        )
    return tuple(of_tensors(towers, predicting))


def _found(
    target: Target, pattern: str, suffix: str, layer: int, source: WeightSource
) -> tuple[Origin, ...]:
    """The origins of a tensor if the checkpoint has all of them; otherwise none."""
    original, block = target.table.name_of(pattern, suffix), target.layers[layer]
    if pattern in target.table.read_only or not _has(block.feed_forward, pattern):
        return ()
    if original.count("{}") < 2:
        names = _spelled(target, original.format(layer))
        name = next((name for name in names if name in source.names()), None)
        if name is None:
            origin = _within(target, pattern, suffix, layer, source)
        else:
            origin = _whole(name)
        return () if origin is None else (_made(target, pattern, layer, origin),)
    origins = _picked(target, pattern, suffix, layer, source)
    missing = [one.name for one in origins if one.name not in source.names()]
    if missing and len(missing) < len(origins):
        raise WeightFormatError(f"the checkpoint has no tensor {missing[0]!r}: it is incomplete")
    return () if missing else tuple(origins)


def _whole(name: str) -> Origin:
    return Origin(name, lambda source: source.part(name))


def _made(target: Target, pattern: str, layer: int, origin: Origin) -> Origin:
    """Adds the conversion from the checkpoint's form to the file's."""
    return Origin(origin.name, lambda source: in_file(target, pattern, layer, origin.open(source)))


def _has(feed_forward: FeedForward | None, pattern: str) -> bool:
    """True if a layer may have such a tensor: some files name shared weights differently in layers
    with and without experts."""
    if isinstance(feed_forward, MoE):
        return pattern not in _DENSE
    return pattern not in _SHARED


def _within(
    target: Target, pattern: str, suffix: str, layer: int, source: WeightSource
) -> Origin | None:
    """Rows of a larger matrix of the checkpoint: of queries, keys, values and gates of a delta
    net, or of a feed-forward's gate and the rest of its first matrix."""
    names = source.names()
    if suffix != ".weight":
        return None
    spec = joined(target, pattern, layer, names.__contains__)
    if spec is not None:
        first = resolved(source, spec.parts[0]).name
        return Origin(first, lambda source: one_below_the_other(first, parts_of(spec, source)))
    feed_forward = target.layers[layer].feed_forward
    dense = feed_forward.shared if isinstance(feed_forward, MoE) else feed_forward
    role = (_SHARED if isinstance(feed_forward, MoE) else _DENSE).get(pattern)
    if role is None or not isinstance(dense, DenseMLP) or dense.names.gate_up is None:
        return None
    where = LayerNames("", target.module_of(layer), target.spec.hidden_size)
    part = dense.weights(where)[0].parts[role]
    if part.name not in names:
        return None
    return _pick(target, part, where.hidden_size, suffix, source)


def _spelled(target: Target, name: str) -> list[str]:
    """Spellings of a name of the text model, which has a prefix in checkpoints of larger models, or
    of a name of its heads."""
    names = target.spec.names
    if target.heads is not None and f".layers.{len(target.spec.layers)}." in name:
        return target.heads.spellings(name)
    if names.also is None:
        return [name]
    if name.startswith("lm_head"):
        return [names.head + name.removeprefix("lm_head"), name]
    prefix = next((one for one in ("model.", names.also[0]) if name.startswith(one)), None)
    return [name] if prefix is None else [one + name.removeprefix(prefix) for one in names.also]


def _picked(
    target: Target, pattern: str, suffix: str, layer: int, source: WeightSource
) -> list[Origin]:
    """The matrices, biases or norms of a layer's experts or heads, in any form of checkpoint."""
    block = target.layers[layer]
    theirs = target.module_of(layer)
    if pattern in _HEADS and isinstance(block.mixer, LatentMixer):
        if suffix == ".bias":
            return []
        mixer, which = block.mixer, _HEADS[pattern]
        cols = (mixer.nope_size, mixer.rank)[which]
        heads = (
            mixer.head_parts(f"{theirs}.self_attn", head)[which] for head in range(mixer.num_heads)
        )
        return [_pick(target, part, cols, suffix, source) for part in heads]
    if pattern not in _EXPERTS:  # norms of heads, each a tensor of its own
        original = target.table.name_of(pattern, suffix)
        numbered = (original.format(layer, number) for number in itertools.count())
        return [_whole(name) for name in itertools.takewhile(source.names().__contains__, numbered)]
    if not isinstance(block.feed_forward, MoE):
        return []
    moe, role = block.feed_forward, _EXPERTS[pattern]
    module = f"{theirs}.{moe.module}"
    hidden = target.spec.hidden_size if moe.latent is None else moe.latent.size
    if role == "down":
        cols = moe.intermediate_size
        parts = [moe.tensors.down(module, expert, hidden)[0] for expert in range(moe.count)]
    else:
        cols, rows = hidden, moe.intermediate_size
        firsts = (moe.tensors.first(module, expert, rows) for expert in range(moe.count))
        parts = [first[-1 if role == "up" else 0] for first in firsts]
    if suffix == ".bias" and any(part.bias is None for part in parts):
        return []
    return [_pick(target, part, cols, suffix, source) for part in parts]


def _pick(target: Target, part: PartSpec, cols: int, suffix: str, source: WeightSource) -> Origin:
    if target.spec.names.also is not None:
        part = renamed_part(part, *target.spec.names.also)
    if target.heads is not None:
        part = target.heads.renamed(part)
    found = resolved(source, part)
    spec = WeightSpec(found.name, "linear", (found,), cols)
    if suffix == ".bias":
        assert found.bias is not None
        return Origin(found.bias, partial(_bias, spec))
    return Origin(found.name, lambda source: parts_of(spec, source)[0])


def _bias(spec: WeightSpec, source: WeightSource) -> WeightPart:
    (part,) = bias_parts(spec, source)
    assert part is not None
    return part


def _order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[1]) if parts[0] == "blk" else -1, name)
