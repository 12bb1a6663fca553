"""Bodies of llama.cpp's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.errors import listing
from vllmx_core.sampling import MAX_BIAS_ENTRIES

from vllmx_server.generating.fields import accepting, check_harmless, closed, field_error
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.schema import intervals as limits

MAX_PROMPTS = 256
MAX_NAMES = 64
Text = Annotated[str, Meta(max_length=256)]
_MOST_BIASES = Meta(max_length=MAX_BIAS_ENTRIES)
BiasPairs = Annotated[list[tuple[limits.TokenId | Text, float | bool]], _MOST_BIASES]
BiasMapping = Annotated[dict[Text, float | bool], _MOST_BIASES]
_SAMPLER = "this sampler is not built: use temperature, top_k, top_p or min_p"
_HARMLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "typical_p": ((1,), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "top_n_sigma": ((0, -1), _SAMPLER),
    "dry_multiplier": ((0,), "use repeat_penalty or frequency_penalty"),
    "post_sampling_probs": ((), "probabilities are those before sampling"),
    "min_keep": ((0,), "leave it out"),
}

_ELSEWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((), "use /v1/completions"),
}
"""Fields of vllmx's own APIs alone."""

_IGNORED = (
    "cache_prompt", "n_keep", "n_discard", "n_cache_reuse", "repeat_last_n", "xtc_threshold",
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "t_max_prompt_ms", "t_max_predict_ms",
    "n_indent",
)  # fmt: skip
"""Fields that change no token here, and hints of editors, which end an answer early."""

_OFF: Mapping[str, Mapping[str, float]] = {
    "penalties": {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
"""The fields of a sampler, with their values where `samplers` leaves it out."""
_NOT_BUILT = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "infill", "adaptive_p")
"""Samplers that may be named: they are off, or end the answers of editors early."""


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    """A text, with the images that it shows."""

    prompt_string: str
    multimodal_data: Annotated[list[Any], Meta(max_length=0)] = []


Part = str | limits.TokenId | PromptObject
Parts = list[str | int]
"""Texts and token ids in a row."""


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter by its number in GET /lora-adapters."""

    id: Annotated[int, Meta(ge=0, lt=1 << 31)]
    scale: float


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A body of /completion: llama.cpp's fields, and vllmx's for sampling."""

    prompt: str | PromptObject | list[Part | list[Part]]
    """A text, a list of token ids and texts as one prompt, or a list of such prompts."""
    n_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    """-1 and -2: as many as the context holds."""
    max_tokens: int | None = None
    """Another name of `n_predict`."""
    n_probs: limits.Likeliest | None = None
    repeat_penalty: limits.Factor | None = None
    logit_bias: BiasPairs | BiasMapping | None = None  # type: ignore[assignment]
    """Pairs of a token id, or a text with such tokens, and a bias, which is false for tokens that
    never come; or a mapping, in which keys of digits are ids."""
    return_tokens: bool | None = None
    n_cmpl: limits.Choices | None = None
    """The number of answers to each prompt; also `n`."""
    samplers: Annotated[list[str], Meta(max_length=MAX_NAMES)] | None = None
    """The samplers that are on. Their order is fixed."""
    lora: Annotated[list[AdapterScale], Meta(max_length=MAX_NAMES)] | None = None
    """One adapter with scale 1, in place of the one that `model` names; others have scale 0."""
    response_fields: Annotated[list[Text], Meta(max_length=MAX_NAMES)] | None = None
    """The fields of an answer that are sent, each by its path with slashes."""

    def __post_init__(self) -> None:
        self.seed = None if self.seed == -1 else self.seed
        self.repetition_penalty = self.repeat_penalty or self.repetition_penalty
        self.n = self.n_cmpl or self.n
        if self.json_schema is not None:
            closed(self.json_schema)
        for name, fields in _OFF.items():
            if self.samplers and name not in self.samplers:
                for field, value in fields.items():
                    setattr(self, field, value)

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        SamplingFields.check(self)
        check_harmless(self, (*_HARMLESS, *_ELSEWHERE), {**_HARMLESS, **_ELSEWHERE})
        known = (*_OFF, *_NOT_BUILT)
        if unknown := [name for name in self.samplers or () if name not in known]:
            raise field_error(
                "samplers", f"names {listing(unknown)}: give some of {', '.join(known)}"
            )
        self.check_streamed("n_probs", self.n_probs)

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context holds."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return None if asked is None or asked < 0 else asked

    def name_adapter(self, names: Sequence[str]) -> None:
        """Has `model` name the adapter that `lora` asks for. Raises InvalidRequestError."""
        asked = [each for each in self.lora or () if each.scale != 0]
        if not asked:
            return
        if len(asked) > 1 or asked[0].scale != 1:
            raise field_error(
                "lora",
                "has other scales than one of 1: start with --lora-scaled PATH:SCALE or --lora A,B"
                " for factors and sums",
            )
        if asked[0].id >= len(names):
            raise field_error(
                "lora", f"has no adapter {asked[0].id} among {len(names)}: see GET /lora-adapters"
            )
        self.model = names[asked[0].id]

    @property
    def is_batch(self) -> bool:
        """The answer is a list."""
        return self._has_prompts or (self.n or 1) > 1

    @property
    def _has_prompts(self) -> bool:
        return isinstance(self.prompt, list) and not any(isinstance(p, int) for p in self.prompt)

    def prompts(self) -> list[str | Parts]:
        """Each a text, or texts and token ids in a row. Raises InvalidRequestError."""
        prompt = self.prompt
        if not isinstance(prompt, list):
            return [_text(prompt)]
        if not prompt or len(prompt) > (MAX_PROMPTS if self._has_prompts else len(prompt)):
            raise field_error("prompt", f"has {len(prompt)} entries; give 1 to {MAX_PROMPTS}")
        if not self._has_prompts:
            return [_parts(prompt)]
        return [_parts(each) if isinstance(each, list) else str(_text(each)) for each in prompt]


def _text(part: str | int | PromptObject) -> str:
    return part.prompt_string if isinstance(part, PromptObject) else str(part)


def _parts(row: Sequence[Part | list[Part]]) -> Parts:
    found: Parts = []
    for each in row:
        if isinstance(each, list):
            raise field_error("prompt", "mixes token ids with lists: give prompts or one prompt")
        found.append(each if isinstance(each, int) else _text(each))
    return found


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
