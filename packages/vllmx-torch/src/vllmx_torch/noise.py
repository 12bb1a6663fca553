"""The draw of `vllmx_core.sampling`, for many rows at once: the same words, the same noise."""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words. int64 wraps, so its 64 bits are right and only
    the sign that the shift drags in has to go."""
    product = word * factor
    return (product >> 32) & _LOW, product & _LOW


def philox4x32(c0: Tensor, c1: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """Ten rounds of Philox4x32 with counter (c0, c1, 0, 0) and key (k0, k1): words in int64 that
    broadcast together. Returns their common shape + (4,)."""
    c0, c1, k0, k1 = torch.broadcast_tensors(c0, c1, k0, k1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _product(_M0, c0)
        high1, low1 = _product(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def gumbel_noise(seed_words: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """(L, V) float32 as `vllmx_core.sampling.gumbel_noise` has it for each row.

    seed_words: (L, 2) low and high word of each seed. position: (L,). Both int64.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=position.device)
    words = philox4x32(
        blocks, (position & _LOW)[:, None], seed_words[:, 0, None], seed_words[:, 1, None]
    ).flatten(1)[:, :vocab_size]  # (L, V)
    uniform = (words >> 9).double() * 2.0**-23 + 2.0**-24
    return (-torch.log(-torch.log(uniform))).float()
