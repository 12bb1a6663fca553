"""Models in Llama's layout with class names and defaults of their own: CWM, ERNIE 4.5, Helium,
InternLM and InternLM 3, MiMo, Seed-OSS, Yi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.norms import PRE, LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    sliding_layers,
)
from vllmx_models.families.qwen import qwen2
from vllmx_models.trunks.decoder import Decoder

_CWM_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def seed_oss(config: Mapping[str, Any]) -> Decoder:
    """Biases on q, k and v unless the config says otherwise; heads of 128."""
    read = ConfigReader(config, "SeedOssForCausalLM")
    return _decoder(
        read,
        head=128,
        kv_heads=8,
        positions=524288,
        biases=(
            read.flag("attention_bias", True),
            read.flag("attention_out_bias", False),
            read.flag("mlp_bias", False),
        ),
    )


def ernie4_5(config: Mapping[str, Any]) -> Decoder:
    """Neighbouring dimensions of a head are rotated together; `use_bias` is for all matrices."""
    read = ConfigReader(config, "Ernie4_5ForCausalLM")
    biases = (read.flag("use_bias", False),) * 3
    return _decoder(
        read,
        head=128,
        kv_heads=2,
        positions=131072,
        theta=500_000.0,
        biases=biases,
        eps=1e-5,
        tied=True,
        interleaved=True,
    )


def helium(config: Mapping[str, Any]) -> Decoder:
    """Neighbouring dimensions of a head are rotated together."""
    read = ConfigReader(config, "HeliumForCausalLM")
    biases = (read.flag("attention_bias", False), False, read.flag("mlp_bias", False))
    return _decoder(
        read, head=128, kv_heads=20, positions=4096, biases=biases, eps=1e-8, interleaved=True
    )


def cwm(config: Mapping[str, Any]) -> Decoder:
    """A window in three of four layers, the first of which has none."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _CWM_ROPE
    read = ConfigReader({**config, "rope_parameters": rope}, "CwmForCausalLM")
    sliding = sliding_layers(read, [layer % 4 != 0 for layer in range(num_layers(read))])
    return _decoder(
        read,
        head=128,
        kv_heads=8,
        positions=131072,
        theta=1_000_000.0,
        biases=(False, False, read.flag("mlp_bias", False)),
        eps=1e-5,
        sliding=sliding,
        window=read.integer("sliding_window", 8192, high=1 << 31) if any(sliding) else None,
    )


def internlm(config: Mapping[str, Any]) -> Decoder:
    """The first InternLM: `bias` is for the attention's matrices."""
    read = ConfigReader(config, "InternLMForCausalLM")
    bias = read.flag("bias", True)
    return _decoder(read, positions=2048, biases=(bias, bias, False))


def internlm3(config: Mapping[str, Any]) -> Decoder:
    """`qkv_bias` and `bias` are what Llama calls `attention_bias` and `mlp_bias`."""
    read = ConfigReader(config, "InternLM3ForCausalLM")
    qkv = read.flag("qkv_bias", read.flag("attention_bias", False))
    rest = read.flag("bias", read.flag("mlp_bias", False))
    return _decoder(read, head=128, kv_heads=2, positions=32768, biases=(qkv, rest, rest), eps=1e-5)


def mimo(config: Mapping[str, Any]) -> Decoder:
    """Qwen2's layers; those that predict more tokens at once are passed over."""
    return qwen2(config)


def yi(config: Mapping[str, Any]) -> Decoder:
    """The first Yi, whose norms have names of their own."""
    read = ConfigReader(config, "YiForCausalLM")
    return _decoder(read, positions=4096, norms=LayerNorms("ln1", None, "ln2"))


def _decoder(
    read: ConfigReader,
    *,
    head: int | None = None,
    kv_heads: int | None = None,
    positions: int,
    theta: float = 10_000.0,
    biases: tuple[bool, bool, bool] = (False, False, False),
    eps: float = 1e-6,
    tied: bool = False,
    interleaved: bool = False,
    sliding: list[bool] | None = None,
    window: int | None = None,
    norms: LayerNorms = PRE,
) -> Decoder:
    """Llama's decoder; `biases` are those of q, k and v, of o, and of the MLP."""
    windows = () if sliding is None else ("layer_types", "sliding_window")
    read.refuse_quirks("attention_bias", "mlp_bias", *windows)
    size = head_size(read, head)
    slides = [False] * num_layers(read) if sliding is None else sliding
    mixer = attention_mixer(
        read,
        size,
        default_kv_heads=kv_heads,
        qkv_bias=biases[0],
        o_bias=biases[1],
        interleaved=interleaved,
    )
    mlp = dense_mlp(read, bias=biases[2])
    # one rotation for all layers
    whole = [False] * len(slides)
    ropes = layer_ropes(read, size, whole, default_positions=positions, default_theta=theta)
    layers = layer_specs(read, mixer, mlp, ropes, slides, window, norms)
    norm = Norm(read.number("rms_norm_eps", eps))
    return Decoder(
        decoder_spec(read, layers, default_positions=positions, default_tied=tied, norm=norm)
    )
