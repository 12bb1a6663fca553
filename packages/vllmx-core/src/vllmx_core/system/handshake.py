"""Mutual authentication of two hosts of one model: both have the same key, which is never sent.

Each side sends its version, its protocol and a random number. The caller also sends the purpose of
the connection and its group, or the model that it wants. Each side proves by an HMAC over all of
this that it has the key. Then the called host sends a byte that accepts the connection, or hangs
up. What follows is neither signed nor encrypted: only these hosts may use their network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from vllmx_core.errors import ConfigError, shown
from vllmx_core.records import Record
from vllmx_core.system.deadline import Deadline

MAGIC_BYTES = 12
GROUP_BYTES = 16
_NONCE_BYTES = 32
_HEAD = struct.Struct(f"<{MAGIC_BYTES}s32sI")
"""Magic, version and protocol. They never change, because hosts of any two versions read them
first."""
_REST = struct.Struct(f"<B{GROUP_BYTES}s{_NONCE_BYTES}s")
"""Purpose, group, and the random number."""
_MAC_BYTES = 32
LET_IN = b"\1"
HANDSHAKE_S = 5.0
LEAST_KEY_BYTES = 32
KEY_VARIABLE = "VLLMX_RANK_KEY"
_MAKE = "make one by `openssl rand -hex 32 > FILE && chmod 600 FILE` and copy it to every host"


class Service(Record):
    """The protocol that both sides of a connection speak after the handshake."""

    magic: bytes
    """(MAGIC_BYTES,)"""
    distribution: str
    version: str
    protocol: int
    """Incremented with any change of what follows a handshake, even within a version."""
    stranger: str
    """The error if the other side is something else."""


class HandshakeError(Exception):
    """The other side does not accept this one, or must not be accepted; the text says why."""


class BusyError(HandshakeError):
    """The other side has not answered in time or has hung up: a retry may succeed."""


def read_key(path: str | None, who: str = "ranks") -> bytes:
    """The key that a file holds, or without one the variable `KEY_VARIABLE`. `who` needs it, for
    messages. Raises ConfigError with the remedy."""
    if path is None:
        if KEY_VARIABLE in os.environ:
            return _long_enough(os.environ[KEY_VARIABLE].strip().encode(), KEY_VARIABLE)
        raise ConfigError(
            f"{who} on other hosts need --rank-key-file: {_MAKE}", param="rank_key_file"
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
    return _long_enough(key, f"--rank-key-file {path}")


def _long_enough(key: bytes, source: str) -> bytes:
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{source} holds {len(key)} bytes, at least {LEAST_KEY_BYTES} are needed: {_MAKE}",
            param="rank_key_file",
        )
    return key


def call(
    connection: socket.socket, key: bytes, group: bytes, purpose: int, service: Service
) -> bytes:
    """Exchanges hellos and proofs with a host, waits until it accepts this connection, all within
    `HANDSHAKE_S`, and returns the byte by which it does. Raises HandshakeError (BusyError if a
    retry may succeed), OSError.

    Args:
        group: (GROUP_BYTES,) bytes that the host reads.
    """
    deadline = Deadline(HANDSHAKE_S)
    mine = _hello(purpose, group, service)
    theirs = _exchanged(connection, mine, service, deadline)
    both = mine + theirs
    _check_proof(receive(connection, _MAC_BYTES, deadline), _proof(key, b"waits", both))
    connection.sendall(_proof(key, b"calls", both))
    verdict = receive(connection, len(LET_IN), deadline)
    connection.settimeout(None)
    return verdict


def answer(connection: socket.socket, key: bytes, service: Service) -> tuple[int, bytes]:
    """The other side of `call`: returns purpose and group of a caller that has the key. `LET_IN`
    then accepts the connection. This side's proof is sent second, so that the caller learns if the
    keys differ. Raises HandshakeError, OSError."""
    deadline = Deadline(HANDSHAKE_S)
    mine = _hello(0, bytes(GROUP_BYTES), service)
    theirs = _exchanged(connection, mine, service, deadline)
    both = theirs + mine
    connection.sendall(_proof(key, b"waits", both))
    _check_proof(receive(connection, _MAC_BYTES, deadline), _proof(key, b"calls", both))
    connection.settimeout(None)
    purpose, group, _ = _REST.unpack_from(theirs, _HEAD.size)
    return purpose, group


def _hello(purpose: int, group: bytes, service: Service) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    head = _HEAD.pack(service.magic, service.version.encode(), service.protocol)
    return head + _REST.pack(purpose, group, nonce)


def _exchanged(
    connection: socket.socket, mine: bytes, service: Service, deadline: Deadline
) -> bytes:
    """Sends this side's hello and returns the other's."""
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(mine)
    magic = receive(connection, MAGIC_BYTES, deadline)
    if magic != service.magic:
        raise HandshakeError(service.stranger)
    head = magic + receive(connection, _HEAD.size - MAGIC_BYTES, deadline)
    if head != mine[: _HEAD.size]:
        _, version, protocol = _HEAD.unpack(head)
        text = version.rstrip(b"\0").decode("utf-8", "backslashreplace")
        raise HandshakeError(
            f"it runs {service.distribution} {shown(text)} with protocol {protocol}, this host"
            f" {shown(service.version)} with protocol {service.protocol}: install the same vllmx"
            " on both"
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


def fill(view: memoryview, read: Callable[[memoryview], int]) -> None:
    """Calls `read`, such as `socket.recv_into`, until the view is full. Raises EOFError if the
    other side hangs up first."""
    while view:
        count = read(view)
        if not count:
            raise EOFError
        view = view[count:]
