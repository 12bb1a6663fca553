"""Every error that vllmx raises on purpose.

Messages name the value, the limit and the remedy, because they are shown to users as they are: by
the CLI (exit code 2) and by the server (an OpenAI-shaped error with `http_status`). Anything that
is not a `VllmxError` is a bug of ours; its text never leaves the process.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Self

SHOWN_CHARACTERS = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = SHOWN_CHARACTERS
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 8


def shown(value: object) -> str:
    """A value out of somebody else's file or request for a message: as Python writes it, so that
    what cannot be printed is escaped, with the middle left out where it is long."""
    return _SHORT.repr(value)[: 2 * SHOWN_CHARACTERS]


def shown_entry(values: Mapping[str, object], key: str) -> str:
    """A mapping's entry, for a message: a text without quotes."""
    if key not in values:
        return "(absent)"
    value = shown(values[key])
    return value[1:-1] if isinstance(values[key], str) else value


def excerpt(text: str, limit: int = 200) -> str:
    """The beginning of somebody else's prose, a library's reason for one, for a message."""
    return text if len(text) <= limit else text[:limit] + " ..."


def listing(items: Collection[object], limit: int = 20) -> str:
    """The first `limit` items for a message, and how many more there are."""
    found = ", ".join(map(shown, islice(items, limit)))
    rest = len(items) - limit
    return found if rest <= 0 else f"{found} and {rest} more"


class VllmxError(Exception):
    """Base of all errors with a message that a user may read.

    Args:
        message: one sentence with the value, the limit and the remedy.
        param: the request field, flag or option at fault, where there is one.
    """

    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        if not message.isascii():  # half a character of a file's name can be neither sent nor shown
            message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(VllmxError, ValueError):
    """A request that can never be served unchanged."""

    http_status = 400
    code = "invalid_request"


class TemplateError(InvalidRequestError):
    """The chat template refused the conversation or broke its bounds."""

    code = "chat_template_error"


class GrammarError(InvalidRequestError):
    """A grammar that no answer can follow, or that takes too much work."""

    code = "invalid_grammar"


class GrammarLimitError(VllmxError):
    """An answer reached a place in its grammar that takes more work than one token may. Other
    answers with the same grammar may never reach it."""

    code = "grammar_limit"


class ContextLengthError(InvalidRequestError):
    """Prompt and wanted output do not fit into the model's context."""

    code = "context_length_exceeded"
    num_tokens: int | None = None
    """The tokens of the prompt, where it is too long for a context of `limit`; at least so many."""
    limit: int | None = None

    @classmethod
    def of_prompt(cls, message: str, num_tokens: int, limit: int) -> Self:
        """The error for a prompt that is too long."""
        error = cls(message, param="prompt")
        error.num_tokens, error.limit = num_tokens, limit
        return error


class ConfigError(VllmxError, ValueError):
    """A flag, environment variable, config file or option with a value that cannot be used."""

    http_status = 400
    code = "invalid_config"


class ModelNotFoundError(VllmxError):
    """The named model is not where it was looked for, or not served here."""

    http_status = 404
    code = "model_not_found"


class UnsupportedModelError(VllmxError):
    """No installed plugin knows this architecture, weight format or quantisation."""

    http_status = 400
    code = "unsupported_model"


class AdapterError(VllmxError):
    """A LoRA adapter that is damaged, does not fit the model or has no room."""

    http_status = 400
    code = "invalid_adapter"


class UnsupportedOpError(UnsupportedModelError):
    """The chosen backend lacks an op or an option that the model needs."""


class OpError(VllmxError):
    """A model's forward pass calls an op with wrong operands: a mistake in the model's file."""

    code = "model_error"


class WeightFormatError(VllmxError):
    """A weight file that is damaged, truncated or does not match the model's config."""

    http_status = 400
    code = "invalid_weights"


class CapacityError(VllmxError):
    """Something does not fit into the available memory."""

    http_status = 400
    code = "out_of_capacity"


class BackendUnavailableError(VllmxError):
    """The wanted backend cannot run here."""

    http_status = 503
    code = "backend_unavailable"


class PluginError(VllmxError):
    """A plugin that cannot be loaded, or two that claim the same name."""

    code = "plugin_error"


class PluginClashError(PluginError):
    """Two plugins claim one name; guessing between them would be wrong."""

    code = "plugin_clash"


class QueueFullError(VllmxError):
    """More requests wait than `max_queue` allows.

    `retry_after_s` is what the server sends as `Retry-After`.
    """

    http_status = 429
    code = "queue_full"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class GrammarCheckError(VllmxError):
    """The check of a grammar did not finish; the grammar itself may be valid."""

    http_status = 503
    code = "grammar_check_unavailable"
    retry_after_s = 5.0
    """Sent by the server as `Retry-After`."""


class QueueTimeoutError(VllmxError):
    """The request waited for its turn longer than it may."""

    http_status = 503
    code = "queue_timeout"
    retry_after_s = 5.0
    """Sent by the server as `Retry-After`."""


class EngineDeadError(VllmxError):
    """The engine core went away while the request was in flight; it is being restarted."""

    http_status = 503
    code = "engine_unavailable"


class StepTimeoutError(EngineDeadError):
    """A step did not finish within `step_timeout_s`: the device hangs."""

    code = "step_timeout"


class RankLostError(EngineDeadError):
    """A rank of the model died, hangs or failed, which ends all of them."""

    code = "rank_lost"


class NonFiniteLogitsError(VllmxError):
    """The model produced NaN or infinite logits for this request alone."""

    http_status = 500
    code = "non_finite_logits"
