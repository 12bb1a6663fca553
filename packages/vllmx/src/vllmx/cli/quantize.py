"""`vllmx quantize`: a checkpoint in, a smaller GGUF file out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from vllmx_core.errors import ConfigError
from vllmx_core.system.progress import show_progress


@click.command()
@click.argument("model")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "mix",
    default="q4_k_m",
    show_default=True,
    help="q8_0, q6_k, q5_k_m, q5_k_s, q4_k_m, q4_k_s, q3_k_l, q3_k_m, q3_k_s, q2_k, q2_k_s, q5_1,"
    " q5_0, q4_1, q4_0, mxfp4_moe, f16, bf16 or f32. Experts in MXFP4 stay so unless the type has"
    " fewer bits.",
)
@click.option(
    "--merge-lora",
    type=click.Path(path_type=Path),
    help="A LoRA adapter, a PEFT folder or a GGUF file, to merge into the weights.",
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--threads", "-t", type=click.IntRange(1, 1024), help="Default: the cores at hand.")
@click.option("--pre", help="The pre-tokenizer's name in llama.cpp, where vllmx cannot tell.")
@click.option("--overwrite", "--yes", "-y", is_flag=True, help="Replace OUTPUT without asking.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
def quantize(
    model: str,
    output: Path,
    mix: str,
    merge_lora: Path | None,
    revision: str | None,
    threads: int | None,
    pre: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write MODEL (folder, file or Hugging Face id) to OUTPUT, a GGUF file, with fewer bits.

    The summary tells for each tensor type how many bytes it takes and its RMS error, and what
    MODEL has that a GGUF file has no place for.
    """
    if not overwrite:
        may_replace(output)
    from vllmx_core.plugins.checkpoint import resolve_path
    from vllmx_core.plugins.registry import load_registry
    from vllmx_core.system.processors import available_processors
    from vllmx_models.formats.gguf.quantize.convert import quantize as convert

    registry = load_registry()
    source = resolve_path(registry, model, revision=revision, progress=not quiet)
    start = time.perf_counter()
    summary = convert(
        registry,
        source,
        output,
        mix.lower(),
        threads=threads or available_processors(),
        pre=pre,
        lora=merge_lora,
        progress=None if quiet else _report,
    )
    found = _figures(summary, time.perf_counter() - start)
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print(found)


def may_replace(output: Path) -> None:
    """Asks before replacing a file. Raises ConfigError without a terminal, and Abort."""
    if not output.exists():
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{output} exists: say --overwrite to replace it", param="output")
    click.confirm(f"{output} exists. Replace it?", abort=True, err=True)


def _report(name: str, index: int, count: int) -> None:
    """A bar in a terminal, else a line for each tensor."""
    if sys.stderr.isatty():
        show_progress("quantising", index + 1, count)
    else:
        click.echo(f"[{index + 1:>{len(str(count))}}/{count}] {name}", err=True)


def _figures(summary: Any, seconds: float) -> dict[str, Any]:
    """The figures of a `vllmx_models.formats.gguf.quantize.convert.Summary`."""
    types = {
        name: {
            "tensors": entry.tensors,
            "values": entry.values,
            "bytes": entry.num_bytes,
            "rms_error": entry.rms_error,
            "relative_error": entry.relative_error,
        }
        for name, entry in summary.types.items()
    }
    values = sum(entry.values for entry in summary.types.values())
    stored = sum(entry.num_bytes for entry in summary.types.values())
    return {
        "path": str(summary.path),
        "bytes": summary.num_bytes,
        "bits_per_weight": stored * 8 / values,
        "seconds": seconds,
        "types": types,
        "not_written": list(summary.lost),
    }


def _print(found: dict[str, Any]) -> None:
    click.echo(f"{'type':<6}{'tensors':>8}{'MiB':>10}{'RMS error':>12}{'relative':>10}")
    for name, entry in found["types"].items():
        click.echo(
            f"{name:<6}{entry['tensors']:>8}{entry['bytes'] / 2**20:>10.2f}"
            f"{entry['rms_error']:>12.3e}{entry['relative_error']:>10.4f}"
        )
    click.echo(
        f"{found['path']}: {found['bytes'] / 2**20:.2f} MiB, {found['bits_per_weight']:.2f} bits a"
        f" weight, {found['seconds']:.1f} s"
    )
    if found["not_written"]:
        click.echo("not in the file:")
    for line in found["not_written"]:
        click.echo(f"  {line}")
