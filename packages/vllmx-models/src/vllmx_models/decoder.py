"""The decoder that most open models share: pre-norm blocks of attention and a gated MLP.

An architecture reads its config.json into a `DecoderSpec`; the flags below are all that separates
Llama, Mistral, Qwen and SmolLM. E hidden, F intermediate, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from vllmx_core.weights import PartSpec, WeightSpec

from vllmx_models.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: Rope | None
    """None: no position embedding (NoPE)."""
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder model; see the module's docstring for the alphabet."""

    vocab_size: int
    hidden_size: int  # E
    intermediate_size: int  # F
    num_heads: int  # H
    num_kv_heads: int  # K
    head_size: int  # D
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    dtype: str
    norm_eps: float
    activation: Activation = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""


class Decoder:
    """A `vllmx_core.model.Model` over a `DecoderSpec`."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        ropes: list[Rope] = []
        for layer in spec.layers:
            if layer.rope is not None and layer.rope not in ropes:
                ropes.append(layer.rope)
        self._ropes = {f"rope.{index}": rope for index, rope in enumerate(ropes)}
        self._tables = [
            None if layer.rope is None else f"rope.{ropes.index(layer.rope)}"
            for layer in spec.layers
        ]

    @property
    def shape(self) -> ModelShape:
        spec = self.spec
        caches = (KVSpec(spec.num_kv_heads, spec.head_size, layer.window) for layer in spec.layers)
        return ModelShape(
            spec.vocab_size, spec.hidden_size, spec.max_model_len, tuple(caches), spec.dtype
        )

    def weights(self) -> tuple[WeightSpec, ...]:
        """Names of the checkpoint are those of transformers."""
        spec = self.spec
        table = (PartSpec("model.embed_tokens.weight", spec.vocab_size),)
        head = table if spec.tied_embeddings else (PartSpec("lm_head.weight", spec.vocab_size),)
        blocks = (self._block_weights(layer) for layer in range(len(spec.layers)))
        return (
            WeightSpec("embed", "embedding", table, spec.hidden_size, "vocab", role="vocabulary"),
            *(weight for block in blocks for weight in block),
            self._vector("norm", "model.norm.weight", spec.hidden_size),
            WeightSpec("lm_head", "linear", head, spec.hidden_size, "vocab", role="vocabulary"),
        )

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {name: rope.table(max_model_len) for name, rope in self._ropes.items()}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        spec = self.spec
        x = ops.embedding(step.tokens, w["embed"])  # (T, E)
        residual: Array | None = None
        for layer in range(len(spec.layers)):
            name = f"layers.{layer}"
            x, residual = ops.add_rms_norm(x, residual, w[f"{name}.attn_norm"], spec.norm_eps)
            qkv = ops.linear(x, w[f"{name}.qkv"])  # (T, (H + 2K) * D)
            x = self._attention(ops, qkv, w, step, layer)  # (T, H * D)
            x = ops.linear(x, w[f"{name}.o"])  # (T, E)
            x, residual = ops.add_rms_norm(x, residual, w[f"{name}.mlp_norm"], spec.norm_eps)
            gate_up = ops.linear(x, w[f"{name}.gate_up"])  # (T, 2F)
            x = ops.gated_act(gate_up, spec.activation)  # (T, F)
            x = ops.linear(x, w[f"{name}.down"])  # (T, E)
        x, _ = ops.add_rms_norm(x, residual, w["norm"], spec.norm_eps)
        return ops.logits(x, step.logit_rows, w["lm_head"])  # (L, V)

    def _attention(
        self, ops: Ops, qkv: Array, w: Mapping[str, Weight], step: StepInputs, layer: int
    ) -> Array:
        spec, table = self.spec, self._tables[layer]
        rope, window = spec.layers[layer].rope, spec.layers[layer].window
        options = AttentionSpec(
            layer=layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            scale=spec.head_size**-0.5,
            rotary_dim=0 if rope is None else rope.rotary_dim,
            norm_eps=spec.norm_eps,
            window=window,
        )
        return ops.attention(
            qkv,
            options,
            step,
            rope=None if table is None else w[table],
            q_norm=w[f"layers.{layer}.q_norm"] if spec.qk_norm else None,
            k_norm=w[f"layers.{layer}.k_norm"] if spec.qk_norm else None,
        )

    def _block_weights(self, layer: int) -> tuple[WeightSpec, ...]:
        spec, ours, theirs = self.spec, f"layers.{layer}", f"model.layers.{layer}"
        q_rows, kv_rows = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        qkv = (
            _part(f"{attn}.q_proj", q_rows, spec.qkv_bias),
            _part(f"{attn}.k_proj", kv_rows, spec.qkv_bias),
            _part(f"{attn}.v_proj", kv_rows, spec.qkv_bias),
        )
        norms = (
            self._vector(f"{ours}.q_norm", f"{attn}.q_norm.weight", spec.head_size),
            self._vector(f"{ours}.k_norm", f"{attn}.k_norm.weight", spec.head_size),
        )
        gate_up = tuple(
            _part(f"{mlp}.{name}_proj", spec.intermediate_size, spec.mlp_bias)
            for name in ("gate", "up")
        )
        o = (_part(f"{attn}.o_proj", spec.hidden_size, spec.o_bias),)
        down = (_part(f"{mlp}.down_proj", spec.hidden_size, spec.mlp_bias),)
        after = f"{theirs}.post_attention_layernorm.weight"
        return (
            self._vector(f"{ours}.attn_norm", f"{theirs}.input_layernorm.weight", spec.hidden_size),
            WeightSpec(f"{ours}.qkv", "linear", qkv, spec.hidden_size, "column"),
            *(norms if spec.qk_norm else ()),
            WeightSpec(f"{ours}.o", "linear", o, q_rows, "row"),
            self._vector(f"{ours}.mlp_norm", after, spec.hidden_size),
            WeightSpec(f"{ours}.gate_up", "linear", gate_up, spec.hidden_size, "column"),
            WeightSpec(f"{ours}.down", "linear", down, spec.intermediate_size, "row"),
        )

    @staticmethod
    def _vector(name: str, source: str, rows: int) -> WeightSpec:
        return WeightSpec(name, "vector", (PartSpec(source, rows),))


def _part(module: str, rows: int, bias: bool) -> PartSpec:
    return PartSpec(f"{module}.weight", rows, f"{module}.bias" if bias else None)
