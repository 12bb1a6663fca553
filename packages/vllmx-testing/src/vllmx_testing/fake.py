"""A backend without model math whose sampled ids prove that the schedule was right.

Its KV "cache" is one 64-bit word for each slot, written through `StepPlan.slots` and read back
through `block_tables` and `context_len`; its recurrent states are one word a sequence. Each id is a
hash of what the row's pages hold (in a cache group with a window, those that the row's newest token
sees) and of its state, so a wrong slot, a stale or stolen block or state, one that was freed too
early, a bad prefix hit, a lost chunk or a mixed-up row changes the output, and `expected_tokens`
says what it should have been.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from vllmx_core.backend import LoadedInfo, LoadOptions, MovableCache
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.cache.groups import blocks_of, cache_layout, longest_sequence
from vllmx_core.errors import CapacityError
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.plan import F32, I32, U64, LogprobRows, SamplingRows, StepPlan, StepResult
from vllmx_core.weights.part import WeightSource

from vllmx_testing.fake_memory import FakeMemory
from vllmx_testing.fake_rules import (
    EOS_SALT,
    POSITION_FACTOR,
    FakeRules,
    allowed_ids,
    biases,
    count_digests,
    draw_digests,
    expected_rank,
    expected_tokens,
    mix,
    restrict,
)
from vllmx_testing.plan_check import check_plan

__all__ = [
    "FakeBackend",
    "FakeError",
    "FakeLoadedModel",
    "FakeRules",
    "FakeStep",
    "expected_rank",
    "expected_tokens",
]


class FakeError(RuntimeError):
    """The failure that a test ordered: not a VllmxError, as a device's would not be."""


class FakeStep:
    """A `ForwardStep` and its `StepHandle`: the ids are known at once, `result` waits for the
    simulated device."""

    def __init__(
        self, owner: FakeLoadedModel, fed: I32, history: U64, elapsed_s: float, done_at: float
    ) -> None:
        self._owner = owner
        self._fed, self._history = fed, history
        self._result = StepResult(np.zeros(0, np.int32), elapsed_s=elapsed_s)
        self._done_at = done_at
        self.failure: FakeError | None = None
        self.hang_s = 0.0

    def sample(self, rows: SamplingRows) -> FakeStep:
        with self._owner.in_flight.sampling(self, rows):
            self.draw(rows)
        return self

    def draw(self, rows: SamplingRows) -> None:
        """Finds the ids."""
        self._result.ids = self._owner.sampled(rows, self._fed, self._history)
        self._result.logprobs = self._owner.logprobs(rows, self._history, self._result.ids)
        if rows.whole is not None:
            self._result.logits = self._owner.logits(self._history[rows.whole])

    def result(self) -> StepResult:
        """Call once, in the order of the steps. Raises FakeError where the test ordered it."""
        if self.hang_s > 0:  # sleeping for 0 s takes 60 us
            time.sleep(self.hang_s)
        self._owner.in_flight.check_oldest(self)
        self._owner.in_flight.remove_oldest()
        remaining = self._done_at - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        if self.failure is not None:
            raise self.failure
        return self._result


class FakeLoadedModel:
    """A `LoadedModel`; see the module's docstring.

    Args:
        rules: which ids come out.
        num_blocks, block_size: of the KV cache.
        max_num_seqs, max_tokens, max_logit_rows: limits of a step, as in `LoadedInfo`.
        num_stages: above 1 so many steps are in flight, and no token refers to the step before.
        num_state_slots: where the rules have states; None: two for each sequence and two more.
        step_s, token_s: simulated device time of a step and of each of its tokens.
        fail_steps: numbers of steps (from 0) whose `result` raises FakeError.
        hang_steps, hang_s: numbers of steps whose `result` comes so many seconds late, as if a
            kernel had no end.
        verify_pages: read every page of every row; False reads the newest one alone, which is
            cheaper, finds less and gives the same ids.
        strict: also check that each plan keeps the rules of `vllmx_core.plan`.
    """

    def __init__(
        self,
        rules: FakeRules | None = None,
        *,
        num_blocks: int = 1024,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_tokens: int = 2048,
        max_logit_rows: int = 2048,
        num_stages: int = 1,
        num_state_slots: int | None = None,
        step_s: float = 0.0,
        token_s: float = 0.0,
        fail_steps: Collection[int] = (),
        hang_steps: Collection[int] = (),
        hang_s: float = 3600.0,
        verify_pages: bool = True,
        strict: bool = True,
    ) -> None:
        self.rules = rules or FakeRules()
        self.fail_steps = frozenset(fail_steps)
        self.hang_steps, self.hang_s = frozenset(hang_steps), hang_s
        self.num_steps = self.num_forwards = 0
        self.num_tokens = 0
        self._step_s, self._token_s = step_s, token_s
        self._strict = strict
        slots = 2 * max_num_seqs + 2 if num_state_slots is None else num_state_slots
        self._memory = FakeMemory(
            self.rules.windows,
            (num_blocks, block_size),
            slots if self.rules.has_states else 0,
            verify_pages=verify_pages,
        )
        self.shifts: I32 = np.zeros(1, np.int32)
        """The number that is added to a row's tokens before they enter the cache, by the slot of
        its adapter; the last entry is for rows without one."""
        self._last_ids: I32 = np.zeros(0, np.int32)
        self._busy_until = 0.0
        self._info = LoadedInfo(
            backend="fake",
            device="none",
            dtype="f32",
            kv_cache_dtype="u64",
            block_size=block_size,
            num_kv_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_logit_rows=max_logit_rows,
            weight_bytes=0,
            kv_cache_bytes=self._memory.pages.nbytes,
            details={"verify_pages": verify_pages, "strict": strict},
            cache_windows=self.rules.windows,
            num_stages=num_stages,
            num_state_slots=self._memory.states.size,
            state_slot_bytes=self._memory.states.itemsize * self.rules.has_states,
            keeps_states_after=True,
        )
        self.in_flight: InFlight[FakeStep] = InFlight(self._info)

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`."""
        return self._memory.movable(lambda: None)

    @property
    def closed(self) -> bool:
        return self.in_flight.closed

    def step(self, plan: StepPlan, rows: SamplingRows) -> FakeStep:
        """Raises AssertionError for a third step in flight or a plan that breaks the contract."""
        self.in_flight.check_room(plan)
        assert rows.num_rows == plan.num_logit_rows, (rows.num_rows, plan.num_logit_rows)
        step = self._enqueue(plan)
        step.draw(rows)
        self.in_flight.add(step)
        return step

    def forward(self, plan: StepPlan) -> FakeStep:
        self.in_flight.check_room(plan)
        step = self._enqueue(plan)
        self.in_flight.add_unsampled(step, plan)
        self.num_forwards += 1
        return step

    def close(self) -> None:
        """Frees the cache."""
        self.in_flight.close()

    def _enqueue(self, plan: StepPlan) -> FakeStep:
        if self._strict:
            num_last = self._last_ids.shape[0] if self._info.num_stages == 1 else 0
            check_plan(plan, self._info, self.rules.vocab_size, num_last)
        tokens = self._resolve(plan.tokens)
        entered = tokens if plan.adapters is None else tokens + self.shifts[plan.adapted]
        history = self._memory.pass_through(plan, entered)
        elapsed_s = self._step_s + plan.num_tokens * self._token_s
        self._busy_until = max(time.perf_counter(), self._busy_until) + elapsed_s
        step = FakeStep(self, tokens[plan.logit_rows], history, elapsed_s, self._busy_until)
        if self.num_steps in self.fail_steps:
            step.failure = FakeError(f"step {self.num_steps} fails as the test ordered")
        if self.num_steps in self.hang_steps:
            step.hang_s = self.hang_s
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        return step

    def _resolve(self, tokens: I32) -> I32:
        """Replaces references to the step before; one to a broken row (-1) becomes id 0."""
        if not (tokens < 0).any():
            return tokens.copy()
        index = np.where(tokens < 0, -tokens - 1, 0)
        return np.where(tokens < 0, np.maximum(self._last_ids[index], 0), tokens)

    def sampled(self, rows: SamplingRows, fed: I32, history: U64) -> I32:
        """(L,) ids after the tokens `fed` and what came before them; the next step may refer to
        them."""
        value = mix(history + count_digests(rows, fed))
        position = rows.position.astype(np.uint64)
        draws = draw_digests(rows)
        drawn = mix((value ^ draws) + position * np.uint64(POSITION_FACTOR))
        rules = self.rules
        ids = (np.where(draws != 0, drawn, value) % np.uint64(rules.vocab_size)).astype(np.int32)
        if rules.eos_id is not None and rules.eos_every is not None:
            ids[rows.position % rules.eos_every == 0] = rules.eos_id
        if rules.eos_id is not None and rules.eos_rate is not None:
            ids[mix(history ^ np.uint64(EOS_SALT)) % np.uint64(rules.eos_rate) == 0] = rules.eos_id
        if rows.mask_index is not None or rows.edits is not None:
            for i in range(rows.num_rows):
                ids[i] = restrict(
                    int(ids[i]), rules.vocab_size, allowed_ids(rows, i), biases(rows, i)
                )
        ids = np.where(rows.target >= 0, rows.target, ids)
        if rules.nan_token is not None:
            ids[fed == rules.nan_token] = -1
        self._last_ids = ids.copy()
        return ids

    def logprobs(self, rows: SamplingRows, history: U64, ids: I32) -> LogprobRows | None:
        """Rank 1 is the greedy id, the others follow cyclically, rank r has -r / 4. What nobody
        asked for: -inf, rank 0, id -1."""
        if rows.max_logprobs < 0:
            return None
        vocab_size, width = self.rules.vocab_size, rows.max_logprobs
        first = self._greedy(history)  # (L,)
        rank = (ids - first) % vocab_size + 1
        offsets = np.arange(width)
        wanted = (offsets < rows.num_logprobs[:, None]) & (ids >= 0)[:, None]  # (L, K)
        top_ids = np.where(wanted, (first[:, None] + offsets) % vocab_size, -1)
        top = np.where(wanted, -(offsets + 1) / 4, -np.inf)
        asked = (rows.num_logprobs >= 0) & (ids >= 0)  # (L,)
        return LogprobRows(
            np.where(asked, rank / -4, -np.inf).astype(np.float32),
            np.where(asked, rank, 0).astype(np.int32),
            top_ids.astype(np.int32),
            top.astype(np.float32),
        )

    def logits(self, history: U64) -> F32:
        """Logits whose log-softmax `logprobs` tells, as if the sum of all were 1."""
        ids, first = np.arange(self.rules.vocab_size), self._greedy(history)
        rank = (ids - first[:, None]) % self.rules.vocab_size + 1
        return (rank / -4).astype(np.float32)

    def _greedy(self, history: U64) -> npt.NDArray[np.int64]:
        return (mix(history) % np.uint64(self.rules.vocab_size)).astype(np.int64)


class FakeBackend:
    """The backend "fake": loads any model without reading a weight. Rules and simulated times come
    from the model when it is a `FakeModel` (`vllmx_testing.fake_checkpoint`)."""

    @property
    def name(self) -> str:
        return "fake"

    def supports(self, op: Op) -> bool:
        """Any op: it computes none."""
        return True

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> FakeLoadedModel:
        """Raises CapacityError when one sequence of max_model_len does not fit."""
        rules = getattr(model, "rules", FakeRules(vocab_size=model.shape.vocab_size))
        if options.group_caches:
            rules = replace(rules, windows=cache_layout(model.shape, grouped=True).windows)
        return FakeLoadedModel(
            rules,
            num_blocks=_num_blocks(options, rules.windows),
            block_size=options.block_size,
            max_num_seqs=options.num_seqs,
            max_tokens=options.max_num_batched_tokens,
            max_logit_rows=options.max_num_batched_tokens,
            num_state_slots=options.num_state_slots,
            **getattr(model, "behaviour", {}),
        )

    def environment(self) -> dict[str, str]:
        return {"fake": "no model math"}


def _num_blocks(options: LoadOptions, windows: tuple[int | None, ...]) -> int:
    """The number that `num_kv_blocks` gives, without a device's memory."""
    size, step = options.block_size, options.max_num_batched_tokens
    needed = blocks_of(windows, options.max_model_len, size, step)
    blocks = options.num_kv_blocks
    if blocks is None and options.kv_cache_memory_bytes is not None:
        blocks = options.kv_cache_memory_bytes // (8 * size)
    if blocks is None:
        blocks = min(needed * options.num_seqs, max(needed, 1 << 14))
    if blocks < (len(windows) if options.shrink_to_fit else needed):
        fits = longest_sequence(windows, blocks, size, step, options.max_model_len)
        raise CapacityError(
            f"{blocks} KV blocks of {size} tokens hold {fits} tokens, but max_model_len is"
            f" {options.max_model_len}: lower --max-model-len to {fits} or raise --num-kv-blocks to"
            f" {needed}",
            param="num_kv_blocks",
        )
    return blocks
