"""Pooling heads: reduce the hidden states of each text to one vector or to scores.

E hidden size, T tokens of a step, L texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import Array, Ops, Output, StepInputs, Weight
from vllmx_core.ops.activation import ActKind
from vllmx_core.ops.pool import PoolKind
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.norms import Norm
from vllmx_models.config import ConfigReader

MAX_LABELS = 1 << 16


class PoolingHead(Protocol):
    """Maps hidden states (T, E) to the output of a step."""

    @property
    def output(self) -> Output:
        """Vectors of texts or of tokens, or scores."""
        ...

    def size(self, hidden_size: int) -> int:
        """Numbers in a row."""
        ...

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The head's lines of the weight map."""
        ...

    def record(self, ops: Ops, w: Mapping[str, Weight], x: Array, step: StepInputs) -> Array:
        """(T, E) -> (L, size)."""
        ...


class LinearHead(Record):
    """Pools each text, then applies linear layers. With "token_vectors" a step asks for all of its
    tokens, and "last" takes them as they are."""

    output: Output
    pooling: PoolKind
    matrices: tuple[tuple[WeightSpec, str], ...] = ()
    """The linear layers with their activations; "identity" for none."""

    def size(self, hidden_size: int) -> int:
        return self.matrices[-1][0].rows if self.matrices else hidden_size

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        return tuple(spec for spec, _ in self.matrices)

    def record(self, ops: Ops, w: Mapping[str, Weight], x: Array, step: StepInputs) -> Array:
        """(T, E) -> (L, size)."""
        x = ops.pool(x, step, self.pooling)
        for spec, activation in self.matrices:
            x = ops.linear(x, w[spec.name])
            if activation != "identity":
                x = ops.activation(x, activation)  # type: ignore[arg-type]  # the op checks it
        return x


class ClassHead(Record):
    """Scores of labels: a dense layer over the pooled text, then one row for each label."""

    labels: int
    dense: str
    """The name of its modules in the checkpoint."""
    classifier: str
    kind: PoolKind = "cls"
    activation: ActKind = "tanh"
    dense_bias: bool = True
    norm: Norm | None = None
    norm_name: str = ""
    pools_last: bool = False
    """True if each token goes through the dense layer and its activation, and these are pooled."""
    output: Literal["scores"] = "scores"

    def size(self, hidden_size: int) -> int:
        return self.labels

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        dense = (part(self.dense, hidden_size, self.dense_bias),)
        classifier = (part(self.classifier, self.labels, True),)
        norm = self.norm and self.norm.weights("head_norm", self.norm_name, hidden_size)
        return (
            WeightSpec("head_dense", "linear", dense, hidden_size),
            *(norm or ()),
            WeightSpec("classifier", "linear", classifier, hidden_size),
        )

    def record(self, ops: Ops, w: Mapping[str, Weight], x: Array, step: StepInputs) -> Array:
        x = x if self.pools_last else ops.pool(x, step, self.kind)
        x = ops.activation(ops.linear(x, w["head_dense"]), self.activation)
        x = ops.pool(x, step, self.kind) if self.pools_last else x  # (L, E)
        if self.norm is not None:
            x = self.norm.record(ops, x, w, "head_norm")
        return ops.linear(x, w["classifier"])  # (L, labels)


BERT_WORDS = (
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.bias",
)


class SpladeHead(Record):
    """The greatest logit of each word over the tokens of a text, by the head of a masked language
    model (arXiv:2109.10086)."""

    vocab_size: int
    norm: Norm
    words: str
    """The module of the word embeddings, whose rows are those of the last matrix."""
    activation: ActKind = "gelu"
    names: tuple[str, str, str] = BERT_WORDS
    """The dense layer, the norm, and the bias of the words."""
    output: Literal["sparse_vectors"] = "sparse_vectors"

    def size(self, hidden_size: int) -> int:
        return self.vocab_size

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        dense, norm, bias = self.names
        words = (PartSpec(f"{self.words}.weight", self.vocab_size, bias),)
        return (
            WeightSpec("head_dense", "linear", (part(dense, hidden_size, True),), hidden_size),
            *self.norm.weights("head_norm", norm, hidden_size),
            WeightSpec("words", "linear", words, hidden_size),
        )

    def record(self, ops: Ops, w: Mapping[str, Weight], x: Array, step: StepInputs) -> Array:
        x = ops.activation(ops.linear(x, w["head_dense"]), self.activation)  # (T, E)
        x = ops.linear(self.norm.record(ops, x, w, "head_norm"), w["words"])  # (T, V)
        return ops.pool(x, step, "max")  # (L, V)


def read_modules(
    config: Mapping[str, Any], hidden_size: int
) -> tuple[PoolKind | None, tuple[tuple[WeightSpec, str], ...]]:
    """The pooling that `modules` names, and its dense layers with their activations. Raises
    UnsupportedModelError for layers that do not follow each other."""
    pooling: PoolKind | None = None
    dense: list[tuple[WeightSpec, str]] = []
    width = hidden_size
    for module in config.get("modules", ()):
        if module["kind"] == "pooling":
            pooling = module["pooling"]
        elif module["kind"] == "dense":
            if module["in"] != width:
                raise UnsupportedModelError(
                    f"the dense layer {module['folder']} takes {module['in']} features, what comes"
                    f" before it gives {width}: modules.json and its folders do not fit together"
                )
            source = ".".join(filter(None, (module["folder"], "linear")))
            matrix = part(source, module["out"], module["bias"])
            name = f"dense.{len(dense)}"
            dense.append((WeightSpec(name, "linear", (matrix,), width), module["activation"]))
            width = module["out"]
    return pooling, tuple(dense)


def pooled(config: Mapping[str, Any], hidden_size: int, default: PoolKind) -> LinearHead:
    """The vector that `modules` describes, or the one that is pooled by `default`. Dense layers
    without a pooling give the vector of each token."""
    pooling, dense = read_modules(config, hidden_size)
    if dense and pooling is None:
        return LinearHead("token_vectors", "last", dense)
    return LinearHead("vectors", pooling or default, dense)


def num_labels(read: ConfigReader) -> int:
    """`num_labels`, or as many as `id2label` names; 2 where config.json has neither."""
    names = read.config.get("id2label")
    if read.has("num_labels") or not isinstance(names, dict) or not names:
        return read.integer("num_labels", 2, high=MAX_LABELS)
    return len(names)
