"""A child process that receives one message, and then reports until it ends or its input does."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
from vllmx_engine.wire.ipc import FrameReader, encode_frame

from vllmx_ray.messages import Report, report_decoder

M = TypeVar("M")

_READ_BYTES = 1 << 16
_END_S = 10.0


class Child:
    """A module of ours in a process of its own. Its output is frames of reports, its errors and log
    go to our standard error. It ends when its input does, which the end of this process closes."""

    def __init__(self, module: str, message: msgspec.Struct) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals of a terminal are its parent's business
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its reports say why, or their end
            self._process.stdin.write(encode_frame(message))
            self._process.stdin.flush()

    def reports(self) -> Iterator[Report]:
        """Reports as they come, until the process ends."""
        assert self._process.stdout is not None
        reader: FrameReader[Report] = FrameReader(report_decoder)
        while data := os.read(self._process.stdout.fileno(), _READ_BYTES):
            yield from reader.feed(data)

    def close(self) -> int:
        """Ends the process and returns its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()
        return self._process.wait()


class Parent(Generic[M]):
    """The other end, in the child.

    Args:
        on_end: called on another thread when the parent is gone or wants this process to end.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], on_end: Callable[[], None]) -> None:
        self._decoder, self._on_end = decoder, on_end
        self._input = io.FileIO(os.dup(0))
        self._output = os.dup(1)
        os.dup2(2, 1)  # what libraries print must not get between reports

    def message(self) -> M:
        """The one message. Raises EOFError without one."""
        reader: FrameReader[M] = FrameReader(self._decoder)
        while data := self._input.read(_READ_BYTES):
            for message in reader.feed(data):
                threading.Thread(target=self._wait, daemon=True).start()
                return message
        raise EOFError

    def tell(self, report: Report) -> None:
        """Sends a report, unless the parent is gone."""
        with suppress(BrokenPipeError):
            os.write(self._output, encode_frame(report))

    def _wait(self) -> None:
        while self._input.read(_READ_BYTES):
            pass
        self._on_end()
