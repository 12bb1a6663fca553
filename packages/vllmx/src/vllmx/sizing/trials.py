"""Trials of a setting: a server in a separate process, and requests that arrive at a rate."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import Written
from vllmx_core.errors import ConfigError, excerpt
from vllmx_core.records import Record
from vllmx_server.config import ServerConfig

from vllmx.bench.figures import percentile
from vllmx.bench.processes import server_process
from vllmx.bench.serving import Load, arrivals, closed_loop_results
from vllmx.bench.sse_client import Streamed
from vllmx.sizing.promise import SHARES
from vllmx.sizing.tuning import Served, Setting, Trial

_NUM_IDS = 1000
"""Prompts are random ids below this, which every vocabulary has."""
_ALONE = 6
_PATIENCE = 60.0
_MODEL = "tuned"


class Work(Record):
    """The shape of a request, and the number of requests of a trial."""

    input_len: int
    output_len: int
    seconds: float
    """Seconds in which requests arrive ..."""
    least: int
    """The minimum number of requests."""


@contextmanager
def served(setting: Setting, work: Work) -> Iterator[Served]:
    """`vllmx serve` with a setting, warm."""
    content = {name.replace("_", "-"): value for name, value in setting.items()}
    content["served-model-name"] = _MODEL
    with tempfile.TemporaryDirectory(prefix="vllmx-tune-") as folder:
        path = Path(folder) / "serve.yaml"
        write_yaml(path, content)
        flags = ("--config", str(path), "--host", "127.0.0.1", "--port", "0", "--no-web")
        quiet = ("--disable-access-log", "--log-level", "error")
        command = [sys.executable, "-m", "vllmx", "serve", *flags, *quiet]
        with server_process(command, clean_environment(os.environ)) as server:
            load = Load(server.url, _MODEL, _NUM_IDS, work.input_len, work.output_len, _ALONE)
            results = _alone(load)
            alone_s = [result.whole_s for result in results]

            def measure(rate: float, seed: int) -> Trial:
                count = max(work.least, math.ceil(rate * work.seconds))
                own = replace(load, num_requests=count, seed=seed)
                patience_s = _PATIENCE + 2 * work.seconds
                return trial(rate, asyncio.run(arrivals(own, rate, patience_s)))

            yield Served(trial(1 / median(alone_s), results), alone_s, measure)


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file, with lists in place of tuples: YAML has no others."""
    import yaml

    path.write_text(yaml.safe_dump(_plain(content), sort_keys=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Replaces tuples by lists, and numbers by their spelling in the file."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Written):
        number = int(value) if isinstance(value, int) else float(value)
        return number if str(number) == value.text else value.text
    return value


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of settings, which would override the server's file."""
    names = {field.name for cls in (EngineConfig, ServerConfig) for field in fields(cls)}
    variables = {f"VLLMX_{name.upper()}" for name in (*names, "config")}
    return {key: value for key, value in environment.items() if key not in variables}


def _alone(load: Load) -> list[Streamed]:
    """Runs requests one by one; the first, which warms the server up, is left out. Raises
    ConfigError if one fails."""
    results = asyncio.run(closed_loop_results(load, 1))
    for result in results:
        if result.error is not None or not result.event_s:
            said = excerpt(result.error or "an answer without tokens", 400)
            raise ConfigError(
                f"requests of {load.input_len} tokens in and {load.output_len} out fail: {said}:"
                " give --input-len and --output-len that the model has room for"
            )
    return results[1:]


def trial(rate: float, results: Sequence[Streamed]) -> Trial:
    good = [result for result in results if result.error is None and result.event_s]
    values: Mapping[str, list[float]] = {
        "ttft": [each.first_token_s for each in good],
        "itl": [gap for each in good for gap in each.gaps_s],
        "tpot": [each.token_s for each in good],
        "e2e": [each.whole_s for each in good],
    }
    figures = {
        f"{name} {share}": percentile(found, part)
        for name, found in values.items()
        for share, part in SHARES.items()
    }
    times = [(each.sent_s, each.event_s[-1]) for each in good]
    span = max((end for _, end in times), default=0.0) - min((t for t, _ in times), default=0.0)
    bad = [each for each in results if each.error is not None or not each.event_s]
    return Trial(
        rate,
        len(results),
        len(bad),
        keeps_up(times),
        sum(each.completion_tokens for each in good) / span if span else 0.0,
        _peak(times),
        figures,
        excerpt(bad[0].error or "an answer without tokens", 300) if bad else None,
    )


def keeps_up(times: Sequence[tuple[float, float]]) -> bool:
    """True if about as many requests, (sent, ended), ended as arrived in the second half of their
    arrivals: a growing backlog does not show in the latencies of a short trial."""
    if not times:
        return False
    sent = sorted(begin for begin, _ in times)
    middle, last = sent[len(sent) // 2], sent[-1]
    came = sum(middle < begin <= last for begin in sent)
    ended = sum(middle < end <= last for _, end in times)
    return ended >= 0.9 * came - 2


def _peak(times: Sequence[tuple[float, float]]) -> int:
    changes = sorted([(begin, 1) for begin, _ in times] + [(end, -1) for _, end in times])
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
