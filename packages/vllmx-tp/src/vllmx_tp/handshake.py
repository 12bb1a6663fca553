"""Mutual authentication of two hosts of one model: both have the same key, which is never sent.

Each side sends its version, its protocol and a random number; rank 0, which calls, also sends the
purpose of the connection and its group. Each side proves by an HMAC over all of this that it has
the key. Then the called host accepts the connection, or hangs up, since it serves one group at a
time. What follows is neither signed nor encrypted: only the ranks may use their network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
from enum import IntEnum
from pathlib import Path

from vllmx_core.errors import ConfigError, shown
from vllmx_core.system.deadline import Deadline

from vllmx_tp import __version__
from vllmx_tp.messages import fill

MAGIC = b"vllmx ranks\n"
GROUP_BYTES = 16
_NONCE_BYTES = 32
PROTOCOL = 1
"""Incremented with any change of hellos, messages, frames or links, even within a version."""
_HEAD = struct.Struct(f"<{len(MAGIC)}s32sI")
"""Magic, version and protocol. They never change, because hosts of any two versions read them
first."""
_REST = struct.Struct(f"<B{GROUP_BYTES}s{_NONCE_BYTES}s")
"""Purpose, group, and the random number."""
_MAC_BYTES = 32
LET_IN = b"\1"
HANDSHAKE_S = 5.0
LEAST_KEY_BYTES = 32
_MAKE = "make one by `openssl rand -hex 32 > FILE && chmod 600 FILE` and copy it to every host"


class Purpose(IntEnum):
    """The use of a connection."""

    NONE = 0
    """Sent by the called host."""
    STEPS = 1
    """The first connection of a group, for steps."""
    PARTS = 2
    """The second one, for parts of calls between ranks."""


class HandshakeError(Exception):
    """The other side is not one of this model's hosts; the text says why."""


class BusyError(HandshakeError):
    """The other side has not answered in time or has hung up: a retry may succeed."""


def read_key(path: str | None) -> bytes:
    """The key that a file holds. Raises ConfigError with the remedy."""
    if path is None:
        raise ConfigError(
            f"ranks on other hosts need --rank-key-file: {_MAKE}", param="rank_key_file"
        )
    try:
        with Path(path).open("rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            f"--rank-key-file {path}: {error.strerror}: {_MAKE}", param="rank_key_file"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"--rank-key-file {path} may be read by others: chmod 600 {path}",
            param="rank_key_file",
        )
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"--rank-key-file {path} holds {len(key)} bytes, at least {LEAST_KEY_BYTES} are"
            f" needed: {_MAKE}",
            param="rank_key_file",
        )
    return key


def call(connection: socket.socket, key: bytes, group: bytes, purpose: Purpose) -> None:
    """Exchanges hellos and proofs with a host of ranks, and waits until it accepts this connection,
    all within `HANDSHAKE_S`. Raises HandshakeError (BusyError if a retry may succeed), OSError.

    Args:
        group: (GROUP_BYTES,) random bytes, the same for both connections of a group.
    """
    deadline = Deadline(HANDSHAKE_S)
    mine = _hello(purpose, group)
    theirs = _exchanged(connection, mine, deadline)
    both = mine + theirs
    _check_proof(receive(connection, _MAC_BYTES, deadline), _proof(key, b"waits", both))
    connection.sendall(_proof(key, b"calls", both))
    receive(connection, len(LET_IN), deadline)
    connection.settimeout(None)


def answer(connection: socket.socket, key: bytes) -> tuple[int, bytes]:
    """The other side of `call`: returns purpose and group of a caller that has the key. `LET_IN`
    then accepts the connection. This side's proof is sent second, so that the caller learns if the
    keys differ. Raises HandshakeError, OSError."""
    deadline = Deadline(HANDSHAKE_S)
    mine = _hello(Purpose.NONE, bytes(GROUP_BYTES))
    theirs = _exchanged(connection, mine, deadline)
    both = theirs + mine
    connection.sendall(_proof(key, b"waits", both))
    _check_proof(receive(connection, _MAC_BYTES, deadline), _proof(key, b"calls", both))
    connection.settimeout(None)
    purpose, group, _ = _REST.unpack_from(theirs, _HEAD.size)
    return purpose, group


def _hello(purpose: Purpose, group: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    head = _HEAD.pack(MAGIC, __version__.encode(), PROTOCOL)
    return head + _REST.pack(purpose, group, nonce)


def _exchanged(connection: socket.socket, mine: bytes, deadline: Deadline) -> bytes:
    """Sends this side's hello and returns the other's."""
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(mine)
    magic = receive(connection, len(MAGIC), deadline)
    if magic != MAGIC:
        raise HandshakeError(
            "it is not a host of ranks: check the port, and that `vllmx rank` runs"
        )
    head = magic + receive(connection, _HEAD.size - len(MAGIC), deadline)
    if head != mine[: _HEAD.size]:
        _, version, protocol = _HEAD.unpack(head)
        text = version.rstrip(b"\0").decode("utf-8", "backslashreplace")
        raise HandshakeError(
            f"it runs vllmx-tp {shown(text)} with protocol {protocol}, this host"
            f" {shown(__version__)} with protocol {PROTOCOL}: install the same vllmx on both"
        )
    return head + receive(connection, _REST.size, deadline)


def _proof(key: bytes, side: bytes, both: bytes) -> bytes:
    return hmac.new(key, side + both, hashlib.sha256).digest()


def _check_proof(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise HandshakeError("it has another key: give both the same --rank-key-file")


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Receives `size` bytes. Raises BusyError if the other side hangs up or the time is over."""

    def read(view: memoryview) -> int:
        connection.settimeout(deadline.left_s(deadline.seconds))
        return connection.recv_into(view)

    data = bytearray(size)
    try:
        fill(memoryview(data), read)
    except TimeoutError:
        raise BusyError("it does not answer") from None
    except EOFError:
        raise BusyError("it hangs up") from None
    return bytes(data)
