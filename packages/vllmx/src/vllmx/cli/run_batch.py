"""`vllmx run-batch`: an OpenAI batch from file to file, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.progress import show_progress

from vllmx.cli.command import ModelCommand
from vllmx.cli.flag_texts import HELP
from vllmx.cli.options import FILE, Shown, log_level_option, options_of, resolve
from vllmx.cli.quantize import may_replace

if TYPE_CHECKING:
    from vllmx_server.apis.batches.store import Batch


@click.command("run-batch", cls=ModelCommand)
@click.argument("source", metavar="[IN]", required=False, type=click.Path(path_type=Path))
@click.argument("output", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@options_of(EngineConfig, HELP)
@click.option("--config", "config_file", type=Shown("path"), help="YAML file with flags.")
@click.option(*FILE[0], type=Shown("path"), help=FILE[1])
@click.option(
    "--input-file", "-i", type=click.Path(path_type=Path), help="The same as the argument IN."
)
@click.option(
    "--output-file", "-o", type=click.Path(path_type=Path), help="The same as the argument OUT."
)
@click.option("--overwrite", "--yes", "-y", is_flag=True, help="Replace OUT without asking.")
@log_level_option("warning")
def run_batch(
    source: Path | None,
    output: Path | None,
    input_file: Path | None,
    output_file: Path | None,
    overwrite: bool,
    log_level: str,
    **flags: Any,
) -> None:
    """Answer the lines of IN, a file for OpenAI's batch API, and write their answers to OUT.

    The model is named by --model; without it the demo model answers. OUT is written when all lines
    are answered; what is answered so far is in OUT.progress, and the same command goes on with it.
    """
    source, output = source or input_file, output or output_file
    if source is None or output is None:
        raise ConfigError("run-batch needs two files: vllmx run-batch IN OUT --model MODEL")
    configure_logging(log_level)
    (config,) = resolve((EngineConfig,), flags)
    if not overwrite:
        may_replace(output)
    from vllmx_server import offline

    batch = offline.run_batch(config, source, output, _report)
    click.echo(f"{output}: {batch.completed} answered, {batch.failed} failed", err=True)


def _report(batch: Batch) -> None:
    """A bar in a terminal, else nothing."""
    done = batch.completed + batch.failed
    if sys.stderr.isatty() and batch.total and batch.status != "validating":
        show_progress("answering", min(done, batch.total), batch.total)
