"""The command class of everything that loads a model: other servers' flags, options given twice."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError

from vllmx.cli.foreign_flags import ForeignFlag, every_flag, families

logger = logging.getLogger("vllmx.flags")
SERVED_NAME = "served_model_name"
_DOTTED = re.compile(r"(--[A-Za-z][\w-]*|-[a-z]c)\.([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)")
FOREIGN = "foreign_"
"""Prefix of the parameters of other servers' flags, so that they differ from ours."""


def needs_unix_sockets(command: str) -> None:
    """Raises ConfigError on Windows for a command that runs the engine core in another process."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError(
            f"`vllmx {command}` needs Linux or macOS: run it in WSL 2; on Windows itself"
            " `vllmx run`, `chat` and `complete` work"
        )


def _dotted_names() -> frozenset[str]:
    """Names with a dot that is not followed by a key of a JSON object."""
    flags = chain.from_iterable(families().values())
    return frozenset(name for flag in flags for name in flag.names if "." in name)


def joined(args: list[str], known: Callable[[], Collection[str]]) -> list[str]:
    """Replaces dotted flags by one JSON object for each flag, in the place of its last key. Values
    are JSON, or else text. If a key is given twice, the last value wins, with a warning. Raises
    ConfigError for a key without a value.

    Args:
        known: returns the flags that have a dot in their names.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    waiting = iter(args)
    for arg in waiting:
        name, equals, value = arg.partition("=")
        found = _DOTTED.fullmatch(name)
        if found is not None and name in known():
            found = None
        if found is None:
            rest.append(arg)
            continue
        flag, keys = found[1].replace("_", "-"), found[2].split(".")
        text = value if equals else next(waiting, None)
        if text is None:
            raise ConfigError(f"{name} wants a value")
        _put_key(objects.setdefault(flag, {}), keys, text, name)
        places[flag] = len(rest)
    for flag, place in sorted(places.items(), key=lambda item: -item[1]):
        rest[place:place] = [flag, json.dumps(objects[flag])]
    return rest


def _put_key(target: dict[str, Any], keys: list[str], text: str, name: str) -> None:
    *outer, last = keys
    for key in outer:
        if not isinstance(target.setdefault(key, {}), dict):
            logger.warning("%s is given twice, as a value before: its keys are taken", name)
            target[key] = {}
        target = target[key]
    if last in target:
        logger.warning("%s is given twice, the last one is taken", name)
    try:
        target[last] = json.loads(text)
    except (ValueError, RecursionError):
        target[last] = text


class ModelCommand(click.Command):
    """A command with the flags of `engine_options`. Flags of other servers are hidden in its help,
    and its own flags override them. Underscores are dashes, as in vLLM."""

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
        args = [_dashed(arg) for arg in joined(args, _dotted_names)]
        self._learn(args)
        args = self._names_apart(ctx, _modules_apart(args))
        given = self.make_parser(ctx).parse_args(list(args))[2]
        overridden = self._overridden(given)
        rest = super().parse_args(ctx, args)
        for parameter in overridden:
            ctx.params[str(parameter.name)] = None
        return rest

    def _overridden(self, given: Sequence[click.Parameter]) -> list[click.Parameter]:
        """Warns of each option that is given twice, the last of which wins, and returns the
        switches of other servers that lose to their opposites."""
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
        """A key that is equal for a switch of other servers and its opposite."""
        flag = self.foreign.get(str(parameter.name))
        if flag is None or not flag.bare or flag.field is None:
            return parameter.name
        return flag.field, flag.key

    def _names_apart(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Splits `--served-model-name a b` into one option for each name. If the last word can be
        a model and nothing else names the model, it is the model."""
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
        """Makes options only for the flags that are given: all of them would take 15 ms."""
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


def _modules_apart(args: Sequence[str]) -> list[str]:
    """Splits vLLM's `--lora-modules a=PATH b=PATH` into one option for each."""
    found, takes = list[str](), False
    for arg in args:
        takes = takes and not arg.startswith("-")
        if takes and found[-1] != "--lora-modules" and ("=" in arg or arg.startswith("{")):
            found.append("--lora-modules")
        takes = takes or arg == "--lora-modules"
        found.append(arg)
    return found


def _may_be_model(word: str) -> bool:
    return "/" in word or word == EngineConfig().model or os.path.exists(word)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
