"""Sampling parameters of a request and the counter-based draw that every backend repeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from vllmx_core.arrays import Array, Arrays
from vllmx_core.bounds import BOUNDS, MAX_TOKEN_ID
from vllmx_core.errors import InvalidRequestError, listing
from vllmx_core.plan import I32, U64
from vllmx_core.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
"""`EngineConfig.max_logprobs`, unless it is set."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIAS_ENTRIES = 1024
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 1 << 19
"""More than any vocabulary has."""
MAX_LOGPROB_IDS = 1000
MAX_BAD_WORDS = 256
_GREEDY_TEMPERATURE = 1e-5
"""A smaller temperature is greedy, as in vLLM: float32 could not divide by it."""
_GREEDY_TOP_P = 1e-6
"""A smaller share is less than one of a million equally likely tokens has."""
_MAX_ENTRIES = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_IDS,
    "logprob_token_ids": MAX_LOGPROB_IDS,
}
_TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)], ...]
_NUMBERS = {
    name: BOUNDS[name]
    for name in (
        "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "max_tokens", "min_tokens", "seed", "logprobs",
        "thinking_token_budget", "truncate_prompt_tokens",
    )
} | {"prompt_logprobs": BOUNDS["logprobs"]}  # fmt: skip
_MAY_BE_NONE = frozenset(
    ("best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget",
     "truncate_prompt_tokens")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for turning logits into tokens and for stopping. Names and meanings are vLLM's.

    Construction checks every value against `BOUNDS` and raises `InvalidRequestError`
    with the field in `param`. Ids are checked against the vocabulary by `check_vocab`, once the
    model is known.
    """

    n: int = 1
    best_of: int | None = None
    """Generate this many and return the `n` of greatest mean log-probability."""
    temperature: float = 1.0
    top_p: float = 1.0
    """0: greedy."""
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
    logprob_token_ids: tuple[int, ...] = ()
    """The ids whose log-probabilities are wanted for each generated token, in place of the
    likeliest."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """The number of last tokens to read of a longer prompt; -1: as many as leave room for
    `max_tokens`."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the answer."""
    thinking_token_budget: int | None = None
    """The number of tokens of thoughts after which their end is forced, in a conversation with a
    model that thinks; -1: never."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in _MAX_ENTRIES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                if isinstance(value, Sized):
                    _size(name, len(value), _MAX_ENTRIES[name])  # before they are walked
                object.__setattr__(self, name, tuple(value))
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        if self.logprob_token_ids is None:
            object.__setattr__(self, "logprob_token_ids", ())
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        for name, bounds in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            checked = bounds.checked(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.temperature < _GREEDY_TEMPERATURE or self.top_p < _GREEDY_TOP_P:
            object.__setattr__(self, "temperature", 0.0)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(
                f"best_of must be at least n, {self.n}, got {self.best_of}", param="best_of"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}",
                param="min_tokens",
            )

    def _check_lists(self) -> None:
        _strings("stop", self.stop)
        _strings("bad_words", self.bad_words)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if ids:
                object.__setattr__(self, name, _token_ids(name, ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so nothing could be generated: leave it out or name"
                " at least one id",
                param="allowed_token_ids",
            )
        _size("logit_bias", len(self.logit_bias), MAX_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            BOUNDS["token_id"].checked("logit_bias", token)
            BOUNDS["logit_bias"].checked("logit_bias", bias)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for an id that is not below `vocab_size`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
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


def _size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequestError(
            f"{name} has {size} entries, at most {limit} are allowed", param=name
        )


def _token_ids(name: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids as integers. A vocabulary's worth of ids is usual, so they are walked once, and not
    by Python."""
    _size(name, len(ids), _MAX_ENTRIES[name])
    try:
        return msgspec.convert(ids, _TokenIds)
    except msgspec.ValidationError:
        bounds = BOUNDS["token_id"]
        return tuple(int(bounds.checked(name, token)) for token in ids)


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
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(xp: Arrays, counter: Iterable[Array], key: Iterable[Array]) -> list[Array]:
    """Ten rounds of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC11). The four words of the counter and the two of the key are arrays of 32-bit words as
    `Arrays.upload` makes them, which broadcast together. Returns four arrays of random words."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = xp.word_product(_M0, c0)
        high1, low1 = xp.word_product(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return [c0, c1, c2, c3]


def _noise(xp: Arrays, block: Array, position: Array, low: Array, high: Array) -> list[Array]:
    """Gumbel noise from each of the four words of a block."""
    zero = block ^ block  # of any shape: this is compiled once for all
    words = philox4x32(xp, (block, position, zero, zero), (low, high))
    uniform = [xp.widest(word >> 9) * 2.0**-23 + 2.0**-24 for word in words]
    return [xp.cast(-xp.log(-xp.log(u)), xp.float32) for u in uniform]


def gumbel_noise(xp: Arrays, x: Array, seed: U64, position: I32) -> Array:
    """(N, V) float32 noise for the logits x (N, V): argmax(x + noise) is a draw from the softmax.

    A row depends on its seed and position alone. Token `id` has word `id & 3` of the block with
    counter (id >> 2, position, 0, 0) and key (seed low, seed high); u = (word >> 9) * 2**-23 +
    2**-24, so that neither 0 nor 1 occurs and float32 holds the value exactly; the noise is
    -log(-log(u)), computed in `Arrays.widest`.
    """
    halves = np.ascontiguousarray(seed).view(np.uint32).reshape(-1, 2)
    columns = [position.astype(np.uint32)[:, None], halves[:, :1], halves[:, 1:]]
    position, low, high = (xp.upload(x, column) for column in columns)  # (N, 1)
    blocks = xp.arange_like(low, (x.shape[1] + 3) // 4)[None]
    noise = xp.stack(xp.fused(_noise)(blocks, position, low, high), -1)  # (N, blocks, 4)
    return noise.reshape(len(low), -1)[:, : x.shape[1]]
