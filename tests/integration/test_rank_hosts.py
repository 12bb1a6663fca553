"""Two hosts that compute the demo model: one machine's loopback, and two network namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError, RankLostError
from vllmx_demo.source import MODEL_FOLDER
from vllmx_tp.sampled_ids import sampled_frame

from tests.waiting import PATIENCE_S, wait_until

LIMITS = {
    "backend": "cpu",
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "max_model_len": 128,
    "num_threads": 1,
}
PROMPTS = ["Once upon a time there was a little", "The capital of", "A cat"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=6),
]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("keys") / "key", b"k")


def make_key(file: Path, letter: bytes) -> Path:
    file.touch(0o600)
    file.write_bytes(letter * 40)
    return file


@contextmanager
def rank_host(
    key: Path,
    model: str = "demo",
    address: str = "127.0.0.1",
    prefix: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`vllmx rank` on a free port: where it listens, and its process."""
    command = [*prefix, sys.executable, "-m", "vllmx", "rank", model]
    command += ["--listen", f"{address}:0", "--rank-key-file", str(key), *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"wait at (\S+)", line):
                    yield found[1], process
                    return
            raise AssertionError("the host of ranks ended")
        finally:
            process.kill()
            process.stderr.close()


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [
        tuple(output.outputs[0].token_ids)
        for params in PARAMS
        for output in llm.generate(PROMPTS, params)
    ]


def until_lost(llm: LLM) -> None:
    while True:
        llm.generate(["A cat"], SamplingParams(max_tokens=2))


def test_two_hosts_answer_as_one_and_a_second_group_after_the_first(key_file: Path) -> None:
    """The first group is lost with its rank on the other host; the host waits again."""
    with LLM("demo", **LIMITS) as llm:  # type: ignore[arg-type]
        expected = answers(llm)
    with rank_host(key_file) as (place, process):
        more = LIMITS | {"tensor_parallel_size": 2, "rank_hosts": place}
        more["rank_key_file"] = str(key_file)
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            (rank,) = psutil.Process(process.pid).children()
            rank.kill()
            with pytest.raises(RankLostError, match=r"rank 1 was killed by SIGKILL \(on host 127"):
                until_lost(llm)
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            (rank,) = psutil.Process(process.pid).children()
        rank.wait(PATIENCE_S)
        assert process.poll() is None


def test_what_ranks_of_two_hosts_draw_is_compared(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone is asked to. Then it draws something else, or says so."""
    with rank_host(key_file) as (place, _):
        monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
        more = LIMITS | {"tensor_parallel_size": 2, "rank_hosts": place}
        more["rank_key_file"] = str(key_file)
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            answers(llm)
            monkeypatch.setattr(
                "vllmx_tp.executor.sampled_frame",
                lambda number, ids: sampled_frame(number, ids + 1),
            )
            told = r"rank 1 sampled other ids than rank 0 in step \d+ \(on host 127"
            with pytest.raises(RankLostError, match=told):
                until_lost(llm)


def test_stages_on_three_hosts_answer_as_one_process(key_file: Path) -> None:
    """What the second sends to the third goes through the first one's host."""
    with LLM("demo", **LIMITS) as llm:  # type: ignore[arg-type]
        expected = answers(llm)
    with rank_host(key_file) as (one, _), rank_host(key_file) as (other, process):
        more = LIMITS | {"pipeline_parallel_size": 3, "rank_hosts": f"{one},{other}"}
        with LLM("demo", **more, rank_key_file=str(key_file)) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            (rank,) = psutil.Process(process.pid).children()
            rank.kill()
            with pytest.raises(RankLostError, match=r"rank 2 was killed by SIGKILL \(on host 127"):
                until_lost(llm)


def test_each_host_has_a_stage_of_two_ranks(key_file: Path) -> None:
    with LLM("demo", **LIMITS) as llm:  # type: ignore[arg-type]
        expected = answers(llm)
    with rank_host(key_file) as (place, process):
        more = LIMITS | {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_threads": 4}
        more |= {"rank_hosts": place, "rank_key_file": str(key_file)}
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            ranks = psutil.Process(process.pid).children()
            assert len(ranks) == 2
            min(ranks, key=lambda one: int(one.cmdline()[4])).kill()
            with pytest.raises(RankLostError, match=r"rank 2 was killed by SIGKILL \(on host 127"):
                until_lost(llm)


def test_a_host_that_is_stopped_leaves_no_rank(key_file: Path) -> None:
    """Its ranks end by themselves; it serves the next group when it goes on."""
    with rank_host(key_file) as (place, process):
        more = LIMITS | {"tensor_parallel_size": 2, "rank_hosts": place}
        more["rank_key_file"] = str(key_file)
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            (rank,) = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(RankLostError, match=rf"host {place} does not answer: it hangs, or"):
                until_lost(llm)
        wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE)
        process.send_signal(signal.SIGCONT)
        with LLM("demo", **more) as llm:  # type: ignore[arg-type]
            llm.generate(["A cat"], SamplingParams(max_tokens=2))


def test_a_host_with_another_model_or_key(key_file: Path, tmp_path: Path) -> None:
    """The config differs, so no weight needs to be loaded."""
    other = shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config + "\n")
    with rank_host(key_file, str(other)) as (place, _):
        more = LIMITS | {"tensor_parallel_size": 2, "rank_hosts": place}
        wrong = make_key(tmp_path / "wrong", b"w")
        with pytest.raises(ConfigError, match=rf"{place}: it has another key: give both the same"):
            LLM("demo", **more, rank_key_file=str(wrong))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"other files of the model .* copy the same ones"):
            LLM("demo", **more, rank_key_file=str(key_file))  # type: ignore[arg-type]


def test_hosts_need_ranks() -> None:
    with pytest.raises(ConfigError, match="--rank-hosts needs ranks for them"):
        LLM("demo", rank_hosts="a:1", **LIMITS)  # type: ignore[arg-type]


# --- network namespaces ---------------------------------------------------------------------------
NET = f"10.{201 + (os.getpid() >> 14) % 50}.{(os.getpid() >> 6) % 256}"
LAST = os.getpid() % 64 * 4
FAR = f"{NET}.{LAST + 2}"


@pytest.fixture
def namespace() -> Iterator[tuple[str, Callable[[], None]]]:
    """Another one, joined to ours by a pair of interfaces of this process alone; what cuts that."""
    name, ip = f"vllmx{os.getpid()}", shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")

    near, far = f"v{os.getpid()}a", f"v{os.getpid()}b"
    try:
        run(ip, "netns", "add", name)
        run(ip, "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run(ip, "address", "add", f"{NET}.{LAST + 1}/30", "dev", near)
        run(ip, "link", "set", near, "up")
        run(ip, "-n", name, "address", "add", f"{FAR}/30", "dev", far)
        run(ip, "-n", name, "link", "set", far, "up")
        yield name, lambda: run(ip, "link", "set", near, "down")
    finally:
        for what in (("link", "delete", near), ("netns", "delete", name)):
            # the pair first: connections that were cut keep a namespace for minutes
            subprocess.run([ip, *what], capture_output=True, check=False)


def test_two_network_namespaces(namespace: tuple[str, Callable[[], None]], key_file: Path) -> None:
    """The host of ranks has no other way to rank 0 than the pair of interfaces; when that is cut,
    each side hears nothing any more, tells so and ends its ranks."""
    name, cut = namespace
    with LLM("demo", **LIMITS) as llm:  # type: ignore[arg-type]
        expected = answers(llm)
    ip = shutil.which("ip")
    assert ip is not None
    inside = (ip, "netns", "exec", name)
    with rank_host(key_file, address=FAR, prefix=inside) as (place, process):
        more = LIMITS | {"tensor_parallel_size": 2, "rank_hosts": place}
        with LLM("demo", **more, rank_key_file=str(key_file)) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            (rank,) = psutil.Process(process.pid).children()
            cut()
            with pytest.raises(RankLostError, match=rf"host {place} does not answer: it hangs, or"):
                until_lost(llm)
            rank.wait(PATIENCE_S)
            assert process.poll() is None
