"""SamplingParams' intervals, and the draw against an implementation of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.bounds import MAX_TOKENS_LIMIT
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import F32
from vllmx_core.sampling import (
    SamplingParams,
    gumbel_noise,
    philox4x32,
)

INTERVALS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 128], [0, 129, 1.5]),
    "best_of": ([1, 128, None], [0, 129]),
    "temperature": ([0, 0.0, 100.0], [-0.1, 100.1, 10**400]),
    "top_p": ([0, 1e-6, 1, 1.0], [1.1, -1]),
    "top_k": ([0, -1, 1 << 30], [-2, (1 << 30) + 1, 2.5]),
    "min_p": ([0.0, 1.0], [-0.1, 1.1]),
    "presence_penalty": ([-2.0, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2.0, 2], [-2.1, 2.1]),
    "repetition_penalty": ([1e-6, 0.01, 100.0], [0.0, 1e-39, -1.0, 100.1]),
    "max_tokens": ([1, None, 1 << 24], [0, -1, (1 << 24) + 1]),
    "min_tokens": ([0, 16], [-1, 17]),
    "seed": ([-(1 << 63), (1 << 64) - 1, None], [1 << 64, -(1 << 63) - 1]),
    "logprobs": ([-1, 0, 20, None], [-2, MAX_TOKENS_LIMIT + 1]),
    "prompt_logprobs": ([-1, 0, 20, None], [-2, MAX_TOKENS_LIMIT + 1]),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals(name: str) -> None:
    good, bad = INTERVALS[name]
    for value in good:
        SamplingParams(**{name: value})
    for value in [*bad, math.nan, math.inf, True, "1", [1]]:
        with pytest.raises(InvalidRequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [1], "allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1 << 31]}, "allowed_token_ids"),
        ({"logit_bias": {5: 100.1}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_lists_and_pairs(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_spellings_are_unified() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], top_k=-1)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.top_k) == (("x",), (3,), 0)
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]
    assert not params.needs_counts
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 1.5}).needs_counts  # type: ignore[arg-type]


def test_whole_floats_are_integers() -> None:
    given: dict[str, Any] = {"n": 1.0, "top_k": 20.0, "max_tokens": 8.0, "seed": -0.0}
    params = SamplingParams(**given, stop_token_ids=[5.0], allowed_token_ids=(5.0, 6))  # type: ignore[arg-type]
    for name, value in {**given, "stop_token_ids": (5,), "allowed_token_ids": (5, 6)}.items():
        found = getattr(params, name)
        assert found == value
        assert {type(each) for each in (found if isinstance(found, tuple) else (found,))} == {int}


def test_what_float32_cannot_tell_from_greedy_is_greedy() -> None:
    for fields in ({"temperature": 1e-300}, {"temperature": -0.0}, {"top_p": 0}, {"top_p": 5e-324}):
        assert SamplingParams(**fields).temperature == 0, fields
    assert SamplingParams(temperature=1e-4, top_p=1e-5).temperature == 1e-4


def test_ids_are_held_against_the_vocabulary() -> None:
    for name, value in (
        ("stop_token_ids", (9, 10)),
        ("allowed_token_ids", (10,)),
        ("logit_bias", {10: 1.0}),
    ):
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        params.check_vocab(11)
        said = f"{name} names 10, .* token ids 0 to 9"
        with pytest.raises(InvalidRequestError, match=said) as caught:
            params.check_vocab(10)
        assert caught.value.param == name


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 over Python integers, from the paper's figure."""
    low = 0xFFFFFFFF
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


# Random123's known answers for philox4x32-10.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], answer: str) -> None:
    expected = [int(word, 16) for word in answer.split()]
    assert philox_by_hand(counter, key) == expected
    got = philox4x32(NUMPY, np.array(counter)[:, None], np.array(key)[:, None])
    assert [int(word[0]) for word in got] == expected


def test_philox_of_many_counters_equals_one_by_one() -> None:
    random = np.random.default_rng(0)
    counters = random.integers(0, 1 << 32, (50, 4))
    key = [0x12345678, 0xDEADBEEF]
    words = philox4x32(NUMPY, counters.T, np.array(key)[:, None])
    for counter, row in zip(counters.tolist(), np.stack(words, 1).tolist(), strict=True):
        assert philox_by_hand(counter, key) == row


def noise_of(seed: int, position: int, vocab_size: int) -> F32:
    x = np.zeros((1, vocab_size), np.float32)
    noise: F32 = gumbel_noise(
        NUMPY, x, np.array([seed], np.uint64), np.array([position], np.int32)
    )[0]
    return noise


def test_noise_is_the_documented_word_of_the_documented_block() -> None:
    seed, position = 0xFEDCBA9876543210, 4321
    noise = noise_of(seed, position, 1001)
    for token in (0, 1, 2, 3, 4, 513, 1000):
        block = philox_by_hand([token >> 2, position, 0, 0], [0x76543210, 0xFEDCBA98])
        uniform = (block[token & 3] >> 9) * 2.0**-23 + 2.0**-24
        assert noise[token] == np.float32(-np.log(-np.log(uniform)))
    assert noise.dtype == np.float32
    assert noise.shape == (1001,)
    np.testing.assert_array_equal(noise_of(seed, position, 37), noise[:37])


def test_noise_is_gumbel() -> None:
    gumbel = noise_of(3, 5, 200_000)
    assert np.isfinite(gumbel).all()
    assert abs(np.exp(-np.exp(-gumbel)).mean() - 0.5) < 0.005  # the uniform numbers behind it
    assert abs(gumbel.mean() - 0.5772) < 0.02
    assert abs(gumbel.var() - np.pi**2 / 6) < 0.05
