"""Stages of several ranks each: the logits are those of as many ranks without stages to the last
bit, and with `--deterministic` those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.communicator import place_of
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.sharding.model import sharded
from vllmx_core.sharding.stages import staged
from vllmx_cpu.backend import CpuBackend
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_torch import device
from vllmx_torch.backend import TorchBackend
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.pipeline import InnerStage
from vllmx_tp.region import Region

from .test_stages import CONFIGS, LLAMA, of
from .test_stages_on_backends import logits, options

WIDE = LLAMA | {"intermediate_size": 128, "hidden_size": 64, "num_hidden_layers": 4}


def on_ranks(
    backend: type[Backend], config: dict[str, Any], stages: int, ranks: int, **how: bool
) -> list[F32]:
    """What rank 0 of the last stage comes to, as all others of that stage do."""
    model, source = of(config)
    region = Region.create(stages * ranks, stages)

    def load(end: ThreadCommunicator) -> LoadedModel:
        parts = [sharded(model, source, 64, number, ranks, **how) for number in range(ranks)]
        stage, number = divmod(end.rank, ranks)
        part: Any = parts[number]
        if stages > 1:
            part = staged(part, source, options(), stage, stages, as_rank_0=parts[0])
        meeting = SharedMemoryCommunicator(region, end.rank)
        assert place_of(meeting) == end.rank
        loaded = backend().load(part, source, options(dtype="f32", communicator=meeting))
        return loaded if stage == stages - 1 else InnerStage(loaded)

    threads = RankThreads(stages * ranks, load)
    found, *others = threads.each(logits)[-ranks:]
    for other in others:
        for one, its in zip(found, other, strict=True):
            np.testing.assert_array_equal(one, its)
    threads.each(lambda one: one.close())
    threads.close()
    region.close()
    return found


def check(found: list[F32], expected: list[F32], most: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=most * np.abs(other).max())


def alone(backend: type[Backend], config: dict[str, Any]) -> list[F32]:
    model, source = of(config)
    loaded = backend().load(model, source, options(dtype="f32"))
    found = logits(loaded)
    loaded.close()
    return found


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        "TestGemma3",
        "TestQwen3Next",
        "TestDeepSeekV3",
        "TestGlmMoeDsa",
        "TestGptOss",
        "TestLfm2",
    ],
)
def test_two_stages_of_two_ranks_on_the_cpu(name: str) -> None:
    """Windows, states, latents, shared indexers, experts and tied heads."""
    found = on_ranks(CpuBackend, CONFIGS[name], 2, 2)
    check(found, on_ranks(CpuBackend, CONFIGS[name], 1, 2))
    check(found, alone(CpuBackend, CONFIGS[name]), 2e-5)


def test_whole_experts_go_with_stages() -> None:
    config = CONFIGS["TestGptOss"]
    found = on_ranks(CpuBackend, config, 2, 2, whole_experts=True)
    check(found, on_ranks(CpuBackend, config, 1, 2, whole_experts=True))
    check(found, alone(CpuBackend, config), 2e-5)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (3, 2), (1, 1), (2, 4)])
def test_deterministic_sums_are_those_of_one_process(stages: int, ranks: int) -> None:
    """Sums are cut alike wherever the layers are: bits are equal however many ranks there are."""
    config = WIDE | {"num_key_value_heads": 2}
    found = on_ranks(CpuBackend, config, stages, ranks, deterministic=True)
    check(found, on_ranks(CpuBackend, config, 2, 1, deterministic=True))


def test_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    expected = alone(CpuBackend, CONFIGS["tied"])
    for backend in (TorchBackend, ReferenceBackend):
        check(on_ranks(backend, CONFIGS["tied"], 2, 2), expected, 2e-5)


def test_metal() -> None:
    pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
    from vllmx_metal.backend import MetalBackend

    check(on_ranks(MetalBackend, CONFIGS["tied"], 2, 2), alone(CpuBackend, CONFIGS["tied"]), 2e-5)


def test_uneven_ranks_are_cut_at_the_same_ops() -> None:
    """The first of two ranks has one of three kv heads, the head is divided evenly: by itself, the
    second would end its first stage elsewhere."""
    config = LLAMA | {
        "num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16, "vocab_size": 850,
    }  # fmt: skip
    model, source = of(config)
    first, second = (sharded(model, source, 64, number, 2) for number in range(2))

    def layers(part: Model, **how: Model) -> list[int]:
        found = (staged(part, source, options(), stage, 3, **how) for stage in range(3))
        return [len(one.shape.caches) for one in found]

    assert layers(first) != layers(second)
    assert layers(first) == layers(second, as_rank_0=first)
    check(on_ranks(CpuBackend, config, 3, 2), alone(CpuBackend, config), 2e-5)
