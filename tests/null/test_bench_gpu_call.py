"""The calls of bench/gpu under a clock that nobody waits for: which part gets how much time, and
what one that fails, hangs or is killed costs the others."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
MODULES = ("call", "parts", "table", "measure", "checkpoints", "devices")
GOALS = ("0.6b bf16", "8b bf16", "256 x 1024 on 0.6b")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports modules of bench/gpu, which is a folder of scripts."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__
    for name in MODULES:
        sys.modules.pop(name, None)


class Machine:
    """Runs parts by moving a clock.

    Args:
        taken: seconds that a part of this name wants; without one, it hangs.
        ends: how a part of this name ends other than well.
    """

    def __init__(self, taken: dict[str, float], ends: dict[str, str]) -> None:
        self.now, self.limits, self.commands = 0.0, dict[str, float](), dict[str, list[str]]()
        self._taken, self.ends = taken, ends

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], limit: float, more: dict[str, str], log: Path) -> str:
        name = log.stem
        self.limits[name], self.commands[name] = limit, command
        wanted = self._taken.get(name, float("inf"))
        self.now += min(wanted, limit)
        log.write_text("some words\nthe last line\n")
        for word in command:
            if word == str(log.with_suffix(".json")):
                text = json.dumps({"copy_gb_s": 4000.0, "of": name})
                log.with_suffix(".json").write_text(text[: 9 if name in self.ends else None])
        return self.ends.get(name, "ok" if wanted <= limit else f"killed after {limit:.0f} s")


def stem(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


def run(bench: Any, parts: Any, out: Path, total_s: float, machine: Machine) -> Any:
    call = bench("call").Call(
        out, total_s, run=machine.run, clock=machine.clock, say=lambda line: None
    )
    call.all(parts)
    return call


@pytest.mark.parametrize("total_s", [200.0, 240.0, 300.0, 380.0, 465.0, 532.0, 600.0])
@pytest.mark.parametrize("trouble", ["none", "all hang", "failing", "killed", "mixed"])
def test_goals_get_their_time_whatever_becomes_of_the_others(
    bench: Any, tmp_path: Path, total_s: float, trouble: str
) -> None:
    parts = bench("parts").FIRST
    names, chance = [stem(part.name) for part in parts], random.Random(7)
    taken = {} if trouble == "all hang" else {name: chance.uniform(1, 30) for name in names}
    ends = {
        "failing": dict.fromkeys(names, "failed, status 3"),
        "killed": dict.fromkeys(names, "killed after 5 s"),
        "mixed": dict.fromkeys(names[::2], "failed, status 9"),
    }.get(trouble, {})
    machine = Machine(taken, ends)
    call = run(bench, parts, tmp_path, total_s, machine)
    assert machine.now <= total_s + 1e-6
    for part in parts:
        given = machine.limits.get(stem(part.name))
        assert given is None or part.least_s <= given <= part.limit_s, part.name
        assert given is not None or not part.kept, f"{part.name} was not started"
    written = json.loads((tmp_path / "figures.json").read_text())
    assert set(GOALS) | {"ceilings"} <= set(written)
    text = (tmp_path / "table.txt").read_text()
    assert "goals on an H200" in text
    late = [part.name for part in parts if stem(part.name) not in machine.limits]
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.count("not started: no time left") == len(late)
    if trouble == "none":
        assert call.failed == len(late) == 0
    else:
        assert call.failed > 0


@pytest.mark.parametrize("hangs", range(12))
def test_one_part_that_hangs_costs_itself(bench: Any, tmp_path: Path, hangs: int) -> None:
    parts = bench("parts").FIRST
    quick = {stem(part.name): 5.0 for part in parts if part is not parts[hangs]}
    machine = Machine(quick, {})
    call = run(bench, parts, tmp_path, 532.0, machine)
    assert machine.now == pytest.approx(parts[hangs].limit_s + 5.0 * (len(parts) - 1))
    assert call.failed == 1


def test_the_order_is_that_of_worth(bench: Any) -> None:
    names = [part.name for part in bench("parts").FIRST]
    first = ["warm", "ceilings", "golden", "ids", "0.6b bf16", "8b bf16", "256 x 1024 on 0.6b"]
    assert names[: len(first)] == first
    assert names[-1] == "suite"
    second = [part.name for part in bench("parts").SECOND]
    assert second.index("start, cold") < second.index("start, warm")
    assert second.index("ceilings") < second.index("8b fp8")


def test_every_figure_exists_and_goals_are_of_them(bench: Any) -> None:
    parts, measure, table = bench("parts"), bench("measure"), bench("table")
    both = [part for part in (*parts.FIRST, *parts.SECOND) if part.figure]
    ours = {part.name for part in both if part.argv[0] == "measure.py"}
    assert ours == set(measure.PARTS)
    scale = measure.Scale()
    cases = {f"decode {b} x {c}" for b in scale.batches for c in scale.contexts}
    cases |= {f"prefill {length}" for length in scale.prefills} | {"tokens_s", "first_token_s"}
    cases |= {"launch_us", "few x 1", f"few x {scale.first[-1][0]}"}
    for goal in table.GOALS:
        assert goal.part in {part.name for part in both}
        assert any(case.startswith(goal.case) for case in cases), goal.case
    scripts = {part.argv[0] for part in (*parts.FIRST, *parts.SECOND)} - {"-m"}
    assert all((GPU / script).exists() for script in scripts)


def test_commands_have_what_their_parts_need(bench: Any, tmp_path: Path) -> None:
    parts, machine = bench("parts"), Machine({}, {})
    run(bench, (*parts.FIRST, *parts.SECOND), tmp_path, 5000.0, machine)
    ceilings, decode = machine.commands["ceilings"], machine.commands["8b-bf16"]
    assert "--ceilings" not in ceilings
    assert decode[decode.index("--ceilings") + 1] == str(tmp_path / "ceilings.json")
    assert float(decode[decode.index("--seconds") + 1]) == pytest.approx(71.0)
    assert machine.commands["ncu"][0] == "ncu"
    memcheck, initcheck = machine.commands["memcheck"], machine.commands["initcheck"]
    assert memcheck[:2] == ["compute-sanitizer", "--tool=memcheck"]
    assert any(word.startswith("--kernel-name=regex=^(") for word in memcheck)
    assert "linear_mma|" in "".join(memcheck)
    assert not any(word.startswith("--kernel-name") for word in initcheck)
    ports = [w for c in machine.commands.values() for w in c if w.startswith("--port=")]
    assert len(ports) == len(set(ports)) == 7
    assert not any("{" in word for command in machine.commands.values() for word in command)


def test_a_cold_start_finds_no_compiled_kernels(bench: Any, tmp_path: Path) -> None:
    parts, seen = bench("parts"), []

    def start(command: list[str], limit: float, more: dict[str, str], log: Path) -> str:
        folder = Path(more["VLLMX_CACHE_DIR"])
        seen.append(folder.exists())
        folder.mkdir(exist_ok=True)
        return "ok"

    starts = [part for part in parts.SECOND if part.name in ("start, cold", "start, warm")]
    for _ in range(2):
        call = bench("call").Call(tmp_path, 500.0, run=start, say=lambda line: None)
        call.all(starts)
    assert seen == [False, True] * 2


def test_processes_that_hang_or_fail_are_ended_with_all_that_they_started(
    bench: Any, tmp_path: Path
) -> None:
    run_process = bench("call").run_process
    begin = time.perf_counter()
    hang = ["sh", "-c", "echo begun; sleep 3600; echo done"]
    assert run_process(hang, 1.5, {}, tmp_path / "a.log") == "killed after 2 s"
    assert time.perf_counter() - begin < PATIENCE_S
    assert (tmp_path / "a.log").read_text().startswith("begun\n")
    fail = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"]
    assert (
        run_process(fail, PATIENCE_S, {"CODE": "3"}, tmp_path / "b.log")
        == "failed, status 3: see b.log"
    )
    missing = run_process(["/nowhere/ncu"], 60, {}, tmp_path / "c.log")
    assert missing == "failed: No such file or directory: /nowhere/ncu"
