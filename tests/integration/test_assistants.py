"""Gemma 4's assistants as `--speculate model:PATH`: they draft as transformers' modules do, and
change no answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError, UnsupportedModelError
from vllmx_demo.source import MODEL_FOLDER

from tests.usable_backends import backend_spec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.gemma4_assistant")

from ..backend import test_architectures as architectures  # noqa: E402, TID252
from ..head_checkpoints import random_model  # noqa: E402, TID252
from . import draft_runs  # noqa: E402

WINDOW = 11
VOCABULARY = {"vocab_size": 4096, "vocab_size_per_layer_input": 4096}
TARGETS = {
    "shared layers": architectures.TestGemma4Shared.config
    | {"use_double_wide_mlp": False}
    | VOCABULARY,
    "experts": architectures.TestGemma4Experts.config | VOCABULARY,
}
CONFIG = draft_runs.CONFIG | {"max_model_len": 128, "dtype": "float32"}
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(size).integers(3, 60, size).tolist()}
    for size in (37, 5, 21)
]


class Oracle:
    """A target and its assistant in float64."""

    def __init__(self, folder: Path, config: dict[str, Any], **more: Any) -> None:
        self.target = random_model(config)
        _leave_few_likely_ids(self.target)
        self.target.save_pretrained(folder / "target")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL_FOLDER / name, folder / "target")
        keys = ("num_global_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
        text = {key: config[key] for key in keys if key in config} | {
            "model_type": "gemma4_text",
            "vocab_size": config["vocab_size"],
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": config["num_key_value_heads"],
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "attention_k_eq_v": config.get("attention_k_eq_v", False),
        }
        read = transformers.Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=config["hidden_size"], **more
        )
        read._attn_implementation = "eager"
        torch.manual_seed(3)
        self.assistant = transformers.Gemma4AssistantForCausalLM(read).float().eval()
        for parameter in self.assistant.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        _leave_few_likely_ids(self.assistant)
        if "use_ordered_embeddings" in more:
            order = torch.randperm(config["vocab_size"])
            self.assistant.masked_embedding.token_ordering.copy_(order)
        self.assistant.save_pretrained(folder / "assistant")
        self.assistant, self.target = self.assistant.double(), self.target.double()

    @torch.no_grad()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest `count` ids behind known ones. Layers with a window are given the keys that
        a query at the last position sees."""
        known = torch.tensor([tokens[:-1]])
        output = self.target.model(known, use_cache=True)
        hidden, config = output.last_hidden_state[:, -1:], self.target.config
        last = config.num_hidden_layers - config.num_kv_shared_layers - 1  # with keys of its own
        local, whole = output.past_key_values.layers[last - 1 : last + 1]
        keys = {
            "sliding_attention": [one[:, :, 1 - WINDOW :] for one in (local.keys, local.values)],
            "full_attention": [whole.keys, whole.values],
        }
        embed, found, last = self.target.get_input_embeddings(), list[int](), tokens[-1]
        for _ in range(count):
            inputs = torch.cat([embed(torch.tensor([[last]])), hidden], -1)
            place = torch.tensor([[len(tokens) - 1]])
            made = self.assistant(inputs_embeds=inputs, position_ids=place, shared_kv_states=keys)
            last, hidden = int(made.logits[0, -1].argmax()), made.last_hidden_state
            found.append(last)
        return found


def _leave_few_likely_ids(model: Any) -> None:
    """Leaves large logits to eight ids, so that random drafts are right now and then."""
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[:100] *= 0.01
        table[108:] *= 0.01


def _modes(config: Any) -> list[str | None]:
    """How layers share keys and values; transformers 5.23 raises where all of them do."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    modes: list[str | None] = _MODES.fget(config)
    return modes


_MODES = transformers.Gemma4TextConfig.kv_sharing_modes


@pytest.fixture(scope="module", params=TARGETS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Oracle]:
    backend_spec("cpu")
    folder = tmp_path_factory.mktemp("assistant")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(_modes))
        return folder, Oracle(folder, dict(TARGETS[request.param]))


def speculating(folder: Path, **more: Any) -> dict[str, Any]:
    return {**CONFIG, "speculate": f"model:{folder / 'assistant'}", "speculate_tokens": "3"} | more


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"speculate_tokens": "16"},
        {"backend": "numpy"},
        {"backend": "torch"},
        {"backend": "metal"},
    ],
)
def test_drafts_are_those_of_the_modules(
    saved: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Behind chunks of prompts, kept and rejected drafts, next to other rows, and far behind the
    window."""
    folder, oracle = saved
    backend_spec(more.get("backend", "cpu"))
    drafts = draft_runs.recorded_drafts(monkeypatch)
    with LLM(str(folder / "target"), **speculating(folder, **more)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert len(drafts) > 6
    for tokens, ids in drafts:
        assert ids == oracle.draft(tokens, len(ids))


def test_assistants_change_no_answer(saved: tuple[Path, Oracle]) -> None:
    """Neither in order nor with few blocks, which preempt rows."""
    folder = saved[0]
    target, prompts = str(folder / "target"), PROMPTS[:2]
    plain, _ = draft_runs.answers(target, prompts, **CONFIG)
    scarce, *others = draft_runs.SCHEDULES
    for schedule in ({}, scarce | {"num_kv_blocks": 13}, *others):
        config = speculating(folder, speculate_tokens="2", **schedule)
        found, stats = draft_runs.answers(target, prompts, **config)
        assert found == plain
        assert stats.num_draft_tokens > 100
        assert stats.num_accepted_tokens > 0
        assert stats.num_preemptions > 0 or "num_kv_blocks" not in schedule


def test_an_assistant_of_another_model(saved: tuple[Path, Oracle], tmp_path: Path) -> None:
    config = json.loads((saved[0] / "assistant" / "config.json").read_text())
    for changed, error in (
        ({"backbone_hidden_size": 64}, "does not fit the model, whose size is"),
        ({"text_config": config["text_config"] | {"head_dim": 16}}, "choose the assistant of this"),
        ({"text_config": config["text_config"] | {"vocab_size": 4000}}, "4000 ids, the model 4096"),
    ):
        shutil.copytree(saved[0] / "assistant", tmp_path, dirs_exist_ok=True)
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ConfigError, match=error) as caught:
            LLM(str(saved[0] / "target"), **CONFIG, speculate=f"model:{tmp_path}")
        assert caught.value.param == "speculate"
    with pytest.raises(UnsupportedModelError, match="serve 'TARGET' with --speculate model:"):
        LLM(str(saved[0] / "assistant"))
