"""The sampler over `vllmx_core.arrays`: what `vllmx_core.reference.sampler` defines, all rows at
once and without waiting for a value.

Shapes: L logit rows, of which N are drawn; V vocabulary; K = `SamplingRows.max_logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllmx_core.arrays import Array, Arrays
from vllmx_core.plan import I32, U32, AnyArray, LogitEdits, SamplingRows, TokenCounts
from vllmx_core.sampling import gumbel_noise

_CHUNK_VALUES = 1 << 24
"""Rows are processed in pieces of about so many logits where wide copies of them are made."""


def sample(xp: Arrays, logits: Array, rows: SamplingRows, fed_tokens: Array) -> dict[str, Array]:
    """Samples or scores each of the (L, V) float32 logit rows; `logits` stays as it is.

    fed_tokens: (L,) the id that each row feeds at its logit row, for `TokenCounts.pending`.
    Returns "ids" (L,) and, when a row asks for them, the fields of `LogprobRows` and
    "logits" (A, V) of the rows in `whole`.
    """
    broken = (xp.isnan(logits) | xp.isposinf(logits)).any(-1)  # (L,)
    ids = target = xp.upload(logits, rows.target)
    if (rows.target < 0).any():
        picked = _pick(xp, edited_logits(xp, logits, rows, fed_tokens), rows)
        ids = xp.where(target >= 0, target, picked)
    ids = xp.where(broken, -1, ids)
    results = {"ids": xp.cast(ids, xp.int32)}
    if rows.max_logprobs >= 0:
        results |= logprobs(xp, logits, rows, ids)
    if rows.whole is not None:
        results["logits"] = logits[xp.upload(logits, rows.whole)]
    return results


def edited_logits(xp: Arrays, logits: Array, rows: SamplingRows, fed_tokens: Array) -> Array:
    """(L, V) logits after mask, edits and penalties; `logits` stays as it is."""
    out = logits
    if rows.masks is not None and rows.mask_index is not None:
        out = xp.where(_allowed(xp, logits, rows.masks, rows.mask_index), out, -np.inf)
    if rows.edits is not None and len(rows.edits.ids):
        out = _edited(xp, out, rows.edits)
    if rows.counts is not None:
        out = _penalised(xp, out, rows, rows.counts, fed_tokens)
    if rows.group_from is not None:
        out = _grouped(xp, out, rows.group_from)
    return out


def _grouped(xp: Arrays, logits: Array, group_from: I32) -> Array:
    """(L, V) without the ids before `group_from` where those from there on are likelier together
    than each of them."""
    out = xp.copy(logits)
    for row in np.flatnonzero(group_from >= 0).tolist():
        first, one = int(group_from[row]), slice(row, row + 1)
        before = logits[one, :first]
        top = xp.max(before, axis=-1, keepdims=True)  # (1, 1)
        mass = xp.exp(logits[one, first:] - top).sum(axis=-1, keepdims=True)
        out[one, :first] = xp.where(mass > 1, -np.inf, before)
    return out


def _allowed(xp: Arrays, logits: Array, masks: U32, index: I32) -> Array:
    """(L, V) bits of each row's mask; rows without one are all True."""
    words = xp.upload(logits, masks)  # (N, W)
    bits = (words[:, :, None] >> xp.arange_like(words, 32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0  # (N, V)
    found = allowed[xp.upload(logits, np.maximum(index, 0))]
    return found | xp.upload(logits, index < 0)[:, None]


def _edited(xp: Arrays, logits: Array, edits: LogitEdits) -> Array:
    row, ids = xp.upload(logits, _row_of_each_entry(edits.start)), xp.upload(logits, edits.ids)
    out = xp.copy(logits)
    out[row, ids] = logits[row, ids] + xp.upload(logits, edits.values)
    return out


def _penalised(
    xp: Arrays, logits: Array, rows: SamplingRows, counts: TokenCounts, fed_tokens: Array
) -> Array:
    columns = (rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty)
    repetition, frequency, presence = (xp.upload(logits, column) for column in columns)  # (L,)

    def penalised(row: Array, ids: Array, count: Array | int) -> Array:
        value, factor = logits[row, ids], repetition[row]
        value = xp.where(value > 0, value / factor, value * factor)
        value = value - frequency[row] * count
        return value - presence[row] * (count > 0)

    row, ids, listed, waiting, pending = (
        xp.upload(logits, array)
        for array in (
            _row_of_each_entry(counts.start),
            counts.ids,
            counts.output_counts,
            np.flatnonzero(counts.pending),
            counts.pending,
        )
    )
    fed = fed_tokens[waiting]
    count = xp.like(logits, listed + (pending[row] & (ids == fed_tokens[row])))
    out = xp.copy(logits)
    out[waiting, fed] = penalised(waiting, fed, 1)
    out[row, ids] = penalised(row, ids, count)  # last: right where a pending token is listed too
    return out


def _row_of_each_entry(start: I32) -> AnyArray:
    """(N,) from (L + 1,)."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def _pick(xp: Arrays, edited: Array, rows: SamplingRows) -> Array:
    """(L,) sampled ids, -1 when nothing is allowed."""
    ids, top = xp.argmax(edited, axis=-1), xp.max(edited, axis=-1, keepdims=True)  # (L,), (L, 1)
    drawn = np.flatnonzero((rows.temperature != 0) & (rows.target < 0))
    for part in _pieces(drawn, edited.shape[1]):
        index = xp.upload(edited, part)
        temperature = xp.upload(edited, rows.temperature[part])
        x = (edited[index] - top[index]) / temperature[:, None]  # (N, V)
        noise = gumbel_noise(xp, x, rows.seed[part], rows.position[part])
        draw = xp.where(_kept(xp, x, rows, part), x + noise, -np.inf)
        ids[index] = xp.argmax(draw, axis=-1)
    return xp.where(xp.isfinite(top)[:, 0], ids, -1)


def _kept(xp: Arrays, x: Array, rows: SamplingRows, part: AnyArray) -> Array:
    """(N, V) ids that the filters leave for the draw; x: tempered logits of the rows `part`."""
    keep = x > -np.inf
    min_p, top_k, top_p = rows.min_p[part], rows.top_k[part], rows.top_p[part]
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):  # 0 is off: no value is below -inf
            floor = np.log(min_p.astype(np.float64))
        keep = keep & (x >= xp.upload(x, floor)[:, None])
    if ((top_k > 0) | (top_p < 1)).any():
        width = x.shape[1]
        k = np.where(top_k > 0, np.minimum(top_k, width), width)
        last = xp.upload(x, k[:, None] - 1)  # (N, 1) place of the last kept one of the sorted
        order = xp.descending(xp.where(keep, x, -np.inf))  # (N, V)
        if (top_p < 1).any():
            edge = xp.take_along_axis(order, last, axis=1)
            mass, wanted = xp.mass(xp.where(order >= edge, order, -np.inf), top_p)
            reached = (mass < wanted).sum(axis=-1, keepdims=True)
            off = xp.upload(x, top_p >= 1)[:, None]
            last = xp.minimum(last, xp.where(off, width - 1, reached))
        keep = keep & (x >= xp.take_along_axis(order, last, axis=1))
    return keep


def logprobs(xp: Arrays, logits: Array, rows: SamplingRows, ids: Array) -> dict[str, Array]:
    """The fields of `LogprobRows`; ids: (L,) chosen, -1 where the row was refused."""
    wanted = xp.where(ids < 0, -1, xp.upload(logits, rows.num_logprobs))
    pieces = [
        _logprob_rows(xp, logits[part], ids[part], wanted[part], rows.max_logprobs)
        for part in _slices(logits.shape[0], logits.shape[1])
    ]
    return {name: xp.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _logprob_rows(
    xp: Arrays, logits: Array, ids: Array, wanted: Array, width: int
) -> dict[str, Array]:
    wide, asked, vocab_size = xp.widest(logits), wanted >= 0, logits.shape[1]
    log_mass = xp.logsumexp(wide, axis=-1, keepdims=True)  # (L, 1)
    chosen = xp.take_along_axis(wide, xp.where(ids < 0, 0, ids)[:, None], axis=1)  # (L, 1)
    rank = 1 + (wide > chosen).sum(axis=-1)
    # a vocabulary smaller than K repeats its last place
    places = xp.upload(logits, np.minimum(np.arange(width), vocab_size - 1))
    top_ids = _likeliest(xp, logits, min(width, vocab_size))[:, places]  # (L, K)
    top = xp.take_along_axis(wide, top_ids, axis=1) - log_mass
    column = xp.arange_like(wanted, width)
    beyond = (column >= wanted[:, None]) | (column >= vocab_size)
    return {
        "chosen": xp.where(asked, xp.like(logits, chosen - log_mass)[:, 0], -np.inf),
        "rank": xp.cast(xp.where(asked, rank, 0), xp.int32),
        "top_ids": xp.cast(xp.where(beyond, -1, top_ids), xp.int32),
        "top": xp.where(beyond, -np.inf, xp.like(logits, top)),
    }


def _likeliest(xp: Arrays, logits: Array, k: int) -> Array:
    """(L, k) ids of the greatest logits, the lowest id first at a tie. A library's top-k promises
    no order of ties, so it gets integers that have none: a float's bits in the order of its value
    above, the id counted backwards below."""
    bits = xp.cast((logits + 0.0).view(xp.int32), xp.int64)  # -0 becomes 0
    ordered = xp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = logits.shape[1] - 1
    keys = ordered * (1 << 32) + (last - xp.arange_like(bits, last + 1))
    return last - (xp.greatest(keys, k) & 0xFFFFFFFF)


def _slices(count: int, vocab_size: int) -> Iterator[slice]:
    """Cuts all rows into slices, at least one."""
    step = max(1, _CHUNK_VALUES // vocab_size)
    for begin in range(0, max(1, count), step):
        yield slice(begin, begin + step)


def _pieces(index: AnyArray, vocab_size: int) -> Iterator[AnyArray]:
    """`index` in pieces; none when it is empty."""
    if len(index):
        yield from (index[part] for part in _slices(len(index), vocab_size))
