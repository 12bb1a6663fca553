"""The work of one step, as the scheduler decided it."""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import Record

from vllmx_engine.core.cost import StepLoad
from vllmx_engine.core.drafters import Draft
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
    drafts: tuple[Draft, ...] = ()
    """The drafts of decodes, in their order."""

    @property
    def decode_lengths(self) -> I32:
        """(D,) tokens of each decode."""
        lengths = np.ones(self.decodes.size, np.int32)
        for draft in self.drafts:
            lengths[draft.index] += len(draft.ids)
        return lengths


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
