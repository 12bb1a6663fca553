"""The other hosts of a group as rank 0 sees them: to each a connection for steps and a link."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from vllmx_core.errors import ConfigError, RankLostError
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.ipc import FrameError, FrameReader, encode_frame

from vllmx_tp.fingerprint import Marks
from vllmx_tp.handshake import HandshakeError, SilenceError, greet
from vllmx_tp.link import Link
from vllmx_tp.messages import (
    INLINE,
    NOTICE,
    Begin,
    Call,
    FromHost,
    HostBeat,
    HostEnd,
    HostLoaded,
    RankReady,
)
from vllmx_tp.region import Region
from vllmx_tp.stage_link import link_of

logger = logging.getLogger("vllmx.tp")

PATIENCE_S = 600.0
"""How long hosts are waited for that do not answer yet."""
_TELL_S = 30.0
_AGAIN_S = 0.5
_LOOK_S = 0.02
_LAST_WORDS_S = 1.0
_decoder = msgspec.msgpack.Decoder(FromHost)


def addresses(text: str | None, param: str = "rank_hosts") -> list[tuple[str, int]]:
    """Parses the addresses of --rank-hosts, or another flag. Raises ConfigError."""
    found = []
    for part in filter(None, map(str.strip, (text or "").split(","))):
        host, colon, port = part.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 65536):
            raise ConfigError(
                f"--{param.replace('_', '-')} {part!r} is no host:port: give worker1:7000, and"
                " commas between several",
                param=param,
            )
        found.append((host.strip("[]"), int(port)))
    return found


def connect(
    address: tuple[str, int], key: bytes, patience_s: float, check: Callable[[], None]
) -> socket.socket:
    """A connection to a host that has the same key. Waits until one listens there, as hosts are
    started one after the other, and until it has time: it may be ending another group, or listen to
    somebody who says nothing. Raises ConfigError, and what `check` raises meanwhile."""
    name = f"{address[0]}:{address[1]}"
    began_s = time.monotonic()
    told_s = -_TELL_S
    while True:
        try:
            return _greeted(address, key)
        except socket.gaierror as error:
            raise ConfigError(
                f"--rank-hosts {name}: the host is not known ({error.strerror}): correct its name,"
                " or give its address",
                param="rank_hosts",
            ) from error
        except (OSError, SilenceError) as error:
            waited_s = time.monotonic() - began_s
            reason = getattr(error, "strerror", None) or str(error) or "it does not answer"
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


def _greeted(address: tuple[str, int], key: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=_AGAIN_S * 10)
    try:
        greet(connection, key, calls=True)
    except OSError as error:
        connection.close()
        raise HandshakeError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


class RemoteHost:
    """One other host. One thread sends steps, one reads, and the group's watch looks.

    Attributes:
        ranks: those that it runs.
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
        self._heard = self._seen = 0
        self._silent_s = 0.0
        self._turn, self._ended = threading.Lock(), threading.Event()
        self._socket = connect(address, key, patience_s, check)
        self._link: Link | None = None
        try:
            begin = Begin(
                config=found.config,
                num_ranks=region.num_ranks,
                first=ranks.start,
                count=len(ranks),
                marks=Marks.of(found),
            )
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(encode_frame(begin))
            data = connect(address, key, patience_s, check)
            mine = [rank for rank in range(region.num_ranks) if rank not in ranks]
            kind = link_of(found.config)
            self._link = kind(region, data, mine, ranks, self._link_broke)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._read, name="vllmx-host", daemon=True).start()

    def _hung_up(self) -> None:
        self._cause = self._cause or f"host {self.name} has closed its connection"

    def _link_broke(self) -> None:
        """The host's last words, which say why, come by the other connection."""
        self._ended.wait(_LAST_WORDS_S)
        self._hung_up()

    def _read(self) -> None:
        reader: FrameReader[FromHost] = FrameReader(_decoder)
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
            logger.debug("host %s: %s", self.name, error)
        self._hung_up()
        self._ended.set()

    def loaded(self, check: Callable[[], None]) -> list[RankReady]:
        """What its ranks came to. Raises the VllmxError that one of them met."""
        while self._loaded is None:
            check()
            if self._cause is not None:
                raise RankLostError(self._cause)
            time.sleep(_LOOK_S)
        if self._loaded.error is not None:
            raise self._loaded.error.rebuild()
        return self._loaded.ready

    def send(self, notice: bytes, frame: bytes) -> None:
        """A step, to be put into the ring there. Raises OSError."""
        with self._turn:
            self._socket.sendall(notice + frame)

    def look(self, passed_s: float, hang_s: float) -> str | None:
        """Shows the host that rank 0 lives. What ended the host, if anything did."""
        if self._turn.acquire(blocking=False):  # else a step is on its way, which shows as much
            try:
                with suppress(OSError):
                    self._socket.sendall(NOTICE.pack(Call.BEAT, 0, INLINE))
            finally:
                self._turn.release()
        self._silent_s = 0.0 if self._heard != self._seen else self._silent_s + passed_s
        self._seen = self._heard
        if self._cause is None and self._silent_s >= hang_s:
            return f"host {self.name} does not answer: it hangs, or the network is down"
        return self._cause

    def close(self) -> None:
        """Hangs up; the ranks there end when they see that."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._link is not None:
            self._link.close()
