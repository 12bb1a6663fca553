"""Compiled grammars and their state in an answer: which tokens may come next.

The protocol is what the core needs; llguidance stands behind it. An `LLMatcher` never raises: it
falls into a state of error, which this module turns into `GrammarError`.
"""

from __future__ import annotations

import random
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import GrammarError
from vllmx_core.plan import U32

from vllmx_engine.grammar.vocabulary import Trie

LLMatcher = Any
"""llguidance.LLMatcher; the library is imported at the first grammar."""
MAX_STEP_ITEMS = 200_000
"""Fuel of one mask: Earley items, some 20,000 a ms."""
MAX_ROW_ITEMS = 10_000
"""Ways that a grammar may go on at one place; the library's 2,000 hold 400 optional properties."""
MAX_STEP_LEXER_FUEL = 100_000
"""Fuel of one mask: derivatives of regular expressions, some 14,000 a ms; half the library's."""
_TRIAL_TOKENS = 24
_TRIALS = 2
QUICK_S = 0.0005
"""Processor time that masks of nearly all grammars stay far below: some tens of microseconds, and
a quarter of a millisecond where the machine is slow."""
_DOUBTED_MASKS = 1000
_DEAD_END = "NoExtensionBias"
"""What the library says where a grammar neither ends nor goes on."""


class Matcher(Protocol):
    """A grammar's state behind some tokens of an answer."""

    @property
    def is_accepting(self) -> bool:
        """The answer may end here."""
        ...

    @property
    def is_stopped(self) -> bool:
        """The answer can only end here."""
        ...

    def fill_mask(self, mask: U32) -> None:
        """(W,) bit (id & 31) of word id >> 5 set: the token may come next; where the answer may
        end, so may each end of sequence. Raises GrammarError when that takes too much work."""
        ...

    def consume(self, token: int) -> None:
        """Goes on by one token. Raises GrammarError for one that may not come next."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in the form that the tokenizer would give their text."""
        ...


class MaskPace:
    """How long the masks of a grammar take, as all its answers have seen."""

    def __init__(self) -> None:
        self._num_doubted = 0

    @property
    def is_quick(self) -> bool:
        """The next mask is likely to be made in no time: the last thousand were."""
        return self._num_doubted == 0

    def observe(self, seconds: float) -> None:
        """Learns from a mask, on whatever thread."""
        if seconds > QUICK_S:
            self._num_doubted = _DOUBTED_MASKS
        elif self._num_doubted:
            self._num_doubted -= 1


class CompiledGrammar:
    """A grammar and the mask of its first token.

    Raises (constructor): GrammarError for one that cannot be followed.
    """

    def __init__(self, text: str, trie: Trie, vocab_size: int) -> None:
        import llguidance

        limits = llguidance.LLParserLimits(
            step_max_items=MAX_STEP_ITEMS,
            max_items_in_row=MAX_ROW_ITEMS,
            step_lexer_fuel=MAX_STEP_LEXER_FUEL,
            verbose_errors=False,
        )
        self._matcher = llguidance.LLMatcher(trie, text, log_level=0, limits=limits)
        _check(self._matcher)
        self._num_words = (trie.vocab_size + 31) // 32
        self.first_mask: U32 = np.zeros((vocab_size + 31) // 32, np.uint32)
        self.start().fill_mask(self.first_mask)
        times = sorted(time_s for seed in range(_TRIALS) for time_s in self._try(seed))
        self.mask_s = times[-1]
        """Processor time that a mask takes, as some answers show that are drawn at random."""
        self.repeated_mask_s = times[-2:][0]
        """Seconds that more than one of their masks takes: a single one may be the machine's."""
        self.pace = MaskPace()
        self.pace.observe(self.repeated_mask_s)

    def _try(self, seed: int) -> list[float]:
        """Times of the masks in such an answer. Raises GrammarError."""
        matcher, mask = self.start(), self.first_mask.copy()
        rng, times = random.Random(seed), []  # noqa: S311 - any answer will do
        for _ in range(_TRIAL_TOKENS):
            started_s = time.thread_time()
            matcher.fill_mask(mask)
            times.append(time.thread_time() - started_s)
            allowed = allowed_ids(mask)
            if matcher.is_stopped or not allowed.size:
                break
            matcher.consume(int(allowed[rng.randrange(allowed.size)]))
        return times

    def start(self) -> GrammarMatcher:
        """The state of a new answer."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_words)


class GrammarMatcher:
    """A `Matcher` by llguidance."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._target: U32 | None = None
        """The array of the last mask, which usually has the next one too: to ask numpy for its
        address takes a fifth of a mask's time."""
        self._address = 0

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_stopped())

    def fill_mask(self, mask: U32) -> None:
        """See `Matcher`."""
        if mask is self._target:
            self._matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        elif mask.size == self._num_words and mask.flags.c_contiguous:
            self._target, self._address = mask, mask.ctypes.data
            self._matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        else:  # an end of sequence of the library's own needs one word more
            wide = np.zeros(self._num_words, np.uint32)
            self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
            mask[:] = wide[: mask.size]
        _check(self._matcher)

    def consume(self, token: int) -> None:
        """See `Matcher`."""
        if not self._matcher.consume_token(token):
            _check(self._matcher)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""
        if not self._matcher.rollback(num_tokens):
            _check(self._matcher)

    def forced_tokens(self) -> list[int]:
        """See `Matcher`."""
        ids: list[int] = self._matcher.compute_ff_tokens()
        return ids


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        text = matcher.get_error()
        reason = "no text satisfies it" if _DEAD_END in text else first_lines(text)
        raise GrammarError(f"the grammar cannot be followed: {reason}")


def first_lines(text: str, limit: int = 400) -> str:
    """The part of the library's message that is meant for users: its dumps of states come after."""
    lines = text.split("\n<state>")[0].strip().splitlines()
    return " ".join(line.strip() for line in lines)[:limit]


def allowed_ids(mask: U32) -> npt.NDArray[np.intp]:
    """The ids whose bits are set, in an array: of a free text nearly all of the vocabulary is, and
    a list of them takes longer than the mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
