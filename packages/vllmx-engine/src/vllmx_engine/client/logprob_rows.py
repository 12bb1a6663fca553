"""Log-probabilities of many positions, made readable one position at a time.

A call may ask for a million of them. As records of the core they are small and cost nothing to pass
on; with their texts, as mappings, they would hold up an event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import TokenLogprobs
from vllmx_engine.wire.outputs import Logprob


class LogprobRows(Sequence[Any]):
    """`dict[int, Logprob]` for each position, made at each access: the token itself first, then the
    most likely. None where `rows` has None, as for the first token of a prompt."""

    __slots__ = ("rows", "tokenizer")

    def __init__(self, rows: list[TokenLogprobs | None], tokenizer: Tokenizer) -> None:
        self.rows = rows
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | LogprobRows | None:
        if isinstance(index, slice):
            return LogprobRows(self.rows[index], self.tokenizer)
        row = self.rows[index]
        return None if row is None else dict(decode_logprobs(row, self.tokenizer))

    def of_tokens(self) -> Iterator[float | None]:
        """The log-probability of each position's own token."""
        return (None if row is None else row.logprob for row in self.rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobRows):
            return self.rows == other.rows
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def decode_logprobs(row: TokenLogprobs, tokenizer: Tokenizer) -> Iterator[tuple[int, Logprob]]:
    """The token itself first, then the most likely, each with its text. Tokens named by the request
    have no rank."""
    yield row.token, Logprob(row.logprob, row.rank, tokenizer.token_text(row.token))
    for rank, (token, logprob) in enumerate(row.ranked(), 1):
        if token != row.token:
            text = tokenizer.token_text(token)
            yield token, Logprob(logprob, rank if row.is_ranked else None, text)
