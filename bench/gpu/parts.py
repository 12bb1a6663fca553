"""What the two calls of run.sh consist of, in the order of their worth: if the next part fails,
what came before it was worth more.

Times are for an H200. A part begins when `least_s` is left for it, beside what is kept for the
parts behind it that are `kept`, and it is ended after `limit_s`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Part:
    """One process, with a log of its own.

    Args:
        argv: the script and its arguments. "{out}" is the folder of results, "{seconds}" what the
            process may use, "{json}" where it writes what it measured, "{kernels}" a pattern of the
            names of all our kernels, "{port}" a free port.
        rehearsed: arguments that follow without a GPU.
        figure: whether it writes "{json}", which becomes a part of the table.
        kept: whether `least_s` is kept for it while parts before it run.
        group: neighbours with equal names run side by side.
        tool: what runs the process in its turn: a profiler or a sanitizer.
    """

    name: str
    limit_s: float
    least_s: float
    argv: tuple[str, ...]
    rehearsed: tuple[str, ...] = ("--rehearse",)
    figure: bool = False
    kept: bool = False
    group: str = ""
    tool: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def figure(
    name: str,
    limit_s: float,
    least_s: float = 12,
    script: str = "measure.py",
    *,
    kept: bool = False,
) -> Part:
    """A part of the table: `script` measures the part of that name."""
    argv = (script, name, "{json}", "--seconds", "{seconds}")
    fresh = {"VLLMX_CACHE_DIR": "{out}/start-cache"} if script == "start.py" else {}
    return Part(name, limit_s, least_s, argv, figure=True, kept=kept, environment=fresh)


_SUITE = (str(HERE / "device_suite.py"), str(HERE / "device_quantised.py"))


def _pytest(*arguments: str) -> tuple[str, ...]:
    """Runs pytest without the configuration of the repository, which wants plugins that may be
    missing."""
    return (
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "live",
        "--import-mode=importlib",
        "-q",
        "--tb=short",
        *arguments,
    )


def _sanitizer(tool: str, log: str) -> tuple[str, ...]:
    """What CUDA refuses fails a test by itself; a kernel that is caught must not take the others
    along. initcheck watches cuBLASLt's kernels too, which write what ours read."""
    options = [f"--tool={tool}", "--error-exitcode=9", "--target-processes=all", "--port={port}"]
    options += ["--report-api-errors=no", "--destroy-on-device-error=kernel"]
    options += [f"--log-file={{out}}/{log}.reports.log"]
    options += ["--kernel-name=regex={kernels}"] if tool != "initcheck" else []
    options += ["--padding=256"] if tool == "memcheck" else []
    return ("compute-sanitizer", *options)


def _watched(tool: str) -> Part:
    return Part(
        tool,
        90,
        30,
        _pytest("-p", "sanitized", *_SUITE),
        ("-k", "kept or eager_and_recorded"),
        group="sanitizers",
        tool=_sanitizer(tool, tool),
        environment={"SANITIZED": "1", "SANITIZED_SECONDS": "{seconds}"},
    )


def _watched_wgmma(tool: str) -> Part:
    name = f"wgmma-{tool}"
    return Part(
        name,
        40,
        15,
        ("wgmma.py", "--untimed"),
        group="wgmma sanitizers",
        tool=_sanitizer(tool, name),
        environment={"SANITIZED": "1"},
    )


NCU = (
    "ncu",
    "--kernel-id=::regex:^(linear_mma|paged_decode_mma|sample_candidates)$:1",
    "--section=SpeedOfLight",
    "--section=WarpStateStats",
    "--section=MemoryWorkloadAnalysis",
)
FIRST = (
    Part("warm", 45, 8, ("warm.py",), kept=True),
    figure("ceilings", 20, 8, kept=True),
    Part("golden", 30, 10, ("golden.py", "{out}/golden.npz"), kept=True),
    Part("ids", 30, 10, ("ids.py",)),
    figure("0.6b bf16", 60, 40, kept=True),
    figure("8b bf16", 75, 60, kept=True),
    figure("256 x 1024 on 0.6b", 50, 40, kept=True),
    # never ran on a GPU: what may hang or take the context along is in a process of its own
    Part("wgmma", 30, 15, ("wgmma.py",)),
    figure("sampler", 15, 8),
    figure("8b q4_k_m", 40, 20),
    figure("8b fp8 blocks", 40, 20),
    Part("ncu", 30, 15, ("profiled.py",), tool=NCU),
    Part("suite", 150, 30, _pytest(*_SUITE), ("-k", "against_the_reference")),
)
SECOND = (
    *map(_watched, ("memcheck", "racecheck", "synccheck", "initcheck")),
    Part("transformers", 60, 20, _pytest(str(HERE / "device_transformers.py")), ("-k", "Qwen3")),
    figure("ceilings", 20, 8, kept=True),
    figure("start, model", 20, 8, "start.py"),
    figure("start, cold", 30, 15, "start.py"),
    figure("start, warm", 20, 8, "start.py"),
    figure("torch 0.6b", 40, 20, "torch_decode.py"),
    figure("torch 8b", 50, 30, "torch_decode.py"),
    figure("8b fp8", 35, 20),
    figure("8b bf16, fp8 KV", 35, 20),
    figure("0.6b q4_k_m", 20),
    figure("0.6b fp8 blocks", 20),
    figure("0.6b fp8", 20),
    figure("0.6b bf16, fp8 KV", 20),
    *map(_watched_wgmma, ("memcheck", "racecheck", "synccheck")),
)
