"""The interface between the engine and a backend."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from vllmx_core.adapters import Adapter, AdapterRoom
from vllmx_core.communicator import Communicator
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.plan import I32, U8, SamplingRows, StepPlan, StepResult
from vllmx_core.records import Record
from vllmx_core.system.memory import free_bytes
from vllmx_core.weights.part import WeightSource

DEFAULT_NUM_SEQS = 256
"""Sequences that run together where neither the user nor the device asks for fewer."""

DEVICE_STEP_TIMEOUT_S = 300.0
"""A step of a GPU takes milliseconds, with a first use of kernels in it seconds."""
HOST_STEP_TIMEOUT_S = 3600.0
"""A prompt of 2048 tokens on a large model takes a slow processor many minutes, and swapping more;
there is no driver to hang in."""


class LoadOptions(Record):
    """Options for loading a model. None: the backend decides and reports it in LoadedInfo."""

    dtype: str = "auto"
    """auto (the checkpoint's), bf16, f16 or f32."""
    kv_cache_dtype: str = "auto"
    """auto (the backend's choice for `dtype`), or one of `vllmx_core.kv_dtypes.KV_DTYPES`."""
    max_model_len: int = 4096
    shrink_to_fit: bool = False
    """True if `max_model_len` is only the model's default: if fewer tokens fit, load with as many
    KV blocks as fit (at least one) instead of raising CapacityError."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    group_caches: bool = False
    """True if the caller makes a block table for each cache group (`vllmx_core.cache.groups`), so
    that layers with a window keep fewer pages; False: one table for all layers."""
    num_state_slots: int | None = None
    """Slots for the states of recurrent layers: one for each sequence that runs, and more to keep
    states for later."""
    memory_fraction: float = 0.9
    free_bytes: int | None = None
    """The free memory to divide if ranks share a device: measured by one rank before any of them
    allocates, so that all compute the same sizes."""
    num_threads: int | None = None
    encoder_cache_bytes: int = 256 << 20
    """Bytes for image features on the device; a step's features always fit."""
    enforce_eager: bool = False
    """Run op by op without the recorded step; same bits, for debugging."""
    communicator: Communicator | None = None
    """Connects to the other ranks if the model is one rank's part (`vllmx_core.sharding`)."""
    pages: Any = None
    """The `HasPages.pages` of a loaded model with the same layers, to share: this one allocates
    none, and both write them."""
    hidden: Any = None
    """The `HasHidden.hidden` of a drafter's target, whose store it reads and writes."""
    adapters: AdapterRoom | None = None
    """Slots for LoRA adapters, which make the loaded model a `HasAdapters`; None: it takes none."""
    progress: bool = False
    """Show a progress bar on standard error while weights load."""

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, by default `DEFAULT_NUM_SEQS`: for backends without another default."""
        return self.max_num_seqs or DEFAULT_NUM_SEQS


class LoadedInfo(Record):
    """The result of loading a model: its device, dtypes, sizes and limits."""

    backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_kv_blocks: int
    """Blocks that the engine may use, numbered 0 ... num_kv_blocks - 1, for all cache groups
    together."""
    max_num_seqs: int
    """Sequences that run together: as many as were asked for, or the backend's choice."""
    max_num_batched_tokens: int
    """Greatest T of a step."""
    max_logit_rows: int
    """Greatest L of a step."""
    weight_bytes: int
    kv_cache_bytes: int
    details: dict[str, Any]
    """Shown by `vllmx env` and in the log: kernel variant, threads, ..."""
    num_stages: int = 1
    """Above 1: the maximum number of steps in flight (otherwise two), each in another stage of the
    model. Except for chunks of a prompt their rows must differ, and their tokens must be known."""
    num_feature_rows: int = 0
    """Tokens of images whose features the store holds, in the rows before one for features that
    are dropped; 0: the model sees none."""
    encodes_in_parts: bool = False
    """True if a pass of the tower can be run in parts; see `SeeingModel.encode`."""
    step_timeout_s: float = DEVICE_STEP_TIMEOUT_S
    """The default time after which a step counts as hung."""
    cache_windows: tuple[int | None, ...] = (None,)
    """One entry for each cache group, in the order of `StepPlan.block_tables`: the number of newest
    tokens of a sequence that its layers see. Earlier pages may be reused; None: all are kept."""
    num_state_slots: int = 0
    """Slots that `StepPlan.state_from` and `state_to` may name, numbered from 0; none for a model
    without states."""
    state_slot_bytes: int = 0
    """Memory of one slot."""
    keeps_states_after: bool = False
    """True if the backend serves `StepPlan.state_after`."""


class StepHandle(Protocol):
    """A step that was enqueued."""

    def result(self) -> StepResult:
        """Waits for the step. Call once, in the order of the steps."""
        ...


class ForwardStep(Protocol):
    """A step whose forward pass is enqueued and whose sampling is not."""

    def sample(self, rows: SamplingRows) -> StepHandle:
        """Enqueues the rest of the step and returns without waiting for it. Call once, before the
        next `forward` or `step`; the previous step may be read first. If it raises, the step is no
        longer in flight."""
        ...


class LoadedModel(Protocol):
    """A model on a device, with its KV cache. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> LoadedInfo: ...

    def step(self, plan: StepPlan, rows: SamplingRows) -> StepHandle:
        """Enqueues one step and returns without waiting for it. At most two steps are in flight
        (but see `LoadedInfo.num_stages`); the second may refer to the first one's ids by negative
        tokens. For models that give vectors or scores `rows` is empty, whatever L is."""
        ...

    def forward(self, plan: StepPlan) -> ForwardStep:
        """`step` in two parts, for rows that depend on the ids of the previous step: enqueue the
        forward pass, read the previous step, then sample. The step is in flight from here on. The
        results are those of `step`, which is faster if no row has to wait."""
        ...

    def close(self) -> None:
        """Waits for steps in flight, then frees everything. May be called twice."""
        ...


class SeeingModel(LoadedModel, Protocol):
    """A loaded model with a tower for images (`ModelShape.features`)."""

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """Enqueues a pass of the tower, whose features later steps read; see `StepPlan.patches`.
        With `LoadedInfo.encodes_in_parts` a pass can be split into calls for the parts from `begin`
        to `end`, in order, with the same plan and no other pass in between. The time of a pass is
        part of the next step's `StepResult.elapsed_s`."""
        ...


@runtime_checkable
class HasPages(Protocol):
    """A loaded model whose KV pages another one can share."""

    @property
    def pages(self) -> Any:
        """The pages, for `LoadOptions.pages` of the same backend."""
        ...


class CopyOut(Protocol):
    """A copy of blocks or slots that was enqueued."""

    def result(self) -> U8:
        """(n, bytes of one), in the order that was asked for. Waits; any thread may call it."""
        ...


class MovableRows(Protocol):
    """The KV blocks, or the state slots, of a loaded model: all layers' bytes of one are a row. The
    bytes mean nothing to others: only a model that was loaded alike reads them."""

    def copy_out(self, rows: I32) -> CopyOut:
        """Copies rows that no step in flight writes, before a later step can."""
        ...

    def copy_in(self, rows: I32, data: U8) -> None:
        """Writes data (n, bytes of one) to n rows, behind all steps in flight and before later
        ones. `data` may change afterwards."""
        ...


class MovableCache(Record):
    """The parts of a model's cache that outlive the device."""

    blocks: MovableRows
    states: MovableRows | None
    """None: the model has no recurrent layers."""
    in_host_memory: bool
    """True if they lie in the host's memory already."""


@runtime_checkable
class HasMovableCache(Protocol):
    """A loaded model whose blocks and states can be copied out and in."""

    @property
    def movable_cache(self) -> MovableCache: ...


@runtime_checkable
class HasHidden(Protocol):
    """A loaded model that keeps hidden states for a drafter (`ModelShape.taps`)."""

    @property
    def hidden(self) -> Any:
        """The store for them, and weights that the drafter need not load again, for
        `LoadOptions.hidden` of the same backend; None where no drafter asked for any."""
        ...


@runtime_checkable
class HasAdapters(Protocol):
    """A loaded model whose rows may use adapters."""

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """Puts an adapter into a slot, or empties it, once the steps in flight have run; the rows
        of later steps that name the slot use it. Raises AdapterError for one that does not fit the
        model, and then leaves the slot as it was."""
        ...


@runtime_checkable
class HasMemory(Protocol):
    """A backend that does not simply use the host's free memory."""

    def free_bytes(self) -> int:
        """Memory available to a model on the device that `load` would choose now. Raises what
        `load` raises if there is no device."""
        ...


class Backend(Protocol):
    """A device backend: constructed without arguments, cheap until `load`."""

    @property
    def name(self) -> str: ...

    def supports(self, op: Op) -> bool:
        """True if the backend implements the op with these options. `load` refuses a model with an
        unsupported op, unless that expands into supported ones."""
        ...

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> LoadedModel:
        """Raises UnsupportedOpError for an op that the backend lacks, before any weight is read;
        CapacityError if weights or one sequence of max_model_len do not fit; WeightFormatError if
        the checkpoint does not match the model's weight map."""
        ...

    def environment(self) -> dict[str, str]:
        """Versions and device facts for `vllmx env`."""
        ...


def free_memory(backend: Backend) -> int:
    """Memory available to a model on a backend: the device's own, or the host's."""
    return backend.free_bytes() if isinstance(backend, HasMemory) else free_bytes()
