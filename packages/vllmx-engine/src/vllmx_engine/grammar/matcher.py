"""Compiled grammars and their state in an answer: the tokens that may come next.

An `LLMatcher` of llguidance never raises: it falls into a state of error, which this module turns
into `GrammarError`.

The answers of a grammar share its lexer: the states of its regular expressions that any of them has
met. The first error inside the lexer breaks it for all of them. `Matcher` then compiles the
grammar again and replays its tokens. The answer that met the error goes on with those that need
more fuel for a mask, on a lexer of theirs; it ends only if it fails on an unused one of these.
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import GrammarError, GrammarLimitError, VllmxError
from vllmx_core.plan import U32
from vllmx_core.records import MutableRecord

from vllmx_engine.grammar.vocabulary import Trie

LLMatcher = Any
"""llguidance.LLMatcher; the library is imported at the first grammar."""
MAX_STEP_ITEMS = 200_000
"""Fuel of one mask: Earley items, some 20,000 a ms."""
MAX_ROW_ITEMS = 10_000
"""Ways that a grammar may go on at one place; the library's 2,000 hold 400 optional properties."""
MAX_STEP_LEXER_FUEL = 100_000
"""Fuel of one mask: derivatives of regular expressions, some 14,000 a ms; half the library's."""
MOST_LEXER_FUEL = 500_000
"""The same for answers that have run out of that: some 36 ms, which only they wait for."""
MAX_LEXER_STATES = 250_000
"""States of a lexer, some 400 bytes each, whichever answers met them; as the library has it."""
_TRIAL_TOKENS = 24
_TRIALS = 2
QUICK_S = 0.0005
"""Processor time that masks of nearly all grammars stay far below: some tens of microseconds, and
a quarter of a millisecond where the machine is slow."""
_DOUBTED_MASKS = 1000
_DEAD_END = "NoExtensionBias"
"""The library's message for a grammar that neither ends nor goes on."""
_REFUSED = "doesn't satisfy the grammar"
"""The library's message for a token that may not come; any other message is a limit."""


class LexerLostError(GrammarError):
    """An error may have spoiled the lexer that this answer shares with others: see
    `Matcher.mend_mask`."""


class MaskPace:
    """The time that masks of a grammar take, as all its answers have measured."""

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


class _Lexer(MutableRecord):
    """A lexer with the answers that share it."""

    base: LLMatcher
    """A matcher without tokens, to be copied."""
    fuel: int
    """The work that one mask may take."""
    is_lost: bool = False
    """An answer met an error inside it, so all that share it will."""


class CompiledGrammar:
    """A grammar and the mask of its first token.

    Raises (constructor): GrammarError for one that cannot be followed.
    """

    def __init__(self, text: str, trie: Trie, vocab_size: int) -> None:
        self._text, self._trie = text, trie
        self.num_words = (trie.vocab_size + 31) // 32
        self._renewing = threading.Lock()
        self._fuel = MAX_STEP_LEXER_FUEL
        self._shared = {self._fuel: self.new_lexer(self._fuel)}
        """The lexers of new answers and of those that need more, by their fuel."""
        self.first_mask: U32 = np.zeros((vocab_size + 31) // 32, np.uint32)
        try:
            self.start().fill_mask(self.first_mask)
            times = sorted(time_s for seed in range(_TRIALS) for time_s in self._try(seed))
        except LexerLostError as error:
            raise GrammarError(_refusal(error.message)) from None
        self.repeated_mask_s = times[-2:][0]
        """Processor time that more than one mask takes of some answers that are drawn at random: a
        single one may be the machine's."""
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

    def start(self) -> Matcher:
        """The state of a new answer."""
        return Matcher(self, self._shared[self._fuel])

    def new_lexer(self, fuel: int) -> _Lexer:
        """Compiles the grammar. Raises GrammarError."""
        import llguidance

        limits = llguidance.LLParserLimits(
            step_max_items=MAX_STEP_ITEMS,
            max_items_in_row=MAX_ROW_ITEMS,
            step_lexer_fuel=fuel,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        base = llguidance.LLMatcher(self._trie, self._text, log_level=0, limits=limits)
        if base.is_error():
            raise GrammarError(_refusal(base.get_error()))
        return _Lexer(base, fuel)

    def shared_lexer(self, fuel: int, tried: _Lexer | None = None) -> _Lexer:
        """The lexer that answers share. Where it is lost, `tried` replaces it, else a new one."""
        with self._renewing:
            shared = self._shared.get(fuel)
            if shared is None or shared.is_lost:
                shared = self._shared[fuel] = tried or self.new_lexer(fuel)
            return shared


class Matcher:
    """A grammar's state behind some tokens of an answer, by llguidance."""

    def __init__(self, grammar: CompiledGrammar, lexer: _Lexer) -> None:
        self._grammar = grammar
        self._lexer = lexer
        self._matcher = lexer.base.deep_copy()
        self._tokens = array("i")
        self._is_lost = False
        """The matcher follows a lost lexer, and may lack the last tokens."""
        self._is_suspect = False
        """The lexer is lost by an error of this answer."""
        self._reason = ""
        """The library's message."""
        self._target: U32 | None = None
        """The array of the last mask, which usually has the next one too: to ask numpy for its
        address takes a fifth of a mask's time."""
        self._address = 0

    @property
    def is_accepting(self) -> bool:
        """The answer may end here."""
        return not self._is_lost and bool(self._matcher.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """The answer can only end here."""
        return not self._is_lost and bool(self._matcher.is_stopped())

    def fill_mask(self, mask: U32) -> None:
        """(W,) bit (id & 31) of word id >> 5 set: the token may come next; where the answer may
        end, so may each end of sequence.

        Raises LexerLostError where only `mend_mask` can make the mask.
        """
        num_words = self._grammar.num_words
        if self._is_lost:
            raise LexerLostError(self._reason)
        if mask is self._target:
            self._matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        elif mask.size == num_words and mask.flags.c_contiguous:
            self._target, self._address = mask, mask.ctypes.data
            self._matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        else:  # an end of sequence of the library's own needs one word more
            wide = np.zeros(num_words, np.uint32)
            self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
            mask[:] = wide[: mask.size]
        if self._matcher.is_error():
            self._fail()

    def mend_mask(self, mask: U32) -> None:
        """`fill_mask` after LexerLostError. Compiles the grammar again and replays the answer's
        tokens, which takes as long as that does.

        Raises:
            GrammarLimitError: the mask takes too much work, on a new lexer too.
            GrammarError: a token of the answer may not come.
        """
        while self._is_lost:
            try:
                if self._is_suspect:
                    self._fill_alone(mask)
                else:
                    self._follow(self._grammar.shared_lexer(self._lexer.fuel))
                    self.fill_mask(mask)
            except LexerLostError:
                continue  # others share the new lexer already, and one of them lost it

    def _fill_alone(self, mask: U32) -> None:
        """Makes the mask with an unused lexer, so an error is this answer's own."""
        lexer = self._grammar.new_lexer(MOST_LEXER_FUEL)
        try:
            self._follow(lexer)
            self.fill_mask(mask)
        except LexerLostError as error:
            raise _own_error(error.message) from None
        self._is_suspect = False
        shared = self._grammar.shared_lexer(MOST_LEXER_FUEL, lexer)
        if shared is not lexer:  # a lexer for each such answer would take too much memory
            self._follow(shared)

    def _follow(self, lexer: _Lexer) -> None:
        """Replays the answer's tokens on another lexer. Raises LexerLostError."""
        self._lexer, self._matcher, self._is_lost = lexer, lexer.base.deep_copy(), False
        for token in self._tokens:
            if not self._matcher.consume_token(token):
                self._fail()

    def consume(self, token: int) -> None:
        """Goes on by one token. Where the lexer is lost, or the token may not come next,
        `is_stopped` stays false, and the next mask tells."""
        self._tokens.append(token)
        if not self._is_lost and not self._matcher.consume_token(token):
            with suppress(LexerLostError):
                self._fail()

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back. Raises GrammarError."""
        if num_tokens:
            del self._tokens[-num_tokens:]
        if not self._is_lost and not self._matcher.rollback(num_tokens):
            self._fail()

    def num_allowed(self, tokens: list[int]) -> int:
        """Returns how many of the first tokens may come next, one behind the other, before the
        answer can only end."""
        if self._is_lost:
            return 0
        allowed = tokens[: self._matcher.validate_tokens(tokens)]
        trial = self._matcher.deep_copy() if allowed else self._matcher
        for place, token in enumerate(allowed):
            if not trial.consume_token(token) or trial.is_stopped():
                return place
        return len(allowed)

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in the form that the tokenizer would give their text."""
        ids: list[int] = [] if self._is_lost else self._matcher.compute_ff_tokens()
        if ids and not all(map(self._matcher.deep_copy().consume_token, ids)):
            return []  # of a lost lexer the library tells wrong ones, but takes none
        return ids

    def _fail(self) -> NoReturn:
        """Raises LexerLostError. The library does not say which answer broke the lexer: on a broken
        one even an allowed token is refused."""
        self._reason = first_lines(self._matcher.get_error())
        self._is_lost, self._is_suspect = True, not self._lexer.is_lost
        self._lexer.is_lost = True
        raise LexerLostError(self._reason)


def _refusal(text: str) -> str:
    reason = "no text satisfies it" if _DEAD_END in text else first_lines(text)
    return f"the grammar cannot be followed: {reason}"


def _own_error(reason: str) -> VllmxError:
    if _REFUSED in reason:
        return GrammarError(_refusal(reason))
    return GrammarLimitError(
        f"the grammar takes more work for a token of this answer than is allowed ({reason}): try"
        " again, or simplify it (fewer patterns, choices or repetitions)"
    )


def first_lines(text: str, limit: int = 400) -> str:
    """The part of the library's message that is meant for users: its dumps of states come after."""
    lines = text.split("\n<state>")[0].strip().splitlines()
    return " ".join(line.strip() for line in lines)[:limit]


def allowed_ids(mask: U32) -> npt.NDArray[np.intp]:
    """The ids whose bits are set, in an array: of a free text nearly all of the vocabulary is, and
    a list of them takes longer than the mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
