"""A host that runs ranks for a rank 0 elsewhere: `vllmx rank`.

It waits for a connection of somebody who has its key, starts the ranks that are asked for, hands
steps on to them, and ends them with the connection. Then it waits again: rank 0 is started again
after it failed, and asks anew.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, RankLostError, VllmxError
from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.wire.ipc import ErrorRecord, FrameError, FrameReader, encode_frame

from vllmx_tp.fingerprint import Marks
from vllmx_tp.frames import SentFrame
from vllmx_tp.group import HANG_S, Group
from vllmx_tp.handshake import HandshakeError, greet
from vllmx_tp.link import Link
from vllmx_tp.loading import divide_cores
from vllmx_tp.messages import NOTICE, Begin, Call, FromHost, HostBeat, HostEnd, HostLoaded
from vllmx_tp.region import Region, Word
from vllmx_tp.stage_link import link_of

logger = logging.getLogger("vllmx.tp")

_LOOK_S = 0.2
_LINK_S = 30.0
"""The seconds that rank 0 may take to make its second connection."""
_MOST_BYTES = 1 << 30
_decoder = msgspec.msgpack.Decoder(Begin)


def listen(address: tuple[str, int]) -> socket.socket:
    """Raises ConfigError where that cannot be."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=8)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0  # those of resolvers are negative
        reason = os.strerror(number) if number > 0 else str(error)
        is_port = number == errno.EADDRINUSE or isinstance(error, OverflowError)
        remedy = (
            "choose another port, or end the process that has this one"
            if is_port
            else "name an address that this host has, or a port that this user may have"
        )
        raise ConfigError(
            f"--listen {address[0]}:{address[1]}: {reason}: {remedy}", param="listen"
        ) from error


def serve_ranks(
    listener: socket.socket, config: EngineConfig, key: bytes, *, once: bool = False
) -> None:
    """Runs groups one after the other, for ever unless `once`.

    Args:
        config: names the model, and the tower of --mmproj, as they are found on this host; all
            else is rank 0's to say.
    """
    found = find_model(config)
    marks = Marks.of(found)
    logger.info("ranks of %s wait at %s:%d", config.model, *listener.getsockname()[:2])
    while True:
        connection = _accepted(listener, key)
        if connection is None:
            continue
        try:
            with connection:
                HostedGroup(listener, connection, found, marks, key).run()
            logger.info("a group has ended: rank 0 has closed it")
        except (HandshakeError, VllmxError, FrameError, OSError, EOFError) as error:
            logger.error("a group has ended: %s", error)
        if once:
            return


def _accepted(listener: socket.socket, key: bytes) -> socket.socket | None:
    connection, (address, *_) = listener.accept()
    try:
        greet(connection, key, calls=False)
    except (HandshakeError, OSError) as error:
        logger.warning("refused %s: %s", address, error)
        connection.close()
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class HostedGroup:
    """The ranks of this host in one group, from the first connection to their end."""

    def __init__(
        self,
        listener: socket.socket,
        connection: socket.socket,
        found: FoundModel,
        marks: Marks,
        key: bytes,
    ) -> None:
        self._listener, self._socket, self._key = listener, connection, key
        self._found, self._marks = found, marks
        self._heard = 0
        self._done = threading.Event()
        self._turn = threading.Lock()

    def run(self) -> None:
        """Runs ranks until rank 0 closes or is gone."""
        begin = self._begin()
        region = Region.create(begin.num_ranks, begin.config.pipeline_parallel_size)
        link: Link | None = None
        group: Group | None = None
        beats = partial(self._beat, region.word(0, Word.HEARTBEAT))
        threading.Thread(target=beats, name="vllmx-beats", daemon=True).start()
        try:
            link = self._linked(region, begin)
            try:
                group = self._group(region, begin)
                self._send(HostLoaded(ready=group.loaded()))
            except VllmxError as error:
                self._send(HostLoaded(error=ErrorRecord.of(error)))
                self._rest()
                return
            threading.Thread(target=self._watch, args=(group,), daemon=True).start()
            try:
                self._steps(group)
            except RankLostError as error:
                self._send(HostEnd(error.message))
                raise
        finally:
            self._done.set()
            region.aborted[0] = 1
            if group is not None:
                group.kill()
            if link is not None:
                link.close()
            region.close()

    def _begin(self) -> Begin:
        """What rank 0 asks for. The first connection has nothing else to say yet."""
        reader = FrameReader(_decoder)
        self._socket.settimeout(_LINK_S)
        while data := self._socket.recv(1 << 16):
            for begin in reader.feed(data):
                self._socket.settimeout(None)
                return begin
        raise EOFError("rank 0 hung up before it said what to load")

    def _linked(self, region: Region, begin: Begin) -> Link:
        self._listener.settimeout(_LINK_S)
        try:
            data = None
            while data is None:
                data = _accepted(self._listener, self._key)
        finally:
            self._listener.settimeout(None)
        mine = range(begin.first, begin.first + begin.count)
        theirs = [rank for rank in range(begin.num_ranks) if rank not in mine]
        return link_of(begin.config)(region, data, mine, theirs, self._hang_up)

    def _group(self, region: Region, begin: Begin) -> Group:
        host, port = self._listener.getsockname()[:2]
        self._marks.check(begin.marks, self._found, f"{host}:{port}")
        mine = self._found.config
        tower = None if begin.marks.tower is None else self._found.mmproj
        name = None if tower is None else mine.mmproj
        config = replace(begin.config, model=mine.model, revision=mine.revision, mmproj=name)
        found = FoundModel(config, self._found.path, self._found.registry, False, tower)
        backend = found.registry.choose_backend(config.backend)[0].name
        cores = divide_cores(begin.count, config, backend)
        ranks = range(begin.first, begin.first + begin.count)
        return Group(found, region, ranks, cores, begin.count)

    # --- what is heard and said -------------------------------------------------------------------
    def _steps(self, group: Group) -> None:
        while True:
            call, size, _ = NOTICE.unpack(self._read(NOTICE.size))
            if Call(call) is Call.CLOSE:
                group.close()
                return
            if size > _MOST_BYTES:
                raise FrameError(f"a step of {size} bytes")
            words = np.frombuffer(self._read(size), np.int32)
            if Call(call) is not Call.BEAT:
                group.send(Call(call), SentFrame(words))

    def _rest(self) -> None:
        """Waits until rank 0 has read the last message and hangs up."""
        while self._socket.recv(1 << 16):
            pass

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("rank 0 is gone")
            self._heard += 1
            view = view[count:]
        return bytes(data)

    def _send(self, message: FromHost) -> None:
        with self._turn:
            self._socket.sendall(encode_frame(message))

    def _hang_up(self) -> None:
        """Ends the read that the first thread waits in."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def _beat(self, word: npt.NDArray[np.uint32]) -> None:
        """Shows rank 0 that the host lives, and the ranks here, whom it stands in for rank 0."""

        def beat(passed_s: float) -> None:
            word[0] = int(word[0]) % 0xFFFFFFFF + 1
            self._send(HostBeat())

        self._every(beat)

    def _watch(self, group: Group) -> None:
        """Tells rank 0 of the end of a rank, and ends the ranks where rank 0 is silent."""
        seen, silent_s = self._heard, 0.0

        def look(passed_s: float) -> None:
            nonlocal seen, silent_s
            silent_s = 0.0 if self._heard != seen else silent_s + passed_s
            seen = self._heard
            if group.failure is not None:
                self._send(HostEnd(group.failure.message))
                self._hang_up()
                self._done.set()
            elif silent_s >= HANG_S:
                logger.error("rank 0 says nothing any more: it hangs, or the network is down")
                self._hang_up()
                self._done.set()

        self._every(look)

    def _every(self, work: Callable[[float], None]) -> None:
        """Calls it five times a second with the seconds that have passed, as `Group` counts."""
        looked_s = time.monotonic()
        while not self._done.wait(_LOOK_S):
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * _LOOK_S), now_s
            try:
                work(passed_s)
            except OSError:
                return
