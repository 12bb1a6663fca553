"""What a step asks of the device: copies, launches, waits; counted on one whose kernels do nothing
but the first of a step, which is made by numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, EngineDeadError
from vllmx_core.plan import LogitEdits
from vllmx_core.sampling import SamplingParams
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.arch import number
from vllmx_cuda.device.device import Product
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Kernel, Variant
from vllmx_cuda.loaded import CudaLoadedModel
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.wire.messages import CoreRequest, pack_ids
from vllmx_testing.attention_checks import attention_model
from vllmx_testing.cuda.emulated_device import EmulatedDevice, EmulatedGraph
from vllmx_testing.cuda.emulated_products import array
from vllmx_testing.harness import mixed_steps
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder

PAGE, MAX_LEN, ROWS = 16, 512, 20


class IdleDevice(EmulatedDevice):
    """Copies copy; launches are counted, and `begin_step` runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []
        self.table: Memory | None = None
        self.tokens: list[int] = []
        """Of the last step as its kernels see them."""
        self.entries: set[str] = set()
        """Kernels that were launched."""
        self.launched: list[Kernel] = []

    def submit(self, kind: str, *calls: Any) -> None:
        self.log.append(kind)
        super().submit(kind, *calls)

    def launch(
        self,
        variant: Variant,
        sizes: dict[str, int],
        arguments: Sequence[Memory | int | float | None],
    ) -> None:
        variant.launch(sizes)
        entry = variant.kernel.entry
        self.entries.add(entry)
        self.launched.append(variant.kernel)
        assert variant.runs_on(number(self.info.arch))
        self.submit("launch", lambda: self._begin(*arguments) if entry == "begin_step" else None)

    def _begin(self, tokens: Any, ids: Any, table: Any, patches: Any, *counts: Any) -> None:
        self.table = table
        count, num_patches = counts
        seen, sampled = array(tokens, np.int32)[:count], array(ids, np.int32)
        seen[:] = [t if t >= 0 else max(sampled[-t - 1], 0) for t in seen]
        self.tokens = seen.tolist()
        for index, value in array(patches, np.int32).reshape(-1, 2)[:num_patches]:
            if index >= 0:
                array(table, np.int32)[index] = value

    def multiply(self, product: Product, *operands: Any) -> None:
        self.submit("multiply", lambda: None)

    def capture(self, enqueue: Any) -> EmulatedGraph:
        log, self.log = self.log, []
        try:
            return super().capture(enqueue)
        finally:
            self.log = [*log, "capture"]


def load(device: IdleDevice, capture_s: float = 60.0, **changes: Any) -> CudaLoadedModel:
    model, source = decoder()
    options: dict[str, Any] = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 64,
        "dtype": "f32",
        "block_size": PAGE,
        "num_kv_blocks": 1024,
    }
    backend = CudaBackend(lambda: device, capture_s=capture_s)
    return backend.load(model, source, LoadOptions(**(options | changes)))


def decode_rows(count: int, context: int) -> list[Row]:
    blocks = -(-context // PAGE)
    return [Row([3], context - 1, range(32 * i, 32 * i + blocks)) for i in range(count)]


def asked(device: IdleDevice, loaded: CudaLoadedModel, rows: Any, **columns: Any) -> Counter[str]:
    """What one step and its result ask for."""
    before = device.calls.copy()
    plan = make_plan(rows, PAGE)
    loaded.step(plan, sampling_rows(plan.num_logit_rows, **columns)).result()
    return device.calls - before


STEADY = {"upload": 1, "graph": 2, "download": 1, "event": 2, "wait": 1}


@pytest.mark.parametrize("columns", [{}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}])
def test_a_decode_step_is_one_copy_in_two_graphs_and_one_copy_out(columns: dict[str, Any]) -> None:
    device = IdleDevice()
    loaded = load(device)
    for context in (15, 16, 17, 33, 34):  # into new blocks too
        for count in (1, 3, 16, 17, ROWS):
            assert asked(device, loaded, decode_rows(count, context), **columns) == STEADY


@pytest.mark.parametrize(
    ("columns", "launches", "passes"),
    [
        ({}, 2, 1),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, 2, 1),
        ({"temperature": 0.6, "top_k": 65}, 6, 4),
        ({"temperature": 0.6, "top_p": 0.95}, 6, 4),
    ],
)
def test_a_draw_reads_the_logits_as_often_as_it_must(
    columns: dict[str, Any], launches: int, passes: int
) -> None:
    """With the defaults of Qwen3's checkpoints once: 256 rows of 152,000 ids take an H200 36 us
    (computed), a launch in a graph 1.6 to 2.4 us."""
    device = IdleDevice()
    loaded = load(device, enforce_eager=True)
    device.launched.clear()
    asked(device, loaded, decode_rows(3, 15), **columns)
    sampled = [kernel for kernel in device.launched if kernel.entry.startswith("sample_")]
    assert len(sampled) == launches
    assert sum("vocab" in kernel.sizes for kernel in sampled) == passes


def test_what_few_rows_ask_for_costs_its_own_copy() -> None:
    device = IdleDevice()
    loaded = load(device)
    start, ids, values = np.array([0, 1, 1]), np.array([4]), np.array([2.0])
    edits = LogitEdits(start.astype(np.int32), ids.astype(np.int32), values.astype(np.float32))
    found = asked(device, loaded, decode_rows(2, 9), edits=edits)
    assert found == {**STEADY, "upload": 2, "graph": 1, "launch": 4}
    found = asked(device, loaded, decode_rows(2, 10), num_logprobs=3)
    assert found == {**STEADY, "launch": 2, "download": 2}
    assert asked(device, loaded, decode_rows(2, 11)) == STEADY


def test_rows_that_sample_nothing_are_not_downloaded() -> None:
    device = IdleDevice()
    loaded = load(device)
    found = asked(device, loaded, [Row([5], 0, [1], "none")])
    assert found == {"upload": 1, "graph": 1, "event": 2, "wait": 1}


def test_the_next_step_is_submitted_before_the_last_is_read() -> None:
    """Nothing waits in between, and the ids of the last step are never seen by the host."""
    device = IdleDevice(deferred=True)
    loaded = load(device)
    rows = decode_rows(2, 9)
    loaded.step(make_plan(rows, PAGE), sampling_rows(2)).result()
    device.log.clear()
    waits = device.calls["wait"]
    first = loaded.step(make_plan(rows, PAGE), sampling_rows(2))
    fed = [Row([-2], 9, rows[0].blocks), Row([-1], 9, rows[1].blocks)]
    second = loaded.step(make_plan(fed, PAGE), sampling_rows(2))
    assert device.log == ["event", "upload", "graph", "graph", "download", "event"] * 2
    assert device.calls["wait"] == waits
    first.result()
    assert device.tokens == [3, 3], "the second step has not begun"
    array(loaded._program.last_ids, np.int32)[:2] = [70, 80]  # type: ignore[union-attr]
    second.result()
    assert device.tokens == [80, 70]


@pytest.mark.parametrize("columns", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_a_step_in_halves_is_the_same_graphs_and_a_copy_of_the_parameters(
    columns: dict[str, Any],
) -> None:
    device = IdleDevice(deferred=True)
    loaded = load(device)
    plan = make_plan(decode_rows(3, 9), PAGE)
    device.log.clear()
    pending = loaded.forward(plan)
    first_half = ["event", "upload", "graph", "event"]
    assert device.log == first_half
    handle = pending.sample(sampling_rows(3, **columns))
    assert device.log == [*first_half, "event", "upload", "graph", "download", "event"]
    handle.result()


def test_a_half_step_that_cannot_be_sampled_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(IdleDevice(deferred=True))
    plan = make_plan(decode_rows(2, 9), PAGE)
    first, pending = loaded.step(plan, sampling_rows(2)), loaded.forward(plan)

    def fail(*arguments: Any) -> None:
        raise CapacityError("no room for logprobs")

    with monkeypatch.context() as patch:
        patch.setattr(loaded._program, "sample", fail)
        with pytest.raises(CapacityError, match="no room"):
            pending.sample(sampling_rows(2))
    second = loaded.step(plan, sampling_rows(2))
    assert first.result().ids.size == second.result().ids.size == 2


def test_a_step_holds_its_pinned_memory_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread cannot enqueue a third step while one waits for the first of two."""
    loaded = load(IdleDevice(deferred=True))
    plan = make_plan(decode_rows(2, 9), PAGE)
    first, second = (loaded.step(plan, sampling_rows(2)) for _ in range(2))
    read = first._sampled.read

    def read_late() -> Any:
        with pytest.raises(AssertionError, match="a third step in flight"):
            loaded.step(plan, sampling_rows(2))
        return read()

    monkeypatch.setattr(first, "_sampled", SimpleNamespace(read=read_late))
    first.result()
    third = loaded.step(plan, sampling_rows(2))
    second.result()
    third.result()


@pytest.mark.parametrize("deferred", [False, True])
def test_the_table_on_the_device_is_that_of_the_plan(deferred: bool) -> None:
    """Rows come and go, blocks change places: few entries by patches, many as a whole."""
    random, device = np.random.default_rng(8), IdleDevice(deferred=deferred)
    loaded = load(device)
    lengths = random.integers(20, 400, ROWS)
    tables = [random.integers(0, 1024, 32) for _ in range(ROWS)]
    whole = 0
    for step in range(60):
        count = int(random.integers(1, ROWS + 1)) if step % 7 == 0 else ROWS
        if step % 9 == 4:
            tables[int(random.integers(ROWS))] = random.integers(0, 1024, 32)
        if step % 20 == 19:
            tables = [*tables[1:], tables[0]]
        rows = [
            Row([1], int(lengths[i]), tables[i][: lengths[i] // PAGE + 1]) for i in range(count)
        ]
        plan = make_plan(rows, PAGE)
        whole += asked(device, loaded, rows)["upload_rows"]
        assert device.table is not None
        there = array(device.table, np.int32).reshape(-1, MAX_LEN // PAGE)
        blocks = plan.block_tables[0].shape[1]
        np.testing.assert_array_equal(there[:count, :blocks], plan.block_tables[0])
        lengths[:count] += 1
    assert 0 < whole < 20


def test_decode_steps_are_captured_at_the_start_the_largest_first() -> None:
    device = IdleDevice()
    loaded = load(device)
    assert loaded._program is not None
    keys = list(loaded._program.graphs._graphs)
    forward = [key.rows for key in keys if not isinstance(key, tuple)]
    assert forward == [20, 16, 8, 4, 2, 1]
    assert device.calls["capture"] == 4 * 6, "to the logits, and to ids of three kinds"
    assert device.calls["graph"] == 12, "each was replayed twice"
    asked(device, loaded, decode_rows(7, 9))
    assert device.calls["capture"] == 4 * 6


def test_without_time_at_the_start_they_are_captured_when_they_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = IdleDevice()
    loaded = load(device, capture_s=0.0)
    assert "captured 0 of 6 batch sizes, the rest at first use" in caplog.text
    assert device.calls["capture"] == 0
    asked(device, loaded, decode_rows(7, 9))
    assert device.calls["capture"] == 2
    assert asked(device, loaded, decode_rows(6, 9)) == STEADY
    assert asked(device, loaded, decode_rows(6, 9), temperature=1.0)["capture"] == 1


def test_eager_captures_nothing() -> None:
    device = IdleDevice()
    loaded = load(device, enforce_eager=True)
    for _ in range(2):
        found = asked(device, loaded, decode_rows(7, 9))
        assert found["graph"] == found["capture"] == 0
        assert found["launch"] > 10
    assert device.calls["capture"] == 0


class LostDevice(IdleDevice):
    """A GPU that goes away: from then on everything is refused."""

    refuses = ""
    """Which kind of call, if any."""

    def submit(self, kind: str, *calls: Any) -> None:
        if kind == self.refuses:
            raise OSError("gone")
        super().submit(kind, *calls)

    def event(self) -> Any:
        event = super().event()
        happen = event.wait

        def wait() -> None:
            if self.refuses == "wait":
                raise OSError("gone")
            happen()

        event.wait = wait  # type: ignore[method-assign]
        return event

    @contextmanager
    def faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineDeadError("the GPU is gone") from error

    def synchronize(self) -> None:
        if self.refuses:
            raise OSError("gone")
        super().synchronize()


@pytest.mark.parametrize("refuses", ["upload", "graph", "download", "event", "wait"])
def test_a_gpu_that_is_lost_while_serving_ends_the_engine(refuses: str) -> None:
    """Any call may be the first that is refused: the request in flight ends with an error, and the
    core says that it is dead, for its supervisor to start another."""
    device = LostDevice()
    core = EngineCore(load(device), EngineConfig(), max_model_len=MAX_LEN, vocab_size=96)
    params = SamplingParams(max_tokens=50, temperature=0.0)
    core.add(
        CoreRequest(
            request_id="a", prompt=pack_ids([1, 2, 3]), params=params, max_tokens=50, seed=0
        )
    )
    for _ in range(4):
        core.step()
    device.refuses = refuses
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the GPU is gone"):
            core.step()
    core.close()


def test_the_progress_of_capturing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    load(IdleDevice(), progress=True)
    shown = capsys.readouterr().err
    assert "capturing graphs" in shown
    assert shown.rstrip(" ").endswith("100%\n")


ON_TENSOR_CORES = {"paged_prefill", "paged_decode_mma", "linear_mma"}


@pytest.mark.parametrize(
    ("arch", "dtype", "wanted"),
    [("sm_80", "auto", "bf16"), ("sm_75", "auto", "f16"), ("sm_75", "bf16", "bf16")],
)
def test_turing_takes_f16_and_for_bf16_slower_kernels(
    arch: str, dtype: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device = IdleDevice(arch=arch)
    model, source = attention_model(num_heads=8, num_kv_heads=2, head_size=64)
    model = replace(model, shape=replace(model.shape, dtype="bf16"))
    options = LoadOptions(
        dtype=dtype, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=64
    )
    loaded = CudaBackend(lambda: device).load(model, source, options)
    assert loaded.info.dtype == wanted
    assert ("computing in f16" in caplog.text) == (wanted == "f16")
    for rows in mixed_steps():
        asked(device, loaded, rows)
    used = ON_TENSOR_CORES & device.entries
    assert used == (set() if (arch, wanted) == ("sm_75", "bf16") else ON_TENSOR_CORES)
    assert ("paged_combine" in device.entries) == (not used)  # else the last item joins all
    assert "sample_pick" in device.entries
