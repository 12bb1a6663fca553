"""Requests made of the API's document by schemathesis, and answers held against it.

`nox -s openapi` makes many times as many, other ones each time.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from vllmx_server.host.apis import all_routes

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_pooling import LetterPooler

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NUM_EXAMPLES = int(os.environ.get("VLLMX_OPENAPI_EXAMPLES", "0"))
"""Of each operation and kind; 0: a few, the same each time."""
REMEDY = "vllmx_server/openapi or vllmx_server/answers does not say what the server does"


async def kept_ids(served: Served) -> dict[str, str]:
    """One of each kind of what is kept, by the beginnings of their paths."""
    line = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"a","max_tokens":2}}\n'
    files = {"file": ("in.jsonl", line)}
    file = await served.client.post("/v1/files", files=files, data={"purpose": "batch"})
    ask = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
    batch = await served.client.post("/v1/batches", json=ask)
    response = await served.client.post(
        "/v1/responses", json={"input": "a", "max_output_tokens": 4}
    )
    conversation = await served.client.post("/v1/conversations", json={})
    params = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    message_batch = await served.client.post(
        "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]}
    )
    found = {
        "/v1/messages/batches": message_batch,
        "/v1/files": file,
        "/v1/batches": batch,
        "/v1/responses": response,
        "/v1/conversations": conversation,
    }
    return {path: answer.json()["id"] for path, answer in found.items()}


def with_events(document: dict[str, Any]) -> dict[str, Any]:
    """The document with a schema for each event of a stream, as OpenAPI 3.2 has it and schemathesis
    checks it, in place of our `x-events`."""
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("200", {}).get("content", {})
            if "text/event-stream" in content:
                shown = content["text/event-stream"]["x-events"]
                content["text/event-stream"] = {"itemSchema": {"anyOf": [*map(event_of, shown)]}}
    return document


def event_of(shown: dict[str, Any]) -> dict[str, Any]:
    """The schema of an event, which brings its data as text."""
    is_text = "const" in shown["data"]
    as_json = {"contentMediaType": "application/json", "contentSchema": shown["data"]}
    data = shown["data"] if is_text else {"type": "string", **as_json}
    properties = {"event": {"const": shown.get("event", "message")}, "data": data}
    return {"type": "object", "properties": properties, "required": [*properties]}


def streamed(case: Any) -> Any:
    """The same request, answered in events."""
    if isinstance(case.body, dict):
        case.body["stream"] = True
    return case


def check_operation(operation: Any, url: str, kept: dict[str, str]) -> list[str]:
    """What is wrong with answers to requests that are as the document says, and to others."""
    wrong: list[str] = []
    has_events = "text/event-stream" in str(operation.definition.raw["responses"]["200"])
    known = next((kept[path] for path in kept if operation.path.startswith(path + "/{")), None)
    is_asked = operation.body or operation.query
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if is_asked else [])]
    for mode in modes:
        for parameters in (None, {"id": known}) if known else (None,):
            options = {} if parameters is None else {"path_parameters": parameters}
            cases = [operation.as_strategy(mode, **options)]
            if has_events and mode is GenerationMode.POSITIVE:
                cases.append(cases[0].map(streamed))
            for each in cases:
                try:
                    check_cases(each, url)
                except (FailureGroup, Failure) as error:
                    wrong.append(f"{operation.label}: {error}")
    return wrong


def check_bounds(operation: Any, url: str) -> list[str]:
    """What is wrong with answers to fields at their bounds and beyond, one after the other."""
    wrong: list[str] = []
    config = operation.schema.config.generation_for(operation=operation)
    for case in operation.schema.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=config
    ):
        try:
            case.call_and_validate(base_url=url, timeout=PATIENCE_S, checks=CHECKS)
        except (FailureGroup, Failure) as error:
            wrong.append(f"{operation.label}: {error}")
    return wrong


def check_cases(cases: Any, url: str) -> None:
    @settings(
        max_examples=NUM_EXAMPLES or 5,
        derandomize=not NUM_EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        case.call_and_validate(base_url=url, timeout=PATIENCE_S, checks=CHECKS)

    check()


async def test_answers_are_as_the_document_says(make_server: MakeServer) -> None:
    flags = {"enable_tokenizer_info_endpoint": True}
    async with make_server(flags, max_model_len=64) as served:
        document = (await served.client.get("/openapi.json")).json()
        served.state.pooler = LetterPooler()
        kept = await kept_ids(served)

        def check() -> list[str]:
            schema = schemathesis.openapi.from_dict(with_events(document))
            operations = [each.ok() for each in schema.get_all_operations()]
            operations.sort(key=lambda each: each.method == "delete")
            assert len(operations) == len(all_routes()), "a part of the document was not understood"
            wrong = [
                wrong for each in operations for wrong in check_operation(each, served.url, kept)
            ]
            if NUM_EXAMPLES:  # thousands of requests
                wrong += [wrong for each in operations for wrong in check_bounds(each, served.url)]
            return wrong

        wrong = await asyncio.to_thread(check)
        assert not wrong, f"{REMEDY}:\n" + "\n".join(wrong)
