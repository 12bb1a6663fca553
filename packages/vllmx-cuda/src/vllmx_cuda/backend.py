"""The backend "cuda": own kernels, cuBLASLt and captured graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from vllmx_core.backend import LoadedInfo, LoadOptions
from vllmx_core.backend_kit.hidden import Hidden, hidden_of, shared_matrices
from vllmx_core.communicator import Communicator
from vllmx_core.dtypes import choose_dtype
from vllmx_core.kv_dtypes import kv_dtype
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.recorded.recording import prepare
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.map import tie_key
from vllmx_core.weights.part import WeightSource

from vllmx_cuda.device.arch import capability
from vllmx_cuda.device.device import Device
from vllmx_cuda.device.driver import UNFUSED_SWITCH, is_on
from vllmx_cuda.device.memory import ITEM_BYTES, automatic
from vllmx_cuda.device.ranks import DeviceRanks
from vllmx_cuda.loaded import CudaLoadedModel
from vllmx_cuda.loading.tuning import Tunable, tune
from vllmx_cuda.loading.weights import Weight, load_weights
from vllmx_cuda.matrices.form import ProductScratch
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.program.attention_ops import WGMMA_SWITCH
from vllmx_cuda.program.kv_cache import CODES, allocate, kind_of
from vllmx_cuda.program.lower import OPS, lower
from vllmx_cuda.program.lowering import Lowering
from vllmx_cuda.program.planning import LoadSizes, load_sizes
from vllmx_cuda.program.program import Graphs, Program
from vllmx_cuda.program.rank_ops import ties_of
from vllmx_cuda.program.sampler import DeviceSampler
from vllmx_cuda.program.staging import Staging
from vllmx_cuda.program.state_ops import allocate_states
from vllmx_cuda.program.tower import Tower
from vllmx_cuda.program.vectors import DeviceVectors

logger = logging.getLogger("vllmx.cuda")
NAME = "cuda"
TUNE_SECONDS = 10.0
"""The most seconds of a start for measuring cuBLASLt's algorithms; each GPU is measured once."""
CAPTURE_SECONDS = 5.0
"""The most seconds of a start for capturing decode steps; the rest are captured at first use."""


class CudaBackend:
    """`vllmx_core.backend.Backend`.

    Args:
        open_device: opens the device that a model is loaded on; a GPU by default.
        tune_s: seconds of loading for measuring cuBLASLt's algorithms.
        capture_s: seconds of loading for the capture of decode steps.
        wgmma: True if prompts run through paged_prefill_wgmma on the GPUs that have its
            instructions; None: as `vllmx_cuda.program.attention_ops.WGMMA_SWITCH` says.
    """

    def __init__(
        self,
        open_device: Callable[[], Device] | None = None,
        *,
        tune_s: float = TUNE_SECONDS,
        capture_s: float = CAPTURE_SECONDS,
        wgmma: bool | None = None,
    ) -> None:
        self._open_device = open_device
        self._tune_s, self._capture_s = tune_s, capture_s
        self._wgmma = wgmma

    @property
    def name(self) -> str:
        return NAME

    def supports(self, op: Op) -> bool:
        return OPS.supports(op)

    def environment(self) -> dict[str, str]:
        """Driver, GPUs, libraries and the folder of compiled kernels, or why each is missing."""
        from vllmx_cuda.environment import facts

        return facts()

    def free_bytes(self) -> int:
        """See `vllmx_core.backend.HasMemory.free_bytes`."""
        if self._open_device is None:
            from vllmx_cuda.device.cupy_device import free_gpu_bytes

            return free_gpu_bytes()
        device = self._open_device()
        try:
            return device.free_bytes()
        finally:
            device.close()

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> CudaLoadedModel:
        wgmma = is_on(WGMMA_SWITCH) if self._wgmma is None else self._wgmma
        fused = not is_on(UNFUSED_SWITCH)
        place = _place_of(options.communicator) if options.communicator else 0
        device = self._open_device() if self._open_device else _open_gpu(place)
        try:
            dtype = _dtype(options, model, device)
            kv = kv_dtype(options.kv_cache_dtype, (dtype, *CODES), dtype, "CUDA")
            with device.faults():
                loaded, tunables = _load(
                    model, source, options, device, dtype, kv, wgmma=wgmma, fused=fused
                )
                tune(device, tunables, self._tune_s, progress=options.progress)
                if not options.enforce_eager:
                    loaded.capture(self._capture_s, progress=options.progress)
            return loaded
        except BaseException:
            device.close()
            raise


def _dtype(options: LoadOptions, model: Model, device: Device) -> str:
    auto = automatic(model.shape.dtype, capability(device.info.arch))
    dtype = choose_dtype(options.dtype, auto, ITEM_BYTES, "CUDA")
    if dtype != model.shape.dtype and options.dtype == "auto":
        logger.info(
            "%s multiplies %s slowly: computing in %s; values beyond 65504 would overflow, in which"
            " case choose --dtype f32",
            device.info.name,
            model.shape.dtype,
            dtype,
        )
    return dtype


def _load(
    model: Model,
    source: WeightSource,
    options: LoadOptions,
    device: Device,
    dtype: str,
    kv: str,
    *,
    wgmma: bool,
    fused: bool,
) -> tuple[CudaLoadedModel, list[Tunable]]:
    # first, because communication between ranks takes memory
    ranks = _join(model, options, device, dtype) if options.communicator else None
    sizes = load_sizes(model, source, options, dtype, kv, device, wgmma=wgmma, fused=fused)
    products = sizes.layout.product_scratch(device)
    begin = time.perf_counter()
    weights = load_weights(
        sizes.specs,
        sizes.constants,
        source,
        sizes.weights,
        device,
        products.work,
        shared_matrices(options.hidden),
        progress=options.progress,
    )
    device.trim_pinned()
    weights_s = time.perf_counter() - begin
    lowering = _lowering(
        model,
        device,
        sizes,
        weights,
        products,
        options,
        wgmma=wgmma,
        fused=fused,
        ranks=ranks,
    )
    tower = None if sizes.tower is None else Tower(lowering, sizes.tower)
    last_ids = device.zeros(4 * sizes.max_rows["L"])
    result, most = lowering.place(sizes.steps.logits), sizes.max_rows["L"]
    ending: DeviceSampler | DeviceVectors
    if sizes.steps.samples:
        ending = DeviceSampler(device, model.shape.vocab_size, most, last_ids)
    else:
        ending = DeviceVectors(device, result, most, sizes.steps.logits.width, dtype)
    staging = Staging(
        device,
        sizes.work,
        sizes.staging_bytes,
        sizes.max_rows["T"],
        sizes.max_blocks,
        len(sizes.kv.layout.groups),
    )
    begin_step = lowering.variant("begin_step", VX_VEC=1)
    graphs = Graphs(device, enabled=not options.enforce_eager)
    launches = lower(sizes.steps, lowering)
    program = Program(
        device, sizes, launches, begin_step, result, last_ids, staging, ending, graphs, ranks
    )
    towers = [] if tower is None else tower.variants
    device.prepare([*lowering.variants, *ending.variants, *towers], progress=options.progress)
    info = _info(sizes, device, weights_s)
    logger.info("loaded on %s (%s)", info.device, device.info.arch)
    tunables = lowering.take_tunables(sizes.max_rows)
    if tower is not None:
        tunables += tower.take_tunables()
    matrices = {
        tie_key(spec): matrix.segments
        for spec in sizes.specs
        if isinstance(matrix := weights[spec.name], Matrix)
    }
    hidden = hidden_of(model.shape, lowering.features, matrices, lowering.pages)
    cache = lowering.pages, lowering.states
    return CudaLoadedModel(info, program, cache, tower, hidden), tunables


def _join(model: Model, options: LoadOptions, device: Device, dtype: str) -> DeviceRanks:
    steps = prepare(model, options.max_model_len, NAME, OPS.supports).steps
    assert options.communicator is not None, "a model on one device has no ranks to join"
    return device.join(options.communicator, ties_of(steps.ops, dtype))


def _lowering(
    model: Model,
    device: Device,
    sizes: LoadSizes,
    weights: Mapping[str, Weight],
    products: ProductScratch,
    options: LoadOptions,
    *,
    wgmma: bool,
    fused: bool,
    ranks: DeviceRanks | None,
) -> Lowering:
    """Allocates the caches and buffers that the launches use, but for those of a target."""
    hidden: Hidden | None = options.hidden
    features = [device.zeros(4 * rows * width) for rows, width in sizes.features]
    return Lowering(
        device,
        sizes.dtype,
        weights,
        options.pages or allocate(sizes.kv, device),
        allocate_states(model.shape.states, sizes.kv.states, device),
        sizes.kv.block_size,
        kind_of(sizes.kv.dtype),
        device.empty(sizes.layout.arena.num_bytes),
        sizes.layout.arena.offsets,
        sizes.layout.in_place,
        sizes.layout.scratch(device),
        products,
        sizes.max_rows["T"],
        wgmma,
        fused,
        features=features if hidden is None else hidden.parts,
        ranks=ranks,
    )


def _info(sizes: LoadSizes, device: Device, weights_s: float) -> LoadedInfo:
    return LoadedInfo(
        backend=NAME,
        device=device.info.name,
        dtype=sizes.dtype,
        kv_cache_dtype=sizes.kv.dtype,
        block_size=sizes.kv.block_size,
        num_kv_blocks=sizes.kv.num_blocks,
        max_num_seqs=sizes.kv.states.num_seqs,
        max_num_batched_tokens=sizes.max_rows["T"],
        max_logit_rows=sizes.max_rows["L"],
        weight_bytes=sizes.weights.num_bytes,
        kv_cache_bytes=sizes.kv.num_bytes,
        cache_windows=sizes.kv.layout.windows,
        num_state_slots=sizes.kv.states.num_slots,
        state_slot_bytes=sizes.kv.states.slot_bytes,
        keeps_states_after=True,
        num_feature_rows=0 if sizes.tower is None else sizes.features[0][0] - 1,
        encodes_in_parts=sizes.tower is not None,
        details={
            "architecture": device.info.arch,
            "ops": len(sizes.steps.ops),
            "seconds for weights": round(weights_s, 3),
            "activation buffers": format_bytes(sizes.layout.num_bytes),
        },
    )


def _place_of(communicator: Communicator) -> int:
    """The number of this process among the ranks of all stages: one GPU for each."""
    shared = communicator.shared
    return communicator.rank if shared is None else shared.place


def _open_gpu(place: int) -> Device:
    from vllmx_cuda.device.cupy_device import CupyDevice

    return CupyDevice.open(place)
