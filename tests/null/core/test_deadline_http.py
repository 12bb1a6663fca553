"""HTTP under one deadline, however often a slow server sends another byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from vllmx_core.system.deadline import Deadline, DeadlineError
from vllmx_core.system.deadline_http import ask

from tests.http_servers import serving


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/none?a=b" else 200)
        self.end_headers()
        self.wfile.write(f"{self.path} {self.headers['X-Sent']}".encode())

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_to_its_end() -> None:
    with serving(Handler) as port:
        url = f"http://127.0.0.1:{port}"
        assert ask(f"{url}/a", {"X-Sent": "b"}, 60.0) == (200, b"/a b")
        assert ask(f"{url}/none?a=b", {}, 60.0) == (404, b"/none?a=b None")
    with pytest.raises(ConnectionRefusedError):
        ask(f"{url}/a", {}, 60.0)
    for wrong in ("http://a:x/b", "http://[/"):
        with pytest.raises(ValueError, match=r"[Pp]ort|IPv6|address"):
            ask(wrong, {}, 60.0)


@contextmanager
def dripping(text: bytes) -> Iterator[str]:
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                for byte in text:
                    if gone.wait(0.02):
                        return
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            gone.set()
            thread.join()


@pytest.mark.parametrize("text", [b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2000, b"no HTTP" * 300])
def test_a_server_that_drips(text: bytes) -> None:
    with dripping(text) as url, pytest.raises(DeadlineError, match=r"within 0\.2 s"):
        ask(url, {}, 0.2)


def test_who_stops_waiting() -> None:
    with pytest.raises(DeadlineError):
        Deadline(1000.0, lambda: True).left_s()
    assert 0 < Deadline(1000.0).left_s(5.0) <= 5.0
