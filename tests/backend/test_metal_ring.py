"""Ranks of the metal backend as processes that MLX joins in a ring."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")

import mlx.core as mx
from vllmx_core.communicator import Communicator
from vllmx_metal import ring
from vllmx_metal.backend import MetalBackend
from vllmx_testing.ranks import ThreadCommunicator
from vllmx_tp.region import Region

from tests.waiting import PATIENCE_S

from .metal_ring_models import MODELS, chunks, options
from .test_sharding import of

pytestmark = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="this build of MLX has no ring"
)

ROOT = Path(__file__).parents[2]


def two_processes(folder: Path, *how: str, **environment: str) -> list[Any]:
    """What each of two ranks found."""
    region = Region.create(2)
    command = [sys.executable, "-m", "tests.backend.metal_ring_process", str(region.fd)]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / f"{rank}.npz"), *how],
            cwd=ROOT,
            pass_fds=(region.fd,),
            env=os.environ | {"VLLMX_METAL_RING": "1"} | environment,
        )
        for rank in range(2)
    ]
    try:
        assert [one.wait(PATIENCE_S) for one in started] == [0, 0]
    finally:
        for one in started:
            one.kill()
            one.wait()
        region.close()
    return [np.load(folder / f"{rank}.npz") for rank in range(2)]


def test_a_ring_computes_what_one_rank_does(tmp_path: Path) -> None:
    first, second = two_processes(tmp_path)
    assert first["over"] == second["over"] == "MLX (ring)"
    for name, config in MODELS.items():
        whole = MetalBackend().load(*of(config), options())
        expected = chunks(whole)
        whole.close()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(first[name], expected, rtol=0, atol=2e-5 * scale, err_msg=name)
        np.testing.assert_array_equal(second[name], first[name])  # or they would draw other ids


def test_nobody_sits_in_the_ring_unseen(tmp_path: Path) -> None:
    """Somebody who takes a connection of MLX's and hands on what is said: the ranks see that their
    connections do not end at each other, and meet through the host."""
    first, second = two_processes(tmp_path, "relayed")
    assert first["over"] == second["over"] == "the host"
    np.testing.assert_array_equal(second["tied"], first["tied"])


class _Ends(ThreadCommunicator):
    shared: Any = object()  # of a group that shares memory, as far as this is asked


def met() -> list[str]:
    """What two threads of this process meet through."""
    ends = _Ends.group(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(ring.meet, ends))
    return [one.over for one in ranks if one is not None]


@pytest.mark.parametrize(("value", "reason"), [("1", "threads of one process"), ("0", "is 0")])
def test_where_no_ring_is_possible_they_meet_through_the_host(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ring.SWITCH, value)
    with caplog.at_level("INFO", "vllmx.metal"):
        assert met() == ["the host", "the host"]
    assert reason in caplog.text


def test_addresses_come_from_the_file_of_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts.json"
    monkeypatch.setenv("MLX_HOSTFILE", str(file))
    file.write_text('[["10.0.0.1:7001"], ["10.0.0.2:7001", "10.0.1.2:7001"]]')
    assert ring._wanted(2) == [("10.0.0.1", 7001), ("10.0.0.2", 7001)]
    assert ring._wanted(3) == [("127.0.0.1", 0)] * 3  # other ranks than the file's
    file.write_text('{"a": 1}')
    assert ring._wanted(2) == [("127.0.0.1", 0)] * 2


def test_a_rank_that_cannot_ends_the_phase_for_all() -> None:
    def work(end: Communicator) -> str:
        def numbers() -> list[int]:
            if end.rank == 0:
                raise OSError("no port")
            return [4]

        try:
            ring._Phases(end).together(numbers)
        except ring._NoGroupError as error:
            return str(error)
        raise AssertionError("nobody noticed")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, ThreadCommunicator.group(2)))
    assert found == ["no port", "rank 0 cannot; its log says why"]


def test_jaccl_says_addresses_of_devices_by_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No machine with RDMA was at hand: this is MLX's side of the call, as its help has it."""
    found = []

    def init(*, strict: bool, backend: str, all_gather_factory: Any) -> str:
        assert strict
        assert backend == "jaccl"
        gather = all_gather_factory(0, 2)
        found.append(gather(b"xyz", 3))
        return "group"

    monkeypatch.setattr(ring, "_formed", set())
    monkeypatch.setattr(mx.distributed, "init", init)

    def join(end: Communicator) -> Any:
        return ring._jaccl(end, ring._Phases(end))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, ThreadCommunicator.group(2))) == ["group", "group"]
    assert found == [b"xyzxyz"] * 2
