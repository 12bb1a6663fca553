"""The way to the process that checks grammars (`vllmx_engine.grammars`), and what it said before.

It is started by `GrammarChecker.prepare`, else at the first grammar. Should it die, the next
grammar starts another one. A verdict on a grammar is kept; that none was found is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import socket
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, Protocol

from vllmx_core.errors import GrammarCheckError, GrammarError, QueueFullError, VllmxError
from vllmx_core.records import MutableRecord, field
from vllmx_core.sampling import SamplingParams

from vllmx_engine.grammar.spec import grammar_spec
from vllmx_engine.link.supervisor import listen, socket_folder, spawn
from vllmx_engine.wire.grammars import (
    CheckGrammar,
    GrammarSpec,
    Verdict,
    Vocabulary,
    verdict_decoder,
)
from vllmx_engine.wire.ipc import FrameError, FrameReader, encode_frame

logger = logging.getLogger("vllmx.supervisor")

MAX_WAITING = 256
"""Grammars that are checked or wait for it."""
MAX_CLIENT_WAITING = 32
"""Grammars of one client that are checked or wait."""
MAX_KEPT_CHARS = 1 << 24
"""The characters of grammars whose verdict is remembered."""
START_S = 30.0
"""The seconds for the process to come up."""
ANSWER_S = 60.0
"""The seconds for an answer, in which other checks may come first. A process that answered nobody
meanwhile hangs."""
_POLL_S = 0.02
_ATTEMPTS = 2
_RECEIVE_BYTES = 1 << 18
_INLINE_CHARS = 1 << 16
"""Longer schemas are read on a thread; the event loop goes on meanwhile."""
Answer = str | GrammarError
"""The grammar as the core takes it, or why no answer can follow it."""


Refusal = Literal["invalid", "overloaded", "failed"]
"""A grammar that no answer can follow; too many that wait; the process that checks them."""


class GrammarObserver(Protocol):
    """The listener that gets the results of checked grammars."""

    def grammar_compiled(self, seconds: float) -> None:
        """One was checked, for better or worse."""
        ...

    def grammar_refused(self, why: Refusal) -> None:
        """A request was refused for its grammar."""
        ...


class GrammarProcess:
    """One life of the process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._calls: dict[int, asyncio.Future[Verdict]] = {}
        self._call_ids = itertools.count()
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]
        self._num_answers = 0
        self.lost = False

    @classmethod
    async def start(cls, vocabulary: Vocabulary) -> GrammarProcess:
        """Raises VllmxError when it does not come up."""
        folder = socket_folder()
        try:
            with listen(folder / "core.sock") as listener:
                started = cls(spawn(folder / "core.sock", "vllmx_engine.grammars"))
                try:
                    connection = await started._accept(listener)
                    reader, started._writer = await asyncio.open_connection(sock=connection)
                except BaseException:
                    started._kill()
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        started._reading = asyncio.ensure_future(started._read(reader))
        started._writer.write(encode_frame(vocabulary))
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    async def check(self, spec: GrammarSpec) -> Verdict:
        """Checks a grammar. Raises ConnectionError if the process dies or hangs, GrammarCheckError
        if it reaches no verdict."""
        if self.lost:
            raise ConnectionError
        call_id = next(self._call_ids)
        call: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = call
        num_answers = self._num_answers
        try:
            self._writer.write(encode_frame(CheckGrammar(call_id, spec)))
            verdict = await asyncio.wait_for(call, ANSWER_S)
        except TimeoutError:
            if self._num_answers == num_answers:
                logger.error("the process that checks grammars hangs")
                self.lost = True
                self._kill()
            raise GrammarCheckError(
                f"the grammar could not be checked within {ANSWER_S:g} s, because the server is too"
                " busy: try again later"
            ) from None
        finally:
            del self._calls[call_id]
        if verdict.is_open:
            raise GrammarCheckError(verdict.error or "the grammar could not be checked")
        return verdict

    async def close(self) -> None:
        """Ends the process."""
        self._kill()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _accept(self, listener: socket.socket) -> socket.socket:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(loop.sock_accept(listener))
        give_up_s = loop.time() + START_S
        try:
            while not accepting.done():
                await asyncio.wait([accepting], timeout=_POLL_S)
                if self._process.poll() is not None:
                    raise VllmxError("the process that checks grammars does not start: see the log")
                if loop.time() > give_up_s:
                    raise GrammarCheckError(
                        f"the process that checks grammars did not start within {START_S:g} s: try"
                        " again later"
                    )
        finally:
            accepting.cancel()
        return accepting.result()[0]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames: FrameReader[Verdict] = FrameReader(verdict_decoder)
        try:
            while data := await reader.read(_RECEIVE_BYTES):
                for verdict in frames.feed(data):
                    self._num_answers += 1
                    call = self._calls.get(verdict.call_id)
                    if call is not None and not call.done():
                        call.set_result(verdict)
        except (FrameError, OSError) as error:
            logger.error("the process that checks grammars: %s", error)
        finally:
            self.lost = True
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(ConnectionError())
            self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class _Turns(MutableRecord):
    """One client's checks: one at a time, so that those of others need not wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class GrammarChecker:
    """Checks grammars, and remembers what came of the last ones.

    Args:
        vocabulary: makes the vocabulary; called once, on a thread.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make = vocabulary
        self._making: asyncio.Task[Vocabulary] | None = None
        self._process: GrammarProcess | None = None
        self._starting = asyncio.Lock()
        self._kept: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()
        """The verdicts that are kept by digest: how long the grammar is, and its verdict."""
        self._kept_chars = 0
        self._checking: dict[bytes, asyncio.Task[Answer]] = {}
        self.observer: GrammarObserver | None = None
        self._turns: dict[str, _Turns] = {}
        """The turns of each client with grammars that are checked or wait."""

    @property
    def pid(self) -> int | None:
        """The id of the process, while there is one."""
        return None if self._process is None or self._process.lost else self._process.pid

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the model; there once a grammar was checked."""
        assert self._making is not None, "no grammar was checked"
        return self._making.result()

    async def prepare(self) -> bool:
        """Makes the vocabulary and starts the process; false where this model's answers cannot
        follow grammars. Raises VllmxError where the process does not start."""
        try:
            await self._running()
        except GrammarError:
            return False
        return True

    async def checked(self, params: SamplingParams, client: str = "") -> str | None:
        """Returns the core's grammar for `structured_outputs`, None if the answer is free. Raises
        the errors of `check`."""
        form = params.structured_outputs
        if form is None:
            return None
        try:
            large = max(map(_size, (form.json, form.structural_tag))) > _INLINE_CHARS
            spec = await asyncio.to_thread(grammar_spec, form) if large else grammar_spec(form)
            return await self.check(spec, client)
        except GrammarError as error:
            self._refused("invalid")
            raise GrammarError(error.message, param=error.param or form.field) from None
        except VllmxError as error:
            is_overload = isinstance(error, QueueFullError | GrammarCheckError)
            self._refused("overloaded" if is_overload else "failed")
            raise

    def _refused(self, why: Refusal) -> None:
        if self.observer is not None:
            self.observer.grammar_refused(why)

    async def check(self, spec: GrammarSpec, client: str = "") -> str:
        """The grammar as the core takes it. Raises GrammarError for one that no answer can follow,
        QueueFullError when too many wait, GrammarCheckError where there is no verdict for now,
        VllmxError when the process does not start."""
        digest = spec.digest
        known = self._kept.get(digest)
        if known is not None:
            self._kept.move_to_end(digest)
            verdict = known[1]
        else:
            verdict = await self._check_once(digest, spec, client)
        if isinstance(verdict, GrammarError):
            raise GrammarError(verdict.message)
        return verdict

    async def close(self) -> None:
        """Ends the process."""
        tasks = list(self._checking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._process is not None:
            await self._process.close()

    async def _check_once(self, digest: bytes, spec: GrammarSpec, client: str) -> Answer:
        """Checks equal grammars once, even if some of the waiting callers leave."""
        task = self._checking.get(digest)
        if task is None:
            turns = self._turns.get(client) or _Turns()
            own, in_all = turns.num_waiting, len(self._checking)
            if own >= MAX_CLIENT_WAITING or in_all >= MAX_WAITING:
                raise QueueFullError(
                    f"{in_all} grammars wait to be checked already, {own} of them of this client:"
                    " try again later"
                )
            self._turns[client] = turns
            turns.num_waiting += 1
            task = self._checking[digest] = asyncio.ensure_future(self._in_turn(spec, turns))
            task.add_done_callback(lambda done: self._keep(digest, spec, client, done))
        return await asyncio.shield(task)

    def _keep(
        self, digest: bytes, spec: GrammarSpec, client: str, task: asyncio.Task[Answer]
    ) -> None:
        del self._checking[digest]
        turns = self._turns[client]
        turns.num_waiting -= 1
        if not turns.num_waiting:
            del self._turns[client]
        if task.cancelled() or task.exception() is not None:
            return
        verdict = task.result()
        size = len(spec.text) + (len(verdict) if isinstance(verdict, str) else 0) + 1024
        self._kept[digest] = size, verdict
        self._kept_chars += size
        while self._kept_chars > MAX_KEPT_CHARS:
            _, (size, _) = self._kept.popitem(last=False)
            self._kept_chars -= size

    async def _in_turn(self, spec: GrammarSpec, turns: _Turns) -> Answer:
        async with turns.lock:
            return await self._ask(spec)

    async def _ask(self, spec: GrammarSpec) -> Answer:
        for _ in range(_ATTEMPTS):
            process = await self._running()
            try:
                begun_s = time.monotonic()
                verdict = await process.check(spec)
                if self.observer is not None:
                    self.observer.grammar_compiled(time.monotonic() - begun_s)
            except ConnectionError:
                logger.warning("the process that checks grammars died: starting another one")
                continue
            if verdict.text is None:
                return GrammarError(verdict.error or "the grammar cannot be followed")
            return verdict.text
        raise GrammarCheckError(
            f"the process that checks grammars died {_ATTEMPTS} times meanwhile: try again later"
        )

    async def _made(self) -> Vocabulary:
        if self._making is None or _failed_by_chance(self._making):
            self._making = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._making)

    async def _running(self) -> GrammarProcess:
        vocabulary = await self._made()
        async with self._starting:
            if self._process is None or self._process.lost:
                if self._process is not None:
                    await self._process.close()
                self._process = await GrammarProcess.start(vocabulary)
            return self._process


def _failed_by_chance(making: asyncio.Task[Vocabulary]) -> bool:
    """True if it may succeed another time: a GrammarError means that the tokenizer has no
    vocabulary."""
    if not making.done() or making.cancelled():
        return making.done()
    error = making.exception()
    return error is not None and not isinstance(error, GrammarError)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
