"""Steps that never come back, in every way to run an engine."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, EngineDeadError, StepTimeoutError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.inline import Stepper, Turn
from vllmx_engine.core import watchdog
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.watchdog import StepWatch
from vllmx_engine.engine import Engine
from vllmx_engine.link import supervisor
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.llm import LLM
from vllmx_testing.fake import FakeLoadedModel

from tests.waiting import PATIENCE_S, until, wait_until

MakeFolder = Callable[..., str]

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LIMIT_S = 0.5
HUNG = r"fake \(none\) hangs: waiting for a step of .*--step-timeout-s"


@pytest.fixture
def hanging(make_folder: MakeFolder) -> str:
    """A model whose fifth step takes an hour."""
    return make_folder("hanging", hang_steps=[4])


class TestInline:
    def test_who_waits_gets_a_typed_error(
        self, hanging: str, registry: Registry, caplog: pytest.LogCaptureFixture
    ) -> None:
        llm = LLM(hanging, registry=registry, backend="fake", step_timeout_s=LIMIT_S)
        begin_s = time.monotonic()
        with pytest.raises(StepTimeoutError, match=HUNG):
            llm.generate(["hi", "you there"], GREEDY)
        assert time.monotonic() - begin_s >= LIMIT_S
        with pytest.raises(StepTimeoutError, match="hangs"):
            llm.generate("hi", GREEDY)
        llm.close()
        llm.close()
        assert time.monotonic() - begin_s < PATIENCE_S  # the step takes an hour
        (record,) = (each for each in caplog.records if each.levelname == "CRITICAL")
        text = record.getMessage()
        assert "of 2 tokens (2 decoding sequences, 0 chunks of prompts with 0 tokens)" in text
        assert "Thread vllmx-steps" in text
        assert "time.sleep(self.hang_s)" in text  # where it stands

    def test_a_stream_that_waits_and_one_that_comes_later(
        self, hanging: str, registry: Registry
    ) -> None:
        config = EngineConfig(model=hanging, backend="fake", step_timeout_s=LIMIT_S)
        with Engine(config, registry=registry) as engine:
            _, _, one = engine.generate_stream(GREEDY, "hi")
            _, _, other = engine.generate_stream(GREEDY, "ho")
            errors: list[BaseException] = []

            def read() -> None:
                try:
                    list(one)
                except BaseException as error:
                    errors.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            with pytest.raises(StepTimeoutError):
                list(other)
            reader.join(PATIENCE_S)
            assert [type(error) for error in errors] == [StepTimeoutError]
            with pytest.raises(StepTimeoutError):
                engine.generate_stream(GREEDY, "late")

    def test_closing_a_model_whose_last_step_hangs(
        self, make_folder: MakeFolder, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody waits for it but the one who closes."""
        held = threading.Event()
        monkeypatch.setattr(FakeLoadedModel, "close", lambda model: held.wait(2 * PATIENCE_S))
        llm = LLM(make_folder(), registry=registry, backend="fake", step_timeout_s=LIMIT_S)
        assert llm.generate("hi", GREEDY)
        begin_s = time.monotonic()
        llm.close()
        assert LIMIT_S <= time.monotonic() - begin_s < PATIENCE_S
        held.set()

    @pytest.mark.parametrize("timeout_s", [30.0, 0.0])
    def test_slow_steps_are_not_disturbed(
        self, make_folder: MakeFolder, registry: Registry, timeout_s: float
    ) -> None:
        folder = make_folder("slow", hang_steps=[2, 5], hang_s=0.2)
        with LLM(folder, registry=registry, backend="fake", step_timeout_s=timeout_s) as llm:
            assert len(llm.generate("hi", GREEDY)[0].outputs[0].token_ids) == 20

    def test_a_step_that_comes_back_after_all_changes_nothing(
        self, hanging: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It comes back when it was given up, however long that takes."""
        given_up = threading.Event()
        clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=given_up.wait)
        monkeypatch.setattr("vllmx_testing.fake.time", clock)
        before = set(threading.enumerate())
        llm = LLM(hanging, registry=registry, backend="fake", step_timeout_s=LIMIT_S)
        with pytest.raises(StepTimeoutError):
            llm.generate("hi", GREEDY)
        given_up.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE_S)  # the one of the steps
            assert not thread.is_alive()
        with pytest.raises(StepTimeoutError):
            llm.generate("hi", GREEDY)
        llm.close()

    def test_ctrl_c_while_a_step_hangs(
        self, hanging: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The request cannot be taken from the core, which ends as the limit says; the interrupt is
        what the error came from."""
        llm = LLM(hanging, registry=registry, backend="fake", step_timeout_s=2.0)

        def hang(seconds: float) -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(seconds)

        clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=hang)
        monkeypatch.setattr("vllmx_testing.fake.time", clock)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(StepTimeoutError) as caught:
                llm.generate("hi", GREEDY)
            assert isinstance(caught.value.__context__, KeyboardInterrupt)
        finally:
            signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def starting(
    folder: str, registry: Registry, *, in_process: bool, **config: Any
) -> AsyncIterator[AsyncLLM]:
    settings = EngineConfig(model=folder, backend="fake", **config)
    llm = await AsyncLLM.start(settings, registry=registry, in_process=in_process)
    async with asyncio.timeout(PATIENCE_S), llm:
        yield llm


class TestAsync:
    async def test_on_a_thread_the_engine_is_dead(self, hanging: str, registry: Registry) -> None:
        config: dict[str, Any] = {"step_timeout_s": LIMIT_S, "max_num_seqs": 2}
        async with starting(hanging, registry, in_process=True, **config) as llm:
            streams = [await llm.submit(prompt, GREEDY) for prompt in ("a", "b", "waiting")]
            for stream in streams:
                with pytest.raises(StepTimeoutError, match=HUNG):
                    await stream.last()
            assert llm.errored
            assert "hangs" in (llm.trouble or "")
            assert isinstance(await llm.until_dead(), EngineDeadError)
            with pytest.raises(EngineDeadError, match="gone"):
                await llm.submit("hi", GREEDY)

    async def test_shutdown_while_a_step_hangs(self, hanging: str, registry: Registry) -> None:
        for in_process in (True, False):
            async with starting(
                hanging, registry, in_process=in_process, step_timeout_s=1.0
            ) as llm:
                stream = await llm.submit("hi", GREEDY)
                await anext(stream)
                begin_s = time.monotonic()
            assert time.monotonic() - begin_s < PATIENCE_S
            with suppress(StepTimeoutError):  # where the limit was over before the shutdown began
                assert (await stream.last()).outputs[0].finish_reason == "abort"

    async def test_the_process_ends_and_another_one_starts(
        self, hanging: str, registry: Registry, capfd: pytest.CaptureFixture[str]
    ) -> None:
        async with starting(hanging, registry, in_process=False, step_timeout_s=LIMIT_S) as llm:
            frontend = llm._frontend
            assert isinstance(frontend, ProcessFrontend)
            process = frontend._core._process
            streams = [await llm.submit(prompt, GREEDY) for prompt in ("a", "b")]
            for stream in streams:
                with pytest.raises(StepTimeoutError, match=f"{HUNG}.*restarted"):
                    await stream.last()
            assert not llm.is_ready
            assert "hangs" in (llm.trouble or "")
            await until(lambda: llm.is_ready)
            assert llm.trouble is None
            assert process.returncode == 1
            short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            assert (await (await llm.submit("hi", short)).last()).finished
        log = capfd.readouterr().err
        assert "Thread MainThread" in log
        assert "time.sleep(self.hang_s)" in log

    async def test_a_model_that_hangs_again_and_again_is_given_up(
        self, make_folder: MakeFolder, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However long each of its lives was: only updates count, and here each life has an hour
        behind its only one, which tells that work begins."""
        now_s = 0.0
        monkeypatch.setattr(ProcessFrontend, "MAX_QUICK_FAILURES", 2)
        monkeypatch.setattr(ProcessFrontend, "FIRST_DELAY_S", 0.01)
        monkeypatch.setattr(ProcessFrontend, "_loop_s", lambda frontend: now_s)
        folder = make_folder("first", hang_steps=[0])
        async with starting(folder, registry, in_process=False, step_timeout_s=LIMIT_S) as llm:
            for _ in range(3):
                stream = await llm.submit("hi", GREEDY)
                await until(lambda: llm.stats.num_running == 1 or not llm.is_ready)
                now_s += 3600.0
                with pytest.raises(StepTimeoutError):
                    await stream.last()
                await until(lambda: llm.is_ready or llm.errored)
            assert llm.errored
            assert "hangs" in (await llm.until_dead()).message

    async def test_a_process_that_cannot_be_killed(
        self, hanging: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread of the process hangs in the kernel: no other may take its place on the device,
        and requests do not wait for its end."""
        monkeypatch.setattr(supervisor, "_KILL_TIMEOUT_S", 0.5)
        async with starting(hanging, registry, in_process=False, step_timeout_s=LIMIT_S) as llm:
            frontend = llm._frontend
            assert isinstance(frontend, ProcessFrontend)
            process = frontend._core._process
            with monkeypatch.context() as patch:
                patch.setattr(process, "poll", lambda: None)
                with pytest.raises(StepTimeoutError):
                    await (await llm.submit("hi", GREEDY)).last()
                died = await llm.until_dead()
                assert f"process {process.pid} cannot be killed" in died.message
                await llm.shutdown()
            process.wait(PATIENCE_S)


class TestStepWatch:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now_s = [100.0]
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: now_s[0])
        return now_s

    @staticmethod
    def core(timeout_s: float | None) -> EngineCore:
        config = EngineConfig(step_timeout_s=timeout_s)
        return EngineCore(FakeLoadedModel(), config, max_model_len=64, vocab_size=259)

    def test_a_process_that_stood_still_has_not_hung(self, clock: list[float]) -> None:
        core = self.core(10.0)
        watch = StepWatch(core)
        core.activity.calls += 1
        for pause_s in (0.5, 0.5, 3600.0, 0.5, 3600.0):
            assert watch.stuck() is None
            clock[0] += pause_s
        assert watch.stuck() is None
        for _ in range(20):
            clock[0] += 0.5
            watch.stuck()
        assert watch.stuck() is not None

    def test_every_step_has_the_whole_limit(self, clock: list[float]) -> None:
        core = self.core(10.0)
        watch = StepWatch(core)
        for _ in range(5):
            core.activity.calls += 1
            for _ in range(19):
                assert watch.stuck() is None
                clock[0] += 0.5
            core.activity.calls += 1
            core.activity.calls += 1  # the next step has begun between two looks
            assert watch.stuck() is None
            core.activity.calls += 1

    def test_an_idle_core_never_hangs(self, clock: list[float]) -> None:
        watch = StepWatch(self.core(10.0))
        for _ in range(100):
            assert watch.stuck() is None
            clock[0] += 0.5

    def test_limits(self) -> None:
        assert self.core(None).step_timeout_s == 300.0  # of the fake, as of any device
        assert StepWatch(self.core(None)).interval_s == 1.0
        assert StepWatch(self.core(0.0)).interval_s is None
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="step-timeout-s"):
                EngineConfig(step_timeout_s=bad)


class TestStepper:
    def test_nobody_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody comes at the moment when the thread stops waiting for somebody."""
        monkeypatch.setattr(Stepper, "LINGER_S", 2e-4)
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        def give_up() -> None:
            raise AssertionError("nobody steps")

        stepper = Stepper(step, lambda: False)
        for i in range(2000):
            wanted = steps + 1
            stepper.wait(lambda wanted=wanted: steps >= wanted, give_up, PATIENCE_S)
            time.sleep(i % 10 * 5e-5)
        assert steps == 2000

    @pytest.mark.parametrize("more", [False, True])
    def test_its_thread_ends_with_the_work(self, more: bool) -> None:
        done: list[int] = []
        before = set(threading.enumerate())
        stepper = Stepper(lambda: done.append(1), lambda: more)
        stepper.wait(lambda: len(done) > 3, lambda: None, None)
        wait_until(lambda: set(threading.enumerate()) <= before)

    def test_the_next_step_does_not_wait_for_who_comes_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Stepper, "LINGER_S", 60.0)
        steps, under_way, allowed = 0, threading.Event(), threading.Semaphore(1)

        def step() -> None:
            nonlocal steps
            if steps == 1:
                under_way.set()
            allowed.acquire()
            steps += 1

        stepper = Stepper(step, lambda: steps < 2)
        stepper.wait(lambda: steps == 1, lambda: None, None)
        assert under_way.wait(PATIENCE_S)  # though nobody waits
        monkeypatch.setattr(Stepper, "LINGER_S", 1e-3)
        allowed.release()
        stepper.wait(lambda: steps == 2, lambda: None, None)

    def test_an_error_reaches_everybody_who_waits(self) -> None:
        def step() -> None:
            time.sleep(0.05)
            raise ValueError("as the test ordered")

        stepper = Stepper(step, lambda: True)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                stepper.wait(lambda: False, lambda: None, None)
            except ValueError as error:
                errors.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(errors) == 3


def test_a_turn_that_does_not_come() -> None:
    turn = Turn()
    with turn:
        assert not turn.acquire(0.01)
    assert turn.acquire(0.01)
    turn.release()
