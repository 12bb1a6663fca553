"""Decoders with a table of positions: GPT-2 (GPT2LMHeadModel), GPT-Neo (GPTNeoForCausalLM) and OPT
(OPTForCausalLM, arXiv:2205.01068)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.layer import Positions
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp, head_size, num_layers
from vllmx_models.configs.hybrid import layer_kinds
from vllmx_models.families.llama import llama_decoder
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, ModelNames

FROM_FILE = "gguf"
"""Set for GGUF files, which store GPT-2's matrices transposed and q, k and v in order."""
KEYS = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""GPT-2's names of keys, and Llama's."""
NAMES = ModelNames(
    "transformer.wte", "transformer.h", "transformer.ln_f", also=("transformer.", "")
)
NORMS = LayerNorms("ln_1", before_mlp="ln_2")
MLP = MLPNames(up="c_fc", down="c_proj")
KINDS = ("global", "local")
OPT = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}
"""The only values that are known."""
OPT_NAMES = ModelNames(
    "model.decoder.embed_tokens",
    "model.decoder.layers",
    "model.decoder.final_layer_norm",
    also=("model.decoder.", "model."),
)


def gpt_reader(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """The config under Llama's names of keys, with an MLP of four times the hidden size by
    default."""
    named = {
        ours: config[theirs] for theirs, ours in KEYS.items() if config.get(theirs) is not None
    }
    read = ConfigReader({"hidden_act": "gelu_new", **config, **named}, architecture)
    read.refuse_quirks()
    if read.has("intermediate_size"):
        return read
    inner = 4 * read.integer("hidden_size")
    return ConfigReader({**read.config, "intermediate_size": inner}, architecture)


def gpt_decoder(
    read: ConfigReader,
    names: AttentionNames,
    modules: ModelNames,
    norms: LayerNorms,
    mlp: MLPNames,
    *,
    biases: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> Decoder:
    """A decoder with layer norms and an MLP without a gate; `options` are `llama_decoder`'s."""
    return llama_decoder(
        read,
        positions=2048,
        biases=biases,
        norms=norms,
        norm=Norm(read.number("layer_norm_eps", 1e-5), "layer", bias=True),
        mlp=dense_mlp(read, gated=False, bias=biases[2], names=mlp),
        names=names,
        modules=modules,
        **options,
    )


def gpt2(config: Mapping[str, Any]) -> Decoder:
    """Some models divide scores by the number of the layer, too."""
    read = gpt_reader(config, "GPT2LMHeadModel")
    if read.flag("add_cross_attention", False):
        raise read.error("add_cross_attention", "is not known here: false")
    turned, count = not read.flag(FROM_FILE, False), num_layers(read)
    scale = head_size(read) ** -0.5 if read.flag("scale_attn_weights", True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
    names = AttentionNames("attn", o="c_proj", qkv="c_attn", transposed=turned)
    decoder = gpt_decoder(
        read, names, NAMES, NORMS, replace(MLP, transposed=turned), tied=True, rotates=False
    )
    scales = [scale / (layer + 1 if by_layer else 1) for layer in range(count)]
    return _positioned(read, decoder, [{"scale": one} for one in scales])


def gpt_neo(config: Mapping[str, Any]) -> Decoder:
    """Scores are not scaled; every other layer has a window, unless `attention_layers` says
    otherwise."""
    read = gpt_reader(config, "GPTNeoForCausalLM")
    count, window = num_layers(read), read.integer("window_size", 256, high=1 << 31)
    alternating = [KINDS[layer % 2] for layer in range(count)]
    kinds = layer_kinds(read, KINDS, alternating, "attention_layers")
    if read.has("attention_types") and not read.has("attention_layers"):
        raise read.error("attention_types", "needs attention_layers, which spells it out")
    names, biases = AttentionNames("attn.attention", o="out_proj"), (False, True, True)
    decoder = gpt_decoder(read, names, NAMES, NORMS, MLP, biases=biases, tied=True, rotates=False)
    windows = [window if kind == "local" else None for kind in kinds]
    return _positioned(read, decoder, [{"scale": 1.0, "window": one} for one in windows])


def opt(config: Mapping[str, Any]) -> Decoder:
    """Two more rows precede the row of position 0. OPT-350M, which has its norms behind the blocks
    and embeddings of another size, is refused."""
    read = gpt_reader({"activation_function": "relu", **config}, "OPTForCausalLM")
    for key, value in OPT.items():
        if read.flag(key, value) != value:
            raise read.error(key, f"is not known here: {str(value).lower()}")
    hidden = read.integer("hidden_size")
    if read.integer("word_embed_proj_dim", hidden) != hidden:
        raise read.error("word_embed_proj_dim", f"must be hidden_size = {hidden}")
    decoder = gpt_decoder(
        read,
        AttentionNames(o="out_proj"),
        OPT_NAMES,
        LayerNorms("self_attn_layer_norm", before_mlp="final_layer_norm"),
        MLPNames("", up="fc1", down="fc2"),
        tied=True,
        rotates=False,
    )
    return _positioned(read, decoder, [{}] * num_layers(read), "model.decoder.embed_positions", 2)


def _positioned(
    read: ConfigReader,
    decoder: Decoder,
    changes: Sequence[Mapping[str, Any]],
    table: str = "transformer.wpe",
    first: int = 0,
) -> Decoder:
    """Adds the table of positions, and changes the attention of each layer."""
    rows, spec = read.integer("max_position_embeddings", 2048, high=1 << 20), decoder.spec
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **change))  # type: ignore[type-var]
        for layer, change in zip(spec.layers, changes, strict=True)
    )
    return Decoder(replace(spec, layers=layers, positions=Positions(table, rows + first, first)))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return decoder_config(header) | {FROM_FILE: True, "hidden_act": "gelu_new"}


_LAYER = f"{NAMES.layers}.{{}}"
GGUF = GGUFArchitecture(
    "GPT2LMHeadModel",
    {
        "token_embd": NAMES.embedding,
        "position_embd": "transformer.wpe",
        "output_norm": NAMES.norm,
        "output": NAMES.head,
        "blk.{}.attn_norm": f"{_LAYER}.ln_1",
        "blk.{}.attn_qkv": f"{_LAYER}.attn.c_attn",
        "blk.{}.attn_output": f"{_LAYER}.attn.c_proj",
        "blk.{}.ffn_norm": f"{_LAYER}.ln_2",
        "blk.{}.ffn_up": f"{_LAYER}.mlp.c_fc",
        "blk.{}.ffn_down": f"{_LAYER}.mlp.c_proj",
    },
    config=_gguf_config,
)
