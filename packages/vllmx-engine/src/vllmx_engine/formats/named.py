"""Formats by the names that flags give; apart from `choice`, whose templates are long to import."""

from __future__ import annotations

from typing import Literal

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError
from vllmx_core.output_format import OutputFormat
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ParserSpec
from vllmx_core.records import Record

Origin = Literal["known", "derived", "by_markers", "not_found"]
"""The source of a format: named by a flag or followed by the chat template; derived from the
template; a known one with only its markers in the template; not found, though not disabled."""


class FoundFormat(Record):
    """The format of a model, and for people where its parts come from."""

    format: OutputFormat
    tools_from: str
    reasoning_from: str
    tools_origin: Origin = "known"
    """The source of the part for calls."""


def check_name(registry: Registry, field: str, name: str) -> None:
    """Raises ConfigError for a value of `EngineConfig.tool_parser` or `reasoning_parser` that names
    no format with that part."""
    if name not in ("auto", "none"):
        named_format(registry, name, "--" + field.replace("_", "-"))


def named_format(registry: Registry, name: str, flag: str) -> OutputFormat:
    """The format that a flag names, which has the part that it is about. Raises ConfigError."""
    spec = registry.find(ParserSpec, name) or registry.find(ParserSpec, name.replace("-", "_"))
    if spec is None:
        names = sorted({n for s in registry.all(ParserSpec) for n in (s.name, *s.aliases)})
        raise ConfigError(
            f"{flag} {name!r} is not a known format{nearest(name, names)}; known: auto, none,"
            f" {', '.join(names)}",
            param=flag[2:].replace("-", "_"),
        )
    found: OutputFormat = spec.load()
    part = found.calls if flag == "--tool-parser" else found.thinking
    if part is None and found.channels is None:
        what = "calls of tools" if flag == "--tool-parser" else "thoughts"
        raise ConfigError(
            f"{flag} {name!r}: that format says nothing of {what}; `vllmx parsers` lists those that"
            " do",
            param=flag[2:].replace("-", "_"),
        )
    return found
