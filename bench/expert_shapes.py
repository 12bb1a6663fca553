"""Shapes of models with experts whose GGUF files `vllmx quantize` makes of the folder: gpt-oss with
its experts in MXFP4, and GLM-4.7-Flash, which has latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_shapes import Named, Shape, Tensor

MXFP4_BLOCK = 32


@dataclass(frozen=True)
class GptOssShape(Shape):
    """The sizes of gpt-oss: every second layer has a window, each head has a sink."""

    sliding_window: int = 128

    @property
    def architecture(self) -> tuple[str, str, str]:
        return "GptOssForCausalLM", "gpt_oss", "gpt-oss"

    def tensors(self) -> Iterator[Tensor]:
        for tensor in super().tensors():
            whole = tensor.name.removesuffix(".weight")
            bare = whole.endswith(("_bias", ".bias", "_blocks", "_scales", "sinks"))
            yield Tensor(whole if bare else tensor.name, "", tensor.shape, tensor.kind)

    def layer(self, index: int) -> Iterator[Named]:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_experts
        query, key = (heads * self.head_dim for heads in self._heads())
        yield "input_layernorm", "", (hidden,), "norm", "none"
        sizes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
        for name, size in sizes.items():
            yield f"self_attn.{name}_proj", "", size, "weight", "none"
            yield f"self_attn.{name}_proj.bias", "", size[:1], "weight", "none"
        yield "self_attn.sinks", "", (self.num_attention_heads,), "norm", "none"
        yield "post_attention_layernorm", "", (hidden,), "norm", "none"
        yield "mlp.router", "", (experts, hidden), "weight", "none"
        yield "mlp.router.bias", "", (experts,), "weight", "none"
        for part, rows, cols in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            name, blocks = f"mlp.experts.{part}_proj", (experts, rows, cols // MXFP4_BLOCK)
            yield f"{name}_blocks", "", (*blocks, MXFP4_BLOCK // 2), "codes", "none"
            yield f"{name}_scales", "", blocks, "exponents", "none"
            yield f"{name}_bias", "", (experts, rows), "weight", "none"

    def _heads(self) -> tuple[int, int]:
        return self.num_attention_heads, self.num_key_value_heads

    def config(self) -> dict[str, Any]:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        sizes = {name: value for name, value in vars(self).items() if value}
        count = sizes.pop("num_experts")
        return {
            **sizes,
            "num_local_experts": count,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [*kept, "lm_head"],
            },
        }


@dataclass(frozen=True)
class GlmFlashShape(Shape):
    """The sizes of GLM-4.7-Flash: latent attention, a dense first layer, one shared expert."""

    q_lora_rank: int = 768
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256

    @property
    def architecture(self) -> tuple[str, str, str]:
        return "Glm4MoeLiteForCausalLM", "glm4_moe_lite", "deepseek2"

    def tensors(self) -> Iterator[Tensor]:
        for tensor in super().tensors():
            name = tensor.name.replace("bias.weight", "bias")
            yield Tensor(name, "", tensor.shape, tensor.kind)

    def layer(self, index: int) -> Iterator[Named]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        query, latent = self.q_lora_rank, self.kv_lora_rank
        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        yield "input_layernorm", "", (hidden,), "norm", "none"
        yield "self_attn.q_a_proj", "", (query, hidden), "weight", "none"
        yield "self_attn.q_a_layernorm", "", (query,), "norm", "none"
        yield "self_attn.q_b_proj", "", (heads * head, query), "weight", "none"
        size = (latent + self.qk_rope_head_dim, hidden)
        yield "self_attn.kv_a_proj_with_mqa", "", size, "weight", "none"
        yield "self_attn.kv_a_layernorm", "", (latent,), "norm", "none"
        size = (heads * (self.qk_nope_head_dim + self.v_head_dim), latent)
        yield "self_attn.kv_b_proj", "", size, "weight", "none"
        yield "self_attn.o_proj", "", (hidden, heads * self.v_head_dim), "weight", "none"
        yield "post_attention_layernorm", "", (hidden,), "norm", "none"
        if index == 0:
            yield from self._mlp("mlp", "{}", self.intermediate_size)
            return
        yield from self.feed_forward()
        yield "mlp.gate.e_score_correction_bias", "", (self.num_experts,), "weight", "none"
        yield from self._mlp("mlp.shared_experts", "{}", self.moe_intermediate_size)

    def config(self) -> dict[str, Any]:
        sizes = {name: value for name, value in vars(self).items() if value}
        count = sizes.pop("num_experts")
        return {
            **sizes,
            "n_routed_experts": count,
            "head_dim": self.qk_rope_head_dim,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
        }


EXPERT_SHAPES: dict[str, Shape] = {
    "gpt-oss-20b": GptOssShape(
        2880, 2880, 24, 64, 8, head_dim=64, vocab_size=201088, max_position_embeddings=131072,
        tie_word_embeddings=False, num_experts=32, num_experts_per_tok=4,
    ),
    "gpt-oss-tiny": GptOssShape(
        64, 64, 4, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096,
        tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
    ),
    # GLM-4.7-Flash with 8 of its 47 layers
    "glm-4.7-flash-sixth": GlmFlashShape(
        2048, 10240, 8, 20, 20, vocab_size=154880, max_position_embeddings=202752,
        tie_word_embeddings=False, num_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=1536,
    ),
    "glm-4.7-flash-tiny": GlmFlashShape(
        64, 128, 3, 4, 4, vocab_size=2048, max_position_embeddings=16384,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    ),
}  # fmt: skip
