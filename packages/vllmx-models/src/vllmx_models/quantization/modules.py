"""Modules named in a quantisation config: by names, globs and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

from vllmx_core.errors import UnsupportedModelError, shown

from vllmx_models.quantization.patterns import MAX_PATTERN_LENGTH, Pattern

_REGEX = "re:"


class ModulePatterns:
    """The modules of a list such as `modules_to_not_convert` or `ignore`.

    A plain name means the module itself, everything inside it, and any module whose name has it as
    a run of whole components: "mlp.gate" is in "model.layers.3.mlp.gate" but not in
    "model.layers.3.mlp.gate_proj". A name with * is a glob with the same limits. "re:" starts a
    regular expression that must match from the beginning of the name.

    Raises:
        UnsupportedModelError: a pattern is not a regular expression, or too long.
    """

    def __init__(self, patterns: Iterable[str], source: str) -> None:
        self._names: set[tuple[str, ...]] = set()
        self._searches: list[Pattern | re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith(_REGEX):
                self._searches.append(compiled(pattern.removeprefix(_REGEX), source))
            elif "*" in pattern or "?" in pattern:
                self._searches.append(_glob(pattern, source))
            elif pattern.strip("."):
                self._names.add(tuple(pattern.strip(".").split(".")))

    def match(self, module: str) -> bool:
        """True if the list contains this module."""
        return self._named(module) or any(search.match(module) for search in self._searches)

    def _named(self, module: str) -> bool:
        if not self._names:
            return False
        words = tuple(module.split("."))
        ends = range(1, len(words) + 1)
        return any(words[begin:end] in self._names for end in ends for begin in range(end))


@lru_cache(4096)
def compiled(pattern: str, source: str) -> Pattern:
    """A regular expression from a config; errors name `source`."""
    return Pattern(pattern, source)


def _glob(pattern: str, source: str) -> re.Pattern[str]:
    """The glob between component boundaries, anywhere in a name. `translate` makes stars that do
    not backtrack, so `re` needs no limit."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise UnsupportedModelError(
            f"{source}: the pattern {shown(pattern)} has {len(pattern)} characters, at most"
            f" {MAX_PATTERN_LENGTH} are allowed: repair the config"
        )
    body = translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
    return re.compile(rf"(?:.*\.)?{body}(?:\.|$)")
