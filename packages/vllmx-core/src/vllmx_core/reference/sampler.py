"""The sampler in numpy: the definition of what every backend's sampler must compute.

Filters and draws are written one row at a time and in the open, for reading and for tests; edits,
noise and log-probabilities are the formulas of `backend_kit.sampler`. `SamplingRows` gives the
order of work. Where the words leave a choice, this is it:

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

from vllmx_core.arrays import NUMPY
from vllmx_core.backend_kit.sampler import edited_logits, logprobs
from vllmx_core.plan import F32, I32, LogprobRows, SamplingRows, StepResult
from vllmx_core.sampling import gumbel_noise

_MINUS_INF = np.float32(-np.inf)


def sample(logits: F32, rows: SamplingRows, tokens_at_rows: I32) -> StepResult:
    """Samples or scores each of the (L, V) logit rows; `logits` stays as it is.

    tokens_at_rows: (L,) the id that each row feeds at its logit row, for `TokenCounts.pending`.
    """
    ids = np.full(rows.num_rows, -1, np.int32)
    with np.errstate(all="ignore"):  # broken rows go through everything but the draw
        edited = logits
        if (rows.target < 0).any():
            edited = edited_logits(NUMPY, logits, rows, tokens_at_rows)
        for row, raw in enumerate(logits):
            if not (np.isnan(raw).any() or np.isposinf(raw).any()):
                target = rows.target[row]
                ids[row] = target if target >= 0 else _pick(edited[row], rows, row)
        listed = None
        if rows.max_logprobs >= 0:
            listed = LogprobRows(**logprobs(NUMPY, logits, rows, ids))
    whole = None if rows.whole is None else np.array(logits[rows.whole], np.float32)
    return StepResult(ids=ids, logprobs=listed, logits=whole)


def _pick(edited: F32, rows: SamplingRows, row: int) -> int:
    """The sampled id, or -1 when nothing is allowed."""
    if not np.isfinite(edited.max()):
        return -1
    temperature = rows.temperature[row]
    if temperature == 0:
        return int(edited.argmax())
    x = tempered(edited, float(temperature))
    keep = kept(x, float(rows.min_p[row]), int(rows.top_k[row]), float(rows.top_p[row]))
    one = slice(row, row + 1)
    noise = gumbel_noise(NUMPY, x[None], rows.seed[one], rows.position[one])[0]
    return int(np.where(keep, x + noise, _MINUS_INF).argmax())


def tempered(edited: F32, temperature: float) -> F32:
    """(V,) (logit - greatest logit) / temperature."""
    with np.errstate(over="ignore"):
        x: F32 = (edited - edited.max()) / np.float32(temperature)
    return x


def kept(
    x: F32, min_p: float, top_k: int, top_p: float
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(V,) ids that the filters leave for the draw; x as `tempered` gives it."""
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
