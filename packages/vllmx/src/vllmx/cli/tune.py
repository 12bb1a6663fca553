"""`vllmx tune`: measures which settings keep a promise of latencies at the highest rate."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.progress import show_progress

from vllmx.cli.command import ModelCommand
from vllmx.cli.config_file import read_yaml
from vllmx.cli.errors import FAILED
from vllmx.cli.flag_texts import ALIASES
from vllmx.cli.options import config_path, engine_options, resolve
from vllmx.cli.quantize import may_replace

if TYPE_CHECKING:
    from vllmx.sizing.promise import Limit
    from vllmx.sizing.trials import Work
    from vllmx.sizing.tuning import Outcome, Search, Setting, Trial

_WIDTH = 60
_FIGURES = ("ttft p50", "ttft p99", "itl p50", "itl p99", "e2e p99")


@click.command(cls=ModelCommand)
@engine_options
@click.option("--slo", required=True, help='What is promised, such as "ttft<500ms,itl.p95<50ms".')
@click.option("--input-len", type=click.IntRange(1), default=256, show_default=True)
@click.option("--output-len", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=20.0,
    show_default=True,
    help="Seconds of arrivals in a trial.",
)
@click.option(
    "--requests",
    type=click.IntRange(2),
    default=20,
    show_default=True,
    help="Least requests of a trial.",
)
@click.option(
    "--precision",
    type=click.FloatRange(0.01, 1),
    default=0.1,
    show_default=True,
    help="Share by which rates are told apart.",
)
@click.option("--max-rate", type=float, help="No more requests a second are tried.")
@click.option("--try-isq", default="", help="Quantisations that may be chosen: q8_0,q4_k_m")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("vllmx.yaml"),
    show_default=True,
    help="The file for `vllmx serve --config`.",
)
@click.option("--overwrite", "--yes", "-y", is_flag=True, help="Replace OUTPUT without asking.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def tune(
    slo: str,
    input_len: int,
    output_len: int,
    seconds: float,
    requests: int,
    precision: float,
    max_rate: float | None,
    try_isq: str,
    output: Path,
    overwrite: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Find the settings with which MODEL keeps a promise of latencies at the highest rate.

    A server runs with one setting after the other under Poisson arrivals. What is given as a flag
    or in --config stays as it is. The best setting is written to OUTPUT; exit code 1: none keeps
    the promise.
    """
    from vllmx.sizing.promise import parse_promise
    from vllmx.sizing.trials import Work, served
    from vllmx.sizing.tuning import Search

    configure_logging("warning")
    limits = parse_promise(slo)
    if max_rate is not None and not 0 < max_rate < math.inf:
        raise ConfigError(f"--max-rate must be above 0, got {max_rate}", param="max_rate")
    of_server = _server_keys(flags)
    (config,) = resolve((EngineConfig,), flags, of_server)
    if not overwrite:
        may_replace(output)
    _check_place(output)
    base = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name == "model" or getattr(config, field.name) != field.default
    }
    work = Work(input_len, output_len, seconds, requests)
    search = Search(
        lambda setting: served(setting, work), limits, precision, max_rate or math.inf, _tell
    )
    best = search.run(base, _knobs(config, limits, try_isq))
    if sys.stderr.isatty():
        show_progress(" " * _WIDTH, 1, 1)
    _show(search, best, base, output, as_json)
    if best.held is None:
        sys.exit(FAILED)
    _write(output, best, of_server, search, work)


def _server_keys(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The server settings in the file of --config, as written."""
    from vllmx_server.config import ServerConfig

    content = read_yaml(config_path(flags))
    if "models" in content:
        raise ConfigError(
            "--config lists several models, and one is tuned: name it, without that file",
            param="config",
        )
    own = {field.name for field in fields(ServerConfig)}
    names = {
        alias.lstrip("-"): name
        for name, aliases in ALIASES.items()
        for alias in "/".join(aliases).split("/")
        if name in own
    }
    return {
        key: value
        for key, value in content.items()
        if key.replace("-", "_") in own or key.replace("_", "-") in names
    }


def _knobs(config: EngineConfig, limits: Sequence[Limit], try_isq: str) -> list[Any]:
    from vllmx_core.plugins.registry import load_registry
    from vllmx_core.system.processors import available_processors

    from vllmx.sizing.tuning import knobs

    backend = load_registry().choose_backend(config.backend)[0].name
    threads = available_processors() if backend == "cpu" else 0
    types = [name.strip() for name in try_isq.split(",") if name.strip()]
    return knobs(config, limits, threads, types)


def _tell(setting: Setting, rate: float, share: float) -> None:
    text = f"{_changed(setting)}: {rate:.3g} requests/s"
    if sys.stderr.isatty():
        show_progress(text[:_WIDTH].ljust(_WIDTH), round(share * 1000), 1001)
    else:
        click.echo(text, err=True)


def _changed(setting: Setting, base: Setting | None = None) -> str:
    found = [
        f"{name.replace('_', '-')} {value}"
        for name, value in setting.items()
        if name != "model" and (base is None or base.get(name) != value)
    ]
    return ", ".join(found) or "as given"


def _check_place(path: Path) -> None:
    """Raises ConfigError, before minutes of trials, if the output cannot be written."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: name a file in a folder that is there")


def _write(
    path: Path, best: Outcome, of_server: dict[str, Any], search: Search, work: Work
) -> None:
    from vllmx.sizing.trials import write_yaml

    held = best.held
    assert held is not None
    content = {name.replace("_", "-"): value for name, value in best.setting.items()}
    about = (
        f"# vllmx tune: {', '.join(map(str, search.limits))}\n"
        f"# held at {held.rate:.3g} requests/s of {work.input_len} tokens in and"
        f" {work.output_len} out ({held.tokens_per_s:.0f} tokens/s)\n"
    )
    about += "".join(f"# measured on an unsteady machine: {doubt}\n" for doubt in search.doubts)
    try:
        path.touch()
        if {"api-key", "api_key"} & set(of_server):
            path.chmod(0o600)
        write_yaml(path, content | of_server)
        path.write_text(about + path.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output") from None


def _show(search: Search, best: Outcome, base: Setting, output: Path, as_json: bool) -> None:
    chosen = None if best.held is None else str(output)
    if as_json:
        outcomes = [asdict(outcome) for outcome in search.outcomes]
        found = asdict(best) if best.held is not None else None
        promise = [asdict(limit) for limit in search.limits]
        record = {
            "promise": promise,
            "best": found,
            "written": chosen,
            "unsteady": search.doubts,
            "outcomes": outcomes,
        }
        click.echo(json.dumps(_plain(record), indent=1))
        return
    click.echo(_table(search.outcomes, base))
    if search.doubts:
        click.echo(
            f"\nthe machine was unsteady ({'; '.join(search.doubts)}): take the figures for what"
            " they are, or measure again while nothing else runs, with a greater --seconds\n"
        )
    for outcome in search.outcomes:
        if outcome.error is not None:
            click.echo(f"{_changed(outcome.setting, base)}: {outcome.error}")
    if best.held is None:
        click.echo(f"\nno setting keeps {', '.join(map(str, search.limits))}:")
        for outcome in search.outcomes:
            if outcome.missed is not None:
                faults = "; ".join(outcome.missed.faults(search.limits))
                name = _changed(outcome.setting, base)
                click.echo(f"  {name}, {outcome.missed.rate:.3g} requests/s: {faults}")
        click.echo("promise less, or take a smaller model, --try-isq q4_k_m or a faster machine")
        return
    held = best.held
    click.echo(
        f"\nchoose {_changed(best.setting, base)}: {', '.join(map(str, search.limits))} at"
        f" {held.rate:.3g} requests/s, {held.tokens_per_s:.0f} tokens/s\n"
        f"    vllmx serve --config {output}"
    )


def _plain(value: Any) -> Any:
    """Replaces NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(outcomes: Sequence[Outcome], base: Setting) -> str:
    """Lists for each setting the trial that kept the promise, or the one that came closest."""
    lines = [["setting", "requests/s", "kept", "tokens/s", *(f"{name}, ms" for name in _FIGURES)]]
    for outcome in outcomes:
        trial = outcome.held or outcome.missed
        if trial is None:
            continue
        cells = [_changed(outcome.setting, base), f"{trial.rate:.3g}"]
        cells += ["yes" if outcome.held else "no", f"{trial.tokens_per_s:.0f}"]
        lines.append(cells + _milliseconds(trial))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def _milliseconds(trial: Trial) -> list[str]:
    values = [trial.figures[name] * 1e3 for name in _FIGURES]
    return ["-" if math.isnan(value) else f"{value:.3g}" for value in values]
