"""Merges the core's updates more, less or at random, as a busy machine would.

How many tokens an update carries depends on who runs first. A test that passes only for one such
number fails by chance: `pytest tests/null --updates all --updates none --updates 7` runs each test
with every update merged that can be, with none, and with a random choice seeded by 7.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from vllmx_engine.core_start import ThreadFrontend
from vllmx_engine.wire.ipc import FromCore, Outputs
from vllmx_engine.wire.outbox import Updates

QUIET_S = 0.05
"""Updates held back are delivered when the core has said nothing for so long: a test may hold the
core's steps until it has seen a token."""
_LOOP_TURNS = 20
"""Turns of the event loop in which consumers take an update before the core makes the next one."""
_GIVE_UP_S = 1.0
"""The event loop may itself be waiting for the core."""


class Merging:
    """Stands between a core on a thread and its event loop."""

    def __init__(self, frontend: ThreadFrontend, rng: random.Random | None) -> None:
        self._frontend = frontend
        self._rng = rng
        """None: merges everything."""
        self._held = Updates()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def emit(self, message: FromCore) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._held.add(message)
            ends = not isinstance(message, Outputs) or all(
                output.finish_reason is not None for output in message.outputs
            )
            if ends or (self._rng is not None and self._rng.random() < 0.4):
                self._release()
            else:
                self._timer = threading.Timer(QUIET_S, self._release_late)
                self._timer.daemon = True
                self._timer.start()

    def _release_late(self) -> None:
        with self._lock:
            self._release()

    def _release(self) -> None:
        for message in self._held.take():
            self._frontend._on_loop(self._frontend._take, message)


def merge_updates(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Lets every core on a thread deliver its updates as `how` says: all, none or a seed."""
    if how == "none":
        monkeypatch.setattr(ThreadFrontend, "_emit", _emit_singly)
        return
    rng = None if how == "all" else random.Random(int(how))

    def emit(self: Any, message: FromCore) -> bool:
        if not hasattr(self, "merging"):
            self.merging = Merging(self, rng)
        self.merging.emit(message)
        return True

    monkeypatch.setattr(ThreadFrontend, "_emit", emit)


def _emit_singly(self: Any, message: FromCore) -> bool:
    """Delivers an update and lets consumers take it before the core goes on."""
    taken = threading.Event()

    def turn(turns: int) -> None:
        if turns == 0:
            taken.set()
        else:
            asyncio.get_running_loop().call_soon(turn, turns - 1)

    self._on_loop(self._take, message)
    self._on_loop(turn, _LOOP_TURNS)
    taken.wait(_GIVE_UP_S)
    return True
