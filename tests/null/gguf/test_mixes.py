"""Which tensor of a mix gets which type."""

import pytest
from vllmx_models.formats.gguf.quantize.mixes import MIXES, Layers, type_of

SMALL = Layers(24, 2, tied=False)


def kinds(mix, name, layers=SMALL, cols=1024):
    return [
        type_of(mix, f"blk.{layer}.{name}.weight", (512, cols), layers)
        for layer in range(layers.count)
    ]


def test_q4_k_m_spends_more_on_values_and_down_projections_of_half_the_layers():
    expected = [
        "Q6_K" if layer < 3 or layer >= 21 or layer % 3 == 2 else "Q4_K" for layer in range(24)
    ]
    assert kinds("q4_k_m", "attn_v") == expected
    assert kinds("q4_k_m", "ffn_down") == expected
    assert set(kinds("q4_k_m", "attn_q") + kinds("q4_k_m", "ffn_up")) == {"Q4_K"}


def test_q3_k_m_and_q2_k():
    assert kinds("q3_k_m", "attn_v") == ["Q5_K"] * 2 + ["Q4_K"] * 22
    assert kinds("q3_k_m", "ffn_down") == ["Q5_K"] + ["Q4_K"] * 23
    assert set(kinds("q3_k_m", "attn_output")) == {"Q4_K"}
    assert set(kinds("q4_k_m", "attn_qkv")) == {"Q5_K"}
    assert set(kinds("q4_k_s", "attn_qkv")) == {"Q4_K"}
    assert set(kinds("q2_k", "attn_v")) == {"Q3_K"}
    assert set(kinds("q2_k", "attn_v", Layers(24, 4, tied=False))) == {"Q4_K"}


SIX_BITS = [mix for mix in MIXES if mix not in ("f32", "f16", "bf16", "q8_0", "mxfp4_moe")]


@pytest.mark.parametrize("mix", SIX_BITS)
def test_head_and_tied_table_have_six_bits(mix):
    assert type_of(mix, "output.weight", (4096, 1024), SMALL) == "Q6_K"
    assert type_of(mix, "token_embd.weight", (4096, 1024), Layers(24, 2, tied=True)) == "Q6_K"
    assert type_of(mix, "token_embd.weight", (4096, 1024), SMALL) == MIXES[mix].base


def test_rows_that_do_not_fit_get_the_next_type():
    assert type_of("q4_k_s", "blk.9.attn_q.weight", (64, 96), SMALL) == "Q5_0"
    assert type_of("q6_k", "blk.9.attn_q.weight", (64, 96), SMALL) == "Q8_0"
    assert type_of("q6_k", "blk.9.attn_q.weight", (64, 90), SMALL) == "F16"
    assert type_of("q4_0", "blk.9.attn_q.weight", (64, 90), SMALL) == "F16"
    assert type_of("q4_k_m", "output.weight", (64, 96), SMALL) == "Q8_0"


def test_vectors_stay_exact():
    assert {type_of(mix, "blk.0.attn_norm.weight", (1024,), SMALL) for mix in MIXES} == {"F32"}


def test_experts_are_down_projections_too_and_routers_stay_exact():
    many = Layers(24, 2, tied=False, experts=128)
    assert kinds("q4_k_m", "ffn_down_exps", many) == kinds("q4_k_m", "ffn_down")
    assert kinds("q4_k_s", "ffn_down_shexp", many) == kinds("q4_k_s", "ffn_down")
    assert set(kinds("q4_k_m", "ffn_up_exps", many)) == {"Q4_K"}
    for name in ("ffn_gate_inp", "ffn_gate_inp_shexp"):
        assert set(kinds("q2_k", name, many) + kinds("f16", name, many)) == {"F32"}
    assert type_of("q4_k_m", "blk.0.ffn_down_exps.bias", (32, 1024), many) == "F32"


def test_the_attention_beside_eight_experts_has_more_bits():
    eight = Layers(24, 4, tied=False, experts=8)
    assert set(kinds("q4_k_m", "attn_v", eight) + kinds("q2_k", "attn_k", eight)) == {"Q8_0"}
    assert set(kinds("q4_k_m", "attn_output", eight)) == {"Q5_K"}
    assert set(kinds("q5_k_m", "attn_output", eight)) == {"Q5_K"}
    assert set(kinds("q4_k_m", "attn_k", Layers(24, 4, tied=False, experts=128))) == {"Q4_K"}


def test_stacks_in_four_bits_beside_matrices_in_eight():
    stack = (4, 64, 1024)
    assert type_of("mxfp4_moe", "blk.0.ffn_up_exps.weight", stack, SMALL) == "MXFP4"
    assert type_of("mxfp4_moe", "blk.0.attn_k_b.weight", stack, SMALL) == "MXFP4"
    assert type_of("mxfp4_moe", "blk.0.ffn_up_shexp.weight", (64, 1024), SMALL) == "Q8_0"
    assert type_of("mxfp4_moe", "output.weight", (64, 1024), SMALL) == "Q8_0"
    assert type_of("mxfp4_moe", "blk.0.ffn_up_exps.weight", (4, 64, 72), SMALL) == "F16"


def test_layers_without_values_of_their_own_are_not_counted():
    """The odd ones of 24 layers take their keys for values."""
    some = Layers(24, 2, tied=True, values=tuple(range(0, 24, 2)))
    found = [
        type_of("q4_k_m", f"blk.{layer}.attn_v.weight", (512, 1024), some) for layer in some.values
    ]
    more = [place < 1 or place >= 10 or (place - 1) % 3 == 2 for place in range(12)]
    assert found == ["Q6_K" if one else "Q4_K" for one in more]


def test_per_layer_embeddings_and_indexers():
    tied = Layers(24, 2, tied=True)
    assert type_of("q4_k_m", "per_layer_token_embd.weight", (4096, 1024), tied) == "Q6_K"
    assert type_of("q4_k_m", "per_layer_token_embd.weight", (4096, 1024), SMALL) == "Q4_K"
    assert type_of("q4_k_m", "per_layer_model_proj.weight", (512, 1024), tied) == "BF16"
    assert type_of("f16", "per_layer_model_proj.weight", (512, 1024), tied) == "F16"
    assert set(kinds("f16", "indexer.proj")) == {"F32"}
    assert set(kinds("q4_k_m", "indexer.proj") + kinds("q4_k_m", "indexer.attn_k")) == {"Q4_K"}
    eight = Layers(24, 2, tied=True, experts=8)
    assert set(kinds("q4_k_m", "indexer.attn_k", eight)) == {"Q8_0"}
    assert set(kinds("q4_k_m", "attn_q_norm")) == {"F32"}
