"""Which of cuBLASLt's algorithms a product gets: measured, remembered, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllmx_cuda import cupy_device as module
from vllmx_cuda.cublaslt import Addresses, Algorithm, CublasLtError
from vllmx_cuda.cupy_device import CupyDevice
from vllmx_cuda.device import Product


class FakeMatmul:
    """Algorithms of different speeds; what runs is written down."""

    ran: list[bytes] = []  # noqa: RUF012

    def __init__(self, lt: Any, product: Product) -> None:
        self.product = product

    def point(self, addresses: Addresses) -> None:
        self.pointed = addresses

    def algorithms(self, most: int) -> list[Algorithm]:
        return [Algorithm(bytes([i]) * 64, 0) for i in range(3)][:most]

    def accepts(self, algorithm: Algorithm) -> bool:
        return algorithm.data[0] < 3

    def run(self, algorithm: Algorithm, *addresses: int) -> None:
        FakeMatmul.ran.append(algorithm.data[:1])

    def close(self) -> None:
        pass


def test_algorithms_are_measured_while_tuning_and_remembered(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    seconds = {b"\0": 3.0, b"\1": 1.0, b"\2": 2.0}

    def measure(call: Any) -> float:
        call()
        return seconds[FakeMatmul.ran[-1]]

    monkeypatch.setattr(device._algorithms, "_measure", measure)
    x, small, large = (
        device.empty(4),
        Product(8, 3, 2, "bf16", "f32"),
        Product(9, 3, 2, "f16", "f16"),
    )
    with device.tuning():
        device.multiply(small, x, x, x)
    assert FakeMatmul.ran == [b"\0", b"\1", b"\2", b"\1"]
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


def test_scales_of_blocks_belong_to_their_product(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the library is only asked, which looks at them."""
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
    monkeypatch.setattr(device._algorithms, "_measure", lambda call: call() or 1.0)
    file, product, x = device._algorithms._file, Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    file.put(product, Algorithm(b"\7" * 64, 0))
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\0", b"\1", b"\2", b"\0"]
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
    monkeypatch.setattr(device._algorithms, "_measure", lambda call: call() or 1.0)
    product, x = Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\1", b"\2", b"\1"]
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
