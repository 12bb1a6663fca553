"""The draw of `vllmx_core.sampling`, for many rows at once: the same random words, and noise that
is float32 throughout, as a GPU of Apple's has nothing wider; it differs in its last bit or two."""

from __future__ import annotations

import mlx.core as mx

from vllmx_metal.fusion import fused

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _product(factor: int, word: mx.array) -> tuple[mx.array, mx.array]:
    """High and low word of a product of two words."""
    wide = word.astype(mx.uint64) * mx.array(factor, mx.uint64)
    return (wide >> mx.array(32, mx.uint64)).astype(mx.uint32), wide.astype(mx.uint32)


def philox4x32(c0: mx.array, c1: mx.array, k0: mx.array, k1: mx.array) -> list[mx.array]:
    """Ten rounds of Philox4x32 with counter (c0, c1, 0, 0) and key (k0, k1): uint32 arrays that
    broadcast together. Returns the four words."""
    c2 = c3 = c0 ^ c0  # zeros of any shape: this is compiled once for all
    for _ in range(10):
        high0, low0 = _product(_M0, c0)
        high1, low1 = _product(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + mx.array(_W0, mx.uint32), k1 + mx.array(_W1, mx.uint32)
    return [c0, c1, c2, c3]


@fused
def _noise(blocks: mx.array, position: mx.array, low: mx.array, high: mx.array) -> list[mx.array]:
    """Four of (L, blocks), one for each word; blocks (1, blocks), the others (L, 1)."""

    def noise(word: mx.array) -> mx.array:
        uniform = (word >> mx.array(9, mx.uint32)).astype(mx.float32) * 2.0**-23 + 2.0**-24
        return -mx.log(-mx.log(uniform))

    return [noise(word) for word in philox4x32(blocks, position, low, high)]


def gumbel_noise(seed_words: mx.array, position: mx.array, vocab_size: int) -> mx.array:
    """(L, V) float32, `vllmx_core.sampling.gumbel_noise` of each row.

    seed_words: (L, 2) low and high word of each seed. position: (L,). Both uint32.
    """
    blocks = mx.arange((vocab_size + 3) // 4, dtype=mx.uint32)[None]
    noise = mx.stack(_noise(blocks, position[:, None], seed_words[:, :1], seed_words[:, 1:]), -1)
    return noise.reshape(len(position), -1)[:, :vocab_size]
