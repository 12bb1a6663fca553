"""Flags of vLLM, vLLM.rs and llama.cpp's server that vllmx does not have, read from
foreign_flags.json.

A harmless flag is accepted with a note in the log; a flag with an equivalent sets it; anything else
is refused with the reason and the remedy. The reference page of flags is made from these tables.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from vllmx_core.config_values import json_object, nearest
from vllmx_core.errors import ConfigError, shown
from vllmx_core.records import Record
from vllmx_core.speculative_config import draft_model, draft_tokens, drafter, speculative_config

logger = logging.getLogger("vllmx.flags")

Translation = Mapping[str, Any] | Callable[[str], Any]


class ForeignFlag(Record):
    """A flag that vllmx does not have itself; `text` is the message for users."""

    names: tuple[str, ...]
    text: str
    bare: bool = False
    """True if it takes no value."""
    optional: bool = False
    """True if its value is optional."""
    accepts: tuple[str, ...] | None = ()
    """Values that are accepted without effect; None: all."""
    field: str | None = None
    """Our field that it sets, to `translation` of its value or, for a bare flag, to `value`."""
    translation: Translation | None = None
    value: Any = True
    joined: Mapping[str, str] | None = None
    """Values of a field that another flag has set already, by the two flags' own: "int8 q4"."""
    key: str | None = None
    """The key that it sets of the JSON object in `field`."""
    variable: str | None = None
    """The environment variable of a library that it sets."""

    @property
    def name(self) -> str:
        """The longest of its names."""
        return max(self.names, key=len)

    def apart(self) -> Iterator[ForeignFlag]:
        """Splits a line of the table into a flag for each long name, with the short names before
        it, so that messages name the given flag. Flags that set ours are not split."""
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
        """The opposite of a switch, as in vLLM's parser: `--no-x` of `--x`, and `--disable-x` of
        `--enable-x`. The opposite of a refused switch is accepted."""
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


def number(text: str) -> int | float:
    """Parses a finite number. Raises ConfigError."""
    try:
        value = float(text)
        if math.isfinite(value):
            return int(text) if text.lstrip("+-").isdecimal() else value
    except ValueError:
        pass
    raise ConfigError("a number is wanted")


def gibibytes(text: str) -> int:
    """Bytes of a number of GiB."""
    return int(number(text) * (1 << 30))


def context(text: str) -> str:
    """Translates 0, which means the model's own length."""
    return "auto" if text == "0" else text


def layers(text: str) -> str:
    """The backend for this number of layers on the GPU, where 99 means all. Raises ConfigError for
    a part of a model."""
    if text == "0":
        return "cpu"
    if text in ("all", "auto", "-1") or (text.isdecimal() and float(text) >= 99):
        return "auto"
    raise ConfigError("the whole model is on one device; --backend names it, 0 is cpu, 99 auto")


def answer_tokens(text: str) -> int | float | None:
    """Translates -1 and -2, which mean as many as the context holds."""
    value = number(text)
    return None if value in (-1, -2) else value


def thinking_budget(text: str) -> bool | None:
    """Translates -1, no budget, and 0, no thoughts. Raises ConfigError for other values, which
    requests set."""
    if text in ("-1", "0"):
        return None if text == "-1" else False
    raise ConfigError("requests set it: thinking_token_budget; -1 and 0 are taken")


def keys_of(text: str) -> tuple[str, ...]:
    """API keys of a file, one a line. Raises ConfigError."""
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of keys cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError("the file holds no key")
    return keys


def structured_outputs(text: str) -> str | None:
    """The reasoning parser in vLLM's JSON object. Raises ConfigError for keys that requests set and
    for unsupported ones; the choice of a library is ignored."""
    config = json_object(text, "structured_outputs_config", '{"reasoning_parser": "qwen3"}')
    for key, value in config.items():
        if key not in STRUCTURED_OUTPUTS:
            raise ConfigError(
                f"it has the unknown key {shown(key)}{nearest(key, STRUCTURED_OUTPUTS)}"
            )
        reason = STRUCTURED_OUTPUTS[key]
        if reason is not None and value:
            raise ConfigError(f"{key}: {reason}")
    parser = config.get("reasoning_parser") or None
    if not isinstance(parser, str | None):
        raise ConfigError(f"reasoning_parser must be the name of a format, got {shown(parser)}")
    return parser


ANY_WHITESPACE = "requests say structured_outputs.disable_any_whitespace"
ADDITIONAL_PROPERTIES = "schemas say additionalProperties"
STRUCTURED_OUTPUTS = {
    "backend": None,
    "disable_fallback": None,
    "disable_any_whitespace": ANY_WHITESPACE,
    "disable_additional_properties": ADDITIONAL_PROPERTIES,
    "reasoning_parser": None,
    "reasoning_parser_plugin": "plugins bring parsers by the hook vllmx_parsers (docs/plugins.md)",
    "enable_in_reasoning": "thoughts are free, the answer has the form",
}
"""Keys of vLLM's JSON object; with a reason, true values are refused."""


TRANSLATIONS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "number": number,
    "gibibytes": gibibytes,
    "context": context,
    "layers": layers,
    "answer_tokens": answer_tokens,
    "thinking_budget": thinking_budget,
    "keys_of": keys_of,
    "structured_outputs": structured_outputs,
    "drafter": drafter,
    "draft_model": draft_model,
    "draft_tokens": draft_tokens,
    "speculative_config": speculative_config,
}


@cache
def families() -> Mapping[str, tuple[ForeignFlag, ...]]:
    """The flags of foreign_flags.json by server. A text `$name` refers to the file's `reasons`, and
    a translation that is a string to `TRANSLATIONS`."""
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    reasons = tables.pop("reasons")
    return {
        family: tuple(_flag(entry, reasons) for entry in entries)
        for family, entries in tables.items()
    }


def _flag(entry: dict[str, Any], reasons: Mapping[str, str]) -> ForeignFlag:
    text, translation = entry["text"], entry.get("translation")
    read: dict[str, Any] = {"names": tuple(entry["names"].split())}
    if text.startswith("$"):
        read["text"] = reasons[text[1:]]
    if isinstance(translation, str):
        read["translation"] = TRANSLATIONS[translation]
    if entry.get("accepts"):
        read["accepts"] = tuple(entry["accepts"])
    return ForeignFlag(**(entry | read))


def every_flag() -> Iterator[ForeignFlag]:
    """Each flag of other servers by itself, and vLLM's switches turned off as well."""
    tables = families()
    for line in chain.from_iterable(tables.values()):
        yield from line.apart()
    switches = (flag for line in tables["vLLM"] if line.bare for flag in line.apart())
    yield from filter(None, map(ForeignFlag.turned_off, switches))


def apply(flag: ForeignFlag, value: Any, fields: dict[str, Any]) -> None:
    """Applies a flag: sets a field or an environment variable, or logs that it has no effect.
    Raises ConfigError, with the reason and the remedy, for a refused flag."""
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
    for name, value in ours.items() if isinstance(ours, dict) else ((flag.field, ours),):
        _set_field(flag, name, value, fields)


def _set_field(flag: ForeignFlag, field: str, ours: Any, fields: dict[str, Any]) -> None:
    before = fields.get(field)
    own = "--" + field.replace("_", "-")
    pair = f"{before} {ours}"
    if flag.joined is not None and pair in flag.joined:
        before = ours = flag.joined[pair]
    elif "heads" in (before, ours) and "model:" in pair:  # llama.cpp's draft-mtp with an assistant
        before = ours = pair.removeprefix("heads ").removesuffix(" heads")
    if before not in (None, (), ours):
        raise ConfigError(
            f"{flag.name} asks for {own} {ours}, which is given as {before!r} too: give one",
            param=field,
        )
    fields[field] = ours
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
