"""Small models with random weights, written against `Ops`, for suites and plugin authors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.model import (
    Array,
    AttentionSpec,
    CacheSpec,
    KVSpec,
    LatentKV,
    LatentSpec,
    ModelShape,
    Ops,
    SharedKV,
    StateSpec,
    StepInputs,
    Weight,
)
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.spec import PartSpec, RowRuns, Shard, WeightSpec
from vllmx_core.weights.tensor import DType, RawTensor, f32_to_bf16

_SHARDS: Mapping[str, Shard] = {"out": "row", "down": "row", "head": "vocab"}
"""Axis that ranks cut a matrix along, by the end of its name; the default is its rows."""
Body = Callable[[Ops, Mapping[str, Weight], StepInputs], Array]


class ArraySource:
    """A `WeightSource` over float32 arrays, stored as `dtype`: f32, f16 or bf16; and over int64
    arrays."""

    def __init__(self, arrays: Mapping[str, F32], dtype: DType = "f32") -> None:
        self._parts = {name: _part(name, array, dtype) for name, array in arrays.items()}

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def part(self, name: str) -> WeightPart:
        if name not in self._parts:
            near = difflib.get_close_matches(name, self._parts) or sorted(self._parts)[:3]
            raise WeightFormatError(
                f"the checkpoint has no tensor {name!r}; nearest: {', '.join(near)}"
            )
        return self._parts[name]

    def close(self) -> None:
        self._parts = {}


def _part(name: str, array: F32, dtype: DType) -> WeightPart:
    encoded: AnyArray = array
    if array.dtype.kind == "i":
        dtype, encoded = "i64", array.astype("<i8")
    elif dtype == "bf16":
        encoded = f32_to_bf16(array)
    elif dtype == "f16":
        encoded = array.astype("<f2")
    data = np.ascontiguousarray(encoded).reshape(-1).view(np.uint8)
    data.flags.writeable = False  # as a mapped file would be
    return StoredPart(
        name, array.shape, DENSE, {"weight": RawTensor(name, dtype, array.shape, data)}
    )


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """A `Model` made of its parts."""

    shape: ModelShape
    specs: tuple[WeightSpec, ...]
    tables: Mapping[str, F32]
    body: Body

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.specs

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {name: table[:max_model_len] for name, table in self.tables.items()}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        return self.body(ops, w, step)


class Builder:
    """Collects random weights and their map; matrices are scaled so that outputs stay near 1."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.random = np.random.default_rng(seed)
        self.arrays: dict[str, F32] = {}
        self.specs: list[WeightSpec] = []
        self.tables: dict[str, F32] = {}
        self.caches: list[CacheSpec] = []
        self.states: list[StateSpec] = []

    def embedding(self, name: str, cols: int, rows: int | None = None) -> Self:
        """A (rows, cols) table; rows: the vocabulary unless said otherwise."""
        part = self._array(f"{name}.weight", (rows or self.vocab_size, cols))
        self.specs.append(WeightSpec(name, "embedding", (part,), cols, "vocab"))
        return self

    def linear(
        self, name: str, rows: int | Sequence[int], cols: int, biases: Sequence[int] = ()
    ) -> Self:
        """A matrix of one or several parts; `biases`: the parts that have one."""
        parts = []
        for index, count in enumerate([rows] if isinstance(rows, int) else rows):
            part = self._array(f"{name}.{index}.weight", (count, cols), cols**-0.5)
            if index in biases:
                bias = self._array(f"{name}.{index}.bias", (count,))
                part = replace(part, bias=bias.name)
            parts.append(part)
        shard = _SHARDS.get(name.rpartition(".")[2], "column")
        self.specs.append(WeightSpec(name, "linear", tuple(parts), cols, shard))
        return self

    def stack(
        self, name: str, count: int, rows: Sequence[int], cols: int, biases: Sequence[int] = ()
    ) -> Self:
        """`count` matrices of such parts as `linear` makes."""
        parts: list[PartSpec] = []
        for index in range(count):
            self.linear(f"{name}.{index}", rows, cols, biases)
            parts.extend(self.specs.pop().parts)
        self.specs.append(WeightSpec(name, "stack", tuple(parts), cols, "expert", count=count))
        return self

    def head_stack(self, name: str, count: int, rows: int, cols: int) -> Self:
        """Matrices that lie one below the other in one tensor."""
        tensor = self._array(f"{name}.weight", (count * rows, cols), cols**-0.5).name
        parts = tuple(
            PartSpec(tensor, rows, runs=RowRuns(index * rows, rows, rows)) for index in range(count)
        )
        self.specs.append(WeightSpec(name, "stack", parts, cols, count=count))
        return self

    def tied(self, name: str, table: str, cols: int) -> Self:
        """A head that is the table itself."""
        part = PartSpec(f"{table}.weight", self.vocab_size)
        self.specs.append(WeightSpec(name, "linear", (part,), cols, "vocab"))
        return self

    def vector(
        self, name: str, rows: int, offset: float = 0.0, centre: float = 1.0, spread: float = 0.3
    ) -> Self:
        """Values around `centre` after the offset was added."""
        part = self._array(f"{name}.weight", (rows,), spread)
        self.arrays[part.name] += np.float32(centre - offset)
        self.specs.append(WeightSpec(name, "vector", (part,), offset=offset))
        return self

    def rope(self, name: str, rotary_dim: int, positions: int = 4096) -> None:
        """A table of base 100, short enough to matter at small positions."""
        inverse = 100.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
        angles = np.arange(positions)[:, None] * inverse
        self.tables[name] = np.concatenate([np.cos(angles), np.sin(angles)], 1, dtype=np.float32)

    def attention(self, spec: AttentionSpec) -> None:
        """Announces the KV cache of a layer; layers in their order. One that shares reads the pages
        of the first."""
        assert spec.layer == len(self.caches), "layers out of order"
        own = KVSpec(spec.num_kv_heads, spec.head_size, spec.window)
        self.caches.append(SharedKV(0) if spec.shared else own)

    def latent_attention(self, spec: LatentSpec, index_size: int = 0) -> None:
        """Announces the cache of a layer, as `attention`, and makes the weights that it names after
        itself: norm, k_b and v_b. `index_size`: numbers of an indexer's key."""
        assert spec.layer == len(self.caches), "layers out of order"
        self.caches.append(LatentKV(spec.rank, spec.rotary_dim, index_size))
        self.vector(f"{spec.layer}.norm", spec.rank)
        self.head_stack(f"{spec.layer}.k_b", spec.num_heads, spec.rank, spec.nope_size)
        self.head_stack(f"{spec.layer}.v_b", spec.num_heads, spec.value_size, spec.rank)

    def state(self, heads: int, rows: int, cols: int) -> int:
        """Announces what a recurrent layer keeps; its number."""
        self.states.append(StateSpec(heads, rows, cols))
        return len(self.states) - 1

    def build(self, hidden_size: int, body: Body, vector_size: int = 0) -> SyntheticModel:
        """The model; its weights are `ArraySource(builder.arrays)`. With a `vector_size` it gives
        vectors in place of logits."""
        shape = ModelShape(
            self.vocab_size, hidden_size, 4096, tuple(self.caches), "f32", tuple(self.states)
        )
        if vector_size:
            shape = replace(shape, output="vectors", output_size=vector_size, whole_prompts=True)
        return SyntheticModel(shape, tuple(self.specs), self.tables, body)

    def _array(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> PartSpec:
        self.arrays[name] = (self.random.standard_normal(shape) * scale).astype(np.float32)
        return PartSpec(name, shape[0])


def tiny_decoder(
    builder: Builder, hidden: int = 32, layers: int = 2, *, pooled: bool = False
) -> SyntheticModel:
    """A whole decoder: grouped-query attention with RoPE, gated MLP, tied head. `pooled`: it has no
    head and gives, for each text, what the last token became."""
    specs = [
        AttentionSpec(layer, num_heads=4, num_kv_heads=2, head_size=8, scale=8**-0.5, rotary_dim=8)
        for layer in range(layers)
    ]
    builder.embedding("embed", hidden)
    builder.rope("rope", 8)
    for layer, spec in enumerate(specs):
        builder.attention(spec)
        builder.vector(f"{layer}.norm_in", hidden)
        builder.linear(f"{layer}.qkv", (32, 16, 16), hidden)
        builder.linear(f"{layer}.out", hidden, 32)
        builder.vector(f"{layer}.norm_mid", hidden)
        builder.linear(f"{layer}.gate_up", (40, 40), hidden)
        builder.linear(f"{layer}.down", hidden, 40)
    builder.vector("norm", hidden)
    if not pooled:
        builder.tied("head", "embed", hidden)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        residual: Array | None = None
        for layer, spec in enumerate(specs):
            x, residual = ops.add_rms_norm(x, residual, w[f"{layer}.norm_in"], 1e-6)
            qkv = ops.linear(x, w[f"{layer}.qkv"])
            x = ops.attention(qkv, spec, step, rope=w["rope"])
            x = ops.linear(x, w[f"{layer}.out"])
            x, residual = ops.add_rms_norm(x, residual, w[f"{layer}.norm_mid"], 1e-6)
            x = ops.gated_act(ops.linear(x, w[f"{layer}.gate_up"]), "silu")
            x = ops.linear(x, w[f"{layer}.down"])
        x, _ = ops.add_rms_norm(x, residual, w["norm"], 1e-6)
        if pooled:
            return ops.pool(x, step, "last")
        return ops.logits(x, step.logit_rows, w["head"])

    if not pooled:
        return builder.build(hidden, body)
    model = builder.build(hidden, body, hidden)
    return replace(model, shape=replace(model.shape, whole_prompts=False))


def table_model(table: F32) -> tuple[SyntheticModel, ArraySource]:
    """Logits that are known beforehand: those after token t are row t of the (V, V) table, bit for
    bit where it has no NaN."""
    vocab_size = table.shape[0]
    builder = Builder(vocab_size)
    builder.embedding("embed", vocab_size)
    builder.linear("head", vocab_size, vocab_size)
    builder.arrays["embed.weight"] = table
    builder.arrays["head.0.weight"] = np.eye(vocab_size, dtype=np.float32)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        return ops.logits(ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"])

    return builder.build(vocab_size, body), ArraySource(builder.arrays)
