"""Encoders that transformers does not have, as their authors' formulas over tensors that are named
as in their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from vllmx_core.plan import F32

Tensor = torch.Tensor


class Formula:
    """Random tensors, made when they are first asked for, and the layers that read them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.tensors = config, dict[str, Tensor]()
        self._random = torch.Generator().manual_seed(7)

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            centre = 1.0 if name.lower().endswith("norm.weight") else 0.0
            self.tensors[name] = torch.randn(shape, generator=self._random) * 0.15 + centre
        return self.tensors[name]

    def linear(self, x: Tensor, name: str, rows: int, *, bias: bool = True) -> Tensor:
        added = self.tensor(f"{name}.bias", rows) if bias else None
        return functional.linear(x, self.tensor(f"{name}.weight", rows, x.shape[-1]), added)

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = x.shape[-1]
        weight, bias = self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size)
        return functional.layer_norm(x, (size,), weight, bias, self.config["layer_norm_eps"])

    def embedded(self, tokens: Tensor, types: Tensor, norm: str) -> Tensor:
        config = self.config
        words, size = config["vocab_size"], config["hidden_size"]
        x = self.tensor("embeddings.word_embeddings.weight", words, size)[tokens]
        kinds = config["type_vocab_size"]
        return self.norm(
            x + self.tensor("embeddings.token_type_embeddings.weight", kinds, size)[types], norm
        )

    def heads(self, x: Tensor) -> Tensor:
        """(n, E) -> (H, n, D)."""
        return x.view(len(x), self.config["num_attention_heads"], -1).transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        shares = (scores if bias is None else scores + bias).softmax(-1)
        found: Tensor = (shares @ v).transpose(0, 1).reshape(q.shape[1], -1)
        return found


def alibi(heads: int, length: int) -> Tensor:
    """Slopes as arXiv:2108.12409 has them for 4 and for 6 heads."""
    slopes = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}
    places = torch.arange(length)
    return -torch.tensor(slopes[heads])[:, None, None] * (places[:, None] - places).abs()


def jina_bert(formula: Formula, tokens: Tensor, types: Tensor) -> Tensor:
    config = formula.config
    size, inner = config["hidden_size"], config["intermediate_size"]
    gates: dict[str, Callable[[Tensor], Tensor]] = {
        "geglu": functional.gelu,
        "reglu": functional.relu,
    }
    act = gates[config["feed_forward_type"]]
    x = formula.embedded(tokens, types, "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        own = f"{at}.attention.self"
        q, k, v = (
            formula.heads(formula.linear(x, f"{own}.{name}", size))
            for name in ("query", "key", "value")
        )
        y = formula.attend(q, k, v, alibi(config["num_attention_heads"], len(tokens)))
        y = formula.linear(y, f"{at}.attention.output.dense", size)
        x = formula.norm(x + y, f"{at}.attention.output.LayerNorm")
        gate, up = formula.linear(x, f"{at}.mlp.gated_layers", 2 * inner, bias=False).chunk(2, -1)
        x = formula.norm(
            x + formula.linear(act(gate) * up, f"{at}.mlp.wo", size), f"{at}.mlp.layernorm"
        )
    return x


def nomic_moe(formula: Formula, tokens: Tensor, types: Tensor) -> Tensor:
    config = formula.config
    size, inner, count = config["n_embd"], config["n_inner"], config["num_experts"]
    x = formula.embedded(tokens, types, "emb_ln")
    for layer in range(config["n_layer"]):
        at = f"encoder.layers.{layer}"
        qkv = formula.linear(x, f"{at}.attn.Wqkv", 3 * size).chunk(3, -1)
        q, k, v = (formula.heads(part) for part in qkv)
        q, k = (turned(part, config["rotary_emb_base"]) for part in (q, k))
        y = formula.linear(formula.attend(q, k, v), f"{at}.attn.out_proj", size)
        x = formula.norm(x + y, f"{at}.norm1")
        if layer % config["moe_every_n_layers"] != 1:
            y = functional.gelu(formula.linear(x, f"{at}.mlp.fc1", inner))
            y = formula.linear(y, f"{at}.mlp.fc2", size)
        else:
            scores = formula.linear(x, f"{at}.mlp.router.layer", count, bias=False).softmax(-1)
            best, chosen = scores.topk(config["moe_top_k"], -1)
            shares = torch.zeros_like(scores).scatter(-1, chosen, best)
            first, second = (
                formula.tensor(f"{at}.mlp.experts.mlp.{name}", count * inner, size)
                for name in ("w1", "w2")
            )
            biased = config.get("moe_bias", True)  # GGUF files leave it out
            y = formula.tensor(f"{at}.mlp.experts.bias", size) if biased else torch.zeros(size)
            for expert in range(count):
                rows = slice(expert * inner, (expert + 1) * inner)
                y = y + shares[:, expert, None] * (
                    functional.gelu(x @ first[rows].T) @ second[rows]
                )
        x = formula.norm(x + y, f"{at}.norm2")
    return x


def turned(x: Tensor, base: float) -> Tensor:
    """RoPE over halves. x (H, n, D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


FORMULAS: Mapping[str, Callable[[Formula, Tensor, Tensor], Tensor]] = {
    "jina_bert": jina_bert,
    "nomic_moe": nomic_moe,
}


def answer(formula: Formula, kind: str, labels: int, tokens: list[int], types: list[int]) -> F32:
    """(n, E) of the tokens, or with labels the (1, labels) scores, by BERT's pooler."""
    kinds = torch.tensor(types or [0] * len(tokens))
    x = FORMULAS[kind](formula, torch.tensor(tokens), kinds)
    if labels:
        first = formula.linear(x[:1], "pooler.dense", x.shape[-1]).tanh()
        x = formula.linear(first, "classifier", labels)
    found: F32 = x.numpy()
    return found
