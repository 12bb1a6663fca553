"""A GPU through CuPy: its memory pools, streams, events, graphs and module loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import (
    BackendUnavailableError,
    CapacityError,
    EngineDeadError,
    VllmxError,
)
from vllmx_core.system.memory import format_bytes

from vllmx_cuda.compiler.compiling import compiled
from vllmx_cuda.compiler.cubins import KERNELS_FOLDER, Target, Unit, cache_folder, kernel_cache
from vllmx_cuda.compiler.libraries import include_folders
from vllmx_cuda.compiler.nvrtc import Nvrtc
from vllmx_cuda.device import driver
from vllmx_cuda.device.algorithms import AlgorithmFile, Algorithms
from vllmx_cuda.device.arch import architecture
from vllmx_cuda.device.cublaslt import (
    ALLOC_FAILED,
    WORKSPACE_BYTES,
    Addresses,
    Algorithm,
    CublasLt,
    CublasLtError,
    Matmul,
)
from vllmx_cuda.device.device import DeviceInfo, Product
from vllmx_cuda.device.launcher import Launcher
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.device.nccl import NcclRanks, load_nccl
from vllmx_cuda.device.peers import CudaIpc, open_peers
from vllmx_cuda.device.ranks import Ties
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.types import Launch

logger = logging.getLogger("vllmx.cuda")

_NOT_READY = 600  # cudaErrorNotReady
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EVICTING_BYTES = 256 << 20
"""More than the L2 of any GPU holds; written before each measurement."""


@dataclass(frozen=True, slots=True)
class CupyEvent:
    event: Any
    cuda: Any
    """`cupy.cuda`."""
    ranks: NcclRanks | None = None
    """The ranks of a device among others: what the event waits for may never come."""

    def wait(self) -> None:
        if self.ranks is not None:
            # Not `Event.done`, which is False for a GPU that has failed, too.
            query = self.cuda.runtime.eventQuery
            self.ranks.wait(lambda: query(self.event.ptr) != _NOT_READY)
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return float(self.cuda.get_elapsed_time(earlier.event, self.event)) / 1000


@dataclass(slots=True, eq=False, weakref_slot=True)
class CupyGraph:
    graph: Any
    """None: its device was closed."""
    stream: Any

    def launch(self) -> None:
        self.graph.launch(self.stream)


def free_gpu_bytes() -> int:
    """Free memory of the GPU that `CupyDevice.open` would choose; raises what that raises."""
    try:
        chosen = driver.choose_device(driver.query(), 0)
    except driver.DriverError as error:
        raise BackendUnavailableError(str(error)) from error
    cupy = _import_cupy()
    with cupy.cuda.Device(chosen.ordinal):
        return int(cupy.cuda.runtime.memGetInfo()[0])


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"CuPy cannot be imported ({error}): pip install 'vllmx[cuda13]', or 'vllmx[cuda]'"
            " for CUDA 12"
        ) from error
    return cupy


_EARLY_CAPTURE = (12, 3)
"""CUDA of the driver that captures launches which begin early."""


class CupyDevice:
    """`vllmx_cuda.device.device.Device`."""

    @classmethod
    def open(cls, rank: int = 0) -> CupyDevice:
        """The GPU that `vllmx_cuda.device.driver.choose_device` names. Raises
        BackendUnavailableError for a missing driver, GPU, CuPy or library, ConfigError for a number
        that is not there and for more ranks than GPUs."""
        try:
            facts = driver.query()
            chosen = driver.choose_device(facts, rank)
            newest = facts.cuda_version[0]
            nvrtc = Nvrtc.open(newest)
            driver.check_major(facts.cuda_version, f"NVRTC ({nvrtc.path})", nvrtc.version)
        except driver.DriverError as error:
            raise BackendUnavailableError(str(error)) from error
        cupy = _import_cupy()
        try:
            open_lt = partial(CublasLt.open, newest)
            able = chosen.capability >= (9, 0) and facts.cuda_version >= _EARLY_CAPTURE
            early = able and not driver.is_on(driver.UNFUSED_SWITCH)
            return cls(cupy, chosen, nvrtc, open_lt, driver.open_libcuda(), early=early)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise driver.open_error(error, chosen, facts) from error

    def __init__(
        self,
        cupy: Any,
        chosen: driver.DeviceFacts,
        nvrtc: Nvrtc,
        open_lt: Callable[[], CublasLt],
        libcuda: driver.Library,
        *,
        early: bool = False,
    ) -> None:
        self._driver, self._early = libcuda, early
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._ordinal = chosen.ordinal
        arch = architecture(chosen.capability)
        nvrtc.check_architecture(arch)
        self._nvrtc = nvrtc
        self._target = Target(arch, nvrtc.version, tuple(include_folders(newest=nvrtc.version[0])))
        self.activate()
        processors = self._runtime.getDeviceProperties(self._ordinal)["multiProcessorCount"]
        self.info = DeviceInfo(chosen.name, arch, int(processors), chosen.memory_bytes)
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace: Memory | None = self.empty(WORKSPACE_BYTES)
        self._lt = open_lt()
        self._algorithms = Algorithms(self._lt, self._algorithm_file(), self._measure)
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._launchers: dict[int, Launcher] = {}
        """The id of a variant -> its launcher, which keeps the variant: hashing takes too long."""
        self._shared_bytes: dict[int, int] = {}
        self._rehearsed: list[Product] | None = None
        self._evicting: Memory | None = None
        self._ranks: NcclRanks | None = None
        self._graphs: WeakSet[CupyGraph] = WeakSet()

    def _algorithm_file(self) -> AlgorithmFile:
        name = "".join(c if c.isalnum() else "-" for c in self.info.name)
        return AlgorithmFile(cache_folder() / "cuda" / f"cublaslt-{self._lt.version}-{name}.json")

    def activate(self) -> None:
        self._cupy.cuda.Device(self._ordinal).use()

    # ---- memory

    def free_bytes(self) -> int:
        return int(self._runtime.memGetInfo()[0]) + int(self._pool.free_bytes())

    def empty(self, num_bytes: int) -> Memory:
        try:
            pointer = self._pool.malloc(max(1, num_bytes))
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise CapacityError(
                f"{format_bytes(num_bytes)} of GPU memory were asked for,"
                f" {format_bytes(self.free_bytes())} are free on {self.info.name}: lower"
                " --memory-fraction or --max-num-batched-tokens, or end what else runs there"
            ) from error
        return Memory(int(pointer.ptr), num_bytes, pointer)

    def zeros(self, num_bytes: int) -> Memory:
        memory = self.empty(num_bytes)
        self._runtime.memsetAsync(memory.address, 0, num_bytes, self._stream.ptr)
        return memory

    def pinned(self, num_bytes: int) -> Bytes:
        try:
            held = self._cupy.cuda.alloc_pinned_memory(max(1, num_bytes))
        except self._runtime.CUDARuntimeError as error:
            raise CapacityError(
                f"{format_bytes(num_bytes)} of page-locked host memory were refused ({error}): free"
                " some RAM, lower --max-num-batched-tokens, or in a container raise its limit of"
                " locked memory (--ulimit memlock=-1)"
            ) from error
        return np.frombuffer(held, np.uint8, num_bytes)

    def trim_pinned(self) -> None:
        # CuPy's pool keeps all that it ever had: after a load, the ring of whole pieces
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    # ---- copies

    def upload(self, target: Memory, source: Bytes) -> None:
        self._copy(target.address, source.ctypes.data, source.nbytes, "HostToDevice")

    def upload_rows(self, target: Memory, pitch: int, source: Bytes, width: int) -> None:
        self._runtime.memcpy2DAsync(
            target.address,
            pitch,
            source.ctypes.data,
            width,
            width,
            source.nbytes // width,
            self._runtime.memcpyHostToDevice,
            self._stream.ptr,
        )

    def download(self, target: Bytes, source: Memory) -> None:
        self._copy(target.ctypes.data, source.address, target.nbytes, "DeviceToHost")

    def copy(self, target: Memory, source: Memory) -> None:
        self._copy(target.address, source.address, source.num_bytes, "DeviceToDevice")

    def _copy(self, target: int, source: int, num_bytes: int, kind: str) -> None:
        if num_bytes:
            way = getattr(self._runtime, f"memcpy{kind}")
            self._runtime.memcpyAsync(target, source, num_bytes, way, self._stream.ptr)

    # ---- kernels

    def prepare(self, variants: Sequence[Variant], *, progress: bool = False) -> None:
        keys = [
            key for key in dict.fromkeys(v.module_key for v in variants) if key not in self._modules
        ]
        units = {key: Unit(KERNELS_FOLDER / key[0], key[1]) for key in keys}
        cubins = compiled(
            list(units.values()), self._target, self._nvrtc, kernel_cache(), progress=progress
        )
        for key, unit in units.items():
            self._modules[key] = module = self._cupy.cuda.function.Module()
            module.load(cubins[unit])

    def launch(
        self,
        variant: Variant,
        sizes: dict[str, int],
        arguments: Sequence[Memory | int | float | None],
    ) -> None:
        if self._rehearsed is not None:
            return
        launcher = self._launchers.get(id(variant)) or self._launcher(variant)
        if status := launcher(sizes, arguments):
            raise self._cupy.cuda.driver.CUDADriverError(status)

    def _launcher(self, variant: Variant) -> Launcher:
        if variant.module_key not in self._modules:
            self.prepare([variant])
        module = self._modules[variant.module_key]
        function = module.get_function(variant.kernel.entry).ptr

        def allow(shape: Launch) -> None:
            # Always, not from 48 KiB on: the default limit is what the kernel's static part leaves.
            if shape.shared_bytes > self._shared_bytes.get(function, 0):
                attribute = self._cupy.cuda.driver.funcSetAttribute
                attribute(function, _MAX_DYNAMIC_SHARED, shape.shared_bytes)
                self._shared_bytes[function] = shape.shared_bytes

        launch, stream = self._driver.cuLaunchKernelEx, self._stream.ptr
        early = self._early and variant.kernel.early is not None
        made = Launcher(launch, variant, function, stream, allow, early=early)
        self._launchers[id(variant)] = made
        return made

    # ---- products

    def can_multiply(self, product: Product) -> bool:
        return self._algorithms.exists(product)

    def multiply(
        self,
        product: Product,
        x: Memory,
        w: Memory,
        y: Memory,
        bias: Memory | None = None,
        scales: tuple[Memory, Memory] | None = None,
    ) -> None:
        assert self._workspace is not None, "the device is closed"
        if self._rehearsed is not None:
            self._rehearsed.append(product)
            return
        workspace, stream = self._workspace.address, self._stream.ptr

        def run(matmul: Matmul, algorithm: Algorithm) -> None:
            matmul.run(algorithm, x.address, w.address, y.address, workspace, stream)

        x_scale, w_scale = (span.address for span in scales) if scales else (0, 0)
        addresses = Addresses(bias.address if bias else 0, w_scale, x_scale)
        run(*self._algorithms.choose(product, addresses, run))

    def unmeasured(self, enqueue: Callable[[], None]) -> bool:
        rehearsed: list[Product] = []
        self._rehearsed = rehearsed
        try:
            enqueue()
        finally:
            self._rehearsed = None
        return any(map(self._algorithms.unmeasured, dict.fromkeys(rehearsed)))

    def _measure(self, call: Callable[[], None], times: int) -> float:
        """Device seconds of one call, the mean of so many, each with weights that come from memory:
        in a step the other layers' take their place in the L2."""
        spans = []
        for _ in range(times):
            if self._evicting is not None:
                self._runtime.memsetAsync(
                    self._evicting.address, 0, _EVICTING_BYTES, self._stream.ptr
                )
            begin = self.event()
            call()
            spans.append((begin, self.event()))
        spans[-1][1].wait()
        return sum(end.seconds_since(begin) for begin, end in spans) / times

    @contextmanager
    def tuning(self) -> Iterator[None]:
        with suppress(CapacityError):  # then what is in the L2 stays there
            self._evicting = self.empty(_EVICTING_BYTES)
        self._algorithms.measuring = True
        try:
            yield
        finally:
            self._algorithms.measuring, self._evicting = False, None
            self._algorithms.save()

    # ---- the stream

    def event(self) -> CupyEvent:
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return CupyEvent(event, self._cupy.cuda, self._ranks)

    def capture(self, enqueue: Callable[[], None]) -> CupyGraph:
        with self._stream:
            self._stream.begin_capture()
            try:
                enqueue()
            except BaseException:
                with suppress(Exception):  # the capture is broken, and must end all the same
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        captured = CupyGraph(graph, self._stream)
        self._graphs.add(captured)
        return captured

    def join(self, communicator: Communicator, ties: Ties) -> NcclRanks:
        self._ranks = ranks = NcclRanks(load_nccl(), communicator, self._stream.ptr, ties)
        ranks.connect(self.zeros(8 * communicator.num_ranks))
        self.synchronize()
        if ties.sums:
            reach = CudaIpc(self._runtime, self._ordinal)
            ranks.peers = open_peers(self, communicator, reach, ties.sums, ties.item)
        return ranks

    def synchronize(self) -> None:
        if self._ranks is not None:
            self.event().wait()
        self._stream.synchronize()

    @contextmanager
    def faults(self) -> Iterator[None]:
        refusals = (
            self._runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
            CublasLtError,
        )
        try:
            yield
        except refusals as error:
            if _is_out_of_memory(error):
                raise CapacityError(
                    f"{self.info.name} has no memory left beyond what is planned for ({error}):"
                    " lower --memory-fraction, or end what else runs there (nvidia-smi)"
                ) from error
            try:
                self._runtime.deviceSynchronize()
            except refusals as lost:
                raise EngineDeadError(
                    f"{self.info.name} failed while it computed, and this process can use it no"
                    f" more ({lost}): see dmesg for NVIDIA's Xid messages, and nvidia-smi"
                ) from error
            raise

    def close(self) -> None:
        with suppress(VllmxError), self.faults():
            self.synchronize()
        for captured in self._graphs:  # a traceback may hold them, and NCCL waits for their end
            captured.graph = None
        if self._ranks is not None:
            self._ranks.close()
        self._algorithms.close()
        self._lt.close()
        self._workspace = None
        self._launchers.clear()
        self._modules.clear()
        with suppress(VllmxError), self.faults():
            self._pool.free_all_blocks()


def _is_out_of_memory(error: Exception) -> bool:
    """True if the runtime, the driver or cuBLASLt could not allocate."""
    if isinstance(error, CublasLtError):
        return error.status == ALLOC_FAILED
    return "MemoryAllocation" in str(error) or "OUT_OF_MEMORY" in str(error)
