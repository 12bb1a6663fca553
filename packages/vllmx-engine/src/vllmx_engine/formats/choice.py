"""Finds the format of a model's answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from vllmx_core.errors import TemplateError
from vllmx_core.output_format import OutputFormat
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ParserSpec

from vllmx_engine.formats.derive import derive_calls, derive_thinking, predicts
from vllmx_engine.formats.named import FoundFormat, Origin, named_format
from vllmx_engine.formats.proof import (
    NotProvenError,
    prove_answers,
    prove_calls,
    reads_itself,
    writes_calls,
)
from vllmx_engine.formats.renderings import NotDerivedError, Renderings
from vllmx_engine.formats.response_template import stated_format
from vllmx_engine.text.chat_template import ChatTemplate

logger = logging.getLogger("vllmx.formats")


def find_format(
    registry: Registry,
    templates: Mapping[str, str],
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    special_tokens: Mapping[str, str] | None = None,
    response_template: object = None,
    compiled: Callable[[], ChatTemplate] | None = None,
) -> FoundFormat:
    """Returns the format of a model, from the first source that has one: the flags; the
    checkpoint's own statement; a record that has its signature in the templates and writes calls as
    they do; a derivation from the templates; any record that reads the calls that they write; or,
    if they write none, a record by its signature alone. Formats that are neither named nor stated
    must read back the output of the templates (`proof`).

    Args:
        templates: Jinja sources by name.
        tool_parser, reasoning_parser: see `EngineConfig`.
        special_tokens: tokens that the templates may print.
        response_template: of the checkpoint's tokenizer_config.json.
        compiled: gives the same templates compiled, which takes a while. Raises TemplateError.

    Raises:
        ConfigError: an unknown name, or a format without the part that is asked for.
    """
    compiled = compiled or partial(ChatTemplate, templates, special_tokens)
    finder = _Finder(registry, templates, compiled, _stated(response_template))
    thinking, reasoning_from = finder.part(reasoning_parser, is_tools=False)
    finder.thinking = (
        thinking if reasoning_parser == "auto" else finder.part("auto", is_tools=False)[0]
    )
    tools, tools_from = finder.part(tool_parser, is_tools=True)
    found = merged(thinking, tools)
    takes_tools = any("tools" in source for source in templates.values())
    level = logging.WARNING if finder.origin == "not_found" and takes_tools else logging.INFO
    logger.log(level, "calls of tools: %s; thoughts: %s", tools_from, reasoning_from)
    return FoundFormat(found, tools_from, reasoning_from, finder.origin)


def merged(thinking: OutputFormat, tools: OutputFormat) -> OutputFormat:
    """A format with the thoughts of one and the calls of another."""
    content = tools if tools.content_begin or tools.skipped else thinking
    return replace(
        content,
        name=tools.name if tools.name == thinking.name else f"{thinking.name}+{tools.name}",
        thinking=thinking.thinking,
        calls=tools.calls,
        channels=tools.channels or thinking.channels,
        opened=tools.opened or thinking.opened,
    )


def _stated(response_template: object) -> OutputFormat | None:
    if response_template is None:
        return None
    try:
        return stated_format(response_template)
    except NotDerivedError as error:
        logger.warning("the checkpoint's response_template is passed over: %s", error)
        return None


class _Finder:
    """Looks for the parts of a format."""

    def __init__(
        self,
        registry: Registry,
        templates: Mapping[str, str],
        compiled: Callable[[], ChatTemplate],
        stated: OutputFormat | None,
    ) -> None:
        self._registry = registry
        self._stated = stated
        self._compiled = compiled
        self._source = "\n".join(templates.values())
        self.origin: Origin = "known"
        """The origin of the part that was looked for last."""
        self.thinking = OutputFormat("none")
        """The format of reasoning while calls are proven."""

    @cached_property
    def _renderings(self) -> Renderings:
        """Raises TemplateError, NotDerivedError."""
        return Renderings(self._compiled())

    def part(self, wanted: str, *, is_tools: bool) -> tuple[OutputFormat, str]:
        """A format that has the part, and where it comes from."""
        self.origin = "known"
        flag = "--tool-parser" if is_tools else "--reasoning-parser"
        if wanted == "none":
            return OutputFormat("none"), f"not read ({flag} none)"
        if wanted != "auto":
            return named_format(self._registry, wanted, flag), f"{wanted} ({flag})"
        stated = self._stated
        if stated is not None and (stated.calls if is_tools else stated.thinking) is not None:
            return stated, "the checkpoint's response_template"
        try:
            renderings = self._renderings
        except (NotDerivedError, TemplateError) as error:
            self.origin = "not_found"
            return OutputFormat("none"), f"not read: the chat template shows no answers: {error}"
        return self._tools(renderings) if is_tools else self._reasoning(renderings)

    def _reasoning(self, renderings: Renderings) -> tuple[OutputFormat, str]:
        why = ""
        for record in self._records(is_tools=False):
            reason = _disproof(prove_answers, renderings, record)
            if reason is None:
                return record, f"{record.name} (it reads the answers of the chat template)"
            why = why or f"{record.name} does not read the answers of the chat template ({reason})"
        try:
            derived = OutputFormat("derived", derive_thinking(renderings))
            prove_answers(renderings, derived)
        except (NotDerivedError, NotProvenError) as error:
            why = f"{why or 'no record fits the chat template'}, and nothing is derived: {error}"
            self.origin = "not_found"
            return OutputFormat("none"), f"not read: {why}"
        self.origin = "derived"
        return derived, "derived from the chat template, which it predicts"

    def _tools(self, renderings: Renderings) -> tuple[OutputFormat, str]:
        known = self._records(is_tools=True)
        alike = [each for each in known if self._writes_alike(renderings, each)]
        for record in alike:
            if self._reads_calls(renderings, record):
                return record, f"{record.name} (it writes calls as the chat template does)"
        derived, why = self._derived(renderings)
        if derived is not None:
            self.origin = "derived"
            return derived, "derived from the chat template, which it predicts"
        others = [each for each in self._all_calls() if each not in known]
        for record in [*known, *others]:
            if record not in alike and self._reads_calls(renderings, record):
                return record, f"{record.name} (it reads the calls of the chat template)"
        marked = self._by_markers(renderings, known)
        if marked is not None:
            self.origin = "by_markers"
            return marked, f"{marked.name} (its markers are in the chat template; {why})"
        self.origin = "not_found"
        return OutputFormat("none"), f"not read: no record fits the chat template, and {why}"

    def _by_markers(
        self, renderings: Renderings, records: Sequence[OutputFormat]
    ) -> OutputFormat | None:
        """Returns a record that has its markers in a template that never writes a call, and so
        cannot disprove it."""
        try:
            if writes_calls(renderings):
                return None
        except NotDerivedError:
            pass  # it cannot say
        for record in records:
            whole = self._with_thinking(record)
            if _disproof(prove_answers, renderings, whole) is None and reads_itself(whole):
                return record
        return None

    def _records(self, *, is_tools: bool) -> list[OutputFormat]:
        """Returns records with their signature in the templates, the longest signature first."""
        found: list[tuple[int, ParserSpec]] = []
        for spec in self._registry.all(ParserSpec):
            signature = spec.tool_signature if is_tools else spec.reasoning_signature
            if signature and all(text in self._source for text in signature):
                found.append((-sum(map(len, signature)), spec))
        return [spec.load() for _, spec in sorted(found, key=lambda each: each[0])]

    def _all_calls(self) -> Iterator[OutputFormat]:
        for spec in self._registry.all(ParserSpec):
            made_of: OutputFormat = spec.load()
            if made_of.calls is not None or made_of.channels is not None:
                yield made_of

    def _with_thinking(self, tools: OutputFormat) -> OutputFormat:
        return merged(self.thinking, tools)

    def _reads_calls(self, renderings: Renderings, record: OutputFormat) -> bool:
        whole = self._with_thinking(record)
        if _disproof(prove_calls, renderings, whole) is not None:
            return False
        return _disproof(prove_answers, renderings, whole) is None

    def _writes_alike(self, renderings: Renderings, record: OutputFormat) -> bool:
        if record.channels is not None:
            return True
        try:
            return record.calls is not None and predicts(renderings, record.calls)
        except NotDerivedError:
            return False

    def _derived(self, renderings: Renderings) -> tuple[OutputFormat | None, str]:
        """The format of calls that the template shows, or None and why not."""
        try:
            derived = OutputFormat("derived", calls=derive_calls(renderings))
            whole = self._with_thinking(derived)
            prove_calls(renderings, whole)
            prove_answers(renderings, whole)
        except (NotDerivedError, NotProvenError) as error:
            return None, f"nothing is derived from it: {error}"
        return derived, ""


def _disproof(
    prove: Callable[[Renderings, OutputFormat], None],
    renderings: Renderings,
    made_of: OutputFormat,
) -> str | None:
    """Why a format is not the template's."""
    try:
        prove(renderings, made_of)
    except (NotDerivedError, NotProvenError) as error:
        logger.debug("format %s: %s", made_of.name, error)
        return str(error)
    return None
