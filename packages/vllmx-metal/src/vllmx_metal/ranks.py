"""Calls between the ranks of a model, on MLX's arrays.

Ranks that MLX has joined in a group (`ring`) add in the step's graph; others meet through the host,
which reads what was built until then. What a stage hands to the next goes through the host in any
case, once a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from vllmx_core.communicator import ArrayRanks, Communicator, HostRanks
from vllmx_core.errors import RankLostError

_LOST = ("[ring]", "[jaccl]")
"""MLX's errors between ranks begin with these."""


class MetalRanks(ArrayRanks[mx.array], Protocol):
    """One rank's end, on arrays of float32."""

    @property
    def runs_ahead(self) -> bool:
        """True if calls are ops of a graph, so that a step can be built while one runs."""
        ...

    @property
    def over(self) -> str:
        """The transport of sums, for people."""
        ...

    @property
    def ended(self) -> bool:
        """True if calls may wait for ever for ranks that are gone."""
        ...

    def failure(self, error: BaseException) -> BaseException:
        """The cause of a step's error: that the others have ended, perhaps."""
        ...


class MetalHostRanks(HostRanks[mx.array]):
    """Ranks that meet through a communicator of the host, which computes what was built so far."""

    runs_ahead = False
    over = "the host"
    ended = False
    """Calls that wait watch the group, and raise."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator, np.array, mx.array)

    def failure(self, error: BaseException) -> BaseException:
        return error


class GroupRanks:
    """Ranks that MLX has joined: their calls are ops of the graph, and nothing is read back.

    Args:
        group: of these ranks alone, in their order.
        communicator: for what goes from stage to stage, and to see the end of the others.
        kind: what MLX calls the group.
    """

    def __init__(self, group: mx.distributed.Group, communicator: Communicator, kind: str) -> None:
        self._group, self._host, self._kind = group, MetalHostRanks(communicator), kind
        shared = communicator.shared
        self._hands_on = shared is not None and shared.stages is not None
        self._aborted = None if shared is None else ctypes.c_uint32.from_address(shared.abort)
        self._before: mx.array | None = None
        """The call before this one in the same step."""

    @property
    def runs_ahead(self) -> bool:
        """See `MetalRanks.runs_ahead`."""
        return not self._hands_on

    @property
    def over(self) -> str:
        """See `MetalRanks.over`."""
        return f"MLX ({self._kind})"

    def all_reduce(self, x: mx.array) -> mx.array:
        """See `ArrayRanks.all_reduce`."""
        self._before = mx.distributed.all_sum(self._in_turn(x), group=self._group)
        return self._before

    def all_gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """See `ArrayRanks.all_gather`. MLX takes parts of one size."""
        rows, width = len(x), max(widths)
        if not rows:
            return mx.zeros((0, sum(widths)))
        padded = mx.pad(self._in_turn(x), [(0, 0), (0, width - x.shape[1])])
        found = mx.distributed.all_gather(padded, group=self._group)
        self._before = None  # it is the last of a step, and large
        parts = found.reshape(len(widths), rows, width)
        return mx.concatenate([part[:, :own] for part, own in zip(parts, widths, strict=True)], 1)

    def _in_turn(self, x: mx.array) -> mx.array:
        """x, behind the call before: graphs of ranks differ, by a bias that one of them adds, and
        what does not depend on each other would not run in one order on all."""
        if self._before is None:
            return x
        found: mx.array = mx.depends(x, self._before)
        return found

    def send(self, x: mx.array) -> None:
        """See `ArrayRanks.send`."""
        self._host.send(x)

    def recv(self, shape: tuple[int, ...]) -> mx.array:
        """See `ArrayRanks.recv`."""
        return self._host.recv(shape)

    @property
    def ended(self) -> bool:
        """See `MetalRanks.ended`. MLX raises for most calls; for some of a long graph it waits."""
        return self._aborted is not None and bool(self._aborted.value)

    def failure(self, error: BaseException) -> BaseException:
        """See `MetalRanks.failure`."""
        if isinstance(error, RuntimeError) and str(error).startswith(_LOST):
            return RankLostError(f"a call between ranks failed: {error}")
        return error
