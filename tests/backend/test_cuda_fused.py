"""Decode steps on the CUDA backend without a GPU: five launches a layer, and the ids of steps that
launch every op on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.driver import UNFUSED_SWITCH
from vllmx_cuda.kernel_specs import Variant
from vllmx_models.families.llama import llama
from vllmx_models.families.mistral import mistral
from vllmx_models.families.qwen import qwen3
from vllmx_testing.cuda.emulated_device import EmulatedDevice, array
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows

from .cuda_models import (
    EMULATOR,
    MODEL,
    PROMPTS,
    QWEN3,
    CountingDevice,
    Quantised,
    _can_emulate,
    emulated,
    fp8_rows,
    options,
    without_embedding,
)
from .test_cuda_quantised import gguf_as
from .test_cuda_w4 import FORMS, quantised

__all__ = ["_can_emulate"]  # a fixture
LAYERS = 2
SOURCES = {
    "dense": lambda: Quantised(lambda name, values: None),
    "fp8": lambda: Quantised(without_embedding(fp8_rows)),
    "Q8_0": lambda: Quantised(without_embedding(gguf_as({}, "Q8_0"))),
    "Q4_K": lambda: Quantised(without_embedding(gguf_as({}, "Q4_K"))),
    **{name: lambda name=name: quantised(*FORMS[name]) for name in ("gptq", "gptq 8 bit", "awq")},
}
OTHERS = {
    "qwen3": (qwen3, {}),
    "llama": (llama, {"architectures": ["LlamaForCausalLM"]}),
    "mistral": (
        mistral,
        {"architectures": ["MistralForCausalLM"], "sliding_window": 16, "head_dim": 64},
    ),
}


def launched(source: Quantised, rows: int) -> int:
    """Launches of a decode step to its logits."""
    device = CountingDevice(emulator=EMULATOR, num_processors=8)
    how = replace(options("bf16"), enforce_eager=True, max_num_seqs=16, num_kv_blocks=64)
    loaded = CudaBackend(lambda: device, tune_s=0).load(MODEL, source, how)
    try:
        plan = make_plan([Row([3], 40, range(3 * i, 3 * i + 3)) for i in range(rows)], 16)
        before = device.entries.total()
        pending = loaded.forward(plan)
        found = device.entries.total() - before
        pending.sample(sampling_rows(rows)).result()
        return found
    finally:
        loaded.close()


@pytest.mark.parametrize("form", SOURCES)
def test_a_decode_step_is_five_launches_a_layer(form: str) -> None:
    """And six others: its begin, the embedding, the norms of the first and the last, the rows that
    want logits, the head."""
    source = SOURCES[form]()
    for rows in (1, 2, 9, 16):
        assert launched(source, rows) == 5 * LAYERS + 6, rows


def test_a_switch_launches_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNFUSED_SWITCH, "1")
    assert launched(SOURCES["dense"](), 1) == 9 * LAYERS + 5


@pytest.mark.parametrize("family", OTHERS)
def test_ids_are_those_of_single_ops(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through graphs and eager steps."""
    make, changes = OTHERS[family]
    model = make({**QWEN3, **changes})
    source, found = Quantised(lambda name, values: None, model), []
    for unfused, eager in (("0", False), ("0", True), ("1", False)):
        monkeypatch.setenv(UNFUSED_SWITCH, unfused)
        loaded = emulated().load(model, source, options("bf16", enforce_eager=eager))
        try:
            found.append(Driver(loaded).generate(PROMPTS, 8))
        finally:
            loaded.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("form", ["fp8", "gptq", "awq"])
def test_ids_of_coded_weights_are_those_of_single_ops(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, found = SOURCES[form](), []
    for unfused in ("0", "1"):
        monkeypatch.setenv(UNFUSED_SWITCH, unfused)
        loaded = emulated().load(MODEL, source, options("bf16"))
        try:
            found.append(Driver(loaded).generate(PROMPTS, 8))
        finally:
            loaded.close()
    assert found[0] == found[1]


class ListeningDevice(EmulatedDevice):
    """The parts of the sum of the first row's squares, as each norm of a product reads them."""

    def __init__(self) -> None:
        super().__init__(emulator=EMULATOR)
        self.squares: list[np.ndarray[Any, Any]] = []

    def launch(self, variant: Variant, sizes: dict[str, int], arguments: Any) -> None:
        names = [argument.name for argument in variant.kernel.arguments]
        given = dict(zip(names, arguments, strict=True))
        if given.get("norm_squares") is not None:
            parts = array(given["norm_squares"], np.float32)
            self.squares.append(parts[: given["num_squares"]].copy())
        super().launch(variant, sizes, arguments)


@pytest.mark.parametrize("form", ["dense", "fp8", "gptq"])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(form: str) -> None:
    """Blocks of a product of 1 row have fewer outputs than those of more rows."""
    device, source = ListeningDevice(), SOURCES[form]()
    how = replace(options("bf16"), enforce_eager=True, max_num_seqs=16, num_kv_blocks=16)
    loaded, found = CudaBackend(lambda: device, tune_s=0).load(MODEL, source, how), []
    try:
        for count in (1, 3, 16):
            plan = make_plan([Row([3 + i], 0, [i]) for i in range(count)], 16)
            rows = sampling_rows(count, num_logprobs=MODEL.shape.vocab_size)
            device.squares.clear()
            logprobs = loaded.step(plan, rows).result().logprobs
            assert logprobs is not None
            squares = np.array(device.squares)
            assert len(squares) == 2 * LAYERS - 1  # all but the first and the last norm
            assert squares.all()
            found.append((squares, logprobs.top_ids[0], logprobs.top[0]))
    finally:
        loaded.close()
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(got, want)
