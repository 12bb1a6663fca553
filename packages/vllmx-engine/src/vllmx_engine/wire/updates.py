"""What the core has to say to a client that does not read: merged, so that it stays small.

A client that stood still and goes on again finds one update for each of its requests, whatever
number of steps it missed.
"""

from __future__ import annotations

import msgspec

from vllmx_engine.wire.ipc import FromCore, Outputs, Stats
from vllmx_engine.wire.messages import CoreOutput, TokenLogprobs, is_piece

MAX_MERGED_BYTES = 64 << 20


class Updates:
    """Messages that wait, in the order in which they may be taken.

    Attributes:
        num_bytes: about what they will be on the wire.
    """

    def __init__(self) -> None:
        self._messages: list[FromCore] = []
        self._updates: dict[str, CoreOutput] = {}
        self._stats: Stats | None = None
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages or self._updates or self._stats)

    def add(self, message: FromCore) -> bool:
        """False when more waits than should."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._add_output(output)
        elif isinstance(message, Stats):
            self._stats = message
        else:
            self._messages.append(message)
        return self.num_bytes <= MAX_MERGED_BYTES

    def take(self) -> list[FromCore]:
        """All of them; none waits any more."""
        found = self._messages
        if self._updates:
            found.append(Outputs(list(self._updates.values())))
        if self._stats is not None:
            found.append(self._stats)
        self._messages, self._updates, self._stats, self.num_bytes = [], {}, None, 0
        return found

    def _add_output(self, output: CoreOutput) -> None:
        self.num_bytes += _size(output)
        if is_piece(output):  # one of many, each as much as should be decoded at once
            self._messages.append(Outputs([output]))
            return
        before = self._updates.get(output.request_id)
        self._updates[output.request_id] = (
            _own(output) if before is None else _merged(before, output)
        )


def _own(output: CoreOutput) -> CoreOutput:
    """Copies an update, with lists that may grow."""
    return msgspec.structs.replace(
        output,
        ids=[*output.ids],
        logprobs=_joined(None, output.logprobs),
        prompt_logprobs=_joined(None, output.prompt_logprobs),
    )


def _merged(before: CoreOutput, after: CoreOutput) -> CoreOutput:
    """Merges two updates of one request into one, whose lists are those of `before`."""
    before.ids.extend(after.ids)
    return msgspec.structs.replace(
        after,
        ids=before.ids,
        logprobs=_joined(before.logprobs, after.logprobs),
        prompt_logprobs=_joined(before.prompt_logprobs, after.prompt_logprobs),
        num_cached_tokens=max(before.num_cached_tokens, after.num_cached_tokens),
        queue_s=after.queue_s if before.queue_s is None else before.queue_s,
        held_s=max(before.held_s, after.held_s),
        vector=after.vector or before.vector,
    )


def _joined(
    before: list[TokenLogprobs] | None, after: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """The first with the second behind it; None where there is neither."""
    if before is None or after is None:
        return before if after is None else [*after]
    before.extend(after)
    return before


def _size(output: CoreOutput) -> int:
    size = 48 + 9 * len(output.ids) + len(output.vector)
    for entries in (output.logprobs, output.prompt_logprobs):
        if entries:
            each = entries[0]
            size += len(entries) * (32 + 14 * len(each.top_ids) + len(each.packed))
    return size
