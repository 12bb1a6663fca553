"""Ranks of the metal backend, threads in one process, compute what one rank computes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")

from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import F32
from vllmx_core.sharding.model import sharded
from vllmx_metal.backend import MetalBackend
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from .test_sharding import CONFIGS, TEXT, of


def options(**more: object) -> LoadOptions:
    return LoadOptions(
        dtype="f32",
        max_model_len=64,
        num_kv_blocks=4,
        max_num_seqs=2,
        **more,  # type: ignore[arg-type]
    )


def chunks(loaded: LoadedModel) -> F32:
    """(T, V) logits of the text in two steps, the second enqueued before the first is read."""
    handles = []
    for begin, end in ((0, 9), (9, len(TEXT))):
        whole = np.arange(end - begin, dtype=np.int32)
        rows = sampling_rows(end - begin, num_logprobs=[0] * (end - begin), whole=whole)
        handles.append(loaded.step(make_plan([Row(TEXT[begin:end], begin, [3], "all")], 16), rows))
    found = [handle.result().logits for handle in handles]
    return np.concatenate([logits for logits in found if logits is not None])


@pytest.mark.parametrize("name", ["2 kv heads, tied", "biases everywhere", "a shared expert"])
def test_ranks_together_equal_one(name: str) -> None:
    model, source = of(CONFIGS[name])
    whole = MetalBackend().load(model, source, options())
    expected = chunks(whole)
    whole.close()

    def load(end: ThreadCommunicator) -> LoadedModel:
        mine = sharded(model, source, 64, end.rank, 2)
        return MetalBackend().load(mine, source, options(communicator=end))

    ranks = RankThreads(2, load)
    first, second = ranks.each(chunks)
    np.testing.assert_allclose(first, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(second, first)  # or they would draw different ids
    ranks.each(lambda one: one.close())
    ranks.close()
