"""A host of ranks without a model and without processes, as rank 0 and its host see it; `conftest`
has its fixtures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import RankLostError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.system import greeter
from vllmx_core.system.greeter import listen
from vllmx_engine.core.found_model import FoundModel
from vllmx_tp import hosted_group
from vllmx_tp.frames import SentFrame
from vllmx_tp.hosted_group import serve_ranks
from vllmx_tp.hosts import RemoteHost
from vllmx_tp.link import Link
from vllmx_tp.messages import Call, RankReady
from vllmx_tp.region import Region

from tests.waiting import PATIENCE_S, wait_until

KEY = b"k" * 32
READY = RankReady(
    backend="numpy", dtype="f32", kv_cache_dtype="f32", block_size=8, cache_windows=(None,),
    max_num_batched_tokens=64, max_logit_rows=8, num_feature_rows=0, num_kv_blocks=16,
    max_num_seqs=4, num_state_slots=0, state_slot_bytes=0, weight_bytes=0, kv_cache_bytes=0,
)  # fmt: skip


class Ranks:
    """Stands in for the processes of a host's `Group`."""

    made: SimpleQueue[Ranks]
    load: Callable[[Ranks], list[RankReady]]
    farewell: Callable[[], None]

    def __init__(
        self,
        found: Any,
        region: Region,
        ranks: range,
        cores: Any,
        share: int,
        *,
        free_bytes: int = 0,
    ) -> None:
        assert len(ranks) == share == len(cores)
        self.free_bytes = free_bytes
        self.failure: RankLostError | None = None
        self.is_lost, self.is_killed = threading.Event(), threading.Event()
        self.steps: SimpleQueue[tuple[Call, list[int]]] = SimpleQueue()
        self.made.put(self)

    def loaded(self) -> list[RankReady]:
        return type(self).load(self)

    def until_lost(self) -> list[RankReady]:
        """Loads until somebody ends the group."""
        assert self.is_lost.wait(PATIENCE_S)
        assert self.failure is not None
        raise self.failure

    def send(self, call: Call, frame: SentFrame) -> None:
        words = np.empty(frame.num_words, np.int32)
        frame.write(words)
        self.steps.put((call, words.tolist()))

    def lost(self, text: str) -> RankLostError:
        self.failure = RankLostError(text)
        self.is_lost.set()
        return self.failure

    def kill(self) -> None:
        self.is_killed.set()

    def close(self) -> None:
        type(self).farewell()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[Ranks]:
    """The ranks of the host, which are loaded at once unless a test says otherwise."""

    class Mine(Ranks):
        made = SimpleQueue()
        load = staticmethod(lambda self: [READY])  # type: ignore[assignment]
        farewell = staticmethod(lambda: None)

    monkeypatch.setattr(hosted_group, "Group", Mine)
    return Mine


@pytest.fixture
def found(tmp_path: Path) -> FoundModel:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    config = EngineConfig(
        model=str(tmp_path), tensor_parallel_size=2, backend="numpy", num_threads=8
    )
    return FoundModel(config, tmp_path, load_registry(), False)


@contextmanager
def made(*sizes: int) -> Iterator[Region]:
    with closing(Region.create(*sizes)) as region:
        try:
            yield region
        finally:
            region.aborted[0] = 1


@pytest.fixture
def region() -> Iterator[Region]:
    with made(2) as region:
        yield region


@pytest.fixture
def address(
    ranks: type[Ranks], found: FoundModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    """Where a host of ranks listens."""
    monkeypatch.setattr(greeter, "LOOK_S", 0.01)
    with listen(("127.0.0.1", 0)) as listener:
        mine = EngineConfig(model=found.config.model)
        host = threading.Thread(target=serve_ranks, args=(listener, mine, KEY))
        host.start()
        yield listener.getsockname()
    host.join()


def nothing() -> None:
    """Rank 0's own ranks are well."""


@contextmanager
def remote(
    address: tuple[str, int],
    found: FoundModel,
    region: Region,
    its: range = range(1, 2),
    check: Callable[[], None] = nothing,
) -> Iterator[RemoteHost]:
    with closing(RemoteHost(address, its, found, region, KEY, check, PATIENCE_S)) as host:
        yield host


def ended(host: RemoteHost) -> str:
    """What rank 0's watch sees in the end, without waiting for the host to load."""
    wait_until(lambda: host.look(0.0, PATIENCE_S) is not None)
    return str(host.look(0.0, PATIENCE_S))


def end_all(regions: Iterable[Region], links: Iterable[Link]) -> None:
    """Ends a group whose hosts are all here."""
    for region in regions:
        region.aborted[0] = 1
    for link in links:
        link.close()
    for region in regions:
        region.close()
