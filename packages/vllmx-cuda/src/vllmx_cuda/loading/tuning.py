"""Chooses cuBLASLt's algorithms, while a model is loaded, for every number of rows that a step may
have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllmx_core.system.progress import show_progress

from vllmx_cuda.device.buckets import measured_rows
from vllmx_cuda.device.device import Device

logger = logging.getLogger("vllmx.cuda")


@dataclass(frozen=True, slots=True)
class Tunable:
    """A product of which a model has one or more, all of the same shape."""

    enqueue: Callable[[int], None]
    """enqueue(m), whatever its operands hold."""
    most: int
    """Rows that it may have."""

    def sizes(self) -> list[int]:
        """One number of rows for each algorithm that is chosen, ascending."""
        found: list[int] = []
        while not found or found[-1] < self.most:
            found.append(min(measured_rows(found[-1] + 1 if found else 1), self.most))
        return found


def tune(
    device: Device, products: Sequence[Tunable], limit_s: float, *, progress: bool = False
) -> None:
    """Measures what nobody has measured on this kind of GPU, few rows first, until the time is
    over: what is left takes the library's favourite, and is measured by a later start."""
    missing = [
        (m, product)
        for product in products
        for m in product.sizes()
        if device.unmeasured(partial(product.enqueue, m))
    ]
    if not missing:
        return
    missing.sort(key=lambda pair: pair[0])
    begin, total = time.perf_counter(), len(missing)
    logger.info(
        "choosing cuBLASLt's algorithms for %d products of up to %d rows by measuring them: once on"
        " this kind of GPU, at most %.0f s",
        total,
        missing[-1][0],
        limit_s,
    )
    with device.tuning():
        for done, (m, product) in enumerate(missing):
            if time.perf_counter() - begin >= limit_s:
                logger.info(
                    "measured %d of %d products: those of %d rows and more take the library's"
                    " favourites until the next start",
                    done,
                    total,
                    m,
                )
                return
            product.enqueue(m)
            if progress:
                show_progress("choosing algorithms", done + 1, total)
    logger.info("measured %d products in %.1f s", total, time.perf_counter() - begin)
