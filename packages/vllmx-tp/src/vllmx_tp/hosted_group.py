"""A host that runs ranks for a rank 0 on another host: `vllmx rank`.

It waits for a rank 0 that has its key (`vllmx_tp.listener`), runs the ranks that this asks for
until the group ends, and waits again: a rank 0 that failed is started again and reconnects.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import Empty

import msgspec
import numpy as np
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, RankLostError, VllmxError
from vllmx_core.system.deadline import Deadline
from vllmx_core.system.handshake import fill
from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.core.load import free_for_model
from vllmx_engine.wire.ipc import ErrorRecord, FrameError, encode_frame

from vllmx_tp.frames import SentFrame
from vllmx_tp.group import HANG_S, Group
from vllmx_tp.link import Link, link_of
from vllmx_tp.listener import Caller, RankListener
from vllmx_tp.liveness import PollTimer, StallTimer
from vllmx_tp.loading import divide_cores
from vllmx_tp.messages import (
    NOTICE,
    Begin,
    Call,
    FromHost,
    HostBeat,
    HostEnd,
    HostLoaded,
    Marks,
)
from vllmx_tp.region import Region, Word

logger = logging.getLogger("vllmx.tp")

_LOOK_S = 0.2
LINK_S = 30.0
"""Seconds that rank 0 may take to name the model, and to make its second connection."""
_MOST_BYTES = 1 << 30


class HostedGroup:
    """Runs one group.

    The thread that made it loads the ranks, which are tied to the main thread. Other threads read
    rank 0's messages, send heartbeats to both sides, and watch both sides.

    Args:
        found: the model and the tower on this host.
        place: the address of this host, for messages.
    """

    def __init__(self, caller: Caller, found: FoundModel, place: str) -> None:
        self._caller, self._socket = caller, caller.steps
        self._deadline: Deadline | None = None
        """The deadline for rank 0 to name the model; None once it has."""
        self._found, self._place = found, place
        self._region: Region | None = None
        self._link: Link | None = None
        self._group: Group | None = None
        self._is_loaded = False
        self._cause: Exception | None = None
        self._ended, self._done = threading.Event(), threading.Event()
        self._verdict, self._turn = threading.Lock(), threading.Lock()
        self._heard, self._silence = 0, StallTimer()
        self._hands_on = False
        """True while a step waits for space in the ranks' ring; nothing is read meanwhile."""

    def run(self) -> None:
        """Runs ranks until rank 0 closes. Raises what ends them earlier: EOFError and OSError if
        rank 0 is gone, FrameError for an invalid message, or the VllmxError of loading or of a
        rank, which is also sent to rank 0."""
        try:
            begin = self._begin()
            self._start(self._follow)
            self._start(lambda: self._every(self._beat, self._done))
            self._start(lambda: self._every(self._look, self._ended))
            group = self._load(begin)
            self._ended.wait()
            self._check()
            group.close()
        except RankLostError as error:
            self._say_last(HostEnd(error.message))
            raise
        except VllmxError as error:
            if self._group is not None:
                self._group.kill()
                self._group = None
            self._say_last(HostLoaded(error=ErrorRecord.of(error)))
            self._ended.wait()  # rank 0 reads the error and hangs up
            raise
        finally:
            self._done.set()
            self._close()

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="vllmx-hosted", daemon=True).start()

    def _close(self) -> None:
        if self._region is not None:
            self._region.abort()
        if self._group is not None:
            self._group.kill()
        if self._link is not None:
            self._link.close()
        if self._region is not None:
            self._region.close()

    # --- loading ----------------------------------------------------------------------------------
    def _begin(self) -> Begin:
        """Reads the group that rank 0 asks for."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = Deadline(LINK_S)
        try:
            call, data = self._hear()
        except TimeoutError:
            raise FrameError(
                f"rank 0 has not said within {LINK_S:g} s what to load: check the network"
            ) from None
        self._deadline = None
        self._socket.settimeout(None)
        if call is not Call.BEGIN:
            raise FrameError(f"rank 0 sends {call.name} before it has said what to load")
        try:
            return msgspec.msgpack.decode(data, type=Begin)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"rank 0 asks for an invalid group: {error}") from error

    def _load(self, begin: Begin) -> Group:
        """Loads the ranks and reports to rank 0. Raises VllmxError, or the cause of the group's
        end."""
        config, ranks = begin.config, self._ranks(begin)
        found = self._found_for(begin)
        backend = found.registry.choose_backend(config.backend)[0]
        cores = divide_cores(len(ranks), config, backend.name)
        free = free_for_model(config, backend)  # before the first of them allocates
        self._region = Region.create(config.num_ranks, config.pipeline_parallel_size)
        self._link = self._linked(self._region, config, ranks)
        self._group = Group(found, self._region, ranks, cores, len(ranks), free_bytes=free)
        self._check()
        ready = self._group.loaded()
        self._is_loaded = True
        self._say(HostLoaded(ready=ready))
        return self._group

    def _ranks(self, begin: Begin) -> range:
        """The ranks to run here. Raises ConfigError if they do not fit the configuration."""
        config, first, count = begin.config, begin.first, begin.count
        stages = config.pipeline_parallel_size
        each = config.tensor_parallel_size if stages > 1 else 1
        is_within = first > 0 and count > 0 and first + count <= config.num_ranks
        if not is_within or first % each or count % each:
            raise ConfigError(
                f"the host of ranks at {self._place} was asked for {count} ranks, from rank {first}"
                f" on, of {config.num_ranks} in {stages} stages: ask for whole stages, behind rank"
                " 0's",
                param="rank_hosts",
            )
        return range(first, first + count)

    def _found_for(self, begin: Begin) -> FoundModel:
        """The model on this host with rank 0's configuration. The files are checked each time,
        since they may have been copied again. Raises ConfigError if they differ from rank 0's."""
        try:
            marks = Marks.of(self._found)
        except OSError as error:
            raise ConfigError(
                f"the host of ranks at {self._place} cannot read {error.filename}"
                f" ({error.strerror}): copy the model's files there again",
                param="rank_hosts",
            ) from error
        marks.check(begin.marks, self._found, self._place)
        mine = self._found.config
        tower = None if begin.marks.tower is None else self._found.mmproj
        name = None if tower is None else mine.mmproj
        config = replace(begin.config, model=mine.model, revision=mine.revision, mmproj=name)
        return FoundModel(config, self._found.path, self._found.registry, False, tower)

    def _linked(self, region: Region, config: EngineConfig, mine: range) -> Link:
        try:
            connection = self._caller.parts.get(timeout=LINK_S)
        except Empty:
            raise RankLostError(
                f"rank 0 has made no second connection within {LINK_S:.0f} s"
            ) from None
        self._check()
        assert connection is not None, "there is none where the group has ended"
        theirs = [rank for rank in range(config.num_ranks) if rank not in mine]
        return link_of(config)(region, connection, mine, theirs, self._link_broke)

    # --- what rank 0 says -------------------------------------------------------------------------
    def _follow(self) -> None:
        """Forwards steps until rank 0 closes."""
        try:
            self._steps()
        except (VllmxError, FrameError, OSError, EOFError) as error:
            self._end(error)
        else:
            self._end(None)

    def _steps(self) -> None:
        while True:
            call, data = self._hear()
            if call is Call.BEAT:
                continue
            if self._group is None or not self._is_loaded:
                raise FrameError(f"rank 0 sends {call.name} before the ranks are loaded")
            if call is Call.CLOSE:
                return
            if call is Call.BEGIN or len(data) % 4:
                raise FrameError(
                    f"rank 0 sends {call.name} of {len(data)} bytes, which is not a step"
                )
            self._hands_on = True
            self._group.send(call, SentFrame(np.frombuffer(data, np.int32)))
            self._hands_on = False

    def _hear(self) -> tuple[Call, bytearray]:
        """Reads a call of rank 0 and its data. Raises EOFError, OSError, FrameError."""
        number, size, _ = NOTICE.unpack(self._read(NOTICE.size))
        try:
            call = Call(number)
        except ValueError:
            raise FrameError(f"rank 0 makes call {number}, which is not known here") from None
        if size > _MOST_BYTES:
            raise FrameError(
                f"rank 0 sends {call.name} of {size} bytes, more than the {_MOST_BYTES} of a step"
            )
        return call, self._read(size)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        try:
            fill(memoryview(data), self._receive)
        except EOFError:
            raise EOFError("rank 0 is gone") from None
        return data

    def _receive(self, view: memoryview) -> int:
        if self._deadline is not None:
            self._socket.settimeout(self._deadline.left_s(LINK_S))
        count = self._socket.recv_into(view)
        self._heard += 1  # data of a long step are a sign of life too
        return count

    # --- what rank 0 hears ------------------------------------------------------------------------
    def _say(self, message: FromHost) -> None:
        with self._turn:
            self._socket.sendall(encode_frame(message))

    def _say_last(self, message: FromHost) -> None:
        with suppress(OSError):  # rank 0 is gone
            self._say(message)

    def _beat(self, passed_s: float) -> None:
        """Sends a heartbeat to rank 0 and, in rank 0's place, to the ranks here."""
        if self._region is not None:
            word = self._region.word(0, Word.HEARTBEAT)
            word[0] = int(word[0]) % 0xFFFFFFFF + 1
        self._say(HostBeat())

    # --- the end ----------------------------------------------------------------------------------
    def _end(self, cause: Exception | None) -> None:
        """Ends the group; None: rank 0 has closed it. The first cause counts, and interrupts
        loading."""
        with self._verdict:
            if self._ended.is_set():
                return
            self._cause = cause
            self._ended.set()
        self._caller.parts.put(None)
        if self._group is not None and not self._is_loaded:
            self._group.lost(str(cause))

    def _check(self) -> None:
        """Raises the cause of the group's end, if it has ended and rank 0 has not closed it."""
        if self._cause is not None:
            raise self._cause

    def _link_broke(self, reason: str) -> None:
        self._end(EOFError(f"the connection for parts has ended: {reason}"))

    def _look(self, passed_s: float) -> None:
        """Watches the ranks and rank 0, which is silent until both connections exist."""
        silent_s = self._silence.look(self._heard, passed_s, moves=self._hands_on)
        failure = None if self._group is None else self._group.failure
        if failure is not None:
            self._end(failure)
        elif silent_s >= (LINK_S if self._link is None else HANG_S):
            self._end(EOFError("rank 0 says nothing any more: it hangs, or the network is down"))

    def _every(self, work: Callable[[float], None], until: threading.Event) -> None:
        """Calls `work` five times a second with the seconds of a `PollTimer`."""
        timer = PollTimer(_LOOK_S)
        while not until.wait(_LOOK_S):
            try:
                work(timer.passed_s())
            except OSError:
                return


logger = logging.getLogger("vllmx.tp")


def serve_ranks(listener: socket.socket, config: EngineConfig, key: bytes) -> None:
    """Runs groups one after the other until the listener is closed.

    Args:
        config: the names of the model and of --mmproj on this host; rank 0 decides the rest.
    """
    found = find_model(config)
    host, port = listener.getsockname()[:2]
    callers = RankListener(listener, key)
    logger.info("ranks of %s wait at %s:%d", config.model, host, port)
    while (caller := callers.caller()) is not None:
        try:
            HostedGroup(caller, found, f"{host}:{port}").run()
            logger.info("a group has ended: rank 0 has closed it")
        except (VllmxError, FrameError, OSError, EOFError) as error:
            logger.error("a group has ended: %s", error)
        finally:
            callers.leave(caller)
