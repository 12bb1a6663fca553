"""The Metal kernel of recurrent layers on the CPU, through a shim that g++ compiles: against the
op's formula in float64, and wrong kernels are noticed. Metal itself never ran it here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.cache.state_rows import StateRows
from vllmx_core.ops.recurrence import TokenInputs
from vllmx_testing.harness import Harness, mixed_steps
from vllmx_testing.state_checks import RULES, recurrent_model, with_slots

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal import kernel_choice, recurrence_kernel  # noqa: E402
from vllmx_metal.backend import MetalBackend  # noqa: E402
from vllmx_metal.recurrence_kernel import run  # noqa: E402
from vllmx_metal.recurrent import on_device  # noqa: E402

from .metal_shim import UseShim, shim_of, source_of  # noqa: E402

SOURCE = source_of("recurrence")
shim = shim_of(recurrence_kernel, "recurrence")
Array = NDArray[np.float32]


class Case:
    """Rows that begin anew or go on from a slot, in an order that is none of the slots'. Tokens of
    the first one keep their states."""

    keeping = (0, 5)

    def __init__(
        self,
        heads: int = 3,
        keys: int = 40,
        values: int = 36,
        *,
        channel: bool = False,
        delta: bool = True,
    ) -> None:
        random = np.random.default_rng(keys + values)
        self.lengths, self.source, self.delta = [9, 4, 1], [2, -1, 0], delta
        count = sum(self.lengths)

        def normal(*shape: int) -> Array:
            return random.standard_normal(shape).astype(np.float32)

        self.q, self.k = (normal(count, heads, keys) * np.float32(keys**-0.5) for _ in range(2))
        self.v = normal(count, heads, values)
        self.decay = random.uniform(0.3, 1, (count, heads, keys if channel else 1, 1))
        self.decay = self.decay.astype(np.float32)
        self.strength = random.uniform(0, 1, (count, heads, 1)).astype(np.float32)
        self.states = normal(4, heads, keys, values)

    def run(self) -> tuple[Array, Array]:
        """Runs the kernel on all rows in one step."""
        at = np.cumsum([0, *self.lengths]).tolist()
        return self._step(self.states, [*zip(self.source, at, self.lengths, strict=False)])

    def in_chunks(self, sizes: list[int]) -> tuple[Array, Array]:
        """The first row alone, so many tokens at a time, over a slot of its own."""
        states, source, begin, outs = self.states.copy(), self.source[0], 0, []
        for size in sizes:
            out, left = self._step(states, [(source, begin, size)])
            outs.append(out[begin : begin + size])
            states[3], source, begin = left[0], 3, begin + size
        return np.concatenate(outs), states[3]

    def _arrays(self) -> tuple[Array, ...]:
        return self.q, self.k, self.v, self.decay, self.strength

    def _step(self, states: Array, rows: list[tuple[int, int, int]]) -> tuple[Array, Array]:
        tokens = TokenInputs(*map(mx.array, self._arrays()))
        source, first, lengths = (np.array(one, np.int64) for one in zip(*rows, strict=True))
        after = np.full(len(self.q), -1)
        last = first[0] + lengths[0] - 1
        after[[token for token in self.keeping if first[0] <= token < last]] = 0
        step = on_device(StateRows(lengths.tolist(), first, source, source, after))
        out, left = run(tokens, step, mx.array(states), delta=self.delta)
        return np.array(out), np.array(left)

    def expected(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(T, H, Dv), and the states behind the rows and behind `keeping`, in float64."""
        q, k, v, decay, strength = (one.astype(np.float64) for one in self._arrays())
        outs, left, kept, token = [], [], [], 0
        for length, slot in zip(self.lengths, self.source, strict=True):
            state = self.states[slot] * np.float64(slot >= 0)
            for _ in range(length):
                state = state * decay[token]
                known = np.einsum("hkv,hk->hv", state, k[token]) if self.delta else 0.0
                new = strength[token] * (v[token] - known)
                state = state + k[token][:, :, None] * new[:, None]
                outs.append(np.einsum("hkv,hk->hv", state, q[token]))
                if token in self.keeping:
                    kept.append(state)
                token += 1
            left.append(state)
        return np.stack(outs), np.stack(left + kept)

    def error(self) -> float:
        """The greatest one; NaN where anything is."""
        pairs = zip(self.run(), self.expected(), strict=True)
        return float(np.max([np.abs(one - other).max() for one, other in pairs]))


CASES: dict[str, dict[str, Any]] = {
    "delta": {},
    "a decay for each channel": {"channel": True},
    "as released": {"heads": 2, "keys": 128, "values": 128},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_against_the_formula(shim: UseShim, options: dict[str, Any]) -> None:
    made = shim()
    assert Case(**options).error() < 2e-6
    assert made.divergences == 0


def test_bits_do_not_depend_on_chunks_or_mates(shim: UseShim) -> None:
    shim()
    case = Case()
    out, left = case.run()
    for sizes in ([9], [1] * 9, [7, 2]):
        one, behind = case.in_chunks(sizes)
        np.testing.assert_array_equal(one, out[:9])
        np.testing.assert_array_equal(behind, left[0])


WRONG = {
    "no zeros where a row begins": ("= source[row];", "= uint(metal::max(source[row], 0));"),
    "another head's state": ("ulong(slot) * H + head", "ulong(slot) * H + (head + 1) % H"),
    "a token too few": ("token < end;", "token + 1 < end;"),
    "what is known is kept": ("value -= metal::simd_sum(known);", "metal::simd_sum(known);"),
    "decay of the lane": ("CHANNEL ? at * DK + d : at", "CHANNEL ? at * DK + lane : at"),
    "one lane's answer": ("answer = metal::simd_sum(answer);", "metal::simd_sum(answer);"),
    "another column's place": ("out[at * DV + first_col + c]", "out[at * DV + first_col]"),
    "another row's place": ("left[((ulong(place) * H", "left[((ulong(0) * H"),
    "only the last tokens' states": ("= left_at[token];", "= token + 1 < end ? -1 : int(row);"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_is_noticed(shim: UseShim, change: tuple[str, str]) -> None:
    assert SOURCE.count(change[0]) == 1
    shim(SOURCE.replace(*change))
    assert not Case(channel=True).error() < 1e-3


class TestInTheBackend(Harness):
    """Layers of the suite go through the kernel."""

    exact_batches = False

    def make_backend(self) -> MetalBackend:
        return MetalBackend()

    @pytest.mark.parametrize(
        "rule", ["delta, odd sizes", "delta, shared keys, a decay a channel", "ssd, limits"]
    )
    def test_steps(self, shim: UseShim, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
        made = shim()
        monkeypatch.setenv(kernel_choice.RECURRENCE_SWITCH, "1")
        self.compare(*recurrent_model(**RULES[rule]), with_slots(mixed_steps()))
        assert made.builds >= 1, "the kernel was not called"


class TestProbe:
    @pytest.fixture(autouse=True)
    def _metal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mlx.core.metal.is_available", lambda: True)
        monkeypatch.setattr(kernel_choice, "decode_difference", lambda dtype: 1.0)
        monkeypatch.delenv(kernel_choice.RECURRENCE_SWITCH, raising=False)

    def test_a_right_kernel_is_used(self, shim: UseShim) -> None:
        shim()
        assert kernel_choice.choose_kernels(mx.float16).recurrence

    def test_a_wrong_one_is_not(self, shim: UseShim, caplog: pytest.LogCaptureFixture) -> None:
        shim(SOURCE.replace(*WRONG["a token too few"]))
        assert not kernel_choice.choose_kernels(mx.float16).recurrence
        assert "recurrence kernel: off by" in caplog.text
