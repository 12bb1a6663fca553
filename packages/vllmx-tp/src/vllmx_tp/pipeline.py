"""Pipeline stages of a model: rank 0's side, the others' side, and the result of a step as bytes.

Rank 0 sends each step to all ranks at once, runs its first stage and returns. Stages pass their
output to the next stage by themselves; the last one samples and reports to rank 0. So as many steps
run at once as there are stages, each in another stage. A token that a step feeds must have been
sampled before, as the first stage does not see the last one's ids: steps in flight have different
rows (`LoadedInfo.num_stages`). A stage may have several ranks with the same ops; each passes its
part to the rank at its place in the next stage.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
from vllmx_core.backend import ForwardStep, LoadedInfo, LoadedModel, StepHandle
from vllmx_core.backend_kit.in_flight import MAX_STEPS
from vllmx_core.errors import RankLostError
from vllmx_core.plan import AnyArray, LogprobRows, SamplingRows, StepPlan, StepResult
from vllmx_core.records import Record

from vllmx_tp.communicator import Incoming, Outgoing
from vllmx_tp.frames import Frame
from vllmx_tp.group import Group
from vllmx_tp.messages import Call
from vllmx_tp.region import Region

_LOOK_S = 0.2
_NO_ROWS = np.zeros(0, np.int32)
_NOTHING_SAMPLED = SamplingRows.greedy(0)


class InnerStage:
    """A `LoadedModel` of a stage before the last: it samples nothing."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @property
    def info(self) -> LoadedInfo:
        return self._model.info

    def step(self, plan: StepPlan, rows: SamplingRows) -> StepHandle:
        return self._model.step(replace(plan, logit_rows=_NO_ROWS), _NOTHING_SAMPLED)

    def forward(self, plan: StepPlan) -> ForwardStep:
        """Nobody calls it: no row of a step waits for the one before."""
        raise AssertionError("a stage runs whole steps")

    def close(self) -> None:
        self._model.close()


class Handle(Record):
    """A `StepHandle`."""

    result: Callable[[], StepResult]


class LastStage:
    """Reports the result of each step to rank 0; `rank` is the first one of the last stage."""

    def __init__(self, region: Region, rank: int) -> None:
        self._outgoing = Outgoing(region, rank)

    def tell(self, result: StepResult) -> None:
        """Sends a result; returns once rank 0 has room for it."""
        self._outgoing.send_message(encode_result(result))


class PipelinedModel:
    """A `vllmx_core.backend.LoadedModel` over the first stage and a group with the others. A thread
    receives results as they arrive, so that stages never wait for the engine to read them."""

    def __init__(self, model: LoadedModel, group: Group, info: LoadedInfo) -> None:
        self._model, self._group, self._info = InnerStage(model), group, info
        self._own: deque[tuple[int, StepHandle]] = deque()
        """Numbers and handles of the first stage's steps that were not read."""
        self._num_launched = self._num_read = 0
        self._results: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
        """Results with their arrival times; None marks the end."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._take, name="vllmx-results", daemon=True)
        self._thread.start()

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @property
    def failure(self) -> RankLostError | None:
        """The reason why the group has ended, if it has; steps raise it too."""
        return self._group.failure

    def step(self, plan: StepPlan, rows: SamplingRows) -> Handle:
        """See `vllmx_core.backend.LoadedModel.step`; as many are in flight as there are stages."""
        assert self._num_launched - self._num_read < self._info.num_stages, "too many in flight"
        launched_s = time.perf_counter()
        self._group.send(Call.STEP, Frame(plan, rows))
        with self._group.guarded():
            self._read_own(self._num_launched - MAX_STEPS)
            self._own.append((self._num_launched, self._model.step(plan, rows)))
        self._num_launched += 1
        return Handle(partial(self.read, launched_s))

    def forward(self, plan: StepPlan) -> ForwardStep:
        """Nobody calls it: no row of a step waits for the one before."""
        return self._model.forward(plan)

    def read(self, launched_s: float) -> StepResult:
        """The oldest result that was not read."""
        found = self._next()
        if found is None:
            raise self._group.verdict()
        came_s, data = found
        with self._group.guarded():
            self._read_own(self._num_read)  # it has long ended
            result = decode_result(data, came_s - launched_s)
        self._num_read += 1
        return result

    def _read_own(self, last: int) -> None:
        """Waits for the first stage's steps up to that number, and raises what they raise."""
        while self._own and self._own[0][0] <= last:
            self._own.popleft()[1].result()

    def _next(self) -> tuple[float, bytes] | None:
        """The last stage's next result. It never comes if the first stage failed, which a backend
        may report only when its step is read."""
        while True:
            try:
                return self._results.get(timeout=_LOOK_S)
            except Empty:
                self._group.check()
                with self._group.guarded():
                    self._read_own(self._num_read)

    def _take(self) -> None:
        incoming = Incoming(self._group.region, 0)
        try:
            while True:
                data = incoming.recv_message()
                self._results.put((time.perf_counter(), data))
        except RankLostError:
            pass  # the group has ended
        except Exception as error:  # no message of a result
            self._group.failed(error)
        finally:
            self._results.put(None)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RankLostError):
            while self._num_read < self._num_launched:  # or a stage would wait to be read
                self.read(0.0)
        self._group.close(self._model.close)
        self._thread.join()
        self._group.region.close()


_LOGPROBS = ("chosen", "rank", "top_ids", "top")
_OTHERS = ("ids", "logits", "vectors")


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_Arrays = dict[str, _Array]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Arrays)


def encode_result(result: StepResult) -> bytes:
    """Encodes all of the result except the time, which rank 0 measures itself."""
    found = {name: getattr(result, name) for name in _OTHERS}
    if result.logprobs is not None:
        found |= {name: getattr(result.logprobs, name) for name in _LOGPROBS}
    return _encoder.encode(
        {
            name: _Array(array.dtype.str, array.shape, array.tobytes())
            for name, array in found.items()
            if array is not None
        }
    )


def decode_result(data: bytes, elapsed_s: float) -> StepResult:
    """See `encode_result`."""
    found: dict[str, Any] = {name: _array(one) for name, one in _decoder.decode(data).items()}
    logprobs = None
    if "chosen" in found:
        logprobs = LogprobRows(*(found[name] for name in _LOGPROBS))
    return StepResult(
        found["ids"],
        logprobs,
        found.get("logits"),
        elapsed_s=elapsed_s,
        vectors=found.get("vectors"),
    )


def _array(one: _Array) -> AnyArray:
    return np.frombuffer(one.data, one.dtype).reshape(one.shape).copy()
