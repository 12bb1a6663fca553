"""Log-probabilities of whole rows by numpy.

The kernels choose the likeliest ids one after the other, each with the whole block. A GPU is never
asked for many, but tests compare all of a row, and emulated, that takes ten times as long as what
they are about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_cuda.kernel_specs import Variant

EMULATED = 16
"""The most of a row that the kernels choose here."""


def are_whole_rows(variant: Variant, arguments: Sequence[Any]) -> bool:
    """True for a launch that picks the top ids, of either kernel, and more than `EMULATED`."""
    return variant.kernel.source == "logprobs.cu" and arguments[-1] > EMULATED


def write_rows(variant: Variant, rows: int, arguments: Sequence[Any]) -> None:
    """Does the work of both kernels in the second one's launch; the first does nothing."""
    if variant.kernel.entry != "logprob_rows":
        return
    logits, wanted, ids, *_, chosen, rank, top_ids, top, vocab, _, width = arguments

    def view(span: npt.NDArray[np.uint8], dtype: npt.DTypeLike, columns: int) -> npt.NDArray[Any]:
        return span.view(dtype)[: rows * columns].reshape(rows, columns)

    values, ids = view(logits, np.float32, vocab), ids.view(np.int32)
    top_ids, top = view(top_ids, np.int32, width), view(top, np.float32, width)
    chosen, rank = view(chosen, np.float32, 1), view(rank, np.int32, 1)
    top_ids[...], top[...], chosen[...], rank[...] = -1, -np.inf, -np.inf, 0
    for row, (own, token) in enumerate(zip(values, ids[:rows], strict=True)):
        count = wanted.view(np.int32)[row]
        if token < 0 or count < 0:
            continue
        with np.errstate(invalid="ignore"):  # a row without a finite value
            below = own - own.max()
            logprobs = below - np.log(np.exp(below).sum())
        likeliest = np.argsort(-own, kind="stable")[:count]
        top_ids[row, : likeliest.size], top[row, : likeliest.size] = likeliest, logprobs[likeliest]
        chosen[row], rank[row] = logprobs[token], 1 + np.count_nonzero(own > own[token])
