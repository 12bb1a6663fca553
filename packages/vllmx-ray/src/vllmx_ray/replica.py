"""The actor of a replica: starts the host of its core, starts it again, and says where it is."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from vllmx_ray.child import Child
from vllmx_ray.core_process import HOST
from vllmx_ray.messages import Report, order_decoder

logger = logging.getLogger("vllmx.ray")

LEASE_S = 120.0
_LOOK_S = 1.0
_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 10.0


class Replica:
    """Runs until the actor is ended, which ends the core.

    Args:
        order: an `Order` in msgpack.
        host: the address of the actor's node.
        give_up: called when nobody has asked for a report for `LEASE_S`: the server is gone.
    """

    def __init__(self, order: bytes, host: str, give_up: Callable[[], None]) -> None:
        self._order = order_decoder.decode(order)
        os.environ[HOST] = host
        self._report = Report()
        self._asked_s, self._on_give_up = time.monotonic(), give_up
        for work in (self._run, self._watch):
            threading.Thread(target=work, name="vllmx-replica", daemon=True).start()

    def report(self) -> bytes:
        """Returns the state, a `Report` in msgpack."""
        self._asked_s = time.monotonic()
        return msgspec.msgpack.encode(self._report)

    def _watch(self) -> None:
        while time.monotonic() - self._asked_s < LEASE_S:
            time.sleep(_LOOK_S)
        logger.error("nobody has asked for this replica for %.0f s: it ends", LEASE_S)
        self._on_give_up()

    def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        was_ready = False
        while True:
            child = Child("vllmx_ray.core_process", self._order)
            error = None
            for report in child.reports():
                was_ready = was_ready or report.is_ready
                error = report.error
                self._report = report
                if report.is_ready:
                    delay_s = _FIRST_DELAY_S
            code = child.close()
            if error is not None and not was_ready:
                return  # the same would happen again
            logger.error("the host of the core ended with code %d: starting it again", code)
            self._report = Report()
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
