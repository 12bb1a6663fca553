"""Conversations: what may be asked about one, and the model's way to write it as a prompt."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError, ModelNotFoundError
from vllmx_core.output_format import OutputFormat
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.chat_options import (
    ChatMessage,
    ChatOptions,
    Message,
    default_variables,
)
from vllmx_engine.client.forced_calls import CALLS_FIELD, asks_for_calls, told_tools, with_calls
from vllmx_engine.client.request import Request
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.formats.named import FoundFormat, check_name
from vllmx_engine.text.model_files import template_of
from vllmx_engine.text.prompt_text import Spellings
from vllmx_engine.text.tokenizer import TOKENIZER_NAME, Tokenizer
from vllmx_engine.wire.grammars import FreePart, Thoughts

if TYPE_CHECKING:
    from vllmx_engine.text.chat_template import ChatTemplate


def free_part(
    made_of: OutputFormat,
    prompt: str,
    options: ChatOptions,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    *,
    thinks: bool,
) -> FreePart | None:
    """Returns the free part of the answer to a prompt, before its grammar; None if it has none.

    A prompt may end within reasoning, and the grammar follows its end. Behind any other prompt the
    model may begin to reason if that was asked for. A mask that allows reasoning makes models begin
    it that were never trained to, since both beginnings are equally unlikely to them.
    """
    marker, held = tokenizer.marker, tuple(eos_ids)
    channels, thinking = made_of.channels, made_of.thinking
    if channels is not None and not options.continue_final_message:
        header = channels.channel + channels.content
        ends = (
            marker(header + channels.message),
            marker(f"{header} {channels.constrain}json{channels.message}"),
        )
        # a call of a tool is an answer, too
        return FreePart(ends, marker(channels.channel), () if options.tools else held)
    if made_of.opened and prompt.rstrip().endswith(made_of.opened.strip()):
        header = made_of.content_begin.removeprefix(made_of.opened)
        return FreePart((marker(header),), (), () if options.tools else held)
    if thinking is None or not thinking.begin.strip():
        return None
    begin, end = thinking.begin.strip(), thinking.end.strip()
    if prompt.rstrip().endswith(begin):
        return FreePart((marker(end),), held_ids=held)
    if options.continue_final_message or not thinks or prompt.rstrip().endswith(end):
        return None
    return FreePart((marker(end),), marker(made_of.thinking_begin.strip()), held)


__all__ = ["ChatMessage", "ChatOptions", "ChatRenderer", "Message", "load_tokenizer"]


class ChatRenderer:
    """Writes conversations with the model's template, or with one that replaces it. Thread-safe.

    Args:
        source: Jinja source that replaces the model's own.
        registry: knows the formats of answers; None: nothing is read from answers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        config: EngineConfig | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._config = config or EngineConfig()
        self._defaults = default_variables(self._config.default_chat_template_kwargs)
        self._registry = registry
        self._lock = threading.Lock()
        self._found: FoundFormat | None = None
        self._marker_ids = frozenset[int]()

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer, registry: Registry) -> ChatRenderer:
        """The renderer that a configuration asks for. Raises ConfigError for a template file that
        cannot be read, and for an unknown parser."""
        for flag in ("tool_parser", "reasoning_parser"):
            check_name(registry, flag, getattr(config, flag))
        source = template_of(config.chat_template)
        return cls(tokenizer, source, config=config, registry=registry)

    @staticmethod
    def import_templates() -> None:
        """Imports what chats need, and programs that complete texts do not: 60 ms."""
        importlib.import_module("vllmx_engine.client.answers")
        importlib.import_module("vllmx_engine.formats.choice")

    @property
    def format(self) -> FoundFormat:
        """The format of answers. The first use looks for it, which may take a while."""
        from vllmx_engine.client.answers import marker_ids

        with self._lock:
            if self._found is None:
                found = self._find_format()
                self._marker_ids = marker_ids(found.format, self._tokenizer)
                self._found = found
        return self._found

    def look_for_format(self) -> None:
        """Finds and logs `format` before the first chat needs it. May take a while."""
        self.format  # noqa: B018

    @property
    def source(self) -> str | None:
        """The Jinja source of the usual template; None: there is none."""
        own = self._tokenizer.chat_templates.get("default")
        return own if self._source is None else self._source

    @property
    def has_format(self) -> bool:
        """`format` takes no time any more."""
        return self._found is not None

    def _find_format(self) -> FoundFormat:
        from vllmx_engine.formats.choice import find_format

        if self._registry is None:
            return FoundFormat(OutputFormat("none"), "not read", "not read")
        return find_format(
            self._registry,
            self._sources,
            self._config.tool_parser,
            self._config.reasoning_parser,
            self._tokenizer.named_tokens,
            self._tokenizer.config.get("response_template"),
            lambda: self.template,
        )

    @property
    def _sources(self) -> Mapping[str, str]:
        own = self._tokenizer.chat_templates
        return own if self._source is None else {"default": self._source}

    @cached_property
    def template(self) -> ChatTemplate:
        """Compiled at first use: a model without a template serves everything but chat. Raises
        TemplateError."""
        from vllmx_engine.text.chat_template import ChatTemplate

        if self._source is not None:
            return ChatTemplate(self._source, self._tokenizer.named_tokens)
        return ChatTemplate.from_tokenizer(self._tokenizer)

    @cached_property
    def _spellings(self) -> Spellings | None:
        """Special tokens that stay text where users spell them; None: spellings become tokens."""
        if self._config.special_tokens_in_text == "keep":
            return None
        return Spellings(self._tokenizer.control_tokens("\n".join(self._sources.values())))

    def with_calls(
        self, params: SamplingParams, options: ChatOptions | None = None
    ) -> SamplingParams:
        """Parameters under which answers hold the calls that are asked for. May take a while.
        Raises InvalidRequestError where they cannot."""
        if options is None or not asks_for_calls(options):
            return params
        return with_calls(params, self.format.format, options)

    def free_part(
        self,
        params: SamplingParams,
        prompt: str,
        eos_ids: Sequence[int],
        options: ChatOptions | None = None,
    ) -> FreePart | None:
        """Returns the part of the answer to a prompt of `render` before its grammar. May take a
        while."""
        form, options = params.structured_outputs, self._with_defaults(options)
        if form is None:
            return None
        thinks = options.thinks or bool((params.thinking_token_budget or 0) > 0)
        made_of = self.format.format
        found = free_part(made_of, prompt, options, self._tokenizer, eos_ids, thinks=thinks)
        has_headers = bool(found and found.begin_ids) or bool(made_of.opened)
        if found is None or (has_headers and form.field == CALLS_FIELD):
            return None  # the grammar of calls has thoughts of its own
        return found

    def thoughts(
        self, params: SamplingParams, prompt: str, options: ChatOptions | None = None
    ) -> Thoughts | None:
        """Returns the budget of reasoning tokens of the answer to a prompt of `render`. May take a
        while. Raises InvalidRequestError if the options need a budget and no format marks
        reasoning."""
        made_of = self.format.format
        budget, thinking = params.thinking_token_budget, made_of.thinking
        if budget is None or budget < 0:
            return None
        if (channels := made_of.channels) is not None:
            header = channels.channel + channels.thinking + channels.message
            begin, end = map(self._tokenizer.marker, (header, channels.ends[0]))
            return Thoughts(budget, begin, end)
        if thinking is None or not thinking.begin.strip():
            if options is not None and not options.needs_budget:
                return None
            raise InvalidRequestError(
                "thinking_token_budget needs a model with a known reasoning format: leave"
                " it out, or start the server with --reasoning-parser",
                param="thinking_token_budget",
            )
        markers = made_of.thinking_begin.strip(), thinking.end.strip()
        begin, end = map(self._tokenizer.marker, markers)
        is_open = prompt.rstrip().endswith(thinking.begin.strip())
        return Thoughts(budget, () if is_open else begin, end)

    def with_readers(self, request: Request, options: ChatOptions | None = None) -> Request:
        """The request of a prompt of `render`, with what reads its answers. May take a while."""
        from vllmx_engine.client.answers import AnswerReaders

        options = options or ChatOptions()
        made_of = self.format.format
        readers = AnswerReaders(
            made_of,
            self._tokenizer,
            request.prompt,
            request.prompt_ids,
            told_tools(made_of, options),
            marker_ids=self._marker_ids,
            one_call=options.one_call,
        )
        return replace(request, readers=readers) if readers.is_needed else request

    def _with_defaults(self, options: ChatOptions | None) -> ChatOptions:
        """Returns the options over the operator's template variables."""
        options = options or ChatOptions()
        if not self._defaults:
            return options
        return replace(options, template_kwargs=self._defaults | dict(options.template_kwargs))

    def render(
        self,
        messages: Sequence[ChatMessage | Message],
        options: ChatOptions | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> str:
        """The prompt's text with all of its special tokens; a `PromptText` if users spelled some.
        May take a while: not for an event loop. Raises TemplateError, InvalidRequestError."""
        options = self._with_defaults(options)
        generation = options.add_generation_prompt
        tools: Sequence[Mapping[str, Any]] | None = options.shown_tools
        if options.allowed_tools is not None:
            tools = told_tools(self.format.format, options)
        template, spellings = self.template, self._spellings
        if options.source is not None:
            template = type(template)(options.source, self._tokenizer.named_tokens)
            if spellings is not None:
                tokens = self._tokenizer.control_tokens(options.source)
                if not tokens <= spellings.tokens:
                    spellings = Spellings(tokens | spellings.tokens)
        plain: Any = messages
        if isinstance(messages, (list, tuple)):  # anything else is refused by name
            plain = [asdict(each) if isinstance(each, Message) else each for each in messages]
        return template.render(
            plain,
            tools,
            documents=options.documents,
            add_generation_prompt=not options.continue_final_message
            if generation is None
            else generation,
            continue_final_message=options.continue_final_message,
            template=options.template,
            chat_template_kwargs=options.template_kwargs,
            spellings=spellings,
            stopped=stopped,
        )


def load_tokenizer(found: FoundModel) -> Tokenizer:
    """The model's tokenizer, or the one that the configuration names: a folder's files, or what a
    model file says itself. Raises ModelNotFoundError, ConfigError, WeightFormatError,
    UnsupportedModelError."""
    place = Path(found.config.tokenizer or found.path)
    if not place.exists() or (place / TOKENIZER_NAME).is_file():
        return Tokenizer.from_folder(place)
    try:
        checkpoint = open_checkpoint(found.registry, place)
    except ModelNotFoundError:
        if found.config.tokenizer is None:
            raise  # the model itself cannot be opened, whatever its folder says of a tokenizer
        return Tokenizer.from_folder(place)
    try:
        if checkpoint.tokenizer is None:
            return Tokenizer.from_folder(checkpoint.path)
        from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer  # a folder needs none of it

        return gguf_tokenizer(checkpoint.tokenizer)
    finally:
        checkpoint.weights.close()
