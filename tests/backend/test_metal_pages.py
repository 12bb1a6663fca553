"""The KV pages are written in place: memory does not grow with the steps, and no step copies a
pool. Measured by MLX's own counters, which on the CPU device count every buffer."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.plan import StepPlan
from vllmx_testing.attention_checks import attention_model
from vllmx_testing.plans import Row, make_plan, sampling_rows

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.backend import MetalBackend  # noqa: E402
from vllmx_metal.loaded import MetalLoadedModel, MetalStepHandle  # noqa: E402

BLOCKS, PAGE, ROWS = 4096, 16, 4
POOL_BYTES = BLOCKS * PAGE * 2 * 64 * 4  # one of keys, with two heads of 64 float32


def load(kv: str = "f32") -> MetalLoadedModel:
    model, source = attention_model(head_size=64, num_heads=4, num_kv_heads=2)
    options = LoadOptions(
        dtype="f32",
        max_model_len=1024,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        block_size=PAGE,
        num_kv_blocks=BLOCKS,
        kv_cache_dtype=kv,
    )
    return MetalBackend().load(model, source, options)


def decode(position: int) -> StepPlan:
    """Each row takes the id that it sampled in the step before, as the engine overlaps steps."""
    position %= 120
    return make_plan(
        [
            Row([-row - 1], position, [row + ROWS * block for block in range(position // PAGE + 1)])
            for row in range(ROWS)
        ],
        PAGE,
    )


def run(loaded: MetalLoadedModel, first: int, count: int) -> None:
    """Two steps in flight, as in the engine's loop."""
    flying = deque([loaded.step(decode_known(first, [3, 5, 7, 9]), sampling_rows(ROWS))])
    for position in range(first + 1, first + count):
        flying.append(loaded.step(decode(position), sampling_rows(ROWS)))
        assert (flying.popleft().result().ids >= 0).all()
    flying.popleft().result()


def extra_bytes(loaded: MetalLoadedModel, first: int, count: int) -> tuple[int, int]:
    """(what stays allocated, the peak above the beginning) over `count` steps."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run(loaded, first, count)
    return mx.get_active_memory() - before, mx.get_peak_memory() - before


@pytest.mark.parametrize(("kv", "share"), [("f32", 1), ("int8", (64 + 4) / 256)])
def test_a_thousand_steps_copy_no_pool_and_keep_nothing(kv: str, share: float) -> None:
    loaded = load(kv)
    try:
        assert loaded.info.kv_cache_bytes == 4 * POOL_BYTES * share
        run(loaded, 0, 20)
        kept, peak = extra_bytes(loaded, 20, 1000)
    finally:
        loaded.close()
    print(f"{kv}: {kept} bytes kept, peak {peak}, pool {POOL_BYTES * share:.0f}")  # pytest -rP
    assert kept < POOL_BYTES // 64
    # the gathered context of a step is 4 rows of at most 120 tokens
    assert peak < POOL_BYTES * share / 2


class HoldsPools(MetalLoadedModel):
    """Keeps the pools of the step before, as that step does where it still runs: which happens to
    those who submit the next step first, and only if the machine is quick enough."""

    def _submit(self, handle: MetalStepHandle, arrays: Any) -> None:
        super()._submit(handle, arrays)
        self._held = [mx.array(pool) for page in self._pages for pool in page.arrays]


def test_pools_that_somebody_holds_would_be_copied() -> None:
    """Two steps in flight hold a pool twice: the test above can fail."""
    loaded = load()
    loaded.__class__ = HoldsPools
    try:
        run(loaded, 0, 20)
        _, peak = extra_bytes(loaded, 20, 10)
    finally:
        loaded.close()
    assert peak > POOL_BYTES


def test_closing_gives_the_memory_back() -> None:
    before = mx.get_active_memory()
    loaded = load()
    run(loaded, 0, 3)
    assert mx.get_active_memory() - before > 4 * POOL_BYTES
    loaded.close()
    assert mx.get_active_memory() - before < POOL_BYTES // 64


def test_what_was_sampled_is_what_one_step_at_a_time_gives() -> None:
    """Overlapped steps feed ids that the host has not seen."""
    results = []
    for overlapped in (True, False):
        loaded = load()
        handles = [loaded.step(decode_known(0, [3, 5, 7, 9]), sampling_rows(ROWS))]
        ids = []
        for position in range(1, 40):
            if not overlapped:
                ids.append(handles.pop().result().ids.tolist())
                handles.append(loaded.step(decode_known(position, ids[-1]), sampling_rows(ROWS)))
                continue
            handles.append(loaded.step(decode(position), sampling_rows(ROWS)))
            ids.append(handles.pop(0).result().ids.tolist())
        results.append(ids)
        loaded.close()
    assert results[0] == results[1]


def decode_known(position: int, ids: list[int]) -> StepPlan:
    plan = decode(position)
    plan.tokens[:] = np.array(ids, np.int32)
    return plan
