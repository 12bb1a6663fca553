"""BERT, RoBERTa and XLM-RoBERTa (BGE, E5, MiniLM, BGE-M3 and its reranker): learned positions, and
post-norm: a layer norm after each residual sum (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.records import Record

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config, labels
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec, classifier, embedder
from vllmx_models.trunks.pooling_heads import BERT_WORDS, SpladeHead

ATTENTION = AttentionNames("attention", "self.query", "self.key", "self.value", "output.dense")
MOST_POSITIONS = 1 << 20


class BertNames(Record):
    """Modules of the checkpoint."""

    attention: AttentionNames = ATTENTION
    mlp: MLPNames = MLPNames("", up="intermediate.dense", down="output.dense")
    norms: LayerNorms = LayerNorms(None, "attention.output.LayerNorm", None, "output.LayerNorm")
    others: EncoderNames = EncoderNames(prefixes=("bert.", "roberta."))


def _roberta(read: ConfigReader) -> EncoderSpec:
    """Positions start after the padding row."""
    return bert_spec(read, read.integer("pad_token_id", 1, low=0) + 1)


def bert_spec(
    read: ConfigReader,
    first_position: int = 0,
    names: BertNames = BertNames(),  # noqa: B008  # a frozen record
    token_types: int = 2,
) -> EncoderSpec:
    """BERT's layers, by other names in relatives; `token_types` unless the config says another."""
    if read.config.get("position_embedding_type", "absolute") != "absolute":
        raise read.error("position_embedding_type", "must be absolute")
    if read.flag("is_decoder", False):
        raise read.error("is_decoder", "must be false: tokens see each other both ways")
    read.refuse_quirks("position_embedding_type")
    rows = read.integer("max_position_embeddings", 512, high=MOST_POSITIONS)
    if rows <= first_position:
        raise read.error("max_position_embeddings", f"must be above {first_position}")
    mixer = attention_mixer(
        read, head_size(read), qkv_bias=True, o_bias=True, both_ways=True, names=names.attention
    )
    activation = read.activation("hidden_act", "gelu")
    mlp = dense_mlp(read, activation, gated=False, bias=True, names=names.mlp)
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=(LayerSpec(mixer, mlp, names.norms),) * num_layers(read),
        max_model_len=rows - first_position,
        dtype=read.dtype(),
        norm=Norm(read.number("layer_norm_eps", 1e-12), "layer", bias=True),
        sums_normed=True,
        positions=rows,
        first_position=first_position,
        token_types=read.integer("type_vocab_size", token_types, low=0, high=MOST_POSITIONS),
        names=names.others,
    )


bert = embedder(bert_spec, "Bert")
bert_classifier = classifier(bert_spec, "Bert", "pooler.dense", "classifier")
roberta = embedder(_roberta, "XLMRoberta")
roberta_classifier = classifier(_roberta, "XLMRoberta", "classifier.dense", "classifier.out_proj")


def bert_words(config: Mapping[str, Any]) -> Encoder:
    """Sparse vectors of a masked language model, or the embedder that `modules` makes of it."""
    return masked(bert(config), ConfigReader(config, "BertForMaskedLM"))


def masked(
    embedder: Encoder, read: ConfigReader, names: tuple[str, str, str] = BERT_WORDS
) -> Encoder:
    """The embedder if `modules` pools, else its layers with the head of a masked language model."""
    if any(module["kind"] == "pooling" for module in read.config.get("modules", ())):
        return embedder
    spec, activation = embedder.spec, read.activation("hidden_act", "gelu")
    words = spec.names.words
    return Encoder(spec, SpladeHead(spec.vocab_size, spec.norm, words, activation, names))


_LAYER = "encoder.layer.{}"
TENSORS: Mapping[str, str] = {
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


GGUF = GGUFArchitecture("BertModel", TENSORS, config=_gguf_config)
