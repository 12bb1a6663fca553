"""The whole shape of gpt-oss-20b by the CPU backend's own plan of a load: what its weights, pages
and buffers will take, before anything is allocated or read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.tensor import DType, RawTensor
from vllmx_models.quantization.mxfp4 import mxfp4
from vllmx_testing.model_suite import tensor_shapes

planning = pytest.importorskip("vllmx_cpu.planning")
packing = pytest.importorskip("vllmx_cpu.packing")

GB = 1_000_000_000
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "quantization_config": QUANTISED,
}  # fmt: skip


class Shapes:
    """A checkpoint that has shapes and no memory: every byte of it is the same one."""

    def __init__(self, shapes: dict[str, tuple[DType, tuple[int, ...]]]) -> None:
        self._shapes = shapes
        self.num_bytes = sum(self.part(name).buffers["weight"].num_bytes for name in shapes)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def part(self, name: str) -> WeightPart:
        dtype, shape = self._shapes[name]
        count = int(np.prod(shape)) * (2 if dtype == "bf16" else 1)
        raw = RawTensor(name, dtype, shape, np.broadcast_to(np.uint8(0), (count,)))
        return StoredPart(name, shape, DENSE, {"weight": raw})

    def close(self) -> None:
        pass


def as_published(model: Any) -> Shapes:
    """Matrices of experts in blocks, all else in bf16."""
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for name, shape in tensor_shapes(model).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks = (*shape[:-1], shape[-1] // 32)
            found[f"{name}_blocks"] = ("u8", (*blocks, 16))
            found[f"{name}_scales"] = ("u8", blocks)
        else:
            found[name] = ("bf16", shape)
    return Shapes(found)


def plan(monkeypatch: pytest.MonkeyPatch, free: int, **options: Any) -> tuple[Shapes, Any]:
    """Plans the cache with so many bytes free."""
    model = load_registry().model_for(CONFIG).load()(CONFIG)
    source = as_published(model)
    monkeypatch.setattr(planning, "free_bytes", lambda: free)
    limits = LoadOptions(
        max_num_seqs=8, block_size=16, group_caches=True, memory_fraction=0.99, **options
    )
    return source, planning.load_sizes(model, mxfp4(source, QUANTISED), limits, "bf16", 8)


def test_it_fits_into_sixteen_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context has 32,768 tokens, for which a plan without room would be refused."""
    source, found = plan(monkeypatch, 16 * GB, max_model_len=32768, max_num_batched_tokens=2048)
    weights = packing.packed_bytes(found.specs, found.shapes)
    sizes = source.num_bytes, weights, found.kv.num_bytes, found.room.num_bytes
    print("file, weights, pages, buffers, in GB:", *(f"{size / GB:.2f}" for size in sizes))
    assert weights < 1.05 * source.num_bytes  # rows of 2880 are padded
    assert weights + found.kv.num_bytes + found.room.num_bytes < 16 * GB


def test_where_it_does_not_fit_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError, match="smaller or quantised model"):
        plan(monkeypatch, 12 * GB, max_model_len=4096)
