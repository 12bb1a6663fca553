"""A core on another host, as its clients reach it: the places that --replica-hosts names."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from vllmx_core.errors import ConfigError
from vllmx_core.system.greeter import addresses
from vllmx_core.system.handshake import (
    GROUP_BYTES,
    LET_IN,
    BusyError,
    HandshakeError,
    Service,
    call,
)

from vllmx_engine import __version__
from vllmx_engine.core.fingerprint import files_digest
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.supervisor")

COMMAND = "vllmx core"
CORES = Service(
    magic=b"vllmx core\n\0",
    distribution="vllmx-engine",
    version=__version__,
    protocol=2,
    stranger=f"it is not the host of a core: check the port, and that `{COMMAND}` runs",
)
PATIENCE_S = 600.0
"""Seconds to wait for a host that was never reached."""
_CONNECT_S = 5.0
_TELL_S = 30.0
_SILENT_S = 10
"""Seconds without a sign of the other host's kernel after which a connection is given up."""


def model_mark(found: FoundModel) -> bytes:
    """(GROUP_BYTES,) of the model's files, the same on every host that has them. Its cached blocks
    are identified by this, since the model's path may differ."""
    return hashlib.sha256(files_digest(found.path).encode()).digest()[:GROUP_BYTES]


def digest_key(key: bytes) -> bytes:
    """The key of blocks' digests, common to all cores that have a host's key."""
    return hashlib.sha256(b"digests" + key).digest()


def watch_peer(connection: socket.socket) -> None:
    """Sends small frames at once, and has the kernel notice a host that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_S // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _SILENT_S // 2),
        ("TCP_USER_TIMEOUT", 1000 * _SILENT_S),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def call_core(place: tuple[str, int], key: bytes, mark: bytes, path: Path) -> socket.socket:
    """A connection that a core's host has accepted. Raises OSError and HandshakeError.

    Args:
        mark: `model_mark` of the model at `path`.
    """
    connection = socket.create_connection(place, timeout=_CONNECT_S)
    try:
        if call(connection, key, mark, 0, CORES) != LET_IN:
            raise HandshakeError(
                f"it serves a model with other files than {path}: copy the same ones to all hosts"
            )
        watch_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_peer(found: FoundModel, address: str) -> socket.socket:
    """Connects to another replica's core, behind a socket of this host or at host:port. Raises
    OSError.

    Args:
        found: this core's model, with the hosts' key.
    """
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_S)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    mark = bytes.fromhex(found.config.model)  # by which caches are identified, see `serve_core`
    try:
        return call_core((host.strip("[]"), int(port)), found.host_key, mark, found.path)
    except HandshakeError as error:
        raise ConnectionRefusedError(str(error)) from error


class RemoteCore:
    """A core that `vllmx core` runs; a `Place` of `AttachedFrontend`.

    Args:
        address: says where it is now; None: nowhere, as while it moves to another host.
        found: the model, as it lies on this host.
    """

    again_s = 0.5

    def __init__(
        self, address: Callable[[], tuple[str, int] | None], key: bytes, found: FoundModel
    ) -> None:
        self._address, self._key, self._found = address, key, found
        self._mark = model_mark(found)
        self._began_s = time.monotonic()
        self._told_s = self._began_s
        self._is_known = False

    @property
    def address(self) -> str:
        """host:port; empty: it has none now."""
        place = self._address()
        return "" if place is None else f"{place[0]}:{place[1]}"

    async def connected(self) -> socket.socket:
        """A connection that its host has accepted. Raises OSError if a retry may succeed. Raises
        ConfigError for another key, model or version, and when the host has not answered for
        `PATIENCE_S`, unless it was reached before."""
        place = self._address()
        name = self.address
        try:
            if place is None:
                raise BusyError("it has no address yet")
            connection = await self._called(place)
        except (OSError, HandshakeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._refuse(name, reason, error)
            raise OSError(reason) from error
        self._is_known = True
        connection.setblocking(False)
        return connection

    def local(self, info: CoreInfo) -> CoreInfo:
        """Returns the core's description, with the names that the model has on this host."""
        return msgspec.structs.replace(
            info, model=self._found.config.name, path=str(self._found.path)
        )

    async def _called(self, place: tuple[str, int]) -> socket.socket:
        pool = ThreadPoolExecutor(1, "vllmx-call")
        calling = pool.submit(self._call, place)
        pool.shutdown(wait=False)  # the thread ends with its call
        try:
            return await asyncio.wrap_future(calling)
        except asyncio.CancelledError:
            calling.add_done_callback(_drop)
            raise

    def _call(self, place: tuple[str, int]) -> socket.socket:
        return call_core(place, self._key, self._mark, self._found.path)

    def _refuse(self, name: str, reason: str, error: Exception) -> None:
        """Raises ConfigError for an error that a retry does not mend; warns of others."""
        now_s = time.monotonic()
        if not name:  # whoever keeps the file knows that it does not run
            self._began_s = now_s
        flag = f"--replica-hosts {name}"
        if not self._is_known:
            if isinstance(error, HandshakeError) and not isinstance(error, BusyError):
                raise ConfigError(f"{flag}: {reason}", param="replica_hosts") from error
            if isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"{flag}: the host is not known ({reason}): correct its name, or give its"
                    " address",
                    param="replica_hosts",
                ) from error
            if now_s - self._began_s > PATIENCE_S:
                raise ConfigError(
                    f"{flag}: no core there within {PATIENCE_S:.0f} s ({reason}): start"
                    f" `{COMMAND}` on it, and check the port and the firewall",
                    param="replica_hosts",
                ) from error
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            logger.warning("waiting for the core at %s (%s): start `%s`", name, reason, COMMAND)


def _drop(calling: Future[socket.socket]) -> None:
    """Closes a connection that nobody waits for any more."""
    if not calling.cancelled() and calling.exception() is None:
        calling.result().close()


def remote_cores(found: FoundModel, key: bytes) -> list[RemoteCore]:
    """The cores of --replica-hosts: addresses, or @FILE with one a line, which is read again
    whenever a core is looked for. Raises ConfigError."""
    text = found.config.replica_hosts or ""
    if not text.startswith("@"):
        places = addresses(text, "replica_hosts", COMMAND)
        return [RemoteCore(partial(_same, place), key, found) for place in places]
    file = Path(text[1:])
    try:
        count = len(file.read_text().splitlines())
    except OSError as error:
        raise ConfigError(
            f"--replica-hosts {text}: {error.strerror}: name a file with a host:port in each line",
            param="replica_hosts",
        ) from error
    return [RemoteCore(partial(_line, file, row), key, found) for row in range(count)]


def _same(place: tuple[str, int]) -> tuple[str, int]:
    return place


def _line(file: Path, row: int) -> tuple[str, int] | None:
    try:
        found = addresses(file.read_text().splitlines()[row], "replica_hosts")
    except (OSError, ConfigError, IndexError):
        return None
    return found[0] if found else None
