"""Runs the parts of one call, each in a process of its own, within the time that there is.

    python bench/gpu/call.py OUT [--second] [--seconds 540] [--only WORD] [--rehearse]

A part that fails, hangs or is killed costs itself; what it leaves unused goes to those behind it.
OUT gets a log of each part, a JSON file of each figure, figures.json with all of them, table.txt
and summary.txt. What a part found is printed when it has ended, the whole table at last. Exit
status: the number of parts that failed or found no time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts import FIRST, HERE, SECOND, Part
from table import part_lines, table

MARGIN_S = 4.0
"""The seconds between the time when a part should end by itself and when it is ended."""
END_S = 8.0
"""Kept for the table and for packing."""
REHEARSAL_FACTOR = 10
"""The emulator compiles with g++ and is slow."""
Run = Callable[[list[str], float, dict[str, str], Path], str]
"""run(command, limit in seconds, environment, log) says "ok" or what went wrong."""


def run_process(command: list[str], limit_s: float, more: dict[str, str], log: Path) -> str:
    """Ends the process and all that it has started when the limit is over: first kindly, so that
    it says where it was."""
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return f"failed: {error.strerror}: {command[0]}"
        status = None
        for wait_s, ending in ((limit_s, signal.SIGINT), (2.0, signal.SIGKILL)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                if status is None:
                    status = "ok" if process.returncode == 0 else _failed(process, log)
                break
            status = f"killed after {limit_s:.0f} s"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status or f"killed after {limit_s:.0f} s"


def _failed(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"failed, status {process.returncode}: see {log.name}"


@dataclass
class Call:
    """The parts of one call under one clock.

    Args:
        out: the folder of results.
        total_s: for all parts.
    """

    out: Path
    total_s: float
    rehearse: bool = False
    run: Run = run_process
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = print
    report: dict[str, Any] = field(default_factory=dict)
    failed: int = 0
    _ports: Any = field(default_factory=lambda: itertools.count(49152, 100))

    def all(self, parts: Sequence[Part]) -> None:
        """Runs them in their order."""
        end = self.clock() + self.total_s
        for _, same in itertools.groupby(enumerate(parts), lambda at: at[1].group or at[0]):
            beside = list(same)
            behind = parts[beside[-1][0] + 1 :]
            kept_s = sum(part.least_s for part in behind if part.kept)
            left_s = end - self.clock()
            with ThreadPoolExecutor(len(beside)) as pool:
                jobs = [pool.submit(self.one, part, left_s - kept_s, left_s) for _, part in beside]
            for (_, part), job in zip(beside, jobs, strict=True):
                self.note(part, *job.result())
        shutil.rmtree(self.out / "start-model", ignore_errors=True)

    def one(self, part: Part, free_s: float, left_s: float) -> tuple[str, float]:
        """(status, seconds) of a part. What is kept for the others is taken where a kept part
        could not begin otherwise."""
        limit_s = min(part.limit_s, max(free_s, part.least_s if part.kept else 0.0), left_s)
        if self.rehearse:
            limit_s = part.limit_s * REHEARSAL_FACTOR
        elif limit_s < part.least_s:
            return "not started: no time left", 0.0
        begin, path = self.clock(), self._json(part)
        path.unlink(missing_ok=True)
        if part.name == "start, cold":
            shutil.rmtree(self.out / "start-cache", ignore_errors=True)
        command, more = self.command(part, limit_s)
        status = self.run(command, limit_s, more, self.out / f"{_stem(part)}.log")
        return status, round(self.clock() - begin, 1)

    def command(self, part: Part, limit_s: float) -> tuple[list[str], dict[str, str]]:
        """The command line of a part, and what its environment has besides."""
        values = {
            "out": str(self.out),
            "json": str(self._json(part)),
            "port": str(next(self._ports)),
            "seconds": f"{max(1.0, limit_s - MARGIN_S):.1f}",
            "kernels": _kernels(part),
        }
        filled = [_fill(word, values) for word in part.argv]
        script = [] if filled[0] == "-m" else [str(HERE / filled[0])]
        filled = [sys.executable, *script, *filled[len(script) :]]
        filled += self._of_pytest(part) if part.argv[0] == "-m" else []
        if part.figure and part.name != "ceilings" and self._ceilings.exists():
            filled += ["--ceilings", str(self._ceilings)]
        filled += part.rehearsed if self.rehearse else ()
        tool = [_fill(word, values) for word in part.tool]
        if self.rehearse and part.tool[:1] == ("ncu",):
            tool = []  # there is no kernel on a device that it could look at
        more = {name: _fill(word, values) for name, word in part.environment.items()}
        return [*tool, *filled], more

    def _of_pytest(self, part: Part) -> list[str]:
        """A lost GPU costs one process of several; a test that hangs costs itself."""
        workers = "1" if self.rehearse else "4"  # each collects all tests, a rehearsal runs one
        more = ["-n", workers] if _has("xdist") and not part.tool else []
        return more + (
            ["--timeout=40", "--timeout-method=thread"] if _has("pytest_timeout") else []
        )

    def note(self, part: Part, status: str, seconds: float) -> None:
        """Writes and says what became of a part."""
        self.failed += status != "ok"
        log = self.out / f"{_stem(part)}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        told = [f"{part.name}: {status}, {seconds} s"]
        if part.figure:
            found = _read(self._json(part))
            self.report[part.name] = {"status": status, "seconds": seconds, **found}
            (self.out / "figures.json").write_text(json.dumps(self.report, indent=1))
            (self.out / "table.txt").write_text(table(self.report) + "\n")
            told = part_lines(part.name, self.report[part.name])
        elif lines and status == "ok":
            told[0] += f": {lines[-1]}"
        if status != "ok":
            told += [f"  | {line}" for line in lines[-5:]]
        for line in told:
            self.say(line)
        with (self.out / "summary.txt").open("a") as summary:
            summary.write("\n".join(told) + "\n")

    def _json(self, part: Part) -> Path:
        return self.out / f"{_stem(part)}.json"

    @property
    def _ceilings(self) -> Path:
        return self.out / "ceilings.json"


def _stem(part: Part) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in part.name)


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _kernels(part: Part) -> str:
    if "sanitizer" not in "".join(part.tool[:1]):
        return ""
    from vllmx_cuda.kernel_specs import KERNELS

    return f"^({'|'.join(KERNELS)})$"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _read(path: Path) -> dict[str, Any]:
    """What a part has written, as far as it came; a process that was killed may leave half."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--second", action="store_true", help="the parts of the second call")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--only", default="", help="figures whose names hold this, and ceilings")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the emulator")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts = [
        part
        for part in (SECOND if chosen.second else FIRST)
        if not part.figure or chosen.only in part.name or part.name == "ceilings"
    ]
    call = Call(out, chosen.seconds - END_S, chosen.rehearse)
    call.all(parts)
    for log in sorted(out.glob("*.reports.log")):
        summaries = [line for line in log.read_text().splitlines() if "SUMMARY" in line]
        print(*(f"{log.name}:{line}" for line in summaries), sep="\n")
    print(table(call.report))
    return min(call.failed, 100)


if __name__ == "__main__":
    sys.exit(main())
