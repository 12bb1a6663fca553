"""The architecture that answers with vectors: every installed backend against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import UnsupportedModelError, UnsupportedOpError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_example_model.electra import electra, electra_classifier
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "embedding_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [60, 0, 7]]


def random(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.ElectraConfig(**CONFIG, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def answers(model: Any, twin: Any) -> dict[str, np.ndarray]:
    """(L, width) of the texts, by backend."""
    weights = {name: value.numpy() for name, value in twin.state_dict().items()}
    rows = [Row(text, 0, [index], "last") for index, text in enumerate(TEXTS)]
    found = {}
    for spec in load_registry().all(BackendSpec):
        if spec.unavailable_reason() is not None:
            continue
        options = LoadOptions(dtype="f32", max_model_len=64, num_kv_blocks=8, max_num_seqs=4)
        try:
            loaded = spec.load()().load(model, ArraySource(weights), options)
        except UnsupportedOpError:
            continue  # a backend may lag
        found[spec.name] = loaded.step(make_plan(rows, 16), sampling_rows(0)).result().vectors
        loaded.close()
    assert "numpy" in found
    return found


def test_vectors_are_those_of_transformers() -> None:
    twin = random("ElectraModel")
    with torch.no_grad():
        wanted = [twin(torch.tensor([text])).last_hidden_state[0].mean(0) for text in TEXTS]
    for vectors in answers(electra(CONFIG), twin).values():
        np.testing.assert_allclose(vectors, np.stack(wanted), rtol=0, atol=2e-5)


def test_scores_are_those_of_transformers() -> None:
    twin = random("ElectraForSequenceClassification", num_labels=3)
    with torch.no_grad():
        wanted = [twin(torch.tensor([text])).logits[0] for text in TEXTS]
    model = electra_classifier(CONFIG | {"num_labels": 3})
    for scores in answers(model, twin).values():
        np.testing.assert_allclose(scores, np.stack(wanted), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 5}, {"hidden_act": "swish-1"}, {"embedding_size": 8}]
)
def test_bad_configs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        electra(CONFIG | change)
