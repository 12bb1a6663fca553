"""A template's budget: steps, CPU time, output characters, and the size of any one value.

The bound on values makes every single operation cheap: no string is longer than `max_chars`, and no
container, counted with everything inside it as often as it occurs, is larger. So an operation that
Python runs without returning to us (comparing, formatting, sorting) takes at most about a second,
and the clock, read at each step, catches what is made of many of them.

Most operations make no more than they are given. For those that can make much more, checks refuse
a call whose result would be over the limit, from the arguments alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from vllmx_core.records import Record

MAX_DEPTH = 100
MAX_INT_BITS = 4096
_LOOK_S = 0.05
"""The seconds between two looks at the CPU time and at `Budget.stopped`."""
Stopped = Callable[[], bool]
_ELEMENT_CHARS = 16
"""An element of a new container is charged like so many characters."""


class BoundsError(Exception):
    """The template went over a limit; the text says which."""


class TemplateLimits(Record):
    """Bounds of one rendering."""

    max_chars: int = 8 << 20
    """Length of the prompt, and of any value on the way."""
    max_steps: int = 1_000_000
    """Loop iterations, calls and filters."""
    max_cpu_s: float = 2.0
    """CPU time of the rendering thread."""
    max_made_chars: int = 512 << 20
    """All strings and containers made on the way, whether still needed or not."""


class Budget:
    """The running account of one rendering."""

    __slots__ = ("_clock_check", "_made", "_sizes", "_steps", "cpu_start_s", "limits", "stopped")

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.stopped: Stopped | None = None
        self.cpu_start_s = time.thread_time()
        """The thread's CPU time from which on time counts."""
        self._steps = 0
        self._made = 0
        self._sizes: dict[int, tuple[int, int, Any]] = {}
        self._clock_check = time.monotonic()

    def step(self) -> None:
        """Count one step; at wall-clock intervals look at the CPU time."""
        self._steps += 1
        if self._steps > self.limits.max_steps:
            raise BoundsError(f"takes more than {self.limits.max_steps} steps")
        now = time.monotonic()
        if now > self._clock_check:
            left = self.limits.max_cpu_s - (time.thread_time() - self.cpu_start_s)
            if left <= 0:
                raise BoundsError(f"takes more than {self.limits.max_cpu_s:g} s of CPU time")
            if self.stopped is not None and self.stopped():
                raise BoundsError("was stopped, because nobody waits for it")
            self._clock_check = now + min(left, _LOOK_S)

    def check_chars(self, num_chars: int) -> None:
        """Refuse a value of this size before it is made."""
        if num_chars > self.limits.max_chars:
            raise BoundsError(f"makes a value of more than {self.limits.max_chars} characters")

    def charge(self, num_chars: int) -> None:
        """Account for a new string of this length."""
        self.check_chars(num_chars)
        self._made += num_chars
        if self._made > self.limits.max_made_chars:
            raise BoundsError(f"makes more than {self.limits.max_made_chars} characters in all")

    def admit(self, value: Any) -> Any:
        """Account for a value that an operation has just made; return it."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.charge(_ELEMENT_CHARS * len(value))
            self.size(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise BoundsError(f"makes a number of more than {MAX_INT_BITS} bits")
        return value

    def size(self, value: Any) -> int:
        """Characters and elements in `value`, everything inside counted; bounded by `max_chars`."""
        return self._measure(value)[0]

    def depth(self, value: Any) -> int:
        """Returns the depth to which containers are nested in `value`; 0 for a plain value."""
        return self._measure(value)[1]

    def _measure(self, value: Any, level: int = 0) -> tuple[int, int]:
        """Size and depth; containers are remembered, since templates cannot change them."""
        if isinstance(value, str):
            return len(value) + 1, 0
        if not isinstance(value, (list, tuple, dict, ItemsView, KeysView, ValuesView)):
            return 1, 0
        known = self._sizes.get(id(value))
        if known is not None:
            return known[0], known[1]
        if level > MAX_DEPTH:
            raise BoundsError(f"makes containers nested more than {MAX_DEPTH} deep")
        total, depth = 1, 0
        parts = (value.keys(), value.values()) if isinstance(value, Mapping) else (value,)
        for part in parts:
            for item in part:
                item_size, item_depth = self._measure(item, level + 1)
                total += item_size
                depth = max(depth, item_depth)
            self.check_chars(total)
        if depth >= MAX_DEPTH:
            raise BoundsError(f"makes containers nested more than {MAX_DEPTH} deep")
        self._sizes[id(value)] = (total, depth + 1, value)
        return total, depth + 1


# --- sizes of results, before the operation runs --------------------------------------------------
MAX_WIDTH = 1000
"""Greatest number that sets a width, an indentation or a count of parts."""
_MAX_STRIP_CHARS = 256
_WIDE_SPEC = re.compile(r"\d{4}|\*")

Given = Mapping[Any, Any]
"""Arguments by their places or names."""
Check = Callable[[Budget, Any, Given], None]


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


def check_widths(budget: Budget, value: Any, given: Given) -> None:
    """Numbers among the arguments are widths or counts."""
    for number in given.values():
        if isinstance(number, int) and abs(number) > MAX_WIDTH:
            raise BoundsError(f"asks for a width or count of more than {MAX_WIDTH}")


def _argument(given: Given, place: int, name: str, default: Any) -> Any:
    return given.get(name, given.get(place, default))


def check_replace(budget: Budget, value: Any, given: Given) -> None:
    """`replace(old, new[, count])`: every occurrence of `old` grows to `new`."""
    text = str(value)
    old, new = str(_argument(given, 0, "old", "")), str(_argument(given, 1, "new", ""))
    growth = len(new) - len(old)
    if growth > 0:
        budget.check_chars(len(text) + text.count(old) * growth)


def check_indent(budget: Budget, value: Any, given: Given) -> None:
    """`indent(width)`: a number of spaces or a string before each line."""
    check_widths(budget, value, given)
    width = _argument(given, 0, "width", 4)
    per_line = len(width) if isinstance(width, str) else 1 + int(width)
    text = str(value)
    budget.check_chars(len(text) + (1 + len(text.splitlines())) * per_line)


def check_strip(budget: Budget, value: Any, given: Given) -> None:
    """`strip(chars)` compares each character with each of `chars`."""
    for chars in given.values():
        if isinstance(chars, str) and len(chars) > _MAX_STRIP_CHARS:
            raise BoundsError(f"strips a set of more than {_MAX_STRIP_CHARS} characters")


def check_sum(budget: Budget, value: Any, given: Given) -> None:
    """`sum(attribute, start)` adds numbers; lists would be copied at each addition."""
    if not isinstance(_argument(given, 1, "start", 0), (int, float)):
        raise BoundsError("sums values that are not numbers")


def check_tojson(budget: Budget, value: Any, given: Given) -> None:
    """`tojson(indent=, separators=)`: each element may cost an indented line."""
    check_widths(budget, value, given)
    indent = _argument(given, 1, "indent", None) or 0
    per_level = len(indent) if isinstance(indent, str) else int(indent)
    separators = budget.size(_argument(given, 2, "separators", None))
    budget.check_chars(budget.size(value) * (separators + per_level * budget.depth(value)))


def check_percent_filter(budget: Budget, value: Any, given: Given) -> None:
    """The `format` filter is `%` with its arguments."""
    named = {key: item for key, item in given.items() if isinstance(key, str)}
    check_percent(budget, str(value), named or tuple(given.values()))


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
