"""Stages on the CPU, torch and metal backends: threads that share memory as processes do. On the
CPU the logits are those of one process to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.plan import F32
from vllmx_core.recorded.recording import record
from vllmx_core.sharding.stage_cuts import places
from vllmx_core.sharding.stages import staged
from vllmx_cpu.backend import CpuBackend
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_torch import device
from vllmx_torch.backend import TorchBackend
from vllmx_tp import communicator
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.pipeline import InnerStage
from vllmx_tp.region import Region

from .test_stages import CONFIGS, TEXT, of

WINDOWS = CONFIGS["TestGemma3"] | {"num_hidden_layers": 8, "sliding_window_pattern": 4}


def options(**more: Any) -> LoadOptions:
    return LoadOptions(
        max_model_len=64, num_kv_blocks=64, max_num_seqs=2, max_num_batched_tokens=32,
        block_size=16, group_caches=True, num_threads=1, **more,
    )  # fmt: skip


def logits(model: LoadedModel) -> list[F32]:
    """Logits of a text in three steps, beside another one; nothing of an inner stage."""
    has_head = not isinstance(model, InnerStage)
    groups = len(model.info.cache_windows)
    tables = [
        [[base + 2 * group + block for block in (0, 1)] for group in range(groups)]
        for base in (0, 32)
    ]
    cuts = [(0, 17, []), (17, 18, TEXT[2:9]), (18, 28, TEXT[9:10])]
    found, start = [], 0
    for begin, end, beside in cuts:
        rows = [Row((2 * TEXT)[begin:end], begin, tables[0], "all", 0)]
        if beside:
            rows.append(Row(beside, start, tables[1], "all", 1))
            start += len(beside)
        plan = make_plan(rows, 16)
        count = plan.num_logit_rows
        whole = np.arange(count, dtype=np.int32)
        result = model.step(plan, sampling_rows(count, num_logprobs=0, whole=whole)).result()
        if has_head:
            assert result.logits is not None
            found.append(result.logits)
    return found


def check(
    backend: type[Backend], config: dict[str, Any], stages: int | None, dtype: str = "f32"
) -> list[tuple[F32, F32]]:
    """What the last stage and one process came to."""
    model, source = of(config)
    stages = stages or len(places(record(model, 64).steps, model.shape)) + 1
    alone = backend().load(model, source, options(dtype=dtype))
    expected = logits(alone)
    alone.close()
    region = Region.create(stages, stages)

    def load(end: ThreadCommunicator) -> LoadedModel:
        mine = staged(model, source, options(), end.rank, stages)
        meeting = SharedMemoryCommunicator(region, end.rank)
        loaded = backend().load(mine, source, options(dtype=dtype, communicator=meeting))
        return loaded if end.rank == stages - 1 else InnerStage(loaded)

    threads = RankThreads(stages, load)
    *_, found = threads.each(logits)
    threads.each(lambda one: one.close())
    threads.close()
    region.close()
    return list(zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        WINDOWS,
        CONFIGS["tied"],
        *(CONFIGS[name] for name in ("TestQwen3Next", "TestNemotronH", "TestGptOss", "TestLfm2",
                                     "TestDeepSeekV3", "TestDeepseekV4", "TestGemma4Experts")),
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_the_cpu_computes_the_same_bits(config: dict[str, Any]) -> None:
    for found, expected in check(CpuBackend, config, None):
        np.testing.assert_array_equal(found, expected)


def test_bfloat16_and_arrays_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native code takes the size of a buffer as it is given."""
    monkeypatch.setattr(communicator, "BUFFER_BYTES", 1024)
    for found, expected in check(CpuBackend, CONFIGS["TestLlama"], 3, "bf16"):
        np.testing.assert_array_equal(found, expected)


def test_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    for dtype, most in (("f32", 1e-6), ("bf16", 1e-2)):
        for found, expected in check(TorchBackend, CONFIGS["TestQwen3Next"], 3, dtype):
            limit = most * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def test_metal() -> None:
    pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
    from vllmx_metal.backend import MetalBackend

    for found, expected in check(MetalBackend, CONFIGS["TestQwen3Next"], 3):
        limit = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
