"""Policies that choose a replica: vllmx's router, and what others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

import numpy as np
from traces import BLOCK_TOKENS, Request
from vllmx_engine.replicas.router import ReplicaLoad, Router


class Policy(Protocol):
    """Chooses replicas by number. Only vllmx's router uses what replicas announce."""

    name: str
    listens: bool

    def choose(self, number: int, request: Request, now_s: float) -> int:
        """The replica of the request of this number, which is sent there."""
        ...

    def finished(self, number: int) -> None: ...

    def announced(
        self,
        replica: int,
        changes: tuple[Sequence[bytes], Sequence[bytes]],
        load: ReplicaLoad,
        now_s: float,
    ) -> None: ...


class LeastSeconds:
    """`vllmx_engine.replicas.router`, as `--replicas` uses it."""

    name, listens = "vllmx", True

    def __init__(self, num_replicas: int) -> None:
        self._router = Router(BLOCK_TOKENS)
        for replica in range(num_replicas):
            self._router.add(replica)

    def choose(self, number: int, request: Request, now_s: float) -> int:
        choice = self._router.choose(
            request.digests[: request.num_blocks], request.num_tokens, request.session, now_s=now_s
        )
        self._router.started(str(number), choice)
        return choice.replica

    def finished(self, number: int) -> None:
        self._router.finished(str(number))

    def announced(
        self,
        replica: int,
        changes: tuple[Sequence[bytes], Sequence[bytes]],
        load: ReplicaLoad,
        now_s: float,
    ) -> None:
        filed, evicted = changes
        self._router.filed(replica, filed)
        self._router.evicted(replica, evicted)
        self._router.load(replica, load, now_s)


class _Counting:
    """A policy that knows only how many requests it has sent where."""

    name, listens = "", False

    def __init__(self, num_replicas: int) -> None:
        self._counts = np.zeros(num_replicas, int)
        self._sent: dict[int, int] = {}

    def choose(self, number: int, request: Request, now_s: float) -> int:
        replica = self._pick(number, request)
        self._counts[replica] += 1
        self._sent[number] = replica
        return replica

    def finished(self, number: int) -> None:
        self._counts[self._sent.pop(number)] -= 1

    def announced(self, *_: object) -> None:
        raise AssertionError("it does not listen")

    def _pick(self, number: int, request: Request) -> int:
        raise NotImplementedError


class RoundRobin(_Counting):
    """Takes replicas in turn."""

    name = "round robin"

    def _pick(self, number: int, request: Request) -> int:
        return number % len(self._counts)


class SessionHash(_Counting):
    """Chooses by the session, as balancers with sticky sessions do; without one in turn."""

    name = "session hash"

    def _pick(self, number: int, request: Request) -> int:
        text = request.session.encode()
        return (crc32(text) if text else number) % len(self._counts)


class HistoryTree(_Counting):
    """The longest prefix among those that the router itself has sent somewhere, unless loads are
    too unequal: the idea and the thresholds of the routers of SGLang and vLLM."""

    name = "history tree"
    MATCH, MOST_MORE, MOST_TIMES = 0.3, 64, 1.5

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._sent_to: dict[bytes, int] = {}
        """Digest -> the replica that such a prompt was sent to last."""

    def _pick(self, number: int, request: Request) -> int:
        counts, least = self._counts, int(self._counts.argmin())
        prompt = request.digests[: request.num_blocks]
        most, fewest = int(counts.max()), int(counts[least])
        if most - fewest > self.MOST_MORE and most > self.MOST_TIMES * fewest:
            replica = least
        else:
            depth, replica = 0, least
            for digest in prompt:
                found = self._sent_to.get(digest)
                if found is None:
                    break
                depth, replica = depth + 1, found
            if depth <= self.MATCH * len(prompt):
                replica = least
        for digest in prompt:
            self._sent_to[digest] = replica
        return replica


POLICIES = (LeastSeconds, HistoryTree, SessionHash, RoundRobin)
