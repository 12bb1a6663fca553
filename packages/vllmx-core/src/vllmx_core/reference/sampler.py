"""The sampler in numpy: the definition of what every backend's sampler must compute.

One row at a time and in the open, for reading and for tests; `SamplingRows` gives the order of
work. Where the words leave a choice, this is it:

* A row that holds NaN or +inf is refused (id -1), whatever the rest of its parameters; so is one
  whose greatest edited logit is not finite (nothing is allowed, or a penalty overflowed).
* Penalties are float32 operations in the order repetition, frequency, presence, each rounded.
* Tempered logits are `x = (logit - greatest logit) / temperature` in float32, so that no
  temperature overflows; x is 0 at the top and the same bits on every backend.
* min_p keeps `x >= float32(ln(min_p))`, which is p >= min_p * p_max.
* top_k keeps everything that is not below the k-th greatest x: ties at the edge all stay.
* top_p sorts what is left by x and keeps the greatest values until their share of the mass that is
  left reaches top_p, at least one; ids of equal x stay or go together, so nothing depends on order.
* The draw is the id of greatest `x + gumbel_noise`, the lowest id at a tie.
* `LogprobRows` entries that nobody asked for, and rows that were refused: -inf, rank 0, id -1.
"""

from __future__ import annotations

import numpy as np

from vllmx_core.plan import F32, I32, LogprobRows, SamplingRows, StepResult
from vllmx_core.sampling import gumbel_noise

_MINUS_INF = np.float32(-np.inf)


def sample(logits: F32, rows: SamplingRows, tokens_at_rows: I32) -> StepResult:
    """Samples or scores each of the (L, V) logit rows; `logits` stays as it is.

    tokens_at_rows: (L,) the id that each row feeds at its logit row, for `TokenCounts.pending`.
    """
    row_count = rows.num_rows
    ids = np.full(row_count, -1, np.int32)
    logprobs = _empty_logprobs(row_count, rows.max_logprobs) if rows.max_logprobs >= 0 else None
    for row in range(row_count):
        raw = np.asarray(logits[row], np.float32)
        if np.isnan(raw).any() or np.isposinf(raw).any():
            continue
        if rows.target[row] >= 0:
            ids[row] = rows.target[row]
        else:
            ids[row] = _pick(edited_logits(raw, rows, row, int(tokens_at_rows[row])), rows, row)
        if logprobs is not None and rows.num_logprobs[row] >= 0 and ids[row] >= 0:
            _fill_logprobs(logprobs, row, raw, int(ids[row]), int(rows.num_logprobs[row]))
    whole = None if rows.whole is None else np.array(logits[rows.whole], np.float32)
    return StepResult(ids=ids, logprobs=logprobs, logits=whole)


def edited_logits(raw: F32, rows: SamplingRows, row: int, fed_token: int) -> F32:
    """(V,) logits after mask, edits and penalties."""
    out = raw.copy()
    if rows.masks is not None and rows.mask_index is not None and rows.mask_index[row] >= 0:
        words = rows.masks[rows.mask_index[row]].astype("<u4")
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: raw.shape[0]]
        out[allowed == 0] = _MINUS_INF
    if rows.edits is not None:
        span = slice(rows.edits.start[row], rows.edits.start[row + 1])
        out[rows.edits.ids[span]] += rows.edits.values[span]
    counted = _counts(rows, row, fed_token)
    if counted:
        ids = np.array(list(counted), np.int64)
        counts = np.array(list(counted.values()), np.float32)
        values, factor = out[ids], rows.repetition_penalty[row]
        values = np.where(values > 0, values / factor, values * factor)
        values = values - rows.frequency_penalty[row] * counts
        out[ids] = values - rows.presence_penalty[row] * (counts > 0)
    return out


def _counts(rows: SamplingRows, row: int, fed_token: int) -> dict[int, int]:
    """Token id -> occurrences in the output, the pending token included."""
    if rows.counts is None:
        return {}
    span = slice(rows.counts.start[row], rows.counts.start[row + 1])
    counted = {
        int(token): int(count)
        for token, count in zip(rows.counts.ids[span], rows.counts.output_counts[span], strict=True)
    }
    if rows.counts.pending[row]:
        counted[fed_token] = counted.get(fed_token, 0) + 1
    return counted


def _pick(edited: F32, rows: SamplingRows, row: int) -> int:
    """The sampled id, or -1 when nothing is allowed."""
    if not np.isfinite(edited.max()):
        return -1
    temperature = rows.temperature[row]
    if temperature == 0:
        return int(edited.argmax())
    x = tempered(edited, float(temperature))
    keep = kept(x, float(rows.min_p[row]), int(rows.top_k[row]), float(rows.top_p[row]))
    noise = gumbel_noise(int(rows.seed[row]), int(rows.position[row]), x.shape[0])
    return int(np.where(keep, x + noise, _MINUS_INF).argmax())


def tempered(edited: F32, temperature: float) -> F32:
    """(V,) (logit - greatest logit) / temperature."""
    with np.errstate(over="ignore"):
        x: F32 = (edited - edited.max()) / np.float32(temperature)
    return x


def kept(
    x: F32, min_p: float, top_k: int, top_p: float
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(V,) which ids the filters leave for the draw; x as `tempered` gives it."""
    keep = x > _MINUS_INF
    if min_p > 0:
        keep &= x >= np.float32(np.log(min_p))
    if 0 < top_k < int(keep.sum()):
        keep &= x >= np.sort(x[keep])[-top_k]
    if top_p < 1:
        values, occurrences = np.unique(x[keep], return_counts=True)
        mass = (np.exp(values.astype(np.float64)) * occurrences)[::-1].cumsum()
        last = int(np.searchsorted(mass, np.float64(np.float32(top_p)) * mass[-1]))
        keep &= x >= values[::-1][min(last, len(values) - 1)]
    return keep


def _empty_logprobs(row_count: int, width: int) -> LogprobRows:
    return LogprobRows(
        chosen=np.full(row_count, -np.inf, np.float32),
        rank=np.zeros(row_count, np.int32),
        top_ids=np.full((row_count, width), -1, np.int32),
        top=np.full((row_count, width), -np.inf, np.float32),
    )


def _fill_logprobs(out: LogprobRows, row: int, raw: F32, chosen: int, width: int) -> None:
    wide = raw.astype(np.float64)
    log_mass = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    out.chosen[row] = wide[chosen] - log_mass
    out.rank[row] = 1 + int((raw > raw[chosen]).sum())
    order = np.argsort(-raw, kind="stable")[:width]
    out.top_ids[row, : len(order)] = order
    out.top[row, : len(order)] = wide[order] - log_mass
