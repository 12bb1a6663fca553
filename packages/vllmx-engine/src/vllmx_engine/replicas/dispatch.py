"""Sends calls to the replicas that the router chooses, and on to others.

A call moves when its replica is lost. A long prompt may go to a replica that only computes prompts
(`--prefill-replicas`); the call goes to another replica, which fetches the blocks as they are
computed. If any of this fails, the second replica computes the prompt itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from vllmx_core.errors import EngineDeadError, VllmxError

from vllmx_engine.replicas.digests import PromptDigests
from vllmx_engine.replicas.flights import MAX_MOVES, Call, Flight, lost_outputs
from vllmx_engine.replicas.router import Choice, Router
from vllmx_engine.replicas.seats import Seat
from vllmx_engine.wire.messages import CoreOutput, CoreRequest

logger = logging.getLogger("vllmx.replicas")

_PULL_BYTE_S = 4e-9
"""The assumed seconds to fetch a byte of blocks from another replica until that is measured: about
the time of packing, checksums and copies."""


class Dispatch:
    """Knows where each request is.

    Args:
        seats: the replicas by number; others add to them.
        key: of digests; empty: nothing is cached.
        least_remote: uncached tokens from which on a prompt may be computed elsewhere.
        unavailable: says why no replica serves.
        emit: takes the ends of requests that cannot go on.
    """

    def __init__(
        self,
        seats: Mapping[int, Seat],
        key: bytes,
        least_remote: int,
        unavailable: Callable[[], EngineDeadError],
        emit: Callable[[list[CoreOutput]], None],
    ) -> None:
        info = seats[0].frontend.info
        self.router = Router(info.block_size)
        for number in seats:
            self.router.add(number)
        self.flights: dict[str, Flight] = {}
        """Requests that have not ended, by the ids of the frontend's user."""
        self._seats, self._least_remote = seats, least_remote
        self._unavailable, self._emit = unavailable, emit
        self._block_bytes = info.kv_cache_bytes / max(1, info.num_kv_blocks)
        self._digests: PromptDigests | None = None
        if key and info.pooling is None:
            self._digests = PromptDigests(key, info.cache_model, info, self._adapter_digest)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """See `Frontend.add`."""
        digests = [] if self._digests is None else self._digests.of(requests[0])
        call = Call(requests[0].request_id, digests, -1)
        call.flights = {one.request_id: Flight(call, one) for one in requests}
        self._send(call)
        self.flights.update(call.flights)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Frontend.abort`."""
        by_seat: dict[int, list[str]] = {}
        for request_id in request_ids:
            flight = self.flights.get(request_id)
            if flight is not None:
                core_ids = by_seat.setdefault(flight.call.replica, [])
                core_ids.append(flight.core_id)
                self._end(flight)
        for number, core_ids in by_seat.items():
            self._seats[number].frontend.abort(core_ids)

    def take(self, seat: Seat, outputs: Sequence[CoreOutput]) -> list[CoreOutput]:
        """The updates of a replica, as the user of the frontend gets them."""
        found: list[CoreOutput] = []
        for output in outputs:
            flight = seat.flights.get(output.request_id)
            if flight is None:  # it was aborted, or goes on elsewhere
                continue
            if flight is flight.call.prefill:
                if output.finish_reason is not None:
                    seat.flights.pop(flight.core_id)
                    self.router.finished(flight.core_id)
                continue
            mine = flight.take(output)
            if output.finish_reason is not None:
                self._end(flight)
            if mine is not None:
                found.append(mine)
        return found

    def leave(self, seat: Seat, text: str, *, is_lost: bool) -> None:
        """Goes on elsewhere with all that a replica works on."""
        calls = dict[int, Call]()
        for flight in list(seat.flights.values()):
            call = flight.call
            if flight is call.prefill:
                self.router.finished(flight.core_id)
                if any(one.generated for one in call.flights.values()):
                    continue  # it has all blocks
                self._recall(call)
            calls[id(call)] = call
        seat.flights.clear()
        if calls:
            logger.warning("%d requests of replica %d go on elsewhere", len(calls), seat.number)
        for call in calls.values():
            self.router.finished(call.name)
            call.num_moves += 1
            call.num_lost += is_lost
            reason = f"{text}; {call.num_lost} replicas were lost with it"
            self._send_on(call, reason if call.num_lost > MAX_MOVES else "")

    def able(self, adapter: str, *, prefills: bool = False) -> list[int]:
        """The replicas that may serve a request, or compute its prompt alone: those that have its
        adapter, if there are any. Without others, requests go to those that compute prompts."""
        serving = [seat for seat in self._seats.values() if seat.serves]
        some = [seat for seat in serving if (seat.role == "prefill") is prefills]
        if not prefills:
            some = some or serving
        if adapter:
            having = [seat for seat in some if adapter in seat.adapters]
            some = having or some
        return [seat.number for seat in some]

    def wait_s(self, now_s: float) -> float | None:
        """The predicted seconds until a new short prompt has its first token; None: none serves."""
        among = self.able("")
        if not among:
            return None
        return self.router.choose([], 1, now_s=now_s, among=among).first_token_s

    # --- inside -----------------------------------------------------------------------------------
    def _send(self, call: Call) -> None:
        """Sends a call to the best replica. Raises EngineDeadError without one, and
        FrameTooLargeError."""
        first = next(iter(call.flights.values()))
        request = first.request
        among = self.able(request.adapter)
        if not among:
            raise self._unavailable()
        num_tokens = len(request.prompt) // 4 + len(first.generated)
        choice = self.router.choose(
            call.digests[1:],
            num_tokens,
            f"{request.client}\0{request.session_id}" if request.session_id else "",
            now_s=time.monotonic(),
            num_rows=len(call.flights),
            among=None if len(among) == len(self.router.replicas) else among,
            num_moved=len(call.digests[1:]) if call.source >= 0 else 0,
        )
        choice = self._prefill_apart(call, choice, num_tokens) or choice
        seat, source = self._seats[choice.replica], ""
        if call.source not in (-1, choice.replica):
            source = self._seats[call.source].address()
        source_s = max(0.0, call.source_due_s - time.monotonic())
        seat.frontend.add(call.sent(seat.frontend.info.id_prefix, source, source_s))
        seat.flights.update({flight.core_id: flight for flight in call.flights.values()})
        call.replica = choice.replica
        self.router.started(call.name, choice)

    def _prefill_apart(self, call: Call, choice: Choice, num_tokens: int) -> Choice | None:
        """Has another replica compute the prompt for the one that was chosen, if that is sooner.
        Returns the choice as it is then."""
        new = num_tokens - choice.num_cached_tokens
        request = next(iter(call.flights.values())).request
        is_apart = self._seats[choice.replica].role == "decode" and call.prefill is None
        if new < self._least_remote or not is_apart or len(call.digests) < 2 or request.pools:
            return None
        if request.params.prompt_logprobs is not None:  # they are computed with the prompt
            return None
        among = self.able(request.adapter, prefills=True)
        if not among:
            return None
        digests, now_s = call.digests[1:], time.monotonic()
        there = self.router.choose(digests, num_tokens, now_s=now_s, among=among)
        here = self.router.choose(
            digests,
            num_tokens,
            now_s=now_s + there.first_token_s,
            num_rows=len(call.flights),
            among=[choice.replica],
            num_moved=len(digests),
        )
        byte_s = self.router.load_of(choice.replica).pull_byte_s or _PULL_BYTE_S
        # Blocks move while others are computed.
        more_s = max(0.0, len(choice.missing) * self._block_bytes * byte_s - there.prefill_s)
        if there.cost_s + more_s + here.cost_s >= choice.cost_s:
            return None
        seat = self._seats[there.replica]
        prefill = call.prefill_at(seat.frontend.info.id_prefix)
        seat.frontend.add([prefill.request])
        seat.flights[prefill.core_id] = call.prefill = prefill
        call.source, call.source_due_s = there.replica, now_s + there.first_token_s + more_s
        self.router.started(prefill.core_id, there)
        return here

    def _recall(self, call: Call) -> None:
        """Takes a call back whose prompt is computed no more by another replica."""
        call.source = -1
        seat, core_ids = self._seats[call.replica], [one.core_id for one in call.flights.values()]
        for core_id in core_ids:
            seat.flights.pop(core_id, None)
        seat.frontend.abort(core_ids)

    def _send_on(self, call: Call, reason: str = "") -> None:
        """Sends a call to another replica; it ends where there is none, or a reason not to."""
        try:
            if reason:
                raise EngineDeadError(reason)
            self._send(call)
        except VllmxError as error:
            flights = list(call.flights.values())
            for flight in flights:
                self.flights.pop(flight.request.request_id, None)
            self._emit(lost_outputs(flights, error.message))

    def _end(self, flight: Flight) -> None:
        """A sequence has ended."""
        call = flight.call
        name = flight.request.request_id
        self.flights.pop(name, None)
        call.flights.pop(name, None)
        self._seats[call.replica].flights.pop(flight.core_id, None)
        if call.flights:
            return
        self.router.finished(call.name)
        seat, prefill = self._seats.get(call.source), call.prefill
        if seat is not None and prefill is not None and prefill.core_id in seat.flights:
            del seat.flights[prefill.core_id]
            self.router.finished(prefill.core_id)
            seat.frontend.abort([prefill.core_id])

    def _adapter_digest(self, name: str) -> str:
        found = (seat.adapters.get(name) for seat in self._seats.values())
        return next((one.digest for one in found if one is not None), "")
