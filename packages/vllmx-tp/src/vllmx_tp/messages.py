"""Messages between rank 0, ranks and hosts, and the head of frames."""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec
from vllmx_core.backend import LoadedInfo
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.handshake import Service
from vllmx_engine.core.fingerprint import files_digest
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.ipc import ErrorRecord

from vllmx_tp import __version__

RANKS = Service(
    magic=b"vllmx ranks\n",
    distribution="vllmx-tp",
    version=__version__,
    protocol=1,
    stranger="it is not a host of ranks: check the port, and that `vllmx rank` runs",
)


class Purpose(IntEnum):
    """The use of a connection."""

    STEPS = 1
    """The first connection of a group, for steps."""
    PARTS = 2
    """The second one, for parts of calls between ranks."""


class Marks(msgspec.Struct, frozen=True):
    """Fingerprints of a model's files."""

    model: str
    tower: str | None = None
    """The fingerprint of the file of --mmproj; None: there is none."""

    @classmethod
    def of(cls, found: FoundModel) -> Marks:
        tower = None if found.mmproj is None else files_digest(found.mmproj)
        return cls(files_digest(found.path), tower)

    def check(self, wanted: Marks, found: FoundModel, place: str) -> None:
        """Raises ConfigError if the files of the host at `place` differ from rank 0's. A tower that
        rank 0 does not use may differ."""
        if wanted.model != self.model:
            raise ConfigError(
                f"the host of ranks at {place} has other files of the model in"
                f" {found.path} than rank 0: copy the same ones to all hosts",
                param="rank_hosts",
            )
        if wanted.tower is None or wanted.tower == self.tower:
            return
        wrong = "no --mmproj" if found.mmproj is None else f"another file in {found.mmproj}"
        raise ConfigError(
            f"rank 0 has --mmproj, and the host of ranks at {place} has {wrong}: copy the file"
            " there, and name it by `vllmx rank --mmproj FILE`",
            param="mmproj",
        )


class Call(IntEnum):
    """The purpose of a frame."""

    STEP = 1
    FORWARD = 2
    SAMPLE = 3
    ENCODE = 4
    """A part of the tower's pass that was sent last."""
    CLOSE = 5
    BEAT = 6
    """A heartbeat to a host."""
    NEXT = 7
    """A step that rank 0 begins after it has read all earlier ones."""
    PASS = 8
    """The plan of a pass of the tower, whose parts follow."""
    BEGIN = 9
    """The first call to a host: what its ranks load (`Begin`)."""
    SAMPLED = 10
    """The ids that rank 0 sampled in a step, sent if ranks compare their ids
    (`vllmx_tp.sampled_ids`)."""


NOTICE = struct.Struct("<IIQ")
"""The call, bytes of the frame, and where in the ring it lies (`INLINE`: behind the notice)."""
INLINE = (1 << 64) - 1


_DECIDE_BITS = ("instruction set", "torch", "mlx")
"""Entries of `LoadedInfo.details` on which the bits of results depend."""


class RankReady(msgspec.Struct, frozen=True):
    """A rank is loaded; all must report the same."""

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
    """Anything else that determines the bits of its results."""

    @classmethod
    def of(cls, info: LoadedInfo) -> RankReady:
        details = info.details
        computes_with = {name: str(details[name]) for name in _DECIDE_BITS if name in details}
        fields = (name for name in cls.__struct_fields__ if name != "computes_with")
        return cls(**{name: getattr(info, name) for name in fields}, computes_with=computes_with)


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of loading: one of the two is set."""

    ready: RankReady | None = None
    error: ErrorRecord | None = None


# --- between hosts --------------------------------------------------------------------------------
class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's message to a host: what its ranks load."""

    config: EngineConfig
    first: int
    count: int
    """Number of ranks that the host runs, from `first` on."""
    marks: Marks
    """Fingerprints of rank 0's files."""


class HostLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The result of loading: the reports of all ranks of the host, or the error."""

    ready: list[RankReady] = []
    error: ErrorRecord | None = None


class HostBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat of a host."""


class HostEnd(msgspec.Struct, frozen=True, tag="end"):
    """Says that the ranks of a host have ended."""

    cause: str


FromHost = HostLoaded | HostBeat | HostEnd
