"""The backend "metal": any model on MLX, which is made for Apple's GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version

import mlx.core as mx
from vllmx_core.adapters import AdapterSlots
from vllmx_core.backend import LoadedInfo, LoadOptions
from vllmx_core.backend_kit.hidden import hidden_of, shared_matrices
from vllmx_core.backend_kit.limits import (
    check_weights_fit,
    feature_bytes,
    feature_rows,
    feature_shapes,
    step_limits,
)
from vllmx_core.dtypes import choose_dtype
from vllmx_core.kv_dtypes import KV_DTYPES, kv_dtype
from vllmx_core.model import Model, ModelShape
from vllmx_core.ops.op import Op
from vllmx_core.recorded.recording import prepare
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_metal import step
from vllmx_metal.arrays import DTYPES
from vllmx_metal.device import Device, current_device, keep_resident
from vllmx_metal.kernel_choice import OwnKernels, choose_kernels
from vllmx_metal.kv_cache import MOST_SEQS, allocate, plan_kv
from vllmx_metal.loaded import MetalHidden, MetalLoadedModel
from vllmx_metal.ops import OPS
from vllmx_metal.owner import Owner
from vllmx_metal.recurrent import allocate_states
from vllmx_metal.ring import meet
from vllmx_metal.weights import WeightLoader, held_bytes, planned_bytes

logger = logging.getLogger("vllmx.metal")


class MetalBackend:
    """`vllmx_core.backend.Backend`. Every step is a new graph, so `enforce_eager` changes
    nothing."""

    @property
    def name(self) -> str:
        return "metal"

    def supports(self, op: Op) -> bool:
        return OPS.supports(op)

    def environment(self) -> dict[str, str]:
        """Version of MLX, its device and how much memory there is for a model."""
        device = current_device()
        return {
            "mlx": version("mlx"),
            "device": device.name,
            "free memory": format_bytes(device.free_bytes),
        }

    def free_bytes(self) -> int:
        """See `vllmx_core.backend.HasMemory.free_bytes`."""
        return current_device().free_bytes

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> MetalLoadedModel:
        owner = Owner() if options.hidden is None else options.hidden.owner
        try:
            return owner.call(lambda: self._load(model, source, options, owner))
        except BaseException:
            if options.hidden is None:
                owner.close()
            raise

    def _load(
        self, model: Model, source: WeightSource, options: LoadOptions, owner: Owner
    ) -> MetalLoadedModel:
        """Loads a model in the owner's thread."""
        device = current_device()
        dtype = choose_dtype(options.dtype, model.shape.dtype, DTYPES, self.name)
        cached = kv_dtype(options.kv_cache_dtype, KV_DTYPES, dtype, self.name)
        adapts = options.adapters is not None
        recording = prepare(model, options.max_model_len, self.name, self.supports, adapts=adapts)
        specs, constants = recording.specs, recording.constants
        most_seqs = options.max_num_seqs or MOST_SEQS
        most = step_limits(options, model.shape.limited_row, num_seqs=most_seqs)
        shared = shared_matrices(options.hidden)
        weights_size = planned_bytes(specs, constants, source, DTYPES[dtype], shared)
        _check_weights(weights_size, dtype, device)
        step_bytes = _activation_bytes(
            model.shape, specs, options.max_model_len, most["T"], most["L"]
        )
        slots: AdapterSlots[mx.array] = AdapterSlots(options.adapters, specs, recording.steps.ops)
        step_bytes += feature_bytes(model.shape, options) + slots.num_bytes
        kv, seqs = plan_kv(model.shape, options, cached, device, weights_size + step_bytes)
        kernels = choose_kernels(DTYPES[dtype])
        loader = WeightLoader(source, DTYPES[dtype], shared)
        weights = loader.load(specs, constants, progress=options.progress)
        info = LoadedInfo(
            backend=self.name,
            device=device.name,
            dtype=dtype,
            kv_cache_dtype=cached,
            block_size=kv.block_size,
            num_kv_blocks=kv.num_blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=most["T"],
            max_logit_rows=most["L"],
            weight_bytes=held_bytes(weights),
            kv_cache_bytes=kv.num_bytes,
            details=_details(kernels),
            cache_windows=kv.layout.windows,
            num_state_slots=kv.states.num_slots,
            state_slot_bytes=kv.states.slot_bytes,
            keeps_states_after=True,
            num_feature_rows=feature_rows(model.shape, options),
        )
        logger.info("loaded on %s with MLX %s", info.device, info.details["mlx"])
        pages = options.pages or allocate(kv)
        states = allocate_states(model.shape.states, kv.states.num_slots)
        held = info.weight_bytes + info.kv_cache_bytes + kv.states.num_bytes
        keep_resident(device, held, step_bytes)
        hidden: MetalHidden | None = options.hidden
        features = [mx.zeros(size) for size in feature_shapes(model.shape, options)]
        owns_thread = hidden is None
        if hidden is not None:
            features = list(hidden.parts)
        elif kept := hidden_of(model.shape, features, loader.matrices, pages):
            hidden = MetalHidden(kept.parts, kept.matrices, pages, owner)
        return MetalLoadedModel(
            recording.steps,
            weights,
            pages,
            states,
            DTYPES[dtype],
            info,
            owner,
            device,
            kernels,
            recording.tower,
            features,
            meet(options.communicator),
            hidden,
            owns_thread=owns_thread,
            adapters=slots,
        )


def _details(kernels: OwnKernels) -> dict[str, str]:
    """The libraries and kernels that a model runs with, for people."""

    def by(own: object) -> str:
        return "own kernel" if own else "MLX"

    return {
        "mlx": version("mlx"),
        "decode attention": by(kernels.decode),
        "prefill attention": by(kernels.prefill),
        "recurrence": by(kernels.recurrence),
    }


def _check_weights(size: int, dtype: str, device: Device) -> None:
    where = f" on {device.name}"
    remedy = "choose a smaller model, a quantised one or --isq q4_0"
    if device.is_gpu:
        where += f", of {format_bytes(device.working_set_bytes)} that macOS gives its GPU"
        remedy += ", or raise the share with `sudo sysctl iogpu.wired_limit_mb=...`"
    check_weights_fit(size, device.free_bytes, dtype, where=where, remedy=remedy)


def _activation_bytes(
    shape: ModelShape,
    specs: Iterable[WeightSpec],
    max_model_len: int,
    max_tokens: int,
    max_rows: int,
) -> int:
    """A rough upper bound on a step's memory without weights and cache: the widest layer in flight,
    the logits with the sampler's copies, and the context of one batch of attention."""
    vocab_size = shape.vocab_size
    widths = [spec.rows for spec in specs if spec.kind == "linear" and spec.rows < vocab_size]
    layer = 4 * max_tokens * (2 * max(widths, default=0) + 4 * shape.hidden_size)
    logits = 4 * max_rows * vocab_size * 4
    attention = 0
    for kv in shape.kv_specs:
        keys = max(step.BATCH_KEYS, max_model_len)
        gathered = 2 * keys * kv.num_kv_heads * kv.head_size * 4
        heads = max(kv.num_kv_heads, shape.hidden_size // kv.head_size)
        scores = 3 * 4 * heads * step.TILE_TOKENS * max_model_len
        attention = max(attention, gathered + scores)
    return layer + logits + attention
