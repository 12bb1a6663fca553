"""All requests in flight of a frontend, and the routing of a step's updates to them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from vllmx_core import errors
from vllmx_core.errors import InvalidRequestError, QueueFullError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_engine.client.logprob_rows import LogprobRows
from vllmx_engine.client.request import Request
from vllmx_engine.client.request_state import (
    ChoiceState,
    OutputKind,
    RequestState,
)
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreOutput, FinishReason, is_piece

logger = logging.getLogger("vllmx.requests")


class RequestTable:
    """All requests in flight of one frontend, by the ids that the core knows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, ChoiceState] = {}
        self._of_client: Counter[str] = Counter()
        """Sequences in flight, by client."""

    def __len__(self) -> int:
        """Sequences in flight."""
        return len(self._choices)

    def check_room(
        self,
        num_choices: int,
        running: int,
        waiting: int,
        elsewhere: int = 0,
        client: str | None = None,
    ) -> None:
        """Checks that a call with so many choices fits next to those in flight, here and elsewhere.
        Raises InvalidRequestError if it never could, and QueueFullError.

        Args:
            client: the caller, if several clients share the queue: none of them may have more
            places beyond the running ones than it leaves free for others. None: no others are
            known.
        """
        places = running + waiting
        most = places if client is None else max(running, (places + 1) // 2)
        if num_choices > most:
            raise InvalidRequestError(
                f"the call has {num_choices} choices in all, but at most {running} run and"
                f" {most - running} wait: lower n or best_of, split the call, or raise --max-queue",
                param="n",
            )
        in_flight = len(self) + elsewhere
        if in_flight + num_choices > places:
            raise QueueFullError(
                f"{in_flight} sequences are in flight and this request has {num_choices};"
                f" at most {running} run and {waiting} wait: try again later"
            )
        if client is None:
            return
        own, left = self._of_client[client], places - in_flight - num_choices
        if own + num_choices > max(running, left + 1):
            raise QueueFullError(
                f"{own} sequences of this client are in flight and this request has {num_choices};"
                f" {places - in_flight} of {places} places are free, and nobody may have more than"
                " are left for others: try again later"
            )

    def add(
        self,
        request: Request,
        kind: OutputKind = "final",
        notify: Callable[[], None] | None = None,
    ) -> RequestState:
        """Begins to expect updates of `request`."""
        state = RequestState(request, self._tokenizer, kind, notify)
        for core, choice in zip(request.core, state.choices, strict=True):
            self._choices[core.request_id] = choice
        self._of_client[request.core[0].client] += len(state.choices)
        return state

    def _forget(self, request_id: str) -> bool:
        """Forgets a request; True if it was known."""
        choice = self._choices.pop(request_id, None)
        if choice is None:
            return False
        client = choice.request.request.core[0].client
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
        return True

    def take(self, outputs: list[CoreOutput]) -> list[str]:
        """Spreads the updates of a step over the requests; returns ids that the core must abort,
        because a stop string or another choice's error ended them."""
        now_s = time.monotonic()
        aborted: list[str] = []
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue  # it was aborted while this was on its way
            if output.finish_reason == "error":
                aborted += self.end(choice.request, "error", error_of(output))
                continue
            try:
                if choice.shortcut is not None and choice.shortcut(output, now_s):
                    continue
                if self._take_one(choice, output, now_s):
                    aborted.append(output.request_id)
            except Exception as error:  # one request's fault must not stop the others
                aborted += self.end(choice.request, "error", _internal(choice.request, error))
        return aborted

    def _take_one(self, choice: ChoiceState, output: CoreOutput, now_s: float) -> bool:
        """Takes the update of one sequence; returns whether the core must abort it."""
        state = choice.request
        if is_piece(output):
            state.scored += output.prompt_logprobs or []
            return False
        stopped = choice.take(output)
        if output.ids or output.vector:
            self._take_facts(state, output, now_s)
        if choice.finish_reason is not None:
            self._forget(output.request_id)
            state.num_unfinished -= 1
        if state.notify is not None and state.wants_update:
            state.notify()
        return stopped

    def _take_facts(self, state: RequestState, output: CoreOutput, now_s: float) -> None:
        if output.queue_s is not None and state.metrics.first_token_s is None:
            state.metrics.queue_s = output.queue_s
        state.tokens_came(len(output.ids), now_s, output.held_s)
        if output.num_accepted or output.num_rejected:
            state.metrics.num_accepted += output.num_accepted
            state.metrics.num_rejected += output.num_rejected
        if output.num_cached_tokens:
            state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = LogprobRows(
                [None, *state.scored, *output.prompt_logprobs], self._tokenizer
            )
            state.scored = []

    def end(
        self, state: RequestState, reason: FinishReason, error: VllmxError | None = None
    ) -> list[str]:
        """Ends a request from this side; returns the ids that the core must abort."""
        ids = [core.request_id for core in state.request.core]
        ids = [core_id for core_id in ids if self._forget(core_id)]
        if ids:
            try:
                state.end(reason, error)
            except Exception as fault:  # the same
                state.end("error", _internal(state, fault))
            if state.notify is not None:
                state.notify()
        return ids

    def end_all(self, reason: FinishReason, error: VllmxError | None = None) -> list[str]:
        """Ends everything; returns the ids that the core must abort."""
        states = list(dict.fromkeys(choice.request for choice in self._choices.values()))
        return [core_id for state in states for core_id in self.end(state, reason, error)]


def _internal(state: RequestState, error: Exception) -> VllmxError:
    """The error that a user gets for a bug of ours."""
    shown, where = state.request.core[0].shown, private_traceback(error)
    logger.error("request %s ends with an unexpected error\n%s", shown, where)
    return VllmxError("internal error; the server's log has the details")


def error_of(output: CoreOutput) -> VllmxError:
    """The typed error that a core output stands for; a VllmxError where the code is of none of
    `vllmx_core.errors`."""
    for kind in vars(errors).values():
        is_error = isinstance(kind, type) and issubclass(kind, VllmxError)
        if is_error and kind.code == output.error_code:
            return kind(output.error or "the request failed")  # type: ignore[no-any-return]
    return VllmxError(output.error or "the request failed; see the log of the engine core")
