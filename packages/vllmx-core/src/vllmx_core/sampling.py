"""Sampling parameters of a request and the counter-based draw that every backend repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from vllmx_core.errors import InvalidRequestError, listing
from vllmx_core.plan import F32, U32
from vllmx_core.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
"""`EngineConfig.max_logprobs`, unless it is set."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIAS_ENTRIES = 1024
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 1 << 19
"""More than any vocabulary has."""
MAX_BAD_WORDS = 256
MAX_CHOICES = 128
MAX_TOKENS_LIMIT = 1 << 24
_MAX_ENTRIES = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_IDS,
}
_TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. Names and meanings are vLLM's.

    Construction checks every value against its closed interval and raises `InvalidRequestError`
    with the field in `param`. Ids are checked against the vocabulary by `check_vocab`, once the
    model is known.
    """

    n: int = 1
    best_of: int | None = None
    """Generate this many and return the `n` of greatest mean log-probability."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    """None: none. k: of the sampled token and the k likeliest; -1: and all of the vocabulary. What
    is served is bounded by `EngineConfig.max_logprobs`."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """The number of last tokens to read of a longer prompt; -1: as many as leave room for
    `max_tokens`."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must look like."""
    thinking_token_budget: int | None = None
    """The number of tokens of thoughts after which their end is forced, in a conversation with a
    model that thinks; -1: never."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                if isinstance(value, Sized):
                    _size(name, len(value), _MAX_ENTRIES[name])  # before they are walked
                object.__setattr__(self, name, tuple(value))
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_intervals()
        self._check_lists()

    def _check_intervals(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 1 << 30)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_TOKENS_LIMIT)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1, MAX_TOKENS_LIMIT)
        if self.thinking_token_budget not in (None, -1):
            _integer("thinking_token_budget", self.thinking_token_budget, 0, MAX_TOKENS_LIMIT)
        if self.truncate_prompt_tokens not in (None, -1):
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKENS_LIMIT)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, -1, MAX_TOKENS_LIMIT)

    def _check_lists(self) -> None:
        _strings("stop", self.stop)
        _strings("bad_words", self.bad_words)
        _token_ids("stop_token_ids", self.stop_token_ids)
        _token_ids("allowed_token_ids", self.allowed_token_ids or ())
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so nothing could be generated: leave it out or name"
                " at least one id",
                param="allowed_token_ids",
            )
        _size("logit_bias", len(self.logit_bias), MAX_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 1 << 31)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for an id that is not below `vocab_size`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias)),
        ):
            if ids and max(ids) >= vocab_size:
                bad = [token for token in ids if token >= vocab_size]
                raise InvalidRequestError(
                    f"{name} names {listing(bad)}, but the vocabulary has token ids 0 to"
                    f" {vocab_size - 1}",
                    param=name,
                )

    @property
    def num_choices(self) -> int:
        """Generated: n, or best_of."""
        return self.best_of or self.n

    @property
    def needs_counts(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be between {low} and {high}, got {value}", param=name
        )


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}", param=name)
    if not low <= value <= high or (open_low and value == low):
        above = f"above {low:g} and at most" if open_low else f"between {low:g} and"
        raise InvalidRequestError(f"{name} must be {above} {high:g}, got {value}", param=name)


def _size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequestError(
            f"{name} has {size} entries, at most {limit} are allowed", param=name
        )


def _token_ids(name: str, ids: tuple[int, ...]) -> None:
    """A vocabulary's worth of ids is usual, so they are walked once, and not by Python."""
    if not ids:
        return
    _size(name, len(ids), _MAX_ENTRIES[name])
    try:
        msgspec.convert(ids, _TokenIds)
    except msgspec.ValidationError:
        wrong = next(token for token in ids if type(token) is not int or token < 0)
        raise InvalidRequestError(
            f"{name} must hold integers of at least 0, got {wrong!r}", param=name
        ) from None


def _strings(name: str, values: tuple[str, ...]) -> None:
    _size(name, len(values), _MAX_ENTRIES[name])
    for text in values:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must hold strings, got {text!r}", param=name)
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"{name} entries must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}",
                param=name,
            )


# --- the draw -----------------------------------------------------------------------------------
# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: U32, key: tuple[int, int]) -> U32:
    """Ten rounds of Philox4x32. counter: (N, 4); returns (N, 4) random words."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform_noise(seed: int, position: int, vocab_size: int) -> F32:
    """(V,) uniform numbers in (0, 1) for one draw: word `id & 3` of the block with counter
    (id >> 2, position, 0, 0) and key (seed low, seed high), u = (word >> 9) * 2**-23 + 2**-24,
    so that neither 0 nor 1 occurs and float32 holds the value exactly."""
    blocks = (vocab_size + 3) // 4
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1] = np.uint32(position)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)).reshape(-1)
    noise = (words[:vocab_size] >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)
    return (noise + np.float32(2.0**-24)).astype(np.float32)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> F32:
    """(V,) Gumbel noise -log(-log(u)); argmax(logits / temperature + noise) is a draw from the
    softmax."""
    uniform = uniform_noise(seed, position, vocab_size).astype(np.float64)
    return (-np.log(-np.log(uniform))).astype(np.float32)
