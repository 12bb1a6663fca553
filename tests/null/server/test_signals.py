"""Signals that come before requests are served."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from vllmx_server.host import signals as module
from vllmx_server.host.signals import Signals

from tests.waiting import PATIENCE_S

TWICE = """
import asyncio, os, signal, sys
from vllmx_server.host.signals import Signals

async def main():
    Signals()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # as timeout(1) does, and who is impatient
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
        print("cleaned up", flush=True)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_signals_that_come_together_end_a_start_once() -> None:
    """A second one must not end the cleaning up that the first one began."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE],
        check=False,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "")


@pytest.fixture
def signals() -> Iterator[Signals]:
    loop = asyncio.new_event_loop()

    async def made() -> Signals:
        return Signals()

    yield loop.run_until_complete(made())
    loop.close()


def test_a_later_one_ends_a_start_that_does_not_end(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that downloads is waited for, say."""
    now_s, ends = [100.0], list[int]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(os, "_exit", ends.append)
    with pytest.raises(KeyboardInterrupt):
        signals._on_signal()
    now_s[0] += 1
    signals._on_signal()
    assert ends == []
    now_s[0] += 2
    signals._on_signal()
    assert ends == [128 + signal.SIGINT]
