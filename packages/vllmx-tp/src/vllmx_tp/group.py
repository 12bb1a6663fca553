"""Rank 0's view of the other ranks: their processes, the ring to them, and how they end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
from vllmx_core.errors import RankLostError, VllmxError
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.supervisor import is_stopped
from vllmx_engine.wire.ipc import ErrorRecord, KnownSpecs, Start, encode_frame

from vllmx_tp.channel import Sender
from vllmx_tp.frames import AnyFrame
from vllmx_tp.hosts import RemoteHost
from vllmx_tp.liveness import CallDeadlines, PollTimer, StallTimer
from vllmx_tp.messages import INLINE, NOTICE, Call, RankAnswer, RankReady
from vllmx_tp.region import Region, Word

logger = logging.getLogger("vllmx.tp")

LOOK_S = 0.2
HANG_S = 3.0
"""Seconds without a heartbeat after which a rank counts as hung or stopped."""
_FAREWELL_S = 5.0
_LAST_WORDS_S = 1.0
"""Seconds within which a rank that ended the group must be seen to exit."""
_WAIT_S = 20e-6


class Group:
    """The other ranks of a model: processes of this host, and other hosts with theirs. One thread
    uses the group; others watch the ranks.

    Args:
        ranks: those of this host, without this process.
        cores: the cores of each of them.
        share: the number of ranks on this host, with this process.
        hosts: makes the other hosts; called once this host's processes have started.
        free_bytes: free memory of this host's ranks before any of them allocates; 0: each measures
            it itself.
    """

    def __init__(
        self,
        found: FoundModel,
        region: Region,
        ranks: range,
        cores: Sequence[Sequence[int]],
        share: int,
        hosts: Callable[[Group], Iterable[RemoteHost]] = lambda group: (),
        free_bytes: int = 0,
    ) -> None:
        self.region, self.ranks, self._share = region, ranks, share
        self._free_bytes = free_bytes
        self._hosts: list[RemoteHost] = []
        self._end: ErrorRecord | None = None
        """The first cause of the group's end, if it has ended."""
        self._verdict = threading.Lock()
        self._ended = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._ready: dict[int, RankReady] = {}
        self._hearers: list[threading.Thread] = []
        self._sender = Sender(region, ranks, self._sockets, self.check)
        try:
            for rank, its_cores in zip(ranks, cores, strict=True):
                self._spawn(rank, its_cores)
            start = encode_frame(
                Start(
                    config=found.config,
                    path=str(found.path),
                    mmproj=None if found.mmproj is None else str(found.mmproj),
                    specs=KnownSpecs.of(found.registry),
                    progress=False,
                    log_level=logging.getLogger("vllmx").level,
                )
            )
            for rank, one in zip(ranks, self._sockets, strict=True):
                self._begin(rank, one, start)
            threading.Thread(target=self._watch, name="vllmx-ranks", daemon=True).start()
            for rank in ranks:
                hearer = threading.Thread(target=self._hear, args=(rank,), daemon=True)
                hearer.start()
                self._hearers.append(hearer)
            for host in hosts(self):
                self._hosts.append(host)  # it is watched while others start
        except BaseException:
            self.kill()
            raise

    def _spawn(self, rank: int, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        # Ranks are tied to the thread that starts them: only the main thread lives long enough.
        tied = int(threading.current_thread() is threading.main_thread())
        command = [
            sys.executable,
            "-P",
            "-m",
            "vllmx_tp.rank_process",
            str(rank),
            str(self.region.num_ranks),
            str(self.region.num_stages),
            str(self.region.fd),
            str(theirs.fileno()),
            str(os.getpid()),
            str(tied),
            str(self._share),
            str(self._free_bytes),
            ",".join(map(str, cores)),
        ]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(self.region.fd, theirs.fileno()),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._processes.append(process)

    # --- loading ----------------------------------------------------------------------------------
    def _begin(self, rank: int, connection: socket.socket, start: bytearray) -> None:
        """Sends a rank the model to load. Raises RankLostError if it has ended already."""
        try:
            connection.sendall(start)
        except OSError as error:
            raise self._disconnected(f"rank {rank} ended while it started") from error

    def loaded(self) -> list[RankReady]:
        """Waits until all are loaded and returns the other ranks' reports. Raises the VllmxError of
        a rank, or RankLostError if one ended without a report."""
        for hearer in self._hearers:
            while hearer.is_alive():
                self.check()
                hearer.join(LOOK_S)
        self.check()
        found = [self._ready[rank] for rank in self.ranks]
        for host in self._hosts:
            found += host.loaded(self.check)
        return found

    def _hear(self, rank: int) -> None:
        """Waits for a rank's report. A rank that cannot load its part ends the group at once, since
        rank 0 may still load for a long time."""
        try:
            data = self._line_of(self._sockets[rank - self.ranks.start])
        except OSError:
            data = b""
        if not data:
            if not self._ended.is_set():
                self._disconnected(f"rank {rank} ended while it loaded; see its log above")
            return
        answer = msgspec.json.decode(data, type=RankAnswer)
        if answer.error is not None:
            self._end_with(answer.error.rebuild())
        else:
            assert answer.ready is not None, "a rank answers with one of both"
            self._ready[rank] = answer.ready

    @staticmethod
    def _line_of(one: socket.socket) -> bytes:
        """The line that a rank sends; empty if it ends first. Raises OSError."""
        data = b""
        while not data.endswith(b"\n"):
            more = one.recv(1 << 16)
            if not more:
                return b""
            data += more
        return data

    # --- steps ------------------------------------------------------------------------------------
    def send(self, call: Call, frame: AnyFrame) -> None:
        """Sends a frame to this host's ranks through the ring, and once to each other host. Raises
        RankLostError."""
        self.check()
        try:
            if self._hosts:
                data = frame.to_bytes()
                notice = NOTICE.pack(call, len(data), INLINE)
                for host in self._hosts:
                    host.send(notice, data)
            self._sender.send(call, frame)
        except OSError as error:
            raise self._disconnected("a rank has closed its connection") from error

    # --- the end ----------------------------------------------------------------------------------
    @property
    def failure(self) -> RankLostError | None:
        """The reason why the group has ended since it was loaded, if it has."""
        found = None if self._end is None else self._end.rebuild()
        return found if isinstance(found, RankLostError) else None

    def check(self) -> None:
        """Raises RankLostError if the group has ended, or a rank's VllmxError during loading."""
        if self._end is not None:
            raise self._end.rebuild()

    def lost(self, text: str) -> VllmxError:
        """Ends the group; the first cause counts, which a rank may have reported itself."""
        return self._end_with(RankLostError(self._first_cause() or text))

    def failed(self, error: Exception) -> VllmxError:
        """Ends the group with an error of rank 0, which is logged."""
        logger.error("rank 0 failed", exc_info=error)
        return self.lost(cause_of(0, error))

    def _end_with(self, error: VllmxError) -> VllmxError:
        """Ends the group, unless it has ended, and returns the cause."""
        with self._verdict:
            if self._end is None:
                self._end = ErrorRecord.of(error)
                if isinstance(error, RankLostError):
                    logger.critical("%s: all ranks are ended", error.message)
                self.kill()
        return self._end.rebuild()

    def _disconnected(self, text: str) -> VllmxError:
        """Handles a lost connection, which is noticed before the process has exited: waits for the
        exit to describe it."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline_s:
            ends = (self._end_of(rank, 0.0) for rank in self.ranks)
            found = next(filter(None, ends), None)
            if found is not None:
                return self.lost(found)
            time.sleep(_WAIT_S)
        return self.lost(text)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Guards rank 0's own work: an error ends the group, since the others wait for rank 0."""
        try:
            yield
        except RankLostError:
            raise self.verdict() from None
        except Exception as error:
            raise self.failed(error) from error

    def verdict(self) -> VllmxError:
        """The cause, after this process noticed that another rank ended the group."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while self._end is None and time.monotonic() < deadline_s:
            time.sleep(_WAIT_S)
        return self.lost("a rank has ended the group")

    def _first_cause(self) -> str:
        return next(filter(None, map(self.region.cause, range(self.region.num_ranks))), "")

    def _watch(self) -> None:
        """Watches processes, heartbeats and waits until the group ends."""
        beats = [self.region.word(rank, Word.HEARTBEAT) for rank in self.ranks]
        stall, timer = [StallTimer() for _ in self.ranks], PollTimer(LOOK_S)
        waits = CallDeadlines(self.region)
        while not self._ended.wait(LOOK_S):
            passed_s, hosts = timer.passed_s(), tuple(self._hosts)
            ends = [host.look(passed_s, HANG_S) for host in hosts]
            for index, rank in enumerate(self.ranks):
                beat = int(beats[index][0])
                moves = not beat and not is_stopped(self._processes[rank - self.ranks.start].pid)
                still_s = stall[index].look(beat, passed_s, moves=moves)
                ends.append(self._end_of(rank, still_s))
            ends.append(waits.look(passed_s))
            error = next((host.error for host in hosts if host.error), None)
            if error is not None:
                self._end_with(error)
            end = next(filter(None, ends), None)
            if end is not None and not self._ended.is_set():
                self.lost(end)

    def _end_of(self, rank: int, still_s: float) -> str | None:
        """Describes how a rank has ended, or None."""
        process = self._processes[rank - self.ranks.start]
        code = process.poll()
        if code is not None:
            return f"rank {rank} {_ended_by(code)}"
        if still_s >= HANG_S:
            return f"rank {rank} (process {process.pid}) hangs or was stopped"
        return None

    def kill(self) -> None:
        """Ends the others at once. May be called twice."""
        self.region.abort()  # ends the waits of native threads and links
        self._ended.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for one in self._sockets:
            one.close()
        for host in self._hosts:
            host.close()

    def close(self, close_own: Callable[[], None] = lambda: None) -> None:
        """Closes the models of all ranks together (rank 0's by `close_own`), since libraries such
        as NCCL wait for each other on closing, and waits for the processes. May be called twice."""
        if self._ended.is_set():
            close_own()
            return
        self._ended.set()
        try:
            notice = NOTICE.pack(Call.CLOSE, 0, INLINE)
            for one in self._sockets:
                with suppress(OSError):  # it has ended
                    one.sendall(notice)
            for host in self._hosts:
                host.say(Call.CLOSE, _LAST_WORDS_S)
            closed = threading.Event()
            ending = threading.Thread(
                target=self._end_others, args=(closed,), name="vllmx-ranks-end", daemon=True
            )
            ending.start()
            try:
                close_own()
            finally:
                closed.set()
            ending.join()
        finally:
            self.kill()

    def _end_others(self, closed: threading.Event) -> None:
        """Waits for the processes and for rank 0's model, which may wait in a step for a rank that
        hangs. Kills processes that do not end in time."""
        deadline_s = time.monotonic() + _FAREWELL_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("a rank (process %d) does not end: it is killed", process.pid)
                self.kill()
        if not closed.wait(max(0.0, deadline_s - time.monotonic())):
            self.kill()


def cause_of(rank: int, error: BaseException) -> str:
    """The cause for requests and `/health`: only the class of errors that are not meant for users;
    the log has the rest."""
    if isinstance(error, VllmxError):
        return f"rank {rank} failed: {error.message}"
    name = type(error).__name__
    return f"rank {rank} failed with an internal error ({name}); see its log above"


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}; see its log above"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
