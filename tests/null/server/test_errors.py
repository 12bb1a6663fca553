"""What goes wrong becomes the right status, in OpenAI's shape, and disturbs nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.waiting import until

from .conftest import JSON, MakeServer, Served, request_bytes


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for internal in ("Traceback", "site-packages", "/src/", "FakeError"):
        assert internal not in error["message"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "temprature": 1}', "temprature"),
        (b'{"prompt": "a", "max_tokens": "x"}', "max_tokens"),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": "a", "temperature": 1e999}', None),
        (b'{"prompt": "a"', None),
        (b"", None),
        (b'"text"', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": [1, 100000]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": "a", "n": 4, "best_of": 2}', "best_of"),
        (b'{"prompt": "a", "logit_bias": {"400": 1}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"-1": 1}}', "logit_bias"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    ],
)
async def test_bad_completions(served: Served, body: bytes, param: str | None) -> None:
    response = await served.client.post("/v1/completions", content=body, headers=JSON)
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert served.state.admission.in_flight == 0


async def test_a_field_that_is_misspelt_has_a_neighbour(served: Served) -> None:
    body = {"model": "fake", "message": []}
    error = error_of(await served.client.post("/v1/chat/completions", json=body), 400)
    assert error["message"].startswith("unknown field 'message'; did you mean 'messages'? Else ")
    error = error_of(await served.client.post("/v1/completions", json={"prompt": "a", "é": 1}), 400)
    assert error["message"].startswith("unknown field 'é': remove it")


async def test_bad_chats(served: Served) -> None:
    for fields, param in (
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template": "x"}, "chat_template"),
    ):
        messages = [{"role": "user", "content": "hi"}]
        response = await served.post("/v1/chat/completions", messages=messages, **fields)
        assert error_of(response, 400)["param"] == param


async def test_content_parts_that_are_not_served(served: Served) -> None:
    for part, message in (
        ({"type": "text"}, "content part of type 'text' without its text"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "reads text alone here"),
        ({"type": "image_url"}, "'image_url' without it"),
        ({"type": "audio_url", "audio_url": "x"}, "is an audio, but fake reads text alone"),
        ({"type": "input_audio"}, "'input_audio' without it"),
        ({"type": "video_url"}, "'video_url' without it"),
        ({"type": "video_url", "video_url": "x"}, "is a video, but fake reads text alone"),
        ({"type": "sound_url"}, "takes text, image_url, video_url, input_audio and audio_url"),
    ):
        messages = [{"role": "user", "content": [part]}]
        response = await served.post("/v1/chat/completions", messages=messages)
        assert message in error_of(response, 400)["message"]


async def test_a_prompt_that_is_too_long_says_the_numbers(served: Served) -> None:
    for prompt in ("x" * 600, "x" * 20_000, [5] * 600):
        error = error_of(await served.post("/v1/completions", prompt=prompt), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(len(prompt)) in error["message"]
        assert "511" in error["message"]
    messages = [{"role": "user", "content": "x" * 700}]
    error = error_of(await served.post("/v1/chat/completions", messages=messages), 400)
    assert error["code"] == "context_length_exceeded"


async def test_an_error_quotes_no_megabytes(served: Served) -> None:
    long = "x" * 1_000_000
    for body in (
        {"prompt": "a", long: 1},
        {"prompt": "a", "logit_bias": {long: 1}},
        {"prompt": "a", "model": long},
    ):
        response = await served.client.post("/v1/completions", json=body)
        error_of(response, response.status_code)
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000


async def test_routes_and_methods(served: Served) -> None:
    for path in ("/v1/nothing", "/v1/nothing/", "/%0a", "/v1/models/other"):
        error_of(await served.client.get(path), 404)
    response = await served.client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]
    assert error_of(await served.post("/v1/completions", prompt="a", model="x"), 404)["param"]
    assert (await served.client.head("/health")).status_code == 200


async def test_a_host_that_is_no_host(served: Served) -> None:
    for host in ("[::1", "a b", "", "x" * 300):
        reader, writer = await served.connect()
        writer.write(f"GET /v1/nothing/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ")[1] in (b"404", b"400", b"403"), head
        assert b"location" not in head.lower()
        writer.close()


async def test_only_json_is_read(served: Served) -> None:
    """A web page can make its visitor's browser send other types to any server, unasked."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await served.client.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
        )
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    for encoding, status in (("gzip", 415), ("gzip, identity", 415), ("Identity", 200)):
        response = await served.client.post(
            "/v1/completions",
            content=b'{"prompt": "a"}',
            headers={**JSON, "content-encoding": encoding},
        )
        assert response.status_code == status
    kind = "Application/JSON; charset=utf-8"
    response = await served.client.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
    )
    assert response.status_code == 200


async def test_bodies_over_the_limit(make_server: MakeServer) -> None:
    async def pieces() -> Any:
        for _ in range(200):
            yield b" " * 1000

    async with make_server({"max_body_bytes": 5000}) as served:
        for content in (b" " * 5001, b" " * 3_000_000, pieces()):
            response = await served.client.post("/v1/completions", content=content, headers=JSON)
            assert error_of(response, 413)["code"] == "body_too_large"
        exact = b'{"prompt": "a"}'.ljust(5000)
        response = await served.client.post("/v1/completions", content=exact, headers=JSON)
        assert response.status_code == 200


async def test_a_body_that_never_ends(make_server: MakeServer) -> None:
    async with make_server({"body_timeout_s": 0.1}) as served:
        reader, writer = await served.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "abc"})[:-3])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in await reader.read(4096)
        writer.close()


async def test_a_full_queue_is_429_with_retry_after(
    make_server: MakeServer, held_steps: threading.Event
) -> None:
    async with make_server(engine={"max_num_seqs": 1, "max_queue": 1}, step_s=3600.0) as served:
        running = [asyncio.ensure_future(served.complete(max_tokens=400)) for _ in range(2)]
        await until(lambda: served.llm.num_in_flight == 2)
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            response = await served.post(path, **body)
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
        for task in running:
            task.cancel()
        held_steps.set()
        await served.becomes_idle()


async def test_too_many_requests_in_flight_are_503(make_server: MakeServer) -> None:
    async with make_server({"max_concurrent_requests": 1}, step_s=0.01) as served:
        running = asyncio.ensure_future(served.complete(max_tokens=400))
        await served.in_flight_become(1)
        response = await served.post("/v1/completions", prompt="a")
        assert error_of(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        running.cancel()
        await served.in_flight_become(0)
        assert (await served.complete(max_tokens=1))["choices"]


async def test_some_prompts_of_a_call_do_not_fit_into_the_queue(
    make_server: MakeServer, held_steps: threading.Event
) -> None:
    async with make_server(engine={"max_num_seqs": 1, "max_queue": 2}, step_s=3600.0) as served:
        running = asyncio.ensure_future(served.complete(max_tokens=100))
        await until(lambda: served.llm.num_in_flight == 1)
        error_of(await served.post("/v1/completions", prompt=["a", "b", "c"]), 429)
        held_steps.set()
        await running
        await served.becomes_idle()


@pytest.mark.usefixtures("paced_steps")
async def test_a_fault_of_one_request_before_and_after_its_first_byte(
    make_server: MakeServer,
) -> None:
    """Token 7 breaks the row that feeds it."""
    async with make_server(nan_token=7, step_s=3600.0) as served:
        for stream in (False, True):
            response = await served.post("/v1/completions", prompt=[1, 7], stream=stream)
            assert error_of(response, 500)["code"] == "non_finite_logits"
        good, bad = await asyncio.gather(
            served.events("/v1/completions", prompt="a", max_tokens=20, allowed_token_ids=[8]),
            served.events("/v1/completions", prompt="ab", max_tokens=9, allowed_token_ids=[7]),
        )
        assert bad[0]["choices"][0]["text"] == "\x07"
        assert bad[-2]["error"]["code"] == "non_finite_logits"
        assert bad[-1] == "[DONE]"
        assert good[-1] == "[DONE]"
        assert good[-2]["choices"][0]["finish_reason"] == "length"
        metrics = (await served.client.get("/metrics")).text
        assert 'request_success_total{finished_reason="error",model_name="fake"} 3.0' in metrics
        await served.becomes_idle()


@pytest.mark.usefixtures("paced_steps")
async def test_the_end_of_the_core_before_and_after_the_first_byte(
    make_server: MakeServer,
) -> None:
    async with make_server(step_s=3600.0, fail_steps=[9]) as served:
        early, late = await asyncio.gather(
            served.events("/v1/completions", prompt="a", max_tokens=400),
            served.post("/v1/completions", prompt="a", max_tokens=400),
        )
        assert early[-2]["error"]["type"] in ("service_unavailable_error", "internal_error")
        assert error_of(late, late.status_code)
        assert late.status_code in (500, 503)


async def test_a_bug_of_ours_tells_nothing(served: Served, caplog: Any) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(" ".join(("secret", "detail")))

    served.llm.submit_all = broken  # type: ignore[method-assign, assignment]
    response = await served.post("/v1/completions", prompt="a")
    error = error_of(response, 500)
    assert "secret" not in json.dumps(error)
    assert response.headers["x-request-id"] in caplog.text
    assert "RuntimeError" in caplog.text
    assert "in broken" in caplog.text
    assert "secret detail" not in caplog.text
    assert served.state.admission.in_flight == 0


async def test_ids_are_names_not_keys(make_server: MakeServer) -> None:
    """Two requests of one id, at the same time."""
    async with make_server(step_s=0.005) as served:
        headers = {"x-request-id": "trace-1"}
        body = {"prompt": "a", "max_tokens": 5}
        answers = await asyncio.gather(
            *(served.client.post("/v1/completions", json=body, headers=headers) for _ in "ab")
        )
        assert [answer.json()["id"] for answer in answers] == ["cmpl-trace-1"] * 2
        assert {answer.headers["x-request-id"] for answer in answers} == {"trace-1"}
        named = await served.complete(request_id="mine", max_tokens=1)
        assert named["id"] == "cmpl-mine"
        for bad in ("a b", "x" * 129, "a/b", "ä".encode()):
            response = await served.client.get("/version", headers={"x-request-id": bad})
            assert len(response.headers["x-request-id"]) == 32


async def test_the_core_logs_the_id_that_a_client_knows(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllmx")
    async with make_server(nan_token=7) as served:
        messages = [{"role": "user", "content": "a"}]
        for path, body, name in (
            ("/v1/completions", {"prompt": "a"}, "mine-1"),
            ("/v1/chat/completions", {"messages": messages}, "mine-2"),
            ("/v1/chat/completions", {"messages": messages}, None),
        ):
            body |= {"allowed_token_ids": [7], "max_tokens": 3}
            headers = {} if name is None else {"x-request-id": name}
            response = await served.client.post(path, json=body, headers=headers)
            assert response.status_code == 500
            shown = response.headers["x-request-id"]
            assert name in (None, shown)
            (line,) = [
                record.getMessage()
                for record in caplog.records
                if record.name == "vllmx.commit" and f"({shown})" in record.getMessage()
            ]
            assert "ends with an error" in line


async def test_a_line_break_in_a_path_does_not_forge_the_log(served: Served, caplog: Any) -> None:
    caplog.set_level("INFO", "vllmx.access")
    await served.client.get("/a%0AGET%20/forged%20200")
    (record,) = [record for record in caplog.records if record.name == "vllmx.access"]
    assert record.getMessage().startswith("GET other 404 ")
