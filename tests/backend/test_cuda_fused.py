"""Decode steps on the CUDA backend without a GPU: five launches a layer, and the ids of steps that
launch every op on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.driver import UNFUSED_SWITCH
from vllmx_models.families.llama import llama
from vllmx_models.families.mistral import mistral
from vllmx_models.families.qwen import qwen3
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
