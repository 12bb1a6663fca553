"""Tiny random T5s with a tokenizer of words, as folders, and what transformers answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB, START, END = 90, 0, 1
LENGTH = 160
"""Tokens of the longest prompt, beyond the distances that have buckets of their own."""


def make(family: str = "t5", seed: int = 0, **options: Any) -> Any:
    """A model of a family: t5, "v1_1" or mt5."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "d_model": 36, "d_kv": 10, "d_ff": 44, "num_layers": 2,
        "num_decoder_layers": 3, "num_heads": 3, "decoder_start_token_id": START,
        "pad_token_id": START, "eos_token_id": END, "n_positions": LENGTH,
    }  # fmt: skip
    if family == "mt5":
        model: Any = MT5ForConditionalGeneration(MT5Config(**{**sizes, **options}))
    else:
        first = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
        later = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        kind = first if family == "t5" else later
        model = T5ForConditionalGeneration(T5Config(**{**sizes, **kind, **options}))
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        scale = 1.5 if "relative_attention_bias" in name else 0.3
        scale = 2.0 if name.endswith(("o.weight", "wo.weight")) else scale
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=scale)
    return model


def save(model: Any, folder: Path) -> Path:
    """The model's folder, complete; the tokenizer ends a text with the end token."""
    model.save_pretrained(folder)
    words = {"<pad>": START, "</s>": END, **{f"w{n}": n for n in range(2, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A </s>", special_tokens=[("</s>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_gguf(model: Any, path: Path) -> Path:
    """The model as llama.cpp's converter writes it, with a Unigram tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_uint32("t5.decoder_block_count", config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(START)
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["<pad>", "</s>", "<unk>", *(f"▁w{n}" for n in range(3, VOCAB))])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([3, 3, 2, *[1] * (VOCAB - 3)])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 8)
    for name, tensor in model.state_dict().items():
        if not name.endswith("embed_tokens.weight"):
            if name == "lm_head.weight" and torch.equal(
                tensor, model.state_dict()["shared.weight"]
            ):
                continue
            writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """(n + 1, V) behind the start and each id of an answer."""
    ids = torch.tensor([[START, *answer]])
    found: torch.Tensor = model(input_ids=torch.tensor([prompt]), decoder_input_ids=ids).logits[0]
    return found


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' likeliest ids, the end among them."""
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(logits(model, prompt, answer)[-1].argmax()))
    return answer
