"""The face of a backend: all that the engine knows of a device."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from vllmx_core.communicator import Communicator
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.plan import SamplingRows, StepPlan, StepResult
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
    """How to load a model. None always means: the backend decides and reports it in LoadedInfo."""

    dtype: str = "auto"
    """auto (the checkpoint's), bf16, f16 or f32."""
    kv_cache_dtype: str = "auto"
    """auto (the backend's choice beside `dtype`), or one of `vllmx_core.kv_dtypes.KV_DTYPES`."""
    max_model_len: int = 4096
    shrink_to_fit: bool = False
    """`max_model_len` is the model's own, not a wish: where memory holds fewer tokens, load with
    as many KV blocks as fit (at least one) instead of raising CapacityError."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    group_caches: bool = False
    """The caller makes a block table for each cache group (`vllmx_core.cache.groups`), so that
    layers with a window need not keep what the others do; False: one table for all layers."""
    num_state_slots: int | None = None
    """Slots for the states of recurrent layers: one for each sequence that runs, and more to keep
    states for later."""
    memory_fraction: float = 0.9
    free_bytes: int | None = None
    """The free memory to divide, where ranks share it: what one of them found before any had taken
    some, so that all come to the same whoever is first."""
    num_threads: int | None = None
    encoder_cache_bytes: int = 256 << 20
    """The bytes that features of images may take on the device; at least those of a step are held.
    """
    enforce_eager: bool = False
    """Run op by op without the recorded step; same bits, for debugging."""
    communicator: Communicator | None = None
    """The other ranks, of a model that is one rank's part (`vllmx_core.sharding`)."""
    pages: Any = None
    """The `HasPages.pages` of a loaded model with the same layers, to share: this one allocates
    none, and both write them."""
    progress: bool = False
    """Show a progress bar on standard error while weights load."""

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, for backends that choose `DEFAULT_NUM_SEQS` whatever the device."""
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
    """Above 1: so many steps are in flight at the most, not two, each in another stage of the
    model. They must have different rows but for chunks of a prompt, and tokens that are known."""
    num_feature_rows: int = 0
    """Tokens of images whose features the store holds; 0: the model sees none."""
    encodes_in_parts: bool = False
    """Whether a pass of the tower can be given in parts; see `SeeingModel.encode`."""
    step_timeout_s: float = DEVICE_STEP_TIMEOUT_S
    """The time after which a step here must be taken for hung, where the user does not say."""
    cache_windows: tuple[int | None, ...] = (None,)
    """One entry for each cache group, in the order of `StepPlan.block_tables`: how many of a
    sequence's tokens, the newest included, its layers see. Pages before them may be given to
    others; None: all pages stay."""
    num_state_slots: int = 0
    """Slots that `StepPlan.state_from` and `state_to` may name, numbered from 0; none for a model
    without states."""
    state_slot_bytes: int = 0
    """Memory of one slot."""


class StepHandle(Protocol):
    """A step that was enqueued."""

    def result(self) -> StepResult:
        """Waits for the step. Call once, in the order of the steps."""
        ...


class ForwardStep(Protocol):
    """A step whose forward pass was enqueued and whose logits wait for their parameters."""

    def sample(self, rows: SamplingRows) -> StepHandle:
        """Enqueues the rest of the step and returns without waiting for it. Call once, before the
        next `forward` or `step`; the step before may be read first. Where it raises, the step has
        ended and counts no more."""
        ...


class LoadedModel(Protocol):
    """A model on a device, with its KV cache. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> LoadedInfo: ...

    def step(self, plan: StepPlan, rows: SamplingRows) -> StepHandle:
        """Enqueues one step and returns without waiting for it. At most two steps are in flight
        (but see `LoadedInfo.num_stages`); the second may refer to the first one's ids by negative
        tokens. A model that gives vectors
        or scores samples nothing: `rows` is empty then, whatever L is."""
        ...

    def forward(self, plan: StepPlan) -> ForwardStep:
        """`step` in two parts, for rows that depend on the ids of the step before: enqueue this
        one's forward pass, read that one, then sample. It counts as a step in flight from here on;
        results are those of `step`. Slower than `step` where nothing is late."""
        ...

    def close(self) -> None:
        """Waits for steps in flight, then frees everything. May be called twice."""
        ...


class SeeingModel(LoadedModel, Protocol):
    """A loaded model with a tower for images (`ModelShape.features`)."""

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """Enqueues a pass of the tower, whose features later steps read; see `StepPlan.patches`.
        Where `LoadedInfo.encodes_in_parts`, it may be given in parts, from `begin` to `end` of its
        work: in their order, with the plan unchanged and no other pass before its end. What a pass
        took is a part of the next step's `StepResult.elapsed_s`."""
        ...


@runtime_checkable
class HasPages(Protocol):
    """A loaded model whose KV pages another one can share."""

    @property
    def pages(self) -> Any:
        """The pages, for `LoadOptions.pages` of the same backend."""
        ...


@runtime_checkable
class HasMemory(Protocol):
    """A backend whose models take another memory than the host's, or not all of that."""

    def free_bytes(self) -> int:
        """Memory that a model may take on the device that `load` would choose now. Raises what
        `load` raises where there is no device."""
        ...


class Backend(Protocol):
    """Constructed without arguments when it was chosen; cheap until `load`."""

    @property
    def name(self) -> str: ...

    def supports(self, op: Op) -> bool:
        """Whether it has the op with the options that this one has. `load` refuses a model with
        another one, unless that expands into ops that it has."""
        ...

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> LoadedModel:
        """Raises UnsupportedOpError for a model with an op that it lacks, before any weight is
        read, CapacityError when weights or one sequence of max_model_len do not fit,
        WeightFormatError when the checkpoint does not match the model's weight map."""
        ...

    def environment(self) -> dict[str, str]:
        """Versions and device facts for `vllmx env`."""
        ...


def free_memory(backend: Backend) -> int:
    """Memory that a model may take on a backend: the device's where it has its own, else the
    host's."""
    return backend.free_bytes() if isinstance(backend, HasMemory) else free_bytes()
