"""One rank's part of a model, as a model that any backend loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.communicator import MOST_ROW_WIDTH
from vllmx_core.errors import ConfigError
from vllmx_core.model import KVSpec, Model, ModelShape, encoder_of
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.ops.vocab_embedding import VocabEmbedding
from vllmx_core.plan import AnyArray
from vllmx_core.recorded.recording import record
from vllmx_core.sharding.parts import Parts, fits, parts_of_rank
from vllmx_core.sharding.plan import Columns, ShardPlan, plan_shards
from vllmx_core.sharding.weights import columns_of, narrowed
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

MOST_RANKS = 64
IN_PLACE_RANKS = 8
"""The most ranks whose experts' results are summed like everything else: all ranks read the parts
of all tokens, and wait once."""


class ShardedModel:
    """A `vllmx_core.model.Model` with one rank's rows and columns of weights and its heads, and
    collectives between the ranks.

    Attributes:
        whole: the model of all ranks together.
    """

    def __init__(
        self, whole: Model, steps: OpList, shard: ShardPlan, rank: int, parts: Parts | None = None
    ) -> None:
        self.whole = whole
        self.encoder = encoder_of(whole)
        self._steps, self._shard, self._rank = steps, shard, rank
        self._parts = parts or Parts()

    @property
    def shape(self) -> ModelShape:
        shape, heads = self.whole.shape, self._shard.kv_heads
        caches = (
            replace(spec, num_kv_heads=len(heads[layer]))
            if isinstance(spec, KVSpec) and layer in heads
            else spec
            for layer, spec in enumerate(shape.caches)
        )
        states = (self._shard.states.get(index, spec) for index, spec in enumerate(shape.states))
        return replace(shape, caches=tuple(caches), states=tuple(states))

    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(one for spec in self.whole.weights() for one in self._of_rank(spec))

    def _of_rank(self, spec: WeightSpec) -> Iterator[WeightSpec]:
        cuts = self._shard.weights
        if spec.name in self._parts.weights:
            yield from self._parts.narrowed(spec)
        elif spec.name in cuts:
            yield narrowed(spec, cuts[spec.name], biased=self._rank == 0)
        else:
            yield spec

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return self.whole.constants(max_model_len)

    def forward(self, ops: Ops, w: Mapping[str, WeightRef], step: StepInputs) -> Value:
        """Replays the whole model's step, narrowed."""
        known: dict[Value, Value] = {}
        for op in self._steps.ops:
            for one in self._narrowed(op, w, known):
                ops.put(one)
        return known[self._steps.logits]

    def _narrowed(
        self, op: Op, w: Mapping[str, WeightRef], known: dict[Value, Value]
    ) -> Iterator[Op]:
        """The op on this rank, and the collective after it; `known` maps values of the whole model
        to the rank's."""
        if not op.writes:
            yield self._local(op, w, known)
            return
        shard, (result, *_) = self._shard, op.writes
        if self._parts.sums(op):
            for local in self._parts.ops(op, known, w, self._begin(op)):
                known[result] = local.writes[0]
                yield local
        else:
            local = self._local(op, w, known)
            yield local
        if op in shard.reduced:
            reduce = AllReduce.of(known[result])
            known[result] = reduce.out
            yield reduce
        elif isinstance(op, Experts) and op in shard.combined:
            combine = Combine.of(known[result], known[op.ids], shard.combined[op])
            known[result] = combine.out
            yield combine
        elif op in shard.vocabulary:
            gather = AllGather.of(
                local.writes[0], tuple(end - begin for begin, end in shard.vocabulary[op])
            )
            known[result] = gather.out
            yield gather

    def _begin(self, op: Op) -> int:
        """The rank's first feature of a matrix's input."""
        share = self._shard.values.get(op.reads[0])
        return 0 if share is None else share.pieces[0][0]

    def _local(self, op: Op, w: Mapping[str, WeightRef], known: dict[Value, Value]) -> Op:
        shard = self._shard
        if op in shard.vocabulary and op in shard.reduced:
            (ref,) = op.weights
            embedding = VocabEmbedding.of(w[ref.name], shard.vocabulary[op][self._rank][0])
            known[op.writes[0]] = embedding.out
            return embedding
        for value in op.writes:
            width = shard.values[value].width if value in shard.values else value.width
            if op in shard.vocabulary:
                begin, end = shard.vocabulary[op][self._rank]
                width = end - begin
            known[value] = replace(value, width=width)
        changes: dict[str, Any] = dict(shard.options.get(op, {}))
        for name in op.__struct_fields__:
            field = getattr(op, name)
            if isinstance(field, Value):
                changes[name] = known[field]
            elif isinstance(field, WeightRef):
                changes[name] = w[field.name]
        return replace(op, **changes)


def sharded(
    model: Model,
    source: WeightSource,
    max_model_len: int,
    rank: int,
    ranks: int,
    *,
    deterministic: bool = False,
    whole_experts: bool = False,
    in_place_ranks: int = IN_PLACE_RANKS,
) -> ShardedModel:
    """The part of rank `rank` of `ranks`; reads only the layouts of weights. With `deterministic`,
    sums have the same bits for any number of ranks (`vllmx_core.sharding.parts`). With
    `whole_experts`, each rank has some of the experts of a layer and runs them for all tokens;
    otherwise it has a part of each. With more ranks than `in_place_ranks`, results of experts are
    added token by token (`vllmx_core.ops.combine`).

    Raises ConfigError, which suggests numbers of ranks, if sizes cannot be divided among `ranks`;
    OpError as recording does, and if an op needs a whole value of which ranks have parts.
    """
    if model.shape.taps is not None:
        raise ConfigError(
            "a model on several ranks keeps no hidden states for drafters: choose one rank, or"
            " --speculate ngram or suffix",
            param="tensor_parallel_size",
        )
    recording = record(model, max_model_len)
    specs = {spec.name: spec for spec in recording.specs}
    known: dict[str, Columns] = {}

    def columns(spec: WeightSpec) -> Columns:
        if spec.name not in known:
            known[spec.name] = columns_of(spec, source)
        return known[spec.name]

    def shard_of(rank: int, ranks: int) -> ShardPlan:
        plan = plan_shards(
            recording.steps,
            specs,
            columns,
            rank,
            ranks,
            whole_experts=whole_experts,
            combines=ranks > in_place_ranks and not deterministic,
        )
        if ranks > 1:
            _check_rows(plan)
        return plan

    if whole_experts and not any(isinstance(op, Experts) for op in recording.steps.ops):
        raise ConfigError(
            "--expert-parallel divides the experts of a model, and this one has none: leave it out",
            param="expert_parallel",
        )
    parts = parts_of_rank(shard_of, rank, ranks) if deterministic else None
    try:
        alone = ShardPlan(weights=parts.reordered if parts else {})
        mine = shard_of(rank, ranks) if ranks > 1 else alone
        return ShardedModel(model, recording.steps, mine, rank, parts)
    except ConfigError as error:
        fitting = [str(count) for count in range(1, MOST_RANKS + 1) if fits(shard_of, count)]
        raise ConfigError(
            f"the model cannot be divided among {ranks} ranks ({error.message}): choose"
            f" --tensor-parallel-size {' or '.join(fitting)}",
            param="tensor_parallel_size",
        ) from None


def _check_rows(plan: ShardPlan) -> None:
    """Raises ConfigError for rows that are too wide to go between ranks whole."""
    widths = [op.writes[0].width for op in plan.combined]
    for op, pieces in plan.vocabulary.items():
        if op not in plan.reduced:
            widths += [end - begin for begin, end in pieces]
    widest = max(widths, default=0)
    if widest > MOST_ROW_WIDTH:
        raise ConfigError(f"a row of {widest} numbers is more than the {MOST_ROW_WIDTH} of a call")
