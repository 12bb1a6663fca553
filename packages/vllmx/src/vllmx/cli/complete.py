"""`vllmx complete`: prompts in, completions out, in this process."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import (
    engine_options,
    log_level_option,
    resolve,
    sampling_options,
    take_sampling,
)
from vllmx.completion_lines import Task, read_lines, repeated, split_prompts

if TYPE_CHECKING:
    from vllmx_engine.llm import LLM
    from vllmx_engine.wire.outputs import RequestOutput

DEMO_PROMPT = "Once upon a time"


@click.command(cls=ModelCommand)
@engine_options
@sampling_options
@click.option("--prompts", "-p", help='Prompts separated by " | ".')
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help="A prompt a line, JSON lines, or a file for OpenAI's batch API; - is stdin.",
)
@click.option("--chat", "as_chat", is_flag=True, help="Send each prompt as a user's message.")
@click.option(
    "--batch", type=click.IntRange(1, 4096), default=1, help="Complete each prompt this many times."
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines for scripts.")
@log_level_option("warning")
def complete(
    prompts: str | None,
    prompts_file: Path | None,
    as_chat: bool,
    batch: int,
    as_json: bool,
    log_level: str,
    **flags: Any,
) -> None:
    """Complete prompts from --prompts "a | b", --prompts-file, or standard input.

    One prompt streams to standard output; several run together and show their progress. A JSON line
    has "prompt" or "messages", and sampling parameters that win over the flags.
    """
    configure_logging(log_level)
    sampling = {"max_tokens": 128, **take_sampling(flags)}
    (config,) = resolve((EngineConfig,), flags)
    tasks = list(repeated(_tasks(prompts, prompts_file), batch))
    if as_chat:
        tasks = [_asked(task) for task in tasks]
    if len(tasks) == 1 and not as_json and _can_stream(tasks[0]):
        _stream(config, sampling, tasks[0])
    else:
        _together(config, sampling, tasks, as_json)


def _tasks(prompts: str | None, file: Path | None) -> list[Task]:
    if prompts is not None and file is not None:
        raise ConfigError("give either --prompts or --prompts-file")
    if prompts is not None:
        found, where = split_prompts(prompts), "--prompts"
    elif file is not None and str(file) != "-":
        found, where = read_lines(_text(_bytes(file), str(file))), str(file)
    elif file is not None or not sys.stdin.isatty():
        where = "standard input"
        found = read_lines(_text(sys.stdin.buffer.read(), where))
    else:
        return [Task(DEMO_PROMPT)]
    if not found:
        raise ConfigError(f"there is no prompt, {where} is empty: give --prompts or --prompts-file")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8 text") from None


def _asked(task: Task) -> Task:
    """A prompt as a user's message."""
    if not isinstance(task.prompt, str):
        return task
    messages = [{"role": "user", "content": task.prompt}]
    return dataclasses.replace(task, prompt=None, messages=messages)


def _can_stream(task: Task) -> bool:
    choices = max(task.sampling.get("n", 1), task.sampling.get("best_of", 1))
    return choices == 1 and task.custom_id is None


def _stream(config: EngineConfig, sampling: dict[str, Any], task: Task) -> None:
    from vllmx_engine.engine import Engine

    with Engine(config) as engine:
        params = engine.sampling_params(**{**sampling, **task.sampling})
        if task.messages is not None:
            prompt: str | list[int] = engine.apply_chat_template(task.messages)
        else:
            assert task.prompt is not None
            prompt = task.prompt
        click.echo(task.shown, nl=False)
        _, _, pieces = engine.generate_stream(params, prompt)
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()


def _together(
    config: EngineConfig, sampling: dict[str, Any], tasks: list[Task], as_json: bool
) -> None:
    from vllmx_engine.llm import LLM

    from vllmx.completion_lines import records

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with LLM(**options) as llm:
        outputs = _run(llm, sampling, tasks)
    for task, output in zip(tasks, outputs, strict=True):
        if as_json or task.custom_id is not None:
            for record in records(task, output, config.name):
                click.echo(json.dumps(record, ensure_ascii=False))
        else:
            for choice in output.outputs:
                click.echo(f"{click.style(task.shown, bold=True)}{choice.text}\n")


def _run(llm: LLM, sampling: dict[str, Any], tasks: list[Task]) -> list[RequestOutput]:
    """The outputs in the order of the tasks: conversations together, then texts."""
    found: dict[int, RequestOutput] = {}
    for chats in (True, False):
        several = {i: task for i, task in enumerate(tasks) if (task.messages is not None) == chats}
        if not several:
            continue
        params = [llm.sampling_params(**{**sampling, **task.sampling}) for task in several.values()]
        inputs: list[Any] = [task.messages if chats else task.prompt for task in several.values()]
        outputs = llm.chat(inputs, params) if chats else llm.generate(inputs, params)
        found |= dict(zip(several, outputs, strict=True))
    return [found[i] for i in range(len(tasks))]
