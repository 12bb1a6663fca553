"""Which of cuBLASLt's algorithms a product gets: measured, remembered, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_cuda.device import cupy_device as module
from vllmx_cuda.device.algorithms import Algorithms
from vllmx_cuda.device.buckets import measured_rows
from vllmx_cuda.device.cublaslt import Addresses, Algorithm, CublasLtError
from vllmx_cuda.device.cupy_device import CupyDevice
from vllmx_cuda.device.device import Product
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.loading import tuning as tuning_module
from vllmx_cuda.loading.tuning import Tunable, tune


class FakeMatmul:
    """Algorithms of different speeds; what runs is written down."""

    ran: list[bytes] = []  # noqa: RUF012
    proposals = 3

    def __init__(self, lt: Any, product: Product) -> None:
        self.product = product

    def point(self, addresses: Addresses) -> None:
        self.pointed = addresses

    def algorithms(self, most: int) -> list[Algorithm]:
        return [Algorithm(bytes([i]) * 64, 0) for i in range(self.proposals)][:most]

    def fitting(self, algorithm: Algorithm) -> Algorithm | None:
        return replace(algorithm, workspace_bytes=self.product.m) if algorithm.data[0] < 3 else None

    def run(self, algorithm: Algorithm, *addresses: int) -> None:
        FakeMatmul.ran.append(algorithm.data[:1])

    def close(self) -> None:
        pass


def measured(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch, *seconds: float
) -> list[tuple[bytes, int]]:
    """Makes algorithms take so long (3, 1 and 2 s by default); what was timed, and of how many
    calls."""
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    timed: list[tuple[bytes, int]] = []

    def measure(call: Any, times: int) -> float:
        call()
        timed.append((FakeMatmul.ran[-1], times))
        return (seconds or (3.0, 1.0, 2.0))[FakeMatmul.ran[-1][0]]

    monkeypatch.setattr(device._algorithms, "_measure", measure)
    FakeMatmul.ran.clear()
    return timed


def test_algorithms_are_measured_while_tuning_and_remembered(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(device, monkeypatch)
    x, small, large = (
        device.empty(4),
        Product(8, 3, 2, "bf16", "f32"),
        Product(9, 3, 2, "f16", "f16"),
    )
    with device.tuning():
        device.multiply(small, x, x, x)
    once_each = [b"\0", b"\0", b"\1", b"\1", b"\2", b"\2"]
    assert FakeMatmul.ran == [*once_each, b"\1"], "to warm up, and for the time"
    FakeMatmul.ran.clear()
    device.multiply(small, x, x, x)
    device.multiply(large, x, x, x)
    assert FakeMatmul.ran == [b"\1", b"\0"], "the favourite where nothing is measured"
    again = module.AlgorithmFile(device._algorithm_file().path)
    assert again.get(small) == Algorithm(b"\1" * 64, 0)
    assert again.get(large) is None
    again.path.unlink()
    with device.tuning():
        device.multiply(small, x, x, x)
    assert not again.path.exists(), "nothing new, nothing written"


def test_those_far_behind_are_timed_once(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long calls are timed once as well; short ones are repeated, but not for long."""
    timed, x = measured(device, monkeypatch, 1e-4, 1e-3, 1.2e-4), device.empty(4)
    with device.tuning():
        device.multiply(Product(20, 3, 2, "bf16", "f32"), x, x, x)
    assert timed == [(b"\0", 1), (b"\0", 10), (b"\1", 1), (b"\2", 1), (b"\2", 10)]
    timed = measured(device, monkeypatch, 4e-4, 3e-3, 4.5e-4)
    with device.tuning():
        device.multiply(Product(200, 3, 2, "bf16", "f32"), x, x, x)
    assert timed == [(b"\0", 1), (b"\0", 5), (b"\1", 1), (b"\2", 1), (b"\2", 4)]


@pytest.mark.parametrize(("rows", "same"), [
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (9, 12), (12, 12), (13, 16), (17, 24), (25, 32),
    (33, 48), (1000, 1024), (1025, 1536), (1537, 2048), (8192, 8192),
])  # fmt: skip
def test_numbers_of_rows_that_share_an_algorithm(rows: int, same: int) -> None:
    assert measured_rows(rows) == same


class Prompts:
    """Products of one shape, as a model has them."""

    def __init__(self, device: CupyDevice) -> None:
        self.device, self.x = device, device.empty(4)
        self.launched = KERNELS["scale"].variant(VX_DTYPE=2, VX_VEC=8)

    def __call__(self, m: int) -> None:
        if m > 16:
            self.device.launch(self.launched, {"count": 8}, (self.x, self.x, 8, 1.0))
            self.device.multiply(Product(m, 3, 2, "bf16", "f32"), self.x, self.x, self.x)


def reopened(device: CupyDevice) -> None:
    """Opens the file as a process that starts now does."""
    device._algorithms = Algorithms(
        device._lt,
        device._algorithm_file(),
        device._algorithms._measure,
        FakeMatmul,  # type: ignore[arg-type]
    )


def test_prompts_of_every_length_are_measured_once(
    device: CupyDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    log: list[Any],
) -> None:
    """Measures are taken at load, in steps of rows; the next start measures and launches nothing,
    and any length has the algorithm of its step with the workspace that it needs itself."""
    caplog.set_level("INFO", "vllmx")
    timed, product = measured(device, monkeypatch), Prompts(device)
    tunable = Tunable(product, 100)
    assert tunable.sizes() == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    tune(device, [tunable], 60)
    assert len(timed) == 3 * 6
    assert "6 products of up to 100 rows" in caplog.messages[0]
    assert sum(entry[0] == "launched" for entry in log if isinstance(entry, tuple)) == 6

    reopened(device)
    log.clear()
    caplog.clear()
    tune(device, [tunable], 60)
    assert len(timed) == 3 * 6
    assert not caplog.messages
    assert not log, "nothing was launched"
    with device.tuning():
        for m in (17, 24, 33, 97, 100):
            FakeMatmul.ran.clear()
            device.multiply(Product(m, 3, 2, "bf16", "f32"), product.x, product.x, product.x)
            assert FakeMatmul.ran == [b"\1"]
            _, algorithm = device._algorithms._ready[Product(m, 3, 2, "bf16", "f32")]
            assert algorithm.workspace_bytes == m
    assert len(timed) == 3 * 6


def test_measuring_ends_when_its_time_is_over(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Few rows come first; what is left keeps the favourite in this process, whoever asks, and is
    measured by the next."""
    caplog.set_level("INFO", "vllmx")
    timed, product = measured(device, monkeypatch), Prompts(device)
    clock = iter([0.0, 1.0, 2.0, 10.0])
    monkeypatch.setattr(tuning_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    tune(device, [Tunable(product, 64)], 10)
    assert len(timed) == 3 * 2
    assert "measured 2 of 4 products: those of 48 rows" in caplog.messages[-1]
    FakeMatmul.ran.clear()
    product(48)
    with device.tuning():
        product(47)
    assert FakeMatmul.ran == [b"\0", b"\0"]
    assert len(timed) == 3 * 2
    measured(device, monkeypatch)
    reopened(device)
    FakeMatmul.ran.clear()
    assert not device.unmeasured(lambda: product(32))
    assert device.unmeasured(lambda: product(48))
    assert not FakeMatmul.ran


def test_the_only_algorithm_is_not_measured_and_remembered(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMatmul, "proposals", 1)
    timed, product = measured(device, monkeypatch), Prompts(device)
    tune(device, [Tunable(product, 24)], 60)
    assert not timed
    assert not device.unmeasured(lambda: product(24))
    reopened(device)
    assert not device.unmeasured(lambda: product(24))


def test_rows_that_refuse_the_algorithm_of_their_step(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Get the favourite, and do not take it away from the others."""

    class Picky(FakeMatmul):
        def fitting(self, algorithm: Algorithm) -> Algorithm | None:
            return None if self.product.m == 21 else super().fitting(algorithm)

    timed, product = measured(device, monkeypatch), Prompts(device)
    monkeypatch.setattr(device._algorithms, "_make", Picky)
    with device.tuning():
        for m in (24, 21, 22):
            FakeMatmul.ran.clear()
            product(m)
            assert FakeMatmul.ran[-1] == (b"\0" if m == 21 else b"\1")
    assert len(timed) == 3


def test_scales_of_blocks_belong_to_their_product(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library looks at them when it is only asked, too."""
    made: list[FakeMatmul] = []

    def make(lt: Any, product: Product) -> FakeMatmul:
        made.append(FakeMatmul(lt, product))
        return made[-1]

    monkeypatch.setattr(device._algorithms, "_make", make)
    product = Product(8, 128, 512, "f8e4m3", "bf16", blocks=True)
    assert device.can_multiply(product)
    assert made[0].pointed.w_scale % 256 == made[0].pointed.x_scale % 256 == 0
    assert made[0].pointed.w_scale
    assert made[0].pointed.x_scale
    x, of_x, of_w = (device.empty(4) for _ in range(3))
    device.multiply(product, x, x, x, None, (of_x, of_w))
    assert made[1].pointed == Addresses(0, of_w.address, of_x.address)


def test_a_stored_algorithm_that_the_library_refuses_is_measured_again(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU of the same name, or a file that somebody has edited."""
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    monkeypatch.setattr(device._algorithms, "_measure", lambda call, times: call() or 1.0)
    file, product, x = device._algorithms._file, Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    file.put(product, Algorithm(b"\7" * 64, 0))
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\0", b"\0", b"\1", b"\1", b"\2", b"\2", b"\0"]
    assert module.AlgorithmFile(file.path).get(product) == Algorithm(bytes(64), 0)


class RefusingMatmul(FakeMatmul):
    """Knows no FP8; of bf16 it proposes an algorithm that it then refuses to run."""

    open_ones = 0

    def __init__(self, lt: Any, product: Product) -> None:
        super().__init__(lt, product)
        RefusingMatmul.open_ones += 1

    def algorithms(self, most: int) -> list[Algorithm]:
        if self.product.dtype == "f8e4m3":
            raise CublasLtError(f"cuBLASLt refuses {self.product}: no algorithm for it")
        return super().algorithms(most)

    def run(self, algorithm: Algorithm, *addresses: int) -> None:
        if algorithm.data[0] == 0:
            raise CublasLtError("status 15")
        super().run(algorithm, *addresses)

    def close(self) -> None:
        RefusingMatmul.open_ones -= 1


def test_products_that_are_refused(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked once for each, told once for each shape of weights."""
    monkeypatch.setattr(device._algorithms, "_make", RefusingMatmul)
    caplog.set_level("INFO", "vllmx")
    for _ in range(2):
        for m in (5, 64):
            assert not device.can_multiply(Product(m, 32, 16, "f8e4m3", "f32"))
            assert device.can_multiply(Product(m, 32, 16, "i8", "i32"))
    assert RefusingMatmul.open_ones == 0
    (line,) = caplog.messages
    assert "refuses" in line
    assert "n=32, k=16" in line


def test_an_algorithm_that_does_not_run_is_not_chosen(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._algorithms, "_make", RefusingMatmul)
    monkeypatch.setattr(device._algorithms, "_measure", lambda call, times: call() or 1.0)
    product, x = Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\1", b"\1", b"\2", b"\2", b"\1"]
    monkeypatch.setattr(RefusingMatmul, "algorithms", lambda self, most: [FAILS, FAILS_TOO])
    with device.tuning(), pytest.raises(CublasLtError, match="status 15"):
        device.multiply(Product(9, 3, 2, "bf16", "f32"), x, x, x)


FAILS, FAILS_TOO = Algorithm(bytes(64), 0), Algorithm(bytes(64), 1)


def test_a_damaged_file_of_choices_is_ignored(tmp_path: Path) -> None:
    path, product, data = tmp_path / "choices.json", Product(1, 1, 1, "f16", "f16"), "00" * 64
    good = module.AlgorithmFile(path)
    good.put(product, Algorithm(bytes(64), 256))
    good.save()
    text = path.read_text()
    assert module.AlgorithmFile(path).get(product) == Algorithm(bytes(64), 256)
    damaged = [text[:-1], "", "[]", '{"a": 1}', text.replace(data, "zz"), text.replace(data, "00")]
    for size in ("-1", str(1 << 40)):  # more than the workspace has would be written beyond it
        damaged.append(text.replace("256", size))
    for text in damaged:
        path.write_text(text)
        assert module.AlgorithmFile(path).get(product) is None, text
    path.write_text(json.dumps(json.loads(damaged[0] + "}")))
    path.parent.chmod(0o777)
    assert module.AlgorithmFile(path).get(product) is None, "others may write there"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_what_is_asked_about_has_addresses(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch, biased: bool, blocks: bool
) -> None:
    """The library may refuse a product whose bias or scales lie at no address."""
    pointed: list[Addresses] = []
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    monkeypatch.setattr(FakeMatmul, "point", lambda self, addresses: pointed.append(addresses))
    product = Product(16, 32, 512, "f8e4m3", "bf16", biased=biased, blocks=blocks)
    assert device.can_multiply(product)
    [addresses] = pointed
    assert bool(addresses.bias) == biased
    assert bool(addresses.w_scale) == bool(addresses.x_scale) == blocks
