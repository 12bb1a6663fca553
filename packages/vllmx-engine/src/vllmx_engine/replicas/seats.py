"""The replicas of a frontend, and the changes that one of them needs when it starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from vllmx_core.config import Role
from vllmx_core.errors import ConfigError, EngineDeadError
from vllmx_core.records import MutableRecord, field

from vllmx_engine.link.frontend import Frontend
from vllmx_engine.replicas.flights import Flight
from vllmx_engine.wire.ipc import What
from vllmx_engine.wire.messages import AdapterInfo, CoreStats


class Seat(MutableRecord, eq=False):
    """A replica.

    Attributes:
        is_current: it has the adapters and weights that were loaded later.
    """

    number: int
    frontend: Frontend
    address: Callable[[], str]
    """Says where other replicas reach its core."""
    flights: dict[str, Flight] = field(default_factory=dict)
    """Requests that it works on, by their ids there."""
    stats: CoreStats = field(default_factory=CoreStats)
    is_current: bool = True
    is_draining: bool = False
    is_spare: bool = False
    """It does not run because there is little to do."""

    @property
    def serves(self) -> bool:
        """Requests may be sent there."""
        ready = self.frontend.status == "ready" and not self.frontend.silent_s
        return ready and self.is_current and not self.is_draining

    @property
    def role(self) -> Role:
        """See `CoreInfo.role`."""
        return self.frontend.info.role

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that it has, by name."""
        known = self.stats.adapters
        if known is None:
            known = self.frontend.info.adapters
        return {adapter.name: adapter for adapter in known or ()}

    def state(self) -> ReplicaState:
        """Returns its state, for operators."""
        found: str = self.frontend.status
        if self.is_spare:
            found = "spare"
        elif self.is_draining:
            found = "draining" if found == "ready" else "drained"
        elif found == "ready" and not self.serves:
            found = "silent" if self.frontend.silent_s else "starting"
        stats = self.stats
        return ReplicaState(
            replica=self.number,
            state=found,
            role=self.role,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_cached_blocks=stats.num_cached_blocks,
        )


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as operators see it."""

    replica: int
    state: str
    """ready, starting, restarting, silent (it does not answer), draining, drained, spare (it starts
    when requests wait), asleep or dead."""
    role: Role
    """See `EngineConfig.role`."""
    num_running: int
    num_waiting: int
    num_cached_blocks: int
    """KV blocks of prefixes that no sequence uses now."""


class Changes(MutableRecord):
    """Changes since the start that a replica needs which starts again."""

    adapters: dict[str, str | None]
    """Paths by name; None: unloaded."""
    weights: str | None = None
    is_paused: bool = False
    number: int = 0
    """The number of changes."""

    def note(self, what: What, text: str) -> bool:
        """A call has succeeded. False: it changes nothing."""
        if what in ("pause", "resume"):
            self.is_paused = what == "pause"
        elif what == "update_weights":
            self.weights = text
        else:
            return False
        self.number += 1
        return True

    def note_adapter(self, name: str, path: str | None) -> None:
        """An adapter was loaded or unloaded."""
        self.adapters[name] = path
        self.number += 1

    async def apply(self, frontend: Frontend) -> None:
        """Makes a replica like the others. Raises what its core meets."""
        if self.is_paused:
            await frontend.call("pause", "wait")
        if self.weights is not None:
            await frontend.call("update_weights", self.weights)
        known = {adapter.name for adapter in frontend.info.adapters or ()}
        for name, path in self.adapters.items():
            if path is not None or name in known:
                await frontend.change_adapters(name, path)


def check_roles(seats: Sequence[Seat]) -> None:
    """Raises ConfigError unless prompts can be computed by those that have this role."""
    apart = [seat for seat in seats if seat.role != "both"]
    if apart and {seat.role for seat in seats} != {"prefill", "decode"}:
        names = ", ".join(f"{seat.number}: {seat.role}" for seat in seats)
        raise ConfigError(
            f"the roles of the replicas are {names}: start at least one with --role prefill, and"
            " all others with --role decode",
            param="replica_hosts",
        )
    for seat in apart[1:]:
        mine, first = seat.frontend.info.blocks_of, apart[0].frontend.info.blocks_of
        if mine != first:
            raise ConfigError(
                f"replica {seat.number} keeps KV blocks of {mine}, and replica {apart[0].number} of"
                f" {first}: start both with the same files, version and flags",
                param="replica_hosts",
            )


Ask = Callable[[Frontend], Awaitable[bool | None]]


async def ask_all(seats: Sequence[Seat], ask: Ask) -> dict[int, bool]:
    """The answers of replicas, by their numbers. One that is lost meanwhile is made like the others
    when it starts again. Raises the first other error."""
    answers = await asyncio.gather(*(ask(seat.frontend) for seat in seats), return_exceptions=True)
    found: dict[int, bool] = {}
    errors: list[BaseException] = []
    for seat, answer in zip(seats, answers, strict=True):
        if isinstance(answer, BaseException):
            errors.append(answer)
        else:
            found[seat.number] = answer is not False
    for error in sorted(errors, key=lambda one: isinstance(one, EngineDeadError)):
        if not (isinstance(error, EngineDeadError) and found):
            raise error
    return found
