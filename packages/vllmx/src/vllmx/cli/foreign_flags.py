"""Flags of other servers that deployments carry over: what each comes to here.

A harmless one is taken with a note in the log, one that means something of ours sets it, and any
other value is refused with the reason and the remedy. docs/flags.md is made from these tables.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllmx_core.errors import ConfigError
from vllmx_core.records import Record

logger = logging.getLogger("vllmx.flags")

Translation = Mapping[str, Any] | Callable[[str], Any]


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


def sampling(names: str, key: str, text: str = "where a request says nothing") -> ForeignFlag:
    """One that is a default of requests, by its key in generation_config.json."""
    return ForeignFlag(
        tuple(names.split()), text, field=DEFAULTS, key=key, translation=number_or_none
    )


def number_or_none(text: str) -> int | float | None:
    """-1 stands for nothing to set where it is no value of its own. Raises ConfigError."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no number") from None


def variable(names: str, name: str, text: str, *, bare: bool = False) -> ForeignFlag:
    """One that a library of ours knows as an environment variable."""
    return ForeignFlag(tuple(names.split()), text, bare=bare, variable=name)


def apply(flag: ForeignFlag, value: Any, fields: dict[str, Any]) -> None:
    """Takes a flag: into `fields`, into the environment, or with a note. Raises ConfigError that
    says why it is refused and what to do."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
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
    before = fields.get(flag.field)
    own = "--" + flag.field.replace("_", "-")
    if before not in (None, (), ours):
        raise ConfigError(
            f"{flag.name} asks for {own} {ours}, which is given as {before!r} too: give one",
            param=flag.field,
        )
    fields[flag.field] = ours
    logger.info("%s is taken as %s %s", flag.name, own, ours)


def _translated(flag: ForeignFlag, text: str) -> Any:
    if callable(flag.translation):
        return flag.translation(text)
    assert flag.translation is not None
    if text.lower() not in flag.translation:
        raise ConfigError(
            f"{flag.name} {text} is refused, {', '.join(flag.translation)} are taken: {flag.text}",
            param=flag.name,
        )
    return flag.translation[text.lower()]
