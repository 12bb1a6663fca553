"""The core's grammars: compiled on threads of their own, the last ones kept for the next request.

The library compiles without the interpreter lock, so steps go on meanwhile; a request whose grammar
is not there yet waits in the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue

from vllmx_core.errors import GrammarError

from vllmx_engine.core.grammar_rows import GrammarRow, MaskFill
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speech_rules import SpeechRow
from vllmx_engine.core.thought_budget import ThoughtBudget
from vllmx_engine.grammar.matcher import CompiledGrammar
from vllmx_engine.grammar.vocabulary import Trie, make_trie
from vllmx_engine.wire.grammars import Grammar, Vocabulary

MAX_KEPT = 64
"""Compiled grammars that stay for the next request, some 100 kB each."""
_NUM_THREADS = 2
_Made = Future[CompiledGrammar] | MaskFill | None
"""The result that a sequence waited for; None where nothing had to be made."""


class Grammars:
    """Owned by the core's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Vocabulary | None = None
        """Kept until the trie is there."""
        self._trie: Future[Trie] | None = None
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._done: SimpleQueue[tuple[Sequence, _Made]] = SimpleQueue()
        self._num_waiting = 0

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Sets the vocabulary, needed before the first request with a grammar. Begins to build the
        trie."""
        if self._trie is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "vllmx-grammars")
            self._vocabulary = vocabulary
            self._trie = self._threads.submit(self._make_trie, vocabulary)

    def _make_trie(self, vocabulary: Vocabulary) -> Trie:
        trie = make_trie(vocabulary)
        self._vocabulary = None
        return trie

    def start(self, sequence: Sequence) -> bool:
        """Gives a sequence its grammar; false when that has to be compiled first, and `finished`
        will name the sequence. Raises GrammarError."""
        grammar = sequence.request.grammar
        assert grammar is not None, sequence.request_id
        if grammar.speech is not None:
            sequence.grammar = SpeechRow(grammar.speech, self._vocab_size)
            return True
        if not grammar.text:
            assert grammar.thoughts is not None, sequence.request_id
            sequence.follow(ThoughtBudget(grammar.thoughts, None))
            return True
        compiling = self._compile(grammar.text)
        if compiling.done():
            self._set(sequence, grammar, compiling)
            return True
        self._num_waiting += 1
        compiling.add_done_callback(partial(self._put, sequence))
        return False

    def prepare(self, sequence: Sequence) -> None:
        """Makes the next mask of a sequence that sits out, unless somebody is at it; `finished`
        will name the sequence."""
        assert sequence.grammar is not None, sequence.request_id
        self._num_waiting += 1
        fill = sequence.grammar.next_fill()
        if fill is None:
            self._done.put((sequence, None))
            return
        if not fill.is_begun:
            assert self._threads is not None, "nothing was compiled"
            fill.is_begun = True
            self._threads.submit(fill.run)
        fill.when_done(lambda: self._done.put((sequence, fill)))

    def finished(self, wait_s: float = 0.0) -> list[tuple[Sequence, Exception | None]]:
        """Sequences that have their grammar or their next mask by now, or the reason why not. Waits
        for one."""
        found: list[tuple[Sequence, Exception | None]] = []
        try:
            while self._num_waiting:
                sequence, made = self._done.get(wait_s > 0 and not found, wait_s or None)
                self._num_waiting -= 1
                found.append((sequence, self._take(sequence, made)))
        except Empty:
            pass
        return found

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _put(self, sequence: Sequence, compiled: Future[CompiledGrammar]) -> None:
        self._done.put((sequence, compiled))

    def _compile(self, text: str) -> Future[CompiledGrammar]:
        known = self._compiled.get(text)
        if known is not None and not (known.done() and known.exception() is not None):
            self._compiled.move_to_end(text)
            return known
        if self._threads is None or self._trie is None:
            raise GrammarError("the core has no vocabulary, so it cannot follow a grammar")
        if self._trie.done() and self._trie.exception() is not None:  # such as a lack of memory
            assert self._vocabulary is not None, "the trie was made"
            self._trie = self._threads.submit(self._make_trie, self._vocabulary)
        trie, size = self._trie, self._vocab_size
        compiling = self._threads.submit(lambda: CompiledGrammar(text, trie.result(), size))
        self._compiled[text] = compiling
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return compiling

    def _take(self, sequence: Sequence, made: _Made) -> Exception | None:
        """Gives a sequence what it waited for; returns the reason where there is nothing."""
        if made is None or isinstance(made, MaskFill):
            return None if made is None else made.error
        assert sequence.request.grammar is not None, sequence.request_id
        try:
            self._set(sequence, sequence.request.grammar, made)
        except Exception as error:  # whatever compiling raised
            return error
        return None

    def _set(self, sequence: Sequence, grammar: Grammar, compiled: Future[CompiledGrammar]) -> None:
        assert self._threads is not None, "nothing was compiled"
        row = GrammarRow(compiled.result(), grammar.free, later=self._threads.submit)
        sequence.follow(row if grammar.thoughts is None else ThoughtBudget(grammar.thoughts, row))
