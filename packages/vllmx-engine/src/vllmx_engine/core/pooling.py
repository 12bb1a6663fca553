"""The description of a model that answers with vectors or scores, for its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.model import ModelShape
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.registry import architecture_names

from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import Activation, PoolingInfo, PoolingTask

JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer"
    " the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The question that Qwen3-Reranker was trained to answer with "yes" or "no"."""
_ANSWERS = ["no", "yes"]


def with_score_tokens(checkpoint: Checkpoint, task: str) -> Checkpoint:
    """A generating model that is loaded to score, or whose GGUF file says that it does: the ids of
    the tokens that it answers with, which config.json may name as `classifier_from_token`. Raises
    UnsupportedModelError where its tokenizer has no such tokens."""
    config = checkpoint.config
    generates = any(name.endswith("ForCausalLM") for name in architecture_names(config))
    scores = task == "score" or (task == "auto" and config.get("scores_pairs") is True)
    if not scores or not generates or "score_tokens" in config:
        return checkpoint
    words = config.get("classifier_from_token", _ANSWERS)
    if not isinstance(words, list) or len(words) != 2:
        raise UnsupportedModelError(
            f"classifier_from_token is {shown(words)}, not the two tokens that stand for no and yes"
        )
    tokenizer = _tokenizer(checkpoint)
    ids = [tokenizer.token_to_id(str(word)) for word in words]
    if None in ids:
        raise UnsupportedModelError(
            f"--task score needs the tokens {shown(words)}, which the model's tokenizer does not"
            " have: load a reranker"
        )
    return replace(checkpoint, config=config | {"score_tokens": ids})


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.tokenizer is None:
        return Tokenizer.from_folder(checkpoint.path)
    from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer  # a folder needs none of it

    return gguf_tokenizer(checkpoint.tokenizer)


def pooling_info(checkpoint: Checkpoint, shape: ModelShape) -> PoolingInfo | None:
    """None for a model that generates text."""
    config = checkpoint.config
    if shape.output == "tokens":
        return None
    size = shape.output_size
    if shape.output == "token_vectors":
        return PoolingInfo(tasks=["score", "token_embed"], size=size)
    if shape.output == "sparse_vectors":
        embeds: list[PoolingTask] = ["embed", "score"]
        return PoolingInfo(tasks=embeds, size=size, normalize=False, activation="log1p")
    if shape.output == "vectors":
        modules = config.get("modules")
        normalize = modules is None or any(each["kind"] == "normalize" for each in modules)
        prompts, default = _prompts(config)
        return PoolingInfo(
            tasks=["embed", "score"],
            size=shape.output_size,
            normalize=normalize,
            prompts=prompts,
            default_prompt=default,
        )
    if "score_tokens" in config:
        return PoolingInfo(tasks=["score"], size=1, activation="yes", pair=JUDGE)
    tasks: list[PoolingTask] = ["score", "classify"] if shape.output_size == 1 else ["classify"]
    return PoolingInfo(
        tasks=tasks,
        size=shape.output_size,
        labels=_labels(config, shape.output_size),
        activation=_activation(config, shape.output_size),
    )


def check_task(task: str, info: PoolingInfo | None) -> None:
    """Raises UnsupportedModelError for a classifier of several labels that is to score."""
    if task == "score" and info is not None and task not in info.tasks:
        raise UnsupportedModelError(
            f"--task score: the model has {info.size} labels ({shown(info.labels[0])} ...), and a"
            " score is of one: leave --task out, or load a reranker, such as"
            " BAAI/bge-reranker-v2-m3"
        )


def _prompts(config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    settings = config.get("text_settings", {})
    given, default = settings.get("prompts"), settings.get("default_prompt_name")
    found = given.items() if isinstance(given, dict) else ()
    prompts = {str(name): text for name, text in found if isinstance(text, str)}
    return prompts, default if isinstance(default, str) and default in prompts else None


def _labels(config: Mapping[str, Any], count: int) -> list[str]:
    names = config.get("id2label")
    named = names if isinstance(names, dict) else {}
    return [str(named.get(str(index), f"LABEL_{index}")) for index in range(count)]


def _activation(config: Mapping[str, Any], count: int) -> Activation:
    """Returns the activation that sentence-transformers and transformers apply."""
    own = config.get("sentence_transformers")
    function = own.get("activation_fn") if isinstance(own, dict) else None
    if isinstance(function, str):
        known: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}
        name = function.rsplit(".", 1)[-1]
        if name not in known:
            raise UnsupportedModelError(f"config.json names the activation {shown(function)}")
        return known[name]
    several = config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if count == 1 or several else "softmax"
