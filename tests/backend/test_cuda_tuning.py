"""A loaded model has measured every product of cuBLASLt that a step can ask for, however its
weights lie; on a device that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.weights.part import WeightSource
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.algorithms import _key
from vllmx_cuda.device.device import Product
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.matrices import codes8, products
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

from .cuda_models import EIGHT_BITS, MODEL, Quantised

TOKENS = 200
"""Of a step at most: none of the numbers of rows that algorithms are chosen for."""


class MeasuringDevice(EmulatedDevice):
    """Remembers for which products an algorithm was chosen, as `Algorithms` does."""

    def __init__(self, known: set[str]) -> None:
        super().__init__()
        self.known, self.multiplied, self.unknown = known, 0, list[Product]()
        self._measures = False
        self._rehearsed: list[str] | None = None

    def launch(self, variant: Variant, sizes: dict[str, int], arguments: Any) -> None:
        if self._rehearsed is None:
            self.submit("launch")

    def multiply(self, product: Product, *operands: Any) -> None:
        key = _key(product)
        if self._rehearsed is not None:
            self._rehearsed.append(key)
        elif self._measures:
            self.known.add(key)
        else:
            self.multiplied += 1
            if key not in self.known:
                self.unknown.append(product)

    def unmeasured(self, enqueue: Callable[[], None]) -> bool:
        self._rehearsed = rehearsed = list[str]()
        enqueue()
        self._rehearsed = None
        return bool(set(rehearsed) - self.known)

    @contextmanager
    def tuning(self) -> Iterator[None]:
        self._measures = True
        yield
        self._measures = False


def plain() -> ArraySource:
    return Quantised(lambda name, values: None).twin()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("kind", ["plain", *EIGHT_BITS])
def test_no_step_has_a_product_that_was_not_measured(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WORK_BYTES", 96 << 10)  # several pieces a matrix
    monkeypatch.setattr(codes8, "WORK_BYTES", 280 << 10)  # two pieces from 137 rows on
    source: WeightSource = plain() if kind == "plain" else Quantised(EIGHT_BITS[kind])
    options = LoadOptions(
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=48,
        max_num_batched_tokens=TOKENS,
        block_size=16,
        num_kv_blocks=64,
        enforce_eager=True,
    )
    known: set[str] = set()
    for start in range(2):
        device = MeasuringDevice(known)
        before = len(known)
        loaded = CudaBackend(lambda device=device: device).load(MODEL, source, options)  # type: ignore[misc]
        assert (len(known) > before) == (start == 0)
        assert start == 0 or not device.calls["launch"], "the next start runs nothing"
        for m in (2, 17, 31, 33, 64, 65, 127, 129, 150, 199, TOKENS):
            plan = make_plan([Row(np.arange(m) % 61, 0, range(16))], 16)
            loaded.step(plan, sampling_rows(1)).result()
        assert device.multiplied
        assert not device.unknown
        loaded.close()
