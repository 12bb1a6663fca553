"""The folder of `--kv-disk`: torn, damaged, full, shared and killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllmx_engine.core.disk_store import DiskStore, open_store, sealed, unsealed

IDENTITY = b"i" * 32
NAMES = [bytes([number]) * 17 for number in range(40)]


def block(number: int) -> bytes:
    return random.Random(number).randbytes(100 + 7 * number)


@contextmanager
def opened(folder: Path, max_bytes: int = 1 << 20, identity: bytes = IDENTITY) -> Iterator[Any]:
    store = open_store(str(folder), identity, max_bytes)
    assert store is not None
    try:
        yield store
    finally:
        store.close()


def fill(store: DiskStore, numbers: range) -> None:
    for number in numbers:
        name = NAMES[number]
        assert store.write(name, sealed(store.key, name, block(number)))


def intact(store: DiskStore) -> set[int]:
    """Blocks that come back; asserts that each is what was written."""
    found = set()
    for number, name in enumerate(NAMES):
        data = store.read(name)
        whole = None if data is None else unsealed(store.key, name, data)
        if whole is not None:
            assert bytes(whole) == block(number)
            found.add(number)
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def test_blocks_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, range(20))
        assert intact(store) == set(range(20))
    with opened(tmp_path) as store:
        assert intact(store) == set(range(20))
        fill(store, range(10, 40))
        assert store.num_blocks == 40
    with opened(tmp_path) as store:
        assert intact(store) == set(range(40))


def test_a_thousand_damaged_segments(tmp_path: Path) -> None:
    """Whatever bytes are changed, cut off or added: a block is right, or it is not there."""
    with opened(tmp_path) as store:
        fill(store, range(6))
    (path,) = segments(tmp_path)
    whole, rng, lost = path.read_bytes(), random.Random(1), 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del data[at:]
            elif kind == 2:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
            else:
                data[at : at + 30] = whole[rng.randrange(len(whole)) :][:30]
            data = data or bytearray(b"\0")
        path.write_bytes(data)
        with opened(tmp_path) as store:
            lost += 6 - len(intact(store))
    assert lost > 1000


def test_a_block_of_another_name_is_not_taken(tmp_path: Path) -> None:
    key = bytes(32)
    data = sealed(key, NAMES[0], b"block")
    assert unsealed(key, NAMES[1], data) is None
    assert unsealed(b"k" * 32, NAMES[0], data) is None
    assert unsealed(key, NAMES[0], b"") is None


def test_the_size_holds(tmp_path: Path) -> None:
    """The segments whose blocks were read last stay."""
    limit = 4000
    with opened(tmp_path, limit) as store:
        for number in range(40):
            fill(store, range(number, number + 1))
            store.read(NAMES[0])
            files = sum(path.stat().st_size for path in segments(tmp_path))
            assert files == store.num_bytes <= limit
        found = intact(store)
        assert 0 in found
        assert 39 in found
        assert 5 not in found
        assert not store.write(b"x" * 17, bytes(limit))
    with opened(tmp_path, 1500) as store:  # a smaller limit holds from the next write on
        fill(store, range(2, 3))
        assert store.num_bytes <= 1500


def test_segments_of_others_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, 4000, b"o" * 32) as store:
        fill(store, range(8))
    with opened(tmp_path, 4000) as store:
        assert intact(store) == set()
        fill(store, range(8, 16))
        assert intact(store) == set(range(8, 16))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Nothing is written for a while; what is there can be read, and nothing torn is left."""
    now = [0.0]
    write = os.pwritev

    def full(file: int, parts: list[bytes], at: int) -> int:
        write(file, [parts[0], parts[1][:50]], at)
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as store:
        store._clock = lambda: now[0]
        fill(store, range(3))
        monkeypatch.setattr(os, "pwritev", full)
        for number in range(3, 9):
            assert not store.write(NAMES[number], b"data")
        assert caplog.text.count("No space left on device") == 1
        assert intact(store) == {0, 1, 2}
        monkeypatch.setattr(os, "pwritev", write)
        assert not store.write(NAMES[3], b"data")
        now[0] = 31.0
        fill(store, range(3, 9))
    with opened(tmp_path) as store:
        assert intact(store) == set(range(9))


def test_a_folder_serves_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path):
        assert open_store(str(tmp_path), IDENTITY, 1 << 20) is None
    assert "in use by another process" in caplog.text
    with opened(tmp_path):
        pass


WRITER = """
import sys
from vllmx_engine.core.disk_store import open_store, sealed
import random
store = open_store(sys.argv[1], b"i" * 32, 1 << 24)
for count in range(10**9):
    number = count % 40
    name = bytes([number]) * 17
    store.forget(name)
    data = random.Random(number).randbytes(100 + 7 * number)
    assert store.write(name, sealed(store.key, name, data))
    if count == 100:
        print("writes", flush=True)
"""


def test_killed_while_it_writes(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        with opened(tmp_path) as store:
            assert intact(store) == set(range(40))
