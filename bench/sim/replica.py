"""A replica between events: its queue, its rows and its cached blocks, in simulated time.

Times are those of a measured machine (`Machine`). Steps are not simulated one by one: between two
events the rows and the prompt that is computed advance at constant rates.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from traces import BLOCK_TOKENS, Request
from vllmx_engine.replicas.router import ReplicaLoad

_END_WEIGHT = 0.3


@dataclass(frozen=True)
class Machine:
    """Measured costs.

    Attributes:
        token_s: seconds of a prompt's token.
        prompts: (tokens of a prompt, seconds from the call to the first token) with all that a
            step, frontend and messages add; each further token takes `token_s`.
        steps: (rows, seconds of a step that decodes them).
        stretches: (tokens of a prompt, seconds that a second of prefill takes while others
            decode). Chunks are sized to double a step (`--target-itl auto`).
    """

    token_s: float
    steps: tuple[tuple[int, float], ...]
    num_rows: int
    num_blocks: int
    stretches: tuple[tuple[int, float], ...] = ((1, 2.0),)
    prompts: tuple[tuple[int, float], ...] = ((0, 0.0),)

    def step_s(self, rows: int) -> float:
        """Seconds of a step that decodes so many rows."""
        counts, seconds = zip(*self.steps, strict=True)
        return float(np.interp(rows, counts, seconds))

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds of a prompt alone."""
        counts, seconds = zip(*self.prompts, strict=True)
        more = max(0, num_tokens - self.prompts[-1][0])
        return float(np.interp(num_tokens, counts, seconds)) + more * self.token_s

    def stretch(self, num_tokens: int) -> float:
        """See `stretches`."""
        counts, stretches = zip(*self.stretches, strict=True)
        return float(np.interp(num_tokens, counts, stretches))


QWEN3_CPU = Machine(
    token_s=1 / 914,
    steps=((1, 0.0287), (8, 0.039), (32, 0.1155)),
    num_rows=32,
    num_blocks=6000,
)
"""Qwen3-0.6B in BF16 on two cores: 914 tokens/s of a prompt with AMX; 34.9, 205 and 277 tokens/s of
1, 8 and 32 rows on machine A of docs/benchmarks.md. 6,000 blocks take 11 GB."""


@dataclass(slots=True, eq=False)
class Running:
    """A request at a replica, with the tokens that its prompt still needs."""

    request: Request
    number: int
    num_hit: int = 0
    left_s: float = 0.0
    stretch: float = 1.0
    first_s: float = 0.0


class Replica:
    """Advances to the time of each event that concerns it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.steps_s = [0.0] + [machine.step_s(rows) for rows in range(1, machine.num_rows + 1)]
        self.waiting: deque[Running] = deque()
        self.prompt: Running | None = None
        self.rows: list[tuple[float, int, Running]] = []
        """(the count of `tokens` at which it ends, number, request), a heap."""
        self.tokens = 0.0
        """Tokens that a row has decoded which has been there from the start."""
        self.now_s = 0.0
        self.num_owned = 0
        self.cached: OrderedDict[bytes, None] = OrderedDict()
        self.filed: list[bytes] = []
        self.evicted: list[bytes] = []
        self.num_taken = 0
        self.queued_s = 0.0
        self.turn_s, self.ended_s = 0.0, 0.0

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.rows) + (self.prompt is not None)

    def add(self, running: Running, now_s: float) -> None:
        """Takes a request."""
        self.advance(now_s)
        self.num_taken += 1
        running.num_hit = self._hit(running.request)
        running.left_s = self._needed_s(running)
        self.queued_s += running.left_s
        self.waiting.append(running)
        self._admit()

    def advance(self, now_s: float) -> None:
        """Goes on to a time, up to which nothing ends."""
        passed_s, self.now_s = now_s - self.now_s, now_s
        if self.prompt is not None:
            self.prompt.left_s -= passed_s / self._stretch()
        if self.rows:
            self.tokens += passed_s / self._token_s()

    def next_s(self) -> float:
        """Returns the time at which something ends."""
        ends_s = math.inf
        if self.prompt is not None:
            ends_s = self.now_s + max(self.prompt.left_s, 0.0) * self._stretch()
        if self.rows:
            rest = max(self.rows[0][0] - self.tokens, 0.0)
            ends_s = min(ends_s, self.now_s + rest * self._token_s())
        return ends_s

    def end(self, now_s: float) -> tuple[Running | None, Running | None]:
        """Goes on to `next_s`: returns the request whose prompt, and the one that has ended."""
        self.advance(now_s)
        prompt, ended = self.prompt, None
        if prompt is not None and prompt.left_s <= 1e-9:
            self.prompt = None
            prompt.first_s = now_s
            self._file(prompt.request.digests[: prompt.request.num_blocks])
            heapq.heappush(
                self.rows, (self.tokens + prompt.request.num_output - 1, prompt.number, prompt)
            )
        else:
            prompt = None
        if self.rows and self.rows[0][0] <= self.tokens + 1e-9:
            _, _, ended = heapq.heappop(self.rows)
            self.num_owned -= _blocks(ended.request)
            self._file(ended.request.digests)
            each_s, self.ended_s = now_s - self.ended_s, now_s
            self.turn_s += (_END_WEIGHT if self.turn_s else 1.0) * (each_s - self.turn_s)
        self._admit()
        return prompt, ended

    def load(self) -> ReplicaLoad:
        """Returns the report to routers."""
        machine, decoding = self.machine, len(self.rows)
        running = decoding + (self.prompt is not None)
        own_s = self.prompt.left_s if self.prompt is not None else 0.0
        row_s = 0.0
        if decoding:
            more = min(decoding + 1, machine.num_rows)
            row_s = self.steps_s[more] - self.steps_s[decoding]
        return ReplicaLoad(
            num_taken=self.num_taken,
            num_running=running,
            num_waiting=len(self.waiting),
            queued_s=self.queued_s + own_s,
            token_s=machine.token_s,
            stretch=machine.stretches[-1][1] if decoding else 1.0,
            row_s=row_s,
            free_rows=machine.num_rows - running,
            free_blocks=machine.num_blocks - self.num_owned,
            turn_s=max(self.turn_s, self.now_s - self.ended_s) if running else self.turn_s,
            turn_blocks=self.num_owned / running if running else 0.0,
        )

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Blocks filed and evicted since the last call."""
        found = self.filed, self.evicted
        self.filed, self.evicted = [], []
        return found

    # --- inside -----------------------------------------------------------------------------------
    def _stretch(self) -> float:
        return self.prompt.stretch if self.rows and self.prompt is not None else 1.0

    def _token_s(self) -> float:
        """Seconds of a step."""
        step_s = self.steps_s[len(self.rows)]
        if self.prompt is None:
            return step_s
        return step_s * self.prompt.stretch / (self.prompt.stretch - 1.0)

    def _admit(self) -> None:
        """Begins the next prompt where there is a row, and blocks, for it."""
        if self.prompt is not None or not self.waiting:
            return
        first = self.waiting[0]
        blocks = _blocks(first.request)
        is_room = self.num_owned + blocks <= self.machine.num_blocks or not self.rows
        if len(self.rows) >= self.machine.num_rows or not is_room:
            return
        self.waiting.popleft()
        self.queued_s = max(0.0, self.queued_s - first.left_s) if self.waiting else 0.0
        self.num_owned += blocks
        first.num_hit = self._hit(first.request)
        first.left_s = self._needed_s(first)
        first.stretch = self.machine.stretch(self._new_tokens(first))
        self.prompt = first

    def _needed_s(self, running: Running) -> float:
        return self.machine.prompt_s(self._new_tokens(running))

    def _new_tokens(self, running: Running) -> int:
        cached = min(running.num_hit * BLOCK_TOKENS, running.request.num_tokens - 1)
        return running.request.num_tokens - cached

    def _hit(self, request: Request) -> int:
        count, cached = 0, self.cached
        for digest in request.digests[: request.num_blocks]:
            if digest not in cached:
                break
            count += 1
        return count

    def _file(self, digests: Sequence[bytes]) -> None:
        """Files blocks; the last ones of a chain are evicted before the first."""
        cached = self.cached
        for digest in reversed(digests):
            if digest in cached:
                cached.move_to_end(digest)
            else:
                cached[digest] = None
                self.filed.append(digest)
        while len(cached) > self.machine.num_blocks:
            self.evicted.append(cached.popitem(last=False)[0])


def _blocks(request: Request) -> int:
    return -(-(request.num_tokens + request.num_output) // BLOCK_TOKENS)
