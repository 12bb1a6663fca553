"""`vllmx plan`: what a model needs and how fast it will be, before it is downloaded or loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.errors import ConfigError
from vllmx_core.system.memory import GIB
from vllmx_core.system.progress import show_progress

if TYPE_CHECKING:
    from vllmx_core.model import ModelShape
    from vllmx_core.plugins.registry import Registry

    from vllmx.sizing.facts import Facts
    from vllmx.sizing.forecast import Forecast, Rates, Wish

THIS = "this"
DEFAULT_CONTEXT = 4096


@click.command()
@click.argument("model", required=False)
@click.option(
    "--on",
    default=THIS,
    show_default=True,
    help='"this" machine, whose speed is measured, or h100, h200, b200, a100, l40s, l4, rtx5090,'
    " rtx4090, rtx3090, m4-max, m3-ultra ... by its maker's figures; 8xh100 for several.",
)
@click.option("--backend", default="auto", show_default=True, help="Backend of this machine.")
@click.option(
    "--context",
    type=click.IntRange(1),
    help=f"Tokens of each sequence. Default: {DEFAULT_CONTEXT}, or the model's own where less.",
)
@click.option(
    "--rows", type=click.IntRange(1), default=1, show_default=True, help="Sequences at a time."
)
@click.option(
    "--memory-fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of the free memory that may be used.",
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def plan(
    model: str | None,
    on: str,
    backend: str,
    context: int | None,
    rows: int,
    memory_fraction: float,
    revision: str | None,
    as_json: bool,
) -> None:
    """Show what MODEL needs and how fast it will be: memory, context, tokens a second.

    MODEL is a folder, a config.json, a GGUF file, or a model of the Hugging Face hub, of which the
    header alone is read.
    """
    from vllmx_core.config import EngineConfig
    from vllmx_core.plugins.registry import load_registry
    from vllmx_models.formats.header_only import opened_header

    from vllmx.cli.cached import model_of
    from vllmx.sizing.facts import facts_of
    from vllmx.sizing.forecast import Wish, choose, forecast
    from vllmx.sizing.machines import machine

    if on != THIS:
        machine(on)  # report a misspelt name before looking for the model
    registry = load_registry()
    model = model_of(model or EngineConfig().model)[0]
    with opened_header(registry, model, revision) as header:
        facts = facts_of(header, registry)
    longest = facts.shape.max_model_len
    _check(model, facts.shape, context)
    wish = Wish(context or min(longest, DEFAULT_CONTEXT), rows, memory_fraction)
    title, memory, rates = _machine(registry, on, backend, facts)
    found = [forecast(facts, form, rates, memory, wish) for form in facts.forms]
    chosen = choose(found, wish)
    about = {
        "model": model,
        "architecture": facts.architecture,
        "parameters": facts.forms[0].num_values,
        "parameters_used_by_a_token": round(facts.forms[0].values_used),
        "max_model_len": longest,
        "kv_bytes_per_token": found[0].kv_token_bytes,
        "state_bytes_per_sequence": facts.shape.state_slot_bytes,
        "machine": title,
        "measured": on == THIS,
        "memory_bytes": memory,
        "context": wish.context,
        "rows": wish.rows,
    }
    if as_json:
        forms = [asdict(each) for each in found]
        choice = None if chosen is None else chosen.form
        click.echo(json.dumps(about | {"forms": forms, "choice": choice}, indent=1))
    else:
        _print(about, found, wish)
        click.echo(_advice(model, found, chosen, wish))


def _check(model: str, shape: ModelShape, context: int | None) -> None:
    """Raises ConfigError for models and contexts that cannot be planned."""
    if shape.output != "tokens":
        raise ConfigError(
            f"{model} gives {shape.output}, plans are made for models that generate text",
            param="model",
        )
    if context is not None and context > shape.max_model_len:
        raise ConfigError(
            f"--context {context} is more than the {shape.max_model_len} tokens that the model was"
            " made for",
            param="context",
        )


def _machine(
    registry: Registry, on: str, backend_name: str, facts: Facts
) -> tuple[str, float, Rates]:
    """(the machine's name, its free memory, its rates)."""
    from vllmx_core.backend import free_memory

    from vllmx.sizing.fixed_costs import measure_fixed
    from vllmx.sizing.machines import machine
    from vllmx.sizing.measured import measurable, measure

    if on != THIS:
        named = machine(on)
        return named.title, named.memory_bytes, named
    backend = registry.choose_backend(backend_name)[0].load()()
    kinds = {matrices.kind for form in facts.forms for matrices in form.matrices}
    kinds = {"BF16", *filter(measurable, kinds)}
    rates = measure(registry, backend, kinds, _tell, facts.forms[0].num_values)
    memory = free_memory(backend)
    fixed = measure_fixed(registry, backend_name, rates)
    return rates.title, memory, replace(rates, fixed=fixed.seconds)


def _tell(doing: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        show_progress(doing, done, total)


def _print(about: dict[str, Any], found: list[Forecast], wish: Wish) -> None:
    total, used = about["parameters"], about["parameters_used_by_a_token"]
    click.echo(
        f"{about['model']}: {about['architecture']}, {total / 1e9:.2f} G parameters"
        f" ({used / 1e9:.2f} G used by a token), context {about['max_model_len']:,},"
        f" {about['kv_bytes_per_token'] / 1024:.1f} KiB of KV cache a token"
    )
    if about["state_bytes_per_sequence"]:
        mib = about["state_bytes_per_sequence"] / (1 << 20)
        click.echo(f"recurrent layers keep {mib:.1f} MiB a sequence")
    source = "measured" if about["measured"] else "by its maker's figures"
    click.echo(
        f"on {about['machine']}, {about['memory_bytes'] / GIB:.1f} GiB free, speed {source}\n"
    )
    decode = [f"{n} at a time" for n in found[0].decode]
    from vllmx.sizing.forecast import PROMPT

    header = ["weights", "GiB", "longest context", f"rows of {wish.context:,}"]
    lines = [[*header, *decode, f"prompt of {PROMPT}"]]
    for each in found:
        lines.append(
            [
                each.form,
                f"{each.weight_bytes / GIB:.2f}",
                f"{each.longest_context:,}" if each.longest_context else "does not fit",
                str(each.rows) if each.rows else "-",
                *(_rate(rate) for rate in each.decode.values()),
                _rate(each.prefill),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    click.echo(" " * (sum(widths[:4]) + 8) + f"tokens/s in all at {wish.context:,} tokens")
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        click.echo("  ".join([line[0].ljust(widths[0]), *cells]))
    click.echo()


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def _advice(model: str, found: list[Forecast], chosen: Forecast | None, wish: Wish) -> str:
    wanted = f"{wish.rows} of {wish.context:,} tokens" if wish.rows > 1 else f"{wish.context:,}"
    if chosen is None:
        return (
            f"nothing leaves room for {wanted}: take a smaller model, a machine with more memory,"
            " or lower --context and --rows"
        )
    flags = "" if chosen.form == "stored" else f" --isq {chosen.form}"
    name = "the weights as they are stored" if not flags else chosen.form
    faster = [each for each in found if each.decode[1] > 1.2 * chosen.decode[1] and each.rows]
    more = ""
    if faster:
        best = faster[0]
        ratio = best.decode[1] / chosen.decode[1]
        more = f"; {best.form} would be {ratio:.1f} times as fast for one sequence, and less exact"
    return (
        f"choose {name}: the most precise that leaves room for {wanted}{more}\n"
        f"    vllmx serve {model}{flags} --max-model-len {wish.context}"
    )
