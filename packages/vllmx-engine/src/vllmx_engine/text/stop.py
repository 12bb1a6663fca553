"""Stop strings over a stream of text pieces, without ever showing part of a stop string.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick, 1975). Its state
after some text is the longest suffix that begins a stop string: exactly the text to hold back. So
the result does not depend on how the text was cut into pieces. Text without any first character of
a stop string, the usual case, is passed by one regular-expression search.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable


class StopSet:
    """The stop strings of a request, compiled; immutable and shared by its sequences.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        if not all(self.stops):
            raise ValueError("a stop string must not be empty")
        self.children: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        """Longest stop string that ends in this state."""
        for stop in self.stops:
            self._insert(stop)
        self._link()
        first = "".join(sorted({re.escape(stop[0]) for stop in self.stops}))
        self.first_char = re.compile(f"[{first}]" if first else r"(?!)")

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.children[state].get(char)
            if following is None:
                following = len(self.children)
                self.children[state][char] = following
                self.children.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]
            for char, child in self.children[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.children[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Watches one sequence's text.

    The stop string that is complete first ends the text; of several complete at the same
    character, the longest.

    Args:
        stops: the stop strings.
        include_stop: the stop string itself stays in the text.
    """

    __slots__ = ("_held", "_include", "_state", "_stops")

    def __init__(self, stops: StopSet, include_stop: bool = False) -> None:
        self._stops = stops
        self._include = include_stop
        self._state = 0
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may yet turn out to begin a stop string."""
        return self._held

    def push(self, text: str, counts: bool = True) -> tuple[str, str | None]:
        """Take the next text; return what may be shown now and the stop string that ended it.

        Nothing may be pushed after a stop. With `counts` False (before `min_tokens`) a stop string
        that ends in `text` is text like any other.
        """
        if self._state == 0 and self._stops.first_char.search(text) is None:
            return text, None
        buffer = self._held + text
        for index in range(len(self._held), len(buffer)):
            self._state = self._stops.step(self._state, buffer[index])
            match = self._stops.match[self._state]
            if match is None:
                continue
            if counts:
                end = index + 1
                self._held = ""
                return buffer[: end if self._include else end - len(match)], match
            if not self._stops.children[self._state]:
                self._state = self._stops.fail[self._state]
        cut = len(buffer) - self._stops.depth[self._state]
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """Returns the held-back text, at the end of a sequence that no stop string ended."""
        held, self._held, self._state = self._held, "", 0
        return held
