"""Text of one output sequence: detokenizer, then stop strings, with the offset of each token."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.sampling import SamplingParams

from vllmx_engine.text.detokenizer import make_detokenizer
from vllmx_engine.text.stop import StopMatcher, StopSet
from vllmx_engine.text.tokenizer import Tokenizer


class SequenceText:
    """Turns the ids of one sequence into text as they come.

    The same object serves streamed and whole answers: the concatenation of all returned pieces is
    the answer's text, however the ids were grouped.

    Args:
        tokenizer: of the model.
        prompt_ids: what the output continues.
        params: `stop`, `min_tokens`, `include_stop_str_in_output`, `skip_special_tokens` and
            `spaces_between_special_tokens` are used.
        stops: `params.stop` compiled, to share it between the sequences of a request.
        keep_offsets: record `token_offsets` (for `logprobs.text_offset` of completions).
        kept_ids: special tokens whose text is never skipped.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "finish_reason",
        "is_plain",
        "num_tokens",
        "stop_reason",
        "text_length",
        "token_offsets",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stops: StopSet | None = None,
        keep_offsets: bool = False,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = make_detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            kept_ids=kept_ids,
        )
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matcher: StopMatcher | None = None
        if params.stop:
            self._matcher = StopMatcher(stops or StopSet(params.stop), self._include_stop)
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        """The stop string that ended the text."""
        self.num_tokens = 0
        """Tokens taken, the one that completed a stop string included."""
        self.text_length = 0
        """Characters decoded so far, held back ones included."""
        self.is_plain = self._matcher is None and not keep_offsets
        """Nothing is looked for in the text but characters: `push_plain` may be called."""
        self.token_offsets: list[int] | None = [] if keep_offsets else None
        """The offset of each token taken, in characters: where its text begins in the output."""

    def push(
        self, ids: Sequence[int], *, ends_with_stop_token: bool = False
    ) -> tuple[str, str | None]:
        """Take the next ids; return (new text, stop string that ended the sequence or None).

        After a stop string the remaining ids are not taken (`num_tokens` tells how many were), and
        nothing may be pushed any more. With `ends_with_stop_token` the last id ended the sequence
        (EOS or a stop token id): its text is left out unless `include_stop_str_in_output`.
        """
        assert self.finish_reason is None, "push after the end of the sequence"
        last = ids[-1] if ends_with_stop_token and not self._include_stop else None
        if last is not None:
            ids = ids[:-1]
        text, stop = self._push_text(ids)
        if last is not None and stop is None:
            self._count(0)
        return text, stop

    def push_plain(self, ids: Sequence[int]) -> str:
        """`push` of ids that end nothing, where `is_plain`."""
        text = self._detokenizer.push(ids)
        self.num_tokens += len(ids)
        self.text_length += len(text)
        return text

    def finish(self, reason: str) -> str:
        """End the sequence; return the text still held back (incomplete characters as U+FFFD).

        `reason` is kept in `finish_reason` unless a stop string has set it already.
        """
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        text = self._detokenizer.finish()
        self.text_length += len(text)
        if self._matcher is None:
            return text
        return self._matcher.flush() + text

    def _push_text(self, ids: Sequence[int]) -> tuple[str, str | None]:
        if self.is_plain:
            return self.push_plain(ids), None
        shown = ""
        for token_id in ids:
            text = self._detokenizer.push((token_id,))
            self._count(len(text))
            if self._matcher is None:
                shown += text
                continue
            text, stop = self._matcher.push(text, self.num_tokens > self._min_tokens)
            shown += text
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return shown, stop
        return shown, None

    def _count(self, num_chars: int) -> None:
        self.num_tokens += 1
        if self.token_offsets is not None:
            self.token_offsets.append(self.text_length)
        self.text_length += num_chars


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """The character of the prompt's text at which the text of each of its tokens begins. A special
    token that the text leaves out, as the tokenizer added it, is as long as nothing."""
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens=False)
    offsets, offset = [], 0
    for token in ids:
        offsets.append(offset)
        piece = detokenizer.push((token,))
        if token not in tokenizer.special_ids or text.startswith(piece, offset):
            offset = min(offset + len(piece), len(text))
    return offsets
