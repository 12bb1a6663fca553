"""Places where a recorded step can be cut into stages, and the choice among them.

A place is a position in the list of ops. Between two layers, only the residual stream and values to
be added to it cross a cut, all equally wide; inside a layer more or other values cross it. So
between two mixers the place is one where only values as wide as the stream cross, if there is one,
otherwise the one where least crosses. All values that cross must be features of tokens, no layer
after the cut may read pages or states of one before it, and places that pass much more than the
narrowest one are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from vllmx_core.errors import ConfigError
from vllmx_core.model import ModelShape, SharedKV
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value
from vllmx_core.ops.vocab_embedding import VocabEmbedding
from vllmx_core.records import Record

_AS_NARROW = 1.25
"""Places may pass this many times the features of the narrowest one."""

Home = tuple[str, int]
"""Pages or states that ops have in common: ("layer", number) or ("state", number)."""


def homes_of(op: Op) -> tuple[Home, ...]:
    """The pages and states that an op reads and writes, by the model's numbers."""
    spec = getattr(op, "spec", None)
    numbers = ((kind, getattr(spec, kind, None)) for kind in ("layer", "state"))
    return tuple((kind, number) for kind, number in numbers if number is not None)


class Cut(Record):
    """A place: stages end before op `index` and begin with it."""

    index: int
    crossing: tuple[Value, ...]
    """Values written before the cut and read after it, in order of writing."""

    @property
    def width(self) -> int:
        """Numbers of a token that cross it."""
        return sum(value.width for value in self.crossing)


def places(steps: OpList, shape: ModelShape) -> list[Cut]:
    ops = steps.ops
    mixers = [index for index, op in enumerate(ops) if homes_of(op)]
    crossing = _crossing(steps)
    held = _held(ops, shape)
    tables = (op for op in ops if isinstance(op, Embedding | VocabEmbedding))
    stream = next((op.out.width for op in tables), 0)
    begun = _layers_begun(ops)
    found = []
    for before, after in pairwise(mixers):
        fitting = [
            Cut(index, crossing[index])
            for index in range(before + 1, after + 1)
            if not any(first < index <= last for first, last in held)
            and all((one.rows, one.dtype) == ("T", "model") for one in crossing[index])
        ]
        between = [
            cut
            for cut in fitting
            if begun[cut.index] < begun[after] and {one.width for one in cut.crossing} == {stream}
        ]
        if fitting:
            found.append(min(reversed(between or fitting), key=lambda cut: cut.width))
    most = _AS_NARROW * min((cut.width for cut in found), default=0)
    return [cut for cut in found if cut.width <= most]


def own_cut(steps: OpList, cut: Cut) -> Cut:
    """Converts a place of another rank's part to this rank's part, which has the same ops."""
    return Cut(cut.index, _crossing(steps)[cut.index])


def _crossing(steps: OpList) -> list[tuple[Value, ...]]:
    """The values alive before each op."""
    last = {value: index for index, op in enumerate(steps.ops) for value in op.reads}
    last[steps.logits] = len(steps.ops)
    alive: dict[Value, int] = {}
    found = []
    for index, op in enumerate(steps.ops):
        alive = {value: end for value, end in alive.items() if end >= index}
        found.append(tuple(alive))
        alive |= {value: last[value] for value in op.writes if value in last}
    return found


def _held(ops: Sequence[Op], shape: ModelShape) -> list[tuple[int, int]]:
    """(first, last) op of each home, between which no cut may be."""
    spans: dict[Home, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        for home in homes_of(op):
            spec = shape.caches[home[1]] if home[0] == "layer" else None
            owner = ("layer", spec.layer) if isinstance(spec, SharedKV) else home
            spans[owner] = (spans.get(owner, (index, index))[0], index)
    return list(spans.values())


def balanced(cuts: Sequence[Cut], costs: Sequence[float], stages: int) -> tuple[Cut, ...]:
    """`stages` - 1 of the places that minimise the cost of the dearest stage, then the sum of the
    squares of all costs.

    Args:
        costs: of each op.
    """
    total = [0.0, *accumulate(costs)]
    ends = [*(cut.index for cut in cuts), len(costs)]
    never: tuple[float, float, tuple[int, ...]] = (math.inf, 0.0, ())
    # For each place at which the stages so far may end: the dearest one's cost, the sum of the
    # squares of all, and the places between them, the last first.
    best = [(total[end], total[end] ** 2, never[2]) for end in ends]
    for _ in range(1, stages):
        best = [
            min(
                (
                    (max(dearest, own), squares + own * own, (place, *chosen))
                    for place, (dearest, squares, chosen) in enumerate(best[:number])
                    for own in [total[end] - total[ends[place]]]
                ),
                default=never,
            )
            for number, end in enumerate(ends)
        ]
    return tuple(cuts[place] for place in reversed(best[-1][2]))


def check_stages(cuts: Sequence[Cut], stages: int) -> None:
    """Raises ConfigError for more stages than there can be."""
    if stages > len(cuts) + 1:
        raise ConfigError(
            f"the model cannot be cut into {stages} stages, as its layers can be parted at"
            f" {len(cuts)} places: choose --pipeline-parallel-size {len(cuts) + 1} at most",
            param="pipeline_parallel_size",
        )


# --- layers ---------------------------------------------------------------------------------------
_LAYER = re.compile(r"layers\.(\d+)\.")


def num_layers(ops: Sequence[Op]) -> int:
    """The number of layers that have begun in ops, by the names of their matrices: a layer's first
    norm is often computed with the sum of the previous layer."""
    return _layers_begun(ops)[-1]


def _layers_begun(ops: Sequence[Op]) -> list[int]:
    """The number of layers that have begun before each op, and before the end."""
    found = [0]
    for op in ops:
        names = (ref.name for ref in op.weights if ref.kind in ("linear", "stack"))
        numbers = (1 + int(one[1]) for one in map(_LAYER.match, names) if one is not None)
        found.append(max(found[-1], *numbers, 0))
    return found


def layers_between(cuts: Sequence[Cut], ops: Sequence[Op]) -> tuple[int, ...]:
    """The layers of each stage."""
    ends = [num_layers(ops[: cut.index]) for cut in cuts]
    return tuple(end - begin for begin, end in pairwise([0, *ends, num_layers(ops)]))


def cuts_behind(
    layers: Sequence[int], cuts: Sequence[Cut], ops: Sequence[Op], stages: int
) -> tuple[Cut, ...]:
    """The places at which the stages have these numbers of layers. Raises ConfigError if there are
    none."""
    at = {num_layers(ops[: cut.index]): cut for cut in reversed(cuts)}
    *inner, last = accumulate(layers)
    text, every = ",".join(map(str, layers)), num_layers(ops)
    if len(layers) != stages or last != every:
        raise ConfigError(
            f"--pipeline-layers {text} are {last} layers in {len(layers)} stages, and the model has"
            f" {every} for {stages}: name as many for each stage as add up to {every}",
            param="pipeline_layers",
        )
    if not set(inner) <= at.keys():
        places_text = ", ".join(map(str, sorted(at)))
        raise ConfigError(
            f"--pipeline-layers {text} parts layers that belong together: a stage can end behind"
            f" {places_text} layers",
            param="pipeline_layers",
        )
    return tuple(at[end] for end in inner)
