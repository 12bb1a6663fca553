"""Phi (phi-1, phi-1.5, phi-2): attention and MLP side by side, layer norms, partial RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import (
    Activation,
    Array,
    AttentionSpec,
    KVSpec,
    ModelShape,
    Ops,
    StepInputs,
    Weight,
)
from vllmx_core.plan import AnyArray
from vllmx_core.weights.spec import PartSpec, WeightSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class PhiConfig:
    """What the forward pass needs of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rotary_dim: int
    rope_theta: float
    eps: float
    act: Activation
    max_model_len: int
    dtype: str

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> PhiConfig:
        """Raises UnsupportedModelError for what this file does not implement."""
        rope = config.get("rope_parameters") or config  # transformers 5, or before
        scaling = config.get("rope_scaling") or rope
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise UnsupportedModelError("Phi: RoPE scaling is not supported; use an unscaled model")
        if config.get("qk_layernorm"):
            raise UnsupportedModelError("Phi: qk_layernorm is not supported; it must be false")
        act = config.get("hidden_act", "gelu_new")
        if act not in ACTIVATIONS:
            raise UnsupportedModelError(f"Phi: hidden_act {act!r} must be one of {[*ACTIVATIONS]}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        if hidden % heads != 0:
            raise UnsupportedModelError(f"Phi: hidden_size {hidden} / num_attention_heads {heads}")
        rotary_dim = int(rope.get("partial_rotary_factor", 0.5) * (hidden // heads))
        if rotary_dim % 2 != 0:
            raise UnsupportedModelError(f"Phi: {rotary_dim} rotary dimensions; it must be even")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            rotary_dim=rotary_dim,
            rope_theta=rope.get("rope_theta", 10000.0),
            eps=config.get("layer_norm_eps", 1e-5),
            act=ACTIVATIONS[act],
            max_model_len=config.get("max_position_embeddings", 2048),
            dtype=DTYPES.get(config.get("torch_dtype") or config.get("dtype") or "", "f32"),
        )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class Phi:
    """A `vllmx_core.model.Model`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = PhiConfig.read(config)

    @property
    def shape(self) -> ModelShape:
        c = self._config
        kv = (KVSpec(c.num_kv_heads, c.head_size),) * c.num_layers
        return ModelShape(c.vocab_size, c.hidden_size, c.max_model_len, kv, c.dtype)

    def weights(self) -> tuple[WeightSpec, ...]:
        c, hidden = self._config, self._config.hidden_size
        table = PartSpec("model.embed_tokens.weight", c.vocab_size)
        head = PartSpec("lm_head.weight", c.vocab_size, bias="lm_head.bias")
        return (
            WeightSpec("embed", "embedding", (table,), hidden, shard="vocab", role="vocabulary"),
            *(spec for layer in range(c.num_layers) for spec in self._layer(layer)),
            *_norm("norm", "model.final_layernorm", hidden),
            WeightSpec("head", "linear", (head,), hidden, shard="vocab", role="vocabulary"),
        )

    def _layer(self, layer: int) -> Iterator[WeightSpec]:
        c, hidden, prefix = self._config, self._config.hidden_size, f"model.layers.{layer}"
        yield from _norm(f"{layer}.norm", f"{prefix}.input_layernorm", hidden)
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        qkv = [
            _part(f"{prefix}.self_attn.{name}_proj", count * c.head_size)
            for name, count in heads.items()
        ]
        dense, up = _part(f"{prefix}.self_attn.dense", hidden), c.intermediate_size
        fc1, fc2 = _part(f"{prefix}.mlp.fc1", up), _part(f"{prefix}.mlp.fc2", hidden)
        yield WeightSpec(f"{layer}.qkv", "linear", tuple(qkv), hidden, shard="column")
        yield WeightSpec(f"{layer}.dense", "linear", (dense,), hidden, shard="row")
        yield WeightSpec(f"{layer}.fc1", "linear", (fc1,), hidden, shard="column")
        yield WeightSpec(f"{layer}.fc2", "linear", (fc2,), up, shard="row")

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        c = self._config
        inverse = c.rope_theta ** -(np.arange(0, c.rotary_dim, 2) / c.rotary_dim)
        angles = np.arange(max_model_len)[:, None] * inverse  # (positions, rotary_dim / 2)
        rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return {"rope": rope.astype(np.float32)}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        c = self._config
        x = ops.embedding(step.tokens, w["embed"])  # (T, E)
        for layer in range(c.num_layers):
            normed = self._normed(ops, w, x, f"{layer}.norm")
            spec = AttentionSpec(
                layer,
                c.num_heads,
                c.num_kv_heads,
                c.head_size,
                scale=c.head_size**-0.5,
                rotary_dim=c.rotary_dim,
            )
            qkv = ops.linear(normed, w[f"{layer}.qkv"])
            attended = ops.attention(qkv, spec, step, rope=w["rope"])
            hidden = ops.activation(ops.linear(normed, w[f"{layer}.fc1"]), c.act)
            x = ops.add(x, ops.linear(attended, w[f"{layer}.dense"]))
            x = ops.add(x, ops.linear(hidden, w[f"{layer}.fc2"]))
        return ops.logits(self._normed(ops, w, x, "norm"), step.logit_rows, w["head"])

    def _normed(self, ops: Ops, w: Mapping[str, Weight], x: Array, name: str) -> Array:
        return ops.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], self._config.eps)


def _part(name: str, rows: int) -> PartSpec:
    return PartSpec(f"{name}.weight", rows, bias=f"{name}.bias")


def _norm(name: str, tensor: str, size: int) -> Iterator[WeightSpec]:
    for half in ("weight", "bias"):
        part = PartSpec(f"{tensor}.{half}", size)
        yield WeightSpec(f"{name}.{half}", "vector", (part,))
