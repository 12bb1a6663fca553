"""Encoders through the public interface, with WordPiece and Unigram tokenizers: embeddings and
scores of pairs against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors
from vllmx import LLM
from vllmx_core.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError

from tests.usable_backends import backend_spec

from .parity.test_parity_encoders import CASES, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdeorst", *(f"##{c}" for c in "abcdeorst")]
WORDS += ["cat", "dog", "##s", "are", "the", "##at", "do", "."]
CONFIG: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 24,
}
TEXTS = ["The cats are cats.", "a dog", "dogs"]
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


def word_piece() -> tokenizers.Tokenizer:
    ids = {word: index for index, word in enumerate(dict.fromkeys(WORDS))}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def unigram() -> tokenizers.Tokenizer:
    pieces = [*["<s>", "<pad>", "</s>", "<unk>"], "\u2581", *"acdegorst.", "\u2581cat", "\u2581dog"]
    scores = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    made = tokenizers.Tokenizer(models.Unigram(scores, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s>:1 $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return made


def save(folder: Path, model: Any, tokenizer: tokenizers.Tokenizer) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def random(kind: str, classes: str, **options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIG, **options})
    model = getattr(transformers, classes).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, model = tmp_path_factory.mktemp("embedder"), random("bert", "AutoModel")
    save(folder, model, word_piece())
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder, model


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_vectors_are_means_of_length_one(embedder: tuple[Path, Any], backend: str) -> None:
    folder, model = embedder
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            ids = torch.tensor([word_piece().encode(text).ids])
            mean = model(ids).last_hidden_state[0].mean(0).numpy()
        expected.append(mean / np.linalg.norm(mean))
    with LLM(str(folder), backend=backend, dtype="f32") as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS)]
        with pytest.raises(ContextLengthError):
            llm.embed("cats " * 30)
        assert len(llm.embed("cats " * 30, truncate_prompt_tokens=-1)) == 1
        with pytest.raises((InvalidRequestError, UnsupportedModelError)):
            llm.generate("The cats")
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("bert", {"type_vocab_size": 2}), ("xlm-roberta", {"type_vocab_size": 1, "pad_token_id": 1})],
)
def test_scores_of_pairs(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A tokenizer tells two texts apart for XLM-RoBERTa too, which has one type for both."""
    model = random(kind, "AutoModelForSequenceClassification", num_labels=1, **options)
    tokenizer = word_piece() if kind == "bert" else unigram()
    save(tmp_path, model, tokenizer)
    expected = []
    for text in TEXTS:
        encoded = tokenizer.encode("a cat", text)
        types = {"token_type_ids": torch.tensor([encoded.type_ids])} if kind == "bert" else {}
        with torch.no_grad():
            logits = model(torch.tensor([encoded.ids]), **types).logits
        expected.append(torch.sigmoid(logits).item())
    with LLM(str(tmp_path), backend="cpu", dtype="f32") as llm:
        found = [one.outputs.score for one in llm.score("a cat", TEXTS)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_tasks_of_a_classifier(tmp_path: Path) -> None:
    """It embeds by what its head stands on, and does not score where it has several labels."""
    model = random("bert", "AutoModelForSequenceClassification", num_labels=3, type_vocab_size=2)
    save(tmp_path, model, word_piece())
    options: dict[str, Any] = {"backend": "cpu", "dtype": "f32"}
    with LLM(str(tmp_path), task="embed", **options) as llm:
        for output in llm.embed(TEXTS):
            with torch.no_grad():
                ids = torch.tensor([output.prompt_token_ids])
                mean = model.bert(ids).last_hidden_state[0].mean(0).numpy()
            unit = mean / np.linalg.norm(mean)
            np.testing.assert_allclose(output.outputs.data, unit, rtol=0, atol=2e-6)
    with pytest.raises(UnsupportedModelError, match=r"3 labels \('LABEL_0'.* load a reranker"):
        LLM(str(tmp_path), task="score", **options)
    with pytest.raises(UnsupportedModelError, match="has no classification head: leave --task out"):
        LLM("demo", task="classify", **options)


def colbert(folder: Path, dense: Any) -> None:
    """The folder of `folder`'s BERT as Stanford saves it: a layer in the model's own file."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"bert.{name}": value for name, value in tensors.items()}
    safetensors.numpy.save_file(
        tensors | {"linear.weight": dense.numpy()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))


def pylate(folder: Path, dense: Any) -> None:
    """The same as PyLate saves it: a layer in a folder of its own, and no pooling."""
    listed = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "pylate.models.Dense.Dense", "path": "1_Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    settings = {"in_features": 48, "out_features": 16, "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
    (folder / "1_Dense" / "config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(
        {"linear.weight": dense.numpy()}, folder / "1_Dense" / "model.safetensors"
    )


@pytest.mark.parametrize("layout", [colbert, pylate])
@pytest.mark.parametrize("backend", ["cpu", "metal", "numpy", "torch"])
def test_vectors_of_tokens_and_their_scores(layout: Any, backend: str, tmp_path: Path) -> None:
    """More texts than rows of a step, and a step of several texts."""
    backend_spec(backend)
    model = random("bert", "AutoModel")
    save(tmp_path, model, word_piece())
    dense = torch.randn(16, 48, generator=torch.Generator().manual_seed(5))
    layout(tmp_path, dense)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            ids = torch.tensor([word_piece().encode(text).ids])
            rows = model(ids).last_hidden_state[0] @ dense.T
        expected.append(torch.nn.functional.normalize(rows, dim=-1).numpy())
    with LLM(str(tmp_path), backend=backend, dtype="f32", max_num_seqs=2) as llm:
        for output, vectors in zip(llm.token_embed(TEXTS), expected, strict=True):
            np.testing.assert_allclose(output.outputs.data, vectors, rtol=0, atol=5e-6)
        scores = [each.outputs.score for each in llm.score(TEXTS[1], TEXTS)]
        with pytest.raises(InvalidRequestError, match="there to score texts and cannot embed"):
            llm.embed(TEXTS)
    wanted = [(expected[1] @ each.T).max(axis=1).sum() for each in expected]
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=2e-5)


def test_a_dense_layer_with_a_residual_is_refused(tmp_path: Path) -> None:
    save(tmp_path, random("bert", "AutoModel"), word_piece())
    pylate(tmp_path, torch.zeros(16, 48))
    path = tmp_path / "1_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_residual": True}))
    with pytest.raises(UnsupportedModelError, match="use_residual"):
        LLM(str(tmp_path), backend="numpy")


@pytest.mark.parametrize(("kind", "options"), [("bert", {}), ("distilbert", {"hidden_dim": 80})])
@pytest.mark.parametrize("backend", ["cpu", "metal", "numpy", "torch"])
def test_sparse_vectors(kind: str, options: dict[str, Any], backend: str, tmp_path: Path) -> None:
    """SPLADE as sentence-transformers computes it: log(1 + relu(logit)), the greatest of a text."""
    backend_spec(backend)
    model = random(kind, "AutoModelForMaskedLM", **options)
    save(tmp_path, model, word_piece())
    listed = [
        {"type": "sentence_transformers.sparse_encoder.models.MLMTransformer", "path": ""},
        {"type": "sentence_transformers.sparse_encoder.models.SpladePooling", "path": "1_Splade"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Splade").mkdir()
    settings = {"pooling_strategy": "max", "activation_function": "relu"}
    (tmp_path / "1_Splade" / "config.json").write_text(json.dumps(settings))
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            logits = model(torch.tensor([word_piece().encode(text).ids])).logits[0]
        expected.append(torch.log1p(torch.relu(logits)).amax(0).numpy())
    for task in ("auto", "embed"):
        with LLM(str(tmp_path), backend=backend, dtype="f32", task=task) as llm:
            found = [each.outputs.data for each in llm.embed(TEXTS)]
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=2e-5)
    settings["pooling_strategy"] = "sum"
    (tmp_path / "1_Splade" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="'sum'"):
        LLM(str(tmp_path), backend=backend)


def test_an_embedder_that_is_saved_as_a_masked_model(tmp_path: Path) -> None:
    """all-mpnet-base-v2 names its class so; its modules pool."""
    model = random("mpnet", "AutoModelForMaskedLM", pad_token_id=1, max_position_embeddings=26)
    save(tmp_path, model, word_piece())
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(str(tmp_path), backend="cpu", dtype="f32") as llm:
        for output in llm.embed(TEXTS):
            with torch.no_grad():
                ids = torch.tensor([output.prompt_token_ids])
                mean = model.mpnet(ids).last_hidden_state[0].mean(0).numpy()
            unit = mean / np.linalg.norm(mean)
            np.testing.assert_allclose(output.outputs.data, unit, rtol=0, atol=2e-6)


@pytest.mark.parametrize("isq", ["int8", "fp8", "q8_0"])
def test_experts_of_an_encoder_are_quantised_while_loading(isq: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "nomic-bert-moe")
    build(case, tmp_path)
    word_piece().save(str(tmp_path / "tokenizer.json"))
    found = []
    for encoding in (None, isq):
        with LLM(str(tmp_path), backend="cpu", dtype="f32", isq=encoding) as llm:
            found.append(np.array([each.outputs.data for each in llm.embed(TEXTS)]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=0.02)
