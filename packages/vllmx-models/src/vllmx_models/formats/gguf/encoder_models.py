"""Metadata shared by GGUF files of encoders: sizes and pooling."""

from __future__ import annotations

from typing import Any

from vllmx_core.errors import UnsupportedModelError

from vllmx_models.formats.gguf.hyperparameters import GGUFHeader

_POOLING = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
"""Scores of a pair, by a head that the file has."""
PAIR_HEAD = "cls.output"
_ANSWERS = [1, 0]
"""The rows in which llama.cpp's converter puts "no" and "yes" of Qwen3-Reranker."""


def check_both_ways(header: GGUFHeader) -> None:
    """Raises WeightFormatError for causal attention."""
    if header.flag("attention.causal", True):
        raise header.error("attention.causal", "must be false: tokens see each other both ways")


def encoder_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The keys of config.json that every encoder has; `honoured` as in `refuse_quirks`."""
    header.refuse_quirks("attention.causal", *honoured)
    check_both_ways(header)
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    eps = header.number("attention.layer_norm_epsilon")
    types = header.tensors.get("token_types.weight")
    return {
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "head_dim": max(hidden // heads, 1),
        "max_position_embeddings": header.integer("context_length"),
        "layer_norm_eps": eps,
        "norm_eps": eps,
        "type_vocab_size": 0 if types is None else types.shape[0],
    }


def text_modules(header: GGUFHeader) -> dict[str, Any]:
    """`modules` of the config as `vllmx_core.text_modules` reads them from folders; for a reranker
    `scores_pairs`, and `score_rows` if its head only has rows for "no" and "yes"; empty if the file
    does not specify pooling."""
    kind = header.integer("pooling_type", 0, low=0, high=1 << 8)
    if kind == 0:
        return {}
    if kind == _RANK:
        head = header.tensors.get(f"{PAIR_HEAD}.weight")
        has_both = head is not None and len(head.shape) > 1 and head.shape[0] == len(_ANSWERS)
        return {"scores_pairs": True} | ({"score_rows": _ANSWERS} if has_both else {})
    if kind not in _POOLING:
        raise UnsupportedModelError(
            f"{header.path}: {header.architecture}.pooling_type = {kind} is not known here; known:"
            " 1 (mean), 2 (first token), 3 (last token), 4 (scores)"
        )
    return {"modules": [{"kind": "pooling", "pooling": _POOLING[kind]}, {"kind": "normalize"}]}


def labels(header: GGUFHeader) -> dict[str, Any]:
    """`num_labels`, if the file has a head of scores."""
    head = header.tensors.get(f"{PAIR_HEAD}.weight")
    return {} if head is None else {"num_labels": head.shape[0] if len(head.shape) > 1 else 1}
