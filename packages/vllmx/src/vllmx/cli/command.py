"""The command class of everything that loads a model: other servers' flags, options given twice."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import click
from vllmx_core.config import EngineConfig

from vllmx.cli.dotted_flags import joined
from vllmx.cli.flags_llama import LLAMA
from vllmx.cli.flags_vllm import VLLM
from vllmx.cli.flags_vllm_rs import VLLM_RS
from vllmx.cli.foreign_flags import ForeignFlag

logger = logging.getLogger("vllmx.flags")
SERVED_NAME = "served_model_name"
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
        args = self._names_apart(ctx, args)
        given = self.make_parser(ctx).parse_args(list(args))[2]
        overridden = self._overridden(given)
        rest = super().parse_args(ctx, args)
        for parameter in overridden:
            ctx.params[str(parameter.name)] = None
        return rest

    def _overridden(self, given: Sequence[click.Parameter]) -> list[click.Parameter]:
        """Warns of each option that is given twice, the last of which wins, and tells which
        switches of other servers lose to their opposites."""
        of_option: dict[object, list[click.Parameter]] = {}
        for parameter in given:
            if isinstance(parameter, click.Option) and not parameter.multiple:
                of_option.setdefault(self._sets(parameter), []).append(parameter)
        lost: list[click.Parameter] = []
        for parameters in of_option.values():
            last = parameters[-1]
            if len(parameters) > 1 and last.name != "help":
                names = ", ".join((*last.opts, *last.secondary_opts))
                logger.warning(
                    "%s is given twice, the last one is taken (names: %s)", last.opts[0], names
                )
            lost += [each for each in parameters if each is not last]
        return lost

    def _sets(self, parameter: click.Parameter) -> object:
        """The same for a switch of other servers and its opposite."""
        flag = self.foreign.get(str(parameter.name))
        if flag is None or not flag.bare or flag.field is None:
            return parameter.name
        return flag.field, flag.key

    def _names_apart(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--served-model-name a b` as one option for each name. A last word that is a model stays
        one where nothing else names the model."""
        option = next((one for one in self.params if one.name == SERVED_NAME), None)
        if option is None:
            return args
        rest, words, place = list[str](), list[str](), 0
        waiting = iter(args)
        takes = False
        for arg in waiting:
            if takes and not arg.startswith("-"):
                words.append(arg)
                continue
            takes = arg in option.opts
            rest.append(arg)
            if takes and (name := next(waiting, None)) is not None:
                rest.append(name)
                place = len(rest)
        if not words:
            return args
        found = self.make_parser(ctx).parse_args(list(rest))[0]
        values = (found.get(name) for name in ("model_argument", "model", "file"))
        named = any(isinstance(value, str | list | tuple) and value for value in values)
        if not named and _may_be_model(words[-1]):
            rest.insert(place, words.pop())
        return [
            *rest[:place],
            *(part for each in words for part in (option.opts[0], each)),
            *rest[place:],
        ]

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


def _may_be_model(word: str) -> bool:
    return "/" in word or word == EngineConfig().model or os.path.exists(word)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
