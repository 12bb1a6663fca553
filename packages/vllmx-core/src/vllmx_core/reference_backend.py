"""The backend "numpy": any model, eagerly, on the reference ops. For small models, tests of plugins
and as the judge of other backends; it is asked for by name only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllmx_core import reference
from vllmx_core.backend import HOST_STEP_TIMEOUT_S, Communicator, LoadedInfo, LoadOptions
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.kv_quant import KV_DTYPES, kv_dtype
from vllmx_core.model import Activation, AttentionSpec, Model, StepInputs
from vllmx_core.plan import I32, SamplingRows, StepPlan, StepResult
from vllmx_core.reference import Floats
from vllmx_core.reference_sampler import sample
from vllmx_core.weight_map import assemble
from vllmx_core.weights import WeightSource

_DTYPES = {"auto": "f32", "f32": "f32", "f64": "f64"}
_DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What `Ops.linear` and `Ops.logits` get."""

    matrix: Floats  # (out, in)
    bias: Floats | None  # (out,)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """`StepInputs` as arrays."""

    tokens: I32  # (T,)
    logit_rows: I32  # (L,)


@dataclass(frozen=True, slots=True)
class Pages:
    """KV cache of one layer."""

    k: Floats  # (blocks, P, K, D)
    v: Floats  # (blocks, P, K, D)


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """`vllmx_core.model.Ops` that computes one step at once."""

    pages: tuple[Pages, ...]
    plan: StepPlan
    kv_dtype: str

    def embedding(self, ids: I32, w: Floats) -> Floats:
        return reference.embedding(ids, w)

    def rms_norm(self, x: Floats, w: Floats, eps: float) -> Floats:
        return reference.rms_norm(x, w, eps)

    def add_rms_norm(
        self, x: Floats, residual: Floats | None, w: Floats, eps: float
    ) -> tuple[Floats, Floats]:
        return reference.add_rms_norm(x, residual, w, eps)

    def layer_norm(self, x: Floats, w: Floats, bias: Floats | None, eps: float) -> Floats:
        return reference.layer_norm(x, w, bias, eps)

    def linear(self, x: Floats, w: LinearWeight) -> Floats:
        return reference.linear(x, w.matrix, w.bias)

    def attention(self, qkv: Floats, spec: AttentionSpec, step: StepInputs) -> Floats:
        pages = self.pages[spec.layer]
        return reference.attention(qkv, spec, self.plan, pages.k, pages.v, self.kv_dtype)

    def gated_act(self, gate_up: Floats, kind: Activation) -> Floats:
        return reference.gated_act(gate_up, kind)

    def activation(self, x: Floats, kind: Activation) -> Floats:
        return reference.activation(x, kind)

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * x.dtype.type(factor)

    def logits(self, x: Floats, rows: I32, w: LinearWeight, softcap: float | None = None) -> Floats:
        return reference.logits(x, rows, w.matrix, w.bias, softcap)


class ReferenceHandle:
    """A `StepHandle` whose step has run already."""

    def __init__(self, queue: deque[ReferenceHandle], result: StepResult) -> None:
        self._queue = queue
        self._result = result
        queue.append(self)

    def result(self) -> StepResult:
        assert self._queue, "result() was called twice"
        assert self._queue[0] is self, "result() out of the order of the steps"
        self._queue.popleft()
        return self._result


class ReferenceLoadedModel:
    """A `LoadedModel` over numpy. `logits` of a plan can be had without sampling, for tests."""

    def __init__(
        self, model: Model, weights: Mapping[str, Any], pages: tuple[Pages, ...], info: LoadedInfo
    ) -> None:
        self._model, self._weights, self._pages = model, weights, pages
        self._info = info
        self._last_ids: I32 = np.zeros(0, np.int32)
        self._in_flight: deque[ReferenceHandle] = deque()

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> ReferenceHandle:
        """Runs the step at once. Raises AssertionError for a third step in flight."""
        assert len(self._in_flight) < 2, "a third step in flight: call result() of the first"
        assert 0 < plan.num_tokens <= self._info.max_num_batched_tokens, f"T = {plan.num_tokens}"
        assert plan.num_logit_rows <= self._info.max_logit_rows, f"L = {plan.num_logit_rows}"
        start = time.perf_counter()
        tokens = self.resolve(plan.tokens)
        logits = self.logits(plan).astype(np.float32, copy=False)
        result = sample(logits, rows, tokens[plan.logit_rows])
        result.elapsed_s = time.perf_counter() - start
        self._last_ids = result.ids.copy()
        return ReferenceHandle(self._in_flight, result)

    def logits(self, plan: StepPlan) -> Floats:
        """(L, V) of the plan; writes its keys and values."""
        plan = replace(plan, tokens=self.resolve(plan.tokens))
        step = ReferenceStep(plan.tokens, plan.logit_rows)
        ops = ReferenceOps(self._pages, plan, self._info.kv_cache_dtype)
        logits: Floats = self._model.forward(ops, self._weights, step)
        return logits

    def resolve(self, tokens: I32) -> I32:
        """Ids in place of references to the step before; id 0 where that one's row was broken."""
        index = np.where(tokens < 0, -tokens - 1, 0)
        last = self._last_ids if self._last_ids.size else np.zeros(1, np.int32)
        return np.where(tokens < 0, np.maximum(last[index], 0), tokens).astype(np.int32)

    def close(self) -> None:
        self._in_flight.clear()
        self._weights, self._pages = {}, ()


class ReferenceBackend:
    """The backend "numpy"; see the module's docstring."""

    @property
    def name(self) -> str:
        return "numpy"

    def load(
        self,
        model: Model,
        source: WeightSource,
        options: LoadOptions,
        comm: Communicator | None = None,
    ) -> ReferenceLoadedModel:
        """Raises ConfigError for a dtype other than float32 and float64, CapacityError when one
        sequence of max_model_len does not fit, WeightFormatError for a map that does not match.
        The KV cache holds floats of that dtype, rounded as `kv_cache_dtype` says."""
        dtype = _dtype(options)
        name = _DTYPES[options.dtype]
        cached = kv_dtype(options.kv_cache_dtype, (*KV_DTYPES, "f64"), name, self.name)
        weights = _weights(model, source, options.max_model_len, dtype)
        blocks = _num_blocks(model, options, dtype.itemsize)
        pages = tuple(
            Pages(*(np.zeros((blocks, options.block_size, kv.num_kv_heads, kv.head_size), dtype)
                    for _ in range(2)))
            for kv in model.shape.kv
        )  # fmt: skip
        info = LoadedInfo(
            backend=self.name,
            device=f"numpy {np.__version__}",
            dtype=name,
            kv_cache_dtype=cached,
            block_size=options.block_size,
            num_kv_blocks=blocks,
            max_num_seqs=options.num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_logit_rows=options.max_num_batched_tokens,
            weight_bytes=_total_bytes(weights),
            kv_cache_bytes=sum(page.k.nbytes + page.v.nbytes for page in pages),
            details={},
            step_timeout_s=HOST_STEP_TIMEOUT_S,
        )
        return ReferenceLoadedModel(model, weights, pages, info)

    def environment(self) -> dict[str, str]:
        return {"numpy": np.__version__}


def _dtype(options: LoadOptions) -> np.dtype[Any]:
    if options.dtype not in _DTYPES:
        raise ConfigError(
            f"backend 'numpy' computes in f32 or f64, not in dtype {options.dtype}: choose float32"
            " or another backend",
            param="dtype",
        )
    return np.dtype({"f32": np.float32, "f64": np.float64}[_DTYPES[options.dtype]])


def _weights(
    model: Model, source: WeightSource, max_model_len: int, dtype: np.dtype[Any]
) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for spec in model.weights():
        matrix, bias = assemble(spec, source)
        if spec.kind == "linear":
            bias = None if bias is None else bias.astype(dtype, copy=False)
            weights[spec.name] = LinearWeight(matrix.astype(dtype, copy=False), bias)
        else:
            weights[spec.name] = matrix.astype(dtype, copy=False)
    for name, table in model.constants(max_model_len).items():
        weights[name] = table.astype(dtype, copy=False)
    return weights


def _num_blocks(model: Model, options: LoadOptions, item_bytes: int) -> int:
    entry = sum(2 * kv.num_kv_heads * kv.head_size for kv in model.shape.kv) * item_bytes
    block_bytes = max(1, entry * options.block_size)
    needed = -(-options.max_model_len // options.block_size)
    blocks = options.num_kv_blocks
    if blocks is None:
        memory = options.kv_cache_memory_bytes or _DEFAULT_KV_BYTES
        blocks = min(memory // block_bytes, needed * options.num_seqs)
    if blocks < (1 if options.shrink_to_fit else needed):
        fits = blocks * options.block_size
        raise CapacityError(
            f"{blocks} KV blocks of {options.block_size} tokens ({blocks * block_bytes} bytes) do"
            f" not hold one sequence of max_model_len {options.max_model_len}: lower"
            f" --max-model-len to {fits} or give the KV cache {needed * block_bytes} bytes",
            param="max_model_len",
        )
    return blocks


def _total_bytes(weights: Mapping[str, Any]) -> int:
    total = 0
    for weight in weights.values():
        arrays = (weight.matrix, weight.bias) if isinstance(weight, LinearWeight) else (weight,)
        total += sum(array.nbytes for array in arrays if array is not None)
    return total
