"""Bodies of the Open Inference Protocol."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.generating.fields import check_harmless, field_error
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.schema import intervals as limits

MAX_TEXTS = 256
_UNSHOWN = ("n", "best_of", "prompt_logprobs", "logprob_token_ids", "use_beam_search",
            "return_token_ids", "stream_options")  # fmt: skip


class Parameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of /v1/completions about sampling."""

    max_tokens: limits.MinTokens | None = None
    """None: 16, or what the context has room for."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        known = dict.fromkeys(_UNSHOWN, ((1,), "answers are one text: use /v1/completions"))
        check_harmless(self, _UNSHOWN, known, "parameters.")
        SamplingFields.check(self)


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: limits.Name | None = None
    text_input: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)

    def texts(self) -> list[str]:
        return [self.text_input]


class Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """Texts, a row each."""

    name: str
    datatype: Literal["BYTES"]
    shape: list[int]
    data: Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class Output(msgspec.Struct, forbid_unknown_fields=True):
    """One that is wanted; there is only one."""

    name: str


class InferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: limits.Name | None = None
    inputs: Annotated[list[Tensor], Meta(min_length=1, max_length=1)]
    outputs: list[Output] | None = None
    parameters: Parameters = msgspec.field(default_factory=Parameters)

    model = priority = cache_salt = truncate_prompt_tokens = None  # the path names the model
    is_normalized = True

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        shape, size = self.inputs[0].shape, len(self.inputs[0].data)
        if shape not in ([size], [size, 1]):
            raise field_error(
                "inputs[0].shape", f"is {shape} and data has {size} texts: give [{size}]"
            )

    def texts(self) -> list[str]:
        """The texts of the only tensor. Raises InvalidRequestError."""
        self.check()
        return self.inputs[0].data

    def pooling_texts(self) -> list[PoolingText]:
        if self.parameters != Parameters():
            raise field_error("parameters", "are for models that generate: leave them out")
        return [PoolingText(text) for text in self.inputs[0].data]


GENERATE = msgspec.json.Decoder(GenerateRequest)
INFER = msgspec.json.Decoder(InferRequest)
