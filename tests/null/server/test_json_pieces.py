"""JSON in pieces is the JSON that the encoder makes in one go."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import pytest
from vllmx_server.schema.json_pieces import Items, Members, json_pieces


class Colour(StrEnum):
    RED = "red"


class Inner(msgspec.Struct, tag_field="type", tag="inner"):
    text: str
    left_out: int | msgspec.UnsetType = msgspec.UNSET
    colour: Colour = Colour.RED
    raw: msgspec.Raw = msgspec.Raw(b'{"a": 1}')


class Outer(msgspec.Struct):
    inner: Inner
    several: Any
    named: Any = None
    numbers: tuple[float, ...] = (1.5, 2)
    flag: bool = False


INNER = Inner('q"é')
MIXED: list[Any] = [1, INNER, "x", None, [INNER, 2.5], {"k": INNER}, True]
NAMED = {"a": 1, "b": INNER, "c": {"d": [1, 2]}, "e": {}}


@pytest.mark.parametrize(
    ("lazy", "whole"),
    [
        (INNER, INNER),
        ("text", "text"),
        (Items(iter(MIXED)), MIXED),
        (Items(()), []),
        (Members([*NAMED.items(), None]), NAMED),
        (Members([None]), {}),
        (Outer(INNER, Items(iter(MIXED)), Members(NAMED.items())), Outer(INNER, MIXED, NAMED)),
        ({"deep": Outer(INNER, {"x": Items([INNER])})}, {"deep": Outer(INNER, {"x": [INNER]})}),
        (Items([Items([1]), {"m": Members([("n", Items([2]))])}]), [[1], {"m": {"n": [2]}}]),
        (Items(range(40)), list(range(40))),
    ],
)
def test_pieces_are_the_whole(lazy: Any, whole: Any) -> None:
    assert b"".join(json_pieces(lazy)) == msgspec.json.encode(whole)


def test_a_large_answer_comes_in_pieces() -> None:
    found = list(json_pieces({"rows": Items("x" * 1000 for _ in range(200))}))
    assert len(found) > 4
    assert max(map(len, found)) < 64 << 10
    assert msgspec.json.decode(b"".join(found)) == {"rows": ["x" * 1000] * 200}
