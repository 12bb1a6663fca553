"""Folders in Mistral's own form: params.json, consolidated.safetensors and tekken.json, through the
public interface, against transformers."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry

VOCAB, SPECIAL, HEADS, KV_HEADS, SIZE = 266, 10, 4, 2, 16
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "mlp": "feed_forward", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
    "model.layers": "layers",
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "dim": 48, "n_layers": 2, "head_dim": SIZE, "hidden_dim": 72, "n_heads": HEADS,
    "n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "vocab_size": VOCAB, "rope_theta": 1e4,
    "max_position_embeddings": 256,
}  # fmt: skip
GROWS = {
    "yarn": {"original_max_position_embeddings": 16, "factor": 16, "apply_scale": False,
             "beta": 32, "alpha": 1},
    "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.5},
}  # fmt: skip


def twin(**rope: Any) -> Any:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(
        "ministral3" if rope else "mistral",
        vocab_size=VOCAB, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=SIZE, rms_norm_eps=1e-5,
        max_position_embeddings=256, sliding_window=None, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope},
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def saved(model: Any, folder: Path, **params: Any) -> Path:
    """Heads' rows in the order in which neighbours rotate together, and a tensor of a tower."""
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    found = {"vision_encoder.patch_conv.weight": torch.zeros(2, 2)}
    for name, values in model.state_dict().items():
        theirs = name
        for one, other in NAMES.items():
            theirs = re.sub(rf"(^|\.){re.escape(one)}(?=\.)", rf"\1{other}", theirs)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, SIZE // 2, values.shape[1])
            values = halves.transpose(1, 2).reshape(values.shape)
        found[theirs] = values.contiguous()
    files.save_file(found, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    vocab = [{"token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    config = {
        "pattern": r"\S+|\s+",
        "default_vocab_size": VOCAB,
        "default_num_special_tokens": SPECIAL,
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return folder


@pytest.mark.parametrize("grows", [False, True], ids=["mistral", "ministral 3"])
def test_answers_are_those_of_transformers(grows: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rope = {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }  # fmt: skip
    model = twin(**rope if grows else {})
    folder = saved(model, tmp_path, **GROWS if grows else {})
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        [answer] = llm.generate(["a text"], sampling)
    prompt = [1, *(SPECIAL + byte for byte in b"a text")]
    assert list(answer.prompt_token_ids) == prompt
    ids = list(answer.outputs[0].token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0]
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == ids


@pytest.mark.parametrize("key", ["moe", "quantization"])
def test_what_is_not_read_is_refused(key: str, tmp_path: Path) -> None:
    folder = saved(twin(), tmp_path, **{key: {"num_experts": 8}})
    with pytest.raises(UnsupportedModelError, match=rf"params\.json: {key} is not read"):
        open_checkpoint(load_registry(), folder)


def test_a_missing_tensor_has_its_name_in_the_file(tmp_path: Path) -> None:
    folder = saved(twin(), tmp_path)
    checkpoint = open_checkpoint(load_registry(), folder)
    assert build_model(load_registry(), checkpoint).shape.max_model_len == 256
    assert "vision_encoder.patch_conv.weight" not in checkpoint.weights.names()
    with pytest.raises(Exception, match=r"layers\.7\.attention\.wq\.weight"):
        checkpoint.weights.part("model.layers.7.self_attn.q_proj.weight")
    checkpoint.weights.close()
