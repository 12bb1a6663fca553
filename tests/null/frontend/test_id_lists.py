"""Lists of token ids are checked in pieces, as one call would check them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client import request_limits
from vllmx_engine.client.request_limits import checked_ids, id_outside


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "_PIECE", 3)


@pytest.mark.parametrize("given", [[], [1], [*range(7)], (1, 2, 3, 4), np.arange(5)])
def test_ids_are_those_given(given: Any) -> None:
    found = checked_ids(given)
    assert found == list(given)
    assert found is not given


def test_the_place_of_what_is_no_id_is_told() -> None:
    with pytest.raises(InvalidRequestError, match=r"`int`, got `str` - at `\$\[4\]`"):
        checked_ids([1, 2, 3, 4, "5"])
    with pytest.raises(InvalidRequestError, match="got `object`"):
        checked_ids({"a": 1})


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([], None),
        ([0, 9, 1, 2], None),
        ([1, 2, 3, 10], 10),
        ([12, 3, 4, 11], 12),
        ([11, 1, 2, -1], -1),
    ],
)
def test_the_worst_id_outside_is_found(ids: list[int], wrong: int | None) -> None:
    assert id_outside(ids, 10) == wrong
