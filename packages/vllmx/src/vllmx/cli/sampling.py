"""Sampling flags of `complete` and `chat`; what is not given comes from the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "sampling_seed",
    "stop",
    "min_tokens",
    "ignore_eos",
)


def sampling_options(command: F) -> F:
    """One option for each sampling parameter, None when not given."""
    options = (
        click.option("--max-tokens", "-n", type=int, help="Longest output, in tokens."),
        click.option("--temperature", type=float, help="0 = greedy."),
        click.option("--top-p", type=float, help="Nucleus sampling."),
        click.option("--top-k", type=int, help="Keep the k likeliest; 0 = all."),
        click.option("--min-p", type=float, help="Keep what is this likely relative to the best."),
        click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
        click.option("--presence-penalty", type=float, help="-2 to 2."),
        click.option("--frequency-penalty", type=float, help="-2 to 2."),
        click.option("--sampling-seed", type=int, help="Makes the draws repeat."),
        click.option("--stop", multiple=True, help="Text that ends the output; may be repeated."),
        click.option("--min-tokens", type=int, help="Shortest output, in tokens."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_sampling(flags: dict[str, Any]) -> dict[str, Any]:
    """Moves the sampling parameters out of a command's flags, for `SamplingParams`."""
    given = {name: flags.pop(name) for name in NAMES}
    given["seed"] = given.pop("sampling_seed")
    return {name: value for name, value in given.items() if value not in (None, ())}
