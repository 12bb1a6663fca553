"""Host CPU of a decode step (schedule, preparation, commit) over a device that answers at once.

    python bench/host.py [--rows 1,32,256] [--steps 400] [--context 448] [--sampling plain] [--json]

Times are CPU microseconds of the core's thread (other processes disturb them through caches only):
median (p10-p90) of each part, and the mean of all three, which holds the steps that begin new KV
blocks too. `--aligned` lets all rows begin their blocks in the same step, the worst case.
`--groups 7` is a model with several cache groups, all but the first of them with a window.
`--drafts 4` drafts four tokens for each row; every step verifies and keeps all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from time import thread_time_ns
from typing import Any

import numpy as np
from vllmx_core.backend import LoadedInfo
from vllmx_core.config import EngineConfig
from vllmx_core.plan import LogprobRows, SamplingRows, StepPlan, StepResult
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.drafters import Guess
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.wire.messages import CoreRequest, pack_ids

VOCAB_SIZE = 32_000
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
PARTS = ("schedule", "prepare", "commit")


class InstantStep:
    """A step that is done, or waits for its parameters."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self, rows: SamplingRows) -> InstantStep:
        count, width = rows.num_rows, rows.max_logprobs
        if width >= 0:
            self._result.logprobs = LogprobRows(
                np.zeros(count, np.float32),
                np.ones(count, np.int32),
                np.zeros((count, width), np.int32),
                np.zeros((count, width), np.float32),
            )
        return self

    def result(self) -> StepResult:
        return self._result


class InstantModel:
    """A `LoadedModel` without a device: every id is its logit row's number."""

    def __init__(
        self, num_blocks: int, max_tokens: int, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        self.info = LoadedInfo(
            backend="instant",
            device="none",
            dtype="f32",
            kv_cache_dtype="none",
            block_size=16,
            num_kv_blocks=num_blocks,
            max_num_seqs=max_tokens,
            max_num_batched_tokens=max_tokens,
            max_logit_rows=max_tokens,
            weight_bytes=0,
            kv_cache_bytes=0,
            details={},
            cache_windows=windows,
        )

    def step(self, plan: StepPlan, rows: SamplingRows) -> InstantStep:
        return self.forward(plan).sample(rows)

    def forward(self, plan: StepPlan) -> InstantStep:
        ids = np.arange(plan.num_logit_rows, dtype=np.int32)
        if plan.num_logit_rows > plan.num_rows:  # drafts: each token is followed by the next
            followers = np.append(plan.tokens[1:], 0)
            followers[plan.query_start[1:] - 1] = 1
            ids = followers[plan.logit_rows].astype(np.int32)
        return InstantStep(StepResult(ids, elapsed_s=0.01))

    def close(self) -> None:
        pass


class FreeDrafter:
    """Drafts without looking."""

    def guess(self, sequence: Sequence, most: int) -> Guess:
        return Guess([1] * most)

    def ended(self, sequence: Sequence) -> None:
        pass


class Stopwatch:
    """Wraps a function and keeps the CPU time of each call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.times_us: list[float] = []

    def __call__(self, *args: Any) -> Any:
        started = thread_time_ns()
        value = self._function(*args)
        self.times_us.append((thread_time_ns() - started) / 1000)
        return value


def measure(args: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """Medians and deciles in us of `args.steps` decode steps at `num_rows` rows."""
    length = args.context + 16 + (args.steps + 48) * (1 + args.drafts)
    windows = (None, *[args.window] * (args.groups - 1))
    config = EngineConfig(max_num_seqs=num_rows, async_scheduling=not args.plain)
    core = EngineCore(
        InstantModel(num_rows * len(windows) * (length // 16 + 2), 1 << 16, windows),
        config,
        max_model_len=length,
        vocab_size=VOCAB_SIZE,
    )
    if args.drafts:
        core.draft_with(Drafting(FreeDrafter(), args.drafts))
    params = SamplingParams(max_tokens=None, **SAMPLING[args.sampling])
    rng = np.random.default_rng(0)
    for row in range(num_rows):
        prompt = rng.integers(0, VOCAB_SIZE, args.context + (0 if args.aligned else row % 16))
        core.add(
            CoreRequest(
                request_id=f"request-{row}",
                prompt=pack_ids(prompt),
                params=params,
                stop_ids=[VOCAB_SIZE - 1, VOCAB_SIZE - 2],
                max_tokens=length,
                seed=row,
            )
        )
    watches = watch(core)
    for _ in range(40):
        core.step()
    for stopwatch in watches.values():
        stopwatch.times_us.clear()
    gc.collect()
    for _ in range(args.steps):
        updates = core.step()
        assert len(updates) == num_rows, (len(updates), num_rows)
    parts = [watches[name].times_us for name in PARTS]
    columns = dict(zip(PARTS, parts, strict=True))
    columns["total"] = [sum(step) for step in zip(*parts, strict=True)]
    columns["step"] = watches["step"].times_us
    core.close()
    result: dict[str, Any] = {name: deciles(times) for name, times in columns.items()}
    result |= {"rows": num_rows, "mean_total": statistics.mean(columns["total"])}
    return result


def watch(core: EngineCore) -> dict[str, Stopwatch]:
    """Puts a stopwatch on each part of the loop, and on the whole of it ("step", which holds the
    instant device and the stopwatches too)."""
    watches = {
        "schedule": Stopwatch(core._scheduler.schedule),
        "prepare": Stopwatch(core._builder.build),
        "commit": Stopwatch(core._committer.commit),
        "step": Stopwatch(core.step),
    }
    owners: list[tuple[object, str]] = [
        (core._scheduler, "schedule"),
        (core._builder, "build"),
        (core._committer, "commit"),
        (core, "step"),
    ]
    for (owner, method), stopwatch in zip(owners, watches.values(), strict=True):
        setattr(owner, method, stopwatch)
    return watches


def deciles(times: list[float]) -> dict[str, float]:
    p10, median, p90 = np.percentile(times, [10, 50, 90]).tolist()
    return {"p10": p10, "median": median, "p90": p90}


def main() -> None:
    parser = argparse.ArgumentParser(description="Host CPU of a decode step")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=448)
    parser.add_argument("--sampling", choices=SAMPLING, default="plain")
    parser.add_argument("--aligned", action="store_true")
    parser.add_argument("--groups", type=int, default=1, help="cache groups, the first without")
    parser.add_argument("--window", type=int, default=256, help="tokens, of the other groups")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens of each row")
    parser.add_argument("--plain", action="store_true", help="the loop without overlap")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [measure(args, int(count)) for count in args.rows.split(",")]
    if args.json:
        json.dump({"unit": "us", "arguments": vars(args), "results": results}, sys.stdout, indent=1)
        print()
        return
    names = (*PARTS, "total", "step")
    print("rows " + "".join(f"{name:>22}" for name in names) + f"{'mean total':>12}")
    for result in results:
        cells = ["{median:.0f} ({p10:.0f}-{p90:.0f})".format_map(result[name]) for name in names]
        cells = [f"{cell:>22}" for cell in cells]
        print(f"{result['rows']:4} " + "".join(cells) + f"{result['mean_total']:12.0f}")


if __name__ == "__main__":
    main()
