"""ERNIE 4.5 with experts (Ernie4_5_MoeForCausalLM): ERNIE 4.5's attention, whose RoPE turns
neighbouring dimensions together, over experts by softmax with a bias that only decides the
choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.moe import MoE, Router
from vllmx_models.blocks.norms import Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, experts_spec, with_feed_forward
from vllmx_models.families.deepseek import DEEPSEEK_EXPERTS
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 131072
CHOICE_BIAS = "moe_statics.e_score_correction_bias"
_STEP = "interleave_moe_layer_step"


def ernie4_5_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts lie in each `moe_layer_interval`-th layer between a first and a last one."""
    read = ConfigReader(config, "Ernie4_5_MoeForCausalLM")
    read.refuse_quirks(*EXPERT_KEYS)
    bias, count = read.flag("use_bias", False), num_layers(read)
    mixer = attention_mixer(
        read, head_size(read), qkv_bias=bias, o_bias=bias, interleaved=True, default_kv_heads=4
    )
    sliding = [False] * count
    ropes = layer_ropes(
        read,
        mixer.head_size,
        sliding,
        default_positions=DEFAULT_POSITIONS,
        default_theta=500_000.0,
    )
    layers = layer_specs(read, mixer, dense_mlp(read, bias=bias), ropes, sliding, None)
    layers = with_feed_forward(layers, _sparse(read, count), _experts(read, bias))
    norm = Norm(read.number("rms_norm_eps", 1e-5))
    return Decoder(
        decoder_spec(
            read, layers, default_positions=DEFAULT_POSITIONS, default_tied=True, norm=norm
        )
    )


def _sparse(read: ConfigReader, count: int) -> list[int]:
    """The layers with experts."""
    every = read.integer("moe_layer_interval", 1)
    first = read.integer("moe_layer_start_index", 1, low=0)
    last = read.integer("moe_layer_end_index", -1, low=-1)
    end = count if last == -1 else last + 1
    return [layer for layer in range(first, min(end, count)) if (layer + 1) % every == 0]


def _experts(read: ConfigReader, bias: bool) -> MoE:
    count, chosen = read.integer("moe_num_experts", 64, high=1 << 14), read.integer("moe_k", 6)
    inner = read.integer("moe_intermediate_size", 1536)
    if chosen > count:
        raise read.error("moe_k", f"must be at most moe_num_experts = {count}")
    if bias:
        raise read.error("use_bias", "is not known here with experts: false")
    every = read.integer("moe_num_shared_experts", 2, low=0, high=256)
    names = MLPNames("mlp.shared_experts")
    shared = DenseMLP(every * inner, read.activation(), names=names) if every else None
    route = RouteSpec(chosen, renormalise=True)
    router = Router(route, choice_bias=CHOICE_BIAS, choice_axes=2)
    return MoE(count, inner, router, experts_spec(read), shared=shared)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Dense layers come first, and each `interleave_moe_layer_step`-th of the rest has experts."""
    inner = header.integer("expert_feed_forward_length")
    shared = header.integer("expert_shared_feed_forward_length", 0, low=0)
    return decoder_config(header, "expert_count") | {
        "moe_num_experts": header.integer("expert_count"),
        "moe_k": header.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": header.integer("expert_shared_count", shared // inner, low=0),
        "moe_layer_start_index": header.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": header.integer(_STEP, 1),
    }


def _states(spec: DecoderSpec) -> dict[str, Any]:
    numbers = [n for n, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, MoE)]
    if not numbers:
        return {}
    moe = spec.layers[numbers[0]].feed_forward
    assert isinstance(moe, MoE)
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    shared = 0 if moe.shared is None else moe.shared.intermediate_size
    return {
        "leading_dense_block_count": numbers[0],
        "expert_shared_count": shared // moe.intermediate_size,
        _STEP: step,
    }


_BIAS = "blk.{}.exp_probs_b.bias"
GGUF = GGUFArchitecture(
    "Ernie4_5_MoeForCausalLM",
    {
        **DECODER_TENSORS,
        **{name: ours for name, ours in DEEPSEEK_EXPERTS.items() if ".nextn." not in name},
        _BIAS: f"model.layers.{{}}.mlp.{CHOICE_BIAS}",
    },
    config=_gguf_config,
    states=_states,
)
