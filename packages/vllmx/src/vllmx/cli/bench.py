"""`vllmx bench`: throughput, latency, speculation, serving and start-up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging

from vllmx.bench.figures import show
from vllmx.cli.command import ModelCommand
from vllmx.cli.options import engine_options, resolve

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure throughput, latency, speculation, serving and start-up."""


def _load_options(input_len: int, output_len: int) -> Callable[[F], F]:
    """--n, --input-len, --output-len and --json."""
    size = click.IntRange(1)
    options = (
        click.option("--n", "batches", default="1,4,16", show_default=True, help="Batch sizes."),
        click.option("--input-len", type=size, default=input_len, show_default=True),
        click.option("--output-len", type=size, default=output_len, show_default=True),
        click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts."),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"--n must be numbers such as 1,4,16, got {text!r}", param="n")
    return found


def _offline(name: str, batches: str, as_json: bool, flags: dict[str, Any], **sizes: int) -> None:
    configure_logging("warning")
    counts = _numbers(batches)
    (config,) = resolve((EngineConfig,), flags)
    config = dataclasses.replace(config, max_num_seqs=max(config.max_num_seqs or 1, *counts))
    from vllmx_engine.llm import LLM

    from vllmx.bench import offline

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with LLM(**options) as llm:
        if not as_json:
            info = llm.info
            click.echo(
                f"{config.name}: {info.architecture}, {info.dtype}, {info.backend}", err=True
            )
        click.echo(show(list(getattr(offline, name)(llm, counts, **sizes)), as_json))


@bench.command(cls=ModelCommand)
@engine_options
@_load_options(input_len=128, output_len=64)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
def throughput(
    batches: str, input_len: int, output_len: int, repeat: int, as_json: bool, **flags: Any
) -> None:
    """Tokens a second with n prompts at once, the median of --repeat runs."""
    sizes = {"input_len": input_len, "output_len": output_len, "repeat": repeat}
    _offline("throughput", batches, as_json, flags, **sizes)


@bench.command(cls=ModelCommand)
@engine_options
@_load_options(input_len=32, output_len=32)
@click.option("--repeat", type=click.IntRange(1), default=10, show_default=True)
def latency(
    batches: str, input_len: int, output_len: int, repeat: int, as_json: bool, **flags: Any
) -> None:
    """Percentiles of the whole time and of the time to first token."""
    sizes = {"input_len": input_len, "output_len": output_len, "repeat": repeat}
    _offline("latency", batches, as_json, flags, **sizes)


@bench.command(cls=ModelCommand)
@engine_options
@click.option(
    "--drafters",
    default="ngram,suffix",
    show_default=True,
    help="Values of --speculate, with commas between them; simulated: see --acceptance.",
)
@click.option(
    "--prompts", type=click.File(), help="A file with a prompt in each line; default: four of ours."
)
@click.option("--output-len", type=click.IntRange(2), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--together", type=click.IntRange(1), default=1, help="Prompts that run at once.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    help="Adds the drafter simulated: so large a share of its tokens is right, and it costs"
    " nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def speculate(
    drafters: str,
    prompts: TextIO | None,
    output_len: int,
    temperature: float,
    together: int,
    repeat: int,
    acceptance: float | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Speed and acceptance of drafters next to plain decoding."""
    configure_logging("warning")
    (config,) = resolve((EngineConfig,), flags)
    from vllmx.bench.speculation import SIMULATED, default_prompts, speculation

    names = [name for name in drafters.split(",") if name]
    if acceptance is not None and SIMULATED not in names:
        names.append(SIMULATED)
    texts = default_prompts() if prompts is None else [line for line in prompts if line.strip()]
    rows = speculation(
        {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        names,
        texts,
        output_len=output_len,
        temperature=temperature,
        together=together,
        repeat=repeat,
        acceptance=acceptance,
    )
    click.echo(show(list(rows), as_json))


@bench.command(cls=ModelCommand)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A running server.")
@click.option("--api-key", help="Bearer token.")
@_load_options(input_len=64, output_len=64)
@click.option("--request-rate", type=float, help="Open loop: arrivals a second, in place of --n.")
@click.option("--num-requests", type=click.IntRange(1), default=64, show_default=True)
@click.option("--vocab-size", type=click.IntRange(2), default=1000, show_default=True)
def serve(
    url: str,
    api_key: str | None,
    batches: str,
    input_len: int,
    output_len: int,
    request_rate: float | None,
    num_requests: int,
    vocab_size: int,
    as_json: bool,
) -> None:
    """Load on a running server: n clients in a closed loop, or Poisson arrivals."""
    from vllmx.bench.serving import Load, closed_loop, open_loop

    load = Load(
        url.rstrip("/"),
        _served_model(url, api_key),
        vocab_size,
        input_len,
        output_len,
        num_requests,
        api_key,
    )
    if request_rate is not None:
        if request_rate <= 0:
            raise ConfigError(f"--request-rate must be above 0, got {request_rate}")
        records = [asyncio.run(open_loop(load, request_rate))]
    else:
        records = [asyncio.run(closed_loop(load, n)) for n in _numbers(batches)]
    click.echo(show(records, as_json))


def _served_model(url: str, api_key: str | None) -> str:
    from vllmx.cli.ps import cards_of

    cards = cards_of(url, api_key)
    if not cards:
        raise ConfigError(f"{url} serves no model: check --url")
    return str(cards[0]["id"])


@bench.command(context_settings={"ignore_unknown_options": True})
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF COMPLETE]...")
def startup(repeat: int, as_json: bool, flags: tuple[str, ...]) -> None:
    """Process start to the first generated text, in fresh processes."""
    from vllmx.bench.processes import startup as measure

    click.echo(show([measure(repeat, flags)], as_json))
