"""The clients that a core works for: the process that started it, and further ones that came by its
door.

Each has request ids of its own: those of a further client begin with a prefix that the core gave
it, those of the owner have none. An update finds its client by that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllmx_core.errors import EngineDeadError

from vllmx_engine.core.commit import error_output
from vllmx_engine.wire.ipc import FromCore, Outputs, ToCore
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, is_piece

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
        """Whether a request of this id is, or would be, this client's."""
        head, end, _ = request_id.partition(_END)
        return (head + end if end else "") == self.prefix


@dataclass(frozen=True, slots=True)
class Joined:
    """A client came."""

    client: Client


@dataclass(frozen=True, slots=True)
class Left:
    """A client is gone, and nobody waits for its requests any more."""

    client: Client


@dataclass(frozen=True, slots=True)
class Said:
    """What a further client sent."""

    client: Client
    message: ToCore


def prefix_of(number: int) -> str:
    """The prefix of the ids of a core's so-manieth further client."""
    return f"{number}{_END}"


class Clients:
    """The clients that are connected."""

    def __init__(self, owner: Emit) -> None:
        self.owner = Client("", owner)
        self._by_prefix = {"": self.owner}

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
    """Whether a request's id is not the client's to give, which it is told: the request was made
    for an earlier life of the core."""
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
