"""What a person wants to see of the figures, and what an H200 should reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A figure of a part, and what it should be on an H200.

    Args:
        case: how the names of the part's cases begin.
        key: of a case's figures; "": the case is the figure.
    """

    what: str
    part: str
    case: str
    key: str
    wanted: float
    at_most: bool = False

    def reached(self, found: Mapping[str, Any]) -> str:
        """The worst of the cases beside the goal."""
        values = {
            name: float(value)
            for name, case in found.items()
            if name.startswith(self.case)
            and not (isinstance(case, dict) and case.get("blocks_shared"))
            and (value := case.get(self.key) if self.key else case) is not None
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
    Goal("draw of one row with top_k, us", "sampler", "few x 1", "us", 20, True),
    Goal("draws of 256 rows with top_k, us", "sampler", "few x 256", "us", 60, True),
    Goal("host time of a launch, us", "ceilings", "launch_us", "", 2, True),
    Goal("0.6B prefill, share of the matmul rate", "0.6b bf16", "prefill ", "share_of_matmul", 0.7),
    Goal("8B prefill, share of the matmul rate", "8b bf16", "prefill ", "share_of_matmul", 0.7),
    Goal("warm start of the 0.6B, s", "start, warm", "first_token_s", "", 3.0, True),
)


def table(report: Mapping[str, Any]) -> str:
    """All parts, and the goals behind them."""
    lines = [line for name, found in report.items() for line in part_lines(name, found)]
    lines.append("goals on an H200 (of several cases the worst; without those that share blocks):")
    lines += [f"  {goal.reached(report.get(goal.part, {}))}" for goal in GOALS]
    return "\n".join(lines)


def part_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """One part: how it ended, and its figures."""
    lines = [f"{name}: {found['status']}, {found['seconds']} s"]
    if "cut" in found:
        lines.append(f"  {found['cut']}")
    lines += _decode_table(
        {k: v for k, v in found.items() if k.startswith("decode ") and isinstance(v, dict)}
    )
    for case, v in found.items():
        if case.startswith("prefill ") and isinstance(v, dict):
            lines.append(
                f"  {case}: {v['device_ms']:.2f} ms, {v['tokens_s']:.0f} tokens/s,"
                f" {_share(v['share_of_matmul'])} of the matmul rate"
            )
        elif case.startswith("captured ") and isinstance(v, dict):
            share = _share(v["share_of_copy"])
            lines.append(f"  {case}: {v['device_ms']:.3f} ms, {share} of the bandwidth")
        elif case.endswith(" failed"):
            lines.append(f"  {case}: {v}")
        elif isinstance(v, int | float) and case != "seconds":
            lines.append(f"  {case}: {v:.4g}")
    return lines


def _share(share: float | None) -> str:
    """Percent; "?" where the ceiling that it is a share of was not measured."""
    return "?" if share is None else f"{share:.0%}"


def _decode_table(decodes: Mapping[str, Any]) -> list[str]:
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
            cells.append(f"{v['device_ms']:.3f} ms {shared}{_share(v['share_of_copy'])}")
            gaps += [v["gap_us"]] if "gap_us" in v else []
        gap = f"{max(gaps):9.0f}" if gaps else ""
        lines.append(f"  {context:7}" + "".join(f"{cell:>{width}}" for cell in cells) + gap)
    return lines
