"""`vllmx rank` and rank 0's view of it, without a model: what they say to each other, and how that
ends."""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
from click.testing import CliRunner
from vllmx.cli.rank import rank
from vllmx_core.errors import CapacityError, ConfigError, RankLostError
from vllmx_core.system.greeter import listen
from vllmx_core.system.handshake import LET_IN, answer
from vllmx_engine.core.found_model import FoundModel
from vllmx_tp import hosted_group
from vllmx_tp.frames import SentFrame
from vllmx_tp.hosts import RemoteHost, connect
from vllmx_tp.messages import INLINE, NOTICE, RANKS, Begin, Call, Marks, Purpose, RankReady
from vllmx_tp.region import Region

from tests.waiting import PATIENCE_S, wait_until

from .hosted import KEY, READY, Ranks, ended, made, nothing, remote


# --- what a host is asked for ---------------------------------------------------------------------
def test_steps_go_to_the_ranks(
    address: tuple[str, int], found: FoundModel, region: Region, ranks: type[Ranks]
) -> None:
    with remote(address, found, region) as host:
        assert host.loaded(nothing) == [READY]
        host.send(NOTICE.pack(Call.STEP, 8, INLINE), struct.pack("<2i", 5, -6))
        group = ranks.made.get(timeout=PATIENCE_S)
        assert group.steps.get(timeout=PATIENCE_S) == (Call.STEP, [5, -6])
        host.send(NOTICE.pack(Call.CLOSE, 0, INLINE), b"")
        assert f"the connection to host {host.name} has ended" in ended(host)


def test_ranks_of_a_host_divide_what_was_free_there(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    ranks: type[Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever loads last finds less, and the least number of blocks counts for all hosts."""
    monkeypatch.setattr("vllmx_engine.core.load.free_memory", lambda _: 12345)
    with remote(address, found, region) as host:
        host.loaded(nothing)
        assert ranks.made.get(timeout=PATIENCE_S).free_bytes == 12345


def test_another_server_waits_for_a_busy_host(
    address: tuple[str, int], found: FoundModel, region: Region
) -> None:
    """It gets its turn when the first one has ended, which does not notice it."""
    waits, loads = threading.Event(), SimpleQueue[list[RankReady]]()

    def other() -> None:
        with made(2) as its_region, remote(address, found, its_region, check=waits.set) as host:
            loads.put(host.loaded(nothing))

    with remote(address, found, region) as host:
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(PATIENCE_S)  # it was hung up on once
        assert host.loaded(nothing) == [READY]
        assert host.look(0.0, PATIENCE_S) is None
        assert loads.empty()
    assert loads.get(timeout=PATIENCE_S) == [READY]
    thread.join()


@pytest.mark.parametrize(
    ("its", "sizes", "text"),
    [
        (range(1), (2, 1), "1 ranks, from rank 0 on, of 2 in 1 stages"),
        (range(1, 1), (2, 1), "0 ranks, from rank 1 on, of 2"),
        (range(1, 5), (2, 1), "4 ranks, from rank 1 on, of 2"),
        (range(5, 6), (2, 1), "1 ranks, from rank 5 on, of 2"),
        (range(1, 3), (2, 2), "2 ranks, from rank 1 on, of 4 in 2 stages: ask for whole stages"),
    ],
)
def test_ranks_that_cannot_be_run(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    its: range,
    sizes: tuple[int, int],
    text: str,
) -> None:
    """The host says what is wrong, and serves the next one."""
    tensor, stages = sizes
    config = replace(found.config, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    wrong = FoundModel(config, found.path, found.registry, False)
    with (
        pytest.raises(ConfigError, match=f"host of ranks at 127.0.0.1:.* {text}"),
        made(tensor * stages, stages) as its_region,
        remote(address, wrong, its_region, its) as host,
    ):
        host.loaded(nothing)
    with remote(address, found, region) as host:
        assert host.loaded(nothing) == [READY]


def test_what_no_rank_0_says(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing that somebody with the key says ends the host."""
    begin = msgspec.msgpack.encode(
        Begin(config=found.config, first=1, count=1, marks=Marks.of(found))
    )
    said = NOTICE.pack(Call.BEGIN, len(begin), INLINE) + begin
    early = said + NOTICE.pack(Call.STEP, 0, INLINE)
    wrong = {
        b"": "rank 0 is gone",
        NOTICE.pack(77, 0, INLINE): "rank 0 makes call 77, which is not known here",
        NOTICE.pack(Call.BEAT, 0, INLINE): "rank 0 sends BEAT before it has said what to load",
        NOTICE.pack(Call.BEGIN, 1 << 31, INLINE): f"rank 0 sends BEGIN of {1 << 31} bytes",
        NOTICE.pack(Call.BEGIN, 2, INLINE) + b"no": "rank 0 asks for an invalid group",
        early: "rank 0 sends STEP before the ranks are loaded",
        said: "rank 0 is gone",
    }
    for number, (data, text) in enumerate(wrong.items()):
        caplog.clear()
        group = bytes([number]) * 16
        with connect(address, KEY, group, Purpose.STEPS, PATIENCE_S, nothing) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        wait_until(lambda: "a group has ended" in caplog.text)
        assert f"a group has ended: {text}" in caplog.text
    with remote(address, found, region) as host:
        host.loaded(nothing)
        host.send(NOTICE.pack(Call.STEP, 5, INLINE), b"12345")
        ended(host)
        wait_until(lambda: "STEP of 5 bytes, which is not a step" in caplog.text)
    with remote(address, found, region) as host:
        assert host.loaded(nothing) == [READY]


def test_who_says_slowly_what_to_load(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time counts from its first word, however often another byte comes."""
    monkeypatch.setattr(hosted_group, "LINK_S", 0.2)
    with connect(address, KEY, bytes(16), Purpose.STEPS, PATIENCE_S, nothing) as connection:
        with suppress(OSError):
            for byte in NOTICE.pack(Call.BEGIN, 300, INLINE) + bytes(300):
                connection.sendall(bytes([byte]))
                if select.select([connection], [], [], 0.02)[0]:  # it has hung up, or says why
                    break
        wait_until(lambda: "a group has ended" in caplog.text)
    assert "a group has ended: rank 0 has not said within 0.2 s" in caplog.text


def test_files_are_compared_when_a_server_comes(
    address: tuple[str, int], found: FoundModel, region: Region
) -> None:
    """The host need not be started again when they were copied."""
    file = found.path / "model.safetensors"
    marks, right = Marks.of(found), file.read_bytes()

    def load() -> list[RankReady]:
        with remote(address, found, region) as host:
            return host.loaded(nothing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllmx_tp.hosts.Marks", type("Same", (), {"of": staticmethod(lambda found: marks)})
        )
        file.write_bytes(bytes(50) + b"1" + bytes(49))
        with pytest.raises(ConfigError, match=r"other files of the model in .*: copy the same"):
            load()
        file.unlink()
        (found.path / "config.json").unlink()
        found.path.rename(found.path.with_name("away"))
        with pytest.raises(ConfigError, match=r"cannot read .* \(No such file or dir.*\): copy"):
            load()
        found.path.with_name("away").rename(found.path)
        (found.path / "config.json").write_text("{}")
        file.write_bytes(right)
        assert load() == [READY]


# --- loading that fails ---------------------------------------------------------------------------
def test_a_rank_that_dies_while_it_loads_is_seen_at_once(
    address: tuple[str, int], found: FoundModel, region: Region, ranks: type[Ranks]
) -> None:
    """Rank 0's watch sees it, as rank 0 itself may load for minutes."""

    def load(group: Ranks) -> list[RankReady]:
        raise RankLostError("rank 1 was killed by SIGKILL")

    ranks.load = load
    with remote(address, found, region) as host:
        assert ended(host) == f"rank 1 was killed by SIGKILL (on host {host.name})"


def test_an_error_of_loading_keeps_its_type(
    address: tuple[str, int], found: FoundModel, region: Region, ranks: type[Ranks]
) -> None:
    """The host's ranks end at once, and the host waits until rank 0 knows why."""

    def load(group: Ranks) -> list[RankReady]:
        raise CapacityError("too large", param="max_model_len")

    ranks.load = load
    with remote(address, found, region) as host:
        group = ranks.made.get(timeout=PATIENCE_S)
        assert group.is_killed.wait(PATIENCE_S)
        with pytest.raises(CapacityError, match="too large") as caught:
            host.loaded(nothing)
        assert caught.value.param == "max_model_len"
        assert host.look(0.0, PATIENCE_S) is None


def test_no_memory_for_what_ranks_share(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(*sizes: int) -> Region:
        raise CapacityError("2 ranks share 32 MiB of memory, which cannot be had")

    monkeypatch.setattr(hosted_group, "Region", type("Full", (), {"create": staticmethod(create)}))
    with (
        pytest.raises(CapacityError, match="cannot be had"),
        remote(address, found, region) as host,
    ):
        host.loaded(nothing)


def test_rank_0_goes_while_ranks_load(
    address: tuple[str, int], found: FoundModel, region: Region, ranks: type[Ranks]
) -> None:
    ranks.load = Ranks.until_lost
    with remote(address, found, region):
        group = ranks.made.get(timeout=PATIENCE_S)
    assert group.is_lost.wait(PATIENCE_S)
    assert group.is_killed.wait(PATIENCE_S)


def test_rank_0_stands_still_while_ranks_load(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    ranks: type[Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted_group, "HANG_S", 0.0)
    ranks.load = Ranks.until_lost
    with remote(address, found, region):
        group = ranks.made.get(timeout=PATIENCE_S)
        assert group.is_lost.wait(PATIENCE_S)
        assert "rank 0 says nothing any more" in str(group.failure)


def test_rank_0_makes_no_second_connection(
    address: tuple[str, int],
    found: FoundModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that does not go on keeps the host no longer than that."""
    monkeypatch.setattr(hosted_group, "LINK_S", 0.3)
    data = msgspec.msgpack.encode(
        Begin(config=found.config, first=1, count=1, marks=Marks.of(found))
    )
    with connect(address, KEY, b"g" * 16, Purpose.STEPS, PATIENCE_S, nothing) as connection:
        connection.sendall(NOTICE.pack(Call.BEGIN, len(data), INLINE) + data)
        while connection.recv(1 << 16):
            pass
    wait_until(lambda: "a group has ended" in caplog.text)


# --- the end --------------------------------------------------------------------------------------
def test_a_farewell_that_takes_long(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    ranks: type[Ranks],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 has closed and says nothing any more, as it should."""
    caplog.set_level(logging.INFO)

    def farewell() -> None:
        monkeypatch.setattr(hosted_group, "HANG_S", 0.0)
        time.sleep(0.5)  # some looks of the host's watch

    ranks.farewell = farewell
    with remote(address, found, region) as host:
        host.loaded(nothing)
        host.send(NOTICE.pack(Call.CLOSE, 0, INLINE), b"")
        ended(host)
    wait_until(lambda: "a group has ended: rank 0 has closed it" in caplog.text)
    assert "says nothing" not in caplog.text


def test_ranks_that_have_no_room_for_a_step(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    ranks: type[Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in the middle of a long one; what rank 0 says lies unread, but it lives."""
    send = Ranks.send

    def late(self: Ranks, call: Call, frame: SentFrame) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(hosted_group, "HANG_S", 0.1)
            time.sleep(0.5)  # some looks of the host's watch
        send(self, call, frame)

    monkeypatch.setattr(Ranks, "send", late)
    with remote(address, found, region) as host:
        host.loaded(nothing)
        host.send(NOTICE.pack(Call.STEP, 4, INLINE), struct.pack("<i", 5))
        group = ranks.made.get(timeout=PATIENCE_S)
        assert group.steps.get(timeout=PATIENCE_S) == (Call.STEP, [5])
        assert host.look(0.0, PATIENCE_S) is None
        host.send(NOTICE.pack(Call.CLOSE, 0, INLINE), b"")


def test_a_rank_that_ends_is_told(
    address: tuple[str, int], found: FoundModel, region: Region, ranks: type[Ranks]
) -> None:
    with remote(address, found, region) as host:
        host.loaded(nothing)
        ranks.made.get(timeout=PATIENCE_S).failure = RankLostError("rank 1 ended with code 1")
        assert ended(host) == f"rank 1 ended with code 1 (on host {host.name})"


@contextmanager
def silent_host(
    found: FoundModel, region: Region, host_says: Sequence[bytes] = ()
) -> Iterator[RemoteHost]:
    """What stands in for a host: it lets rank 0 in, and reads nothing."""
    taken: list[socket.socket] = []

    def let_in() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            answer(connection, KEY, RANKS)
            connection.sendall(LET_IN)
            taken.append(connection)
        for data in host_says:
            taken[0].sendall(data)

    with listen(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=let_in)
        thread.start()
        with remote(listener.getsockname(), found, region) as host:
            thread.join()
            yield host
        for one in taken:
            one.close()


@pytest.mark.parametrize("word", ["look", "close"])
def test_nobody_waits_for_a_host_that_reads_nothing(
    word: str, found: FoundModel, region: Region
) -> None:
    """It is found by its silence, so the watch must not wait for it, nor who closes."""
    with silent_host(found, region) as host:
        host._socket.setblocking(False)
        for size in (1 << 20, 1):  # there is room for a byte where there is none for many
            with suppress(BlockingIOError):
                while True:
                    host._socket.send(bytes(size))
        host._socket.setblocking(True)
        words = {"look": lambda: host.look(0.0, 1.0), "close": lambda: host.say(Call.CLOSE, 0.1)}
        watch = threading.Thread(target=words[word], daemon=True)
        watch.start()
        watch.join(PATIENCE_S)
        assert not watch.is_alive()
        assert "does not answer" in str(host.look(2.0, 1.0))


def test_what_no_host_says(found: FoundModel, region: Region) -> None:
    with silent_host(found, region, [b"\xff" * 4]) as host:
        assert f"connection to host {host.name} has ended (a frame of 4294967295" in ended(host)


# --- the command ----------------------------------------------------------------------------------
def test_a_host_listens_at_one_address(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    for listens, count in (("127.0.0.1:1,127.0.0.1:2", 2), ("", 0)):
        line = ["demo", "--listen", listens, "--rank-key-file", str(key)]
        error = CliRunner().invoke(rank, line).exception
        assert isinstance(error, ConfigError)
        assert f"--listen '{listens}' names {count} addresses: give one" in error.message
