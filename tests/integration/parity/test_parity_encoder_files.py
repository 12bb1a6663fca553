"""Encoders out of GGUF files, whose names of tensors are those of the `gguf` package, against
Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_testing.harness import all_vectors
from vllmx_testing.plans import make_plan

from .conftest import registry
from .test_parity_encoders import (
    EMBEDDING_GEMMA,
    LONGEST,
    NOMIC_MOE,
    TINY,
    Built,
    Case,
    build,
    load_numpy,
    wanted_rows,
)

gguf = pytest.importorskip("gguf")

FORMS = {
    "bert": "BERT",
    "roberta": "BERT",
    "modernbert": "MODERN_BERT",
    "nomic_bert": "NOMIC_BERT",
    "gemma3_text": "GEMMA_EMBEDDING",
    "eurobert": "EUROBERT",
    "jina_bert": "JINA_BERT_V2",
    "jina_embeddings_v3": "JINA_BERT_V3",
    "nomic_moe": "NOMIC_BERT_MOE",
}
CASES = [
    Case("bert", "bert"),
    Case("bert-reranker", "bert", labels=1),
    Case("roberta", "roberta", {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}),
    Case("modernbert", "modernbert", {"local_attention": 12, "norm_bias": True}),
    Case("nomic-bert", "nomic_bert"),
    Case("eurobert", "eurobert", {"num_key_value_heads": 2, "head_dim": 16}),
    Case("jina-v2", "jina_bert", {"feed_forward_type": "geglu", "type_vocab_size": 2}),
    Case("jina-v2-split", "jina_bert", {"feed_forward_type": "geglu", "type_vocab_size": 2}),
    Case("jina-v3", "jina_embeddings_v3"),
    Case("nomic-bert-moe", "nomic_moe", {**NOMIC_MOE, "moe_bias": False}),
    Case("embedding-gemma", "gemma3_text", {**EMBEDDING_GEMMA, "query_pre_attn_scalar": 16}),
]
EXTRA: dict[str, dict[str, Any]] = {
    "modernbert": {"attention.sliding_window": 12, "attention.sliding_window_pattern": 3,
                   "rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0},
    "embedding-gemma": {"attention.sliding_window": 12, "attention.sliding_window_pattern": 2,
                        "attention.head_count_kv": 2, "attention.key_length": 16,
                        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
                        "rope.freq_base": 1e6, "pooling_type": 1},
    "nomic-bert": {"rope.freq_base": 1000.0},
    "bert": {"pooling_type": 2},
    "eurobert": {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": 2,
                 "attention.key_length": 16, "attention.value_length": 16,
                 "rope.freq_base": 10000.0},
    "jina-v3": {"rope.freq_base": 20000.0},
    "nomic-bert-moe": {"rope.freq_base": 10000.0, "moe_every_n_layers": 2, "expert_count": 5,
                       "expert_used_count": 2},
}  # fmt: skip
DENSE = {"embedding-gemma": {"dense_2.weight": (64, 48), "dense_3.weight": (48, 64)}}
HEADS = {"bert.pooler.dense": "cls", "classifier": "cls.output"}


def write(given: Built, case: Case, path: Path, **changes: Any) -> Path:
    """The folder that transformers saved as llama.cpp's converter would write it."""
    form = getattr(gguf.MODEL_ARCH, FORMS[case.model_type])
    names = gguf.get_tensor_name_map(form, 4)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[form])
    layers = case.options.get("n_layer", TINY["num_hidden_layers"])
    writer.add_block_count(layers)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    eps = 1e-5 if case.model_type in ("modernbert", "roberta") else 1e-12
    if case.model_type not in ("gemma3_text", "eurobert"):
        writer.add_layer_norm_eps(given.config.get("layer_norm_eps", eps))
    values = {"attention.causal": False, **EXTRA.get(case.name, {}), **changes}
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{gguf.MODEL_ARCH_NAMES[form]}.{key}", value)
    source = open_checkpoint(registry(), given.folder).weights
    for name in sorted(source.names()):
        stem, dot, end = name.rpartition(".")
        if "pooler" in stem and not case.labels:
            continue
        tensor = source.part(name).dequantize()
        if name.endswith((".w1", ".w2")):
            stem, dot, end = name, ".", "weight"
            tensor = tensor.reshape(case.options["num_experts"], -1, tensor.shape[-1])
            tensor = tensor.swapaxes(1, 2) if name.endswith("w2") else tensor
        if stem.endswith("gated_layers") and case.name == "jina-v2-split":
            for half, part in zip("wv", np.split(tensor, 2), strict=True):
                writer.add_tensor(f"{names.get_name(f'{stem}_{half}')}.weight", part)
            continue
        found = HEADS.get(stem) or names.get_name(stem.removeprefix("bert."))
        assert found is not None, name
        if found == "position_embd":
            tensor = tensor[len(tensor) - LONGEST :]
        if case.model_type == "gemma3_text" and stem.endswith("norm"):
            tensor = tensor + np.float32(1)
        writer.add_tensor(found + dot + end, tensor)
    source.close()
    for name, shape in DENSE.get(case.name, {}).items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Built]:
    return lambda case: build(case, tmp_path_factory.mktemp(case.name))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_hold_the_model(case: Case, built: Callable[[Case], Built], tmp_path: Path) -> None:
    given = built(case)
    with load_numpy(write(given, case, tmp_path / "model.gguf"), case.labels) as loaded:
        found: F32 = all_vectors(loaded, make_plan(wanted_rows(given, case), 16))
    assert np.abs(found - given.expected).max() < 2e-5 * np.abs(given.expected).max()


def test_pooling_and_what_is_refused(built: Callable[[Case], Built], tmp_path: Path) -> None:
    case = CASES[0]
    given = built(case)
    checkpoint = open_checkpoint(registry(), write(given, case, tmp_path / "cls.gguf"))
    assert checkpoint.config["modules"][0] == {"kind": "pooling", "pooling": "cls"}
    assert build_model(registry(), checkpoint).shape.output == "vectors"
    checkpoint.weights.close()
    gemma = CASES[-1]
    checkpoint = open_checkpoint(registry(), write(built(gemma), gemma, tmp_path / "gemma.gguf"))
    kinds = [module["kind"] for module in checkpoint.config["modules"]]
    assert kinds == ["pooling", "dense", "dense", "normalize"]
    names = {
        part.name for one in build_model(registry(), checkpoint).weights() for part in one.parts
    }
    assert {"2_Dense.linear.weight", "3_Dense.linear.weight"} <= names
    checkpoint.weights.close()
    causal = write(given, case, tmp_path / "causal.gguf", **{"attention.causal": True})
    with pytest.raises(WeightFormatError, match=r"attention\.causal = True must be false"):
        open_checkpoint(registry(), causal)
    unknown = write(given, case, tmp_path / "unknown.gguf", pooling_type=9)
    with pytest.raises(UnsupportedModelError, match="pooling_type = 9 is not known"):
        open_checkpoint(registry(), unknown)
