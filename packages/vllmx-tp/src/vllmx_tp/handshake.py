"""How two hosts of one model make sure of each other: both have the same key, which never travels.

Each says its version and a random number; each shows by an HMAC over both that it has the key. What
follows is neither signed nor encrypted: the network between ranks must be one that only they use.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import time
from pathlib import Path

from vllmx_core.errors import ConfigError

from vllmx_tp import __version__

MAGIC = b"vllmx ranks\n"
_VERSION_BYTES = 32
_NONCE_BYTES = 32
_HELLO_BYTES = len(MAGIC) + _VERSION_BYTES + _NONCE_BYTES
_MAC_BYTES = 32
HANDSHAKE_S = 5.0
LEAST_KEY_BYTES = 32
_MAKE = "make one by `openssl rand -hex 32 > FILE && chmod 600 FILE` and copy it to every host"


class HandshakeError(Exception):
    """The other side is not one of this model's hosts; the text says why."""


class SilenceError(HandshakeError):
    """The other side has said nothing in time: it may be busy with somebody else."""


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


def greet(connection: socket.socket, key: bytes, *, calls: bool) -> None:
    """Exchanges hellos and proofs within `HANDSHAKE_S`. Raises HandshakeError (SilenceError where
    that is not enough), OSError.

    Args:
        calls: whether this side made the connection, which learns first whether the keys agree.
    """
    deadline_s = time.monotonic() + HANDSHAKE_S
    mine = MAGIC + __version__.encode().ljust(_VERSION_BYTES, b"\0")
    mine += secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(mine)
    theirs = receive(connection, _HELLO_BYTES, deadline_s)
    _check_hello(theirs)
    both = mine + theirs if calls else theirs + mine
    if calls:
        _check_proof(receive(connection, _MAC_BYTES, deadline_s), _proof(key, b"waits", both))
        connection.sendall(_proof(key, b"calls", both))
    else:
        connection.sendall(_proof(key, b"waits", both))
        _check_proof(receive(connection, _MAC_BYTES, deadline_s), _proof(key, b"calls", both))
    connection.settimeout(None)


def _check_hello(hello: bytes) -> None:
    if not hello.startswith(MAGIC):
        raise HandshakeError("it is no host of ranks: check the port, and that `vllmx rank` runs")
    version = hello[len(MAGIC) : len(MAGIC) + _VERSION_BYTES].rstrip(b"\0")
    if version != __version__.encode():
        shown = version.decode("ascii", "backslashreplace")
        raise HandshakeError(
            f"it runs vllmx-tp {shown}, this host {__version__}: install the same on both"
        )


def _proof(key: bytes, side: bytes, both: bytes) -> bytes:
    return hmac.new(key, side + both, hashlib.sha256).digest()


def _check_proof(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise HandshakeError("it has another key: give both the same --rank-key-file")


def receive(connection: socket.socket, size: int, deadline_s: float | None = None) -> bytes:
    """Receives `size` bytes. Raises HandshakeError where the other side hangs up, SilenceError
    where the time is over."""
    data = b""
    while len(data) < size:
        if deadline_s is not None:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            more = connection.recv(size - len(data))
        except TimeoutError:
            raise SilenceError(
                "it does not answer: it may serve another group, or be no host of ranks"
            ) from None
        if not more:
            raise HandshakeError("it hangs up: its log says why, a wrong key perhaps")
        data += more
    return data
