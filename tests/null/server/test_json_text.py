"""Bodies of tiny values are refused before they are decoded, by what their bytes say."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_STOP_IDS
from vllmx_server.apis.completions import schema as completions
from vllmx_server.generating import chat_body as chat
from vllmx_server.host.models.routing import _peeked
from vllmx_server.schema import json_text
from vllmx_server.schema.decode import decode
from vllmx_server.schema.json_text import MAX_WEIGHT, check_weight

from .conftest import JSON, Served

TEXTS = ("", "a", '"', "\\", '\\"', "a,b", "[{:}]", "\\\\", "é", "\n\t", '","', "\\u0022")
MB = 1 << 20


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 3)
    if kind < 2:
        return "".join(rng.choices(TEXTS, k=rng.randrange(4)))
    if kind == 2:
        return rng.choice([None, True, 1, -2.5e3, 10**12])
    values = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind < 4:
        return values
    return {f"{i}{rng.choice(TEXTS)}": value for i, value in enumerate(values)}


def walked(value: Any) -> tuple[int, int, int, int]:
    """(commas, strings with keys, containers, members) of a value."""
    if isinstance(value, str):
        return 0, 1, 0, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0, 0
    keys = len(value) if isinstance(value, dict) else 0
    inner = value.values() if isinstance(value, dict) else value
    sums = [sum(column) for column in zip((0,) * 4, *map(walked, inner), strict=True)]
    return sums[0] + max(0, len(value) - 1), sums[1] + keys, sums[2] + 1, sums[3] + keys


@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_counts_are_those_of_the_decoded_value(
    ensure_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "MAX_WEIGHT", 0)
    rng = random.Random(7)
    for _ in range(200):
        value = random_value(rng, 4)
        text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        commas, strings, containers, members = walked(value)
        counts = (
            f"{commas + 1} JSON values, of them {strings} strings, {containers} lists and objects,"
            f" and {members} members of objects"
        )
        with pytest.raises(InvalidRequestError, match=counts):
            check_weight(text)


def repeated(head: bytes, item: bytes, tail: bytes, size: int = 8 * MB) -> bytes:
    return head + b",".join([item] * ((size - len(head)) // (len(item) + 1))) + tail


@pytest.mark.parametrize(
    "body",
    [
        repeated(b'{"prompt":[', b"1", b"]}"),
        repeated(b'{"prompt":[', b'"ab"', b"]}"),
        repeated(b'{"prompt":[', b"[1]", b"]}"),
        repeated(b'{"messages":[],"tools":[', b"{}", b"]}"),
        repeated(b'{"messages":[],"documents":[', b'{"a":1}', b"]}"),
        repeated(b'{"prompt":"a","logit_bias":{', b'"1":1', b"}}"),
        repeated(b'{"prompt":"\\\\","logit_bias":{', b'"\\"":1', b"}}"),
    ],
)
def test_tiny_values_are_refused_and_not_decoded(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Decoder:
        def decode(self, _: bytes) -> None:
            raise AssertionError("it was decoded")

    with pytest.raises(InvalidRequestError, match=rf"at most {MAX_WEIGHT} .*split the call"):
        decode(body, Decoder())  # type: ignore[arg-type]
    monkeypatch.setattr(json_text, "MAX_WEIGHT", 1 << 30)
    check_weight(body)


def test_what_clients_send_is_decoded() -> None:
    """The largest rules that are allowed, a book, code, and a conversation of every turn."""
    ids = json.dumps({"prompt": "a", "allowed_token_ids": list(range(1 << 19))})
    assert len(decode(ids.encode(), completions.DECODER).allowed_token_ids or ()) == 1 << 19
    for text in ('{"a": [1, 2]},\n' * (MB // 2), 'He said, "no": ' * (MB // 2), "\\" * (3 * MB)):
        body = json.dumps({"prompt": text}).encode()
        assert decode(body, completions.DECODER).prompt == text
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [call]}
    body = msgspec.json.encode({"messages": [turn] * chat.MAX_MESSAGES})
    assert len(decode(body, chat.DECODER).messages) == chat.MAX_MESSAGES


def test_lists_of_ids_and_errors_next_to_them() -> None:
    ids = [*range(300), *range(10**9, 10**9 + 199_700)]
    body = json.dumps({"prompt": ids}).encode()
    assert decode(body, completions.DECODER).prompt == ids
    with pytest.raises(InvalidRequestError, match="unknown field 'nope'"):
        decode(body.replace(b"}", b',"nope":1}'), completions.DECODER)
    wrong = f"stop_token_ids has 200000 entries, at most {MAX_STOP_IDS} are allowed"
    with pytest.raises(InvalidRequestError, match=wrong):
        decode(json.dumps({"prompt": "a", "stop_token_ids": ids}).encode(), completions.DECODER)
    twice = body.replace(b"}", b',"prompt":"%b","user":"b"}' % (b"\\n" * 5000))
    assert decode(twice, completions.DECODER).prompt == "\n" * 5000
    broken = body[:-2] + b",01]}"
    with pytest.raises(InvalidRequestError, match=r"not valid JSON: .* number .*\(byte \d+\)"):
        decode(broken, completions.DECODER)


def test_a_body_is_weighed_before_its_model_is_looked_for() -> None:
    assert _peeked(b'{"prompt":"%b","model":"m"}' % (b"a" * MB)).model == "m"
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_WEIGHT}"):
        _peeked(repeated(b'{"model":"m","prompt":[', b"1", b"]}"))


async def test_the_refusal_is_a_400_over_http(served: Served) -> None:
    body = repeated(b'{"prompt":[', b"1", b"]}", 2 * MB)
    response = await served.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert f"at most {MAX_WEIGHT}" in response.json()["error"]["message"]
