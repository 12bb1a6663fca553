"""Two ranks of the demo model as processes: equal answers, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError, RankLostError, VllmxError
from vllmx_testing.plans import Row, make_plan, sampling_rows

from tests.waiting import PATIENCE_S, wait_until

LIMITS: dict[str, Any] = {
    "backend": "numpy",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "max_model_len": 128,
}
SYSTEM = "You are a teller of short stories for small children, who like animals. "
PROMPTS = [SYSTEM + "Once upon a time", SYSTEM + "The capital of", "A cat"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=8, repetition_penalty=1.1)
SEVERAL = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=6)
BAD_WORDS = SamplingParams(temperature=0.0, max_tokens=4, bad_words=["Once upon", "there was"])
STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"


@contextmanager
def two_ranks(**more: Any) -> Iterator[tuple[LLM, psutil.Process]]:
    """The engine, and the process of rank 1."""
    with LLM("demo", tensor_parallel_size=2, **LIMITS | more) as llm:
        (rank,) = rank_processes()
        yield llm, rank


def rank_processes() -> list[psutil.Process]:
    """Those of this process, in order."""
    found: list[tuple[int, psutil.Process]] = []
    for one in psutil.Process().children():
        with suppress(psutil.Error):  # another child, that has just ended
            words = one.cmdline()
            if "vllmx_tp.rank_process" in words:
                found.append((int(words[4]), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def answers(llm: LLM, kinds: Sequence[SamplingParams]) -> list[list[int]]:
    """Chunked prompts with a common prefix, twice, so that the second time has hits; several
    answers to one prompt; rows that are sampled late; more text than the cache holds at once."""
    found = []
    for params in kinds:
        for output in llm.generate(PROMPTS, params):
            assert len(output.outputs) == params.n
            found += [list(one.token_ids) for one in output.outputs]
    return found


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_ranks_answer_as_one_process(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy is slow: it shows the calls between ranks, the CPU backend the rest."""
    kinds = (GREEDY, SEEDED, GREEDY, SEVERAL, BAD_WORDS) if backend == "cpu" else (BAD_WORDS,)
    more = {"backend": backend, "num_threads": 2}
    with LLM("demo", **LIMITS | more) as llm:
        expected = answers(llm, kinds)
        whole = llm.info
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")  # ids of every step, besides
    with two_ranks(**more) as (llm, rank):
        assert answers(llm, kinds) == expected
        assert llm.info.details["ranks"] == "2"
        assert llm.info.num_kv_blocks == whole.num_kv_blocks
        assert llm.info.kv_cache_bytes == whole.kv_cache_bytes
    rank.wait(PATIENCE_S)


def test_64_seeded_requests_answer_as_one_process() -> None:
    """Answers are equal to the last bit, so that no draw can differ; there are more rows than the
    cache holds at once, which are preempted, prefixes that others have left, prompts in chunks."""
    limits = LIMITS | {
        "backend": "cpu",
        "dtype": "bfloat16",
        "num_threads": 2,
        "deterministic": True,
        "max_num_seqs": 16,
    }
    prompts = [f"{SYSTEM if number % 3 else ''}Number {number}" for number in range(64)]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, seed=number, max_tokens=6, logprobs=1)
        for number in range(64)
    ]

    def everything(llm: LLM) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [(output.token_ids, output.logprobs) for output in outputs]

    with LLM("demo", **limits) as llm:
        expected = everything(llm)
    with LLM("demo", tensor_parallel_size=2, **limits) as llm:
        assert everything(llm) == expected


def test_stories260k_on_four_ranks_goes_on_as_in_one_process() -> None:
    """8 heads and 4 kv heads of 8, widths that no kernel likes; 24 greedy tokens in float32."""
    if not STORIES.is_dir():
        pytest.skip("stories260K lies outside the repository")
    limits: dict[str, Any] = {
        "backend": "cpu",
        "dtype": "float32",
        "num_kv_blocks": 16,
        "max_num_seqs": 4,
        "num_threads": 4,
    }
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = ["Once upon a time", "Lily and Tom", "The dog"]
    with LLM(str(STORIES), **limits) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(str(STORIES), tensor_parallel_size=4, **limits) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert found == expected


def lost(llm: LLM) -> str:
    """What requests are told once it was noticed."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            llm.generate(["A cat"], SamplingParams(max_tokens=2))
        except RankLostError as error:
            return error.message
    raise AssertionError("the end of a rank went unnoticed")


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_a_rank_that_is_killed_ends_the_group(backend: str) -> None:
    with two_ranks(backend=backend, num_threads=2) as (llm, rank):
        rank.kill()
        assert lost(llm) == "rank 1 was killed by SIGKILL"
        assert lost(llm) == "rank 1 was killed by SIGKILL"


def test_a_rank_that_is_stopped_ends_the_group() -> None:
    with two_ranks() as (llm, rank):
        rank.suspend()
        assert lost(llm) == f"rank 1 (process {rank.pid}) hangs or was stopped"
        rank.wait(PATIENCE_S)  # it was killed


@pytest.mark.parametrize(
    ("sent", "cause", "busy"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL", False),
        (signal.SIGSTOP, r"rank 1 \(process \d+\) hangs or was stopped", False),
        (signal.SIGSTOP, r"rank 1 \(process \d+\) hangs or was stopped", True),
    ],
)
def test_a_rank_that_ends_before_it_begins(
    sent: signal.Signals, cause: str, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has given no sign of life yet, which a rank may take its time for. On a busy machine it is
    noticed before anybody waits for its answer."""
    from vllmx_tp.group import Group

    spawn = Group._spawn

    def ending(self: Group, rank: int, cores: Sequence[int]) -> None:
        spawn(self, rank, cores)
        process = self._processes[-1]
        process.send_signal(sent)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)

    loaded = Group.loaded

    def loaded_late(self: Group) -> Any:
        wait_until(lambda: all(each.fileno() < 0 for each in self._sockets))  # closed at the end
        return loaded(self)

    monkeypatch.setattr(Group, "_spawn", ending)
    if busy:
        monkeypatch.setattr(Group, "loaded", loaded_late)
    monkeypatch.setattr("vllmx_tp.group.HANG_S", 0.5)
    with pytest.raises(RankLostError, match=cause):
        LLM("demo", tensor_parallel_size=2, **LIMITS)
    assert not rank_processes()


def test_a_rank_that_raises_says_why() -> None:
    from vllmx_tp.frames import Frame
    from vllmx_tp.messages import Call

    with two_ranks() as (llm, _):
        model: Any = llm._engine._core._model
        model._group.send(Call.SAMPLE, Frame(None, None))
        told = "rank 1 failed with an internal error (AssertionError); see its log above"
        assert lost(llm) == told  # the log says more, requests and /health do not


def test_a_rank_that_cannot_load_ends_the_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights go after rank 0 has opened them, so rank 1 alone misses them; rank 0 reads its
    own for as long as it can."""
    from vllmx_demo.source import MODEL_FOLDER
    from vllmx_tp.group import Group

    model = Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))
    spawn = Group._spawn

    def spawn_late(self: Group, rank: int, cores: Sequence[int]) -> None:
        for file in model.glob("*.safetensors"):
            file.unlink()
        spawn(self, rank, cores)

    def slow(opened: Any, *_: object, **__: object) -> Any:
        source = opened.checkpoint.weights
        wait_until(lambda: not source.part(next(iter(source.names()))))

    monkeypatch.setattr(Group, "_spawn", spawn_late)
    monkeypatch.setattr("vllmx_tp.executor.load_rank", slow)
    with pytest.raises(VllmxError, match="safetensors") as caught:
        LLM(str(model), tensor_parallel_size=2, **LIMITS)
    assert not isinstance(caught.value, RankLostError)
    assert not rank_processes()


@pytest.mark.parametrize("isq", [None, "q8_0"])
def test_a_rank_that_is_killed_ends_what_the_cpu_backend_reads(
    isq: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That backend takes all parts of the weights first, and reads or makes their bytes later."""
    from vllmx_cpu import packing
    from vllmx_tp.group import Group

    run, kill, ended, packed = packing._run, Group.kill, threading.Event(), list[int]()

    def killed(self: Group) -> None:
        kill(self)
        ended.set()

    def run_late(jobs: Sequence[Callable[[], None]], num_threads: int, progress: bool) -> None:
        for one in rank_processes():
            one.kill()
        assert ended.wait(PATIENCE_S)

        def counted(number: int) -> None:
            jobs[number]()
            packed.append(number)

        assert len(jobs) > 20
        run([partial(counted, number) for number in range(len(jobs))], num_threads, progress)

    monkeypatch.setattr(Group, "kill", killed)
    monkeypatch.setattr(packing, "_run", run_late)
    with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
        LLM("demo", tensor_parallel_size=2, num_threads=2, isq=isq, **LIMITS | {"backend": "cpu"})
    assert not packed


def test_ranks_divide_what_rank_0_found_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads last finds less, as others have taken theirs by then."""
    from vllmx_tp.group import Group

    others, loaded, block_bytes = [], Group.loaded, 48 << 10

    def told(self: Group) -> Any:
        others.extend(loaded(self))
        return others

    monkeypatch.setattr(Group, "loaded", told)
    monkeypatch.setattr("vllmx_engine.core.load.free_memory", lambda _: 80 * block_bytes)
    with two_ranks(num_kv_blocks=None, memory_fraction=0.5) as (llm, _):
        mine = llm._engine._core._model._model.info
        assert mine.kv_cache_bytes == mine.num_kv_blocks * block_bytes
        assert [mine.num_kv_blocks, others[0].num_kv_blocks] == [20, 20]


def test_closing_waits_for_no_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is in a step then, which it cannot finish alone."""
    monkeypatch.setattr("vllmx_tp.group._FAREWELL_S", 0.1)
    monkeypatch.setattr("vllmx_tp.group.HANG_S", PATIENCE_S)
    with two_ranks(backend="cpu", num_threads=2) as (llm, rank):
        model: Any = llm._engine._core._model
        rank.suspend()
        model.step(make_plan([Row([5], 0, [1])], llm.info.block_size), sampling_rows(1))
        closing = threading.Thread(target=model.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_nccl_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would listen on an interface that leads outside, and lets in whoever comes."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # and what is set meanwhile goes with the test
    monkeypatch.setattr("vllmx_core.plugins.specs.BackendSpec.has_own_devices", lambda _: True)
    with two_ranks() as (_, rank):
        assert rank.environ()["NCCL_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_nothing_is_left_when_rank_0_is_killed() -> None:
    code = f"""
import time
from vllmx import LLM
if __name__ == "__main__":
    with LLM("demo", tensor_parallel_size=2, **{LIMITS!r}):
        print("ready", flush=True)
        time.sleep(3600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (rank,) = psutil.Process(process.pid).children()
        shared = [link for link in links(rank.pid) if "vllmx-ranks" in link]
        assert shared
        assert "(deleted)" in shared[0]  # it has no name: it goes with the processes
        rank.suspend()
        process.send_signal(signal.SIGKILL)
    rank.wait(PATIENCE_S)


def links(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]


def test_models_of_transformers_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made up, as transformers takes seconds to import."""
    chosen = SimpleNamespace(model=None, impl="transformers", backend="torch")
    monkeypatch.setattr("vllmx_engine.core.load.choose_model", lambda *_: chosen)
    with pytest.raises(ConfigError, match="transformers runs this one: leave it out"):
        LLM("demo", tensor_parallel_size=2)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"among 3 ranks .* --tensor-parallel-size 1 or 2 or 4"):
        LLM("demo", tensor_parallel_size=3, **LIMITS)
