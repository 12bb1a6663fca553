"""The bounds of every number that a user may send, in one table for HTTP and Python alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllmx_core.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_TOKENS_LIMIT = 1 << 24
MAX_TOKEN_ID = (1 << 31) - 1
"""The largest token id that a request may name; the model's vocabulary is checked later."""
MAX_LIFETIME_S = 30 * 86400
_MAX_COUNT = 1 << 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """A closed interval, perhaps without one value inside it."""

    low: float
    high: float
    whole: bool = True
    """Only integers; a float without a fraction is one."""
    excluded: int | None = None

    def checked(self, name: str, value: object) -> int | float:
        """The value as the field's type. Raises InvalidRequestError with `name` as its `param`."""
        kind = "an integer" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(f"{name} must be {kind}, got {value!r}", param=name)
        if self.whole and isinstance(value, float):
            if not value.is_integer():
                raise InvalidRequestError(f"{name} must be {kind}, got {value!r}", param=name)
            value = int(value)
        if not self.low <= value <= self.high or value == self.excluded:
            raise self.refusal(name, str(value))
        return value

    def refusal(self, name: str, value: str) -> InvalidRequestError:
        """The error for a value outside of the interval, as text."""
        without = "" if self.excluded is None else f" and not {self.excluded}"
        return InvalidRequestError(
            f"{name} must be between {_shown(self.low)} and {_shown(self.high)}{without},"
            f" got {value}",
            param=name,
        )


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _real(low: float, high: float) -> Bounds:
    return Bounds(low, high, whole=False)


BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {
        # Sampling. Within these bounds, float32 keeps finite logits finite.
        "temperature": _real(0, 100),
        "top_p": _real(0, 1),
        "top_k": Bounds(-1, _MAX_COUNT),
        "min_p": _real(0, 1),
        "presence_penalty": _real(-2, 2),
        "frequency_penalty": _real(-2, 2),
        "repetition_penalty": _real(1e-6, 100),
        "logit_bias": _real(-100, 100),
        "length_penalty": _real(-10, 10),
        "seed": Bounds(-(1 << 63), (1 << 64) - 1),
        # Counts and lengths.
        "n": Bounds(1, MAX_CHOICES),
        "best_of": Bounds(1, MAX_CHOICES),
        "max_tokens": Bounds(1, MAX_TOKENS_LIMIT),
        "min_tokens": Bounds(0, MAX_TOKENS_LIMIT),
        "thinking_token_budget": Bounds(-1, MAX_TOKENS_LIMIT),
        "budget_tokens": Bounds(1024, MAX_TOKENS_LIMIT),
        "truncate_prompt_tokens": Bounds(-1, MAX_TOKENS_LIMIT, excluded=0),
        "logprobs": Bounds(-1, MAX_TOKENS_LIMIT),
        "max_tool_calls": Bounds(0, _MAX_COUNT),
        "dimensions": Bounds(1, 1 << 20),
        "top_n": Bounds(0, 1 << 20),
        # Everything else.
        "token_id": Bounds(0, MAX_TOKEN_ID),
        "priority": Bounds(-(1 << 31), (1 << 31) - 1),
        "lifetime_s": Bounds(1, MAX_LIFETIME_S),
    }
)
"""Bounds by field name; a field with another name uses the bounds of its kind."""
