"""Weights of rank 0 are read no more when its group has ended, whatever was taken before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.errors import RankLostError
from vllmx_core.weights.files import ReadingRoom, WeightFile
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import cols_of, rows_of
from vllmx_testing.synthetic import ArraySource
from vllmx_tp.loading import WatchedSource

SHAPE = (8, 64)
VALUES = np.arange(512, dtype=np.float32).reshape(SHAPE)
LOOKS: dict[str, Callable[[WeightPart], object]] = {
    "whole": lambda part: part.dequantize(),
    "rows": lambda part: part.rows(2, 4).dequantize(),
    "columns": lambda part: cols_of(part, 32, 64).dequantize(),
    "rows of columns": lambda part: cols_of(part, 32, 64).rows(2, 4).dequantize(),
    "one by one": lambda part: part.stored().buffers["weight"].in_memory(),
    "into a room": lambda part: part.stored().buffers["weight"].in_memory(ReadingRoom()),
}


class Source(ArraySource):
    """One tensor in a file, and one that is made of it."""

    def __init__(self, path: Path) -> None:
        super().__init__({})
        path.write_bytes(VALUES.tobytes())
        raw = RawTensor("stored", "f32", SHAPE, WeightFile(path).range(0, VALUES.nbytes))
        stored = StoredPart("stored", SHAPE, DENSE, {"weight": raw})
        made = rows_of(stored, np.arange(len(VALUES)).reshape(2, -1).T.reshape(-1))
        self._parts = {"stored": stored, "made": made}


@pytest.mark.parametrize("name", ["stored", "made"])
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_read_late(name: str, look: str, tmp_path: Path) -> None:
    has_ended = False

    def check() -> None:
        if has_ended:
            raise RankLostError("rank 1 was killed")

    source = WatchedSource(Source(tmp_path / "weights"), check)
    part = source.part(name)
    rows = slice(2, 4) if name == "stored" else [1, 5]
    np.testing.assert_array_equal(cols_of(part, 32, 64).dequantize(2, 4), VALUES[rows, 32:])
    has_ended = True
    with pytest.raises(RankLostError):
        LOOKS[look](part)
