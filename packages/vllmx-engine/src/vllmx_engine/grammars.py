"""The process that checks grammars: `python -P -m vllmx_engine.grammars SOCKET`.

Started by `vllmx_engine.link.grammar_process` alone. It receives the vocabulary, builds its trie
once, and then checks each grammar in a child of its own (by `fork`, which shares the trie). The
child has bounds on time and memory and is killed when it exceeds them, so a grammar can only harm
its own child.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque

import msgspec
from vllmx_core.errors import VllmxError
from vllmx_core.records import MutableRecord, field
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.standard_error import StandardError

from vllmx_engine.grammar.check import check
from vllmx_engine.grammar.vocabulary import Lexicon
from vllmx_engine.wire.grammars import (
    CheckGrammar,
    ToGrammars,
    Verdict,
    Vocabulary,
    to_grammars_decoder,
)
from vllmx_engine.wire.ipc import FrameError, FrameReader, encode_frame

logger = logging.getLogger("vllmx.grammars")

CHECK_S = 2.0
"""Processor time for a grammar and its first masks, so that the verdict does not depend on what
else the machine does."""
CHECK_WALL_S = 30.0
"""Wall seconds after which a check is given up without a verdict: the machine is too busy."""
CHECK_BYTES = 1 << 29
"""Address space that a check may take in addition to that of the process."""
NUM_CHILDREN = 2
_NICENESS = 12
"""The niceness of a check: computing answers goes first. It leaves a check 6 % of a core that
computes, so that two of them cost answers no more; most take a few milliseconds."""
_RECEIVE_BYTES = 1 << 18
_TOO_SLOW = (
    f"the grammar takes more than {CHECK_S:g} s of processor time to prepare: simplify it (fewer"
    " optional properties, choices or nested repetitions)"
)
_TOO_LARGE = (
    f"the grammar takes more than {CHECK_BYTES >> 20} MiB to prepare, or nests too deeply: simplify"
    " it (fewer properties, choices or repetitions)"
)


_TOO_BUSY = (
    f"the grammar could not be checked within {CHECK_WALL_S:g} s, because the server is too busy:"
    " try again later"
)
_NO_MEMORY = "the server has no memory to check the grammar for now: try again later"


class _Child(MutableRecord):
    """A check on its way."""

    pid: int
    pipe: int
    call_id: int
    deadline_s: float
    data: bytearray = field(default_factory=bytearray)


class GrammarServer:
    """Answers what comes through the socket until its other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader: FrameReader[ToGrammars] = FrameReader(to_grammars_decoder)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._waiting: deque[CheckGrammar] = deque()
        self._children: dict[int, _Child] = {}
        """Child processes by their pipes."""
        self._lexicon: Lexicon | None = None

    def run(self) -> None:
        """Raises FrameError, OSError."""
        while True:
            while self._waiting and len(self._children) < NUM_CHILDREN:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(self._time_left_s()):
                if key.fileobj is self._socket:
                    data = self._socket.recv(_RECEIVE_BYTES)
                    if not data:
                        return
                    for message in self._reader.feed(data):
                        self._take(message)
                else:
                    self._read(self._children[key.fd])
            self._kill_late()

    def close(self) -> None:
        """Ends the children."""
        for child in list(self._children.values()):
            self._kill(child)

    def _take(self, message: ToGrammars) -> None:
        match message:
            case Vocabulary():
                self._lexicon = Lexicon.of(message)
                gc.collect()
                gc.freeze()  # children share these pages as long as nobody writes to them
            case CheckGrammar():
                self._waiting.append(message)

    def _time_left_s(self) -> float | None:
        deadlines = [child.deadline_s for child in self._children.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _start(self, request: CheckGrammar) -> None:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            logger.warning("no process for the check of a grammar: %s", error)
            os.close(reading)
            os.close(writing)
            self._answer_open(request.call_id, _NO_MEMORY)
            return
        if not pid:
            _check_and_exit(request, self._lexicon, writing)
        os.close(writing)
        deadline_s = time.monotonic() + CHECK_WALL_S
        self._children[reading] = _Child(pid, reading, request.call_id, deadline_s)
        self._selector.register(reading, selectors.EVENT_READ)

    def _read(self, child: _Child) -> None:
        data = os.read(child.pipe, _RECEIVE_BYTES)
        if data:
            child.data += data
            return
        status = self._reap(child)  # it has closed its end, so it exits
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            self._socket.sendall(child.data)
            return
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        logger.info("the check of a grammar ended with status %d", status)
        if killed_by == signal.SIGKILL:  # by the system, which lacks memory
            self._answer_open(child.call_id, _NO_MEMORY)
        else:
            error = _TOO_SLOW if killed_by == signal.SIGPROF else _TOO_LARGE
            self._socket.sendall(encode_frame(Verdict(child.call_id, error=error)))

    def _kill_late(self) -> None:
        now_s = time.monotonic()
        for child in [one for one in self._children.values() if one.deadline_s <= now_s]:
            self._kill(child)
            self._answer_open(child.call_id, _TOO_BUSY)

    def _answer_open(self, call_id: int, error: str) -> None:
        self._socket.sendall(encode_frame(Verdict(call_id, error=error, is_open=True)))

    def _kill(self, child: _Child) -> None:
        os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the id is its own
        self._reap(child)

    def _reap(self, child: _Child) -> int:
        """Waits for a child's end; returns how it ended."""
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        return os.waitpid(child.pid, 0)[1]


def _check_and_exit(request: CheckGrammar, lexicon: Lexicon | None, pipe: int) -> None:
    """Checks a grammar in the child process, and never returns."""
    try:
        _limit()
        assert lexicon is not None, "no vocabulary was sent"
        try:
            verdict = Verdict(request.call_id, check(request.spec, lexicon))
        except VllmxError as error:
            verdict = Verdict(request.call_id, error=error.message)
        view = memoryview(encode_frame(verdict))
        while view:
            view = view[os.write(pipe, view) :]
        os.close(pipe)
        os._exit(0)
    except MemoryError:
        os._exit(2)
    except BaseException:
        logger.exception("the check of a grammar failed")
        os._exit(1)


def _limit() -> None:
    """Processor time and memory of this process from here on."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CHECK_S)  # it has no handler, so it ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return  # other systems do not tell; time bounds what can be taken
    size = pages * resource.getpagesize() + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> int:
    """Signals are the parent's business: when it goes, so does the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(stream=StandardError())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be there in children
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    server = GrammarServer(connection)
    try:
        server.run()
    except (FrameError, OSError, msgspec.MsgspecError) as error:
        logger.error("the process that checks grammars ends: %s", error)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
