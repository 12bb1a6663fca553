"""The command class of everything that loads a model: flags of other servers, none given twice."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import click
from vllmx_core.errors import ConfigError

from vllmx.cli.flags_llama import LLAMA
from vllmx.cli.flags_vllm import VLLM
from vllmx.cli.flags_vllm_rs import VLLM_RS
from vllmx.cli.foreign_flags import ForeignFlag

FAMILIES = {"vLLM": VLLM, "vLLM.rs": VLLM_RS, "llama.cpp": LLAMA}
FOREIGN = "foreign_"
"""Begins the parameters of flags that are not ours, so that they meet none of ours."""


class ModelCommand(click.Command):
    """A command with the flags of `engine_options`. Flags of other servers are hidden in its help;
    where it has a flag of that name itself, its own counts. Underscores are dashes, as in vLLM."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.foreign: dict[str, ForeignFlag] = {}
        taken = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        fields = {param.name for param in self.params}
        lines = chain.from_iterable(FAMILIES.values())
        for flag in chain.from_iterable(line.apart() for line in lines):
            names = [name for name in flag.names if name not in taken]
            if names and (flag.field is None or flag.field in fields):
                parameter = FOREIGN + flag.name.strip("-").replace("-", "_")
                self.foreign[parameter] = flag
                self.params.append(_option(parameter, flag, names))
                taken.update(names)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [_dashed(arg) for arg in args]
        given = self.make_parser(ctx).parse_args(list(args))[2]
        for parameter, count in Counter(given).items():
            once = isinstance(parameter, click.Option) and not parameter.multiple
            if count > 1 and once and parameter.name != "help":
                names = ", ".join((*parameter.opts, *parameter.secondary_opts))
                raise ConfigError(f"{parameter.opts[0]} is given twice (names: {names}): give one")
        return super().parse_args(ctx, args)


def _option(parameter: str, flag: ForeignFlag, names: list[str]) -> click.Option:
    options: dict[str, Any] = {"is_flag": True} if flag.bare else {"type": str}
    if flag.optional:
        options |= {"is_flag": False, "flag_value": "on"}
    return click.Option([*names, parameter], default=None, hidden=True, **options)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
