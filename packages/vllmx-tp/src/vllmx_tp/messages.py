"""What ranks and hosts tell rank 0 and it tells them, and what stands before each frame."""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec
from vllmx_core.backend import LoadedInfo
from vllmx_core.config import EngineConfig
from vllmx_engine.wire.ipc import ErrorRecord

from vllmx_tp.fingerprint import Marks


class Call(IntEnum):
    """The purpose of a frame."""

    STEP = 1
    FORWARD = 2
    SAMPLE = 3
    ENCODE = 4
    """A part of the tower's pass that was sent last."""
    CLOSE = 5
    BEAT = 6
    """The word to a host that rank 0 lives."""
    NEXT = 7
    """A step, which rank 0 begins when it has read all steps before."""
    PASS = 8
    """The plan of a pass of the tower, which is run in the parts that follow."""
    BEGIN = 9
    """The first word to a host: what its ranks are to load (`Begin`)."""
    DREW = 10
    """What rank 0 drew in a step (`vllmx_tp.drawn`), told where ranks compare their ids."""


NOTICE = struct.Struct("<IIQ")
"""The call, bytes of the frame, and where in the ring it lies (`INLINE`: behind the notice)."""
INLINE = (1 << 64) - 1


_DECIDE_BITS = ("instruction set", "torch", "mlx")
"""The parts of what backends say of a loaded model (`LoadedInfo.details`) that decide its bits."""


class RankReady(msgspec.Struct, frozen=True):
    """A rank is loaded; all must have come to the same."""

    backend: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    cache_windows: tuple[int | None, ...]
    max_num_batched_tokens: int
    max_logit_rows: int
    num_feature_rows: int
    num_kv_blocks: int
    max_num_seqs: int
    num_state_slots: int
    state_slot_bytes: int
    weight_bytes: int
    kv_cache_bytes: int
    computes_with: dict[str, str] = {}
    """What else decides the bits of its results."""

    @classmethod
    def of(cls, info: LoadedInfo) -> RankReady:
        details = info.details
        computes_with = {name: str(details[name]) for name in _DECIDE_BITS if name in details}
        fields = (name for name in cls.__struct_fields__ if name != "computes_with")
        return cls(**{name: getattr(info, name) for name in fields}, computes_with=computes_with)


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How loading ended, one of both."""

    ready: RankReady | None = None
    error: ErrorRecord | None = None


# --- between hosts --------------------------------------------------------------------------------
class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 to a host: what its ranks are to load."""

    config: EngineConfig
    first: int
    count: int
    """How many ranks the host runs, from `first` on."""
    marks: Marks
    """What tells the files of rank 0 from others."""


class HostLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """How loading ended: what all ranks of the host came to, or the error."""

    ready: list[RankReady] = []
    error: ErrorRecord | None = None


class HostBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The host lives."""


class HostEnd(msgspec.Struct, frozen=True, tag="end"):
    """Says that the ranks of a host have ended."""

    cause: str


FromHost = HostLoaded | HostBeat | HostEnd
