"""Embeddings, scores and classes of decoders through the public interface, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from vllmx import LLM
from vllmx_core.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightFormatError,
)
from vllmx_core.plan import F32
from vllmx_demo.source import MODEL_FOLDER

from ..null.gguf.models import TYPES, convert_folder, of_type  # noqa: TID252 - no package to name

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN, TEXTS = 4096, 48, ["Once upon a time there was a cat.", "The", "Once upon a dog."]
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
MODULES = ["Transformer", "Pooling", "Dense", "Normalize"]
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Makes the folder of a model."""

    def make(model: Any, **files: Any) -> Path:
        folder = tmp_path_factory.mktemp(type(model).__name__)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(MODEL_FOLDER) / name, folder)
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture(scope="module")
def trunk() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG)).eval()


@pytest.fixture(scope="module")
def folder(save: Save, trunk: Any) -> Path:
    return save(trunk)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), backend="numpy") as llm:
        yield llm


def hidden(trunk: Any, ids: list[int]) -> F32:
    """(T, E)"""
    with torch.no_grad():
        found: F32 = trunk(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


def unit(x: F32) -> F32:
    return x / np.linalg.norm(x)


def test_embeddings_equal_transformers(llm: LLM, trunk: Any) -> None:
    for output in llm.embed(TEXTS):
        wanted = unit(hidden(trunk, output.prompt_token_ids)[-1])
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=2e-5)


def test_fewer_dimensions_have_length_one_again(llm: LLM) -> None:
    (whole,), (cut,) = llm.embed(TEXTS[:1]), llm.embed(TEXTS[:1], dimensions=7)
    np.testing.assert_allclose(cut.outputs.data, unit(whole.outputs.data[:7]), atol=1e-6)
    (plain,) = llm.embed(TEXTS[0], normalize=False)
    np.testing.assert_allclose(unit(plain.outputs.data), whole.outputs.data, atol=1e-6)
    assert abs(np.linalg.norm(plain.outputs.data) - 1) > 1e-3
    with pytest.raises(InvalidRequestError, match="between 1 and the model's 48"):
        llm.embed(TEXTS[0], dimensions=49)


def test_a_score_of_an_embedder_is_a_cosine(llm: LLM) -> None:
    first, second = (each.outputs.data for each in llm.embed(TEXTS[:2]))
    same, other = llm.score(TEXTS[0], TEXTS[:2])
    assert same.outputs.score == pytest.approx(1, abs=1e-6)
    assert other.outputs.score == pytest.approx(float(first @ second), abs=1e-6)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_and_stages_embed_as_one_process(folder: Path, llm: LLM, name: str) -> None:
    """Long texts in chunks, the second time with hits; stages send vectors, ranks have them all."""
    texts = [*TEXTS, " ".join(TEXTS * 3)]
    wanted = [each.outputs.data for each in llm.embed(texts)]
    options: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "num_threads": 2, name: 2}
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=19, **options) as divided:
        assert divided.info.details["ranks"] == "2"
        for _ in range(2):
            for each, vector in zip(divided.embed(texts), wanted, strict=True):
                np.testing.assert_allclose(each.outputs.data, vector, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_chunks_and_prefixes_change_nothing(folder: Path, llm: LLM, backend: str) -> None:
    """Rows leave after their one result, so that many more texts than rows go through."""
    long = " ".join(TEXTS * 6)
    texts = [long[: 40 + 9 * n] for n in range(20)]
    wanted = [each.outputs.data for each in llm.embed(texts)]
    options: dict[str, Any] = {"backend": backend, "dtype": "float32", "num_threads": 1}
    with LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=19, **options) as small:
        for _ in range(2):
            for each, vector in zip(small.embed(texts), wanted, strict=True):
                np.testing.assert_allclose(each.outputs.data, vector, atol=2e-5)
        core = small._engine._core
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.prefix_cache_hits > 0


def test_too_long_texts_are_refused_or_cut(llm: LLM) -> None:
    text = " ".join(TEXTS * 20)
    with pytest.raises(ContextLengthError, match="takes 128"):
        llm.embed(text)
    (cut,) = llm.embed(text, truncate_prompt_tokens=-1)
    assert 120 < len(cut.prompt_token_ids) <= 128
    (ten,) = llm.embed(text, truncate_prompt_tokens=10)
    assert len(ten.prompt_token_ids) == 10
    (full,) = llm.embed([[5] * 128])  # no room for a token of an answer is needed
    assert full.error is None


def test_what_the_model_does_not_do_is_refused_with_a_remedy(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="generates no text"):
        llm.generate("Once")
    with pytest.raises(InvalidRequestError, match="load a model with a classification head"):
        llm.classify("Once")
    with (
        LLM("demo", backend="numpy", num_kv_blocks=8) as demo,
        pytest.raises(InvalidRequestError, match="load an embedding model"),
    ):
        demo.embed("Once")


def test_a_broken_text_fails_alone(save: Save, trunk: Any) -> None:
    folder = save(trunk)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"][7] = np.nan
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with LLM(str(folder), backend="numpy") as llm:
        good, broken, last = llm.embed([[5, 6], [6, 7, 8], [5]])
    assert broken.error is not None
    assert "not finite" in broken.error
    assert good.error is None
    assert last.error is None
    assert len(last.outputs.data) == HIDDEN


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_modules_of_sentence_transformers(save: Save, trunk: Any, pooling: str) -> None:
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"st.models.{kind}"}
        for n, kind in enumerate(MODULES)
    ]
    settings = {"prompts": {"query": "Find: "}, "default_prompt_name": None}
    folder = save(trunk, modules=modules, config_sentence_transformers=settings)
    mode = {"mean": "mean_tokens", "cls": "cls_token"}.get(pooling, pooling)
    for name, content in (
        ("1_Pooling", {"word_embedding_dimension": HIDDEN, f"pooling_mode_{mode}": True}),
        ("2_Dense", {"in_features": HIDDEN, "out_features": 9, "bias": True}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    w, b = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((9, HIDDEN), (9,)))
    dense = {"linear.weight": w, "linear.bias": b}
    safetensors.numpy.save_file(dense, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    pick = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "lasttoken": lambda x: x[-1]}[
        pooling
    ]
    with LLM(str(folder), backend="cpu", dtype="float32", max_num_batched_tokens=16) as llm:
        bare, found = llm.embed(TEXTS[0]), llm.embed(TEXTS[0], prompt_name="query")
        with pytest.raises(InvalidRequestError, match="known: query"):
            llm.embed("x", prompt_name="passage")
    for output in (*bare, *found):
        wanted = unit(w @ pick(hidden(trunk, output.prompt_token_ids)) + b)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)
    assert len(found[0].prompt_token_ids) > len(bare[0].prompt_token_ids)


def test_means_of_layers_with_windows_want_all_blocks_at_once(save: Save) -> None:
    torch.manual_seed(4)
    config = transformers.MistralConfig(**CONFIG, sliding_window=21)
    model = transformers.MistralModel(config).eval()
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    folder = save(model, modules=modules)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    texts = [list(range(5, 5 + size)) for size in (120, 90, 128, 3)]
    options: dict[str, Any] = {"num_kv_blocks": 9, "num_threads": 1, "dtype": "float32"}
    with LLM(str(folder), backend="cpu", **options) as llm:
        assert llm.info.max_num_batched_tokens >= 128
        for ids, output in zip(texts, llm.embed(texts), strict=True):
            wanted = hidden(model, ids).mean(0)  # without a module that makes its length 1
            np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)


def test_a_text_is_as_long_as_sentence_transformers_has_it(save: Save, trunk: Any) -> None:
    """The limit holds unless more is asked for, up to what the model was made for."""
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    folder = save(trunk, modules=modules, sentence_bert_config={"max_seq_length": 40})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    with LLM(str(folder), backend="numpy") as llm:
        assert llm.info.max_model_len == 40
        with pytest.raises(ContextLengthError, match=r"input 1: the text has 41.* takes 40"):
            llm.embed([[5], [5] * 41])
        with pytest.raises(InvalidRequestError, match="input 2: the text has no tokens"):
            llm.embed([[5], [6], []])
        (cut,) = llm.embed([[5] * 41], truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 40
    with LLM(str(folder), backend="numpy", max_model_len=64) as llm:
        assert llm.info.max_model_len == 64
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(WeightFormatError, match="max_seq_length = 'long'"):
        LLM(str(folder), backend="numpy")


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_a_file_that_pools_makes_vectors(tmp_path: Path, kind: str) -> None:
    """A decoder's GGUF file by its `pooling_type`; `--task generate` has the last word."""
    pooling = gguf.PoolingType[kind]
    path = convert_folder(
        Path(MODEL_FOLDER),
        tmp_path / "model.gguf",
        of_type(TYPES.F32),
        extra=lambda writer: writer.add_pooling_type(pooling),
    )
    options: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "max_model_len": 64}
    with LLM(str(path), **options) as llm, LLM("demo", task="embed", **options) as plain:
        (found,), (last,) = llm.embed([[5, 6, 7]]), plain.embed([[5, 6, 7]])
        alike = np.allclose(found.outputs.data, last.outputs.data, atol=1e-5)
        assert alike == (kind == "LAST")
        assert abs(np.linalg.norm(found.outputs.data) - 1) < 1e-5
    with LLM(str(path), task="generate", **options) as llm:
        assert llm.info.pooling is None


@pytest.mark.parametrize("ranks", [True, False], ids=["it says so", "it is asked to"])
def test_a_reranker_in_a_file_scores_as_its_folder_does(
    save: Save, tmp_path: Path, ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's converter writes Qwen3-Reranker: two rows in the place of the head, and a
    `pooling_type` that says so. Files with a head are asked to score."""
    monkeypatch.setattr("vllmx_engine.core.pooling._ANSWERS", ["a", "b"])  # of the demo's words
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG))
    folder = save(model)
    saved = json.loads((folder / "config.json").read_text())
    saved["rope_theta"] = saved["rope_parameters"]["rope_theta"]  # where the writer looks for it
    (folder / "config.json").write_text(json.dumps(saved))
    options: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "max_model_len": 128}
    with LLM(str(folder), task="score", **options) as llm:
        found = llm.score("cat", TEXTS, truncate_prompt_tokens=-1)
        wanted = [(each.prompt_token_ids, each.outputs.score) for each in found]
        no, yes = (llm.tokenizer.token_to_id(token) for token in "ab")

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        rows = model.lm_head.weight[[yes, no]].detach().numpy()
        writer.add_tensor("cls.output.weight", rows)

    path, more = tmp_path / "model.gguf", {"extra": extra, "without": "output.weight"}
    convert_folder(folder, path, of_type(TYPES.F32), **more if ranks else {})
    with LLM(str(path), task="auto" if ranks else "score", **options) as llm:
        for (ids, score), one in zip(
            wanted, llm.score("cat", TEXTS, truncate_prompt_tokens=-1), strict=True
        ):
            assert one.prompt_token_ids == ids
            assert one.outputs.score == pytest.approx(score, abs=2e-5)


def test_a_default_prompt_that_is_no_name_is_none(save: Save, trunk: Any) -> None:
    settings = {"prompts": {"query": "Find: "}, "default_prompt_name": {}}
    modules = [{"path": "", "type": "x.Transformer"}]
    folder = save(trunk, modules=modules, config_sentence_transformers=settings)
    with LLM(str(folder), backend="numpy") as llm:
        assert llm.info.pooling is not None
        assert llm.info.pooling.default_prompt is None


def test_unknown_modules_and_damaged_files_are_refused(save: Save, trunk: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="'CNN'"):
        LLM(str(save(trunk, modules=[{"path": "1_CNN", "type": "x.CNN"}])), backend="numpy")
    listed = [{"path": "1_Pooling", "type": "x.Pooling"}, {"path": "2_Dense", "type": "x.Dense"}]
    folder = save(trunk, modules=listed)
    odd: dict[str, Any] = {"in_features": ["x" * 5000] * 20, "out_features": 9}
    for name, settings in (("1_Pooling", {"pooling_mode": "mean"}), ("2_Dense", odd)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="is a dense layer") as raised:
        LLM(str(folder), backend="numpy")
    assert len(str(raised.value)) < 600
    for path in ("../x", "x" * 5000, "x\x1b"):
        with pytest.raises(WeightFormatError, match="outside") as outside:
            LLM(str(save(trunk, modules=[{"path": path, "type": "x.Dense"}])), backend="numpy")
        assert len(str(outside.value)) < 600
        assert str(outside.value).isprintable()
    with pytest.raises(UnsupportedModelError, match="has no head to generate"):
        LLM(str(save(trunk)), backend="numpy", task="generate")


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_classifiers_equal_transformers(save: Save, family: str, labels: int) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**CONFIG, num_labels=labels)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with LLM(str(save(model)), backend="cpu", dtype="float32") as llm:
        assert llm.info.pooling is not None
        assert llm.info.pooling.labels == [f"LABEL_{n}" for n in range(labels)]
        for output in llm.classify(TEXTS):
            with torch.no_grad():
                logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
            wanted = logits.sigmoid() if labels == 1 else logits.softmax(-1)
            np.testing.assert_allclose(output.outputs.probs, wanted.numpy(), atol=2e-5)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_layers_of_a_causal_model_embed(save: Save, family: str) -> None:
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**CONFIG)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for twin, task in ((model, "embed"), (model.model, "auto")):
        with LLM(str(save(twin)), backend="numpy", task=task) as llm:
            for output in llm.embed(TEXTS):
                wanted = unit(hidden(model.model, output.prompt_token_ids)[-1])
                np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reranker_scores_by_two_rows_of_its_head(save: Save, tied: bool) -> None:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        **CONFIG, tie_word_embeddings=tied, classifier_from_token=["a", "b"]
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    folder = save(model)
    with LLM(str(folder), backend="cpu", dtype="float32", task="score", max_model_len=128) as llm:
        no, yes = (llm.tokenizer.token_to_id(token) for token in "ab")
        for output in llm.score("cat", TEXTS, truncate_prompt_tokens=-1):
            with torch.no_grad():
                logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
            wanted = torch.sigmoid(logits[yes] - logits[no])
            assert output.outputs.score == pytest.approx(float(wanted), abs=2e-5)
        text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        assert "<Query>: cat\n<Document>: Once upon a dog." in text
