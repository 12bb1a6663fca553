"""What a step computes: rows that decode one token each, and chunks of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllmx_core.plan import AnyArray
from vllmx_core.records import Record

from vllmx_engine.core.cost import StepLoad
from vllmx_engine.core.sequence import Sequence

if TYPE_CHECKING:
    from vllmx_engine.core.images import StepImages


class Chunk(NamedTuple):
    """A part of a prompt (or of a preempted sequence) that a step computes."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    """The last this many of its tokens are logit rows."""
    samples: bool
    """The last logit row is drawn from: the chunk ends with the last known token."""

    @property
    def num_new(self) -> int:
        """The number of tokens without those that were charged on admission, or computed before a
        preemption: to make room for others is no service, and is not paid for twice."""
        charged = self.sequence.num_charged
        if charged <= self.start:
            return self.num_tokens
        return max(0, self.start + self.num_tokens - charged)


class Batch(Record):
    """What a step computes."""

    decodes: AnyArray
    """Rows of the table that decode one token each, ascending."""
    chunks: tuple[Chunk, ...]
    load: StepLoad
    images: StepImages | None = None
    """What is done for the chunks' images before the step; None: the model sees none."""


def load_of(
    num_decodes: int, context: int, chunks: list[Chunk], images: StepImages | None
) -> StepLoad:
    """What a step costs by: see `StepCost`."""
    tokens, work = 0, 0.0
    for chunk in chunks:
        tokens += chunk.num_tokens
        work += chunk.num_tokens * (chunk.start + chunk.num_tokens / 2)
    load = StepLoad(num_decodes, context, tokens, work)
    if images is None:
        return load
    tower = images.towers.load
    return load._replace(patches=tower.patches, patch_work=tower.work)
