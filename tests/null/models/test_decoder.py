"""The shared decoder: which ops its layers record, by block and by the places of the norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.op import Op
from vllmx_core.plugins.registry import load_registry
from vllmx_core.recorded.recording import Recording, record
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.norms import PARALLEL, POST, PRE, SANDWICH, LayerNorms
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-5,
}
LAYER = ["linear qkv", "attention q_norm k_norm", "linear o"]
MLP = ["linear gate_up", "gated_act", "linear down"]


def spec() -> DecoderSpec:
    model = load_registry().model_for(CONFIG).load()(CONFIG)
    assert isinstance(model, Decoder)
    return model.spec


def recorded(changed: DecoderSpec) -> Recording:
    recording = record(Decoder(changed), 64)
    assert not recording.unused_weights
    return recording


def lines(changed: DecoderSpec) -> list[str]:
    """Each op with the weights of its layer."""
    return [_line(op) for op in recorded(changed).steps.ops]


def _line(op: Op) -> str:
    names = (ref.name.removeprefix("layers.0.").removeprefix("layers.1.") for ref in op.weights)
    return " ".join([op.name, *(name for name in names if not name.startswith("rope"))])


def test_a_layer_of_today_is_seven_ops() -> None:
    """The sum and the norm behind it are one op, wherever a norm reads the stream."""
    later = ["add_rms_norm attn_norm", *LAYER, "add_rms_norm mlp_norm", *MLP]
    assert lines(spec()) == [
        "embedding embed",
        "rms_norm attn_norm",
        *later[1:],
        *later,
        "add_rms_norm norm",
        "logits lm_head",
    ]


@pytest.mark.parametrize(
    ("norms", "layer"),
    [
        (PRE, ["add_rms_norm attn_norm", *LAYER, "add_rms_norm mlp_norm", *MLP]),
        (POST, ["add", *LAYER, "rms_norm attn_post_norm", "add", *MLP, "rms_norm mlp_post_norm"]),
        (SANDWICH, ["add_rms_norm attn_norm", *LAYER, "rms_norm attn_post_norm",
                    "add_rms_norm mlp_norm", *MLP, "rms_norm mlp_post_norm"]),
        (PARALLEL, ["add_rms_norm attn_norm", *LAYER, *MLP, "add"]),
        (replace(PRE, parallel=True), ["add_rms_norm attn_norm", *LAYER, "rms_norm mlp_norm", *MLP,
                                       "add"]),
    ],
)  # fmt: skip
def test_places_of_norms(norms: LayerNorms, layer: list[str]) -> None:
    plain = spec()
    changed = replace(plain, layers=tuple(replace(one, norms=norms) for one in plain.layers))
    found = lines(changed)
    assert found[-len(layer) - 2 : -2] == layer
    assert found[-2:] == ["add_rms_norm norm", "logits lm_head"]


def test_layer_norms_read_the_sum() -> None:
    plain = spec()
    found = lines(replace(plain, norm=replace(plain.norm, kind="layer", bias=True)))
    assert found[1] == "layer_norm attn_norm attn_norm.bias"
    assert found.count("add") == 4
    assert found[-2] == "layer_norm norm norm.bias"


def test_scales_stand_where_they_belong() -> None:
    found = lines(replace(spec(), embedding_scale=3.0, residual_scale=0.2, logit_scale=0.5))
    assert found[:3] == ["embedding embed", "scale", "rms_norm attn_norm"]
    assert [found[i + 1] for i, op in enumerate(found) if op in ("linear o", "linear down")] == [
        "scale"
    ] * 4
    assert found[-3:] == ["add_rms_norm norm", "scale", "logits lm_head"]


def test_a_plain_mlp_has_no_gate() -> None:
    plain = spec()
    mlp = DenseMLP(72, "gelu", gated=False, bias=True, names=MLPNames(up="fc1", down="fc2"))
    changed = replace(plain, layers=tuple(replace(one, feed_forward=mlp) for one in plain.layers))
    assert [op for op in lines(changed) if op in ("linear up", "activation")] == [
        "linear up",
        "activation",
    ] * 2
    weights = {weight.name: weight for weight in Decoder(changed).weights()}
    assert weights["layers.1.up"].parts[0].bias == "model.layers.1.mlp.fc1.bias"


def test_packed_matrices_are_picked_by_rows() -> None:
    plain = spec()
    mlp = DenseMLP(72, names=MLPNames(gate_up="gate_up_proj"))
    changed = replace(plain, layers=tuple(replace(one, feed_forward=mlp) for one in plain.layers))
    weights = {weight.name: weight for weight in Decoder(changed).weights()}
    gate, up = weights["layers.0.gate_up"].parts
    assert gate.name == up.name == "model.layers.0.mlp.gate_up_proj.weight"
    assert gate.runs is not None
    assert up.runs is not None
    assert [*gate.runs.index(72), *up.runs.index(72)] == [*range(144)]


def test_each_layer_names_its_own_options() -> None:
    ops = [op for op in recorded(spec()).steps.ops if isinstance(op, Attention)]
    assert [op.spec.layer for op in ops] == [0, 1]
    assert {op.spec.norm_eps for op in ops} == {1e-5}
    assert {op.spec.scale for op in ops} == {20**-0.5}
