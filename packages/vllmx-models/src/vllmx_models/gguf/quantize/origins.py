"""Which tensors of a checkpoint become a tensor of a GGUF file: one, or a layer's experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from vllmx_core.checkpoint import Checkpoint
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.weights import DENSE, RawTensor, WeightPart

from vllmx_models.encoders import float_rows
from vllmx_models.gguf.places import ONE_ROW, split_name
from vllmx_models.gguf.quantize.header import Target


def shape_of(target: Target, name: str, parts: Sequence[WeightPart]) -> tuple[int, ...]:
    """Of a tensor in the file. Raises WeightFormatError for experts of unequal shape."""
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
    """Whole matrices of a stack, one below the other."""
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
    """A matrix of one row as a file has it."""
    if len(part.shape) == 1:
        return part
    values = part.dequantize().reshape(-1)
    raw = RawTensor(part.name, "f32", values.shape, values.view(np.uint8))
    return WeightPart(part.name, values.shape, DENSE, {"weight": raw})


def origins_of(target: Target, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Name in the file -> names in the checkpoint, in the order of the layers: one, or those of a
    layer's experts."""
    names: dict[str, tuple[str, ...]] = {}
    present = set(checkpoint.weights.names())
    layers = range(len(target.spec.layers))
    for pattern in target.table.tensors:
        stem, _, end = pattern.rpartition(".")
        whole = end in ("weight", "bias")
        for layer in layers if "{}" in pattern else [0]:
            for suffix in (f".{end}",) if whole else (".weight", ".bias"):
                found = _found(target, stem if whole else pattern, suffix, layer, present)
                if found:
                    name = (stem if whole else pattern).format(layer) + suffix
                    names[name] = found
    unused = present.difference(*names.values())
    if target.spec.tied_embeddings:
        names.pop("output.weight", None)
    strange = sorted(name for name in unused if not name.endswith(".rotary_emb.inv_freq"))
    if strange:
        raise UnsupportedModelError(
            f"{checkpoint.path} has a tensor {strange[0]!r}, which the GGUF architecture"
            f" {target.name!r} has no name for"
        )
    return dict(sorted(names.items(), key=lambda pair: _order(pair[0])))


def _found(
    target: Target, pattern: str, suffix: str, layer: int, present: Collection[str]
) -> tuple[str, ...]:
    """Those of a tensor's origins that are there: all of them, or none."""
    original = target.table.name_of(pattern, suffix)
    if original.count("{}") < 2:
        name = original.format(layer)
        return (name,) if name in present else ()
    names = [original.format(layer, expert) for expert in range(target.experts)]
    missing = [name for name in names if name not in present]
    if missing and len(missing) < len(names):
        raise WeightFormatError(f"the checkpoint has no tensor {missing[0]!r}: it is incomplete")
    return () if missing else tuple(names)


def _order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[1]) if parts[0] == "blk" else -1, name)
