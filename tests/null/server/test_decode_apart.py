"""Long values of a body are decoded apart, and nothing tells that from one call of the decoder."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_STOP_IDS
from vllmx_server.apis.completions import schema as completions
from vllmx_server.schema import decode_apart
from vllmx_server.schema.decode import decode
from vllmx_server.schema.json_strings import parts_of

CHARACTERS = (
    *("a", "é", "中", "😀", " ", ":", "{", "[1,2]", "\\n", '\\"', "\\\\", "\\/"),
    *("\\u00e9", "\\u4e2d", "\\u0022", "\\ud83d\\ude00"),
)
FAULTS = ("\\q", "\\ud83d", "\\ude00", "\\u12g4", "\\u", "\n", "\x00")
NUMBERS = ("0", "5", "255", "-3", "70000", "1" + "0" * 20)
NO_NUMBERS = ("", "01", "1.5", '"x"', "-", "1 2", "[]", "null")


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str = ""
    kind: Literal["a", "b"] | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    short: Annotated[str, Meta(max_length=30)] = ""
    number: int | None = None
    ids: list[int] | None = None
    few: Annotated[list[int], Meta(max_length=15)] = []
    floats: list[float] | None = None
    either: str | list[str | int | list[int]] | None = None
    free: Any = None
    inner: list[Inner] = []
    raw: msgspec.Raw | None = None


DECODER = msgspec.json.Decoder(Outer)


class Bodies:
    """Bodies of all kinds, most of them sound in most places."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def body(self) -> bytes:
        rng = self._rng
        names = rng.choices(Outer.__struct_fields__, k=rng.randrange(1, 7))
        if rng.random() < 0.05:
            names.append("unknown")
        members = [f'"{name}"{rng.choice(("", " "))}:{self._value(name)}' for name in names]
        body = bytearray(("{" + ",".join(members) + "}").encode())
        place, chance = rng.randrange(len(body)), rng.random()
        if chance < 0.05:
            del body[place + 1 :]
        elif chance < 0.1:
            body[place] = rng.randrange(256)
        return bytes(body)

    def _value(self, name: str) -> str:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(("1", "null", "true", "{}", "[]", "1e5"))
        if name in ("text", "short"):
            return self._text()
        if name in ("ids", "few", "floats"):
            return self._ids()
        if name == "inner":
            kind = f',"kind":{self._text()}' if rng.random() < 0.2 else ""
            return f'[{{"text":{self._text()}{kind}}},{{"text":{self._text()}}}]'
        anything: tuple[Callable[[], str], ...] = (
            self._text,
            self._ids,
            lambda: f"[{self._text()},{self._ids()}]",
            lambda: f'{{{self._text()}:{self._ids()},"key":{self._text()}}}',
        )
        return rng.choice(anything)()

    def _text(self) -> str:
        rng = self._rng
        kinds = rng.choices((CHARACTERS, FAULTS), (99, 1), k=rng.randrange(40))
        return '"' + "".join(map(rng.choice, kinds)) + '"'

    def _ids(self) -> str:
        rng = self._rng
        kinds = rng.choices((NUMBERS, NO_NUMBERS), (200, 1), k=rng.choice((1, 12, 15, 16, 50)))
        comma = rng.choice((",", ", ", " ,", ",\n"))
        return "[" + comma.join(map(rng.choice, kinds)) + rng.choice(("", "", "", " ", ",")) + "]"


def outcome(decoding: Callable[[], Any]) -> str:
    try:
        return repr(decoding())
    except UnicodeDecodeError:  # whose message nobody is shown
        return "no UTF-8"
    except msgspec.MsgspecError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("part_bytes", "count"), [(7, 100), (50, 1000)])
def test_outcomes_are_those_of_one_call(
    part_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_apart, "_LONG_BYTES", 16)
    monkeypatch.setattr(decode_apart, "_PIECE_BYTES", 16)
    monkeypatch.setattr(decode_apart, "parts_of", partial(parts_of, part_bytes=part_bytes))
    bodies = Bodies(seed=part_bytes)
    for _ in range(count):
        body = bodies.body()
        expected = outcome(lambda: DECODER.decode(body))  # noqa: B023 - called at once
        assert outcome(lambda: decode_apart.decode_apart(body, DECODER)) == expected, body  # noqa: B023


class Watched:
    """A decoder that notes the longest body it was given."""

    def __init__(self, decoder: msgspec.json.Decoder[Any]) -> None:
        self.type = decoder.type
        self.longest_bytes = 0
        self._decoder = decoder

    def decode(self, body: bytes) -> Any:
        self.longest_bytes = max(self.longest_bytes, len(body))
        return self._decoder.decode(body)


@pytest.mark.parametrize("text", ['"' * 300_000, "中\n" * 60_000, "\\" * 300_001, "😀" * 50_000])
def test_no_decoder_sees_a_long_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Watched(msgspec.json.Decoder(str))
    monkeypatch.setattr(decode_apart, "_text", pieces.decode)
    decoder = Watched(completions.DECODER)
    body = json.dumps({"prompt": ["a", text], "user": "b"}).encode()
    found: Any = decode_apart.decode_apart(body, decoder)  # type: ignore[arg-type]
    assert found.prompt == ["a", text]
    assert found.user == "b"
    assert decoder.longest_bytes < len(text) + 100
    assert pieces.longest_bytes <= decode_apart._PIECE_BYTES + 2


def test_lists_of_ids_and_errors_beside_them() -> None:
    ids = [*range(300), *range(10**9, 10**9 + 199_700)]
    decoder = Watched(completions.DECODER)
    body = json.dumps({"prompt": ids}).encode()
    assert decode(body, decoder).prompt == ids  # type: ignore[arg-type]
    assert decoder.longest_bytes < len(body) / 3
    with pytest.raises(InvalidRequestError, match="unknown field 'nope'"):
        decode(body.replace(b"}", b',"nope":1}'), completions.DECODER)
    wrong = f"stop_token_ids has 200000 entries, at most {MAX_STOP_IDS} are allowed"
    with pytest.raises(InvalidRequestError, match=wrong):
        decode(json.dumps({"prompt": "a", "stop_token_ids": ids}).encode(), completions.DECODER)
    twice = body.replace(b"}", b',"prompt":"%b","user":"b"}' % (b"\\n" * 5000))
    decoder.longest_bytes = 0
    assert decode(twice, decoder).prompt == "\n" * 5000  # type: ignore[arg-type]
    assert decoder.longest_bytes < len(body) / 3
    broken = body[:-2] + b",01]}"
    with pytest.raises(msgspec.DecodeError) as told:
        completions.DECODER.decode(broken)
    with pytest.raises(InvalidRequestError, match=re.escape(str(told.value))):
        decode(broken, completions.DECODER)
