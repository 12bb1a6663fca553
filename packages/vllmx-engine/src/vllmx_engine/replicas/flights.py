"""Requests on their way through replicas: what is needed to go on with them elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec
from vllmx_core.errors import EngineDeadError
from vllmx_core.records import MutableRecord, field
from vllmx_core.sampling import SamplingParams

from vllmx_engine.wire.messages import CoreOutput, CoreRequest, pack_ids

MAX_MOVES = 3
"""A request ends with an error once so many replicas were lost with it: it may be the cause."""


class Call(MutableRecord, eq=False):
    """The choices of one call, which share their prompt and a replica."""

    name: str
    """The id of its first choice."""
    digests: list[bytes]
    """See `PromptDigests.of`; empty: nothing is cached."""
    replica: int
    flights: dict[str, Flight] = field(default_factory=dict)
    """Choices that have not ended, by their own ids."""
    num_lost: int = 0
    """Replicas that were lost with it."""
    num_moves: int = 0
    prefill: Flight | None = None
    """The sequence of its prompt alone, which one replica computes for another."""
    source: int = -1
    """The replica that computes or has computed `prefill`; -1: none."""
    source_due_s: float = 0.0
    """The time when that is predicted to be done."""

    def prefill_at(self, prefix: str) -> Flight:
        """Returns the sequence of its prompt alone, for a core that gave this client a prefix."""
        request = next(iter(self.flights.values())).request
        name = f"{prefix}{self.name}~p"
        alone = msgspec.structs.replace(
            request,
            request_id=name,
            params=SamplingParams(max_tokens=1, temperature=0.0),
            stop_ids=[],
            bad_words_ids=[],
            grammar=None,
            max_tokens=1,
            prediction=b"",
            session_id="",
            leader=None,
            digests=b"".join(self.digests),
        )
        return Flight(self, alone, name)

    def sent(self, prefix: str, source: str, source_s: float) -> list[CoreRequest]:
        """The choices for a core that gave this client a prefix, the one that leads first.

        Args:
            source, source_s: see `CoreRequest`.
        """
        digests = b"".join(self.digests)
        found: list[CoreRequest] = []
        for flight in self.flights.values():
            name = flight.name_at(prefix, self.num_moves)
            leader = found[0].request_id if found else None
            found.append(flight.sent(name, leader, digests))
        if source and self.prefill is not None:
            found[0] = msgspec.structs.replace(
                found[0], source=source, source_id=self.prefill.core_id, source_s=source_s
            )
        return found


class Flight(MutableRecord, eq=False):
    """One sequence."""

    call: Call
    request: CoreRequest
    """The request as the frontend's user sent it."""
    core_id: str = ""
    """The id at the replica: another one after each move, so that late updates are not mistaken."""
    generated: list[int] = field(default_factory=list)
    num_scored: int = 0
    """Log-probabilities of its prompt that were received."""
    num_repeated: int = 0
    """The number of them that a further replica will send again."""

    def name_at(self, prefix: str, num_moves: int) -> str:
        """Returns its id at a core."""
        moved = f"~{num_moves}" if num_moves else ""
        self.core_id = f"{prefix}{self.request.request_id}{moved}"
        return self.core_id

    def sent(self, name: str, leader: str | None, digests: bytes) -> CoreRequest:
        """The request for a core: it goes on behind what was generated."""
        request, params = self.request, self.request.params
        if self.generated and params.prompt_logprobs is not None:
            params = dataclasses.replace(params, prompt_logprobs=None)
        self.num_repeated = self.num_scored
        return msgspec.structs.replace(
            request,
            request_id=name,
            params=params,
            leader=leader,
            digests=digests,
            generated=pack_ids(self.generated),
        )

    def take(self, output: CoreOutput) -> CoreOutput | None:
        """Notes an update of the replica, and returns it for the user; None: nothing in it is
        new."""
        if output.ids:
            self.generated += output.ids
        own = self.request.request_id
        scored = output.prompt_logprobs
        if scored is not None:
            num_known = min(self.num_repeated, len(scored))
            self.num_repeated -= num_known
            self.num_scored += len(scored) - num_known
            if num_known:
                scored = scored[num_known:]
                if not scored and not output.ids:
                    return None
                return msgspec.structs.replace(output, request_id=own, prompt_logprobs=scored)
        if output.request_id == own:
            return output
        return msgspec.structs.replace(output, request_id=own)


def lost_outputs(flights: Iterable[Flight], text: str) -> list[CoreOutput]:
    """The ends of requests that cannot go on."""
    return [
        CoreOutput(
            request_id=flight.request.request_id,
            ids=[],
            finish_reason="error",
            error=text,
            error_code=EngineDeadError.code,
        )
        for flight in flights
    ]
