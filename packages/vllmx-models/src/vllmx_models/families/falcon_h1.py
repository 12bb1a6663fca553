"""Falcon-H1 (FalconH1ForCausalLM, arXiv:2507.22448): attention and Mamba-2 side by side in every
layer, and factors of the config (muP) at most places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Activation, Array
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, Shard, linear, part
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.parallel import ParallelMixer
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.configs.hybrid import MAMBA_DEFAULTS, mamba_mixer
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hybrids import has_tensor, mamba_config, mamba_tensors
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, LayerSpec, ModelNames

DEFAULTS: Mapping[str, Any] = {
    **MAMBA_DEFAULTS,
    "mamba_d_ssm": 1024,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
"""The defaults of transformers for absent keys."""
NAMES = ModelNames(norm="model.final_layernorm")
NORMS = LayerNorms(before_mlp="pre_ff_layernorm")


class ScaledMLP(Record):
    """down(act(gate(x) * first) * up(x)) * second."""

    intermediate_size: int  # F
    activation: Activation
    bias: bool
    first: float
    second: float

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        size, inner = names.hidden_size, self.intermediate_size

        def matrix(name: str, rows: int, cols: int, shard: Shard) -> WeightSpec:
            source = part(f"{names.theirs}.feed_forward.{name}_proj", rows, self.bias)
            return linear(f"{names.ours}.{name}", (source,), cols, shard)

        return (
            matrix("gate", inner, size, "column"),
            matrix("up", inner, size, "column"),
            matrix("down", size, inner, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        gate = ops.scale(ops.linear(x, weight("gate")), self.first)  # (T, F)
        hidden = ops.gate(ops.linear(x, weight("up")), gate, self.activation)  # (T, F)
        return ops.scale(ops.linear(hidden, weight("down")), self.second)  # (T, E)


def falcon_h1(config: Mapping[str, Any]) -> Decoder:
    """Keys have a factor, which is that of the scores."""
    read = ConfigReader({**DEFAULTS, **config}, "FalconH1ForCausalLM")
    read.refuse_quirks("attention_bias", "embedding_multiplier", "mlp_bias")
    bias, head = read.flag("attention_bias", False), head_size(read)
    positions = read.integer("max_position_embeddings")
    (rope,) = layer_ropes(read, head, [False], default_positions=positions)
    scale = head**-0.5 * read.number("key_multiplier", 1.0)
    attention = attention_mixer(read, head, rope=rope, qkv_bias=bias, o_bias=bias, scale=scale)
    norm = Norm(read.number("rms_norm_eps"))
    mamba = mamba_mixer(
        read,
        norm_eps=norm.eps if read.flag("mamba_rms_norm", False) else None,
        norm_first=read.flag("mamba_norm_before_gate", True),
        factors=_factors(read, "ssm_multipliers", 5),
    )
    if read.flag("projectors_bias", False) != mamba.bias:
        raise read.error("projectors_bias", "must be mamba_proj_bias")
    mixer = ParallelMixer(
        attention,
        mamba,
        (read.number("attention_in_multiplier", 1.0), read.number("attention_out_multiplier", 1.0)),
        (read.number("ssm_in_multiplier", 1.0), read.number("ssm_out_multiplier", 1.0)),
    )
    mlp = ScaledMLP(
        read.integer("intermediate_size"),
        read.activation(),
        read.flag("mlp_bias", False),
        *_factors(read, "mlp_multipliers", 2),
    )
    layers = (LayerSpec(mixer, mlp, NORMS),) * num_layers(read)
    spec = decoder_spec(
        read,
        layers,
        default_positions=positions,
        norm=norm,
        names=NAMES,
        embedding_scale=read.number("embedding_multiplier", 1.0),
    )
    return Decoder(replace(spec, logit_scale=read.number("lm_head_multiplier", 1.0)))


def _factors(read: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A list of numbers above 0; 1 each where the key is absent."""
    given = read.config.get(key)
    if given is None:
        return (1.0,) * count
    numbers = isinstance(given, list) and all(type(one) in (int, float) for one in given)
    if not numbers or len(given) != count or not all(0 < one < 1e30 for one in given):
        raise read.error(key, f"must be {count} numbers above 0")
    return tuple(float(one) for one in given)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The converter multiplies the weights by the factors; llama.cpp has the gate before the norm
    alone."""
    config = {**decoder_config(header), **mamba_config(header)}
    return config | {
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "mlp_bias": has_tensor(header, "ffn_gate.bias"),
        "projectors_bias": config["mamba_proj_bias"],
        "mamba_rms_norm": has_tensor(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


_LAYER = "model.layers.{}"
GGUF = GGUFArchitecture(
    "FalconH1ForCausalLM",
    {
        **DECODER_TENSORS,
        **mamba_tensors(f"{_LAYER}.mamba"),
        **{
            f"blk.{{}}.ffn_{name}": f"{_LAYER}.feed_forward.{name}_proj"
            for name in ("gate", "up", "down")
        },
        "output_norm": NAMES.norm,
        "blk.{}.ffn_norm": f"{_LAYER}.{NORMS.before_mlp}.weight",  # the file's name has no suffix
    },
    config=_gguf_config,
    decays=("blk.{}.ssm_a",),
)
