"""Frames between the API process and the engine core process.

A frame is a length (4 bytes, little-endian) and that many bytes of msgpack: one of the messages
below, distinguished by the tag "type". Everything is decoded into these types or refused; nothing
is ever unpickled. Both ends run as one user over a unix socket that only this user can open.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec
from vllmx_core import errors
from vllmx_core.config import EngineConfig
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import (
    BackendSpec,
    EncoderSpec,
    ExecutorSpec,
    KVConnectorSpec,
    ModelImplSpec,
    ModelSourceSpec,
    ModelSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)

from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.messages import (
    MAX_FRAME_BYTES,
    CoreInfo,
    CoreOutput,
    CoreRequest,
    CoreStats,
    Follower,
    ReplicaLoad,
)


class KnownSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a core may need of a registry: (key of the plugin, spec)."""

    backends: list[tuple[str, BackendSpec]]
    models: list[tuple[str, ModelSpec]]
    model_impls: list[tuple[str, ModelImplSpec]]
    weight_formats: list[tuple[str, WeightFormatSpec]]
    quantizations: list[tuple[str, QuantizationSpec]]
    quantizers: list[tuple[str, QuantizerSpec]]
    encoders: list[tuple[str, EncoderSpec]]
    executors: list[tuple[str, ExecutorSpec]]
    model_sources: list[tuple[str, ModelSourceSpec]]
    kv_connectors: list[tuple[str, KVConnectorSpec]]
    preferred: list[str]

    @classmethod
    def of(cls, registry: Registry) -> KnownSpecs:
        """Returns the specs of a registry."""
        return cls(
            backends=registry.provided(BackendSpec),
            models=registry.provided(ModelSpec),
            model_impls=registry.provided(ModelImplSpec),
            weight_formats=registry.provided(WeightFormatSpec),
            quantizations=registry.provided(QuantizationSpec),
            quantizers=registry.provided(QuantizerSpec),
            encoders=registry.provided(EncoderSpec),
            executors=registry.provided(ExecutorSpec),
            model_sources=registry.provided(ModelSourceSpec),
            kv_connectors=registry.provided(KVConnectorSpec),
            preferred=list(registry.preferred),
        )

    def registry(self) -> Registry:
        """A registry that knows exactly this."""
        by_hook: dict[str, list[tuple[str, Any]]] = {
            f"vllmx_{name}": getattr(self, name)
            for name in self.__struct_fields__
            if name != "preferred"
        }
        registry = Registry()
        keys = {key: None for pairs in by_hook.values() for key, _ in pairs}
        for key in keys:
            hooks = {
                hook: tuple(spec for owner, spec in pairs if owner == key)
                for hook, pairs in by_hook.items()
            }
            registry.add(_Plugin(hooks), key)
        registry.prefer(self.preferred)
        return registry


class _Plugin:
    """A plugin whose hooks return what is given."""

    def __init__(self, hooks: dict[str, tuple[Any, ...]]) -> None:
        for name, specs in hooks.items():
            setattr(self, name, _hook(name, specs))


def _hook(name: str, specs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    def hook() -> tuple[Any, ...]:
        return specs

    hook.__name__ = name
    return hookimpl(hook)


_LENGTH = struct.Struct("<I")
M = TypeVar("M")


# --- to the core ----------------------------------------------------------------------------------
class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message: what to load."""

    config: EngineConfig
    path: str
    """The path where `config.model` leads."""
    mmproj: str | None = None
    """The path where `config.mmproj` leads, where images are taken."""
    specs: KnownSpecs
    progress: bool
    log_level: int
    digest_key: bytes = b""
    """The key of blocks' digests, common to all replicas. With it the core announces what it has
    cached."""
    host_key: bytes = b""
    """The key of the hosts of all replicas, if they are on several."""
    cores: list[int] = []
    """The processors to run on; empty: any."""
    devices: str = ""
    """The GPUs to see, as CUDA_VISIBLE_DEVICES; empty: those of the parent."""


class AddRequest(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """A sequence to continue, and further choices with the same prompt and parameters."""

    request: CoreRequest
    followers: list[Follower] = []


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends sequences that no client waits for."""

    request_ids: list[str]


What = Literal[
    "reset_prefix_cache",
    "pause",
    "is_settled",
    "resume",
    "is_paused",
    "update_weights",
    "end_session",
]


class Call(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    """A request of an operator; answered by Called."""

    call_id: int
    what: What
    text: str = ""
    """The mode of a pause, the path of weights, the id of a session."""
    client: str = ""
    """The owner of the session."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read an adapter and give it a name; answered by Called. The counters that follow list
    it."""

    call_id: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter's name; answered by Called."""

    call_id: int
    name: str


class PullBlocks(msgspec.Struct, frozen=True, tag="pull"):
    """Asks for KV blocks by name, see `vllmx_engine.core.tiers`; answered by Blocks, which follow
    as this request computes them."""

    names: list[bytes]
    request_id: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by Pong at once, whatever the core is about."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Free everything and exit."""


ToCore = (
    Start
    | AddRequest
    | AbortRequests
    | Call
    | LoadAdapter
    | UnloadAdapter
    | Vocabulary
    | PullBlocks
    | Ping
    | Shutdown
)


# --- from the core --------------------------------------------------------------------------------
class ErrorRecord(msgspec.Struct, frozen=True):
    """A VllmxError on its way through a socket."""

    type: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: VllmxError) -> ErrorRecord:
        return cls(type(error).__name__, error.message, error.param)

    def rebuild(self) -> VllmxError:
        """The same error; a VllmxError where the type is not one of `vllmx_core.errors`."""
        kind = getattr(errors, self.type, VllmxError)
        is_ours = isinstance(kind, type) and issubclass(kind, VllmxError)
        return (kind if is_ours else VllmxError)(self.message, param=self.param)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: CoreInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The model cannot be loaded, or the core cannot go on; nothing follows."""

    error: ErrorRecord


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The updates of all requests after one step."""

    outputs: list[CoreOutput]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent when work begins, every half second of it, and when it is done."""

    stats: CoreStats


class Called(msgspec.Struct, frozen=True, tag="called", omit_defaults=True):
    """The answer to a call. `done` is False while running sequences prevent it."""

    call_id: int
    done: bool
    error: ErrorRecord | None = None


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Some blocks of a PullBlocks, by name, each with a checksum, see
    `vllmx_engine.core.disk_store.sealed`. The last message has the last one of its states."""

    blocks: dict[bytes, bytes]
    is_last: bool


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The process of the core is alive."""


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """The blocks that a replica's cache has gained and lost since the last time, and its load."""

    filed: bytes
    """Digests of 16 bytes each; at first those of all cached blocks."""
    evicted: bytes
    load: ReplicaLoad


FromCore = Ready | Failed | Outputs | Stats | Called | Blocks | Pong | Announced


# --- frames ---------------------------------------------------------------------------------------
class FrameError(ValueError):
    """Malformed bytes in place of a frame; the connection is unusable."""


class FrameTooLargeError(FrameError):
    """A message that does not fit into one frame."""


_encoder = msgspec.msgpack.Encoder()
to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """The message with its length in front. Raises FrameTooLargeError."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    size = len(frame) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise FrameTooLargeError(f"a message of {size} bytes exceeds {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, size)
    return frame


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages of the decoder's type."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._rest = bytearray()
        self._wanted = _LENGTH.size
        """Bytes that `_rest` must reach before it is worth a look."""

    @property
    def is_within(self) -> bool:
        """True if a message has come in part."""
        return bool(self._rest)

    def feed(self, data: bytes | bytearray) -> Iterator[M]:
        """Every message that `data` completes. Raises FrameError for a length over the limit and
        for bytes that are not a message."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data, self._rest = self._rest, bytearray()
        view = memoryview(data)
        start, end, self._wanted = 0, len(view), _LENGTH.size
        while end - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(view, start)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            following = start + _LENGTH.size + size
            if following > end:
                self._wanted = following - start
                break
            yield self._decode(view[start + _LENGTH.size : following])
            start = following
        self._rest = bytearray(view[start:])

    def _decode(self, payload: memoryview) -> M:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a frame that is not a message: {error}") from error
