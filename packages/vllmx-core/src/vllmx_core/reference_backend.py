"""The backend "numpy": any model, op by op, by the ops' own formulas. For small models, tests of
plugins and as the judge of other backends; it is asked for by name only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.backend import HOST_STEP_TIMEOUT_S, LoadedInfo, LoadOptions
from vllmx_core.backend_kit.dtypes import choose_dtype
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.errors import CapacityError
from vllmx_core.interpreter import Interpreter
from vllmx_core.kv_quant import KV_DTYPES, kv_dtype
from vllmx_core.model import Model
from vllmx_core.ops.formulas import Floats, NumpyFrame, NumpyWeights, Pages
from vllmx_core.ops.op import Op, OpList
from vllmx_core.plan import I32, SamplingRows, StepPlan, StepResult
from vllmx_core.recording import Recording, prepare
from vllmx_core.reference_sampler import sample
from vllmx_core.weight_map import assemble
from vllmx_core.weights import WeightSource

_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "f64": np.float64}
_DEFAULT_KV_BYTES = 1 << 30


class ReferenceHandle:
    """A `StepHandle` whose step has run already."""

    def __init__(self, queue: InFlight[ReferenceHandle], result: StepResult) -> None:
        self._queue = queue
        self._result = result
        queue.add(self)

    def result(self) -> StepResult:
        self._queue.check_oldest(self)
        self._queue.remove_oldest()
        return self._result


class ReferenceLoadedModel:
    """A `LoadedModel` over numpy. `logits` of a plan can be had without sampling, for tests."""

    def __init__(
        self, steps: OpList, weights: NumpyWeights, pages: tuple[Pages, ...], info: LoadedInfo
    ) -> None:
        self._steps = steps
        self._interpreter = Interpreter(steps, lambda op: type(op).compute)
        self._weights, self._pages = weights, pages
        self._info = info
        self._last_ids: I32 = np.zeros(0, np.int32)
        self._in_flight: InFlight[ReferenceHandle] = InFlight(info)

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> ReferenceHandle:
        """Runs the step at once. Raises AssertionError for a third step in flight."""
        self._in_flight.check_room(plan)
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
        frame = NumpyFrame(self._weights, plan, self._pages, self._info.kv_cache_dtype)
        logits: Floats = self._interpreter.run(frame)
        return logits

    def resolve(self, tokens: I32) -> I32:
        """Ids in place of references to the step before; id 0 where that one's row was broken."""
        index = np.where(tokens < 0, -tokens - 1, 0)
        last = self._last_ids if self._last_ids.size else np.zeros(1, np.int32)
        return np.where(tokens < 0, np.maximum(last[index], 0), tokens).astype(np.int32)

    def close(self) -> None:
        self._in_flight.close()
        self._weights, self._pages = NumpyWeights({}, {}), ()


class ReferenceBackend:
    """The backend "numpy"; see the module's docstring."""

    @property
    def name(self) -> str:
        return "numpy"

    def supports(self, op: Op) -> bool:
        """Any op that brings its formula; those of core do."""
        return type(op).compute is not Op.compute

    def load(
        self, model: Model, source: WeightSource, options: LoadOptions
    ) -> ReferenceLoadedModel:
        """Raises ConfigError for a dtype other than float32 and float64, CapacityError when one
        sequence of max_model_len does not fit, WeightFormatError for a map that does not match.
        The KV cache holds floats of that dtype, rounded as `kv_cache_dtype` says."""
        name = choose_dtype(options.dtype, "f32", _DTYPES, self.name)
        dtype = np.dtype(_DTYPES[name])
        cached = kv_dtype(options.kv_cache_dtype, (*KV_DTYPES, "f64"), name, self.name)
        recording = prepare(model, options.max_model_len, self.name, self.supports)
        weights = _weights(recording, source, dtype)
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
            weight_bytes=weights.num_bytes,
            kv_cache_bytes=sum(page.k.nbytes + page.v.nbytes for page in pages),
            details={},
            step_timeout_s=HOST_STEP_TIMEOUT_S,
        )
        return ReferenceLoadedModel(recording.steps, weights, pages, info)

    def environment(self) -> dict[str, str]:
        return {"numpy": np.__version__}


def _weights(recording: Recording, source: WeightSource, dtype: np.dtype[Any]) -> NumpyWeights:
    arrays: dict[str, Floats] = {}
    biases: dict[str, Floats] = {}
    for spec in recording.specs:
        matrix, bias = assemble(spec, source)
        arrays[spec.name] = matrix.astype(dtype, copy=False)
        if bias is not None:
            biases[spec.name] = bias.astype(dtype, copy=False)
    for name, table in recording.constants.items():
        arrays[name] = table.astype(dtype, copy=False)
    return NumpyWeights(arrays, biases)


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
