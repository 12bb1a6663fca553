"""EuroBERT (arXiv:2503.05500): Llama's layers with attention both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.norms import Norm
from vllmx_models.blocks.rope import read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.encoder_models import check_both_ways
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec, embedder
from vllmx_models.trunks.pooling_heads import ClassHead, num_labels

_NAMES = EncoderNames(
    words="embed_tokens", embedding_norm=None, layers="layers", norm="norm", prefixes=("model.",)
)


def eurobert_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token, on the mean of all, or on the mean of what the dense layer
    makes of each token ("late")."""
    read = ConfigReader(config, "EuroBertForSequenceClassification")
    kind = config.get("classifier_pooling") or "late"
    if kind not in ("bos", "mean", "late"):
        raise read.error("classifier_pooling", "must be bos, mean or late")
    head = ClassHead(
        num_labels(read),
        "dense",
        "classifier",
        "cls" if kind == "bos" else "mean",
        "gelu",
        pools_last=kind == "late",
    )
    return Encoder(_spec(read), head)


def _spec(read: ConfigReader) -> EncoderSpec:
    read.refuse_quirks("attention_bias", "mlp_bias")
    size, bias = head_size(read), read.flag("attention_bias", False)
    positions = read.integer("max_position_embeddings", 8192)
    rope = read_rope(read.config, size, max_positions=positions)
    mixer = attention_mixer(read, size, rope=rope, qkv_bias=bias, o_bias=bias, both_ways=True)
    mlp = dense_mlp(read, bias=read.flag("mlp_bias", False))
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=(LayerSpec(mixer, mlp),) * num_layers(read),
        max_model_len=positions,
        dtype=read.dtype(),
        norm=Norm(read.number("rms_norm_eps", 1e-5)),
        names=_NAMES,
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    check_both_ways(header)
    return decoder_config(header, "attention.causal")


eurobert = embedder(_spec, "EuroBert")
GGUF = GGUFArchitecture("EuroBertModel", config=_gguf_config)
