"""Checks of grammars that do not end by themselves: which say something about the grammar."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllmx_engine import grammars
from vllmx_engine.grammars import GrammarServer
from vllmx_engine.wire.grammars import CheckGrammar, GrammarSpec, Verdict, verdict_decoder
from vllmx_engine.wire.ipc import FrameReader, encode_frame

from tests.waiting import PATIENCE_S


class Children:
    """Makes a shell of what would be a fork of this process."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._pipe = os.pipe
        self._writing = -1
        self._started: list[subprocess.Popen[bytes]] = []

    def pipe(self) -> tuple[int, int]:
        reading, self._writing = self._pipe()
        return reading, self._writing

    def fork(self) -> int:
        if not self._command:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        command = ["sh", "-c", self._command]
        child = subprocess.Popen(command, pass_fds=[self._writing])
        child.returncode = 0  # the server waits for it
        self._started.append(child)
        return child.pid


@contextmanager
def server(command: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    children = Children(command)
    monkeypatch.setattr(grammars.os, "pipe", children.pipe)
    monkeypatch.setattr(grammars.os, "fork", children.fork)
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    thread = threading.Thread(target=GrammarServer(theirs).run)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join()
        theirs.close()


def verdict(asking: socket.socket) -> Verdict:
    asking.sendall(encode_frame(CheckGrammar(7, GrammarSpec(kind="regex", text="a"))))
    frames = FrameReader[Verdict](verdict_decoder)
    while True:
        for found in frames.feed(asking.recv(1 << 16)):
            return found


@pytest.mark.parametrize(
    ("command", "is_open", "said"),
    [
        ("exec sleep 300", True, "too busy"),
        ("", True, "no memory"),
        ("kill -KILL $$", True, "no memory"),
        ("kill -PROF $$", False, "processor time"),
        ("kill -SEGV $$", False, "nests too deeply"),
        ("exit 2", False, "512 MiB"),
    ],
)
def test_only_what_the_grammar_did_is_a_verdict(
    command: str, is_open: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "CHECK_WALL_S", 0.1 if "sleep" in command else PATIENCE_S)
    with server(command, monkeypatch) as asking:
        found = verdict(asking)
    assert (found.call_id, found.text, found.is_open) == (7, None, is_open)
    assert found.error is not None
    assert said in found.error


def test_the_limit_of_a_check_is_processor_time() -> None:
    """Twice the limit passes while it waits; then it computes."""
    program = (
        "import time\n"
        "from vllmx_engine import grammars\n"
        "grammars.CHECK_S = 0.1\n"
        "grammars._limit()\n"
        "time.sleep(0.2)\n"
        "print('waited', flush=True)\n"
        "while True: pass\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("waited\n", -signal.SIGPROF), done.stderr
