"""Lines on their way to a place that may not take them."""

from __future__ import annotations

import os

from vllmx_core.standard_error import StandardError


def test_lines_come_in_order_and_are_all_there_at_the_end() -> None:
    read, write = os.pipe()
    stream = StandardError(write)
    for number in range(100):
        stream.write(f"{number}\n")
    stream.finish(10)
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
    stream.finish(10)
    os.close(write)
    assert not stream._texts
