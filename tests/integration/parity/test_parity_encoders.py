"""Encoders against Hugging Face transformers: what each token becomes, and the scores of heads, on
every backend that has their ops, from the files that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.errors import UnsupportedModelError, UnsupportedOpError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.specs import BackendSpec, ModelSpec
from vllmx_models.trunks.decoder import PooledDecoder
from vllmx_models.trunks.encoder import Encoder
from vllmx_models.trunks.pooling_heads import LinearHead
from vllmx_testing.harness import all_vectors
from vllmx_testing.plans import Row, Wanted, make_plan

from .conftest import registry

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from .encoder_formulas import FORMULAS, Formula, answer  # noqa: E402

LONGEST, BLOCKS = 80, 5
LENGTHS = (1, 37, 8, 80)
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}


@dataclass(frozen=True)
class Case:
    """A trunk or, with labels, a classifier."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    labels: int = 0
    masked: bool = False
    """True for a masked language model, whose trunk is compared."""

    @property
    def architecture(self) -> str:
        form = "ForMaskedLM" if self.masked else "Model"
        return TRUNKS[self.model_type] + ("ForSequenceClassification" if self.labels else form)


TRUNKS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
    "gte": "Gte",
    "new": "New",
    "gemma3_text": "Gemma3Text",
    "distilbert": "DistilBert",
    "eurobert": "EuroBert",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "jina_bert": "JinaBert",
    "mpnet": "MPNet",
    "nomic_moe": "NomicBert",
}

EMBEDDING_GEMMA: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 20,
    "sliding_window_pattern": 2,
}
NOMIC_MOE: dict[str, Any] = {
    "activation_function": "gelu",
    "expert_choice_router": False,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 56,
    "n_layer": 4,
    "n_positions": LONGEST,
    "num_experts": 5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000,
    "type_vocab_size": 1,
}
"""nomic-embed-text-v2's keys; those of TINY that it has under other names are not written."""
CASES = [
    Case("bert", "bert"),
    Case("bert-relu-3-types", "bert", {"hidden_act": "relu", "type_vocab_size": 3}),
    Case("bert-reranker", "bert", labels=1),
    Case("bert-classifier", "bert", labels=5),
    Case("bert-masked", "bert", masked=True),
    Case("roberta", "roberta", {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("roberta-classifier", "roberta", labels=2,
         options={"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("xlm-roberta-pad-3", "xlm-roberta",
         {"pad_token_id": 3, "max_position_embeddings": LONGEST + 4, "type_vocab_size": 1}),
    Case("roberta-masked", "roberta", masked=True,
         options={"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("xlm-roberta-masked", "xlm-roberta", masked=True,
         options={"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("xlm-roberta-reranker", "xlm-roberta", labels=1,
         options={"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("modernbert", "modernbert", {"local_attention": 12, "num_hidden_layers": 4}),
    Case("modernbert-biased-mean", "modernbert", labels=3,
         options={"local_attention": 9, "norm_bias": True, "attention_bias": True,
                  "mlp_bias": True, "classifier_bias": True, "classifier_pooling": "mean"}),
    Case("modernbert-reranker", "modernbert", {"classifier_activation": "relu"}, labels=1),
    Case("nomic-bert", "nomic_bert"),
    Case("nomic-bert-classifier", "nomic_bert", labels=4),
    Case("gte", "gte"),
    Case("gte-no-types", "gte", {"type_vocab_size": 0}),
    Case("gte-reranker", "gte", labels=1),
    Case("new", "new"),
    Case("new-reranker", "new", labels=1),
    Case("embedding-gemma", "gemma3_text", EMBEDDING_GEMMA),
    Case("distilbert", "distilbert", {"hidden_dim": 56}),
    Case("distilbert-masked", "distilbert", {"hidden_dim": 56}, masked=True),
    Case("distilbert-classifier", "distilbert", {"activation": "relu", "hidden_dim": 56}, labels=3),
    Case("eurobert", "eurobert", {"num_key_value_heads": 2, "head_dim": 16}),
    Case("eurobert-biased-bos", "eurobert", labels=2,
         options={"attention_bias": True, "mlp_bias": True, "classifier_pooling": "bos"}),
    Case("eurobert-mean", "eurobert", {"classifier_pooling": "mean"}, labels=1),
    Case("eurobert-late", "eurobert", {"classifier_pooling": "late"}, labels=3),
    Case("jina-v2", "jina_bert", {"feed_forward_type": "geglu", "type_vocab_size": 2}),
    Case("jina-v2-6-heads", "jina_bert",
         {"feed_forward_type": "reglu", "type_vocab_size": 2, "num_attention_heads": 6}),
    Case("jina-v2-masked", "jina_bert", masked=True,
         options={"feed_forward_type": "geglu", "type_vocab_size": 2}),
    Case("jina-v2-reranker", "jina_bert", labels=1,
         options={"feed_forward_type": "geglu", "type_vocab_size": 2}),
    Case("jina-v3", "jina_embeddings_v3"),
    Case("jina-v3-classifier", "jina_embeddings_v3", labels=2),
    Case("mpnet", "mpnet", {"max_position_embeddings": LONGEST + 2}),
    Case("mpnet-masked", "mpnet", {"max_position_embeddings": LONGEST + 2}, masked=True),
    Case("mpnet-classifier", "mpnet", {"max_position_embeddings": LONGEST + 2}, labels=2),
    Case("nomic-bert-moe", "nomic_moe", NOMIC_MOE),
]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A case that transformers saved, the texts that it was asked, and what it said of them."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    expected: F32


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Built]:
    found: dict[str, Built] = {}

    def build_(case: Case) -> Built:
        if case.name not in found:
            found[case.name] = build(case, tmp_path_factory.mktemp(case.name))
        return found[case.name]

    return build_


NTK: dict[str, Any] = {"type": "ntk", "factor": 8.0}
NEW: dict[str, Any] = {
    "model_type": "new",
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "rope_scaling": NTK,
}
"""What the first files of GTE say."""


def turned_by_ntk(model: Any) -> None:
    """Frequencies of a fixed NTK, as the code that came with those files computes them."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            size = 2 * len(module.inv_freq)
            base = NEW["rope_theta"] * NTK["factor"]
            found = 1 / base ** (torch.arange(0, size, 2).float() / size)
            module.inv_freq.copy_(found / NTK["factor"] ** (2 / size))


def build(case: Case, folder: Path) -> Built:
    """Builds a model with random weights in `folder`."""
    if case.model_type in FORMULAS:
        return build_formula(case, folder)
    torch.manual_seed(7)
    is_new = case.model_type == "new"
    options = {**TINY, "pad_token_id": 1, **case.options}
    if case.labels:
        options["num_labels"] = case.labels
    kind = "gte" if is_new else case.model_type
    config = transformers.AutoConfig.for_model(kind, **options)
    trunk = transformers.AutoModelForMaskedLM if case.masked else transformers.AutoModel
    auto = transformers.AutoModelForSequenceClassification if case.labels else trunk
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something, too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if is_new:
        turned_by_ntk(model)
        saved = json.loads((folder / "config.json").read_text()) | NEW
        del saved["rope_parameters"]
        (folder / "config.json").write_text(
            json.dumps({**saved, "architectures": [case.architecture]})
        )
    rows = _rows(getattr(config, "type_vocab_size", 0))
    expected = np.concatenate([_answer(model, row, case) for row in rows])
    return Built(folder, config.to_dict(), rows, expected)


def build_formula(case: Case, folder: Path) -> Built:
    """`build` for a model that transformers does not have."""
    config = {**TINY, "layer_norm_eps": 1e-12, **case.options}
    formula, rows = Formula(config), _rows(case.options["type_vocab_size"])
    expected = [
        answer(formula, case.model_type, case.labels, list(row.tokens), list(row.types))
        for row in rows
    ]
    if "n_embd" in case.options:
        shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "max_position_embeddings")  # fmt: skip
        config = {key: value for key, value in config.items() if key not in shared}
    config |= {"architectures": [case.architecture], "num_labels": case.labels or 2}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.numpy() for name, tensor in formula.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return Built(folder, config, rows, np.concatenate(expected))


def _rows(types: int) -> list[Row]:
    random = np.random.default_rng(5)
    return [
        Row(
            random.integers(4, TINY["vocab_size"], length).tolist(),
            0,
            range(index * BLOCKS, (index + 1) * BLOCKS),
            types=np.sort(random.integers(0, types, length)).tolist() if types > 1 else (),
        )
        for index, length in enumerate(LENGTHS)
    ]


def _answer(model: Any, row: Row, case: Case) -> F32:
    """(n, E) of the tokens, or the (1, labels) scores."""
    inputs = {"input_ids": torch.tensor([row.tokens])}
    if row.types:
        inputs["token_type_ids"] = torch.tensor([row.types])
    with torch.no_grad():
        output = (model.base_model if case.masked else model)(**inputs)
    found = output.logits if case.labels else output.last_hidden_state[0]
    answer: F32 = found.numpy()
    return answer


def replace_head(model: Encoder | PooledDecoder, head: LinearHead) -> Model:
    """The same trunk."""
    if isinstance(model, Encoder):
        return Encoder(model.spec, head)
    return PooledDecoder(model.spec, head)


@contextmanager
def loading(name: str, path: Path, labels: int) -> Iterator[LoadedModel]:
    """The model on a backend, in float32; without labels each token of a text is an answer."""
    checkpoint = open_checkpoint(registry(), path)
    with closing(checkpoint.weights):
        model = build_model(registry(), checkpoint)
        assert model.shape.max_model_len == LONGEST
        if not labels:  # the last token of a text that ends with each of its tokens
            assert isinstance(model, Encoder | PooledDecoder)
            model = replace_head(model, LinearHead("vectors", "last"))
        options = LoadOptions(
            dtype="f32",
            kv_cache_dtype="f32",
            max_model_len=LONGEST,
            max_num_seqs=4,
            max_num_batched_tokens=sum(LENGTHS),
            block_size=16,
            num_kv_blocks=20,
            num_threads=1,
        )
        backend = registry().get(BackendSpec, name).load()()
        with closing(backend.load(model, checkpoint.weights, options)) as loaded:
            yield loaded


def load_numpy(path: Path, labels: int) -> AbstractContextManager[LoadedModel]:
    """Loads a model on the reference."""
    return loading("numpy", path, labels)


def wanted_rows(given: Built, case: Case) -> list[Row]:
    """The texts, each of whose tokens is asked for, or the last one alone."""
    wanted: Wanted = "last" if case.labels else "all"
    return [Row(row.tokens, 0, row.blocks, wanted, types=row.types) for row in given.rows]


def test_the_record_has_these() -> None:
    specs = [spec for spec in registry().all(ModelSpec) if "vectors" in spec.checked]
    names = {name for spec in specs for name in spec.architectures}
    assert names == {case.architecture for case in CASES} | {"HF_ColBERT"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_and_scores(case: Case, built: Callable[[Case], Built], backend_name: str) -> None:
    given = built(case)
    named = json.loads((given.folder / "config.json").read_text())["architectures"]
    assert named[0] == case.architecture
    try:
        with loading(backend_name, given.folder, case.labels) as loaded:
            found = all_vectors(loaded, make_plan(wanted_rows(given, case), 16))
    except UnsupportedOpError as error:
        assert backend_name not in registry().model_for({"architectures": named}).backends
        pytest.skip(error.message)
    assert np.abs(found - given.expected).max() < 2e-5 * np.abs(given.expected).max()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"pack_qkv": False}, "pack_qkv"),
        ({"rope_scaling": {**NTK, "mixed_b": 0.7}}, "mixed_b"),
        ({"rope_scaling": {"type": "unheard"}}, "unheard"),
    ],
)
def test_other_models_that_are_called_new(change: dict[str, Any], error: str) -> None:
    config = {"architectures": ["NewModel"], **TINY, **NEW, **change}
    with pytest.raises(UnsupportedModelError, match=error):
        registry().model_for(config).load()(config)
