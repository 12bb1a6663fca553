"""Conversations: what may be asked about one, and the model's way to write it as a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllmx_core.checkpoint import open_checkpoint
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, ModelNotFoundError

from vllmx_engine.core.load import LoadPlan
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer
from vllmx_engine.text.model_files import MAX_TEMPLATE_BYTES, read_text
from vllmx_engine.text.tokenizer import TOKENIZER_NAME, Tokenizer

ChatMessage = Mapping[str, Any]
"""An OpenAI message: role, content, and what else the template knows."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for who does not want to write dictionaries."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to render a conversation; see `ChatTemplate.render`."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """None: yes, unless `continue_final_message`."""
    continue_final_message: bool = False
    template: str | None = None
    """Name of one of the model's templates."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""


class ChatRenderer:
    """Writes conversations with the model's template, or with one that replaces it. Thread-safe.

    Args:
        source: Jinja source that replaces the model's own.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer) -> ChatRenderer:
        """The renderer that a configuration asks for. Raises ConfigError for a template file that
        cannot be read."""
        if config.chat_template is None:
            return cls(tokenizer)
        source = read_text(Path(config.chat_template), MAX_TEMPLATE_BYTES)
        if source is None:
            raise ConfigError(
                f"--chat-template {config.chat_template} does not exist: check the path",
                param="chat_template",
            )
        return cls(tokenizer, source)

    @cached_property
    def template(self) -> ChatTemplate:
        """Compiled at first use: a model without a template serves everything but chat. Raises
        TemplateError."""
        if self._source is not None:
            return ChatTemplate(self._source, self._tokenizer.named_tokens)
        return ChatTemplate.from_tokenizer(self._tokenizer)

    def render(
        self,
        messages: Sequence[ChatMessage | Message],
        options: ChatOptions | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> str:
        """The prompt's text, with every special token that belongs to it. May take a while: not for
        an event loop. Raises TemplateError, InvalidRequestError."""
        options = options or ChatOptions()
        generation = options.add_generation_prompt
        return self.template.render(
            [asdict(message) if isinstance(message, Message) else message for message in messages],
            options.tools,
            documents=options.documents,
            add_generation_prompt=not options.continue_final_message
            if generation is None
            else generation,
            continue_final_message=options.continue_final_message,
            template=options.template,
            chat_template_kwargs=options.template_kwargs,
            stopped=stopped,
        )


def load_tokenizer(plan: LoadPlan) -> Tokenizer:
    """The model's tokenizer, or the one that the configuration names: a folder's files, or what a
    model file says itself. Raises ModelNotFoundError, ConfigError, WeightFormatError,
    UnsupportedModelError."""
    place = Path(plan.config.tokenizer or plan.path)
    if not place.exists() or (place / TOKENIZER_NAME).is_file():
        return Tokenizer.from_folder(place)
    try:
        checkpoint = open_checkpoint(plan.registry, place)
    except ModelNotFoundError:
        if plan.config.tokenizer is None:
            raise  # the model itself cannot be opened, whatever its folder says of a tokenizer
        return Tokenizer.from_folder(place)
    try:
        if checkpoint.tokenizer is None:
            return Tokenizer.from_folder(checkpoint.path)
        return gguf_tokenizer(checkpoint.tokenizer)
    finally:
        checkpoint.weights.close()
