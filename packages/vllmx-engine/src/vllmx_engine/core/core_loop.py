"""The clients of an engine core, and its loop: messages in, steps, updates out.

The same loop runs in the core process (messages come from a socket) and on a thread of the API
process (messages come from the frontend). Between steps it takes all pending messages without
waiting. With nothing to compute it sleeps until a message comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from vllmx_core.errors import AdapterError, EngineDeadError, VllmxError

from vllmx_engine.core.adapters import AdapterFiles, HeldAdapter
from vllmx_engine.core.announcer import Announcer
from vllmx_engine.core.commit import error_output
from vllmx_engine.core.control import CoreControl
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.watchdog import Watchdog
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import (
    AbortRequests,
    AddRequest,
    Call,
    Called,
    ErrorRecord,
    FromCore,
    LoadAdapter,
    Outputs,
    Ping,
    Pong,
    PullBlocks,
    Shutdown,
    Start,
    Stats,
    ToCore,
    UnloadAdapter,
)
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, choices_of, is_piece

if TYPE_CHECKING:
    from vllmx_engine.core.peers import Peers

logger = logging.getLogger("vllmx.core")

Emit = Callable[[FromCore], bool]
_END = ":"


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """One of a core's clients.

    Args:
        prefix: of its request ids; empty: it is the owner.
        emit: hands it a message without waiting; False when it has not taken any for so long that
            all its requests must end.
    """

    prefix: str
    emit: Emit

    def owns(self, request_id: str) -> bool:
        """True if this id has the client's prefix."""
        head, end, _ = request_id.partition(_END)
        return (head + end if end else "") == self.prefix


@dataclass(frozen=True, slots=True)
class Joined:
    """A client came."""

    client: Client


@dataclass(frozen=True, slots=True)
class Left:
    """A client is gone, and its requests are abandoned."""

    client: Client


@dataclass(frozen=True, slots=True)
class Said:
    """A message from a further client."""

    client: Client
    message: ToCore


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """An adapter was read for a client, or cannot be."""

    client: Client
    call_id: int
    found: HeldAdapter | VllmxError


def prefix_of(number: int) -> str:
    """The prefix of the ids of a core's so-manieth further client."""
    return f"{number}{_END}"


class Clients:
    """The clients that are connected."""

    def __init__(self, owner: Emit) -> None:
        self.owner = Client("", owner)
        self._by_prefix = {"": self.owner}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_prefix.values())

    def add(self, client: Client) -> None:
        """Adds a client, which gets the updates of its requests and the counters from now on."""
        self._by_prefix[client.prefix] = client

    def remove(self, client: Client) -> None:
        """Updates for it are dropped."""
        self._by_prefix.pop(client.prefix, None)

    def tell_all(self, message: FromCore) -> None:
        for client in self._by_prefix.values():
            client.emit(message)

    def spread(self, outputs: list[CoreOutput]) -> list[Client]:
        """Tells each client the updates of its requests. Returns those that take nothing."""
        if len(self._by_prefix) == 1:
            return [] if _emit_all(self.owner, outputs) else [self.owner]
        groups: dict[str, list[CoreOutput]] = {}
        for output in outputs:
            head, end, _ = output.request_id.partition(_END)
            groups.setdefault(head + end if end else "", []).append(output)
        clients = self._by_prefix
        return [
            clients[prefix]
            for prefix, group in groups.items()
            if prefix in clients and not _emit_all(clients[prefix], group)
        ]


def refuse_foreign(client: Client, request: CoreRequest) -> bool:
    """True, after an error reply, if the request's id lacks the client's prefix: the request was
    made for an earlier life of the core."""
    if client.owns(request.request_id):
        return False
    error = EngineDeadError("the engine core was started again meanwhile: send the request again")
    client.emit(Outputs([error_output(request.request_id, error, request.shown)]))
    return True


def end_all(client: Client, request_ids: Iterable[str]) -> None:
    """Says that requests were ended because the client reads nothing."""
    text = (
        "the API process did not take what the engine core sent: too much of it waited, so"
        " every request in flight was ended"
    )
    ids = list(request_ids)
    logger.error("%s (%d)", text, len(ids))
    code = EngineDeadError.code
    client.emit(
        Outputs(
            [
                CoreOutput(
                    request_id=one, ids=[], finish_reason="error", error=text, error_code=code
                )
                for one in ids
            ]
        )
    )


def _emit_all(client: Client, outputs: list[CoreOutput]) -> bool:
    """Emits all outputs in one message, but for pieces of prompts' log-probabilities, which come
    first: each is as much as the other side should have to decode at once."""
    num_pieces, taken = 0, True
    while num_pieces < len(outputs) and is_piece(outputs[num_pieces]):
        taken &= client.emit(Outputs([outputs[num_pieces]]))
        num_pieces += 1
    rest = outputs[num_pieces:] if num_pieces else outputs
    return taken and (not rest or client.emit(Outputs(rest)))


STATS_INTERVAL_S = 0.5
Inbox = SimpleQueue[ToCore | Joined | Left | Said | AdapterRead]


class CoreLoop:
    """Owns the core; runs on the one thread that may touch it.

    Args:
        core: loaded.
        inbox: filled by other threads: what the owner says, and what concerns further clients.
        emit: hands a message to the owner, see `Client`.
        on_stuck: called once, on another thread, when a step does not come back.
        found: the loaded model; None: its weights cannot be replaced.
        announcer: of a replica.
        peers: the other replicas, if blocks go from one to another.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        emit: Callable[[FromCore], bool],
        on_stuck: Callable[[EngineDeadError], None],
        found: FoundModel | None = None,
        announcer: Announcer | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._announcer, self._peers = announcer, peers
        self._core = core
        self._control = CoreControl(core, found)
        self._inbox = inbox
        self._clients = Clients(emit)
        self._on_stuck = on_stuck
        self._stats_due_s = 0.0
        self._stopped = self._writes = False

    def run(self) -> None:
        """Runs steps until a Shutdown message. What a step raises is a bug or a broken device: it
        is left to the caller."""
        with Watchdog(self._core, self._on_stuck):
            try:
                while not self._stopped:
                    self._take_messages()
                    # The messages that came during a step are taken before the next one, so an
                    # abort frees its blocks and a new request joins without waiting for more.
                    if self._core.has_work and not self._stopped:
                        outputs = self._core.step()
                        if outputs:
                            for client in self._clients.spread(outputs):
                                self._end(client)
                        if self._peers is not None:
                            self._peers.send_new()
                        self._report(time.monotonic())
            finally:
                self._core.close()

    def _take_messages(self) -> None:
        """Takes all that have come; waits for one when there is nothing to do, not even writing
        of cached blocks."""
        try:
            while not self._stopped:
                writes = not self._core.has_work and self._core.write_idle()
                if self._writes and not writes:
                    self._report(time.monotonic())
                self._writes = writes
                self._take(self._inbox.get(block=not (writes or self._core.has_work)))
        except Empty:
            pass

    def _take(self, message: ToCore | Joined | Left | Said | AdapterRead) -> None:
        match message:
            case Said(client, said):
                self._answer(client, said)
            case Joined(client):
                self._clients.add(client)
                client.emit(Stats(self._control.stats()))
                if self._announcer is not None:
                    client.emit(self._announcer.first(client.prefix))
            case Left(client):
                self._clients.remove(client)
                if self._announcer is not None:
                    self._announcer.left(client.prefix)
                if self._peers is not None:
                    self._peers.left(client.emit)
                self._abort(self._ids_of(client))
            case AdapterRead():
                self._add_adapter(message)
            case Shutdown():
                self._stopped = True
            case Start():
                logger.error("a second start message is ignored")
            case _:
                self._answer(self._clients.owner, message)

    def _answer(self, client: Client, message: ToCore) -> None:
        match message:
            case AddRequest(request, followers):
                choices = choices_of(request, followers)
                if self._announcer is not None:
                    self._announcer.took(client.prefix, len(choices))
                if any(refuse_foreign(client, choice) for choice in choices):
                    return
                self._control.add(choices)
                self._report_idle()
            case AbortRequests(request_ids):
                self._abort([one for one in request_ids if client.owns(one)])
            case Call():
                answer, aborted = self._control.answer(message)
                self._clients.spread(aborted)
                self._report_idle()
                client.emit(answer)
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(client, message)
            case Vocabulary():
                self._core.set_vocabulary(message)
            case PullBlocks(names, request_id):
                if self._peers is not None:
                    self._peers.hand_on(names, request_id, client.emit)
            case Ping():
                client.emit(Pong())
            case _:
                logger.error("only the owner of the core may send %s", type(message).__name__)

    def _change_adapters(self, client: Client, message: LoadAdapter | UnloadAdapter) -> None:
        """Files are read on a thread of their own, while steps go on."""
        try:
            adapters = self._core.adapters
            if isinstance(message, LoadAdapter):
                args = (client, message, adapters.files)
                threading.Thread(target=self._read_adapter, args=args, daemon=True).start()
                return
            adapters.remove(message.name)
        except VllmxError as error:
            client.emit(Called(message.call_id, False, ErrorRecord.of(error)))
        else:
            self._tell_adapters(client, message.call_id)

    def _read_adapter(self, client: Client, message: LoadAdapter, files: AdapterFiles) -> None:
        found: HeldAdapter | VllmxError
        try:
            found = files.read(message.name, message.path)
        except VllmxError as error:
            found = error
        except Exception:
            logger.exception("adapter %s cannot be read", message.path)
            found = AdapterError(f"{message.path} cannot be read: the log of the core says why")
        self._inbox.put(AdapterRead(client, message.call_id, found))

    def _add_adapter(self, read: AdapterRead) -> None:
        try:
            if isinstance(read.found, VllmxError):
                raise read.found
            self._core.adapters.add(read.found)
        except VllmxError as error:
            read.client.emit(Called(read.call_id, False, ErrorRecord.of(error)))
        else:
            self._tell_adapters(read.client, read.call_id)

    def _tell_adapters(self, client: Client, call_id: int) -> None:
        """All clients know before the one that asked goes on."""
        self._clients.tell_all(Stats(self._control.stats()))
        client.emit(Called(call_id, True))

    def _abort(self, request_ids: list[str]) -> None:
        self._control.abort(request_ids)
        self._report_idle()

    def _end(self, client: Client) -> None:
        """It does not read: computing on would fill the memory with updates."""
        ids = self._ids_of(client)
        self._control.abort(ids)
        end_all(client, ids)

    def _ids_of(self, client: Client) -> list[str]:
        ids = (*self._core.request_ids, *self._control.held_ids)
        return [one for one in ids if client.owns(one)]

    def _report_idle(self) -> None:
        """Counters that no step will report, since none follows, as while the core is paused."""
        if not self._core.has_work:
            if self._peers is not None:
                self._peers.send_new()
            self._report(time.monotonic())

    def _report(self, now_s: float) -> None:
        """Counters: with the first step of new work, every half second, and when it is done."""
        busy = self._core.has_work
        if now_s >= self._stats_due_s or not busy:
            self._stats_due_s = now_s + STATS_INTERVAL_S if busy else 0.0
            self._clients.tell_all(Stats(self._control.stats()))
        announcer = self._announcer
        if announcer is not None and announcer.is_due(is_busy=busy):
            changes, load = announcer.changes(), announcer.load()
            for client in self._clients:
                client.emit(announcer.announced(client.prefix, changes, load))
