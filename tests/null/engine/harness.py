"""An engine core over the fake model that checks itself at every step."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllmx_core.adapters import Adapter, AdapterRoom, LowRank
from vllmx_core.config import EngineConfig
from vllmx_core.model import DraftSpec
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.adapters import AdapterPool, HeldAdapter, StartAdapters
from vllmx_engine.core.drafters import Guess
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.load_drafter import LoadedDrafter
from vllmx_engine.core.sequence import Sequence as LiveSequence
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, TokenLogprobs, is_piece, pack_ids
from vllmx_testing.fake import (
    FakeError,
    FakeLoadedModel,
    FakeRules,
    FakeStep,
    expected_rank,
    expected_tokens,
)

VOCAB_SIZE = 48
EOS = 7
MAX_MODEL_LEN = 64
RULES = FakeRules(vocab_size=VOCAB_SIZE, eos_id=EOS, eos_rate=40)
QUIET = FakeRules(vocab_size=VOCAB_SIZE)
"""Without an end of sequence."""
GREEDY = {"temperature": 0.0}


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


class KnowingDrafter:
    """Drafts what comes, but for a share of the tokens."""

    def __init__(self, harness: Harness, wrong: float) -> None:
        self._harness = harness
        self._wrong = wrong
        self._answers: dict[str, list[int]] = {}
        self._rng = random.Random(0)

    def guess(self, sequence: LiveSequence, most: int) -> Guess:
        name = sequence.request_id
        if name not in self._answers:
            self._answers[name] = self._harness.expected(name)
        answer = self._answers[name]
        known = len(sequence.tokens) - sequence.num_prompt
        ids = [*answer[known:], *range(most)][:most]
        return Guess([self._rng.randrange(VOCAB_SIZE) if self._spoils() else one for one in ids])

    def _spoils(self) -> bool:
        return self._rng.random() < self._wrong

    def ended(self, sequence: LiveSequence) -> None:
        pass


@dataclass
class PlanRecord:
    """What a step was."""

    num_decodes: int
    lengths: list[int]
    num_logit_rows: int


class RecordingModel(FakeLoadedModel):
    """Remembers the shape of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.records: list[PlanRecord] = []
        self.refuse_steps: set[int] = set()
        """Numbers of steps whose launch raises, once."""

    def step(self, plan: StepPlan, rows: SamplingRows) -> FakeStep:
        self._record(plan)
        return super().step(plan, rows)

    def forward(self, plan: StepPlan) -> FakeStep:
        self._record(plan)
        return super().forward(plan)

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        self.shifts[slot] = 0 if adapter is None else int(adapter.modules["w"].a[0, 0])

    def _record(self, plan: StepPlan) -> None:
        lengths = np.diff(plan.query_start)
        decodes = int((plan.tokens[plan.query_start[:-1]][lengths == 1] < 0).sum())
        if self.num_steps in self.refuse_steps:
            self.refuse_steps.remove(self.num_steps)
            raise FakeError("no launch, as the test ordered")
        self.records.append(PlanRecord(decodes, lengths.tolist(), plan.num_logit_rows))


@dataclass
class Harness:
    """Sends requests and keeps what came back.

    Args:
        model: sizes of the KV cache and of a step.
        config: fields of EngineConfig.
    """

    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    rules: FakeRules = RULES
    drafts: tuple[float, int | None] | None = None
    """Drafts of which this share is wrong, of so many tokens; None for these: as many as pay."""
    draft_model: bool = False
    """A second fake model drafts, with pages of its own: it draws the same ids."""
    draft_spec: DraftSpec | None = None
    """The second model reads hidden states; what it draws is rarely right."""
    draft_model_len: int = MAX_MODEL_LEN
    max_model_len: int = MAX_MODEL_LEN
    clock: Callable[[], float] = time.monotonic
    connect: Any = None
    """Makes the connector of `kv_connector`."""
    num_adapters: int = 0
    """Slots for adapters."""

    def __post_init__(self) -> None:
        sizes = {"num_blocks": 64, "block_size": 8, "max_tokens": 32, "max_logit_rows": 32}
        self.loaded = RecordingModel(self.rules, **sizes | self.model)
        whole = replace(self.rules, windows=(None,))
        self.drafter = RecordingModel(whole, **sizes | self.model | {"num_stages": 1})
        self.core = EngineCore(
            self.loaded,
            EngineConfig(**{"max_num_seqs": 8} | self.config),
            max_model_len=self.max_model_len,
            vocab_size=self.rules.vocab_size,
            drafter=LoadedDrafter(
                self.drafter,
                self.draft_model_len,
                shares_pages=False,
                num_ids=self.rules.vocab_size,
                num_own_rows=0
                if self.draft_spec is None
                else self.loaded.info.max_num_batched_tokens,
                drafts=self.draft_spec,
            )
            if self.draft_model
            else None,
            clock=self.clock,
            adapters=self._make_adapters(),
            connect=self.connect,
        )
        self.shifts: dict[str, int] = {}
        """What the adapter of each request adds to its tokens."""
        self._roots: set[bytes] = set()
        self.requests: dict[str, CoreRequest] = {}
        if self.drafts is not None:
            wrong, count = self.drafts
            self.core.draft_with(Drafting(KnowingDrafter(self, wrong), count))
        self.ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.first: dict[str, CoreOutput] = {}
        self.scored: dict[str, list[TokenLogprobs]] = {}
        """Log-probabilities of prompts."""
        self.last: dict[str, CoreOutput] = {}
        self.order: list[str] = []
        """Requests by the arrival of their first output."""
        self.aborted: set[str] = set()
        self.num_faults = 0
        self._last_fault = -4
        known_after = max(1, self.core.limits.num_in_flight - 1)
        none: dict[tuple[int, int], int] = {}
        self._computed = deque([none] * known_after, maxlen=known_after)
        """Tokens of each row, by its epoch too, before each of the last steps: those that were
        launched before the oldest of these are known by now."""

    def _make_adapters(self) -> AdapterPool | None:
        if not self.num_adapters:
            return None
        self.loaded.shifts = np.zeros(self.num_adapters + 1, np.int32)
        files: Any = None
        start = StartAdapters(files, AdapterRoom(self.num_adapters, 8), 64)
        return AdapterPool(self.loaded, start)

    def load_adapter(self, name: str, shift: int) -> None:
        """An adapter that adds this to tokens; it takes the place of another of its name."""
        change = LowRank(np.full((1, 1), shift, np.float32), np.ones((1, 1), np.float32))
        self.core.adapters.add(HeldAdapter.of(name, "", Adapter({"w": change})))

    def add(
        self,
        prompt: Sequence[int] | bytes,
        max_tokens: int = 8,
        *,
        name: str | None = None,
        **fields: Any,
    ) -> str:
        """Sends a request, greedy unless `params` says otherwise; returns its id. A prompt of bytes
        goes as it is."""
        name = name or f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=max_tokens, **GREEDY | fields.pop("params", {}))
        packed = prompt if isinstance(prompt, bytes) else pack_ids(prompt)
        stop_ids = [] if self.rules.eos_id is None else [self.rules.eos_id]
        fields = {"stop_ids": stop_ids, "seed": len(self.requests), **fields}
        request = CoreRequest(
            request_id=name, prompt=packed, params=params, max_tokens=max_tokens, **fields
        )
        self.requests[name] = request
        digest, self.shifts[name] = "", 0
        if request.adapter:
            held = self.core.adapters.find(request.adapter)
            assert held is not None
            digest, self.shifts[name] = held.digest, int(held.adapter.modules["w"].a[0, 0])
        self._roots.add(self.core._scheduler.cache.root(request.cache_salt, digest))
        self.ids[name] = []
        self.logprobs[name] = []
        self.core.add(request)
        return name

    def abort(self, *names: str) -> None:
        """Ends requests."""
        self.aborted.update(name for name in names if name not in self.last)
        self.core.abort(names)
        self.check_blocks()

    def order_fault(self, ahead: int, *, at_launch: bool) -> None:
        """Lets a step soon fail, unless another one near it does: several in a row are the end."""
        number = self.loaded.num_steps + ahead
        if number - self._last_fault > 3:
            self._last_fault = number
            self.num_faults += 1
            if at_launch:
                self.loaded.refuse_steps.add(number)
            else:
                self.loaded.fail_steps |= {number}

    def step(self) -> list[CoreOutput]:
        """One step, with everything that came out of it checked."""
        table = self.core._scheduler.table
        rows = [sequence.row for sequence in self.core._scheduler.running]
        self._computed.append(
            {(row, int(table.epoch[row])): int(table.computed[row]) for row in rows}
        )
        outputs = self.core.step()
        for output in outputs:
            self._take(output)
        self.check_blocks()
        return outputs

    def run(self, limit: int = 3000) -> None:
        """Runs to the end of all requests."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.core.stats()}")

    def _take(self, output: CoreOutput) -> None:
        name = output.request_id
        assert name not in self.aborted, f"{name} was aborted and still sends"
        assert name not in self.last, f"{name} sends after its end"
        if is_piece(output):
            assert name not in self.first, "log-probabilities of a prompt after its first token"
            self.scored.setdefault(name, []).extend(output.prompt_logprobs or [])
            return
        if name not in self.first:
            self.first[name] = output
            self.order.append(name)
        else:
            assert output.prompt_logprobs is None, "prompt_logprobs came twice"
        self.ids[name] += output.ids
        self.logprobs[name] += output.logprobs or []
        if output.finish_reason is not None:
            self.last[name] = output

    # --- what must hold -----------------------------------------------------------------------
    def check_blocks(self) -> None:
        """Every block is free, cached or owned by counted rows; cached chains have no holes."""
        scheduler = self.core._scheduler
        table, pool = scheduler.table, scheduler.pool
        rows = [sequence.row for sequence in scheduler.running]
        owned = [table.owned(row) for row in rows]
        pool.check(np.concatenate([np.zeros(0, np.int32), *owned]))
        assert table.num_owned(rows) == sum(blocks.size for blocks in owned)
        if scheduler.states is not None:
            scheduler.states.check()
            filed = scheduler.states.pool._filed
            assert filed.keys() <= scheduler.cache._places.keys(), "a snapshot outlived its block"
        self._check_cache()
        for row in rows:
            self._check_row(row)
        assert len(scheduler.running) + table.num_free == self.core.limits.max_rows
        assert len(scheduler.live) == len(scheduler.running) + scheduler.num_waiting
        for sequence in scheduler.live.values():
            self._check_found(sequence)
            assert sequence.num_passed <= self.core.limits.max_rows, "passed by too often"

    def _check_cache(self) -> None:
        """Groups without a window have chains without holes, and count who follows whom."""
        cache = self.core._scheduler.cache
        seen: list[int] = []
        for group, window in enumerate(self.core.limits.windows):
            blocks = [places[group] for places in cache._places.values() if places[group] >= 0]
            seen += blocks
            if window is None:
                digests = {cache._entries[block][0] for block in blocks}
                parents = Counter(cache._entries[block][1] for block in blocks)
                assert parents.keys() <= digests | self._roots, "a cached block lost its parent"
                assert cache._children[group] == parents, "children are counted wrongly"
        assert sorted(seen) == sorted(cache._entries), "a block is in two groups, or in none"

    def _check_row(self, row: int) -> None:
        """A row owns what its next token sees, and in a group with a window no block before what
        was seen when its last result came in, but those that have still to be filed."""
        table, size = self.core._scheduler.table, pool_size(self)
        computed, filed = int(table.computed[row]), int(table.num_cached[row])
        for group, window in enumerate(self.core.limits.windows):
            end = int(table.num_blocks[row])
            first = int(table.first[group, row])
            if window is None:
                assert first == 0
            else:
                end -= int(table.num_ahead[row])
                seen = max(0, computed - window + 1) // size
                assert first <= seen, "a block that is still seen was given back"
                before = self._computed[0].get((row, int(table.epoch[row])), 0)
                before -= int(table.waits[row])  # its last token may be taken back
                unseen = max(0, before - window + 1) // size
                if self.core.limits.num_stages == 1:  # else results come later still
                    assert first >= min(filed, unseen), "a block outlived its window"
            assert end * size >= computed, "tokens without a block"

    def _check_found(self, sequence: LiveSequence) -> None:
        """What a waiting sequence remembers of its last look is what a new one finds."""
        look, remembered = self.core._scheduler.prefixes.look, sequence.found
        if remembered is not None:
            sequence.found = None
            anew = look(sequence).all_blocks.tolist()
            sequence.found = remembered
            assert look(sequence).all_blocks.tolist() == anew

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_used_slots == 0
        scheduler = self.core._scheduler
        assert not scheduler.live
        assert not scheduler._waiting._followers._leaders
        assert not scheduler._waiting._followers
        assert not scheduler._dropped
        assert len(scheduler.share) == 0

    def check_outputs(self) -> None:
        """Every request that was not aborted got what it must get, whatever else went on; where
        the device failed, what its requests got before is right."""
        lost = {name for name, last in self.last.items() if last.error_code == "internal_error"}
        for name in self.requests:
            if name in self.aborted or (name in lost and self.num_faults):
                expected = self.expected(name)
                assert self.ids[name] == expected[: len(self.ids[name])], name
            else:
                self.check_output(name)

    def expected(self, name: str) -> list[int]:
        """Ids of a request, by the fake model's definition."""
        request = self.requests[name]
        return expected_tokens(
            request.prompt_ids.tolist(),
            min(request.max_tokens, self.core.limits.max_tokens - len(request.prompt_ids)),
            rules=self.rules,
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
            shift=self.shifts[name],
        )

    def check_output(self, name: str) -> None:
        """Ids, finish reason and log-probabilities of an ended request."""
        request, last = self.requests[name], self.last[name]
        expected, prompt = self.expected(name), request.prompt_ids.tolist()
        if request.params.prompt_logprobs is not None and self.rules.nan_token in prompt:
            assert (last.finish_reason, last.error_code) == ("error", "non_finite_logits")
            return
        told = self.ids[name]
        is_held = request.at_end and last.finish_reason == "error"  # of no use to anybody then
        assert told == (expected[: len(told)] if is_held else expected), name
        room = min(request.max_tokens, self.core.limits.max_tokens - len(prompt))
        if expected and expected[-1] in request.stop_ids:
            assert (last.finish_reason, last.stop_id) == ("stop", expected[-1])
        elif len(expected) == room:
            assert (last.finish_reason, last.stop_id) == ("length", None)
        else:
            is_limited = request.params.allowed_token_ids is not None
            codes = {"non_finite_logits"} | ({"invalid_request"} if is_limited else set())
            assert last.finish_reason == "error"
            assert last.error_code in codes
        wanted, shift = request.params.logprobs, self.shifts[name]
        self._check_logprobs(wanted, prompt, expected, self.logprobs[name], shift)
        if request.params.prompt_logprobs is not None and expected:
            assert self.first[name].prompt_logprobs == []
            got = self.scored.get(name, [])
            wanted = request.params.prompt_logprobs
            self._check_logprobs(wanted, prompt[:1], prompt[1:], got, shift)
        else:
            assert self.first[name].prompt_logprobs is None

    def _check_logprobs(
        self,
        wanted: int | None,
        before: list[int],
        ids: list[int],
        got: list[TokenLogprobs],
        shift: int,
    ) -> None:
        if wanted is None:
            assert got == []
            return
        assert [entry.token for entry in got] == ids
        history = list(before)
        for entry in got:
            assert entry.rank == expected_rank(history, entry.token, self.rules, shift)
            assert entry.logprob == -entry.rank / 4
            assert len(list(entry.ranked())) == wanted
            history.append(entry.token)


def pool_size(harness: Harness) -> int:
    """Tokens of a block."""
    return harness.core.limits.block_size
