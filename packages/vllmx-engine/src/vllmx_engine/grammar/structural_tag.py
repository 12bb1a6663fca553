"""Structural tags: text with parts that follow grammars, as one Lark grammar.

Two forms are in use: vLLM's older one, `{"structures": [{"begin", "schema", "end"}], "triggers"}`,
and xgrammar's, `{"format": {"type": ...}}`, of which the types below are served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from vllmx_core.errors import GrammarError, shown

MAX_TAGS = 256
_ANY_TEXT = r"/(.|\n)*/"
Options = Callable[[Any], dict[str, Any]]
"""A schema with how its JSON is written (`translate.with_options`)."""


def lark_of_tag(tag: Any, specials: Mapping[str, int], options: Options) -> str:
    """Raises GrammarError.

    Args:
        specials: ids of the model's special tokens by their text, which no text spells.
    """
    try:
        if "format" in tag:
            form = tag["format"]
        else:
            form = _older_form(tag)
        rules = _Rules(specials, options)
        start = rules.of(form)
        return "\n".join([f"start: {start}", *rules.lines]) + "\n"
    except RecursionError:
        raise GrammarError("the structural tag is nested too deeply: flatten it") from None
    except GrammarError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GrammarError(
            f"the structural tag lacks a part, or has a wrong one: {error}"
        ) from None


def _older_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Rules:
    """Lines of Lark, one for each part that needs a name."""

    def __init__(self, specials: Mapping[str, int], options: Options) -> None:
        self.lines: list[str] = []
        self._specials = specials
        self._options = options
        texts = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def of(self, form: Mapping[str, Any]) -> str:
        """An expression for a part."""
        match form["type"]:
            case "const_string":
                return self._text(form["value"])
            case "json_schema":
                return "%json " + json.dumps(self._options(form["json_schema"]))
            case "regex":
                return self._name(_regex(form["pattern"]), terminal=True)
            case "any_text":
                return self._name(_ANY_TEXT, terminal=True)
            case "sequence":
                return "(" + " ".join(map(self.of, form["elements"])) + ")"
            case "or":
                return "(" + " | ".join(map(self.of, form["elements"])) + ")"
            case "tag":
                return self._tag(form["begin"], form)
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
        raise GrammarError(f"structural tags of type {shown(form['type'])} are not served")

    def _tag(self, begin: str, tag: Mapping[str, Any]) -> str:
        """What stands in it ends at the first `end`."""
        content, end = tag["content"], tag["end"]
        if content["type"] == "any_text" and end:
            return f"{self._text(begin)} {self._until(end)}"
        return f"{self._text(begin)} {self.of(content)} {self._text(end)}"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        """Free text until a trigger comes, then the rest of one of its tags, then text again."""
        tags = form["tags"]
        if not tags or len(tags) > MAX_TAGS:
            raise GrammarError(f"a structural tag has 1 to {MAX_TAGS} tags, got {len(tags)}")
        options = []
        for tag in tags:
            found = [one for one in form["triggers"] if one and tag["begin"].startswith(one)]
            if not found:
                raise GrammarError(f"no trigger begins the tag {shown(tag['begin'])}")
            rest = tag["begin"][len(found[0]) :]
            options.append(f"{self._until(found[0])} {self._tag(rest, tag)}")
        tag_rule = self._name(" | ".join(options))
        if form.get("stop_after_first"):
            free = "" if form.get("at_least_one") else f" | {self._name(_ANY_TEXT, terminal=True)}"
            return f"({tag_rule}{free})"
        times = "+" if form.get("at_least_one") else "*"
        return f"{tag_rule}{times} {self._name(_ANY_TEXT, terminal=True)}"

    def _separated(self, form: Mapping[str, Any]) -> str:
        """Tags with a text between them."""
        tags = form["tags"]
        if not tags or len(tags) > MAX_TAGS:
            raise GrammarError(f"a structural tag has 1 to {MAX_TAGS} tags, got {len(tags)}")
        one = self._name(" | ".join(self._tag(tag["begin"], tag) for tag in tags))
        several = one
        if not form.get("stop_after_first"):
            several = f"{one} ({self._text(form['separator'])} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _until(self, end: str) -> str:
        """Text up to and with the first `end`."""
        if self._special is not None and self._special.match(end):
            # no text spells the token, so there is nothing to look for
            return f"{self._name(_ANY_TEXT, terminal=True)} {self._text(end)}"
        name = f"until_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {_ANY_TEXT} {json.dumps(end)}")
        return name

    def _text(self, text: str) -> str:
        """A text, in which special tokens are those tokens."""
        parts: list[str] = []
        at = 0
        for found in self._special.finditer(text) if self._special else ():
            parts += [json.dumps(text[at : found.start()]), f"<[{self._specials[found[0]]}]>"]
            at = found.end()
        parts.append(json.dumps(text[at:]))
        return " ".join(part for part in parts if part != '""')

    def _name(self, expression: str, *, terminal: bool = False) -> str:
        name = f"{'PART' if terminal else 'part'}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dw')}/"
