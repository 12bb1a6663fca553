"""Sizes of results, worked out before the operation runs.

Most operations make no more than they are given. The ones here can make much more: each function
refuses a call whose result would be over the limit, from the arguments alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllmx_engine.text.template_budget import MAX_INT_BITS, BoundsError, Budget

MAX_WIDTH = 1000
"""Greatest number that sets a width, an indentation or a count of parts."""
_MAX_STRIP_CHARS = 256
_WIDE_SPEC = re.compile(r"\d{4}|\*")

Check = Callable[[Budget, Any, Sequence[Any], Mapping[str, Any]], None]


def check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Bound `+`, `*`, `**` and `%` (string formatting)."""
    if operator == "%":
        if isinstance(left, str):
            check_percent(budget, left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), 1)
        if operator == "*":
            bits += right.bit_length()
        elif operator == "**":
            bits *= abs(right)
        if bits > MAX_INT_BITS:
            raise BoundsError(f"makes a number of more than {MAX_INT_BITS} bits")
    elif operator == "*" and isinstance(left, int):
        budget.check_chars(_length(budget, right) * left)
    elif operator == "*" and isinstance(right, int):
        budget.check_chars(_length(budget, left) * right)
    elif operator == "+":
        budget.check_chars(budget.size(left) + budget.size(right))


def _length(budget: Budget, value: Any) -> int:
    return len(value) if isinstance(value, str) else budget.size(value)


def check_percent(budget: Budget, template: str, values: Any) -> None:
    """`'...' % values`: no wide fields; every field may show all of a mapping's values."""
    check_spec(template)
    fields = template.count("%") if isinstance(values, Mapping) else 1
    budget.check_chars(len(template) + fields * budget.size(values))


def check_spec(spec: str) -> None:
    """Refuse field widths of four digits or more, and widths given as an argument."""
    if _WIDE_SPEC.search(spec):
        raise BoundsError("formats a field with a width of more than 999")


def check_widths(
    budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Numbers among the arguments are widths or counts."""
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > MAX_WIDTH:
            raise BoundsError(f"asks for a width or count of more than {MAX_WIDTH}")


def check_replace(
    budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`replace(old, new[, count])`: every occurrence of `old` grows to `new`."""
    given = {**dict(zip(("old", "new"), args, strict=False)), **kwargs}
    text, old, new = str(value), str(given.get("old", "")), str(given.get("new", ""))
    growth = len(new) - len(old)
    if growth > 0:
        budget.check_chars(len(text) + text.count(old) * growth)


def check_indent(
    budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`indent(width)`: a number of spaces or a string before each line."""
    check_widths(budget, value, args, kwargs)
    width = kwargs.get("width", args[0] if args else 4)
    per_line = len(width) if isinstance(width, str) else 1 + int(width)
    text = str(value)
    budget.check_chars(len(text) + (1 + len(text.splitlines())) * per_line)


def check_strip(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`strip(chars)` compares each character with each of `chars`."""
    for chars in (*args, *kwargs.values()):
        if isinstance(chars, str) and len(chars) > _MAX_STRIP_CHARS:
            raise BoundsError(f"strips a set of more than {_MAX_STRIP_CHARS} characters")


def check_sum(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`sum(attribute, start)` adds numbers; lists would be copied at each addition."""
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    if not isinstance(start, (int, float)):
        raise BoundsError("sums values that are not numbers")


def check_tojson(
    budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`tojson(indent=, separators=)`: each element may cost an indented line."""
    check_widths(budget, value, args, kwargs)
    given = {**dict(zip(("ensure_ascii", "indent", "separators"), args, strict=False)), **kwargs}
    indent = given.get("indent") or 0
    per_level = len(indent) if isinstance(indent, str) else int(indent)
    separators = budget.size(given.get("separators"))
    budget.check_chars(budget.size(value) * (separators + per_level * budget.depth(value)))


def check_percent_filter(
    budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """The `format` filter is `%` with its arguments."""
    check_percent(budget, str(value), dict(kwargs) if kwargs else tuple(args))


def check_join(budget: Budget, separator: str, items: Iterable[Any]) -> list[Any]:
    """The items as a list, if joining them stays in bounds."""
    values = list(items)
    budget.check_chars(sum(map(budget.size, values)) + len(separator) * len(values))
    return values


FILTER_CHECKS: Mapping[str, Check] = {
    "batch": check_widths,
    "center": check_widths,
    "format": check_percent_filter,
    "indent": check_indent,
    "replace": check_replace,
    "round": check_widths,
    "slice": check_widths,
    "sum": check_sum,
    "tojson": check_tojson,
    "trim": check_strip,
    "truncate": check_widths,
}

METHOD_CHECKS: Mapping[str, Check] = {
    "center": check_widths,
    "ljust": check_widths,
    "lstrip": check_strip,
    "replace": check_replace,
    "rjust": check_widths,
    "rstrip": check_strip,
    "strip": check_strip,
    "zfill": check_widths,
}
