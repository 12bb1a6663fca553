"""Shapes of known models for `random_model.py`: sizes, names of the weights in a Hugging Face
folder and in a GGUF, and what either format says of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["weight", "router", "norm", "plain_norm", "decay", "bias", "codes", "exponents"]
"""What a tensor is. "norm" is a norm's weight, which Qwen3.5 stores minus one; "plain_norm" one
that it does not; "decay" the logarithm of a decay rate; "router" a small matrix that a GGUF keeps
in F32; "codes" and "exponents" are bytes of MXFP4."""
Arrange = Literal["none", "value_rows", "qkv_rows", "value_columns"]
"""An arrangement for a GGUF that has the value heads of a delta net tiled over its key heads, not
grouped."""
WEIGHT_STD = 0.02
Named = tuple[str, str, tuple[int, ...], Kind, Arrange]


@dataclass(frozen=True)
class Tensor:
    """One weight, with its name in either format."""

    name: str
    gguf_name: str
    """Experts share one: a GGUF has them as one tensor."""
    shape: tuple[int, ...]
    kind: Kind = "weight"
    arrange: Arrange = "none"
    std: float = WEIGHT_STD
    follows: str = ""
    """The tensor of whose drawn numbers row r has those of row r - 1; empty: of none."""

    @property
    def kept_in_f32(self) -> bool:
        """Whether the tensor is float32 in a GGUF, as llama.cpp wants it."""
        return self.kind != "weight"

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> str:
        """The type of the tensor in a folder."""
        return "U8" if self.kind in ("codes", "exponents") else "BF16"

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in a folder."""
        return self.num_elements * (1 if self.dtype == "U8" else 2)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 decoder, dense or with experts; the fields carry the names of its
    config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    chain: float = 0.0
    """Above 0: the head looks for the embedding of the id before, drawn with this deviation. Where
    it outweighs what the layers add, the model counts: each id is followed by the next one."""

    @property
    def architecture(self) -> tuple[str, str, str]:
        """The class and type of the model in config.json, and its name in a GGUF."""
        if self.num_experts:
            return "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe"
        return "Qwen3ForCausalLM", "qwen3", "qwen3"

    @property
    def norm_offset(self) -> float:
        """What a norm's weight in the folder lacks to the factor that it is."""
        return 0.0

    def tensors(self) -> Iterator[Tensor]:
        """Every weight of the model in the order of the file."""
        table = (self.vocab_size, self.hidden_size)
        embedding = "model.embed_tokens.weight"
        yield Tensor(embedding, "token_embd.weight", table, std=self.chain or WEIGHT_STD)
        for i in range(self.num_hidden_layers):
            for name, gguf_name, size, kind, arrange in self.layer(i):
                ours = name if name.endswith(("A_log", "dt_bias")) else f"{name}.weight"
                theirs = gguf_name if kind in ("decay", "bias") else f"{gguf_name}.weight"
                yield Tensor(f"model.layers.{i}.{ours}", f"blk.{i}.{theirs}", size, kind, arrange)
        yield Tensor("model.norm.weight", "output_norm.weight", (self.hidden_size,), "norm")
        if not self.tie_word_embeddings:
            follows = embedding if self.chain else ""
            yield Tensor("lm_head.weight", "output.weight", table, follows=follows)

    def layer(self, index: int) -> Iterator[Named]:
        """The weights of one layer; names without ".weight"."""
        yield "input_layernorm", "attn_norm", (self.hidden_size,), "norm", "none"
        yield from self.attention()
        yield "post_attention_layernorm", "ffn_norm", (self.hidden_size,), "norm", "none"
        yield from self.feed_forward()

    def attention(self, gated: bool = False) -> Iterator[Named]:
        """`gated`: the query's matrix holds as many rows again for a gate."""
        hidden, head = self.hidden_size, self.head_dim
        query, key = self.num_attention_heads * head, self.num_key_value_heads * head
        rows = 2 * query if gated else query
        yield "self_attn.q_proj", "attn_q", (rows, hidden), "weight", "none"
        yield "self_attn.k_proj", "attn_k", (key, hidden), "weight", "none"
        yield "self_attn.v_proj", "attn_v", (key, hidden), "weight", "none"
        yield "self_attn.q_norm", "attn_q_norm", (head,), "norm", "none"
        yield "self_attn.k_norm", "attn_k_norm", (head,), "norm", "none"
        yield "self_attn.o_proj", "attn_output", (hidden, query), "weight", "none"

    def feed_forward(self) -> Iterator[Named]:
        """The weights of a layer's MLP, or of its router and experts."""
        hidden = self.hidden_size
        if not self.num_experts:
            yield from self._mlp("mlp", "ffn_{}", self.intermediate_size)
            return
        yield "mlp.gate", "ffn_gate_inp", (self.num_experts, hidden), "router", "none"
        inner = self.moe_intermediate_size
        for part, size in _gated_mlp(hidden, inner):
            for expert in range(self.num_experts):
                name = f"mlp.experts.{expert}.{part}_proj"
                yield name, f"ffn_{part}_exps", size, "weight", "none"

    def _mlp(self, name: str, gguf_name: str, inner: int) -> Iterator[Named]:
        for part, size in _gated_mlp(self.hidden_size, inner):
            yield f"{name}.{part}_proj", gguf_name.format(part), size, "weight", "none"

    def config(self) -> dict[str, Any]:
        """The part of config.json that the shape decides."""
        moe = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return {
            **{key: value for key, value in vars(self).items() if value},
            **(moe if self.num_experts else {}),
            "max_window_layers": self.num_hidden_layers,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        }

    def add_fields(self, writer: Any) -> None:
        """Adds what a GGUF says of the model to a GGUFWriter."""
        writer.add_context_length(self.max_position_embeddings)
        writer.add_embedding_length(self.hidden_size)
        writer.add_block_count(self.num_hidden_layers)
        writer.add_head_count(self.num_attention_heads)
        writer.add_head_count_kv(self.num_key_value_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-6)
        if self.intermediate_size:
            writer.add_feed_forward_length(self.intermediate_size)
        if self.num_experts:
            writer.add_expert_count(self.num_experts)
            writer.add_expert_used_count(self.num_experts_per_tok)
            writer.add_expert_feed_forward_length(self.moe_intermediate_size)
        writer.add_rope_freq_base(self.config()["rope_theta"])

    def as_gguf(self, tensor: Tensor, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """A tensor that a GGUF keeps in F32, from the folder's values."""
        return values + self.norm_offset if tensor.kind == "norm" else values

    def arranged(self, tensor: Tensor, values: NDArray[Any]) -> NDArray[Any]:
        """The folder's values in the order that a GGUF has them in."""
        return values


@dataclass(frozen=True)
class HybridShape(Shape):
    """The sizes of a Qwen3.5 decoder, with experts or dense: one layer in four attends, the others
    are gated delta nets."""

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    shared_expert_intermediate_size: int = 512
    mtp_num_hidden_layers: int = 0
    """1: with a layer of multi-token prediction."""

    @property
    def architecture(self) -> tuple[str, str, str]:
        if not self.num_experts:
            return "Qwen3_5ForCausalLM", "qwen3_5_text", "qwen35"
        return "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen35moe"

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if not self.mtp_num_hidden_layers:
            return
        block, hidden = f"blk.{self.num_hidden_layers}", self.hidden_size
        for name, gguf_name, size, kind, arrange in self.layer(self.full_attention_interval - 1):
            ours, theirs = f"mtp.layers.0.{name}.weight", f"{block}.{gguf_name}.weight"
            yield Tensor(ours, theirs, size, kind, arrange)
        own: tuple[tuple[str, str, tuple[int, ...], Kind], ...] = (
            ("fc", "eh_proj", (hidden, 2 * hidden), "weight"),
            ("pre_fc_norm_embedding", "enorm", (hidden,), "norm"),
            ("pre_fc_norm_hidden", "hnorm", (hidden,), "norm"),
            ("norm", "shared_head_norm", (hidden,), "norm"),
        )
        for name, gguf_name, shape, kind in own:
            yield Tensor(f"mtp.{name}.weight", f"{block}.nextn.{gguf_name}.weight", shape, kind)

    @property
    def norm_offset(self) -> float:
        return 1.0

    def layer(self, index: int) -> Iterator[Named]:
        hidden = self.hidden_size
        yield "input_layernorm", "attn_norm", (hidden,), "norm", "none"
        if (index + 1) % self.full_attention_interval:
            yield from self._delta_net()
        else:
            yield from self.attention(gated=True)
        yield "post_attention_layernorm", "post_attention_norm", (hidden,), "norm", "none"
        yield from self.feed_forward()
        if not self.num_experts:
            return
        name = "mlp.shared_expert"
        yield f"{name}_gate", "ffn_gate_inp_shexp", (1, hidden), "router", "none"
        yield from self._mlp(name, "ffn_{}_shexp", self.shared_expert_intermediate_size)

    def _delta_net(self) -> Iterator[Named]:
        hidden, heads = self.hidden_size, self.linear_num_value_heads
        values = heads * self.linear_value_head_dim
        mixed = 2 * self.linear_num_key_heads * self.linear_key_head_dim + values
        taps, norm = self.linear_conv_kernel_dim, self.linear_value_head_dim
        own: tuple[Named, ...] = (
            ("in_proj_qkv", "attn_qkv", (mixed, hidden), "weight", "qkv_rows"),
            ("in_proj_z", "attn_gate", (values, hidden), "weight", "value_rows"),
            ("in_proj_a", "ssm_alpha", (heads, hidden), "weight", "value_rows"),
            ("in_proj_b", "ssm_beta", (heads, hidden), "weight", "value_rows"),
            ("conv1d", "ssm_conv1d", (mixed, 1, taps), "router", "qkv_rows"),
            ("A_log", "ssm_a", (heads,), "decay", "value_rows"),
            ("dt_bias", "ssm_dt.bias", (heads,), "bias", "value_rows"),
            ("norm", "ssm_norm", (norm,), "plain_norm", "none"),
            ("out_proj", "ssm_out", (hidden, values), "weight", "value_columns"),
        )
        for name, gguf_name, size, kind, arrange in own:
            yield f"linear_attn.{name}", gguf_name, size, kind, arrange

    def config(self) -> dict[str, Any]:
        sizes = {key: value for key, value in vars(self).items() if value}
        rotation = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
        return {
            **sizes,
            "attn_output_gate": True,
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "rope_parameters": rotation,
        }

    def add_fields(self, writer: Any) -> None:
        super().add_fields(writer)
        rotated = self.head_dim // 4
        writer.add_rope_dimension_count(rotated)
        sections = [rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6, 0]
        writer.add_rope_dimension_sections(sections)
        if self.num_experts:
            writer.add_expert_shared_feed_forward_length(self.shared_expert_intermediate_size)
        if self.mtp_num_hidden_layers:
            writer.add_block_count(self.num_hidden_layers + self.mtp_num_hidden_layers)
            writer.add_nextn_predict_layers(self.mtp_num_hidden_layers)
        writer.add_ssm_conv_kernel(self.linear_conv_kernel_dim)
        writer.add_ssm_state_size(self.linear_key_head_dim)
        writer.add_ssm_group_count(self.linear_num_key_heads)
        writer.add_ssm_time_step_rank(self.linear_num_value_heads)
        writer.add_ssm_inner_size(self.linear_num_value_heads * self.linear_value_head_dim)
        writer.add_full_attention_interval(self.full_attention_interval)

    def as_gguf(self, tensor: Tensor, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if tensor.kind == "decay":
            return -np.exp(values)
        values = super().as_gguf(tensor, values)
        # A GGUF has no axis of one.
        return values.reshape([size for size in values.shape if size > 1] or [1])

    def arranged(self, tensor: Tensor, values: NDArray[Any]) -> NDArray[Any]:
        if tensor.arrange == "value_columns":
            return self._tiled(values.T).T
        if tensor.arrange == "value_rows":
            return self._tiled(values)
        if tensor.arrange == "qkv_rows":
            keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
            return np.concatenate([values[:keys], self._tiled(values[keys:])])
        return values

    def _tiled(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of value heads, from grouped by key head to tiled over the key heads."""
        keys = self.linear_num_key_heads
        size = len(rows) // self.linear_num_value_heads
        heads = rows.reshape(keys, -1, size, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)


def _gated_mlp(hidden: int, inner: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))


SHAPES: dict[str, Shape] = {
    "qwen3-tiny": Shape(
        64, 192, 2, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096
    ),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8),
    # its head apart, so that what follows an id is known: see bench/speculate.py
    "qwen3-0.6b-chain": Shape(1024, 3072, 28, 16, 8, tie_word_embeddings=False, chain=4.0),
    "qwen3-0.6b-weak-chain": Shape(1024, 3072, 28, 16, 8, tie_word_embeddings=False, chain=0.45),
    "qwen3-tiny-chain": Shape(
        64, 192, 2, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096,
        tie_word_embeddings=False, chain=4.0,
    ),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    "qwen3-moe-tiny": Shape(
        64, 192, 2, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
    ),
    # a quarter of Qwen3-30B-A3B: its widths, 12 of 48 layers, a quarter of the vocabulary
    "qwen3-moe-quarter": Shape(
        2048, 6144, 12, 32, 4, vocab_size=37984, tie_word_embeddings=False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "qwen3.5-moe-tiny": HybridShape(
        64, 0, 4, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, shared_expert_intermediate_size=32,
    ),
    # Qwen3.5-0.8B with its layer of multi-token prediction
    "qwen3.5-0.8b": HybridShape(
        1024, 3584, 24, 8, 2, head_dim=256, vocab_size=248320, linear_num_value_heads=16,
        mtp_num_hidden_layers=1,
    ),
    # as deep as the next one, half as wide and with an eighth of its experts
    "qwen3.5-moe-small": HybridShape(
        1024, 0, 8, 8, 2, head_dim=256, vocab_size=49664, tie_word_embeddings=False,
        num_experts=32, num_experts_per_tok=8, moe_intermediate_size=512,
        linear_num_key_heads=8, linear_num_value_heads=16,
    ),
    # a fifth of Qwen3.5-35B-A3B: its widths, 8 of 40 layers, a fifth of the vocabulary
    "qwen3.5-moe-fifth": HybridShape(
        2048, 0, 8, 16, 2, head_dim=256, vocab_size=49664, tie_word_embeddings=False,
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
    ),
}  # fmt: skip
