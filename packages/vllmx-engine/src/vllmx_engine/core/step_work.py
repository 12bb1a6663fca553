"""The work of one step, as the scheduler decided it."""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import MutableRecord, Record

from vllmx_engine.core.cost import StepLoad
from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.images import StepImages
from vllmx_engine.core.step_budget import Chunk


class Batch(Record):
    """The work of one step."""

    decodes: AnyArray
    """Rows of the table that decode, ascending: each computes its last token and its draft."""
    chunks: tuple[Chunk, ...]
    load: StepLoad
    images: StepImages | None = None
    """Work for the chunks' images before the step; None: the model sees none."""
    drafts: Drafts | None = None
    """The drafts of decodes."""

    @property
    def decode_lengths(self) -> I32:
        """(D,) tokens of each decode."""
        lengths = np.ones(self.decodes.size, np.int32)
        if self.drafts is not None:
            lengths[self.drafts.index] += self.drafts.counts
        return lengths


class CoreActivity(MutableRecord):
    """The core's current activity, written by its thread and read by the watchdog."""

    calls: int = 0
    """Begun and ended: odd while the core steps or closes."""
    doing: str = ""
    batch: Batch | None = None


def load_of(
    num_decodes: int, context: int, chunks: list[Chunk], images: StepImages | None
) -> StepLoad:
    """Returns the step's cost terms, see `StepCost`. A draft token counts as a decode."""
    tokens, work = 0, 0.0
    for chunk in chunks:
        tokens += chunk.num_tokens
        work += chunk.num_tokens * (chunk.start + chunk.num_tokens / 2)
    load = StepLoad(num_decodes, context, tokens, work)
    if images is None:
        return load
    tower = images.towers.load
    return load._replace(patches=tower.patches, patch_work=tower.work)
