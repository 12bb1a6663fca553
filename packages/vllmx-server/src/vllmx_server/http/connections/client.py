"""A client that waits for an answer, as far as the application wants to hear of its leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Client:
    """ASGI's `receive` is a method of one; `http.disconnect` says the same to whoever awaits it,
    which takes a task of its own."""

    is_gone = False
    _when_gone: tuple[Callable[[], object], ...] = ()

    def when_gone(self, call: Callable[[], object]) -> None:
        """Has `call` called by the event loop, never from within, when the client has left or its
        answer is complete."""
        if self.is_gone:
            asyncio.get_running_loop().call_soon(call)
        else:
            self._when_gone = (*self._when_gone, call)

    def forget(self, call: Callable[[], object]) -> None:
        """Takes `when_gone` back, as far as that is not too late."""
        self._when_gone = tuple(other for other in self._when_gone if other != call)

    def leave(self) -> None:
        """The client has left."""
        if not self.is_gone:
            self.is_gone = True
            calls, self._when_gone = self._when_gone, ()
            for call in calls:
                asyncio.get_running_loop().call_soon(call)
