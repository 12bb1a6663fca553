"""One stage of a model, as a model that any backend loads: a run of consecutive layers.

The first stage has the embedding, each hands its layers' results on, and the last one has the head.
A stage has the weights, pages and states of its own layers; all have the same blocks of the same
groups, so that one plan fits all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import layout_of
from vllmx_core.cache.groups import CacheLayout
from vllmx_core.errors import OpError
from vllmx_core.model import CacheGroup, Model, ModelShape, SharedKV
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.send import Send
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import AnyArray
from vllmx_core.recorded.recording import record
from vllmx_core.sharding.stage_costs import byte_costs
from vllmx_core.sharding.stage_cuts import (
    Cut,
    balanced,
    check_stages,
    cuts_behind,
    homes_of,
    own_cut,
    places,
)
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec


class StagedModel:
    """A `vllmx_core.model.Model`: the ops between two cuts. Stages before the last return a vector
    for each logit row, of which their plans have none.

    Attributes:
        share_of_cache: this stage's fraction of the model's cache for a token, 0 to 1.
    """

    def __init__(
        self, whole: Model, steps: OpList, begin: Cut, end: Cut | None, layout: CacheLayout
    ) -> None:
        self._whole, self._logits = whole, steps.logits
        self._received = begin.crossing
        self._sent = None if end is None else end.crossing
        ops = steps.ops[begin.index : None if end is None else end.index]
        homes = sorted({home for op in ops for home in homes_of(op)})
        layers = [number for kind, number in homes if kind == "layer"]
        states = [number for kind, number in homes if kind == "state"]
        self._ops = tuple(_renumbered(op, layers, states) for op in ops)
        self._names = {ref.name for op in ops for ref in op.weights}
        self._shape = self._shape_of(whole.shape, layers, states, layout)
        kept, every = (_kept(shape) for shape in (self._shape, whole.shape))
        self.share_of_cache = kept / every if every else 1.0

    def _shape_of(
        self, shape: ModelShape, layers: list[int], states: list[int], layout: CacheLayout
    ) -> ModelShape:
        caches = []
        for layer in layers:
            spec = shape.caches[layer]
            if isinstance(spec, SharedKV):
                spec = SharedKV(layers.index(spec.layer))
            caches.append(spec)
        own = replace(
            shape,
            caches=tuple(caches),
            states=tuple(shape.states[state] for state in states),
            groups=_groups(shape, layers, layout),
            features=None,
        )
        if self._sent is None:
            return own
        return replace(own, output="vectors", output_size=self._sent[0].width)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def ops(self) -> tuple[Op, ...]:
        """The part of the whole model's step that this stage has."""
        return self._ops

    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(spec for spec in self._whole.weights() if spec.name in self._names)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        tables = self._whole.constants(max_model_len)
        return {name: table for name, table in tables.items() if name in self._names}

    def forward(self, ops: Ops, w: Mapping[str, WeightRef], step: StepInputs) -> Value:
        """Replays the stage's part of the whole model's step."""
        for value in self._received:
            ops.put(Recv(value))
        for op in self._ops:
            ops.put(op)
        if self._sent is None:
            return self._logits
        for value in self._sent:
            ops.put(Send(value))
        return ops.pool(self._sent[0], step, "last")


def _kept(shape: ModelShape) -> float:
    """Numbers in the cache for each token."""
    return sum(kv.num_kv_heads * (kv.head_size + kv.value_size) / kv.ratio for kv in shape.kv_specs)


def _renumbered(op: Op, layers: list[int], states: list[int]) -> Op:
    """The op with the stage's own numbers of pages and states."""
    lists = {"layer": layers, "state": states}
    own = {kind: lists[kind].index(number) for kind, number in homes_of(op)}
    if not own:
        return op
    changed: Any = op
    found: Op = replace(changed, spec=replace(changed.spec, **own))
    return found


def _groups(shape: ModelShape, layers: list[int], layout: CacheLayout) -> tuple[CacheGroup, ...]:
    """The groups of the whole model, with the stage's layers. Groups of equal windows and page
    sizes share their layers evenly, since a block is as large as the fullest group."""
    kinds: dict[object, list[int]] = {}
    for number, group in enumerate(layout.groups):
        size = layout.places[layout.place_of[group.layers[0]]] if group.layers else None
        kept = (
            None
            if size is None
            else (size.num_kv_heads, size.head_size, size.value_size, size.ratio)
        )
        kinds.setdefault((group.window, kept), []).append(number)
    found: list[list[int]] = [[] for _ in layout.groups]
    for numbers in kinds.values():
        own = [
            index
            for index, layer in enumerate(layers)
            if layout.group_of[layer] in numbers and not isinstance(shape.caches[layer], SharedKV)
        ]
        for turn, index in enumerate(own):
            found[numbers[turn % len(numbers)]].append(index)
    return tuple(
        CacheGroup(group.window, tuple(own))
        for group, own in zip(layout.groups, found, strict=True)
    )


class ProbedSegment(StagedModel):
    """A part of a step that one process loads and runs alone, to measure it: it reads rows of the
    token table instead of a previous stage's values, and sends nothing. Raises OpError unless the
    values at its ends are as wide as those rows."""

    def __init__(
        self, whole: Model, steps: OpList, begin: Cut, end: Cut | None, layout: CacheLayout
    ) -> None:
        super().__init__(whole, steps, begin, end, layout)
        self._table = _table_of(steps)
        self._names.add(self._table.name)
        for value in (*self._received, *(self._sent or ())):
            if value.width != self._table.cols:
                raise OpError(
                    f"a value of {value.width} features crosses a place, and the table of tokens"
                    f" has {self._table.cols}"
                )

    def forward(self, ops: Ops, w: Mapping[str, WeightRef], step: StepInputs) -> Value:
        """Replays the part."""
        for value in self._received:
            ops.put(Embedding(step.tokens, self._table, 0, value))
        for op in self._ops:
            ops.put(op)
        if self._sent is None:
            return self._logits
        total, *others = self._sent
        for value in others:
            total = ops.add(total, value)
        return ops.pool(total, step, "last")


def _table_of(steps: OpList) -> WeightRef:
    for op in steps.ops:
        if isinstance(op, Embedding) and op.ids.source == "tokens":
            return op.w
    raise OpError("the model has no table of tokens")


def staged(
    model: Model,
    source: WeightSource,
    options: LoadOptions,
    stage: int,
    stages: int,
    *,
    as_rank_0: Model | None = None,
    layers: Sequence[int] | None = None,
) -> StagedModel:
    """Stage `stage` of `stages`; reads only the layouts of weights. If the model is one rank's
    part, `as_rank_0` is the first rank's: it is cut at the same ops, so that all ranks of a stage
    have the same ops. `layers` are those of each stage; None: balanced by bytes of weights.

    Raises ConfigError for more stages than the model can be cut into, and for `layers` that it does
    not have or that cannot be separated; OpError as recording does.
    """
    recording = record(model, options.max_model_len)
    alike = recording if as_rank_0 is None else record(as_rank_0, options.max_model_len)
    found = places(alike.steps, model.shape)
    check_stages(found, stages)
    if layers is None:
        chosen = balanced(found, byte_costs(alike, source), stages)
    else:
        chosen = cuts_behind(layers, found, alike.steps.ops, stages)
    inner = [own_cut(recording.steps, cut) for cut in chosen]
    begin = Cut(0, ()) if stage == 0 else inner[stage - 1]
    end = None if stage == stages - 1 else inner[stage]
    return StagedModel(model, recording.steps, begin, end, layout_of(model.shape, options))
