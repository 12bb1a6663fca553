"""Markdown in colour, while it arrives."""

from __future__ import annotations

import re

_BOLD, _CODE, _HEADING, _DIM, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[1;34m", "\x1b[2m", "\x1b[0m"
_MARK = re.compile(r"\*\*|`")


class Markdown:
    """Colours headings, bold text, inline code and fenced code; the text itself stays as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._is_line_begin = True
        self._in_fence = self._in_code = self._is_bold = False

    def push(self, piece: str) -> str:
        """The next piece in colour, without a mark at its end that may not be complete."""
        text = self._held + piece
        end = len(text) - len(text.rstrip("`*#"))
        self._held = text[len(text) - end :]
        return "".join(map(self._line, text[: len(text) - end].splitlines(keepends=True)))

    def finish(self) -> str:
        """The rest, and the end of all colours."""
        rest, self._held = self._held, ""
        return self._line(rest) + _PLAIN

    def _line(self, text: str) -> str:
        """Colours a line, or a part of it that has no line break inside."""
        begins, self._is_line_begin = self._is_line_begin, text.endswith("\n")
        if begins and text.lstrip().startswith("```"):
            self._in_fence = not self._in_fence
            return f"{_DIM}{text.rstrip(chr(10))}{_PLAIN}" + self._end(text)
        if self._in_fence:
            return _CODE + text.rstrip("\n") + _PLAIN + self._end(text)
        before = _HEADING if begins and text.startswith("#") else ""
        body = before + _MARK.sub(self._toggled, text.rstrip("\n"))
        if not text.endswith("\n"):
            return body
        self._is_bold = self._in_code = False
        return body + _PLAIN + self._end(text)

    @staticmethod
    def _end(text: str) -> str:
        return "\n" if text.endswith("\n") else ""

    def _toggled(self, mark: re.Match[str]) -> str:
        if mark[0] == "`":
            self._in_code = not self._in_code
            return f"{_CODE}`" if self._in_code else f"`{_PLAIN}{_BOLD * self._is_bold}"
        if self._in_code:
            return "**"
        self._is_bold = not self._is_bold
        return f"{_BOLD}**" if self._is_bold else f"**{_PLAIN}"
