"""Which modules a quantisation config means: names, globs and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

from vllmx_core.errors import UnsupportedModelError

MAX_PATTERN_LENGTH = 1000
MAX_OPEN_REPEATS = 6
_REGEX = "re:"
_OPEN_REPEAT = re.compile(r"(?<!\\)[*+]|(?<!\\)\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class ModulePatterns:
    """The modules of a list such as `modules_to_not_convert` or `ignore`.

    A plain name means the module itself, everything inside it, and any module whose name has it as
    a run of whole components: "mlp.gate" is in "model.layers.3.mlp.gate" but not in
    "model.layers.3.mlp.gate_proj". A name with * is a glob with the same limits. "re:" starts a
    regular expression that must match from the beginning of the name.

    Raises:
        UnsupportedModelError: a pattern that is no regular expression or could take for ever.
    """

    def __init__(self, patterns: Iterable[str], source: str) -> None:
        self._names: set[tuple[str, ...]] = set()
        self._searches: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith(_REGEX):
                self._searches.append(compiled(pattern.removeprefix(_REGEX), source))
            elif "*" in pattern or "?" in pattern:
                self._searches.append(_glob(pattern, source))
            elif pattern.strip("."):
                self._names.add(tuple(pattern.strip(".").split(".")))

    def match(self, module: str) -> bool:
        """Whether the list means this module."""
        return self._named(module) or any(search.match(module) for search in self._searches)

    def _named(self, module: str) -> bool:
        if not self._names:
            return False
        words = tuple(module.split("."))
        ends = range(1, len(words) + 1)
        return any(words[begin:end] in self._names for end in ends for begin in range(end))


@lru_cache(4096)
def compiled(pattern: str, source: str) -> re.Pattern[str]:
    """A regular expression out of a config; `source` is what an error names."""
    risky = len(_OPEN_REPEAT.findall(pattern)) > MAX_OPEN_REPEATS or _REPEATED_GROUP.search(pattern)
    if len(pattern) > MAX_PATTERN_LENGTH or risky:
        raise UnsupportedModelError(
            f"{source}: the pattern {pattern[:80]!r} may take too long; at most"
            f" {MAX_PATTERN_LENGTH} characters and {MAX_OPEN_REPEATS} open repeats, none of"
            " them of a group, are allowed"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{source}: {pattern[:80]!r} is no regular expression ({error}): repair the config"
        ) from error


def _glob(pattern: str, source: str) -> re.Pattern[str]:
    """The glob between component boundaries, anywhere in a name."""
    if len(pattern) > MAX_PATTERN_LENGTH or pattern.count("*") > MAX_OPEN_REPEATS:
        raise UnsupportedModelError(
            f"{source}: the pattern {pattern[:80]!r} may take too long; at most"
            f" {MAX_PATTERN_LENGTH} characters and {MAX_OPEN_REPEATS} stars are allowed"
        )
    body = translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
    return re.compile(rf"(?:.*\.)?{body}(?:\.|$)")
