"""Bodies of llama.cpp's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.errors import shown

from vllmx_server.generating.fields import accepting, check_harmless, field_error
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.schema import intervals as limits

MAX_PROMPTS = 256
_SAMPLER = "this sampler is not built: use temperature, top_k, top_p or min_p"
_HARMLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n_cmpl": ((1,), "send the prompt several times"),
    "typical_p": ((1,), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "top_n_sigma": ((0, -1), _SAMPLER),
    "dry_multiplier": ((0,), "use repeat_penalty or frequency_penalty"),
    "samplers": (([],), "their order is fixed: leave it out"),
    "t_max_predict_ms": ((0,), "use --request-timeout-s"),
    "n_indent": ((0,), "use a grammar"),
    "post_sampling_probs": ((), "probabilities are those before sampling"),
    "lora": (([],), "adapters are not chosen by requests"),
    "min_keep": ((0,), "leave it out"),
}

_ELSEWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": _HARMLESS["n_cmpl"],
    "use_beam_search": ((), "use /v1/completions"),
}
"""Fields of vllmx's own APIs alone."""

_IGNORED = (
    "cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "repeat_last_n",
    "xtc_threshold", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "timings_per_token",
    "return_progress",
)  # fmt: skip
"""Fields that change no token here."""


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A body of /completion: llama.cpp's fields, and vllmx's for sampling."""

    prompt: str | list[str | limits.TokenId | list[str | limits.TokenId]]
    """A text, a list of token ids and texts as one prompt, or a list of such prompts."""
    n_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    """-1 and -2: as many as the context holds."""
    max_tokens: int | None = None
    """Another name of `n_predict`."""
    n_probs: limits.Likeliest | None = None
    repeat_penalty: limits.Factor | None = None
    logit_bias: Any = None
    """Pairs of a token id and a bias, which is false for a token that never comes; or a mapping."""
    return_tokens: bool | None = None

    def __post_init__(self) -> None:
        self.seed = None if self.seed == -1 else self.seed
        self.repetition_penalty = self.repeat_penalty or self.repetition_penalty
        if isinstance(self.logit_bias, list):
            self.logit_bias = dict(map(_bias, self.logit_bias))

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        SamplingFields.check(self)
        check_harmless(self, (*_HARMLESS, *_ELSEWHERE), {**_HARMLESS, **_ELSEWHERE})
        self.check_streamed("n_probs", self.n_probs)

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context holds."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return None if asked is None or asked < 0 else asked

    @property
    def is_batch(self) -> bool:
        return isinstance(self.prompt, list) and not any(isinstance(p, int) for p in self.prompt)

    def prompts(self) -> list[str | list[str | int]]:
        """Each a text, or texts and token ids in a row. Raises InvalidRequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or len(prompt) > (MAX_PROMPTS if self.is_batch else len(prompt)):
            raise field_error("prompt", f"has {len(prompt)} entries; give 1 to {MAX_PROMPTS}")
        if self.is_batch:
            return [each for each in prompt if not isinstance(each, int)]
        if any(isinstance(each, list) for each in prompt):
            raise field_error("prompt", "mixes token ids with lists: give prompts or one prompt")
        return [[each for each in prompt if not isinstance(each, list)]]


def _bias(entry: Any) -> tuple[str, float]:
    match entry:
        case [int(token), False]:
            return str(token), -100.0
        case [int(token), int() | float() as bias] if bias is not True:
            return str(token), bias
    raise field_error("logit_bias", f"has {shown(entry)}: give pairs of a token id and a number")


class Extra(msgspec.Struct, forbid_unknown_fields=True):
    """A file that is shown before the one to fill."""

    text: str
    filename: str = ""


class InfillRequest(CompletionRequest, kw_only=True):
    """A body of /infill; `prompt` is the text between `input_prefix` and the wanted one."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[Extra] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    def check(self) -> None:
        if not self.parse_special:
            raise field_error("parse_special", "= false is not served: leave it out")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[limits.TokenId]

    def check(self) -> None:
        """Nothing depends on another field."""


COMPLETION = msgspec.json.Decoder(accepting(CompletionRequest, *_IGNORED, *_HARMLESS))
INFILL = msgspec.json.Decoder(accepting(InfillRequest, *_IGNORED, *_HARMLESS))
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
