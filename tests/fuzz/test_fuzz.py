"""A short run of the GGUF fuzz target on damaged copies of a valid file."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from .fuzz_gguf import one_input, seed

SEED = seed()
HEADER_BYTES = SEED.index(b"output_norm.weight") + 40
PATCHES = st.one_of(
    st.integers(0, 255).map(lambda value: bytes([value])),
    st.sampled_from([0, 1, 2, 8, 12, 33, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]).map(
        lambda value: struct.pack("<I", value)
    ),
    st.sampled_from([0, 1, 31, 1 << 16, 1 << 33, 1 << 62, 1 << 63, (1 << 64) - 1]).map(
        lambda value: struct.pack("<Q", value)
    ),
    st.binary(min_size=1, max_size=12),
)


def test_the_seed_is_a_model() -> None:
    assert one_input(SEED)


@settings(max_examples=250, deadline=None)
@given(
    patches=st.lists(st.tuples(st.integers(0, HEADER_BYTES), PATCHES), min_size=1, max_size=3),
    cut=st.one_of(st.none(), st.integers(0, len(SEED))),
)
def test_damaged_copies(patches: list[tuple[int, bytes]], cut: int | None) -> None:
    data = bytearray(SEED)
    for at, patch in patches:
        data[at : at + len(patch)] = patch
    one_input(bytes(data[:cut]))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=400), valid_start=st.booleans())
def test_any_bytes(data: bytes, valid_start: bool) -> None:
    one_input(SEED[:24] + data if valid_start else data)
