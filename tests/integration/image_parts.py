"""What tiny random models for text and images have in common."""

from __future__ import annotations

from typing import Any

import torch

PAD, START, END, BREAK = 90, 91, 92, 89
"""Tokens of the tiny vocabulary: an image's, those around it and between its lines."""
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def random_model(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = kind(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
