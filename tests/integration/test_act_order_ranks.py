"""GPTQ whose input features are not in the order of their groups, on ranks: 4 bits stay 4 bits."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint
from vllmx_core.sharding.model import ShardedModel, sharded
from vllmx_cpu.kinds import native_kind
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from ..backend.cpu_ranks import cpu_ranks, logits, options  # noqa: TID252 - no package to name
from .quantised_models import CASES, REGISTRY, write_pair

TEXT = [5, 900, 17, 3000, 42, 8, 77, 1204, 9, 31]
CUTS = (6, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = write_pair(tmp_path_factory.mktemp("gptq"), CASES["gptq 4 bit act-order"])
    return open_checkpoint(REGISTRY, folder)


def model_of(checkpoint: Checkpoint) -> Model:
    model: Model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    return model


def computed(checkpoint: Checkpoint, ranks: int, dtype: str, **how: bool) -> list[F32]:
    """What each rank comes to."""
    threads = cpu_ranks(model_of(checkpoint), checkpoint.weights, ranks, dtype, **how)
    found = threads.each(lambda loaded: logits(loaded, TEXT, CUTS))
    threads.each(lambda loaded: loaded.close())
    threads.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "near"), [("f32", 2e-5), ("bf16", 0.02)])
def test_ranks_come_to_what_one_does(
    checkpoint: Checkpoint, ranks: int, dtype: str, near: float
) -> None:
    (expected,) = computed(checkpoint, 1, dtype)
    for found in computed(checkpoint, ranks, dtype):
        np.testing.assert_allclose(found, expected, rtol=0, atol=near * np.abs(expected).max())


def test_bits_do_not_depend_on_ranks(checkpoint: Checkpoint) -> None:
    (expected,) = computed(checkpoint, 1, "bf16", deterministic=True)
    for found in computed(checkpoint, 2, "bf16", deterministic=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("how", [{}, {"deterministic": True}])
def test_matrices_keep_their_bits(checkpoint: Checkpoint, how: dict[str, bool]) -> None:
    model, source = model_of(checkpoint), checkpoint.weights
    for rank in range(2):
        mine: ShardedModel = sharded(model, source, 16, rank, 2, **how)
        kinds = {
            spec.name: native_kind(spec, source)
            for spec in mine.weights()
            if spec.kind == "linear" and spec.role != "vocabulary"
        }
        assert all(kind and kind.startswith("affine4") for kind in kinds.values()), kinds


def test_ranks_of_mlx(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Ids, logits and bytes; what is dequantised would be in the log."""
    pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
    from vllmx_metal.backend import MetalBackend

    model, source = model_of(checkpoint), checkpoint.weights
    whole = MetalBackend().load(model, source, options("f32"))
    expected, held = logits(whole, TEXT, CUTS), whole.info.weight_bytes
    whole.close()

    def load(end: ThreadCommunicator) -> LoadedModel:
        mine = sharded(model, source, 64, end.rank, 2)
        return MetalBackend().load(mine, source, options("f32", communicator=end))

    with caplog.at_level(logging.INFO, "vllmx"):
        ranks = RankThreads(2, load)
    assert not [one for one in caplog.records if "dequantised" in one.getMessage()]
    for found in ranks.each(lambda loaded: logits(loaded, TEXT, CUTS)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
        np.testing.assert_array_equal(found[:, :-1].argmax(1), expected[:, :-1].argmax(1))
    assert max(ranks.each(lambda loaded: loaded.info.weight_bytes)) < 0.6 * held
    ranks.each(lambda loaded: loaded.close())
    ranks.close()
