"""Rank 0's view of the other hosts of a group: to each a connection for steps and a link."""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from vllmx_core.errors import ConfigError, RankLostError, VllmxError
from vllmx_core.system.handshake import GROUP_BYTES, BusyError, HandshakeError, call
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.ipc import FrameError, FrameReader

from vllmx_tp.link import Link, link_of, reason_of
from vllmx_tp.liveness import StallTimer
from vllmx_tp.messages import (
    INLINE,
    NOTICE,
    RANKS,
    Begin,
    Call,
    FromHost,
    HostBeat,
    HostEnd,
    HostLoaded,
    Marks,
    Purpose,
    RankReady,
)
from vllmx_tp.region import Region

logger = logging.getLogger("vllmx.tp")

COMMAND = "vllmx rank"
PATIENCE_S = 600.0
"""Seconds to wait for hosts that do not answer yet."""
_TELL_S = 30.0
_AGAIN_S = 0.5
_LOOK_S = 0.02
_LAST_WORDS_S = 1.0
_decoder = msgspec.msgpack.Decoder(FromHost)


def connect(
    address: tuple[str, int],
    key: bytes,
    group: bytes,
    purpose: Purpose,
    patience_s: float,
    check: Callable[[], None],
) -> socket.socket:
    """Connects to a host with the same key. Waits until it listens, since hosts are started one
    after the other, and until it is free of another group. Raises ConfigError, and what `check`
    raises meanwhile."""
    name = f"{address[0]}:{address[1]}"
    began_s = time.monotonic()
    told_s = -_TELL_S
    while True:
        try:
            return _greeted(address, key, group, purpose)
        except socket.gaierror as error:
            raise ConfigError(
                f"--rank-hosts {name}: the host is not known ({error.strerror}): correct its name,"
                " or give its address",
                param="rank_hosts",
            ) from error
        except (OSError, BusyError) as error:
            waited_s = time.monotonic() - began_s
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, BusyError):
                reason += ": it may serve another group"
            if waited_s > patience_s:
                raise ConfigError(
                    f"--rank-hosts {name}: no host of ranks there within {patience_s:.0f} s"
                    f" ({reason}): start `vllmx rank` on it, and check the port and the firewall",
                    param="rank_hosts",
                ) from error
            if waited_s - told_s >= _TELL_S:
                told_s = waited_s
                logger.warning("waiting for ranks at %s (%s): start `vllmx rank`", name, reason)
            check()
            time.sleep(min(_AGAIN_S, patience_s))
        except HandshakeError as error:
            raise ConfigError(f"--rank-hosts {name}: {error}", param="rank_hosts") from error


def _greeted(address: tuple[str, int], key: bytes, group: bytes, purpose: Purpose) -> socket.socket:
    connection = socket.create_connection(address, timeout=_AGAIN_S * 10)
    try:
        call(connection, key, group, purpose, RANKS)
    except BaseException:
        connection.close()
        raise
    return connection


class RemoteHost:
    """One other host, which runs `ranks`. One thread sends steps, one reads, and the group's watch
    polls. Raises ConfigError if the host does not accept rank 0, what `check` raises, and the
    host's VllmxError.
    """

    def __init__(
        self,
        address: tuple[str, int],
        ranks: range,
        found: FoundModel,
        region: Region,
        key: bytes,
        check: Callable[[], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.ranks = f"{address[0]}:{address[1]}", ranks
        self._cause: str | None = None
        self._loaded: HostLoaded | None = None
        self._heard, self._silence = 0, StallTimer()
        self._turn, self._ended = threading.Lock(), threading.Event()
        begin = Begin(
            config=found.config, first=ranks.start, count=len(ranks), marks=Marks.of(found)
        )
        connected = partial(connect, address, key, secrets.token_bytes(GROUP_BYTES))
        self._socket = connected(Purpose.STEPS, patience_s, check)
        self._room = select.poll()
        self._room.register(self._socket, select.POLLOUT)
        self._link: Link | None = None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = msgspec.msgpack.encode(begin)
            self.send(NOTICE.pack(Call.BEGIN, len(data), INLINE), data)
            threading.Thread(target=self._read, name="vllmx-host", daemon=True).start()
            parts = connected(Purpose.PARTS, patience_s, lambda: self._check(check))
            mine = [rank for rank in range(region.num_ranks) if rank not in ranks]
            kind = link_of(found.config)
            self._link = kind(region, parts, mine, ranks, self._link_broke)
        except BaseException:
            self.close()
            raise

    def _hung_up(self, reason: str) -> None:
        self._cause = self._cause or (
            f"the connection to host {self.name} has ended ({reason}): the log of `vllmx rank`"
            " there says more"
        )

    def _link_broke(self, reason: str) -> None:
        """Waits for the cause, which the host sends over the other connection."""
        self._ended.wait(_LAST_WORDS_S)
        self._hung_up(reason)

    def _read(self) -> None:
        reader: FrameReader[FromHost] = FrameReader(_decoder)
        end: Exception = EOFError()
        try:
            while data := self._socket.recv(1 << 16):
                for message in reader.feed(data):
                    self._heard += 1
                    match message:
                        case HostLoaded():
                            self._loaded = message
                        case HostEnd(cause):
                            self._cause = self._cause or f"{cause} (on host {self.name})"
                        case HostBeat():
                            pass
        except (OSError, FrameError) as error:
            end = error
        self._hung_up(reason_of(end))
        self._ended.set()

    def loaded(self, check: Callable[[], None]) -> list[RankReady]:
        """Waits for the reports of its ranks. Raises the VllmxError of one that failed."""
        self._check(check)
        while self._loaded is None:
            time.sleep(_LOOK_S)
            self._check(check)
        return self._loaded.ready

    @property
    def error(self) -> VllmxError | None:
        """The error of a rank that failed to load, or None."""
        record = None if self._loaded is None else self._loaded.error
        return None if record is None else record.rebuild()

    def _check(self, check: Callable[[], None]) -> None:
        """Raises the host's error, if it has ended, and what `check` raises."""
        if (error := self.error) is not None:
            raise error
        check()
        if self._cause is not None:
            raise RankLostError(self._cause)

    def send(self, notice: bytes, frame: bytes) -> None:
        """Sends a step for the ring of the host. Raises OSError."""
        with self._turn:
            self._socket.sendall(notice + frame)

    def say(self, call: Call, wait_s: float = 0.0) -> None:
        """Sends a call without a frame, unless a step is being sent or the connection is full for
        longer than `wait_s`."""
        if self._turn.acquire(timeout=wait_s):
            try:
                if self._room.poll(1e3 * wait_s):
                    with suppress(OSError):  # it has hung up
                        self._socket.sendall(NOTICE.pack(call, 0, INLINE))
            finally:
                self._turn.release()

    def look(self, passed_s: float, hang_s: float) -> str | None:
        """Sends a heartbeat to the host. Returns the cause of its end, if it has ended."""
        self.say(Call.BEAT)  # skipped while a step is sent, which shows the same
        silent_s = self._silence.look(self._heard, passed_s)
        if self._cause is None and silent_s >= hang_s:
            return f"host {self.name} does not answer: it hangs, or the network is down"
        return self._cause

    def close(self) -> None:
        """Closes the connections, which ends the host's ranks."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._link is not None:
            self._link.close()
