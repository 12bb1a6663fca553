"""Structural tags: text with parts that follow grammars, as one Lark grammar.

Two forms are in use: vLLM's older one, `{"structures": [{"begin", "schema", "end"}], "triggers"}`,
and xgrammar's, `{"format": {"type": ...}}`. All types of the latter's documentation are served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllmx_core.errors import GrammarError, listing, shown

from vllmx_engine.grammar.characters import lark_text, regex_of_text
from vllmx_engine.grammar.gbnf import is_gbnf
from vllmx_engine.grammar.gbnf_lark import lark_of_gbnf
from vllmx_engine.grammar.parts import values_of
from vllmx_engine.grammar.vocabulary import Lexicon

Element = dict[str, Any]
_STYLES = {
    "qwen_xml": ("<parameter={name}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{name}">', "</parameter>"),
    "deepseek_xml": (
        '<｜DSML｜parameter name="{name}" string="{is_text}">',
        "</｜DSML｜parameter>",
    ),
    "glm_xml": ("<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
    "cohere_xml": ("<cofl:tool_param name={name}>", "</cofl:tool_param>"),
}
_BLANKS: Element = {"type": "regex", "pattern": r"[ \t\n]{0,20}"}
_ANY_NAME: Element = {"type": "regex", "pattern": r"[a-zA-Z_][a-zA-Z0-9_.\-]*"}


def xml_parameters(schema: Mapping[str, Any], style: Any) -> Element:
    """The properties of an object, each in its tags: strings as they are, other values as JSON.
    Raises GrammarError for an unknown style."""
    if style not in _STYLES:
        raise GrammarError(f"json_schema has no style {shown(style)}: use json, {listing(_STYLES)}")
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    elements: list[Element] = []
    for name, each in (schema.get("properties") or {}).items():
        part = _parameter(style, name, {**shared, **each} if isinstance(each, dict) else each)
        elements.append(part if name in required else {"type": "optional", "content": part})
    others = schema.get("additionalProperties", False)
    if others is not False:
        part = _parameter(style, None, others)
        elements.append({"type": "star", "content": part})
    return {"type": "sequence", "elements": elements}


def _parameter(style: str, name: str | None, schema: Any) -> Element:
    begin, end = _STYLES[style]
    is_text = _is_text(schema)
    begin = begin.replace("{is_text}", json.dumps(is_text))
    before, _, behind = begin.partition("{name}")
    if name is not None:
        before, behind = before + name + behind, ""
    head: list[Element] = [{"type": "const_string", "value": before}]
    if name is None:
        head += [_ANY_NAME, {"type": "const_string", "value": behind}]
    values = values_of(schema) if isinstance(schema, dict) else None
    if not is_text:
        content: Element = {"type": "json_schema", "json_schema": schema}
        content = {"type": "sequence", "elements": [_BLANKS, content, _BLANKS]}
    elif values is not None:
        texts = [{"type": "const_string", "value": value} for value in values]
        content = {"type": "or", "elements": texts}
    else:
        content = {"type": "any_text"}
    tag = {"type": "tag", "begin": "", "content": content, "end": end}
    return {"type": "sequence", "elements": [*head, tag, _BLANKS]}


def _is_text(schema: Any) -> bool:
    """True if values are written as plain text: all are strings, or their type is unknown."""
    if not isinstance(schema, dict):
        return True
    values = values_of(schema)
    if values is not None:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or not set(schema) - {"$defs", "definitions"}


MAX_TAGS = 256
Form = Mapping[str, Any]
Options = Callable[[Any], dict[str, Any]]
"""A schema with how its JSON is written (`translate.with_options`)."""
Mark = str | int
"""A text, which may name special tokens, or the id of a token."""
_FREE = frozenset(
    (
        *("any_text", "any_tokens", "triggered_tags", "dispatch"),
        *("token_triggered_tags", "token_dispatch"),
    )
)
"""Types that end where what follows them begins."""


def lark_of_tag(tag: Any, lexicon: Lexicon | None, options: Options) -> list[dict[str, str]]:
    """The grammars of llguidance that a tag is made of, the first one first. Raises GrammarError.

    Args:
        lexicon: the model's tokens, which the tag may name.
    """
    try:
        form = tag["format"] if "format" in tag else _older_form(tag)
        if not isinstance(form, dict):
            raise GrammarError(f"format of a structural tag must be an object, got {shown(form)}")
        rules = _Rules(lexicon, options)
        start = rules.of(form)
        text = "\n".join([f"start: {start}", *rules.lines]) + "\n"
        return [{"lark_grammar": text}, *rules.grammars]
    except RecursionError:
        raise GrammarError("the structural tag is nested too deeply: flatten it") from None
    except GrammarError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GrammarError(
            f"the structural tag lacks a part, or has a wrong one: {error}"
        ) from None


def regex_lark(pattern: str) -> str:
    """A regular expression that matches all of a text, as Lark has it. Anchors around all of it
    say nothing then. Digits and word characters are those of ASCII, as in JSON schemas."""
    from llguidance import regex_to_lark

    if pattern.startswith("^") and "|" not in pattern:
        pattern = pattern[1:]
    if pattern.endswith("$") and not pattern.endswith("\\$") and "|" not in pattern:
        pattern = pattern[:-1]
    return f"/{regex_to_lark(pattern, 'dw')}/"


def _older_form(tag: Form) -> Form:
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

    def __init__(self, lexicon: Lexicon | None, options: Options) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, str]] = []
        """Grammars in Lark that a tag has inside."""
        self._lexicon = lexicon
        self._options = options
        self._specials = lexicon.specials if lexicon else {}
        self._named: dict[str, str] = {}
        texts = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def of(self, form: Form, ends: Sequence[Mark] = ()) -> str:
        """An expression for a part, with one of `ends` behind it where there are some."""
        match form["type"]:
            case "any_text":
                return self._text_until(ends, form.get("excludes") or ())
            case "any_tokens":
                return f"{self._tokens(form, ends)} {self._one_of(ends)}"
            case "sequence":
                return self._sequence(form["elements"], ends)
            case "or":
                return _choice(self.of(each, ends) for each in form["elements"])
            case "optional":
                return _choice([self.of(form["content"], ends), self._one_of(ends)])
            case "triggered_tags":
                return self._triggered(form, ends)
            case "dispatch":
                return self._dispatched(form, ends)
            case "token_triggered_tags" | "token_dispatch":
                return self._by_tokens(form, ends)
        return f"{self._closed(form, ends)} {self._one_of(ends)}"

    def _closed(self, form: Form, ends: Sequence[Mark]) -> str:
        """An expression for a part that ends by itself."""
        match form["type"]:
            case "const_string":
                return self._text(form["value"])
            case "json_schema" | "qwen_xml_parameter":
                style = form.get("style", "json")
                style = "qwen_xml" if form["type"] == "qwen_xml_parameter" else style
                if style != "json":
                    return self.of(xml_parameters(form["json_schema"], style))
                return "%json " + json.dumps(self._options(form["json_schema"]))
            case "regex":
                return self._name(regex_lark(form["pattern"]), "PART")
            case "grammar":
                return self._grammar(form["grammar"])
            case "plus":
                return f"({self.of(form['content'])})+"
            case "star":
                return f"({self.of(form['content'])})*"
            case "repeat":
                return f"({self.of(form['content'])}){_times(form['min'], form['max'])}"
            case "tag":
                return f"{self._one_of([self._mark(form['begin'])])} {self._rest(form)}"
            case "tags_with_separator":
                return self._separated(form)
            case "token":
                return f"<[{self._token(form['token'])}]>"
            case "exclude_token":
                return self._any_but(form.get("exclude_tokens") or (), ends)
        raise GrammarError(f"structural tags of type {shown(form['type'])} are not served")

    # --- tags -------------------------------------------------------------------------------------
    def _rest(self, tag: Form) -> str:
        """The content of a tag, which ends at the first of its ends."""
        end = tag.get("end", "")
        ends = [self._mark(each) for each in (end if isinstance(end, list) else [end])]
        if not ends:
            raise GrammarError(f"the tag {shown(tag['begin'])} has no end: give at least one")
        return self.of(tag["content"], ends)

    def _sequence(self, elements: Sequence[Form], ends: Sequence[Mark]) -> str:
        """Parts that follow each other. Free text ends where the next part begins, where that
        begins with a fixed text."""
        parts: list[str] = []
        left = list(elements)
        while left:
            form = left.pop(0)
            begin = self._begin(left[0]) if left and form["type"] in _FREE else None
            if begin is not None:
                parts.append(self.of(form, [begin]))
                following = left.pop(0)
                if following["type"] == "tag":
                    left.insert(0, {**following, "begin": ""})
                elif not left:
                    parts.append(self._one_of(ends))
            else:
                parts.append(self.of(form, () if left else ends))
        return f"({' '.join(parts)})" if parts else self._one_of(ends)

    def _begin(self, form: Form) -> Mark | None:
        """The fixed text that a part begins with."""
        found: Mark | None = None
        match form["type"]:
            case "const_string":
                found = self._mark(form["value"])
            case "token":
                found = self._mark(form)
            case "tag":
                found = self._mark(form["begin"])
        return found if found != "" else None

    def _triggered(self, form: Form, ends: Sequence[Mark]) -> str:
        """Free text until a trigger comes, then the rest of one of its tags, then text again. Where
        a tag must come, the answer begins with it, as in xgrammar."""
        excluded = form.get("excludes") or ()
        rests: dict[str, list[str]] = {}
        for tag in _tags(form):
            found = [one for one in form["triggers"] if one and tag["begin"].startswith(one)]
            if not found:
                raise GrammarError(f"no trigger begins the tag {shown(tag['begin'])}")
            rest = f"{self._text(tag['begin'][len(found[0]) :])} {self._rest(tag)}"
            rests.setdefault(found[0], []).append(rest)
        named = {one: self._name(_choice(each), "part") for one, each in rests.items()}
        at_once = _choice(f"{self._text(one)} {rest}" for one, rest in named.items())
        later = _choice(
            f"{self._text_until([one], excluded)} {rest}" for one, rest in named.items()
        )
        free = self._text_until(ends, excluded)
        return self._looped(form, at_once, later, free, ends)

    def _dispatched(self, form: Form, ends: Sequence[Mark]) -> str:
        """Free text until a pattern comes, then what belongs to it, then text again."""
        excluded = form.get("excludes") or ()
        later = _choice(
            f"{self._text_until([pattern], excluded)} {self.of(each)}"
            for pattern, each in form["rules"]
        )
        stops = {"stop_after_first": not form.get("loop", True)}
        return self._looped(stops, "", later, self._text_until(ends, excluded), ends)

    def _by_tokens(self, form: Form, ends: Sequence[Mark]) -> str:
        """The same where tokens are the triggers."""
        if form["type"] == "token_dispatch":
            each = [(self._token(one), self.of(part)) for one, part in form["rules"]]
            flags: Form = {"stop_after_first": not form.get("loop", True)}
        else:
            each = [(self._token(_named(tag["begin"])), self._rest(tag)) for tag in _tags(form)]
            flags = form
            triggers = [self._token(one) for one in form["trigger_tokens"]]
            if missing := [begin for begin, _ in each if begin not in triggers]:
                raise GrammarError(f"no trigger token begins the tag {shown(missing[0])}")
        free = self._tokens(form, [*ends, *(token for token, _ in each)])
        at_once = self._name(_choice(f"<[{token}]> {rest}" for token, rest in each), "part")
        return self._looped(
            flags, at_once, f"{free} {at_once}", f"{free} {self._one_of(ends)}", ends
        )

    def _looped(
        self, flags: Form, at_once: str, later: str, free: str, ends: Sequence[Mark]
    ) -> str:
        """Triggered parts between free text.

        Args:
            flags: `at_least_one` and `stop_after_first`.
            at_once: a triggered part.
            later: the same behind free text.
            free: free text up to the end of all.
        """
        first, end = flags.get("at_least_one"), self._one_of(ends)
        if flags.get("stop_after_first"):
            return f"{at_once} {end}" if first else _choice([f"{later} {end}", free])
        return f"{at_once if first else ''} {self._name(later, 'part')}* {free}"

    def _separated(self, form: Form) -> str:
        """Tags with a text between them."""
        tags = (f"{self._one_of([self._mark(t['begin'])])} {self._rest(t)}" for t in _tags(form))
        one = self._name(_choice(tags), "part")
        several = one
        if not form.get("stop_after_first"):
            several = f"{one} ({self._text(form['separator'])} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    # --- text and tokens --------------------------------------------------------------------------
    def _text_until(self, ends: Sequence[Mark], excluded: Sequence[str]) -> str:
        """Free text up to and with the first of `ends`."""
        text = self._free_text(excluded)
        spelled: list[str] = []
        others: list[str] = []
        for end in ends:
            found = self._special.search(end) if self._special and isinstance(end, str) else None
            if isinstance(end, int) or not end or (found and found.start() == 0):
                others.append(f"{text} {self._one_of([end])}")  # no text spells the token
            elif found:
                head = self._name(f"{text} {lark_text(end[: found.start()])}", "PART")
                others.append(f"{head} {self._text(end[found.start() :])}")
            else:
                spelled.append(lark_text(end))
        if spelled:
            others.append(self._name(f"{text} ({' | '.join(spelled)})", "until", "[lazy]"))
        return _choice(others) if others else text

    def _free_text(self, excluded: Sequence[str]) -> str:
        """A terminal for text without some texts."""
        expression = r"/(?s:.*)/"
        if excluded:
            listed = "|".join(map(regex_of_text, excluded))
            expression += f" & ~/(?s:.*)({listed})(?s:.*)/"
        return self._name(expression, "TEXT")

    def _tokens(self, form: Form, ends: Sequence[Mark]) -> str:
        """Any tokens but those that are excluded, and those at which something else begins."""
        return f"({self._any_but(form.get('exclude_tokens') or (), ends)})*"

    def _any_but(self, excluded: Iterable[Mark], ends: Sequence[Mark]) -> str:
        ids = {self._token(each) for each in excluded}
        ids |= {end for end in ends if isinstance(end, int)}
        ids |= set(self._lexicon.eos_ids) if self._lexicon else set()
        return f"<[^{','.join(map(str, sorted(ids)))}]>" if ids else "<[*]>"

    def _mark(self, given: Any) -> Mark:
        """The text or the token that begins or ends a tag."""
        if isinstance(given, str):
            return given
        if given["type"] != "token":
            raise GrammarError(f"a tag begins and ends with texts and tokens, got {shown(given)}")
        return self._token(given["token"])

    def _token(self, given: Any) -> int:
        is_name = isinstance(given, int | str) and not isinstance(given, bool)
        token = self._lexicon.token_id(given) if self._lexicon and is_name else None
        if token is None:
            raise GrammarError(f"the model has no single token {shown(given)}")
        return token

    def _one_of(self, marks: Sequence[Mark]) -> str:
        if not marks:
            return ""
        return _choice(
            f"<[{mark}]>" if isinstance(mark, int) else self._text(mark) for mark in marks
        )

    def _text(self, text: str) -> str:
        """A text, in which special tokens are those tokens."""
        parts: list[str] = []
        at = 0
        for found in self._special.finditer(text) if self._special else ():
            parts += [lark_text(text[at : found.start()]), f"<[{self._specials[found[0]]}]>"]
            at = found.end()
        parts.append(lark_text(text[at:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def _grammar(self, text: str) -> str:
        if not is_gbnf(text):
            name = f"inner_{len(self.grammars)}"
            self.grammars.append({"name": name, "lark_grammar": text})
            return f"@{name}"
        start, lines = lark_of_gbnf(text, self._lexicon, f"gbnf_{len(self.lines)}_")
        self.lines += lines
        return start

    def _name(self, expression: str, kind: str, flags: str = "") -> str:
        """A name for an expression; equal ones have one."""
        key = f"{flags}: {expression}"
        if key not in self._named:
            self._named[key] = f"{kind}_{len(self.lines)}"
            self.lines.append(f"{self._named[key]}{key}")
        return self._named[key]


def _tags(form: Form) -> Sequence[Form]:
    tags: Sequence[Form] = form["tags"]
    if not tags or len(tags) > MAX_TAGS:
        raise GrammarError(f"a structural tag has 1 to {MAX_TAGS} tags, got {len(tags)}")
    return tags


def _choice(options: Iterable[str]) -> str:
    listed = list(options)
    if not listed:
        raise GrammarError("a structural tag has a choice of nothing: give at least one part")
    return "(" + " | ".join(each.strip() or '""' for each in listed) + ")"


def _named(token: Any) -> Any:
    """The id or the text of a token that begins a tag."""
    return token["token"] if isinstance(token, dict) else token


def _times(least: Any, most: Any) -> str:
    are_counts = type(least) is int and type(most) is int
    if not are_counts or least < 0 or (most != -1 and most < least):
        raise GrammarError(
            f"repeat has a min of {shown(least)} and a max of {shown(most)}: give whole numbers of"
            " which the second is not less, or -1"
        )
    return f"{{{least},{'' if most == -1 else most}}}"
