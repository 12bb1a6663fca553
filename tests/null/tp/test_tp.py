"""Parts of vllmx-tp that need no process: frames, the ring, shared memory, shares of the host."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import threading
from dataclasses import fields, replace

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, ConfigError, RankLostError
from vllmx_core.plan import LogitEdits, PatchRows, SamplingRows, StepPlan, TokenCounts
from vllmx_core.system import processors
from vllmx_core.system.processors import available_processors
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_tp import group, loading, rank_process
from vllmx_tp.channel import Reader, Ring, Sender
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.frames import Frame, read_frame
from vllmx_tp.loading import divide_cores, on_cores, rank_options
from vllmx_tp.messages import INLINE, NOTICE, Call
from vllmx_tp.region import BUFFER_BYTES, RING_BYTES, Region

I32, F32 = np.int32, np.float32


def same(one: object, other: object) -> bool:
    """Equal in every field, arrays with their types."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one, other)
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, StepPlan | SamplingRows | LogitEdits | TokenCounts | PatchRows):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    return one == other


def through_a_frame(
    plan: StepPlan | None, rows: SamplingRows | None
) -> tuple[StepPlan | None, SamplingRows | None]:
    frame = Frame(plan, rows)
    words = np.full(frame.num_words + 5, -7, I32)
    frame.write(words)
    assert (words[frame.num_words :] == -7).all()
    assert words[: frame.num_words].tobytes() == frame.to_bytes()
    return read_frame(words)


PLAN = make_plan([Row([5, 6, 7], 0, [2, 4]), Row([9], 20, [7, 1], "none")], 16)
ROWS = sampling_rows(3, seed=[1, 1 << 63, 5], temperature=[0.5, 0, 1], num_logprobs=[-1, 2, 0])


def test_a_step_comes_as_it_was_sent() -> None:
    plan, rows = through_a_frame(PLAN, ROWS)
    assert same(plan, PLAN)
    assert same(rows, ROWS)
    assert through_a_frame(PLAN, None)[1] is None
    assert through_a_frame(None, ROWS)[0] is None


def test_everything_that_a_step_may_have() -> None:
    ints = np.arange(6, dtype=I32)
    plan = replace(
        PLAN,
        state_from=ints[:2],
        state_to=ints[2:4],
        state_after=ints[:4],
        token_types=ints[:4],
        feature_rows=ints[:4],
        rope_positions=np.arange(12, dtype=I32).reshape(3, 4),
        slots=(ints[:4], ints[1:5]),
        block_tables=(PLAN.block_tables[0], np.zeros((2, 2), I32)),
        patches=PatchRows(
            np.ones((4, 3), F32), np.ones((4, 0), I32), np.zeros((4, 0), F32), ints[:2], ints[:3]
        ),
        visible_to=ints[:4],
        tap_rows=ints[:4],
        own_rows=ints[:4],
        adapters=ints[:2],
        cross_rows=ints[:4].reshape(2, 2),
    )
    rows = replace(
        ROWS,
        edits=LogitEdits(ints[:4], ints[:3], np.array([-np.inf, 0.5, 1], F32)),
        counts=TokenCounts(ints[:4], ints[:3], ints[3:], np.array([True, False, True])),
        mask_index=ints[:3],
        masks=np.array([[1 << 31, 5], [0, 0xFFFFFFFF]], np.uint32),
        group_from=ints[:3],
        whole=ints[:1],
    )
    everything = (plan, plan.patches, rows, rows.edits, rows.counts)
    assert all(getattr(one, field.name) is not None for one in everything for field in fields(one))  # type: ignore[arg-type]
    found = through_a_frame(plan, rows)
    assert same(found[0], plan)
    assert same(found[1], rows)


def test_a_step_of_nothing_to_sample() -> None:
    rows = sampling_rows(0)
    assert same(through_a_frame(PLAN, rows)[1], rows)


def test_frames_in_the_ring_never_overlap() -> None:
    """Any sizes, taken at any pace: no frame lies where an older one is still read."""
    random = np.random.default_rng(3)
    ring, alive, placed, taken = Ring(4096), list[tuple[int, int]](), 0, 0
    for _ in range(3000):
        size = int(random.integers(1, 1500))
        at = ring.place(size)
        if at is not None:
            assert at + size <= 4096
            assert all(at + size <= begin or at >= end for begin, end in alive)
            alive.append((at, at + size))
            placed += 1
        if alive and random.random() < 0.6:
            alive.pop(0)
            taken += 1
        ring.release(taken)
    assert placed > 1000
    ring.release(placed)
    assert ring.place(2048) == 0
    assert not ring.fits(2049)


def test_ranks_add_and_gather_through_shared_memory() -> None:
    """Some arrays are more than a buffer holds, and rows have different widths."""
    region, wide = Region.create(3), BUFFER_BYTES // 8 + 17
    given = [np.random.default_rng(rank).standard_normal((2, wide)) for rank in range(3)]
    widths = [5, 4, 7]
    parts = [np.full((3, width), rank, F32) for rank, width in enumerate(widths)]
    sums: dict[int, list[np.ndarray]] = {}  # type: ignore[type-arg]

    def run(rank: int) -> None:
        comm = SharedMemoryCommunicator(region, rank)
        sums[rank] = [comm.all_reduce(given[rank]), comm.all_gather(parts[rank], widths)]
        sums[rank] += [comm.all_reduce(np.full(4, rank + turn, F32)) for turn in range(5)]
        comm.all_reduce(np.zeros((0, 4), F32))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = (given[0] + given[1]) + given[2]
    for rank in range(3):
        total, gathered, *small = sums[rank]
        np.testing.assert_array_equal(total, expected)
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis=1))
        assert [int(one[0]) for one in small] == [3 + 3 * turn for turn in range(5)]
    region.close()


def test_who_waits_is_told_of_the_end() -> None:
    region = Region.create(2)
    region.write_cause(1, "rank 1 failed: it did")
    region.write_cause(1, "the second cause does not count")
    region.aborted[0] = 1
    with pytest.raises(RankLostError):
        SharedMemoryCommunicator(region, 0).all_reduce(np.ones(3, F32))
    assert region.cause(1) == "rank 1 failed: it did"
    region.close()


def test_a_rank_has_its_share_of_the_host() -> None:
    given = rank_options(
        LoadOptions(num_threads=6, memory_fraction=0.8, kv_cache_memory_bytes=90), 0.5, 0, 2
    )
    assert given.num_threads == 3
    assert given.memory_fraction == 0.4
    assert given.kv_cache_memory_bytes == 45
    assert rank_options(LoadOptions(), 0.25, 4, 2).num_threads == 4
    own = rank_options(LoadOptions(kv_cache_memory_bytes=100), 0.5, 4, 2, own_devices=True)
    assert own.memory_fraction == LoadOptions().memory_fraction
    assert own.kv_cache_memory_bytes == 100


def test_more_ranks_than_cores() -> None:
    count = available_processors()
    with pytest.raises(ConfigError, match=rf"more than the {count} cores .* --num-threads"):
        divide_cores(count + 1, EngineConfig(model="demo", tensor_parallel_size=count + 1), "cpu")
    hosts = EngineConfig(model="demo", tensor_parallel_size=2 * (count + 1))
    with pytest.raises(ConfigError, match=rf"{count + 1} ranks on a host .* {2 * count} in all"):
        divide_cores(count + 1, hosts, "cpu")
    threads = EngineConfig(model="demo", num_threads=count + 1)
    assert divide_cores(count + 1, threads, "cpu") == [()] * (count + 1)
    found = divide_cores(count, EngineConfig(model="demo"), "cpu")
    assert len({core for cores in found for core in cores}) in (0, count)


@pytest.mark.parametrize(("quota", "is_pinned"), [(4, False), (8, True)])
def test_ranks_stay_on_their_cores_unless_a_quota_leaves_some_to_others(
    quota: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers with quotas would pin all of their ranks to the same cores of a machine. Each
    rank has as many threads as its share of the quota either way."""
    all_cores, pinned = set(range(8)), list[set[int]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: all_cores, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: pinned.append(set(cores)), raising=False
    )
    for module in (loading, processors):
        monkeypatch.setattr(module, "available_processors", lambda: quota)
    one, other = divide_cores(2, EngineConfig(model="demo"), "cpu")
    assert not set(one) & set(other)
    assert rank_options(LoadOptions(), 0.5, len(one), 2).num_threads == quota // 2
    with on_cores(one):
        assert pinned == [set(one)] * is_pinned
    assert pinned == [set(one), all_cores] * is_pinned


def test_memory_that_cannot_be_had() -> None:
    """A limit of this process stands for a system whose shared memory is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            CapacityError, match=r"2 ranks share 3.* which cannot be had \(File too"
        ):
            Region.create(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="memory goes with the last view")
def test_a_region_that_is_closed_holds_no_memory() -> None:
    """Its views may live on for long; who waits by one of them still sees the end."""
    region = Region.create(2)
    ring, fd = region.ring, os.dup(region.fd)
    ring[:] = 1
    region.aborted[0] = 1
    region.write_cause(1, "rank 1 failed")
    full = os.fstat(fd).st_blocks
    region.close()
    assert os.fstat(fd).st_blocks < full // 100
    assert (int(region.aborted[0]), region.cause(1), int(ring.max())) == (1, "rank 1 failed", 0)
    os.close(fd)


def test_a_frame_of_which_half_came_is_never_read() -> None:
    """Rank 0 ended while it wrote: a frame counts when its notice is complete, one that comes with
    its notice when all of it has come."""
    region = Region.create(2)
    notice = NOTICE.pack(Call.STEP, 4 * Frame(PLAN, ROWS).num_words, INLINE)
    for part in (notice[:5], notice + Frame(PLAN, ROWS).to_bytes()[:-4]):
        ours, theirs = socket.socketpair()
        ours.sendall(part)
        ours.close()
        with pytest.raises(EOFError):
            Reader(theirs, region, 1).read()
        theirs.close()
    region.close()


def test_a_hanging_rank_is_seen_within_five_seconds() -> None:
    assert group.HANG_S + 2 * group.LOOK_S + rank_process.BEAT_S < 5.0


def test_a_frame_waits_until_a_slow_rank_has_room() -> None:
    """The sender looks meanwhile whether the group lives."""
    region, (ours, theirs) = Region.create(2), socket.socketpair()
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise RankLostError("rank 1 hangs")

    sender = Sender(region, [1], [ours], check)
    large = replace(PLAN, feature_rows=np.zeros(RING_BYTES // 10, I32))
    for _ in range(2):  # the ring holds two
        sender.send(Call.FORWARD, Frame(large, None))
    with pytest.raises(RankLostError, match="rank 1 hangs"):
        sender.send(Call.FORWARD, Frame(large, None))
    assert len(theirs.recv(1 << 16)) == 2 * NOTICE.size
    region.close()
    ours.close()
    theirs.close()
