"""Lines on their way to a place that may not take them."""

from __future__ import annotations

import os
import subprocess
import sys

from vllmx_core.system.standard_error import StandardError

from tests.waiting import PATIENCE_S


def test_lines_come_in_order_and_are_all_there_at_the_end() -> None:
    read, write = os.pipe()
    stream = StandardError(write)
    for number in range(100):
        stream.write(f"{number}\n")
    stream.finish(PATIENCE_S)
    os.close(write)
    with os.fdopen(read) as file:
        assert file.read().split() == [str(number) for number in range(100)]


def test_a_reader_that_stops_costs_lines_and_is_told() -> None:
    read, write = os.pipe()
    stream = StandardError(write, max_lines=10)
    stream.write("x" * (1 << 17) + "\n")  # more than a pipe holds
    while stream._texts:
        pass  # until the thread has begun to write
    for number in range(50):
        stream.write(f"{number}\n")
    stream.finish(0.01)
    with os.fdopen(read, "rb", buffering=0) as file:
        text = b""
        while b"dropped" not in text:
            text += file.read(1 << 16)
    os.close(write)
    assert text.split(b"\n")[1:12] == [
        *(b"%d" % number for number in range(10)),
        b"(40 lines of the log were dropped here)",
    ]


def test_a_place_that_takes_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = StandardError(write)
    stream.write("lost\n")
    stream.finish(PATIENCE_S)
    os.close(write)
    assert not stream._texts


LATE = """
import sys, threading
from vllmx_core.system.standard_error import StandardError

class Late:
    def __del__(self):
        stream.write("late")

stream = StandardError()
stream.late = Late()
stream.late.itself = stream.late  # a circle, which the end of the interpreter collects
taken = threading.Event()

def dies_with_the_lock():
    with stream._changed:
        taken.set()
        threading.Event().wait()

threading.Thread(target=dies_with_the_lock, daemon=True).start()
taken.wait()
sys.exit(3)
"""


def test_lines_that_come_while_the_interpreter_ends_wait_for_nobody() -> None:
    """The thread that writes ends wherever it is, be it with the lock."""
    done = subprocess.run([sys.executable, "-c", LATE], check=False, timeout=PATIENCE_S)
    assert done.returncode == 3
