"""Which format a model's answers have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property

from vllmx_core.errors import TemplateError
from vllmx_core.output_format import OutputFormat
from vllmx_core.registry import Registry
from vllmx_core.specs import ParserSpec

from vllmx_engine.formats.derive import derive_calls, derive_thinking, predicts
from vllmx_engine.formats.named import FoundFormat, Origin, named_format
from vllmx_engine.formats.renderings import NotDerivedError
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
) -> FoundFormat:
    """The format of a model: what the flags name; else what the checkpoint states itself; else a
    record whose signature stands in the templates and that writes calls as they do; else what is
    derived from them; else a record by its signature alone.

    Args:
        templates: Jinja sources by name.
        tool_parser, reasoning_parser: see `EngineConfig`.
        special_tokens: what the templates may print.
        response_template: of the checkpoint's tokenizer_config.json.

    Raises:
        ConfigError: a name that nobody provides, or a format without the part that is asked for.
    """
    finder = _Finder(registry, templates, special_tokens, _stated(response_template))
    thinking, reasoning_from = finder.part(reasoning_parser, is_tools=False)
    tools, tools_from = finder.part(tool_parser, is_tools=True)
    channels = next((each.channels for each in (tools, thinking) if each.channels), None)
    content = tools if tools.content_begin else thinking
    found = OutputFormat(
        tools.name if tools.name == thinking.name else f"{thinking.name}+{tools.name}",
        thinking.thinking,
        tools.calls,
        channels,
        content.content_begin,
        content.content_end,
    )
    logger.info("calls of tools: %s; thoughts: %s", tools_from, reasoning_from)
    return FoundFormat(found, tools_from, reasoning_from, finder.origin)


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
        special_tokens: Mapping[str, str] | None,
        stated: OutputFormat | None,
    ) -> None:
        self._registry = registry
        self._stated = stated
        self._templates = templates
        self._special_tokens = special_tokens
        self._source = "\n".join(templates.values())
        self.origin: Origin = "known"
        """How well the part is known that was looked for last."""

    @cached_property
    def _template(self) -> ChatTemplate:
        """Raises TemplateError."""
        return ChatTemplate(self._templates, self._special_tokens)

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
        records = self._records(is_tools=is_tools)
        if is_tools:
            for spec in records:
                if self._fits(spec.load()):
                    return spec.load(), f"{spec.name} (it writes calls as the chat template does)"
        elif records:
            return records[0].load(), f"{records[0].name} (its markers are in the chat template)"
        derived, why = self._derived(is_tools=is_tools)
        if derived is not None:
            self.origin = "derived"
            return derived, "derived from the chat template, which it predicts"
        if records:
            self.origin = "by_markers"
            why = f"{records[0].name} (its markers are in the chat template; {why})"
            return records[0].load(), why
        self.origin = "not_found"
        return OutputFormat("none"), f"not read: no record fits the chat template, and {why}"

    def _records(self, *, is_tools: bool) -> list[ParserSpec]:
        """Records whose signature stands in the templates, that of most characters first."""
        found: list[tuple[int, ParserSpec]] = []
        for spec in self._registry.all(ParserSpec):
            signature = spec.tool_signature if is_tools else spec.reasoning_signature
            if signature and all(text in self._source for text in signature):
                found.append((-sum(map(len, signature)), spec))
        return [spec for _, spec in sorted(found, key=lambda each: each[0])]

    def _fits(self, record: OutputFormat) -> bool:
        if record.channels is not None:
            return True
        try:
            return record.calls is not None and predicts(self._template, record.calls)
        except (NotDerivedError, TemplateError):
            return False

    def _derived(self, *, is_tools: bool) -> tuple[OutputFormat | None, str]:
        """The format that the template shows, or None and why not."""
        try:
            if is_tools:
                return OutputFormat("derived", calls=derive_calls(self._template)), ""
            return OutputFormat("derived", derive_thinking(self._template)), ""
        except (NotDerivedError, TemplateError) as error:
            return None, f"nothing is derived from it: {error}"
