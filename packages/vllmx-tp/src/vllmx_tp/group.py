"""The other ranks as rank 0 sees them: their processes, the ring to them, and how they end."""

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
from vllmx_core.errors import RankLostError
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.stopped import is_stopped
from vllmx_engine.wire.ipc import Start, encode_frame
from vllmx_engine.wire.known_specs import KnownSpecs

from vllmx_tp.channel import Sender
from vllmx_tp.frames import AnyFrame
from vllmx_tp.hosts import RemoteHost
from vllmx_tp.messages import INLINE, NOTICE, Call, RankAnswer, RankReady
from vllmx_tp.region import Region, Word

logger = logging.getLogger("vllmx.tp")

LOOK_S = 0.2
HANG_S = 3.0
"""A rank whose heartbeat stands still for so long hangs, or was stopped."""
_FAREWELL_S = 5.0
_LAST_WORDS_S = 1.0
"""The seconds that a rank which has ended the group may take to be seen to end."""
_WAIT_S = 20e-6


class Group:
    """Ranks of a model: processes of this host, and other hosts with theirs. One thread uses it;
    another watches them.

    Args:
        found: what they load.
        region: whose memory they share with this process.
        ranks: of this host, this process left out.
        cores: of each of them.
        share: how many ranks this host has, this process among them.
        hosts: makes the other hosts; called once the processes of this one have begun.
    """

    def __init__(
        self,
        found: FoundModel,
        region: Region,
        ranks: range,
        cores: Sequence[Sequence[int]],
        share: int,
        hosts: Callable[[Group], Iterable[RemoteHost]] = lambda group: (),
    ) -> None:
        self.region, self.ranks, self._share = region, ranks, share
        self._hosts: list[RemoteHost] = []
        self._failure: RankLostError | None = None
        self._verdict = threading.Lock()
        self._ended = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
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
            for host in hosts(self):
                self._hosts.append(host)  # and it is watched while others are waited for
        except BaseException:
            self.kill()
            raise

    def _spawn(self, rank: int, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        # A thread's end would end ranks that are tied to it; the main thread's is the process's.
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
        """Tells a rank what to load. Raises RankLostError where it has ended already."""
        try:
            connection.sendall(start)
        except OSError as error:
            raise self._disconnected(f"rank {rank} ended while it started") from error

    def loaded(self) -> list[RankReady]:
        """What each of the other ranks came to, once all are loaded. Raises the VllmxError that one
        met, RankLostError where one ended without a word."""
        found = [self._answer(rank) for rank in self.ranks]
        for host in self._hosts:
            found += host.loaded(self.check)
        return found

    def _answer(self, rank: int) -> RankReady:
        try:
            data = self._line_of(self._sockets[rank - self.ranks.start])
        except OSError:  # also where the group has ended, which closes connections
            data = b""
        if not data:
            raise self._disconnected(f"rank {rank} ended while it loaded; see its log above")
        answer = msgspec.json.decode(data, type=RankAnswer)
        if answer.error is not None:
            raise answer.error.rebuild()
        assert answer.ready is not None, "a rank answers with one of both"
        return answer.ready

    def _line_of(self, one: socket.socket) -> bytes:
        """The line that a rank sends, empty where it ends first. Raises OSError, RankLostError."""
        one.settimeout(LOOK_S)
        data = b""
        while not data.endswith(b"\n"):
            try:
                more = one.recv(1 << 16)
            except TimeoutError:
                self.check()
                continue
            if not more:
                return b""
            data += more
        one.settimeout(None)
        return data

    # --- steps ------------------------------------------------------------------------------------
    def send(self, call: Call, frame: AnyFrame) -> None:
        """Puts a frame where the others read it, and sends it to each host once. Raises
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
        """Why the group has ended, if it has."""
        return self._failure

    def check(self) -> None:
        """Raises RankLostError where the group has ended."""
        if self._failure is not None:
            raise RankLostError(self._failure.message)

    def lost(self, text: str) -> RankLostError:
        """Ends the group; the first cause counts, which a rank itself may have named."""
        with self._verdict:
            if self._failure is None:
                self.region.aborted[0] = 1
                self._failure = RankLostError(self._first_cause() or text)
                logger.critical("%s: all ranks are ended", self._failure.message)
                self.kill()
        return RankLostError(self._failure.message)

    def _disconnected(self, text: str) -> RankLostError:
        """A connection is gone, which is seen before the process has ended: how that ended."""
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
        """Guards rank 0's own work: what fails there ends all, as the others wait for it."""
        try:
            yield
        except RankLostError:
            raise self.verdict() from None
        except Exception as error:
            raise self.lost(f"rank 0 failed: {type(error).__name__}: {error}") from error

    def verdict(self) -> RankLostError:
        """The cause of the end, after this process saw the group ended by another rank."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while self._failure is None and time.monotonic() < deadline_s:
            time.sleep(_WAIT_S)
        return self.lost("a rank has ended the group")

    def _first_cause(self) -> str:
        return next(filter(None, map(self.region.cause, range(self.region.num_ranks))), "")

    def _watch(self) -> None:
        """Looks at processes and heartbeats until the group ends. Between two looks no more than
        twice the interval counts, as a machine that stood still tells nothing of a rank."""
        beats = [self.region.word(rank, Word.HEARTBEAT) for rank in self.ranks]
        seen, still_s, looked_s = [0] * len(beats), [0.0] * len(beats), time.monotonic()
        while not self._ended.wait(LOOK_S):
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * LOOK_S), now_s
            ends = [host.look(passed_s, HANG_S) for host in tuple(self._hosts)]
            for index, rank in enumerate(self.ranks):
                beat = int(beats[index][0])
                moved = beat != seen[index] or (not beat and not self._is_stopped(rank))
                still_s[index] = 0.0 if moved else still_s[index] + passed_s
                seen[index] = beat
                ends.append(self._end_of(rank, still_s[index]))
            end = next(filter(None, ends), None)
            if end is not None and not self._ended.is_set():
                self.lost(end)
                return

    def _is_stopped(self, rank: int) -> bool:
        """How a rank whose first beat is still to come shows that it hangs: it may take its time to
        start."""
        return is_stopped(self._processes[rank - self.ranks.start].pid)

    def _end_of(self, rank: int, still_s: float) -> str | None:
        """How a rank has ended, if it has."""
        process = self._processes[rank - self.ranks.start]
        code = process.poll()
        if code is not None:
            return f"rank {rank} {_ended_by(code)}"
        if still_s >= HANG_S:
            return f"rank {rank} (process {process.pid}) hangs or was stopped"
        return None

    def kill(self) -> None:
        """Ends the others at once. May be called twice."""
        self._ended.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for one in self._sockets:
            one.close()
        for host in self._hosts:
            host.close()

    def close(self) -> None:
        """Lets the others close their models, and waits for them. May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        notice = NOTICE.pack(Call.CLOSE, 0, INLINE)
        for one in self._sockets:
            with suppress(OSError):  # it has ended
                one.sendall(notice)
        for host in self._hosts:
            with suppress(OSError):
                host.send(notice, b"")
        deadline_s = time.monotonic() + _FAREWELL_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("a rank (process %d) does not end: it is killed", process.pid)
        self.kill()


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}; see its log above"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
