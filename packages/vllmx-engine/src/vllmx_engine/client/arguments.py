"""Arguments of `LLM` that are one for all prompts or one for each; LoRA adapters as vLLM names
them."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.records import Record
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.client.request import RequestOptions


class LoRARequest(Record):
    """An adapter for a request. It is read when its name is first used, or used with another
    path."""

    lora_name: str
    lora_int_id: int
    """A number that vLLM wants; here names tell adapters apart."""
    lora_path: str
    """A PEFT folder or a GGUF file."""


LoRAArgument = LoRARequest | None | Sequence[LoRARequest | None]


ParamsArgument = SamplingParams | Sequence[SamplingParams] | None


def one_each(params: ParamsArgument, count: int) -> list[SamplingParams | None]:
    """The parameters of each prompt. Raises InvalidRequestError for another type or number."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(
        isinstance(each, SamplingParams) for each in params
    ):
        raise InvalidRequestError(
            f"sampling_params is {shown(params)}: give one SamplingParams, or a list of them",
            param="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling_params were given for {count} prompts: give one for each, or"
            " one for all",
            param="sampling_params",
        )
    return list(params)


def options_of(
    engine: InlineEngine, count: int, priority: Sequence[int] | None, lora: LoRAArgument
) -> list[RequestOptions]:
    """The options of each of `count` requests: a priority for each, and one adapter for all or one
    for each. Raises InvalidRequestError for another number, and what reading an adapter raises."""
    ranks = [0] * count if priority is None else priority
    loras = [lora] * count if lora is None or isinstance(lora, LoRARequest) else lora
    for what, given in (("priorities", ranks), ("LoRA requests", loras)):
        if len(given) != count:
            raise InvalidRequestError(
                f"{len(given)} {what} were given for {count} prompts: give one for each",
                param="lora_request" if given is loras else "priority",
            )
    paths: dict[str, str] = {}
    for one in (each for each in loras if each is not None):
        if one.lora_name not in paths:
            _hold(engine, one)
        if paths.setdefault(one.lora_name, one.lora_path) != one.lora_path:
            raise InvalidRequestError(
                f"adapter {shown(one.lora_name)} has two paths in one call: name each by itself",
                param="lora_request",
            )
    return [
        RequestOptions(priority=rank, adapter="" if each is None else each.lora_name)
        for rank, each in zip(ranks, loras, strict=True)
    ]


def _hold(engine: InlineEngine, lora: LoRARequest) -> None:
    """Reads an adapter unless it is held already."""
    held = engine.on_core(lambda core: core.adapters.infos)
    if any((one.name, one.path) == (lora.lora_name, lora.lora_path) for one in held):
        return
    found = engine.on_core(lambda core: core.adapters.files).read(lora.lora_name, lora.lora_path)
    engine.on_core(lambda core: core.adapters.add(found))
