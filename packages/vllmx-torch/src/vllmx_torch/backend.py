"""The backend "torch": any model, op by op, on any device that torch has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from vllmx_core.adapters import AdapterSlots
from vllmx_core.backend import (
    DEVICE_STEP_TIMEOUT_S,
    HOST_STEP_TIMEOUT_S,
    LoadedInfo,
    LoadOptions,
)
from vllmx_core.backend_kit.hidden import hidden_of, shared_matrices
from vllmx_core.backend_kit.limits import (
    check_weights_fit,
    feature_bytes,
    feature_rows,
    feature_shapes,
    step_limits,
)
from vllmx_core.cache.capacity import CachePlan
from vllmx_core.communicator import place_of
from vllmx_core.dtypes import choose_dtype
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.kv_dtypes import kv_dtype
from vllmx_core.model import Model, ModelShape
from vllmx_core.ops.op import Op
from vllmx_core.ops.values import Rows
from vllmx_core.recorded.recording import prepare
from vllmx_core.system.memory import format_bytes
from vllmx_core.system.processors import available_processors
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_torch import step
from vllmx_torch.device import (
    available_devices,
    choose_device,
    describe,
    device_of_rank,
    free_bytes,
    has_float64,
)
from vllmx_torch.foreign.model import TransformersModel
from vllmx_torch.foreign.op import FOREIGN_MODULE, ForeignModule
from vllmx_torch.foreign.running import load_running
from vllmx_torch.kv_cache import allocate, allocate_states, dtypes_of, plan_kv
from vllmx_torch.loaded import TorchLoadedModel
from vllmx_torch.ops import OPS
from vllmx_torch.ranks import ranks_of
from vllmx_torch.weights import DTYPES, TorchWeight, WeightLoader, weight_bytes

logger = logging.getLogger("vllmx.torch")


class TorchBackend:
    """`vllmx_core.backend.Backend`. Steps run op by op, so `enforce_eager` changes nothing."""

    @property
    def name(self) -> str:
        return "torch"

    def supports(self, op: Op) -> bool:
        """See `vllmx_core.backend.Backend.supports`."""
        return OPS.supports(op)

    def environment(self) -> dict[str, str]:
        """Version of torch, its devices, and the one that a model would go to, or why to none."""
        facts = {"torch": torch.__version__, "devices": ", ".join(available_devices())}
        try:
            device = choose_device()
        except ConfigError as error:
            return facts | {"device": error.message}
        return facts | {"device": describe(device), "free memory": format_bytes(free_bytes(device))}

    def free_bytes(self) -> int:
        """See `vllmx_core.backend.HasMemory.free_bytes`."""
        return free_bytes(choose_device())

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> TorchLoadedModel:
        """See `vllmx_core.backend.Backend.load`. On the CPU it sets torch's number of threads, of
        which there is one for the whole process."""
        device = choose_device()
        if options.communicator is not None:
            device = device_of_rank(device, place_of(options.communicator))
        dtype = choose_dtype(options.dtype, model.shape.dtype, DTYPES, self.name)
        cached = kv_dtype(options.kv_cache_dtype, dtypes_of(device), dtype, self.name)
        if device.type == "cpu":
            torch.set_num_threads(_num_threads(options))
        adapts = options.adapters is not None
        recording = prepare(model, options.max_model_len, self.name, self.supports, adapts=adapts)
        specs, constants = recording.specs, recording.constants
        most = step_limits(options, model.shape.limited_row)
        shared = shared_matrices(options.hidden)
        foreign = model if isinstance(model, TransformersModel) else None
        weights_size = (
            weight_bytes(specs, constants, DTYPES[dtype], shared)
            if foreign is None
            else foreign.weight_bytes(DTYPES[dtype])
        )
        free = options.free_bytes or free_bytes(device)
        check_weights_fit(
            weights_size,
            free,
            dtype,
            where=f" on {device}",
            remedy="choose a smaller model, or a 16-bit --dtype",
        )
        used = weights_size + _activation_bytes(
            model.shape,
            _widest(model.shape, specs) if foreign is None else foreign.survey.widest,
            options.max_model_len,
            most["T"],
            most["L"],
        )
        slots: AdapterSlots[Tensor] = AdapterSlots(options.adapters, specs, recording.steps.ops)
        used += feature_bytes(model.shape, options) + slots.num_bytes
        shape = foreign.shape_within(options.max_model_len) if foreign else model.shape
        try:
            kv = plan_kv(shape, options, cached, device, free, used)
        except CapacityError as error:
            if foreign is None or foreign.layers:
                raise
            raise CapacityError(
                f"{error.message}; a slot holds the cache of max_model_len"
                f" {options.max_model_len} tokens: lower --max-model-len",
                param="max_model_len",
            ) from error
        loader = WeightLoader(source, DTYPES[dtype], device, shared)
        weights: dict[str, TorchWeight | ForeignModule] = {}
        weights |= loader.load(specs, constants, progress=options.progress)
        if foreign is not None:
            weights[FOREIGN_MODULE] = load_running(foreign, source, DTYPES[dtype], device)
        info = _info(
            model, options, device, dtype, cached, most=most, weights_size=weights_size, kv=kv
        )
        logger.info("loaded on %s with torch %s", info.device, torch.__version__)
        sampling_device = device if has_float64(device) else torch.device("cpu")
        pages = options.pages or allocate(kv, device)
        states = () if foreign else allocate_states(model.shape, kv, device)
        features = tuple(
            torch.zeros(size, device=device) for size in feature_shapes(model.shape, options)
        )
        if options.hidden is not None:
            features = options.hidden.parts
        return TorchLoadedModel(
            recording.steps,
            weights,
            pages,
            states,
            info,
            device,
            sampling_device,
            recording.tower,
            features,
            ranks_of(options.communicator, device, recording.steps.ops),
            hidden_of(model.shape, features, loader.matrices, pages),
            adapters=slots,
        )


def _info(
    model: Model,
    options: LoadOptions,
    device: torch.device,
    dtype: str,
    cached: str,
    *,
    most: Mapping[Rows, int],
    weights_size: int,
    kv: CachePlan,
) -> LoadedInfo:
    details = {"torch": str(torch.__version__)}
    if isinstance(model, TransformersModel):
        details["model"] = f"{model.architecture} of transformers"
    return LoadedInfo(
        backend="torch",
        device=describe(device),
        dtype=dtype,
        kv_cache_dtype=cached,
        block_size=kv.block_size,
        num_kv_blocks=kv.num_blocks,
        max_num_seqs=kv.states.num_seqs,
        max_num_batched_tokens=most["T"],
        max_logit_rows=most["L"],
        weight_bytes=weights_size,
        kv_cache_bytes=kv.num_bytes,
        details=details,
        step_timeout_s=HOST_STEP_TIMEOUT_S if device.type == "cpu" else DEVICE_STEP_TIMEOUT_S,
        cache_windows=kv.layout.windows,
        num_state_slots=kv.states.num_slots,
        state_slot_bytes=kv.states.slot_bytes,
        keeps_states_after=True,
        num_feature_rows=feature_rows(model.shape, options),
        encodes_in_parts=True,
    )


def _num_threads(options: LoadOptions) -> int:
    if options.num_threads is None:
        return available_processors()
    if options.num_threads < 1:
        raise ConfigError(
            f"num_threads must be at least 1, got {options.num_threads}", param="num_threads"
        )
    return options.num_threads


def _widest(shape: ModelShape, specs: Iterable[WeightSpec]) -> int:
    """Features of the widest activation of a token, the logits apart."""
    widths = (spec.rows for spec in specs if spec.kind == "linear")
    return max((width for width in widths if width < shape.vocab_size), default=0)


def _activation_bytes(
    shape: ModelShape,
    widest: int,
    max_model_len: int,
    max_tokens: int,
    max_rows: int,
) -> int:
    """A rough upper bound on a step's memory without weights and cache: the widest layer in flight,
    the logits with the sampler's float64 copy, and the context of one batch of attention."""
    vocab_size = shape.vocab_size
    layer = 4 * max_tokens * (2 * widest + 4 * shape.hidden_size)
    logits = 4 * max_rows * vocab_size * 4
    attention = 0
    for kv in shape.kv_specs:
        keys = max(step.BATCH_KEYS, max_model_len)
        gathered = 2 * keys * kv.num_kv_heads * kv.head_size * (2 + 4)
        heads = max(kv.num_kv_heads, shape.hidden_size // kv.head_size)
        scores = 3 * 4 * heads * step.TILE_TOKENS * keys
        attention = max(attention, gathered + scores)
    return layer + logits + attention
