"""Chat templates: a conversation to the prompt that the model was trained on.

The conventions are Hugging Face's (`apply_chat_template`); the same conversation gives the same
prompt. Rendering is pure Python on the calling thread, bounded in steps, CPU time and size (see
`template_sandbox`); a server calls it off its event loop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

import jinja2
from vllmx_core.errors import InvalidRequestError, TemplateError, excerpt

from vllmx_engine.text.messages import (
    Message,
    normalize_messages,
    plain_data,
    without_rich_values,
)
from vllmx_engine.text.prompt_text import MARK, Spellings
from vllmx_engine.text.template_budget import BoundsError, Stopped, TemplateLimits
from vllmx_engine.text.template_sandbox import (
    BoundedContext,
    RaisedByTemplate,
    TemplateEnvironment,
)
from vllmx_engine.text.template_syntax import reads_of
from vllmx_engine.text.template_variants import (
    conversation_forms,
    takes_text_arguments,
    with_texts,
)
from vllmx_engine.text.tokenizer import Tokenizer

log = logging.getLogger("vllmx.text")

_MAX_MESSAGE_CHARS = 1000
_CONTINUE_MARK = "\ue000CONTINUE-HERE\ue001 "
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplate:
    """A model's chat template, compiled once; renderings may run in several threads.

    Args:
        source: the Jinja source, or several by name (`default`, `tool_use`, `rag`).
        special_tokens: what the template may print: `bos_token`, `eos_token`, `pad_token` ...
        limits: bounds of one rendering.

    Raises:
        TemplateError: the source is not a template that can be compiled.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: TemplateLimits | None = None,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise TemplateError("the model has no chat template; give one with --chat-template")
        environment = TemplateEnvironment(limits or TemplateLimits())
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self._templates = {
            name: _CompiledTemplate(text, environment) for name, text in sources.items()
        }

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, *, limits: TemplateLimits | None = None
    ) -> ChatTemplate:
        """The templates of a model folder.

        Raises:
            TemplateError: it has none, or one that cannot be compiled.
        """
        return cls(tokenizer.chat_templates, tokenizer.named_tokens, limits=limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that `render(template=...)` takes."""
        return tuple(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        spellings: Spellings | None = None,
        stopped: Stopped | None = None,
    ) -> str:
        """The prompt.

        Args:
            messages: OpenAI messages; see `messages.normalize_messages` for what is made of them.
            tools: OpenAI tool definitions.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: end within the last message instead, so that the model goes on
                with it; not together with `add_generation_prompt`.
            documents: for retrieval templates.
            template: name of the template; by default `tool_use` where tools are given and there
                is one, else `default`.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.
            spellings: special tokens that stay text where users, tools and documents spell them:
                the prompt is a `PromptText` then. None: a spelt special token becomes that token.
            stopped: asked now and then; once true, the rendering ends with a TemplateError.

        Raises:
            TemplateError: the template refuses the conversation (with its own message), fails on
                it, or goes over a limit.
            InvalidRequestError: arguments that no template could take.
        """
        compiled = self._select(template, bool(tools))
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        extra = plain_data(chat_template_kwargs or {}, "chat_template_kwargs")
        clash = sorted(_RESERVED.intersection(extra))
        if clash:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {clash[0]!r}", param="chat_template_kwargs"
            )
        plain = compiled.normalized(messages, self.special_tokens, spellings)
        given = {
            "tools": plain_data(tools, "tools"),
            "documents": plain_data(documents, "documents"),
        }
        variables = {
            **self.special_tokens,
            **extra,
            **(given if spellings is None else spellings.guarded(given)),
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            prompt = _cut_at_mark(compiled.render(_mark_end(plain), variables, stopped))
        else:
            prompt = compiled.render(plain, variables, stopped)
        return prompt if spellings is None else spellings.settled(prompt)

    def _select(self, name: str | None, has_tools: bool) -> _CompiledTemplate:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(
                f"the model has no chat template named {name!r}; it has {', '.join(self.names)}",
                param="chat_template",
            )
        return self._templates[name]


class _CompiledTemplate:
    """One source, compiled, with what it reads of a message's content."""

    def __init__(self, source: str, environment: TemplateEnvironment) -> None:
        try:
            tree = environment.parse_plain(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template cannot be compiled: {error.message} (line {error.lineno})"
            ) from error
        except Exception as error:
            raise TemplateError(
                f"the chat template cannot be compiled ({type(error).__name__})"
            ) from error
        self._environment = environment
        self._reads = reads_of(tree)
        self._takes_text: bool | None = None
        """Calls have their arguments as JSON text; None: not found out yet."""

    def normalized(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        spellings: Spellings | None,
    ) -> list[Message]:
        """Messages as this template reads them. Raises InvalidRequestError."""
        found = normalize_messages(messages, self._reads, spellings)
        if not any(message.get("tool_calls") for message in found):
            return found
        if self._takes_text is None:
            self._takes_text = takes_text_arguments(partial(self._probe, special_tokens))
        if self._takes_text:
            found = normalize_messages(messages, self._reads, spellings, text_arguments=True)
        return found

    def _probe(
        self,
        special_tokens: Mapping[str, str],
        messages: list[Message],
        tools: list[dict[str, Any]],
    ) -> str:
        as_text = isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], str)
        variables = {
            **special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": False,
        }
        shaped = normalize_messages(messages, self._reads, text_arguments=as_text)
        return self._run(shaped, variables)

    def render(
        self, messages: list[Message], variables: Mapping[str, Any], stopped: Stopped | None = None
    ) -> str:
        """The prompt. A template that fails on a conversation gets it in other forms: with strings
        alone where it seems to add them, with other tools, then with another history."""
        started_s = time.thread_time()
        first: TemplateError | None = None
        forms = conversation_forms(messages, variables["tools"])
        while (form := next(forms, None)) is not None:
            history, tools = form
            given = {**variables, **self._usual(tools), "tools": tools}
            try:
                prompt = self._run(history, given, stopped, started_s)
            except TemplateError as error:
                if isinstance(error.__cause__, BoundsError):
                    raise
                adds = isinstance(error.__cause__, (TypeError, jinja2.UndefinedError))
                simpler = without_rich_values(history) if adds else None
                if simpler is None:
                    first = first or error
            else:
                simpler = with_texts(history, prompt)
                if simpler is None:
                    return prompt
            if simpler is not None:
                forms = chain([(simpler, tools)], forms)
        assert first is not None, "the last form has failed"
        raise first

    def _usual(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Returns Firefunction's variables in place of tools and of a call of the clock."""
        if "functions" not in self._reads.variables:
            return {}
        functions = [tool.get("function", tool) for tool in tools or ()]
        now = datetime.now().strftime("%B %d %Y %H:%M:%S")
        return {"functions": json.dumps(functions, indent=4, ensure_ascii=False), "datetime": now}

    def _run(
        self,
        messages: list[Message],
        variables: Mapping[str, Any],
        stopped: Stopped | None = None,
        started_s: float | None = None,
    ) -> str:
        """One rendering; `started_s` of `time.thread_time`: when the first of several began, whose
        CPU time counts together."""
        context = self._template.new_context({**variables, "messages": messages})
        assert isinstance(context, BoundedContext)
        context.budget.stopped = stopped
        if started_s is not None:
            context.budget.cpu_start_s = started_s
        limit = self._environment.limits.max_chars
        parts: list[str] = []
        num_chars = 0
        try:
            context.budget.size(messages)
            for part in self._template.root_render_func(context):
                parts.append(part)
                num_chars += len(part)
                if num_chars > limit:
                    raise BoundsError(f"makes a prompt of more than {limit} characters")
        except RaisedByTemplate as error:
            message = excerpt(str(error).replace(MARK, ""), _MAX_MESSAGE_CHARS)
            raise TemplateError(
                f"the chat template refuses the conversation: {message}", param="messages"
            ) from error
        except BoundsError as error:
            raise TemplateError(f"the chat template {error}", param="messages") from error
        except Exception as error:
            raise TemplateError(self._failure(error), param="messages") from error
        return "".join(parts)

    def _failure(self, error: Exception) -> str:
        """Describes a failure. Jinja's own errors describe the template; for others only their type
        is reported."""
        line = self._line_of(error)
        log.debug("chat template failed on line %s", line, exc_info=error)
        what = type(error).__name__
        if isinstance(error, jinja2.TemplateError) and error.message:
            what = excerpt(error.message, _MAX_MESSAGE_CHARS)
        return f"the chat template fails on this conversation: {what} (line {line})"

    def _line_of(self, error: Exception) -> int:
        line = 0
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == "<template>":
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return line


def _mark_end(messages: list[Message]) -> list[Message]:
    """A copy whose last message carries the mark at the end of its text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
        return [*messages[:-1], last]
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _CONTINUE_MARK}
                last["content"] = [*content[:index], marked, *content[index + 1 :]]
                return [*messages[:-1], last]
    raise InvalidRequestError(
        "continue_final_message needs a last message with text", param="continue_final_message"
    )


def _cut_at_mark(prompt: str) -> str:
    end = prompt.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise TemplateError(
            "the chat template leaves out the end of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    if prompt.startswith(_CONTINUE_MARK, end):
        return prompt[:end]
    return prompt[:end].rstrip()  # the template strips its messages
