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
from vllmx_core.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import engine_options, log_level_option, resolve
from vllmx.cli.sampling import sampling_options, take_sampling

if TYPE_CHECKING:
    from vllmx_core.sampling import SamplingParams
    from vllmx_engine.outputs import RequestOutput

DEMO_PROMPT = "Once upon a time"


@click.command(cls=ModelCommand)
@engine_options
@sampling_options
@click.option("--prompts", "-p", help='Prompts separated by " | ".')
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help='A prompt a line, or JSON lines with "prompt"; - is stdin.',
)
@click.option("--chat", "as_chat", is_flag=True, help="Send each prompt as a user's message.")
@click.option("--batch", type=int, default=1, help="Complete each prompt this many times.")
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

    One prompt streams to standard output; several run together and show their progress.
    """
    configure_logging(log_level)
    sampling = take_sampling(flags)
    (config,) = resolve((EngineConfig,), flags)
    texts = _prompts(prompts, prompts_file)
    if not 1 <= batch <= 4096:
        raise ConfigError(f"--batch must be between 1 and 4096, got {batch}", param="batch")
    texts = [text for text in texts for _ in range(batch)]
    sampling.setdefault("max_tokens", 128)
    if len(texts) == 1 and not as_json:
        _stream(config, sampling, texts[0], as_chat)
    else:
        _together(config, sampling, texts, as_chat, as_json)


def _prompts(prompts: str | None, file: Path | None) -> list[str]:
    if prompts is not None and file is not None:
        raise ConfigError("give either --prompts or --prompts-file")
    if prompts is not None:
        found = [part.strip() for part in prompts.split("|")]
    elif file is not None and str(file) != "-":
        found = _lines(_read(file))
    elif file is not None or not sys.stdin.isatty():
        found = _lines(sys.stdin.read())
        if not found and file is None:
            return [DEMO_PROMPT]  # nothing piped in: a scheduler or a test without stdin
    else:
        return [DEMO_PROMPT]
    found = [text for text in found if text]
    if not found:
        raise ConfigError("there is no prompt: give --prompts, --prompts-file or standard input")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def _lines(text: str) -> list[str]:
    """Each line a prompt; a line that is a JSON object gives its "prompt"."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("{"):
            found.append(line)
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, RecursionError):
            raise ConfigError(f'line {number} is not a JSON object with a "prompt"') from None
        found.append(str(prompt))
    return [line for line in found if line.strip()]


def _stream(config: EngineConfig, sampling: dict[str, Any], text: str, as_chat: bool) -> None:
    from vllmx_engine.chat import Message
    from vllmx_engine.engine import Engine

    with Engine(config) as engine:
        params = engine.sampling_params(**sampling)
        prompt = engine.apply_chat_template([Message("user", text)]) if as_chat else text
        if not as_chat:
            click.echo(text, nl=False)
        _, _, pieces = engine.generate_stream(params, prompt)
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()


def _together(
    config: EngineConfig, sampling: dict[str, Any], texts: list[str], as_chat: bool, as_json: bool
) -> None:
    from vllmx_engine.llm import LLM

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with LLM(**options) as llm:
        params = llm.sampling_params(**sampling)
        outputs = _run(llm, texts, params, as_chat)
    for text, output in zip(texts, outputs, strict=True):
        for choice in output.outputs:
            if as_json:
                found = {
                    "prompt": text,
                    "text": choice.text,
                    "finish_reason": choice.finish_reason,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "completion_tokens": len(choice.token_ids),
                }
                click.echo(json.dumps(found, ensure_ascii=False))
            else:
                click.echo(f"{click.style(text, bold=True)}{choice.text}\n")


def _run(llm: Any, texts: list[str], params: SamplingParams, as_chat: bool) -> list[RequestOutput]:
    found: list[RequestOutput]
    if as_chat:
        found = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    else:
        found = llm.generate(texts, params)
    return found
