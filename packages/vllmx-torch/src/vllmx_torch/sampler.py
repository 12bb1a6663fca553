"""The sampler on the device: what `vllmx_core.reference.sampler` computes, all rows at once and
without waiting for a value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from vllmx_core.plan import AnyArray, SamplingRows

from vllmx_torch.logit_edits import edited_logits
from vllmx_torch.noise import gumbel_noise
from vllmx_torch.transfer import upload

_CHUNK_VALUES = 1 << 24
"""Rows are worked on in pieces of about so many logits where float64 or int64 copies are made."""


def sample(logits: Tensor, rows: SamplingRows, fed_tokens: Tensor) -> dict[str, Tensor]:
    """Samples or scores each of the (L, V) float32 logit rows; `logits` stays as it is.

    fed_tokens: (L,) the id that each row feeds at its logit row, for `TokenCounts.pending`.
    Returns "ids" (L,) and, when a row asks for them, the fields of `LogprobRows` and
    "logits" (A, V) of the rows in `whole`.
    """
    device = logits.device
    broken = (torch.isnan(logits) | torch.isposinf(logits)).any(-1)  # (L,)
    target = upload(rows.target, np.int64, device)
    ids = target
    if (rows.target < 0).any():
        picked = _pick(edited_logits(logits, rows, fed_tokens), rows)
        ids = torch.where(target >= 0, target, picked)
    ids = torch.where(broken, -1, ids)
    results = {"ids": ids.int()}
    if rows.max_logprobs >= 0:
        wanted = upload(rows.num_logprobs, np.int64, device).masked_fill(ids < 0, -1)
        results |= _logprobs(logits, ids, wanted, rows.max_logprobs)
    if rows.whole is not None:
        results["logits"] = logits[upload(rows.whole, np.int64, device)]
    return results


def _pick(edited: Tensor, rows: SamplingRows) -> Tensor:
    """(L,) sampled ids, -1 when nothing is allowed."""
    ids, top = edited.argmax(-1), edited.amax(-1)
    drawn = np.flatnonzero((rows.temperature != 0) & (rows.target < 0))
    for part in _pieces(drawn, edited.shape[1]):
        index = upload(part, np.int64, edited.device)
        temperature = upload(rows.temperature[part], np.float32, edited.device)
        x = (edited[index] - top[index, None]) / temperature[:, None]
        ids = ids.index_copy(0, index, _draw(x, rows, part))
    return torch.where(torch.isfinite(top), ids, -1)


def _draw(x: Tensor, rows: SamplingRows, part: AnyArray) -> Tensor:
    """(N,) ids of the tempered rows `part`; x (N, V) is 0 at the top of each."""
    seed, low = rows.seed[part], np.uint64(0xFFFFFFFF)
    seed_words = np.stack([seed & low, seed >> np.uint64(32)], axis=1).astype(np.int64)
    noise = gumbel_noise(
        upload(seed_words, np.int64, x.device),
        upload(rows.position[part], np.int64, x.device),
        x.shape[1],
    )
    return torch.where(_kept(x, rows, part), x + noise, -torch.inf).argmax(-1)


def _kept(x: Tensor, rows: SamplingRows, part: AnyArray) -> Tensor:
    """(N, V) which ids the filters leave for the draw."""
    keep = x > -torch.inf
    min_p, top_k, top_p = rows.min_p[part], rows.top_k[part], rows.top_p[part]
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):  # 0 is off: no value is below -inf
            floor = np.log(min_p.astype(np.float64))
        keep = keep & (x >= upload(floor, np.float32, x.device)[:, None])
    if ((top_k > 0) | (top_p < 1)).any():
        order = torch.where(keep, x, -torch.inf).sort(-1, descending=True).values  # (N, V)
        last = _last_of_top_k(top_k, x)
        order = torch.where(order >= order.gather(1, last), order, -torch.inf)
        if (top_p < 1).any():
            last = torch.minimum(last, _last_of_top_p(order, top_p))
        keep = keep & (x >= order.gather(1, last))
    return keep


def _last_of_top_k(top_k: AnyArray, x: Tensor) -> Tensor:
    """(N, 1) the index of each row's k-th value among its sorted ones."""
    width = x.shape[1]
    k = np.where(top_k > 0, np.minimum(top_k, width), width)
    return upload(k[:, None] - 1, np.int64, x.device)


def _last_of_top_p(order: Tensor, top_p: AnyArray) -> Tensor:
    """(N, 1) the first place at which the share of the mass reaches top_p; order (N, V) falls."""
    mass = order.double().exp().cumsum(-1)
    wanted = upload(top_p, np.float64, order.device)[:, None] * mass[:, -1:]
    last = torch.searchsorted(mass, wanted)  # (N, 1)
    off = upload(top_p >= 1, np.bool_, order.device)[:, None]
    return last.clamp(max=order.shape[1] - 1).masked_fill(off, order.shape[1] - 1)


def _logprobs(logits: Tensor, ids: Tensor, wanted: Tensor, width: int) -> dict[str, Tensor]:
    """The fields of `LogprobRows`; wanted: (L,) `SamplingRows.num_logprobs`, -1 where refused."""
    pieces = [
        _logprob_rows(logits[part], ids[part], wanted[part], width)
        for part in _slices(logits.shape[0], logits.shape[1])
    ]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _logprob_rows(logits: Tensor, ids: Tensor, wanted: Tensor, width: int) -> dict[str, Tensor]:
    wide, asked = logits.double(), wanted >= 0
    log_mass = torch.logsumexp(wide, -1, keepdim=True)  # (L, 1)
    chosen = wide.gather(1, ids.clamp(min=0)[:, None])  # (L, 1)
    rank = 1 + (wide > chosen).sum(-1)
    found = min(width, logits.shape[1])
    top_ids = _likeliest(logits, found)  # (L, K)
    top = wide.gather(1, top_ids) - log_mass
    beyond = torch.arange(found, device=ids.device) >= wanted[:, None]
    pad = (0, width - found)
    return {
        "chosen": (chosen - log_mass)[:, 0].float().masked_fill(~asked, -torch.inf),
        "rank": rank.int().masked_fill(~asked, 0),
        "top_ids": _padded(top_ids.int().masked_fill(beyond, -1), pad, -1),
        "top": _padded(top.float().masked_fill(beyond, -torch.inf), pad, -torch.inf),
    }


def _padded(x: Tensor, pad: tuple[int, int], value: float) -> Tensor:
    return torch.nn.functional.pad(x, pad, value=value)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """(L, k) ids of the greatest logits, the lowest id first at a tie. topk promises no order of
    ties, so it gets integers that have none: a float's bits in the order of its value above, the id
    counted backwards below."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = logits.shape[1] - 1
    backwards = last - torch.arange(logits.shape[1], device=logits.device)
    keys = ordered * (1 << 32) + backwards
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _slices(count: int, vocab_size: int) -> Iterator[slice]:
    """Cuts all rows into slices, at least one."""
    step = max(1, _CHUNK_VALUES // vocab_size)
    for begin in range(0, max(1, count), step):
        yield slice(begin, begin + step)


def _pieces(index: AnyArray, vocab_size: int) -> Iterator[AnyArray]:
    """`index` in pieces; none when it is empty."""
    if len(index):
        yield from (index[part] for part in _slices(len(index), vocab_size))
