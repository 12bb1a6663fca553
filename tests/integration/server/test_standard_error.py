"""A server whose log goes nowhere serves all the same, and ends as any other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE_S, wait_until


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def full_pipe() -> int:
    """A pipe whose other end stays open and is never read."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    os.dup(read)
    os.close(read)
    return write


def broken_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def closed() -> int:
    return -1


@pytest.fixture(params=[full_disk, full_pipe, broken_pipe, closed])
def target(request: pytest.FixtureRequest) -> Iterator[int]:
    make: Callable[[], int] = request.param
    if make is full_disk and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    descriptor = make()
    yield descriptor
    if descriptor >= 0:
        os.close(descriptor)


def test_a_log_that_goes_nowhere(
    target: int, fake_model: Path, fake_environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "api.sock"
    command = [sys.executable, "-m", "vllmx", "serve", "--uds", str(path), "--backend", "fake"]
    command += ["--model", str(fake_model), "--log-level", "debug"]
    if target < 0:
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    process = subprocess.Popen(
        command,
        stderr=None if target < 0 else target,
        env={**os.environ, **fake_environment},
    )
    try:

        def accepts() -> bool:
            assert process.poll() is None, "the server ended"
            with socket.socket(socket.AF_UNIX) as probe:
                return probe.connect_ex(str(path)) == 0

        wait_until(accepts)
        transport = httpx.HTTPTransport(uds=str(path))
        url = "http://localhost"
        with httpx.Client(transport=transport, base_url=url, timeout=PATIENCE_S) as client:
            for _ in range(300):  # as many lines as fill any buffer
                assert client.get("/version").status_code == 200
            body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
            response = client.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
