"""Gemma 4's assistants as `--speculate model:PATH`: they draft as transformers' modules do, and
change no answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
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
        self.text = text
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


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale.weight",
}
"""Tensors of a layer in files of llama.cpp."""


def write_gguf(folder: Path, text: dict[str, Any], path: Path) -> None:
    """An assistant as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    text, arch = config["text_config"] | text, "gemma4-assistant"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_uint32(f"{arch}.embedding_length_out", config["backbone_hidden_size"])
    writer.add_uint32(f"{arch}.nextn_predict_layers", text["num_hidden_layers"])
    writer.add_uint32(f"{arch}.attention.shared_kv_layers", text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    slides = [kind == "sliding_attention" for kind in text["layer_types"]]
    whole = text.get("num_global_key_value_heads") or text["num_key_value_heads"]
    writer.add_head_count_kv([text["num_key_value_heads"] if one else whole for one in slides])
    for name, size in (("", text["global_head_dim"]), ("_swa", text["head_dim"])):
        for part in ("key", "value"):
            writer.add_uint32(f"{arch}.attention.{part}_length{name}", size)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_array(f"{arch}.attention.sliding_window_pattern", slides)
    ropes = text["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_float32(f"{arch}.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    model = json.loads((MODEL_FOLDER / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    half = text["global_head_dim"] // 2
    turned = int(ropes["full_attention"].get("partial_rotary_factor", 1.0) * half)
    divisors = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    outer |= {f"{one}_projection": f"nextn.{one}_projection" for one in ("pre", "post")}
    for name, values in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            number, rest = stem.removeprefix("model.layers.").split(".", 1)
            stem = f"blk.{number}.{NAMES[rest]}"
        if stem in outer or stem.startswith("blk."):
            stem = outer.get(stem, stem).removesuffix(".weight")
            writer.add_tensor(f"{stem}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_assistant_in_a_gguf_file(
    saved: tuple[Path, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved[0]
    write_gguf(folder / "assistant", saved[1].text, tmp_path / "assistant.gguf")
    drafts, greedy = draft_runs.recorded_drafts(monkeypatch), SamplingParams(temperature=0.0)
    found = []
    for path in (folder / "assistant", tmp_path / "assistant.gguf"):
        config = speculating(folder, speculate=f"model:{path}")
        with LLM(str(folder / "target"), **config) as llm:
            llm.generate(PROMPTS, greedy, use_tqdm=False)
        found.append(list(drafts))
        drafts.clear()
    assert found[0] == found[1]
    assert len(found[0]) > 6


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
