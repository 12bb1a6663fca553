"""The tensors that a checkpoint must have for a weight map, as far as the map tells."""

from __future__ import annotations

from collections.abc import Iterator

from vllmx_core.model import Model
from vllmx_core.weights.spec import PartSpec, WeightSpec

Shape = tuple[int, ...]


def tensor_shapes(model: Model) -> dict[str, Shape]:
    """Checkpoint name -> shape; of a tensor that the map picks from, the smallest that has all that
    is picked. Raises AssertionError when two lines of the map disagree."""
    shapes: dict[str, Shape] = {}
    whole: dict[str, Shape] = {}
    for spec in model.weights():
        for part in spec.parts:
            for name, shape in _needed(spec, part):
                known = shapes.setdefault(name, shape)
                assert len(known) == len(shape), f"{name}: {shape}, {known}"
                shapes[name] = tuple(map(max, known, shape))
                if not _picks(part):
                    whole.setdefault(name, shape)
    for name, shape in whole.items():
        assert shapes[name] == shape, f"{name}: {shape}, {shapes[name]}"
    return shapes


def _picks(part: PartSpec) -> bool:
    return part.entry is not None or part.runs is not None or part.first_col is not None


def _needed(spec: WeightSpec, part: PartSpec) -> Iterator[tuple[str, Shape]]:
    if spec.shape is not None:
        yield part.name, spec.shape
        return
    picked, cols = (spec.cols, part.rows) if part.turned else (part.rows, spec.cols)
    rows = picked if part.runs is None else int(part.runs.index(picked).max()) + 1
    lead = () if part.entry is None else (part.entry + 1,)
    cols += part.first_col or 0
    matrix = (cols, rows) if part.transposed else (rows, cols)
    yield part.name, (*lead, *((rows,) if spec.kind == "vector" else matrix))
    if part.bias is not None:
        yield part.bias, (*lead, rows)
