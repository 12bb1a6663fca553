"""The oracle itself, against PyTorch and against formulas written once more."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from vllmx_core.model import Activation
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.attention import NO_WEIGHTS, AttentionSpec, AttentionWeights
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.formulas import NumpyFrame, NumpyWeights, Pages
from vllmx_core.ops.latent_attention import LatentSpec, LatentWeights, latent_attention
from vllmx_core.ops.values import TokenIds, Value, WeightRef
from vllmx_core.reference import formulas as reference
from vllmx_testing.plans import Row, make_plan

torch = pytest.importorskip("torch", reason="PyTorch is the judge of these tests")
functional = torch.nn.functional

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.standard_normal(shape)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12, atol=1e-12)


def frame_of(w: Any) -> NumpyFrame:
    """A step of three tokens and one weight."""
    plan = make_plan([Row((3, 0, 3), 0, (0,))], block_size=4)
    return NumpyFrame(NumpyWeights({"w": w}, {}), plan, (), None)


def test_norms() -> None:
    x, w, b = normal(5, 33), normal(33), normal(33)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    close(reference.rms_norm(x, w, 1e-5), functional.rms_norm(tx, (33,), tw, 1e-5))
    close(reference.layer_norm(x, w, b, 1e-5), functional.layer_norm(tx, (33,), tw, tb, 1e-5))
    close(reference.layer_norm(x, w, None, 1e-5), functional.layer_norm(tx, (33,), tw, None, 1e-5))
    op = AddRmsNorm.of(Value(33), Value(33), WeightRef("w", "vector", 33), 1e-6)
    frame = frame_of(w)
    frame[op.x], frame[op.residual] = x, x + 1
    op.compute(frame)
    close(frame[op.total], 2 * tx + 1)
    close(frame[op.out], functional.rms_norm(2 * tx + 1, (33,), tw, 1e-6))


@pytest.mark.parametrize("kind", get_args(Activation))
def test_activations(kind: Activation) -> None:
    x = np.concatenate([normal(4, 40) * 3, np.full((1, 40), -800.0), np.full((1, 40), 800.0)])
    tx = torch.from_numpy(x)
    expected = {
        "silu": functional.silu(tx),
        "gelu": functional.gelu(tx),
        "gelu_tanh": functional.gelu(tx, approximate="tanh"),
        "relu": functional.relu(tx),
    }[kind]
    close(reference.activation(x, kind), expected)
    close(reference.gated_act(x, kind), expected[:, :20] * tx[:, 20:])
    with pytest.raises(ValueError, match="swish"):
        reference.activation(x, "swish")  # type: ignore[arg-type]


def test_linear_embedding_and_logits() -> None:
    x, w, b = normal(6, 9), normal(11, 9), normal(11)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    close(reference.linear(x, w, b), functional.linear(tx, tw, tb))
    embedding = Embedding.of(TokenIds(), WeightRef("w", "embedding", 11, 9))
    frame = frame_of(w)
    embedding.compute(frame)
    ids = torch.from_numpy(frame.plan.tokens)
    close(frame[embedding.out], functional.embedding(ids, tw))
    rows = np.array([1, 4], np.int32)
    expected = 2.5 * torch.tanh(functional.linear(tx[[1, 4]], tw, tb) / 2.5)
    close(reference.logits(x, rows, w, b, 2.5), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 10])
def test_rope_is_a_complex_rotation(interleaved: bool, rotary_dim: int) -> None:
    x, angles = normal(7, 3, 10), normal(7, rotary_dim // 2)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    got = reference.rotate(x, table, interleaved=interleaved)
    half = rotary_dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for index, (first, second) in enumerate(pairs):
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles[:, None, index])
        np.testing.assert_allclose(got[..., first], turned.real, atol=1e-12)
        np.testing.assert_allclose(got[..., second], turned.imag, atol=1e-12)
    np.testing.assert_array_equal(got[..., rotary_dim:], x[..., rotary_dim:])


def paged(spec: AttentionSpec, qkv: Any, chunks: list[int], weights: Any = NO_WEIGHTS) -> Any:
    """One sequence through scattered pages of 4 tokens, chunk by chunk."""
    pages = [np.full((12, 4, spec.num_kv_heads, spec.head_size), np.nan) for _ in range(2)]
    blocks, outputs, start = [9, 2, 7, 0, 5, 11], [], 0
    for length in chunks:
        plan = make_plan([Row([0] * length, start, blocks)], 4)
        part = qkv[start : start + length]
        outputs.append(reference.attention(part, spec, plan, *pages, weights=weights))
        start += length
    return np.concatenate(outputs)


@pytest.mark.parametrize("chunks", [[21], [1] * 21, [7, 1, 13]])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_scaled_dot_product_attention(chunks: list[int], causal: bool) -> None:
    if not causal and len(chunks) > 1:
        pytest.skip("a row without causal mask comes whole")
    spec = AttentionSpec(0, 6, 2, 5, scale=0.3, causal=causal)
    qkv = normal(21, 10 * 5)
    q, k, v = torch.from_numpy(qkv.reshape(21, 10, 5)).transpose(0, 1).split([6, 2, 2])
    expected = functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=causal, scale=0.3, enable_gqa=True
    )[0]
    close(paged(spec, qkv, chunks), expected.transpose(0, 1).reshape(21, 30))


@pytest.mark.parametrize("chunks", [[21], [1] * 21, [7, 1, 13]])
def test_attention_with_every_feature(chunks: list[int]) -> None:
    """Token by token and head by head, in Python's own arithmetic."""
    size, window, cap, scale, eps = 6, 5, 1.7, 0.4, 1e-3
    angles = np.outer(np.arange(30), [1.0, 0.1])
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    q_norm, k_norm, sinks = normal(size), normal(size), normal(4)
    spec = AttentionSpec(
        0, 4, 2, size, scale, rotary_dim=4, norm_eps=eps, window=window, softcap=cap
    )
    weights = AttentionWeights(table, q_norm, k_norm, sinks)
    qkv = normal(21, 8 * size)
    heads = qkv.reshape(21, 8, size)

    def prepared(vector: Any, weight: Any, position: int) -> Any:
        vector = vector / np.sqrt(np.mean(vector**2) + eps) * weight
        turned = (vector[:2] + 1j * vector[2:4]) * np.exp(1j * angles[position])
        return np.concatenate([turned.real, turned.imag, vector[4:]])

    expected = np.zeros((21, 4, size))
    for position in range(21):
        for head in range(4):
            q = prepared(heads[position, head], q_norm, position)
            total, mass = np.zeros(size), np.exp(sinks[head])
            for seen in range(max(0, position - window + 1), position + 1):
                k = prepared(heads[seen, 4 + head // 2], k_norm, seen)
                weight = np.exp(cap * np.tanh(scale * (q @ k) / cap))
                mass += weight
                total += weight * heads[seen, 6 + head // 2]
            expected[position, head] = total / mass
    np.testing.assert_allclose(
        paged(spec, qkv, chunks, weights), expected.reshape(21, -1), atol=1e-10
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_latent_attention_is_attention_over_expanded_heads(interleaved: bool) -> None:
    """PyTorch's attention over keys and values made of every latent, as the paper has them, gives
    the same."""
    spec = LatentSpec(0, 3, 20, 12, 8, 10, 0.3, interleaved, norm_eps=0.01)
    heads, head, tokens = spec.num_heads, spec.nope_size + spec.rotary_dim, 21
    q, latent = normal(tokens, heads * head), normal(tokens, spec.row_size)
    k_b, v_b, norm = normal(heads, 20, 12), normal(heads, 10, 20), normal(20)
    angles = np.arange(tokens)[:, None] * 0.1 ** np.arange(4)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    plan = make_plan([Row([0] * tokens, 0, [1, 0], "all")], 16)
    pages = Pages(np.zeros((2, 16, 1, 28)), np.zeros((2, 16, 1, 0)))
    weights = LatentWeights(table, norm, k_b, v_b)
    got = latent_attention(q, latent, spec, plan, pages, None, weights)

    def turned(x: Any) -> Any:
        pairs = x.reshape(*x.shape[:-1], 4, 2) if interleaved else np.stack(np.split(x, 2, -1), -1)
        spun = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
        return np.concatenate([spun.real, spun.imag], axis=-1)

    normed = functional.rms_norm(
        torch.from_numpy(latent[:, :20]), (20,), torch.from_numpy(norm), 0.01
    )
    shared = turned(latent[:, None, 20:]).repeat(heads, axis=1)
    keys = np.concatenate([np.einsum("tc,hcn->thn", normed.numpy(), k_b), shared], axis=-1)
    values = np.einsum("tc,hvc->thv", normed.numpy(), v_b)
    by_head = q.reshape(tokens, heads, head)
    queries = np.concatenate([by_head[..., :12], turned(by_head[..., 12:])], axis=-1)
    wanted = functional.scaled_dot_product_attention(
        *(torch.from_numpy(x.swapaxes(0, 1).copy()) for x in (queries, keys, values)),
        is_causal=True,
        scale=0.3,
    )
    close(got, wanted.swapaxes(0, 1).reshape(tokens, -1))
