"""The core's own process: who may talk to it, and what happens when one side dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, RankLostError, VllmxError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_core.system import held_files
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.link import supervisor
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreProcess
from vllmx_engine.wire.ipc import Outputs, encode_frame

from tests.waiting import PATIENCE_S, until

MakeEngine = Callable[..., AbstractAsyncContextManager[AsyncLLM]]

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def frontend_of(llm: AsyncLLM) -> ProcessFrontend:
    frontend = llm._frontend
    assert isinstance(frontend, ProcessFrontend)
    return frontend


async def answer(llm: AsyncLLM, prompt: str = "hi") -> list[int]:
    stream = await llm.submit(prompt, GREEDY, kind="final")
    return (await stream.last()).outputs[0].token_ids


async def test_only_this_user_can_reach_the_socket(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    modes: list[int] = []
    spawn = supervisor.spawn

    def watching(path: Path) -> subprocess.Popen[bytes]:
        seen.append(path)
        modes.extend((stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)))
        return spawn(path)

    monkeypatch.setattr(supervisor, "spawn", watching)
    async with make_engine(in_process=False) as llm:
        assert modes == [0o700, 0o600]
        assert not seen[0].parent.exists()  # nothing is left to connect to
        assert await answer(llm)


async def test_a_long_temporary_path_is_avoided(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    async with make_engine(in_process=False) as llm:
        assert await answer(llm)
    assert list(long.iterdir()) == []


async def test_the_working_directory_does_not_shadow_modules(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "msgspec.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(folder)
    async with make_engine(in_process=False) as llm:
        assert await answer(llm)


async def test_a_killed_core_is_restarted(make_engine: MakeEngine, slow_folder: str) -> None:
    async with make_engine(in_process=False, model=slow_folder) as llm:
        wanted = await answer(llm)
        streams = [await llm.submit(f"prompt {i}", LONG) for i in range(4)]
        await anext(streams[0])
        first_pid = frontend_of(llm).pid
        os.kill(first_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"SIGKILL.*restarted"):
                await stream.last()
        assert not llm.is_ready
        assert not llm.errored
        assert llm.num_in_flight == 0
        with pytest.raises(EngineDeadError, match="being restarted"):
            await llm.submit("hi")
        await until(lambda: llm.is_ready)
        assert frontend_of(llm).pid != first_pid
        assert await answer(llm) == wanted


async def test_a_core_that_cannot_be_restarted_stays_dead(
    make_engine: MakeEngine, slow_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessFrontend, "MAX_QUICK_FAILURES", 2)
    monkeypatch.setattr(ProcessFrontend, "FIRST_DELAY_S", 0.01)
    async with make_engine(in_process=False, model=slow_folder) as llm:
        shutil.rmtree(slow_folder)
        os.kill(frontend_of(llm).pid, signal.SIGKILL)
        await until(lambda: llm.errored)
        assert not llm.is_ready
        with pytest.raises(EngineDeadError, match=r"gone .*start the engine again"):
            await llm.submit("hi")


async def test_a_restart_that_goes_wrong_in_any_way_is_tried_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessFrontend, "FIRST_DELAY_S", 0.01)
    async with make_engine(in_process=False) as llm:
        spawn, calls = supervisor.spawn, []

        def failing_once(path: Path) -> subprocess.Popen[bytes]:
            calls.append(path)
            if len(calls) == 1:
                raise RuntimeError("as the test ordered")
            return spawn(path)

        monkeypatch.setattr(supervisor, "spawn", failing_once)
        os.kill(frontend_of(llm).pid, 37 if sys.platform == "linux" else 9)  # 37 has no name
        await until(lambda: len(calls) == 2 and llm.is_ready)
        assert await answer(llm)


async def test_a_core_that_dies_as_soon_as_it_is_ready(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost before anybody holds it: the next attempt is made, and no request waits for it."""
    monkeypatch.setattr(ProcessFrontend, "FIRST_DELAY_S", 0.01)
    start, num_starts = CoreProcess.start, 0

    async def dying_first(*arguments: Any) -> CoreProcess:
        nonlocal num_starts
        core, num_starts = await start(*arguments), num_starts + 1
        if num_starts in (2, 4):
            core._process.kill()
            await until(lambda: core.lost)
        return core

    monkeypatch.setattr(CoreProcess, "start", dying_first)
    async with make_engine(in_process=False) as llm:
        os.kill(frontend_of(llm).pid, signal.SIGKILL)
        await until(lambda: num_starts == 3 and llm.is_ready)
        assert len(await asyncio.wait_for(answer(llm), PATIENCE_S)) == 20
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        async with make_engine(in_process=False):
            pass


@pytest.mark.parametrize("begins", [False, True])
async def test_rank_0_is_stopped_while_it_loads(
    folder: str, registry: Registry, monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    """Before or after it was told what to load. Nobody waits for it, as the others of its group
    would for ever."""
    monkeypatch.setattr(supervisor, "PATIENCE_S", 0.2)
    spawn, send = supervisor.spawn, CoreProcess.send
    processes: list[subprocess.Popen[bytes]] = []

    def spawned(path: Path) -> subprocess.Popen[bytes]:
        processes.append(spawn(path))
        if not begins:
            processes[0].send_signal(signal.SIGSTOP)
        return processes[0]

    def sent(core: CoreProcess, message: Any) -> None:
        processes[0].send_signal(signal.SIGSTOP)
        send(core, message)

    monkeypatch.setattr(supervisor, "spawn", spawned)
    monkeypatch.setattr(CoreProcess, "send", sent)
    config = EngineConfig(model=folder, backend="fake", tensor_parallel_size=2)
    with pytest.raises(RankLostError, match=r"rank 0 \(process \d+\) hangs or was stopped"):
        await asyncio.wait_for(AsyncLLM.start(config, registry=registry), PATIENCE_S)
    assert processes[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4, 0.8])
async def test_a_start_that_is_cancelled_leaves_nothing(
    folder: str, registry: Registry, delay_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=folder, backend="fake")
    starting = asyncio.create_task(AsyncLLM.start(config, registry=registry))
    await asyncio.sleep(delay_s)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await (await starting).shutdown()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert not caplog.records, "an error went to the log"


async def test_shutdown_while_restarting(make_engine: MakeEngine, slow_folder: str) -> None:
    async with make_engine(in_process=False, model=slow_folder) as llm:
        os.kill(frontend_of(llm).pid, signal.SIGKILL)
        await until(lambda: not llm.is_ready)
        await asyncio.sleep(0.15)  # the new process is loading
    await asyncio.sleep(0)
    assert not llm.is_ready


async def test_a_core_sleeps_while_it_starts_again(
    make_engine: MakeEngine, slow_folder: str
) -> None:
    async with make_engine(in_process=False, model=slow_folder) as llm:
        frontend = frontend_of(llm)
        os.kill(frontend.pid, signal.SIGKILL)
        await until(lambda: frontend.status == "restarting")
        await llm.sleep()
        assert frontend._restarting is not None
        assert frontend._restarting.cancelled()
        assert llm.is_asleep
        await llm.wake()
        assert await answer(llm)


async def test_a_core_closed_while_it_goes_to_sleep_holds_no_files(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()
    held: list[bool] = []

    class Slow:
        def __init__(self, files: list[Path]) -> None:
            begun.set()
            assert closed.wait(PATIENCE_S)
            held.append(True)

        def close(self) -> None:
            held.clear()

    monkeypatch.setattr(held_files, "HeldFiles", Slow)
    async with make_engine(in_process=False) as llm:
        frontend = frontend_of(llm)
        sleeping = asyncio.create_task(frontend.sleep(1))
        await until(begun.is_set)
        await frontend.close()
        closed.set()
        await sleeping
        assert not held


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x01\0\0\0\x80"]
)
async def test_the_core_refuses_malformed_frames(
    make_engine: MakeEngine, slow_folder: str, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessFrontend, "EXIT_S", PATIENCE_S)  # it exits by itself
    async with make_engine(in_process=False, model=slow_folder) as llm:
        first_pid = frontend_of(llm).pid
        stream = await llm.submit("hi", LONG)
        transport = frontend_of(llm)._core._transport
        assert transport is not None
        transport.write(garbage)
        with pytest.raises(EngineDeadError, match="code 1"):
            await stream.last()
        await until(lambda: llm.is_ready)
        assert frontend_of(llm).pid != first_pid
        assert await answer(llm)


async def test_the_api_process_refuses_malformed_frames(
    make_engine: MakeEngine, slow_folder: str
) -> None:
    async with make_engine(in_process=False, model=slow_folder) as llm:
        stream = await llm.submit("hi", LONG)
        frontend_of(llm)._core.data_received(b"\x02\0\0\0\xc1\xc1")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await stream.last()
        await until(lambda: llm.is_ready)
        assert await answer(llm)


async def test_the_core_leaves_signals_to_its_parent(
    make_engine: MakeEngine, slow_folder: str
) -> None:
    async with make_engine(in_process=False, model=slow_folder) as llm:
        task = asyncio.create_task(answer(llm))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(frontend_of(llm).pid, number)
        assert len(await task) == 20


async def test_a_core_that_starts_leaves_signals_to_its_parent_too(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = supervisor.spawn

    def signalled(path: Path) -> subprocess.Popen[bytes]:
        process = spawn(path)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        return process

    monkeypatch.setattr(supervisor, "spawn", signalled)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    async with make_engine(in_process=False) as llm:
        assert await answer(llm)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


async def test_a_process_that_dies_before_it_connects(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])

    monkeypatch.setattr(supervisor, "spawn", broken)
    with pytest.raises(VllmxError, match="exited with code 7 while starting"):
        async with make_engine(in_process=False):
            pass


async def test_a_process_that_dies_while_it_loads(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        " os.abort()"
    )

    def broken(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(path)])

    monkeypatch.setattr(supervisor, "spawn", broken)
    with pytest.raises(VllmxError, match="SIGABRT while loading"):
        async with make_engine(in_process=False):
            pass


def test_news_too_large_for_a_frame_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllmx_engine.link.core_socket import CoreSocket
    from vllmx_engine.wire import ipc
    from vllmx_engine.wire.messages import CoreOutput

    ours, theirs = socket.socketpair()
    connection = CoreSocket(ours, lambda: None)
    small = [CoreOutput(request_id=str(i), ids=[i]) for i in range(20)]
    large = CoreOutput(request_id="large", ids=[0] * 500)
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 250)
    connection.send(Outputs([*small, large]))
    ours.close()
    with theirs:
        messages = list(ipc.FrameReader(ipc.from_core_decoder).feed(theirs.recv(1 << 16)))
    outputs = []
    for message in messages:
        assert isinstance(message, Outputs)
        outputs += message.outputs
    assert outputs[:20] == small
    assert (outputs[20].request_id, outputs[20].finish_reason) == ("large", "error")
    assert len(encode_frame(messages[0])) <= 254


PARENT = """
import asyncio, os, signal, sys
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_core.system import held_files
from vllmx_testing.fake_checkpoint import FakePlugin
from vllmx_engine.async_llm import AsyncLLM

async def main():
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    llm = await AsyncLLM.start(EngineConfig(model=sys.argv[1], backend="fake"), registry=registry)
    stream = await llm.submit("hi", SamplingParams(max_tokens=400))
    await anext(stream)
    print(llm._frontend.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_the_core_dies_with_its_parent(slow_folder: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PARENT, slow_folder],
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    await until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not (status.exists() and status.read_text().rsplit(") ")[1].startswith("Z"))
    return False
