"""DeciLM against transformers' Llama: blocks that a layer lacks are zero there, and so is what its
MLP is narrower by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource

WIDTHS = (512, 256, 0, 256)
ATTENDS = (True, False, True, True)
CONFIG: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": None,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "block_configs": [
        {
            "attention": {"n_heads_in_group": 2 if attends else None, "no_op": not attends},
            "ffn": {"ffn_mult": width / 32 - 0.1 if width else None, "no_op": not width},
        }
        for attends, width in zip(ATTENDS, WIDTHS, strict=True)
    ],
}


def test_logits_are_those_of_a_llama_with_zeros() -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {key: value for key, value in CONFIG.items() if value and key not in ("block_configs",)}
    llama = transformers.LlamaConfig(**sizes | {"intermediate_size": 512, "num_key_value_heads": 2})
    torch.manual_seed(0)
    twin = transformers.LlamaForCausalLM(llama).float().eval()
    arrays = {}
    with torch.no_grad():
        for name, values in twin.named_parameters():
            torch.nn.init.normal_(values, std=0.2)
            layer = int(name.split(".")[2]) if ".layers." in name else None
            width = None if layer is None else WIDTHS[layer]
            if ".mlp." in name:
                part = values[:, width:] if "down" in name else values[width:]
                part.zero_()
                kept = values[:, :width] if "down" in name else values[:width]
            else:
                kept = values
            if layer is not None and not ATTENDS[layer] and "self_attn" in name:
                values.zero_()
            gone = layer is not None and (
                (not ATTENDS[layer] and ("self_attn" in name or "input_layernorm" in name))
                or (not width and (".mlp." in name or "post_attention" in name))
            )
            if not gone:
                arrays[name] = kept.numpy().copy()
        tokens = [3, 17, 5, 60, 22, 9, 41, 0, 8]
        expected = twin(torch.tensor([tokens])).logits[0].numpy()
    model = load_registry().model_for(CONFIG).load()(CONFIG)
    assert {part.name for spec in model.weights() for part in spec.parts} == arrays.keys()
    options = LoadOptions(dtype="f32", max_model_len=64, max_num_seqs=2, num_kv_blocks=8)
    loaded = ReferenceBackend().load(model, ArraySource(arrays), options)
    found = loaded.logits(make_plan([Row(tokens, 0, [1], "all", None)], options.block_size))
    loaded.close()
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "blocks",
    [
        None,
        CONFIG["block_configs"][:3],
        [3] * 4,
        [CONFIG["block_configs"][0] | {"ffn": {"replace_with_linear": True}}] * 4,
        [CONFIG["block_configs"][0] | {"ffn": {"ffn_mult": 1e30}}] * 4,
    ],
)
def test_other_blocks_are_refused(blocks: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="block_configs"):
        load_registry().model_for(CONFIG).load()(CONFIG | {"block_configs": blocks})
