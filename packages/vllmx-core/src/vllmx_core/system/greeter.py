"""Addresses of hosts, and a listening socket that lets in those who have its key."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from vllmx_core.errors import ConfigError
from vllmx_core.system.handshake import BusyError, HandshakeError, Service, answer

MOST_GREETED = 16
"""Concurrent handshakes."""
LOOK_S = 0.5


def addresses(text: str | None, param: str, command: str = "") -> list[tuple[str, int]]:
    """Parses host:port, several with commas between them, of a flag. `command` listens there, which
    rules out port 0 and naming an address twice. Raises ConfigError."""
    found: list[tuple[str, int]] = []
    flag = f"--{param.replace('_', '-')}"
    for part in filter(None, map(str.strip, (text or "").split(","))):
        host, colon, port = part.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 65536):
            raise ConfigError(
                f"{flag} {part!r} is not a host:port: give worker1:7000, or several with commas",
                param=param,
            )
        address = host.strip("[]"), int(port)
        if command and not address[1]:
            raise ConfigError(
                f"{flag} {part!r}: nobody listens at port 0: give the port that `{command}` says",
                param=param,
            )
        if command and any(_is_same(address, one) for one in found):
            raise ConfigError(
                f"{flag} {text!r} names {part!r} twice: name each host once", param=param
            )
        found.append(address)
    return found


def _is_same(one: tuple[str, int], other: tuple[str, int]) -> bool:
    return one[0].lower() == other[0].lower() and one[1] == other[1]


def listen_address(text: str) -> tuple[str, int]:
    """The one address of --listen. Raises ConfigError."""
    places = addresses(text, "listen")
    if len(places) != 1:
        raise ConfigError(
            f"--listen {text!r} names {len(places)} addresses: give one", param="listen"
        )
    return places[0]


def listen(address: tuple[str, int]) -> socket.socket:
    """Opens the listening socket of --listen. Raises ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=64)
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


class Greeter:
    """Accepts connections for as long as the listening socket is open.

    Each connection has its own thread for the handshake, since clients without the key may be slow.
    If there are `MOST_GREETED`, the oldest is dropped for a new one: a client with the key is
    quick, and reconnects.

    Args:
        let_in: gets a connection whose caller has the key, with its purpose and group; sends the
            byte that accepts it, and returns False to have the connection closed. May raise
            HandshakeError and OSError. Called on several threads.
        on_closed: called when the listening socket was closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        service: Service,
        let_in: Callable[[socket.socket, int, bytes], bool],
        logger: logging.Logger,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener, self._key, self._service = listener, key, service
        self._let_in, self._logger, self._on_closed = let_in, logger, on_closed
        self._greeted: list[socket.socket] = []
        self._turn, self._places = threading.Lock(), threading.Semaphore(MOST_GREETED)
        listener.settimeout(LOOK_S)  # nothing wakes `accept` where its socket is closed
        threading.Thread(target=self._listen, name="vllmx-greeter", daemon=True).start()

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, (address, *_) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._listener.fileno() >= 0:
                    self._logger.warning("nobody can be let in: %s", error)
                    time.sleep(LOOK_S)
                continue
            self._make_room()
            with self._turn:
                self._greeted.append(connection)
            greet = threading.Thread(target=self._greet, args=(connection, address), daemon=True)
            greet.start()
        self._on_closed()

    def _make_room(self) -> None:
        """Waits for a free place, dropping the oldest handshake if there is none."""
        if self._places.acquire(blocking=False):
            return
        with self._turn:
            for oldest in self._greeted[:1]:
                with suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)
        self._places.acquire()

    def _greet(self, connection: socket.socket, address: str) -> None:
        is_let_in = False
        try:
            try:
                purpose, group = answer(connection, self._key, self._service)
            finally:
                with self._turn:
                    self._greeted.remove(connection)
                self._places.release()
            is_let_in = self._let_in(connection, purpose, group)
            if not is_let_in:
                self._logger.debug("hung up on %s", address)
        except BusyError as error:  # as probes of a port do
            self._logger.debug("%s: %s", address, error)
        except (HandshakeError, OSError) as error:
            self._logger.warning("refused %s: %s", address, error)
        finally:
            if not is_let_in:
                connection.close()
