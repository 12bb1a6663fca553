"""`vllmx run`: a chat or one answer, with a model that is downloaded first if necessary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.system.logs import configure_logging

from vllmx.cli.cached import model_of
from vllmx.cli.chat import ChatSettings, chat_options, open_chat
from vllmx.cli.command import ModelCommand
from vllmx.cli.options import resolve, take_sampling
from vllmx.cli.pull import SOURCE, at_hand, fetched, with_source


@click.command(cls=ModelCommand)
@chat_options
@SOURCE
@click.argument("prompt", nargs=-1)
def run(source: str, prompt: tuple[str, ...], log_level: str, **flags: Any) -> None:
    """Chat with MODEL, which is downloaded first if the cache lacks it; with PROMPT, answer that.

    MODEL is a short name (qwen3:4b), org/repo, org/repo:file.gguf, a folder or a file.
    """
    configure_logging(log_level)
    settings = ChatSettings.taken_from(flags)
    sampling = take_sampling(flags)
    if flags["model_argument"] is not None and source != "hub":
        flags["model_argument"] = with_source(model_of(flags["model_argument"])[0], source)
    with_source("", source)  # a misspelt one is refused before anything is loaded
    (config,) = resolve((EngineConfig,), flags)
    if settings.url is None:
        model = at_hand(config.model) or fetched(config.model, config.revision)
        config = replace(config, model=model)
    open_chat(config, sampling, settings, " ".join(prompt) or None)
