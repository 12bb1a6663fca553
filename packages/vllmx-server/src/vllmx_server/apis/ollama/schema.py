"""Bodies of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.generating.chat_body import MAX_MESSAGES, ChatMessage, ContentPart
from vllmx_server.generating.fields import accepting, check_harmless, field_error
from vllmx_server.generating.tools import MAX_TOOLS
from vllmx_server.schema import intervals as limits

MAX_INPUTS = 2048
LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""
_HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "mirostat": ((0,), "it is another sampler: use top_p or min_p"),
    "tfs_z": ((1,), "use top_p or min_p"),
    "typical_p": ((1,), "use top_p or min_p"),
    "penalize_newline": ((True, False), ""),
}


_IMAGE = "data:;base64,"


def bare_name(name: str) -> str:
    """The name of a model without the tag that clients add."""
    return name.removesuffix(LATEST)


_IGNORED = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
    "f16_kv", "vocab_only", "use_mmap", "use_mlock", "logits_all", "embedding_only", "mirostat_tau",
    "mirostat_eta", "num_gqa", "rope_frequency_base", "rope_frequency_scale", "new_topic_penalty",
)  # fmt: skip
"""Options that are the operator's, and one that Open WebUI sends and Ollama does not know."""


class Options(accepting(msgspec.Struct, *_IGNORED, *_HARMLESS)):  # type: ignore[misc]
    """Options of a model in Ollama; None: not given."""

    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    """-1 and -2: as many as the context holds."""
    temperature: limits.Temperature | None = None
    top_k: limits.TopK | None = None
    top_p: limits.TopP | None = None
    min_p: limits.MinP | None = None
    seed: limits.Seed | None = None
    stop: str | limits.Stops | None = None
    repeat_penalty: limits.Factor | None = None
    repeat_last_n: int | None = None
    """0: no `repeat_penalty`. Others are ignored: penalties see the whole answer and its prompt."""
    presence_penalty: limits.Penalty | None = None
    frequency_penalty: limits.Penalty | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of a chat that these are."""
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        found = {name: getattr(self, name) for name in (*names, "seed", "stop")}
        if self.repeat_last_n != 0:
            found["repetition_penalty"] = self.repeat_penalty
        return found

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the context holds."""
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    options: Options | None = None
    keep_alive: float | str | None = None
    """Ignored: `--idle-unload-s` says how long models stay."""

    def __post_init__(self) -> None:
        self.model = bare_name(self.model)

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.options is not None:
            check_harmless(self.options, _HARMLESS, _HARMLESS, "options.")


_UNREAD = ("tool_choice", "temperature", "top_p", "max_output_tokens")
"""Fields that clients send although Ollama reads none of them."""


class AnswerFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of both routes that generate."""

    stream: bool | None = None
    """None: yes."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """ "json", or a schema that the answer follows."""
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: limits.Likeliest | None = None

    request_id = None  # Ollama has none

    def __post_init__(self) -> None:
        ModelFields.__post_init__(self)
        self.stream = self.stream is not False

    @property
    def only_loads(self) -> bool:
        """Nothing is asked but that the model be loaded."""
        raise NotImplementedError

    def check(self) -> None:
        ModelFields.check(self)
        if self.only_loads and self.keep_alive in (0, "0", "0s", "0m"):
            raise field_error(
                "keep_alive",
                "= 0 unloads no model here: --idle-unload-s does, or POST"
                " /v1/models/unload with a key of --admin-key",
            )


class Message(ChatMessage):
    """One turn; other keys are ignored."""

    thinking: str | None = None
    images: list[str] | None = None
    """Base64."""
    tool_name: str | None = None

    def __post_init__(self) -> None:
        """Brings the turn into the fields of chats."""
        self.name = self.name or self.tool_name
        self.reasoning_content = self.thinking or None
        self.content = self.content or ("" if self.images or not self.tool_calls else None)
        if isinstance(self.content, str) and self.images:
            urls = [one if one.startswith("data:") else _IMAGE + one for one in self.images]
            parts = [ContentPart("image_url", image_url=url) for url in urls]
            self.content = [*parts, ContentPart("text", self.content)]


class ChatRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages


class GenerateRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | None = None
    suffix: str | None = None
    """The text behind the wanted one, for models that were trained to fill in."""
    system: str | None = None
    template: str | None = None
    """Refused unless empty: it is in Go's language."""
    context: list[limits.TokenId] | None = None
    """The tokens of an earlier answer and its prompt, which this one follows."""
    raw: bool | None = None
    """Applies no chat template to the prompt."""
    images: list[str] | None = None

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def check(self) -> None:
        AnswerFields.check(self)
        if self.template:
            raise field_error("template", "is the operator's, who gives it with --chat-template")
        if (self.raw or self.suffix) and (self.images or self.system):
            raise field_error("images" if self.images else "system", "excludes raw and suffix")
        if self.context and (self.suffix or self.images):
            raise field_error("suffix" if self.suffix else "images", "excludes context")


class EmbedRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """A body of /api/embed, or of /api/embeddings with a `prompt`."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] = ""
    prompt: str | None = None
    truncate: bool | None = None
    """False: inputs that are too long are refused, not cut."""
    dimensions: limits.Dimensions | None = None

    priority = cache_salt = None  # Ollama has neither
    is_normalized = True

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return None if self.truncate is False else -1

    def pooling_texts(self) -> list[PoolingText]:
        given = self.input if self.prompt is None else self.prompt
        return [PoolingText(text) for text in ([given] if isinstance(given, str) else given)]


class ModelRequest(accepting(msgspec.Struct, "verbose", "insecure")):  # type: ignore[misc]
    """A body of /api/show and /api/pull; `name` is an older name of `model`."""

    model: str = ""
    name: str = ""
    stream: bool | None = None

    def __post_init__(self) -> None:
        self.model = bare_name(self.model or self.name)

    def check(self) -> None:
        """Nothing depends on another field."""


CHAT = msgspec.json.Decoder(accepting(ChatRequest, *_UNREAD))
GENERATE = msgspec.json.Decoder(GenerateRequest)
EMBED = msgspec.json.Decoder(EmbedRequest)
MODEL = msgspec.json.Decoder(ModelRequest)
