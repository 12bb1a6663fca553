"""Tiny random models for text and images, and what transformers says of their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from vllmx_engine.images.processor import levels_of

PAD, START, END = 90, 91, 92
"""Tokens of the tiny vocabulary: an image's, and those around it."""


def qwen3_vl() -> Any:
    """Four layers over a tower of three, which gives two layers more."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": 48, "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=PAD, vision_start_token_id=START, vision_end_token_id=END,
        video_token_id=93, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = Qwen3VLForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
_MARKS = {"<|image_pad|>": PAD, "<|vision_start|>": START, "<|vision_end|>": END}
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %} w11"
)


def save(model: Any, folder: Path) -> Path:
    """The checkpoint's folder, with a tokenizer of the words w0, w1 ... and a chat template."""
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(97) if index not in _MARKS.values()}
    tokenizer = Tokenizer(WordLevel({**words, **_MARKS}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


LEVELS = levels_of(PROCESSOR)


def image(rows: int, columns: int, seed: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches and grid of an image that is made up."""
    random = np.random.default_rng(seed)
    greys = random.integers(0, 256, (rows * columns, 3 * 2 * 4 * 4))
    return LEVELS[0][greys], (1, rows, columns)


def grey(patches: np.ndarray) -> np.ndarray:
    """The levels that such patches stand for."""
    return np.searchsorted(LEVELS[0], patches).astype(np.uint8)


@torch.inference_mode()
def logits(model: Any, ids: list[int], images: list[Any]) -> np.ndarray:
    """(T, V) by transformers."""
    given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    given["mm_token_type_ids"] = (given["input_ids"] == PAD).int()
    if images:
        given["pixel_values"] = torch.from_numpy(np.concatenate([one for one, _ in images]))
        given["image_grid_thw"] = torch.tensor([grid for _, grid in images])
    model.model.rope_deltas = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where a machine is busy
    try:
        found: np.ndarray = model(**given).logits[0].numpy()
    finally:
        torch.set_num_threads(threads)
    return found
