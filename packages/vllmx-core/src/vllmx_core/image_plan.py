"""Images among the arrays of a step: the pass of a tower, and what rotations turn tokens by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllmx_core.model import Encoder, ImagePlaces
from vllmx_core.plan import F32, I32, PatchRows, StepPlan
from vllmx_core.records import Record


def tower_plan(
    encoder: Encoder, patches: Sequence[F32], places: Sequence[ImagePlaces], keep: I32, spare: int
) -> StepPlan:
    """The pass over some images, (N, D) patches each, whose features go to the rows `keep` of the
    store, one for each token; those that are dropped go to the row `spare`."""
    lengths = np.array([one.rope_positions.shape[1] for one in places], np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    count, size = int(ends[-1]), encoder.patches_per_token
    tokens = [one.num_tokens(len(rows) // size) for rows, one in zip(patches, places, strict=True)]
    kept = np.split(keep, np.cumsum(tokens)[:-1])
    pairs = list(zip(patches, kept, places, strict=True))
    patches = [_laid_out(rows, one) for rows, _, one in pairs]
    keep = np.concatenate([_kept(to, one, size, spare) for _, to, one in pairs])
    windows = [one.windows for one in places if one.windows is not None]
    return StepPlan(
        tokens=np.zeros(count, np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        slots=(),
        query_start=np.concatenate([np.zeros(1, np.int32), ends]),
        context_len=lengths,
        block_tables=(),
        logit_rows=np.arange(0, count, encoder.patches_per_token, dtype=np.int32),
        rope_positions=np.concatenate([each.rope_positions for each in places], axis=1),
        patches=PatchRows(
            np.concatenate(list(patches)),
            np.concatenate([each.table_rows for each in places]),
            np.concatenate([each.table_weights for each in places]),
            keep,
            np.cumsum(np.concatenate([[0], *windows]), dtype=np.int32) if windows else None,
        ),
    )


def _laid_out(rows: F32, places: ImagePlaces) -> F32:
    """The patches of an image in the order of its tokens, and zeros for rows behind them."""
    order, added = places.order, places.rope_positions.shape[1] - len(rows)
    if order is not None:
        rows = rows.reshape(len(order), -1)[order].reshape(rows.shape)
    return np.concatenate([rows, np.zeros((added, rows.shape[1]), np.float32)]) if added else rows


def _kept(keep: I32, places: ImagePlaces, size: int, spare: int) -> I32:
    keep = keep if places.featured is None else keep[places.featured]
    keep = keep if places.order is None else keep[places.order]
    dropped = places.rope_positions.shape[1] // size - len(keep)
    return np.concatenate([keep, np.full(dropped, spare, np.int32)])


class Turns(Record):
    """Rotary positions of one sequence's tokens, for rotations with several axes."""

    known: I32
    """(A, n) of the first n tokens, up to the end of the last image."""
    offset: int
    """Added to the positions of all later tokens; never above 0."""

    def at(self, start: int, end: int) -> I32:
        """(A, end - start) of a part of the sequence."""
        size = self.known.shape[1]
        behind = np.arange(max(start, size), end, dtype=np.int32) + np.int32(self.offset)
        axes = np.broadcast_to(behind, (self.known.shape[0], behind.size))
        return np.concatenate([self.known[:, start:end], axes], axis=1)


def turns_of(images: Sequence[tuple[int, ImagePlaces]]) -> Turns | None:
    """The turns of a prompt with images at these starts, ascending; None where tokens are turned by
    their positions."""
    if not images or images[0][1].token_positions is None:
        return None
    pieces: list[I32] = []
    length = position = 0
    for start, places in images:
        assert places.token_positions is not None, "one tower turns all images alike"
        axes, count = places.token_positions.shape
        text = np.arange(position, position + start - length, dtype=np.int32)
        pieces.append(np.broadcast_to(text, (axes, text.size)))
        position += text.size
        pieces.append(places.token_positions + np.int32(position))
        position += places.advance
        length = start + count
    return Turns(np.concatenate(pieces, axis=1), position - length)
