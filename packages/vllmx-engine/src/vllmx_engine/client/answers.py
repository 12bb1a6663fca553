"""Thoughts, content and calls of tools of a request's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.output_format import OutputFormat

from vllmx_engine.formats.answer_reader import AnswerReader, read_options
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.tool_schemas import tools_by_name
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.outputs import CompletionOutput

_TAIL_TOKENS = 16


class AnswerReaders:
    """Makes the readers of a request's choices.

    Args:
        made_of: the format of the model.
        prompt: its text; None where it was cut to fit.
        prompt_ids: its tokens.
        tools: OpenAI's definitions; without any, nothing is a call.
        marker_ids: special tokens that the markers of the format are made of.
        one_call: calls after the first are left out.
    """

    def __init__(
        self,
        made_of: OutputFormat,
        tokenizer: Tokenizer,
        prompt: str | None,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        marker_ids: frozenset[int] = frozenset(),
        one_call: bool = False,
    ) -> None:
        self._format = made_of
        self._tokenizer = tokenizer
        self._made: list[AnswerReader] = []
        self.marker_ids = marker_ids
        if prompt is None:
            prompt = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        self._options = replace(
            read_options(made_of, tools_by_name(tools), prompt), one_call=one_call
        )

    @property
    def has_thinking(self) -> bool:
        """True if reasoning is separated from content."""
        return self._format.thinking is not None or self._format.channels is not None

    @property
    def is_needed(self) -> bool:
        """True if answers have parts that must be separated from content."""
        has_calls = self._format.calls is not None or self._format.channels is not None
        return self.has_thinking or (has_calls and bool(self._options.tools))

    def reader(self) -> AnswerReader:
        """Makes a new one, for one choice."""
        made = AnswerReader(self._format, self._options)
        self._made.append(made)
        return made

    @property
    def num_unread(self) -> int:
        """Choices in which something began as calls do and was none."""
        return sum(reader.has_unread_calls for reader in self._made)

    def read(self, choice: CompletionOutput) -> None:
        """Fills in what the whole of a choice holds."""
        reader, found = self.reader(), ReadAnswer()
        found.add(reader.push(choice.text))
        found.add(reader.finish(is_cut=is_cut(choice)))
        choice.content = found.content
        choice.reasoning = found.reasoning or None
        choice.tool_calls = found.tool_calls

    def reasoning_counter(self) -> ReasoningCounter:
        """Makes a new one, for one choice."""
        if self._format.thinking is None:
            return ReasoningCounter([])
        return ReasoningCounter(self._tokenizer.marker(self._format.thinking.end.strip()))


class ReasoningCounter:
    """Counts the tokens of an answer's thoughts, their markers included. Where one marker ends all
    thoughts, the count does not depend on how many tokens come at once.

    Args:
        end: tokens of that marker; empty where thoughts and content take turns.
    """

    def __init__(self, end: Sequence[int]) -> None:
        self._end = list(end)
        self._tail: list[int] = []
        self._num_waiting = 0
        self._was_thinking = False
        self._has_ended = False
        self.count = 0

    def add(self, ids: Sequence[int], reader: AnswerReader) -> int:
        """Returns the number of tokens newly found to be reasoning.

        Args:
            reader: has just read their text.
        """
        if self._has_ended:
            return 0
        if not reader.has_reasoned:
            self._num_waiting += len(ids)  # they may be the first part of a marker
            return 0
        new = self._num_thoughts(ids, reader.in_thinking)
        if self._num_waiting:
            new += self._num_waiting
            self._num_waiting = 0
        self.count += new
        return new

    def _num_thoughts(self, ids: Sequence[int], is_thinking: bool) -> int:
        """Returns the number of tokens before the reasoning ends."""
        was_thinking, self._was_thinking = self._was_thinking, is_thinking
        if not self._end:
            return len(ids) if is_thinking or was_thinking or not self.count else 0
        size = len(self._end)
        if is_thinking:
            if size > 1:
                self._tail = [*self._tail, *ids][1 - size :]
            return len(ids)
        both = [*self._tail, *ids]
        self._has_ended = True
        for at in range(len(both) - size + 1):
            if both[at : at + size] == self._end:
                return at + size - len(self._tail)
        return len(ids)


def marker_ids(made_of: OutputFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that the markers of a format are made of."""
    ids = tokenizer.encode_batch(made_of.markers, add_special_tokens=False)
    return frozenset(i for marker in ids for i in marker) & tokenizer.special_ids


def is_cut(choice: CompletionOutput) -> bool:
    """True if an answer ended before the model was done."""
    return choice.finish_reason != "stop" or isinstance(choice.stop_reason, str)
