"""A part of a model between two places where it can be cut, as a model of its own that one process
loads and runs, to measure what that part takes: in place of what the stage before would hand on
there are rows of the table of tokens, and nothing is handed on."""

from __future__ import annotations

from collections.abc import Mapping

from vllmx_core.cache.groups import CacheLayout
from vllmx_core.errors import OpError
from vllmx_core.model import Model
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.op import OpList
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.sharding.stage_cuts import Cut
from vllmx_core.sharding.stages import StagedModel


class ProbedSegment(StagedModel):
    """A `vllmx_core.model.Model`; see the module. Raises OpError where what is handed on is not as
    wide as rows of the table of tokens are."""

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
