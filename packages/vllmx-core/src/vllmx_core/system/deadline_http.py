"""HTTP under one deadline: looking up the host, connecting, TLS, headers and body together.

A timeout of `http.client` or `urllib` restarts with each read, so a server can hold its client
forever by sending single bytes. Import this module only where a request is sent: http.client and
ssl take some ms.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from vllmx_core.system.deadline import Deadline

T = TypeVar("T")

_CONNECT_S = 5.0
"""The seconds for one address of a host that may have several."""


class DeadlineConnection(http.client.HTTPConnection):
    """A connection for one request. Raises the errors of its base class, and DeadlineError.

    Args:
        port: None: the usual one.
        secure: use TLS, with a certificate of a known authority.
    """

    def __init__(self, host: str, port: int | None, deadline: Deadline, *, secure: bool) -> None:
        if secure:
            self.default_port = http.client.HTTPS_PORT
        super().__init__(host, port)
        self._deadline = deadline
        self._secure = secure

    def connect(self) -> None:
        connection = _connected(self.host, self.port, self._deadline)
        try:
            if self._secure:
                connection = _secured(connection, self.host, self._deadline)
        except BaseException:
            connection.close()
            raise
        self.sock = cast("Any", _TimedSocket(connection, self._deadline))


def ask(
    url: str, headers: dict[str, str], seconds: float, *, body: bytes | None = None
) -> tuple[int, bytes]:
    """The status and the body of the answer to GET, or to POST of a body; redirects are not
    followed. Raises OSError, including DeadlineError, and ValueError for a malformed URL."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connection = DeadlineConnection(
        parts.hostname or "", parts.port, Deadline(seconds), secure=secure
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if body is None else "POST", target, body, headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"its answer is not HTTP: {error!r}") from None
    finally:
        connection.close()


class _TimedSocket:
    """The part of a socket that `http.client` uses, each wait within the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline
        self._is_read = False

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[_waited(self._connection, self._deadline, self._connection.send, view) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb", "http.client writes by sendall"
        self._is_read = True
        return io.BufferedReader(_TimedReader(self._connection, self._deadline))

    def close(self) -> None:
        """Leaves the connection open for its reader, as sockets do."""
        if not self._is_read:
            self._connection.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _waited(self._connection, self._deadline, self._connection.recv_into, buffer)

    def close(self) -> None:
        if not self.closed:
            self._connection.close()
        super().close()


def _waited(
    connection: socket.socket, deadline: Deadline, call: Callable[..., T], *arguments: Any
) -> T:
    """Repeats `call` on timeouts until the deadline has passed."""
    while True:
        connection.settimeout(deadline.left_s())
        try:
            return call(*arguments)
        except TimeoutError:
            continue


def _connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    error: OSError | None = None
    for family, kind, protocol, _, address in _addresses(host, port, deadline):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(deadline.left_s(_CONNECT_S))
            connection.connect(address)
        except OSError as failed:
            connection.close()
            error = failed
            deadline.left_s()
        else:
            return connection
    raise error or OSError(f"{host} has no address")


def _secured(connection: socket.socket, host: str, deadline: Deadline) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    secured = context.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)
    try:
        _waited(secured, deadline, secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


_Addresses = list[tuple[Any, Any, int, str, Any]]


def _addresses(host: str, port: int, deadline: Deadline) -> _Addresses:
    """Looks up a host on its own thread, because nothing can interrupt the resolver."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    found: SimpleQueue[_Addresses | OSError] = SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=look_up, name="vllmx-resolver", daemon=True).start()
    while True:
        try:
            answer = found.get(timeout=deadline.left_s())
        except Empty:
            continue
        if isinstance(answer, OSError):
            raise answer
        return answer
