"""Flags of other servers that deployments carry over: what each comes to here.

A harmless one is taken with a note in the log, one that means something of ours sets it, and any
other value is refused with the reason and the remedy. docs/flags.md is made from these tables.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.config_values import json_object
from vllmx_core.errors import ConfigError, shown
from vllmx_core.records import Record

logger = logging.getLogger("vllmx.flags")

Translation = Mapping[str, Any] | Callable[[str], Any]
SAID_BY_REQUESTS = "of requests that do not say it"


class ForeignFlag(Record):
    """A flag that vllmx does not have itself. `text` is what its users are told."""

    names: tuple[str, ...]
    text: str
    bare: bool = False
    """It takes no value."""
    optional: bool = False
    """It may go without its value."""
    accepts: tuple[str, ...] | None = ()
    """Values that are taken and do nothing; None: all."""
    field: str | None = None
    """What it sets of ours, to `translation` of its value or, of a bare flag, to `value`."""
    translation: Translation | None = None
    value: Any = True
    key: str | None = None
    """The key that it sets of the JSON object in `field`."""
    variable: str | None = None
    """The environment variable of a library that it sets."""

    @property
    def name(self) -> str:
        """The one of its names that says most."""
        return max(self.names, key=len)

    def apart(self) -> Iterator[ForeignFlag]:
        """The flags of a line of the table one by one, so that messages name the one that is given:
        each long name, with the short ones before it. Names that set ours are one flag's."""
        if self.field is not None or self.variable is not None:
            yield self
            return
        names = list[str]()
        for name in self.names:
            names.append(name)
            if name.startswith("--") or name == self.names[-1]:
                yield replace(self, names=tuple(names))
                names = []

    def turned_off(self) -> ForeignFlag | None:
        """The opposite of a switch, as vLLM's parser has one for each: `--no-x` of `--x`, and
        `--disable-x` of `--enable-x`. Turned off, what is refused is taken."""
        names = tuple(off for name in self.names for off in _opposites(name))
        if not names or self.variable is not None:
            return None
        if self.field is not None and isinstance(self.value, bool):
            return replace(self, names=names, value=not self.value)
        text = self.text if self.accepts else "it is off"
        return ForeignFlag(names, text, bare=True, accepts=("true",))

    @property
    def outcome(self) -> str:
        """One line for the table in docs/flags.md."""
        if self.key is not None:
            assert self.field is not None
            return f"sets `{self.key}` of `--{self.field.replace('_', '-')}`: {self.text}"
        if self.field is not None:
            return f"sets `--{self.field.replace('_', '-')}`: {self.text}"
        if self.variable is not None:
            return f"sets `{self.variable}`: {self.text}"
        if self.accepts is None or (self.bare and self.accepts):
            return f"taken, without effect: {self.text}"
        if self.accepts:
            taken = ", ".join(f"`{value}`" for value in self.accepts)
            return f"{taken} taken, other values refused: {self.text}"
        return f"refused: {self.text}"


def _opposites(name: str) -> Iterator[str]:
    if not name.startswith("--") or name.startswith("--no-"):
        return
    yield f"--no-{name[2:]}"
    for prefix, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if name.startswith(prefix):
            yield other + name.removeprefix(prefix)


def ignored(names: str, text: str, *values: str, optional: bool = False) -> ForeignFlag:
    """A flag with a value; without `values` any is harmless."""
    return ForeignFlag(tuple(names.split()), text, optional=optional, accepts=values or None)


def switch(names: str, text: str) -> ForeignFlag:
    """A flag without a value that is harmless."""
    return ForeignFlag(tuple(names.split()), text, bare=True, accepts=("true",))


def refused(names: str, text: str, *, bare: bool = False) -> ForeignFlag:
    """One whose effect vllmx does not have."""
    return ForeignFlag(tuple(names.split()), text, bare=bare)


def means(names: str, field: str, text: str, translation: Translation) -> ForeignFlag:
    """One with a value that stands for one of ours."""
    return ForeignFlag(tuple(names.split()), text, field=field, translation=translation)


def switches(names: str, field: str, value: Any, text: str) -> ForeignFlag:
    """One without a value that stands for one of ours."""
    return ForeignFlag(tuple(names.split()), text, bare=True, field=field, value=value)


def sampling(
    names: str, key: str, text: str = SAID_BY_REQUESTS, translation: Translation | None = None
) -> ForeignFlag:
    """One with the default of a sampling parameter, by its key in generation_config.json."""
    return ForeignFlag(
        tuple(names.split()),
        text,
        field="override_generation_config",
        key=key,
        translation=translation or number,
    )


def template(names: str, key: str, text: str, translation: Translation) -> ForeignFlag:
    """One with the default of a variable of the chat template."""
    return ForeignFlag(
        tuple(names.split()),
        text,
        field="default_chat_template_kwargs",
        key=key,
        translation=translation,
    )


def template_switch(names: str, key: str, value: Any, text: str) -> ForeignFlag:
    """One without a value that sets a variable of the chat template."""
    return ForeignFlag(
        tuple(names.split()),
        text,
        bare=True,
        field="default_chat_template_kwargs",
        key=key,
        value=value,
    )


def number(text: str) -> int | float:
    """Raises ConfigError."""
    try:
        value = float(text)
        if math.isfinite(value):
            return int(text) if text.lstrip("+-").isdecimal() else value
    except ValueError:
        pass
    raise ConfigError("a number is wanted")


def variable(names: str, name: str, text: str, *, bare: bool = False) -> ForeignFlag:
    """One that a library of ours knows as an environment variable."""
    return ForeignFlag(tuple(names.split()), text, bare=bare, variable=name)


def apply(flag: ForeignFlag, value: Any, fields: dict[str, Any]) -> None:
    """Takes a flag: into `fields`, into the environment, or with a note. Raises ConfigError that
    says why it is refused and what to do."""
    is_json = isinstance(value, bool | dict | list)  # of a config file
    text = json.dumps(value, default=str) if is_json else str(value)
    if flag.variable is not None:
        os.environ[flag.variable] = "1" if flag.bare else text
        logger.info("%s is taken: it sets %s", flag.name, flag.variable)
    elif flag.field is not None:
        _set(flag, text, fields)
    elif flag.accepts is None or text.lower() in flag.accepts:
        logger.info("%s is taken without effect: %s", flag.name, flag.text)
    else:
        given = flag.name if flag.bare else f"{flag.name} {text}"
        raise ConfigError(f"{given} is refused: {flag.text}", param=flag.name)


def _set(flag: ForeignFlag, text: str, fields: dict[str, Any]) -> None:
    assert flag.field is not None
    ours = flag.value if flag.bare else _translated(flag, text)
    if ours is None:
        logger.info("%s is taken without effect: it asks for what is done anyway", flag.name)
        return
    if flag.key is not None:
        _set_key(flag, flag.key, ours, fields)
        return
    before = fields.get(flag.field)
    own = "--" + flag.field.replace("_", "-")
    if before not in (None, (), ours):
        raise ConfigError(
            f"{flag.name} asks for {own} {ours}, which is given as {before!r} too: give one",
            param=flag.field,
        )
    fields[flag.field] = ours
    logger.info("%s is taken as %s %s", flag.name, own, ours)


def _set_key(flag: ForeignFlag, key: str, ours: Any, fields: dict[str, Any]) -> None:
    """Puts `ours` into the JSON object of the flag's field."""
    assert flag.field is not None
    own = "--" + flag.field.replace("_", "-")
    values = json_object(fields.get(flag.field), flag.field, json.dumps({key: ours}))
    if key in values and values[key] != ours:
        raise ConfigError(
            f"{flag.name} asks for {key} {ours} in {own}, which has {shown(values[key])} there:"
            " give one",
            param=flag.field,
        )
    fields[flag.field] = json.dumps(values | {key: ours})
    logger.info("%s is taken as %s of %s: %s", flag.name, key, own, ours)


def _translated(flag: ForeignFlag, text: str) -> Any:
    if callable(flag.translation):
        try:
            return flag.translation(text)
        except ConfigError as error:
            problem = error.message
        raise ConfigError(f"{flag.name} {shown(text)} is refused: {problem}", param=flag.name)
    assert flag.translation is not None
    if text.lower() not in flag.translation:
        raise ConfigError(
            f"{flag.name} {text} is refused, {', '.join(flag.translation)} are taken: {flag.text}",
            param=flag.name,
        )
    return flag.translation[text.lower()]
