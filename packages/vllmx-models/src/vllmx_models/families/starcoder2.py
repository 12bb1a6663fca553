"""StarCoder 2 (Starcoder2ForCausalLM, arXiv:2402.19173): Llama's layers with layer norms, biases
and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp, num_layers
from vllmx_models.families.llama import llama_decoder
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS, GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 4096


def starcoder2(config: Mapping[str, Any]) -> Decoder:
    """A window, if set, applies to every layer; head and embedding are one."""
    read = ConfigReader(config, "Starcoder2ForCausalLM")
    read.refuse_quirks("sliding_window")
    bias, window = read.flag("use_bias", True), None
    if read.has("sliding_window"):
        window = read.integer("sliding_window", high=1 << 31)
    mlp = dense_mlp(
        read,
        read.activation(default="gelu_pytorch_tanh"),
        gated=False,
        bias=bias,
        names=MLPNames(up="c_fc", down="c_proj"),
    )
    return llama_decoder(
        read,
        kv_heads=2,
        positions=DEFAULT_POSITIONS,
        biases=(bias, bias, bias),
        tied=True,
        sliding=[window is not None] * num_layers(read),
        window=window,
        norm=Norm(read.number("norm_epsilon", 1e-5), "layer", bias=True),
        mlp=mlp,
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    config = decoder_config(header, "attention.sliding_window")
    return config | {
        "norm_epsilon": config["layer_norm_eps"],
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": header.integer("attention.sliding_window", 0, low=0) or None,
        "use_bias": "blk.0.attn_q.bias" in header.tensors,
    }


_MLP = "model.layers.{}.mlp"
GGUF = GGUFArchitecture(
    "Starcoder2ForCausalLM",
    {
        **{name: ours for name, ours in DECODER_TENSORS.items() if name != "blk.{}.ffn_gate"},
        "blk.{}.ffn_up": f"{_MLP}.c_fc",
        "blk.{}.ffn_down": f"{_MLP}.c_proj",
    },
    config=_gguf_config,
)
