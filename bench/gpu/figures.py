"""Speed on the GPU at real shapes with random weights, beside what the card can do.

    python bench/gpu/figures.py OUT [--seconds 230] [--only WORD] [--rehearse]

Every part is a process of its own with its own limit: one that fails or hangs costs itself. What
parts leave unused goes to those behind them, the most wanted come first. OUT gets a JSON file and a
log for each part, figures.json with all of them, and table.txt.

Decode steps are given as a share of the measured copy bandwidth (the checkpoint's matrices and the
contexts' keys and values, once each), prefills as a share of the measured rate of a large bf16
product. Contexts that do not fit beside each other share their blocks, which is marked with "~".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARGIN_S = 4.0
"""Between the time when a part should end and when it is killed."""


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    """What it should take; shares of the time that there is."""
    script: str = "measure.py"


PARTS = (
    Part("ceilings", 6), Part("0.6b bf16", 18), Part("8b bf16", 26),
    Part("256 x 1024 on 0.6b", 14), Part("start, model", 8, "start.py"),
    Part("start, cold", 16, "start.py"), Part("start, warm", 8, "start.py"),
    Part("8b q4_k_m", 20), Part("8b fp8 blocks", 20), Part("8b fp8", 20),
    Part("8b bf16, fp8 KV", 20),
    Part("torch 0.6b", 30, "torch_decode.py"), Part("torch 8b", 30, "torch_decode.py"),
    Part("0.6b q4_k_m", 10), Part("0.6b fp8 blocks", 10), Part("0.6b fp8", 10),
    Part("0.6b bf16, fp8 KV", 10),
)  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """A figure of a part, and what it should be on an H200."""

    what: str
    part: str
    case: str
    """How the names of its cases begin."""
    key: str
    """Of a case's figures; "": the case is the figure."""
    wanted: float
    at_most: bool = False

    def reached(self, found: Mapping[str, Any]) -> str:
        """The worst of the cases beside the goal."""
        values = {
            name: float(case[self.key] if self.key else case)
            for name, case in found.items()
            if name.startswith(self.case)
            and not (isinstance(case, dict) and case.get("blocks_shared"))
        }
        if not values:
            return f"{self.what}: not measured"
        name = (max if self.at_most else min)(values, key=values.__getitem__)
        met = values[name] <= self.wanted if self.at_most else values[name] >= self.wanted
        limit = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}"
        return f"{self.what}: {values[name]:.4g} ({name}), {limit}: {'MET' if met else 'MISSED'}"


GOALS = (
    Goal("8B BF16 decode, share of the bandwidth", "8b bf16", "decode ", "share_of_copy", 0.85),
    Goal("0.6B batch 1, ms a step", "0.6b bf16", "decode 1 x 128", "wall_ms", 0.36, True),
    Goal("0.6B x 256, tokens/s", "256 x 1024 on 0.6b", "tokens_s", "", 45_000),
    Goal("0.6B prefill, share of the matmul rate", "0.6b bf16", "prefill ", "share_of_matmul", 0.7),
    Goal("8B prefill, share of the matmul rate", "8b bf16", "prefill ", "share_of_matmul", 0.7),
    Goal("warm start of the 0.6B, s", "start, warm", "first_token_s", "", 3.0, True),
)
Run = Callable[[list[str], float, dict[str, str], Path], str]
"""run(command, limit in seconds, environment, log) says "ok" or what went wrong."""


def run_process(command: list[str], limit_s: float, more: dict[str, str], log: Path) -> str:
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
                env={**os.environ, **more},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s"
    return "ok" if done.returncode == 0 else f"failed, status {done.returncode}: see {log.name}"


def run_parts(
    parts: Sequence[Part],
    out: Path,
    total_s: float,
    *,
    rehearse: bool = False,
    run: Run = run_process,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Part -> what it found, with "status" and "seconds"; rewritten to figures.json after each."""
    report: dict[str, Any] = {}
    end = clock() + total_s
    for index, part in enumerate(parts):
        begin = clock()
        share = part.seconds / sum(later.seconds for later in parts[index:])
        limit = (end - begin) * share
        stem = "".join(c if c.isalnum() or c == "." else "-" for c in part.name)
        found, path = {}, out / f"{stem}.json"
        path.unlink(missing_ok=True)
        if limit <= MARGIN_S:
            status = "not started: no time left"
        else:
            command = [sys.executable, str(HERE / part.script), part.name, str(path)]
            command += ["--seconds", f"{limit - MARGIN_S:.1f}"]
            if (out / "ceilings.json").exists() and part.name != "ceilings":
                command += ["--ceilings", str(out / "ceilings.json")]
            command += ["--rehearse"] if rehearse else []
            more = {}
            if part.name.startswith("start"):  # the second finds what the first left
                more["VLLMX_CACHE_DIR"] = str(out / "start-cache")
                if part.name.endswith("cold"):
                    shutil.rmtree(out / "start-cache", ignore_errors=True)
            status = run(command, limit, more, out / f"{stem}.log")
        if path.exists():
            found = json.loads(path.read_text())
        report[part.name] = {"status": status, "seconds": round(clock() - begin, 1), **found}
        (out / "figures.json").write_text(json.dumps(report, indent=1))
        (out / "table.txt").write_text(table(report) + "\n")
    shutil.rmtree(out / "start-model", ignore_errors=True)
    return report


def table(report: dict[str, Any]) -> str:
    """What a person wants to see of a report."""
    lines = []
    for name, found in report.items():
        lines.append(f"{name}: {found['status']}, {found['seconds']} s")
        if "cut" in found:
            lines.append(f"  {found['cut']}")
        decodes = {
            k: v for k, v in found.items() if k.startswith("decode ") and isinstance(v, dict)
        }
        lines += _decode_table(decodes)
        for case, v in found.items():
            if case.startswith("prefill "):
                lines.append(
                    f"  {case}: {v['device_ms']:.2f} ms, {v['tokens_s']:.0f} tokens/s,"
                    f" {v['share_of_matmul']:.0%} of the matmul rate"
                )
            elif case.startswith("captured ") and isinstance(v, dict):
                lines.append(
                    f"  {case}: {v['device_ms']:.3f} ms, {v['share_of_copy']:.0%} of the bandwidth"
                )
            elif case.endswith(" failed"):
                lines.append(f"  {case}: {v}")
            elif isinstance(v, int | float) and case != "seconds":
                lines.append(f"  {case}: {v:.4g}")
    lines.append("goals on an H200 (of several cases the worst; without those that share blocks):")
    lines += [f"  {goal.reached(report.get(goal.part, {}))}" for goal in GOALS]
    return "\n".join(lines)


def _decode_table(decodes: dict[str, Any]) -> list[str]:
    """Rows: contexts, columns: batches; milliseconds and the share of the bandwidth."""
    if not decodes:
        return []
    cases = {tuple(map(int, name.split()[1::2])): v for name, v in decodes.items()}
    batches = sorted({batch for batch, _ in cases})
    width = 18
    lines = ["  context" + "".join(f"{f'{n} rows':>{width}}" for n in batches) + "   gap us"]
    for context in sorted({context for _, context in cases}):
        cells, gaps = [], []
        for batch in batches:
            v = cases.get((batch, context))
            if v is None:
                cells.append("-")
                continue
            shared = "~" if v.get("blocks_shared") else ""
            cells.append(f"{v['device_ms']:.3f} ms {shared}{v['share_of_copy']:.0%}")
            gaps += [v["gap_us"]] if "gap_us" in v else []
        gap = f"{max(gaps):9.0f}" if gaps else ""
        lines.append(f"  {context:7}" + "".join(f"{cell:>{width}}" for cell in cells) + gap)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=230.0, help="for everything")
    parser.add_argument("--only", default="", help="parts whose names hold this word, and ceilings")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the emulator")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    parts = [p for p in PARTS if chosen.only in p.name or p.name == "ceilings"]
    report = run_parts(parts, chosen.out, chosen.seconds, rehearse=chosen.rehearse)
    print(table(report))
    return sum(found["status"] != "ok" for found in report.values())


if __name__ == "__main__":
    sys.exit(main())
