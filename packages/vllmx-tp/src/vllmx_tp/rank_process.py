"""The process of a rank above 0: `python -P -m vllmx_tp.rank_process RANK RANKS STAGES REGION
SOCKET PARENT TIED SHARE FREE CORES`.

Started by `vllmx_tp.group` alone. It opens and loads its part of the model, then runs every step
that rank 0 runs, which it reads out of shared memory. It ends with rank 0, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
from vllmx_core.backend import ForwardStep, LoadedModel, StepHandle
from vllmx_core.errors import RankLostError, VllmxError
from vllmx_core.plan import I32, StepPlan, StepResult
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.memory import return_unused_bytes
from vllmx_core.system.standard_error import StandardError
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load import open_model
from vllmx_engine.wire.ipc import ErrorRecord, FrameReader, Start, ToCore, to_core_decoder

from vllmx_tp.channel import Reader
from vllmx_tp.executor import encode_part
from vllmx_tp.frames import read_frame, read_part
from vllmx_tp.group import HANG_S, cause_of
from vllmx_tp.liveness import PollTimer, StallTimer
from vllmx_tp.loading import Cores, load_rank
from vllmx_tp.messages import Call, RankAnswer, RankReady
from vllmx_tp.pipeline import InnerStage, LastStage
from vllmx_tp.region import Region, Word
from vllmx_tp.sampled_ids import SampledIds, compares, read_sampled

logger = logging.getLogger("vllmx.tp")

BEAT_S = 0.25
_MAX_IN_FLIGHT = 2
SPIN_S = 2e-3
"""Seconds that a rank with idle cores polls for the next step: longer than rank 0 takes to read one
and to schedule the next."""
_LATE_S = 0.2
"""Seconds that a rank with a step in flight waits for the next call before it reads that step."""
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Follower:
    """Runs what rank 0 runs, in the same order.

    If rank 0 begins a step while the previous one runs, calls arrive long before they can begin,
    and cores are busy: the rank sleeps. If rank 0 reads each step first, all ranks wait for the
    next call: the rank polls for `spin_s` before it sleeps, since waking takes longer than the
    call's way from rank 0. `spin_s` is 0 if ranks share cores.

    Some backends raise only when a step is read. So a step is also read if no call follows: rank 0
    may wait for this rank and send nothing until it gets the error.
    """

    def __init__(self, model: LoadedModel, region: Region, rank: int, spin_s: float = 0.0) -> None:
        self._model, self._region, self._rank, self._spin_s = model, region, rank, spin_s
        self._num_alone = 0
        """Steps in a row that rank 0 began when it had read all before."""
        self._aborted = region.aborted
        self._sampled = SampledIds(region, rank) if compares() else None
        self._in_flight: deque[StepHandle] = deque()
        self._num_read = 0
        self._last_ids: deque[I32] = deque(maxlen=_MAX_IN_FLIGHT)
        """Ids of the last steps that were read, which rank 0 may not have sent yet."""
        self._unsampled: ForwardStep | None = None
        self._pass: StepPlan | None = None
        """The last pass of the tower; its parts come one by one."""

    def run(self, reader: Reader) -> None:
        """Follows rank 0's calls until it closes."""
        while True:
            spin_s = self._spin_s if self._in_turns else 0.0
            try:
                call, words = reader.read(spin_s, _LATE_S if self._in_flight else None)
            except TimeoutError:
                self._finish()
                continue
            if call is Call.CLOSE:
                return
            self._num_alone = self._num_alone + 1 if call is Call.NEXT else 0
            self._call(call, words)
            reader.release()
            while self._must_finish(reader):
                self._finish()

    def _call(self, call: Call, words: I32) -> None:
        if call is Call.ENCODE:
            assert self._pass is not None, "a pass comes before its parts"
            encode_part(self._model, self._pass, *read_part(words))
            return
        if call is Call.SAMPLED:
            self._compare_with_rank_0(*read_sampled(words))
            return
        if call is Call.PASS:
            words = words.copy()  # it is needed longer than its place in the ring
        plan, rows = read_frame(words)
        match call:
            case Call.STEP | Call.NEXT if plan is not None and rows is not None:
                self._in_flight.append(self._model.step(plan, rows))
            case Call.FORWARD if plan is not None:
                self._unsampled = self._model.forward(plan)
            case Call.SAMPLE if rows is not None and self._unsampled is not None:
                self._in_flight.append(self._unsampled.sample(rows))
                self._unsampled = None
            case Call.PASS if plan is not None:
                self._pass = plan
            case _:
                raise AssertionError(f"call {call} without what belongs to it")

    @property
    def _in_turns(self) -> bool:
        """True if the next step is expected after the last one has ended; the first of overlapping
        steps also begins alone."""
        return self._num_alone > 1

    def _must_finish(self, reader: Reader) -> bool:
        at_once = self._sampled is not None or self._in_turns
        return len(self._in_flight) >= (1 if at_once else _MAX_IN_FLIGHT)

    def _finish(self) -> StepResult:
        result = self._in_flight.popleft().result()
        self._check()
        self._num_read += 1
        self._last_ids.append(result.ids)
        if self._sampled is not None:
            self._sampled.tell(result.ids)
        return result

    def _compare_with_rank_0(self, number: int, ids: I32) -> None:
        """Compares with rank 0's ids of a step, which this rank has almost finished too."""
        while self._num_read < number:
            self._finish()
        if not np.array_equal(self._last_ids[number - self._num_read - 1], ids):
            self._differs(f"rank {self._rank} sampled other ids than rank 0 in step {number}")

    def _differs(self, difference: str) -> None:
        """Ends the group."""
        self._region.write_cause(self._rank, difference)
        self._region.abort()
        raise RankLostError(difference)

    def _check(self) -> None:
        if self._aborted[0]:
            raise RankLostError("the group has ended")


class StageFollower(Follower):
    """Runs a stage of each step. The first rank of the last stage reports results at once."""

    def __init__(self, model: LoadedModel, region: Region, rank: int, spin_s: float = 0.0) -> None:
        stage, place = divmod(rank, region.ranks_of_stage)
        is_last = stage == region.num_stages - 1
        super().__init__(model if is_last else InnerStage(model), region, rank, spin_s)
        self._last = LastStage(region, rank) if is_last and place == 0 else None
        self._others = range(rank + 1, rank + region.ranks_of_stage)
        """The other ranks of its stage, if it is the first one."""
        if not is_last or region.ranks_of_stage == 1:
            self._sampled = None  # it samples nothing, or alone

    def _must_finish(self, reader: Reader) -> bool:
        if self._sampled is not None:
            return super()._must_finish(reader)
        waits = self._last is not None and bool(self._in_flight) and not reader.has_more
        return waits or len(self._in_flight) >= _MAX_IN_FLIGHT

    def _finish(self) -> StepResult:
        result = super()._finish()
        if self._last is not None:
            if self._sampled is not None:
                difference = self._sampled.difference(self._others, self._check)
                if difference is not None:
                    self._differs(difference)
            self._last.tell(result)
        return result


def _beat(region: Region, rank: int, parent: int) -> None:
    """Sends heartbeats, and ends this process with rank 0 or, on another host, with the process
    that acts for rank 0: nothing else could end the ranks of a stopped process."""
    word, host = (region.word(one, Word.HEARTBEAT) for one in (rank, 0))
    stall, timer, still_s = StallTimer(), PollTimer(BEAT_S), 0.0
    while os.getppid() == parent and still_s < HANG_S:
        word[0] = int(word[0]) % 0xFFFFFFFF + 1
        time.sleep(BEAT_S)
        beat = int(host[0])
        still_s = stall.look(beat, timer.passed_s(), moves=not beat)
    if still_s >= HANG_S:
        cause = f"`vllmx rank` (process {parent}) hangs or was stopped"
        logger.error("%s: rank %d ends", cause, rank)
        region.write_cause(rank, cause)
        region.abort()
    os._exit(1)


def _start(connection: socket.socket) -> Start:
    reader: FrameReader[ToCore] = FrameReader(to_core_decoder)
    while data := connection.recv(1 << 16):
        for message in reader.feed(data):
            assert isinstance(message, Start), f"{message} before the start"
            return message
    raise EOFError


def serve(
    region: Region,
    rank: int,
    connection: socket.socket,
    cores: Cores,
    share: int,
    free_bytes: int | None,
) -> int:
    """Loads, runs steps, and returns the exit code."""
    start = _start(connection)
    logging.getLogger("vllmx").setLevel(start.log_level)
    tower = None if start.mmproj is None else Path(start.mmproj)
    registry = start.specs.registry()
    found = FoundModel(start.config, Path(start.path), registry, start.progress, tower)
    try:
        opened = open_model(found, free_bytes)
        try:
            model = load_rank(opened, region, rank, cores, share=share, config=found.config)
        finally:
            opened.checkpoint.weights.close()
            return_unused_bytes()
    except RankLostError:
        raise  # another rank reports the cause
    except VllmxError as error:
        _answer(connection, RankAnswer(error=ErrorRecord.of(error)))
        while connection.recv(1 << 16):  # exiting before rank 0 has read it would hide the cause
            pass
        return 0
    _answer(connection, RankAnswer(ready=RankReady.of(model.info)))
    kind = StageFollower if found.config.pipeline_parallel_size > 1 else Follower
    spin_s = SPIN_S if cores else 0.0
    kind(model, region, rank, spin_s).run(Reader(connection, region, rank))
    model.close()
    return 0


def _answer(connection: socket.socket, answer: RankAnswer) -> None:
    connection.sendall(msgspec.json.encode(answer) + b"\n")


def main() -> int:
    """Signals are rank 0's business."""
    rank, ranks, stages, region_fd, socket_fd, parent, tied, share, free = map(int, sys.argv[1:10])
    cores = tuple(map(int, filter(None, sys.argv[10].split(","))))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(stream=StandardError())
    faulthandler.enable()
    if tied and sys.platform == "linux":  # ends it even while it is stopped
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    region = Region(region_fd, ranks, stages)
    threading.Thread(target=_beat, args=(region, rank, parent), daemon=True).start()
    try:
        connection = socket.socket(fileno=socket_fd)
        return serve(region, rank, connection, cores, share, free or None)
    except EOFError:
        return 0  # rank 0 is gone, or has given up
    except RankLostError as error:  # another rank has ended the group and said why
        logger.warning("rank %d ends: %s", rank, error.message)
        return 1
    except BaseException as error:
        logger.exception("rank %d failed", rank)
        region.write_cause(rank, cause_of(rank, error))
        region.abort()
        return 1


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads of the backend may wait for ranks that are gone
