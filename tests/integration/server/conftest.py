"""A real server in a subprocess, on the best backend that can run here, serving the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen[str]

    def get(self, path: str, **options: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)  # type: ignore[arg-type]

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllmx:{name}{{"))


@contextmanager
def running_server(
    *flags: str, environment: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """`vllmx serve` on a free port; killed at the end if it does not stop by itself."""
    command = [sys.executable, "-m", "vllmx", "serve", "--port", "0", *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.strip().startswith("http") and line.strip().endswith("/v1"):
                break
        else:
            raise AssertionError(f"the server ended: {''.join(lines)}")
        # Nobody reads the rest: a full pipe must not stop the server.
        import threading

        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        server = RunningServer(line.strip().removesuffix("/v1"), process)
        _wait_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def _wait_ready(server: RunningServer) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if server.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not become ready within 60 s")


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server("--max-num-seqs", "64") as running:
        yield running
