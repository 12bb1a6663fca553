"""A template's budget: steps, CPU time, output characters, and the size of any one value.

The bound on values makes every single operation cheap: no string is longer than `max_chars`, and no
container, counted with everything inside it as often as it occurs, is larger. So an operation that
Python runs without returning to us (comparing, formatting, sorting) takes at most about a second,
and the clock, read at each step, catches what is made of many of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
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
