"""EAGLE-3 and DFlash as `--speculate model:PATH`: they draft as their formulas say, and change no
answer."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError, UnsupportedModelError
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.core.block_drafter import BlockDrafter
from vllmx_engine.core.hidden_drafter import HiddenDrafter
from vllmx_engine.core.speculation import Drafting

from tests.usable_backends import backend_spec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ..drafter_checkpoints import DFlashFormula, Eagle3Formula, dflash, eagle3  # noqa: E402, TID252
from . import draft_runs  # noqa: E402

TARGET = json.loads((MODEL_FOLDER / "config.json").read_text())
POINTS = [1, 3, 5]
CONFIG = draft_runs.CONFIG
TEXTS = (
    "Once upon a time there was a little dog. Once upon a time there was a little",
    "Tom and Lily went to the park. Tom and Lily",
    "One day, a",
)
Formula = Eagle3Formula | DFlashFormula


class Oracle:
    """The demo model in float64."""

    def __init__(self) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
        self._model = model.double().eval()
        self.embedding = self._model.model.embed_tokens.weight.detach().numpy()

    def states(self, tokens: Any) -> Any:
        """(T, 3E) the hidden states at `POINTS`."""
        with torch.no_grad():
            given = torch.tensor([list(tokens)])
            found = self._model(given, output_hidden_states=True).hidden_states
        return np.concatenate([found[point][0].numpy() for point in POINTS], -1)


@cache
def oracle() -> Oracle:
    return Oracle()


def save(kind: str, folder: Path, **more: Any) -> Formula:
    """A drafter of the demo model that is right now and then: it has the most frequent ids."""
    known, ids = oracle().embedding, np.concatenate([one[1] for one in plain()])
    common = np.argsort(-np.bincount(ids, minlength=TARGET["vocab_size"]), kind="stable")[:24]
    if kind == "eagle3":
        layers = {"eagle_aux_hidden_state_layer_ids": POINTS}
        return eagle3(folder, TARGET, known, **{"ids": common, **layers, **more})
    options = {"ids": common, "block": 6, "from_speculators": True, **more}
    return dflash(folder, TARGET, known, known, POINTS, **options)


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, Path, Formula]:
    backend_spec("cpu")
    folder = tmp_path_factory.mktemp("drafter")
    return request.param, folder, save(request.param, folder)


def answers(**config: Any) -> tuple[list[Any], Any]:
    return draft_runs.answers("demo", TEXTS, **config)


@cache
def plain() -> list[Any]:
    found, stats = answers()
    assert stats.num_draft_tokens == 0
    return found


@pytest.mark.parametrize("tokens", ["auto", "3"])
def test_drafters_change_no_answer(saved: tuple[str, Path, Formula], tokens: str) -> None:
    found, stats = answers(speculate=f"model:{saved[1]}", speculate_tokens=tokens)
    assert found == plain()
    if tokens != "auto":  # drafts that pay, which depends on the machine
        assert stats.num_draft_tokens > 100
        assert stats.num_accepted_tokens > 10


def test_all_lengths(saved: tuple[str, Path, Formula]) -> None:
    """Each number of draft tokens, up to the block of a drafter that has one."""
    params = [
        SamplingParams(max_tokens=12, seed=number, logprobs=1, **fields)
        for number, fields in enumerate(draft_runs.PARAMS[1:3])
    ]
    with LLM("demo", **CONFIG, speculate=f"model:{saved[1]}") as llm:
        core = llm._engine._core
        found = []
        for count in (0, *range(1, 17)):
            core.draft_with(Drafting(core._draft_model if count else None, count))
            outputs = llm.generate(list(TEXTS[:2]), params, use_tqdm=False)
            choices = [choice for output in outputs for choice in output.outputs]
            found.append([(choice.token_ids, choice.logprobs) for choice in choices])
        stats = llm.stats()
    assert all(one == found[0] for one in found)
    most = 16 if saved[0] == "eagle3" else 5
    assert stats.num_draft_tokens > 16 * most


@pytest.mark.parametrize("config", draft_runs.SCHEDULES)
def test_other_schedules(saved: tuple[str, Path, Formula], config: dict[str, Any]) -> None:
    speculation = {"speculate": f"model:{saved[1]}", "speculate_tokens": "2"}
    found, stats = answers(**speculation, **config)
    assert found == plain()
    assert stats.num_draft_tokens > 100
    assert stats.num_preemptions > 0 or "num_kv_blocks" not in config


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_other_backends(saved: tuple[str, Path, Formula], backend: str) -> None:
    """Products depend on the batch there, so texts are compared and not bits."""
    texts, config = [], CONFIG | {"backend": backend, "max_model_len": 64, "num_kv_blocks": 20}
    params = SamplingParams(max_tokens=8, seed=3, temperature=0.8)
    for speculate in ("off", f"model:{saved[1]}"):
        with LLM("demo", **config, speculate=speculate, speculate_tokens="3") as llm:
            outputs = llm.generate(["Once upon a time", "The cat"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            assert (llm.stats().num_draft_tokens > 10) == (speculate != "off")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("step_tokens", [16, 128])
def test_drafts_are_those_of_the_formula(
    saved: tuple[str, Path, Formula], monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """Behind chunks of prompts, kept and rejected drafts, and next to other rows."""
    kind, path, formula = saved
    drafts = draft_runs.recorded_drafts(monkeypatch)
    config = CONFIG | {"max_num_batched_tokens": step_tokens, "enable_prefix_caching": False}
    with LLM("demo", **config, speculate=f"model:{path}", speculate_tokens="3") as llm:
        assert isinstance(llm._engine._core._draft_model, BlockDrafter) == (kind == "dflash")
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        llm.generate(list(TEXTS), greedy, use_tqdm=False)
    assert len(drafts) > 12
    for tokens, ids in drafts:
        states = oracle().states(tokens[:-1])
        if isinstance(formula, Eagle3Formula):
            wanted = formula.draft(tokens, states, len(ids))
        else:
            wanted = formula.block(tokens[-1], states, len(ids)).argmax(-1).tolist()
        assert ids == wanted


def refused(path: Path, **config: Any) -> str:
    """The message of a start that fails."""
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **CONFIG | config, speculate=f"model:{path}")
    assert caught.value.param == "speculate"
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"hidden_size": 128}, "hidden_size = 128 does not fit the model, whose hidden_size is"),
        ({"target_hidden_size": 512}, "target_hidden_size = 512 does not fit the model"),
        ({"vocab_size": 4160}, r"the model no such matrix with shape \[4160, 256\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "distinct and at most 6 in this model"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "names 2 hidden states of 256 numbers"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"after the layers \[2, 3, 3\], which must"),
        ({"draft_vocab_size": 30}, "does not lead from 30 ids to as many below 4096"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not served yet"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-3 reads several states"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EagleLlamaForCausalLM"),
    ],
)
def test_an_eagle_of_another_model(tmp_path: Path, config: dict[str, Any], error: str) -> None:
    save("eagle3", tmp_path, **config)
    assert re.search(error, refused(tmp_path))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_target_layers": 36}, "num_target_layers = 36 does not fit the model"),
        ({"aux_hidden_state_layer_ids": [1, 9, 3]}, "distinct and at most 6 in this model"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"speculators_model_type": "dspark"}, "= dspark is not served; dflash is"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
    ],
)
def test_a_block_drafter_of_another_model(
    tmp_path: Path, config: dict[str, Any], error: str
) -> None:
    save("dflash", tmp_path, **config)
    assert re.search(error, refused(tmp_path))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_damaged_files_and_other_uses(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path)
    assert "several ranks" in refused(tmp_path, tensor_parallel_size=2)
    assert "--deterministic keeps no hidden states" in refused(tmp_path, deterministic=True)
    with pytest.raises(UnsupportedModelError, match="serve 'TARGET' with --speculate model:"):
        LLM(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("fc.weight", "norm.weight", "d2t", "lm_head.weight"):
        others = {key: value for key, value in tensors.items() if key != name}
        save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
        assert name in refused(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    assert "draft model cannot be loaded" in refused(tmp_path)


def test_a_plain_name_of_the_first_drafters(tmp_path: Path) -> None:
    """SafeAILab's first files name LlamaForCausalLM."""
    save("eagle3", tmp_path, architectures=["LlamaForCausalLM"])
    with LLM("demo", **CONFIG, speculate=f"model:{tmp_path}") as llm:
        assert isinstance(llm._engine._core._draft_model, HiddenDrafter)
