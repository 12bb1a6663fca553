"""BERT, RoBERTa and XLM-RoBERTa (BGE, E5, MiniLM, BGE-M3 and its reranker): learned positions, and
post-norm: a layer norm after each residual sum (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config, labels
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec
from vllmx_models.trunks.pooling_heads import ClassHead, num_labels, pooled

ATTENTION = AttentionNames("attention", "self.query", "self.key", "self.value", "output.dense")
MLP = MLPNames("", up="intermediate.dense", down="output.dense")
NORMS = LayerNorms(None, "attention.output.LayerNorm", None, "output.LayerNorm")
MOST_POSITIONS = 1 << 20


def bert(config: Mapping[str, Any]) -> Encoder:
    """An embedder: mean pooling unless modules.json says otherwise."""
    spec = _spec(ConfigReader(config, "BertModel"))
    return Encoder(spec, pooled(config, spec.hidden_size, "mean"))


def bert_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token, through BERT's pooler."""
    read = ConfigReader(config, "BertForSequenceClassification")
    head = ClassHead(num_labels(read), "pooler.dense", "classifier")
    return Encoder(_spec(read), head)


def roberta(config: Mapping[str, Any]) -> Encoder:
    """BERT with positions that start after the padding row."""
    spec = _roberta(ConfigReader(config, "XLMRobertaModel"))
    return Encoder(spec, pooled(config, spec.hidden_size, "mean"))


def roberta_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token, through its own dense layer."""
    read = ConfigReader(config, "XLMRobertaForSequenceClassification")
    head = ClassHead(num_labels(read), "classifier.dense", "classifier.out_proj")
    return Encoder(_roberta(read), head)


def _roberta(read: ConfigReader) -> EncoderSpec:
    return _spec(read, read.integer("pad_token_id", 1, low=0) + 1)


def _spec(read: ConfigReader, first_position: int = 0) -> EncoderSpec:
    if read.config.get("position_embedding_type", "absolute") != "absolute":
        raise read.error("position_embedding_type", "must be absolute")
    if read.flag("is_decoder", False):
        raise read.error("is_decoder", "must be false: tokens see each other both ways")
    read.refuse_quirks("position_embedding_type")
    rows = read.integer("max_position_embeddings", 512, high=MOST_POSITIONS)
    if rows <= first_position:
        raise read.error("max_position_embeddings", f"must be above {first_position}")
    mixer = attention_mixer(
        read, head_size(read), qkv_bias=True, o_bias=True, both_ways=True, names=ATTENTION
    )
    mlp = dense_mlp(read, read.activation("hidden_act", "gelu"), gated=False, bias=True, names=MLP)
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=(LayerSpec(mixer, mlp, NORMS),) * num_layers(read),
        max_model_len=rows - first_position,
        dtype=read.dtype(),
        norm=Norm(read.number("layer_norm_eps", 1e-12), "layer", bias=True),
        sums_normed=True,
        positions=rows,
        first_position=first_position,
        token_types=read.integer("type_vocab_size", 2, high=MOST_POSITIONS),
        names=EncoderNames(prefixes=("bert.", "roberta.")),
    )


_LAYER = "encoder.layer.{}"
_TENSORS: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": f"{_LAYER}.attention.self.query",
    "blk.{}.attn_k": f"{_LAYER}.attention.self.key",
    "blk.{}.attn_v": f"{_LAYER}.attention.self.value",
    "blk.{}.attn_output": f"{_LAYER}.attention.output.dense",
    "blk.{}.attn_output_norm": f"{_LAYER}.attention.output.LayerNorm",
    "blk.{}.ffn_up": f"{_LAYER}.intermediate.dense",
    "blk.{}.ffn_down": f"{_LAYER}.output.dense",
    "blk.{}.layer_output_norm": f"{_LAYER}.output.LayerNorm",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The config.json of a GGUF header. Files omit RoBERTa's position rows before the first."""
    scores = labels(header)
    architecture = "BertForSequenceClassification" if scores else "BertModel"
    return {**encoder_config(header), **scores, "architectures": [architecture]}


GGUF = GGUFArchitecture("BertModel", _TENSORS, config=_gguf_config)
