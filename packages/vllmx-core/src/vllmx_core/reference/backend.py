"""The backend "numpy": any model, op by op, by the ops' own formulas. For small models, tests of
plugins and as the judge of other backends; it is asked for by name only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.adapters import Adapter, AdapterSlots
from vllmx_core.backend import HOST_STEP_TIMEOUT_S, LoadedInfo, LoadOptions, MovableCache
from vllmx_core.backend_kit.hidden import Hidden, hidden_of
from vllmx_core.backend_kit.host_rows import HostRows
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.backend_kit.limits import feature_bytes, feature_rows, feature_shapes
from vllmx_core.cache.capacity import BlockSizes, CachePlan, check_codes, plan_cache
from vllmx_core.communicator import Communicator
from vllmx_core.dtypes import choose_dtype
from vllmx_core.kv_dtypes import KV_DTYPES, kv_dtype
from vllmx_core.model import Model, ModelShape, page_rows
from vllmx_core.ops.formulas import Floats, NumpyFrame, NumpyWeights, Pages
from vllmx_core.ops.op import Op, OpList
from vllmx_core.plan import I32, AnyArray, SamplingRows, StepPlan, StepResult
from vllmx_core.recorded.interpreter import Interpreter
from vllmx_core.recorded.recording import Recording, prepare
from vllmx_core.reference.sampler import sample
from vllmx_core.system.memory import free_bytes
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import WeightSource

_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "f64": np.float64}
_DEFAULT_KV_BYTES = 1 << 30
_BLOCK_SIZES = BlockSizes("numpy")


class ReferenceStep:
    """A `ForwardStep` whose forward pass has run, and its own `StepHandle`."""

    def __init__(self, owner: ReferenceLoadedModel, plan: StepPlan) -> None:
        start = time.perf_counter()
        self._owner = owner
        self._fed = owner.resolve(plan.tokens)[plan.logit_rows]  # (L,)
        self._logits = owner.logits(plan).astype(np.float32, copy=False)  # (L, V), or vectors
        self._seconds = time.perf_counter() - start + owner.tower_s
        owner.tower_s = 0.0
        self._result: StepResult | None = None

    def sample(self, rows: SamplingRows) -> ReferenceStep:
        with self._owner.in_flight.sampling(self, rows):
            self.draw(rows)
        return self

    def draw(self, rows: SamplingRows) -> None:
        """Samples the logits."""
        start = time.perf_counter()
        if self._owner.samples:
            self._result = sample(self._logits, rows, self._fed)
        else:
            self._result = StepResult(np.zeros(0, np.int32), vectors=self._logits.copy())
        self._result.elapsed_s = self._seconds + time.perf_counter() - start
        self._owner.last_ids = self._result.ids.copy()

    def result(self) -> StepResult:
        self._owner.in_flight.check_oldest(self)
        self._owner.in_flight.remove_oldest()
        assert self._result is not None, "a step in flight was sampled"
        return self._result


class ReferenceLoadedModel:
    """A `LoadedModel` over numpy. `logits` of a plan can be had without sampling, for tests."""

    def __init__(
        self,
        steps: OpList,
        weights: NumpyWeights,
        pages: tuple[Pages, ...],
        states: tuple[Floats, ...],
        info: LoadedInfo,
        tower: OpList | None = None,
        features: tuple[Floats, ...] = (),
        ranks: Communicator | None = None,
        hidden: Hidden | None = None,
        adapters: AdapterSlots[AnyArray] | None = None,
    ) -> None:
        self._hidden = hidden
        self._steps, self._ranks = steps, ranks
        self._adapters = adapters or AdapterSlots(None, (), ())
        self._tower = None if tower is None else Interpreter(tower, lambda op: type(op).compute)
        self._features = features
        self._pass: NumpyFrame | None = None
        self.tower_s = 0.0
        """Seconds that passes of the tower took since the last step."""
        self._interpreter = Interpreter(steps, lambda op: type(op).compute)
        self._weights, self._pages, self._states = weights, pages, states
        self._info = info
        self.last_ids: I32 = np.zeros(0, np.int32)
        self.in_flight: InFlight[ReferenceStep] = InFlight(info, samples=steps.samples)

    @property
    def samples(self) -> bool:
        """True if steps give ids."""
        return self._steps.samples

    @property
    def pages(self) -> tuple[Pages, ...]:
        """See `vllmx_core.backend.HasPages`."""
        return self._pages

    @property
    def hidden(self) -> Hidden | None:
        """See `vllmx_core.backend.HasHidden`."""
        return self._hidden

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`: a step has run when it is in flight."""
        pages = HostRows([array for page in self._pages for array in (page.k, page.v)], _nothing)
        states = HostRows(self._states, _nothing) if self._states else None
        return MovableCache(pages, states, in_host_memory=True)

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> ReferenceStep:
        """Runs the step at once. Raises AssertionError for a third step in flight."""
        self.in_flight.check_room(plan)
        step = ReferenceStep(self, plan)
        step.draw(rows)
        self.in_flight.add(step)
        return step

    def forward(self, plan: StepPlan) -> ReferenceStep:
        self.in_flight.check_room(plan)
        step = ReferenceStep(self, plan)
        self.in_flight.add_unsampled(step, plan)
        return step

    def logits(self, plan: StepPlan) -> Floats:
        """(L, V) of the plan, or its vectors; writes its keys, values and states."""
        plan = replace(plan, tokens=self.resolve(plan.tokens))
        kv_dtype = self._info.kv_cache_dtype
        frame = NumpyFrame(
            self._weights, plan, self._pages, kv_dtype, self._states, self._features, self._ranks
        )
        frame.adapters = self._adapters.filled
        logits: Floats = self._interpreter.run(frame)
        return logits

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters`."""
        dtype = next(iter(self._weights.arrays.values())).dtype
        self._adapters.put(slot, adapter, lambda array: array.astype(dtype, copy=False))

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """See `vllmx_core.backend.SeeingModel.encode`."""
        assert self._tower is not None, "the model sees no images"
        start = time.perf_counter()
        if begin == 0.0:
            self._pass = NumpyFrame(self._weights, plan, (), None, (), self._features)
        assert self._pass is not None, "a pass begins with its first part"
        self._tower.run_part(self._pass, begin, end)
        if end >= 1.0:
            self._pass = None
        self.tower_s += time.perf_counter() - start

    def resolve(self, tokens: I32) -> I32:
        """Ids in place of references to the step before; id 0 where that one's row was broken."""
        index = np.where(tokens < 0, -tokens - 1, 0)
        last = self.last_ids if self.last_ids.size else np.zeros(1, np.int32)
        return np.where(tokens < 0, np.maximum(last[index], 0), tokens).astype(np.int32)

    def close(self) -> None:
        self.in_flight.close()
        self._weights, self._pages, self._states = NumpyWeights({}, {}), (), ()
        self._features, self._pass = (), None


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
        check_codes(model.shape, cached)
        adapts = options.adapters is not None
        recording = prepare(model, options.max_model_len, self.name, self.supports, adapts=adapts)
        slots: AdapterSlots[AnyArray] = AdapterSlots(
            options.adapters, recording.specs, recording.steps.ops
        )
        weights = _weights(recording, source, dtype)
        cache = plan_cache(
            model.shape,
            options,
            name,
            _BLOCK_SIZES,
            options.free_bytes or free_bytes(),
            feature_bytes(model.shape, options) + slots.num_bytes,
            default_bytes=_DEFAULT_KV_BYTES,
        )
        info = LoadedInfo(
            backend=self.name,
            device=f"numpy {np.__version__}",
            dtype=name,
            kv_cache_dtype=cached,
            block_size=options.block_size,
            num_kv_blocks=cache.num_blocks,
            max_num_seqs=cache.states.num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_logit_rows=options.max_num_batched_tokens,
            weight_bytes=weights.num_bytes,
            kv_cache_bytes=cache.num_bytes,
            details={},
            step_timeout_s=HOST_STEP_TIMEOUT_S,
            cache_windows=cache.layout.windows,
            num_state_slots=cache.states.num_slots,
            state_slot_bytes=cache.states.slot_bytes,
            keeps_states_after=True,
            num_feature_rows=feature_rows(model.shape, options),
            encodes_in_parts=True,
        )
        states = _states(model.shape, cache, dtype)
        features = tuple(np.zeros(size, dtype) for size in feature_shapes(model.shape, options))
        if options.hidden is not None:
            features = options.hidden.parts
        pages = options.pages or _pages(cache, dtype)
        return ReferenceLoadedModel(
            recording.steps,
            weights,
            pages,
            states,
            info,
            recording.tower,
            features,
            options.communicator,
            hidden_of(model.shape, features, {}, pages),
            adapters=slots,
        )

    def environment(self) -> dict[str, str]:
        return {"numpy": np.__version__}


def _nothing() -> None:
    """Waits for no step."""


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


def _pages(cache: CachePlan, dtype: np.dtype[Any]) -> tuple[Pages, ...]:
    """Pages of each layer; layers of different groups have a place in common."""
    layout, places = cache.layout, []
    for kv in layout.places:
        shape = (cache.num_blocks, page_rows(kv, cache.block_size), kv.num_kv_heads)
        k, v = (np.zeros((*shape, size), dtype) for size in (kv.head_size, kv.value_size))
        places.append((k, v))
    size = cache.block_size
    return tuple(Pages(*places[place], group, size) for group, place in layout.layers)


def _states(shape: ModelShape, cache: CachePlan, dtype: np.dtype[Any]) -> tuple[Floats, ...]:
    """(slots, heads, rows, cols) of each recurrent layer."""
    slots = cache.states.num_slots
    return tuple(np.zeros((slots, one.heads, one.rows, one.cols), dtype) for one in shape.states)
