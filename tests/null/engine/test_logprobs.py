"""Many log-probabilities of one token, beside the oracle that sorts."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.plan import F32
from vllmx_engine.core.logprobs import logprobs_of, top_logprobs
from vllmx_engine.wire.messages import TokenLogprobs


def logits_of(kind: str) -> F32:
    random = np.random.default_rng(3)
    logits: F32 = (random.standard_normal(5000) * 4).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
        logits[::7] = -0.0
    if kind == "bans":
        logits[random.integers(0, 5000, 900)] = -np.inf
    return logits


@pytest.mark.parametrize("count", [1, 65, 4999, 5000, 9000])
@pytest.mark.parametrize("kind", ["plain", "ties", "bans"])
def test_as_a_stable_sort_has_them(kind: str, count: int) -> None:
    logits = logits_of(kind)
    wide = logits.astype(np.float64)
    expected = wide - np.logaddexp.reduce(wide)
    token = int(np.argmax(logits)) if kind == "bans" else 17
    packed = top_logprobs(logits, token, float(expected[token]), count)
    got = TokenLogprobs(token, 0.0, 1, [], [], packed).ranked()
    ids, values = zip(*got, strict=True)
    order = np.argsort(-logits, kind="stable")[:count]
    assert list(ids) == order.tolist()
    np.testing.assert_allclose(values, expected[order], atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "ties", "bans"])
def test_ids_that_are_named_have_the_same_values(kind: str) -> None:
    logits = logits_of(kind)
    wide = logits.astype(np.float64)
    expected = wide - np.logaddexp.reduce(wide)
    token, ids = int(np.argmax(logits)), [4999, 0, 17]
    found = logprobs_of(logits, token, float(expected[token]), ids)
    np.testing.assert_allclose(found, expected[ids], rtol=1e-6)
