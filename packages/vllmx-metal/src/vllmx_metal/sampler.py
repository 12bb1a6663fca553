"""The sampler on the device: what `vllmx_core.reference.sampler` computes, all rows at once and
without waiting for a value. A GPU of Apple's has no float64: what the reference sums in it is
summed here in integers, which are exact in any order."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from vllmx_core.plan import AnyArray, SamplingRows

from vllmx_metal.logit_edits import edited_logits
from vllmx_metal.noise import gumbel_noise

_MASS_BITS = 40
"""Probabilities are integers of 2 ** -40 of the likeliest id's; a row of 2 ** 22 ids fits int64."""


def sample(logits: mx.array, rows: SamplingRows, fed_tokens: mx.array) -> dict[str, mx.array]:
    """Samples or scores each of the (L, V) float32 logit rows.

    fed_tokens: (L,) the id that each row feeds at its logit row, for `TokenCounts.pending`.
    Returns "ids" (L,) and, when a row asks for them, the fields of `LogprobRows` and
    "logits" (A, V) of the rows in `whole`.
    """
    broken = (mx.isnan(logits) | mx.isposinf(logits)).any(-1)  # (L,)
    ids = target = mx.array(rows.target)
    if (rows.target < 0).any():
        picked = _pick(edited_logits(logits, rows, fed_tokens), rows)
        ids = mx.where(target >= 0, target, picked)
    ids = mx.where(broken, -1, ids)
    results = {"ids": ids}
    if rows.max_logprobs >= 0:
        wanted = mx.where(ids < 0, -1, mx.array(rows.num_logprobs))
        results |= _logprobs(logits, ids, wanted, rows.max_logprobs)
    if rows.whole is not None:
        results["logits"] = logits[mx.array(rows.whole)]
    return results


def _pick(edited: mx.array, rows: SamplingRows) -> mx.array:
    """(L,) sampled ids, -1 when nothing is allowed."""
    ids, top = mx.argmax(edited, -1).astype(mx.int32), edited.max(-1)
    drawn = np.flatnonzero((rows.temperature != 0) & (rows.target < 0))
    if len(drawn):
        index = mx.array(drawn.astype(np.int32))
        temperature = mx.array(rows.temperature[drawn])[:, None]
        x = (edited[index] - top[index, None]) / temperature
        ids = mx.put_along_axis(ids, index, _draw(x, rows, drawn), axis=0)
    return mx.where(mx.isfinite(top), ids, -1)


def _draw(x: mx.array, rows: SamplingRows, part: AnyArray) -> mx.array:
    """(N,) ids of the tempered rows `part`; x (N, V) is 0 at the top of each."""
    seed_words = np.ascontiguousarray(rows.seed[part]).view(np.uint32).reshape(-1, 2)
    position = rows.position[part].astype(np.uint32)
    noise = gumbel_noise(mx.array(seed_words), mx.array(position), x.shape[1])
    drawn = mx.where(_kept(x, rows, part), x + noise, -mx.inf)
    return mx.argmax(drawn, -1).astype(mx.int32)


def _kept(x: mx.array, rows: SamplingRows, part: AnyArray) -> mx.array:
    """(N, V) which ids the filters leave for the draw."""
    keep = x > -mx.inf
    min_p, top_k, top_p = rows.min_p[part], rows.top_k[part], rows.top_p[part]
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):  # 0 is off: no value is below -inf
            floor = np.log(min_p.astype(np.float64)).astype(np.float32)
        keep = keep & (x >= mx.array(floor)[:, None])
    if ((top_k > 0) | (top_p < 1)).any():
        order = -mx.sort(-mx.where(keep, x, -mx.inf), axis=-1)  # (N, V) falling
        last = _last_of_top_k(top_k, x.shape[1])
        order = mx.where(order >= mx.take_along_axis(order, last, 1), order, -mx.inf)
        if (top_p < 1).any():
            last = mx.minimum(last, _last_of_top_p(order, top_p))
        keep = keep & (x >= mx.take_along_axis(order, last, 1))
    return keep


def _last_of_top_k(top_k: AnyArray, vocab_size: int) -> mx.array:
    """(N, 1) the index of each row's k-th value among its sorted ones."""
    k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    return mx.array((k[:, None] - 1).astype(np.int32))


def _last_of_top_p(order: mx.array, top_p: AnyArray) -> mx.array:
    """(N, 1) the first place at which the share of the mass reaches top_p; order (N, V) falls."""
    mass = mx.cumsum((mx.exp(order) * 2.0**_MASS_BITS).astype(mx.int64), axis=-1)
    # top_p = mantissa * 2 ** (exponent - 24); the product with the total keeps within 64 bits
    mantissa, exponent = np.frexp(np.minimum(top_p, 1).astype(np.float64))
    factor = mx.array((mantissa * (1 << 24)).astype(np.int64))[:, None]
    shift = mx.array(np.clip(-exponent, 0, 62).astype(np.int64))[:, None]
    total, low = mass[:, -1:], mx.array(24, mx.int64)
    rest = total & mx.array((1 << 24) - 1, mx.int64)
    wanted = ((total >> low) * factor + ((rest * factor) >> low)) >> shift
    last = (mass < wanted).astype(mx.int32).sum(-1, keepdims=True)
    width = order.shape[1] - 1
    return mx.where(mx.array(top_p >= 1)[:, None], width, mx.minimum(last, width))


def _logprobs(logits: mx.array, ids: mx.array, wanted: mx.array, width: int) -> dict[str, mx.array]:
    """The fields of `LogprobRows`; wanted: (L,) `SamplingRows.num_logprobs`, -1 where refused."""
    log_mass = mx.logsumexp(logits, axis=-1, keepdims=True)  # (L, 1)
    chosen = mx.take_along_axis(logits, mx.maximum(ids, 0)[:, None], 1)  # (L, 1)
    rank = 1 + (logits > chosen).astype(mx.int32).sum(-1)
    found = min(width, logits.shape[1])
    top_ids = _likeliest(logits, found)  # (L, K)
    top = mx.take_along_axis(logits, top_ids, 1) - log_mass
    beyond = mx.arange(found) >= wanted[:, None]
    asked, pad = wanted >= 0, [(0, 0), (0, width - found)]
    return {
        "chosen": mx.where(asked, (chosen - log_mass)[:, 0], -mx.inf),
        "rank": mx.where(asked, rank, 0),
        "top_ids": mx.pad(mx.where(beyond, -1, top_ids), pad, constant_values=-1),
        "top": mx.pad(mx.where(beyond, -mx.inf, top), pad, constant_values=-math.inf),
    }


def _likeliest(logits: mx.array, k: int) -> mx.array:
    """(L, k) ids of the greatest logits, the lowest id first at a tie. topk promises no order of
    ties, so it gets integers that have none: a float's bits in the order of its value above, the id
    counted backwards below."""
    if k == 0:
        return mx.zeros((logits.shape[0], 0), mx.int32)
    bits = (logits + 0.0).view(mx.int32).astype(mx.int64)  # -0 becomes 0
    ordered = mx.where(bits < 0, bits ^ mx.array(0x7FFFFFFF, mx.int64), bits)
    last = logits.shape[1] - 1
    backwards = last - mx.arange(logits.shape[1], dtype=mx.int64)
    keys = ordered * mx.array(1 << 32, mx.int64) + backwards
    top = mx.sort(mx.topk(keys, k, axis=-1), axis=-1)[:, ::-1]
    return (last - (top & mx.array(0xFFFFFFFF, mx.int64))).astype(mx.int32)
