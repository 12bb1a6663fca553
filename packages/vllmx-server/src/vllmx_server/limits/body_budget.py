"""How many bytes of request bodies are held at a time, of each client and of all."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from vllmx_server.errors import OverloadedError
from vllmx_server.limits.sharing import ALONE, Sharing

GIVEN_BODY = "body"
"""The name in a request's state under which stands a body that did not come by a connection: it is
counted elsewhere, if at all."""
_FREE_BYTES = 64 << 10
"""The bytes of each body that count against nobody. So small requests are never refused for the
bodies of others; the connections bound their number."""
_BODIES_IN_ALL = 16
"""The number of bodies of the largest size whose bytes may be in flight."""
_BODIES_OF_A_CLIENT = 8


class BodyBudget:
    """Counts what has arrived of bodies and is not yet decoded.

    Args:
        max_body_bytes: of one body.
        sharing: with other processes of the server.
    """

    def __init__(self, max_body_bytes: int, sharing: Sharing = ALONE) -> None:
        self._sharing = sharing
        self._in_all = _BODIES_IN_ALL * max_body_bytes
        self._of_a_client = _BODIES_OF_A_CLIENT * max_body_bytes
        self._clients: dict[str, int] = {}
        self.num_bytes = 0

    def hold(self, client: str) -> HeldBody:
        """A body that begins to arrive, as a context manager."""
        return HeldBody(self, client)

    def change(self, client: str, num_bytes: int) -> None:
        """Takes bytes, or gives them back where `num_bytes` is negative. Raises OverloadedError."""
        of_client = self._clients.get(client, 0) + num_bytes
        in_all = self.num_bytes + num_bytes
        if num_bytes > 0:
            self._check(num_bytes, in_all, of_client, client)
        self.num_bytes = in_all
        self._sharing.bodies.set(in_all)
        self._sharing.clients.add(client, num_bytes)
        self._clients[client] = of_client
        if not of_client:
            del self._clients[client]

    def _check(self, num_bytes: int, in_all: int, of_client: int, client: str) -> None:
        in_all += self._sharing.bodies.elsewhere
        of_client += self._sharing.clients.elsewhere(client)
        if of_client > self._of_a_client or in_all > self._in_all:
            raise OverloadedError(
                f"{in_all - num_bytes} bytes of request bodies are being read,"
                f" {of_client - num_bytes} of them from this client; at most {self._in_all} and"
                f" {self._of_a_client} are taken: send it again in a moment"
            )


class HeldBody:
    """What is held of one body; given back at the end of its block."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._size = 0
        self._counted = 0

    def grow(self, num_bytes: int) -> None:
        """More has arrived. Raises OverloadedError."""
        self._size += num_bytes
        more = self._size - _FREE_BYTES - self._counted
        if more > 0:
            self._budget.change(self._client, more)
            self._counted += more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._counted:
            self._budget.change(self._client, -self._counted)
            self._counted = 0
