"""The command class of everything that loads a model: flags of other servers, none given twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import click
from vllmx_core.errors import ConfigError

from vllmx.cli.dotted_flags import joined
from vllmx.cli.flags_llama import LLAMA
from vllmx.cli.flags_vllm import VLLM
from vllmx.cli.flags_vllm_rs import VLLM_RS
from vllmx.cli.foreign_flags import ForeignFlag

FAMILIES = {"vLLM": VLLM, "vLLM.rs": VLLM_RS, "llama.cpp": LLAMA}
DOTTED_NAMES = frozenset(
    name for flags in FAMILIES.values() for flag in flags for name in flag.names if "." in name
)
"""Names that have a dot and no key behind it."""
FOREIGN = "foreign_"
"""Begins the parameters of flags that are not ours, so that they meet none of ours."""


def every_flag() -> Iterator[ForeignFlag]:
    """Each flag of other servers by itself, and vLLM's switches turned off as well."""
    lines = chain.from_iterable(FAMILIES.values())
    yield from chain.from_iterable(line.apart() for line in lines)
    switches = (flag for line in VLLM if line.bare for flag in line.apart())
    yield from filter(None, map(ForeignFlag.turned_off, switches))


class ModelCommand(click.Command):
    """A command with the flags of `engine_options`. Flags of other servers are hidden in its help;
    where it has a flag of that name itself, its own counts. Underscores are dashes, as in vLLM."""

    @cached_property
    def foreign(self) -> dict[str, ForeignFlag]:
        """Flags of other servers by their parameters, with the names that are free for them."""
        found: dict[str, ForeignFlag] = {}
        taken = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        fields = {param.name for param in self.params}
        for flag in every_flag():
            names = tuple(name for name in flag.names if name not in taken)
            if names and (flag.field is None or flag.field in fields):
                parameter = FOREIGN + re.sub(r"[-.]", "_", flag.name.strip("-"))
                found[parameter] = replace(flag, names=names)
                taken.update(names)
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [_dashed(arg) for arg in joined(args, DOTTED_NAMES)]
        self._learn(args)
        given = self.make_parser(ctx).parse_args(list(args))[2]
        for parameter, count in Counter(given).items():
            once = isinstance(parameter, click.Option) and not parameter.multiple
            if count > 1 and once and parameter.name != "help":
                names = ", ".join((*parameter.opts, *parameter.secondary_opts))
                raise ConfigError(f"{parameter.opts[0]} is given twice (names: {names}): give one")
        return super().parse_args(ctx, args)

    def _learn(self, args: list[str]) -> None:
        """Makes options of the flags that are given: all of them would cost each start 15 ms."""
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        given = {arg.partition("=")[0] for arg in args if arg.startswith("-")}
        given |= {arg[:2] for arg in given if not arg.startswith("--")}  # -c8192
        if given <= own:
            return
        for parameter, flag in self.foreign.items():
            if not given.isdisjoint(flag.names) and own.isdisjoint(flag.names):
                self.params.append(_option(parameter, flag))


def _option(parameter: str, flag: ForeignFlag) -> click.Option:
    options: dict[str, Any] = {"is_flag": True} if flag.bare else {"type": str}
    if flag.optional:
        options |= {"is_flag": False, "flag_value": "on"}
    return click.Option([*flag.names, parameter], default=None, hidden=True, **options)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
