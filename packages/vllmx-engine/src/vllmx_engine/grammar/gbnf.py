"""llama.cpp's grammar notation, GBNF, as a tree.

The notation is the one of llama.cpp's `grammars/README.md`, with what xgrammar's EBNF adds to it:
more escapes, `[^]` for any character, and rules that go on in the next line until another rule
begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vllmx_core.errors import GrammarError, shown
from vllmx_core.records import Record

from vllmx_engine.grammar.characters import Ranges, normal

MAX_NESTING = 100
"""The most groups in one another."""
_RULE = re.compile(r"[\w-]++(?:[ \t\r\n]|#[^\r\n]*+)*+::=")
_STARTS = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|start[ \t]*(?:\[[^]]*\])?[ \t]*:(?!:=))")
_NAME = re.compile(r"[\w-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*+)*+")
_COUNT = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]+)?\s*)?\}")
_TOKEN_ID = re.compile(r"<\[([0-9]+)\]>")
_TOKEN_TEXT = re.compile(r"<[^>\r\n]+>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ESCAPES |= {"0": "\0", "e": "\x1b"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_COUNT = 1 << 20


class Literal(Record, cache_hash=True):
    """A text."""

    text: str


class Chars(Record, cache_hash=True):
    """One character of some."""

    ranges: Ranges


class Token(Record, cache_hash=True):
    """One token of the model by its id, or any token but that one."""

    token: int
    is_excluded: bool


class Reference(Record, cache_hash=True):
    """A reference to a rule."""

    name: str


class Sequence(Record, cache_hash=True):
    """Parts that follow each other; none of them: the empty text."""

    parts: tuple[Expression, ...]


class Choice(Record, cache_hash=True):
    """One of at least two parts."""

    options: tuple[Expression, ...]


class Repeat(Record, cache_hash=True):
    """A part `least` to `most` times; `most` None: without end."""

    part: Expression
    least: int
    most: int | None


class Lexeme(Record, cache_hash=True):
    """A part that is matched as one regular expression; `lexemes` says which ones are."""

    part: Expression


Expression = Literal | Chars | Token | Reference | Sequence | Choice | Repeat | Lexeme
Rules = dict[str, Expression]
"""The expression of each rule, by its name."""
TokenIds = Callable[[int | str], int | None]
"""The id of the model's token with an id or a text; None where the model has none."""
EMPTY = Sequence(())
ANY = Chars(normal([(0, 0x10FFFF)]))


def is_gbnf(text: str) -> bool:
    """True if a grammar is written in GBNF and not in Lark."""
    if _STARTS.search(text):
        return True
    return "::=" in text and not _LARK.search(text)


def parse_gbnf(text: str, token_ids: TokenIds) -> Rules:
    """The rules of a grammar. Raises GrammarError by line and column."""
    return _Parser(text, token_ids).rules()


class _Parser:
    def __init__(self, text: str, token_ids: TokenIds) -> None:
        self._text = text
        self._token_ids = token_ids
        self._references: list[tuple[str, int]] = []
        self._at = 0
        self._nesting = 0

    def rules(self) -> Rules:
        """All of them. Where a name comes twice the last rule holds, as in llama.cpp."""
        found: Rules = {}
        self._skip_blanks()
        while self._at < len(self._text):
            name = self._name("a rule's name")
            self._skip_blanks()
            if not self._takes("::="):
                raise self._error(f"::= must follow the rule's name {shown(name)}")
            self._skip_blanks()
            found[name] = self._choice()
            if self._at < len(self._text) and not self._at_rule():
                raise self._error(f"{self._here()} is not expected here")
        if "root" not in found:
            raise self._error('the grammar has no rule "root", which it begins with', at=0)
        for name, at in self._references:
            if name not in found:
                raise self._error(f"there is no rule {shown(name)}", at)
        return found

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._takes("|"):
            self._skip_blanks()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (part := self._part()) is not None:
            self._skip_blanks()
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Expression | None:
        """The next part of a sequence, without how often it comes; None: the sequence ends."""
        at = self._at
        match self._text[at : at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._chars()
            case "(":
                return self._group()
            case ".":
                self._at += 1
                return ANY
            case "<" | "!":
                return self._token()
            case "" | "|" | ")":
                return None
        if self._at_rule() or not _NAME.match(self._text, at):
            return None
        name = self._name("a name")
        self._references.append((name, at))
        return Reference(name)

    def _repeated(self, part: Expression) -> Expression:
        while (mark := self._text[self._at : self._at + 1]) and mark in "*+?{":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(mark) or self._count()
            if mark != "{":
                self._at += 1
            part = Repeat(part, least, most)
            self._skip_blanks()
        return part

    def _count(self) -> tuple[int, int | None]:
        found = _COUNT.match(self._text, self._at)
        if found is None:
            raise self._error("a repetition is written {3}, {3,} or {3,5}")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] is not None else None
        if max(least, most or 0) > _MAX_COUNT:
            raise self._error(f"a repetition is at most {_MAX_COUNT} times")
        if most is not None and most < least:
            raise self._error(f"the repetition {found[0]} has a maximum below its minimum")
        self._at = found.end()
        return least, most

    def _group(self) -> Expression:
        opened = self._at
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error(f"groups are nested too deeply, at most {MAX_NESTING}: flatten them")
        self._at += 1
        self._skip_blanks()
        found = self._choice()
        if not self._takes(")"):
            raise self._error(f"{self._here()} is not expected in a group, or ) is missing", opened)
        self._nesting -= 1
        return found

    def _literal(self) -> Literal:
        opened = self._at
        self._at += 1
        chars: list[str] = []
        while not self._takes('"'):
            chars.append(chr(self._character(opened, 'the text has no closing "')))
        return Literal("".join(chars))

    def _chars(self) -> Chars:
        opened, missing = self._at, "the character class has no closing ]"
        self._at += 1
        is_excluded = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            at = self._at
            low = high = self._character(opened, missing, in_class=True)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character(opened, missing, in_class=True)
            if high < low:
                raise self._error(f"the range {shown(self._text[at : self._at])} is empty", at)
            ranges.append((low, high))
        found = normal(ranges, is_excluded=is_excluded)
        if not found:
            raise self._error("the character class has no character", opened)
        return Chars(found)

    def _character(self, opened: int, missing: str, *, in_class: bool = False) -> int:
        """The code point of a character, which may be escaped."""
        text, at = self._text, self._at
        if at >= len(text) or (text[at] == "\\" and at + 1 >= len(text)):
            raise self._error(missing, opened)
        if text[at] != "\\":
            self._at += 1
            return ord(text[at])
        mark = text[at + 1]
        self._at += 2
        if mark in _HEX_DIGITS:
            return self._hexadecimal(at, mark, in_class=in_class)
        if mark in _ESCAPES:
            return ord(_ESCAPES[mark])
        if mark.isascii() and not mark.isalnum() and mark.isprintable():
            return ord(mark)
        raise self._error(f"there is no escape \\{mark}: write \\\\ for a backslash", at)

    def _hexadecimal(self, at: int, mark: str, *, in_class: bool) -> int:
        count = _HEX_DIGITS[mark]
        digits = self._text[self._at : self._at + count]
        if not re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits):
            raise self._error(f"\\{mark} needs {count} hexadecimal digits", at)
        self._at += count
        code = int(digits, 16)
        if code > 0x10FFFF or (0xD800 <= code <= 0xDFFF and not in_class):
            raise self._error(f"\\{mark}{digits} is not a character", at)
        return code

    def _token(self) -> Token:
        at = self._at
        is_excluded = self._takes("!")
        if found := _TOKEN_ID.match(self._text, self._at):
            given: int | str = int(found[1])
        elif found := _TOKEN_TEXT.match(self._text, self._at):
            given = found[0]
        else:
            raise self._error("a token is written <[7]> by its id, or <name> by its text", at)
        token = self._token_ids(given)
        if token is None:
            raise self._error(f"the model has no single token {found[0]}", at)
        self._at = found.end()
        return Token(token, is_excluded)

    def _name(self, what: str) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error(f"{what} is expected, got {self._here()}")
        self._at = found.end()
        return found[0]

    def _at_rule(self) -> bool:
        """Another rule begins here."""
        return _RULE.match(self._text, self._at) is not None

    def _takes(self, mark: str) -> bool:
        is_there = self._text.startswith(mark, self._at)
        if is_there:
            self._at += len(mark)
        return is_there

    def _skip_blanks(self) -> None:
        found = _BLANK.match(self._text, self._at)
        assert found is not None, "it matches the empty text"
        self._at = found.end()

    def _here(self) -> str:
        return shown(self._text[self._at]) if self._at < len(self._text) else "the end"

    def _error(self, why: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return GrammarError(f"the grammar is not valid GBNF: line {line}, column {column}: {why}")
