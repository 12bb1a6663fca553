"""Structured output over HTTP: real answers, hostile grammars, and a process that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import Any

import httpx
import jsonschema
import pytest

from tests.waiting import wait_until

from .conftest import PLAIN, RunningServer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe a person."}]


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 400, **fields})


def texts(response: httpx.Response) -> list[str]:
    """The texts of choices that ended by themselves."""
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


WAYS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    },
    "structured_outputs": {"structured_outputs": {"json": PERSON}},
    "schema as text": {"structured_outputs": {"json": json.dumps(PERSON)}},
    "guided_json": {"guided_json": PERSON},
    "llama.cpp": {"json_schema": PERSON},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_follows_its_schema(way: str, server: RunningServer) -> None:
    for text in texts(chat(server, n=3, seed=4, **WAYS[way])):
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, "yes|nö"),
        ({"guided_choice": ["left", "right"], "min_tokens": 30}, "left|right"),
        ({"guided_grammar": 'start: "a"~3 "b"'}, "aaab"),
        ({"grammar": 'root ::= "x" [0-9]{2,4} "y"'}, "x[0-9]{2,4}y"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": "[ab]{4}"},
                }
            },
            "[ab]{4}",
        ),
        ({"guided_regex": "[a-z]{9}", "stop": ["a"], "logprobs": True}, "[b-z]{0,9}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ([0-9]{1,4})?'}}, "a([0-9]{1,4})?"),
        ({"structured_outputs": {"grammar": 'root ::= ("a"{1,3}){2}'}}, "a{2,6}"),
        ({"structured_outputs": {"grammar": 'root ::= (("x")?){1,3} "y"'}}, "x{0,3}y"),
        ({"structured_outputs": {"grammar": "root ::= ([0-9]{2})?"}}, "([0-9]{2})?"),
        ({"structured_outputs": {"grammar": r'root ::= "\u00e9"'}}, "é"),
        (
            {"structured_outputs": {"grammar": 'root ::= foo Foo\nfoo ::= "a"\nFoo ::= "b"'}},
            "ab",
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"'}},
            "12",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<n>",
                        "content": {"type": "grammar", "grammar": 'root ::= "1" | "2"'},
                        "end": ["</n>", "."],
                    },
                }
            },
            r"<n>[12](</n>|\.)",
        ),
        ({"guided_json": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}}, "1|3"),
    ],
)
def test_other_forms(fields: dict[str, Any], pattern: str, server: RunningServer) -> None:
    for text in texts(chat(server, n=2, seed=1, **fields)):
        assert re.fullmatch(pattern, text)


def test_streams_and_text_completions(server: RunningServer) -> None:
    body = {
        "messages": QUESTION,
        "max_tokens": 400,
        "stream": True,
        "seed": 3,
        **WAYS["guided_json"],
    }
    answer = server.post("/v1/chat/completions", body)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), PERSON)
    body = {"prompt": ["A", "B"], "max_tokens": 9, "guided_regex": "[a-z]{4}"}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert all(re.fullmatch("[a-z]{4}", choice["text"]) for choice in choices)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, "yes|nö"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: "a"~3 "b"'}, "aaab"),
    ],
)
def test_responses_and_messages(form: dict[str, Any], pattern: str, server: RunningServer) -> None:
    body = {"input": QUESTION, "max_output_tokens": 20, "store": False, **form}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["output"][0]["content"][0]["text"])
    answer = server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 20, **form})
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["content"][0]["text"])


def test_two_forms_are_named_as_the_route_calls_them(server: RunningServer) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {}}
    body = {"input": "Hello", "text": {"format": form}, "guided_regex": "a"}
    error = server.post("/v1/responses", body).json()["error"]
    assert error["param"] == "text.format"
    assert error["message"].startswith("text.format and guided_regex each say")
    config = {"format": {"type": "json_schema", "schema": {}}}
    body = {"messages": QUESTION, "max_tokens": 9, "output_config": config, "guided_regex": "a"}
    error = server.post("/v1/messages", body).json()["error"]
    assert error["message"].startswith("output_config.format and guided_regex each say")


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("levels", [31, 60])
def test_a_schema_may_be_as_deep_on_every_route(levels: int, server: RunningServer) -> None:
    schema, form = _deep(levels), {"type": "json_schema", "name": "s", "schema": _deep(levels)}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            {"structured_outputs": {"json": json.dumps(schema)}},
        ],
        "/v1/responses": [{"text": {"format": form}}],
        "/v1/messages": [{"output_config": {"format": {"type": "json_schema", "schema": schema}}}],
    }
    for path, ways in bodies.items():
        is_responses = path == "/v1/responses"
        ask = {"input": "Hi"} if is_responses else {"messages": QUESTION}
        limit = {"max_output_tokens": 16} if is_responses else {"max_tokens": 4}
        for way in ways:
            answer = server.post(path, {**ask, **limit, **way})
            assert answer.status_code == 200, f"{path}: {answer.text[:300]}"


HOSTILE: dict[str, dict[str, Any]] = {
    "contradictory bounds": {"json": {"type": "integer", "minimum": 9, "maximum": 3}},
    "5,000 optional properties": {
        "json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
        }
    },
    "a loop of references": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "a reference that leads out": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "deep nesting": {"json": _deep(60)},
    "nesting that is deeper still": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "megabytes of choices": {"choice": ["x" * 500] * 4000},
    "too many choices": {"choice": [str(i) for i in range(50_000)]},
    "an exploding pattern": {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
    "nested repetitions": {"json": {"type": "string", "pattern": "^(((x{1,99}){1,99}){1,99})*y$"}},
    "a rule without an end": {"grammar": "start: start start | start"},
    "no regular expression": {"regex": "((("},
}


def test_hostile_grammars_hurt_nobody(server: RunningServer) -> None:
    """Each is refused, or cut by its length, while another client's stream goes on."""
    arrivals: list[str] = []
    done = threading.Event()

    def read_streams() -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not done.is_set():
            with httpx.stream("POST", server.url + "/v1/completions", json=body, **PLAIN) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(line)

    reader = threading.Thread(target=read_streams)
    reader.start()
    try:
        for name, form in HOSTILE.items():
            before = len(arrivals)
            answer = chat(server, structured_outputs=form, stream=True, max_tokens=8)
            while answer.status_code == 503:  # of a busy machine, which says to try again
                answer = chat(server, structured_outputs=form, stream=True, max_tokens=8)
            assert answer.status_code in (200, 400), f"{name}: {answer.text[:500]}"
            if answer.status_code == 400:
                assert answer.json()["error"]["param"], name
            else:
                assert '"finish_reason":"' in answer.text, name
                assert answer.text.rstrip().endswith("[DONE]"), name
            wait_until(lambda: len(arrivals) > before)  # noqa: B023 - called at once
    finally:
        done.set()
        reader.join()
    assert texts(chat(server, guided_regex="fine")) == ["fine"]


def test_the_process_that_checks_grammars_may_die(server: RunningServer) -> None:
    assert texts(chat(server, guided_regex="before")) == ["before"]
    os.kill(server.child_pid("vllmx_engine.grammars"), signal.SIGKILL)
    assert texts(chat(server, guided_regex="afterwards")) == ["afterwards"]
