"""What clients of OpenAI's API, vLLM and llama.cpp rely on beside the numbers of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllmx_server.generating import served as state

from .conftest import MakeServer, Served

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def refused(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that must be refused with 400."""
    response = await served.post(path, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --- prompts --------------------------------------------------------------------------------------
async def test_tools_keep_the_order_of_their_keys(make_server: MakeServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | tojson }}")
    tool = {
        "function": {
            "strict": False,
            "parameters": {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}},
            "name": "f",
            "description": "d",
        },
        "type": "function",
    }
    async with make_server(engine={"chat_template": str(template)}) as served:
        answer = (await served.post("/tokenize", messages=MESSAGES, tools=[tool])).json()
        back = (await served.post("/detokenize", tokens=answer["tokens"])).json()
        assert back["prompt"] == json.dumps([tool])
        known = {**tool, "cache_control": {}, "function": {**tool["function"], "colour": 1}}
        answer = (await served.post("/tokenize", messages=MESSAGES, tools=[known])).json()
        back = (await served.post("/detokenize", tokens=answer["tokens"])).json()
        assert back["prompt"] == json.dumps([tool]), "keys that are ignored are not shown"
        del tool["type"]
        answer = (await served.post("/tokenize", messages=MESSAGES, tools=[tool])).json()
        back = (await served.post("/detokenize", tokens=answer["tokens"])).json()
        assert json.loads(back["prompt"])[0]["type"] == "function"
        for wrong, param in (
            ({"function": {}}, "tools[0].function"),
            ({}, "tools[0]"),
        ):
            assert (await refused(served, CHAT, messages=MESSAGES, tools=[wrong]))["param"] == param


async def test_roles(make_server: MakeServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"

    async def prompt(served: Served, *roles: str) -> str:
        messages = [{"role": role, "content": "x"} for role in roles]
        answer = (await served.post("/tokenize", messages=messages)).json()
        back = (await served.post("/detokenize", tokens=answer["tokens"])).json()
        text: str = back["prompt"]
        return text

    template.write_text("{% for m in messages %}{{ m.role }},{% endfor %}")
    async with make_server(engine={"chat_template": str(template)}) as served:
        assert await prompt(served, "developer", "user") == "system,user,"
        wrong = {"role": "ipython", "content": "x"}
        error = await refused(served, CHAT, messages=[*MESSAGES, wrong])
        assert error["param"] == "messages[1].role"
        assert "ipython" in error["message"]
        for content in ({}, {"content": None}, {"content": []}):
            error = await refused(served, CHAT, messages=[{"role": "user", **content}])
            assert error["param"] == "messages[0].content"
        assert (await served.post(CHAT, messages=[{"role": "user", "content": ""}])).is_success
    template.write_text(
        "{% for m in messages %}{{ '!' if m.role in ('ipython', 'developer') }}{{ m.role }}"
        "{% endfor %}"
    )
    async with make_server(engine={"chat_template": str(template)}) as served:
        assert await prompt(served, "developer", "ipython") == "!developer!ipython"


async def test_a_prompt_goes_on_or_begins_anew_but_not_both(served: Served) -> None:
    body: dict[str, Any] = {"messages": [*MESSAGES, {"role": "assistant", "content": "so"}]}
    body |= {"continue_final_message": True}
    error = await refused(served, CHAT, **body, add_generation_prompt=True)
    assert error["param"] == "add_generation_prompt"
    await refused(served, "/tokenize", **body, add_generation_prompt=True)
    for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        assert (await served.post(CHAT, **body, **more, max_tokens=1)).status_code == 200


async def test_special_tokens_around_a_chat(make_server: MakeServer) -> None:
    async with make_server(adds_special_tokens=True) as served:
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
        plain = (await served.post(CHAT, **body)).json()["prompt_token_ids"]
        more = (await served.post(CHAT, **body, add_special_tokens=True)).json()["prompt_token_ids"]
        assert more == [256, *plain]


async def test_a_text_that_the_context_cannot_hold(served: Served) -> None:
    error = await refused(served, TEXT, prompt="x" * 500, max_tokens=13)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(word in error["message"] for word in ("13", "500", "512", "to 12"))
    assert (await served.complete("x" * 500, max_tokens=12))["usage"]["completion_tokens"] == 12
    for fields in ({}, {"max_tokens": None}):  # not asked for: what there is room for
        assert (await served.complete("x" * 500, **fields))["usage"]["completion_tokens"] == 12
    scored = await served.complete("x" * 511, max_tokens=0, echo=True)
    assert scored["usage"]["prompt_tokens"] == 511


async def test_a_chat_that_the_context_cannot_hold(served: Served) -> None:
    body: dict[str, Any] = {"messages": MESSAGES}
    used = (await served.post(CHAT, **body, max_tokens=1)).json()["usage"]["prompt_tokens"]
    room = 512 - used
    for name in ("max_tokens", "max_completion_tokens"):
        error = await refused(served, CHAT, **body, **{name: room + 1})
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert f"to {room}," in error["message"]
    for fields in ({}, {"max_tokens": None}, {"max_tokens": room}):
        usage = (await served.post(CHAT, **body, **fields, ignore_eos=True)).json()["usage"]
        assert usage["total_tokens"] == 512


async def test_prompts_that_lose_their_beginning(served: Served) -> None:
    text = "ab" * 400 + "c"
    fixed: dict[str, Any] = {"max_tokens": 10, "return_token_ids": True, "echo": True}
    for keep, kept in ((3, 3), (-1, 502), (500, 500)):
        answer = await served.complete(text, truncate_prompt_tokens=keep, **fixed)
        assert answer["choices"][0]["prompt_token_ids"] == [*text[-kept:].encode()]
        assert answer["choices"][0]["text"].startswith(text[-kept:])
        assert answer["usage"]["prompt_tokens"] == kept
    answer = await served.complete([*b"abc"], truncate_prompt_tokens=2, **fixed)
    assert answer["choices"][0]["prompt_token_ids"] == [*b"bc"]
    answer = await served.complete("ab", truncate_prompt_tokens=2, **fixed)
    assert answer["choices"][0]["prompt_token_ids"] == [*b"ab"]
    chat = await served.post(CHAT, messages=MESSAGES, truncate_prompt_tokens=4, max_tokens=1)
    assert chat.json()["usage"]["prompt_tokens"] == 4
    error = await refused(served, TEXT, prompt="a", truncate_prompt_tokens=513)
    assert error["param"] == "truncate_prompt_tokens"


async def test_offsets_of_an_echo_count_its_own_text(make_server: MakeServer) -> None:
    async with make_server(adds_special_tokens=True) as served:
        choice = (await served.complete("h\u00e9<|user|>y", max_tokens=1, echo=True, logprobs=0))[
            "choices"
        ][0]
        assert choice["text"].startswith("h\u00e9<|user|>y")
        assert choice["logprobs"]["tokens"][0] == "<|end|>"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 10, 11]
        ids = {"prompt": [256, 104, 257, 121], "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = (await served.complete(**ids))["choices"][0]
        assert choice["text"] == "hy"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1]


# --- answers --------------------------------------------------------------------------------------
async def test_an_answer_can_be_sent_back(served: Served) -> None:
    answer = (await served.post(CHAT, messages=MESSAGES, max_tokens=3)).json()
    ours = answer["choices"][0]["message"]
    theirs = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    for message in (ours, {**ours, **theirs}, {**ours, "tool_calls": [], "function_call": {}}):
        response = await served.post(CHAT, messages=[*MESSAGES, message, *MESSAGES], max_tokens=1)
        assert response.status_code == 200, response.text
    for name, value in (("audio", {"id": "a"}), ("function_call", {"f": 1})):
        error = await refused(served, CHAT, messages=[{**ours, name: value}, *MESSAGES])
        assert error["param"] == f"messages[0].{name}"


async def test_what_clients_read_is_there_as_null(served: Served) -> None:
    chat = (await served.post(CHAT, messages=MESSAGES, max_tokens=2)).json()
    text = await served.complete(max_tokens=2)
    for found in (chat, text["choices"][0]):
        assert found["prompt_logprobs"] is None
        assert found["prompt_token_ids"] is None
    for answer in (chat, text):
        assert answer["choices"][0]["token_ids"] is None
    scored = await served.complete(max_tokens=0, echo=True, logprobs=1)
    assert scored["choices"][0]["prompt_logprobs"] is None


async def test_the_first_delta_has_a_role_and_no_text(served: Served) -> None:
    events = await served.events(CHAT, messages=MESSAGES, max_tokens=2, n=2)
    for index in (0, 1):
        choice = events[index]["choices"][0]
        assert choice["index"] == index
        assert choice["delta"] == {"role": "assistant", "content": ""}


async def test_a_fingerprint_tells_one_server_from_another(served: Served) -> None:
    answer = await served.complete(max_tokens=1)
    events = await served.events(CHAT, messages=MESSAGES, max_tokens=3)
    info = served.llm.info
    found = {event["system_fingerprint"] for event in (answer, *events[:-1])}
    assert found == {state.fingerprint(info)}
    assert state.fingerprint(msgspec.structs.replace(info, max_num_seqs=7)) in found
    assert state.fingerprint(msgspec.structs.replace(info, kv_cache_dtype="int8")) not in found


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, None),
        ({"include_usage": None, "continuous_usage_stats": None}, None),
        ({"include_usage": True, "continuous_usage_stats": None}, "last"),
        ({"include_usage": None, "continuous_usage_stats": True}, "each"),
        ({"continuous_usage_stats": True}, "each"),
        ({"include_usage": False, "continuous_usage_stats": True}, None),
        ({"include_usage": True, "include_obfuscation": None}, "last"),
    ],
)
async def test_stream_options(served: Served, options: dict[str, Any], asked: str | None) -> None:
    *events, done = await served.events(TEXT, prompt="a", max_tokens=3, stream_options=options)
    assert done == "[DONE]"
    if asked is None:
        assert not any("usage" in event for event in events)
        return
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all(bool(event["usage"]) == (asked == "each") for event in events[:-1])


@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": False}, {"include_usage": True}, {"continuous_usage_stats": True}],
)
async def test_usage_in_every_chunk_where_the_operator_says_so(
    make_server: MakeServer, options: dict[str, Any] | None
) -> None:
    async with make_server({"enable_force_include_usage": True}) as served:
        for path, prompt in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            *events, done = await served.events(
                path, **prompt, max_tokens=3, stream_options=options
            )
            assert done == "[DONE]"
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["completion_tokens"] == 3
            assert all(event["usage"]["prompt_tokens"] for event in events)


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": None}])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (TEXT, {"prompt": ["ab", "c"]}),
        (TEXT, {"prompt": ["ab", "c"], "echo": True}),
        (CHAT, {"messages": MESSAGES}),
    ],
)
async def test_usage_does_not_run_ahead_of_the_text(
    served: Served, path: str, prompt: dict[str, Any], more: dict[str, Any]
) -> None:
    """Each chunk counts the tokens that the client has with it, and no others."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 4, "return_token_ids": True, "stream_options": options}
    *events, last, _ = await served.events(path, **prompt, **fields, **more)
    seen = 0
    for event in events:
        seen += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
        assert event["usage"]["completion_tokens"] == seen
        assert event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + seen
    assert last["usage"]["completion_tokens"] == seen > 0
    if path == CHAT:
        roles = [event for event in events if "role" in event["choices"][0]["delta"]]
        assert [event["usage"]["completion_tokens"] for event in roles] == [0] * len(roles)


async def test_tokens_named_by_their_ids(served: Served) -> None:
    fixed: dict[str, Any] = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    fixed |= {"return_token_ids": True, "temperature": 0}
    choice = (await served.complete("ab", logprobs=2, echo=True, **fixed))["choices"][0]
    names = [f"token_id:{token}" for token in (97, 98, *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == names
    assert all(
        name in top
        for name, top in zip(names[1:], choice["logprobs"]["top_logprobs"][1:], strict=True)
    )
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    choice = (await served.post(CHAT, **chat, **fixed)).json()["choices"][0]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{token}"


# --- fields ---------------------------------------------------------------------------------------
async def test_all_bad_keys_of_a_bias_are_named(served: Served) -> None:
    error = await refused(
        served, TEXT, prompt="a", logit_bias={"x": 1, "5": 1, "-3": 1, "y" * 99: 1}
    )
    assert error["param"] == "logit_bias"
    assert "'x', '-3', 'yyy" in error["message"]
    error = await refused(served, TEXT, prompt="a", logit_bias={"5": 1, "259": 1, "300": 1})
    assert "names 259, 300," in error["message"]
    assert "0 to 258" in error["message"]
    many = {f"k{index}": 1 for index in range(1000)}
    error = await refused(served, TEXT, prompt="a", logit_bias=many)
    assert "and 980 more" in error["message"]
    many |= {f"l{index}": 1 for index in range(1000)}
    error = await refused(served, TEXT, prompt="a", logit_bias=many)
    assert "at most 1024" in error["message"]


# --- who asks -------------------------------------------------------------------------------------
async def test_a_key_in_its_own_header(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("first", "second")}) as served:
        get = served.client.get
        assert (await get("/version", headers={"x-api-key": "second"})).status_code == 200
        assert (await get("/version", headers={"X-API-Key": "third"})).status_code == 401
        both = {"authorization": "Bearer wrong", "x-api-key": "first"}
        assert (await get("/version", headers=both)).status_code == 401, "one key a request"
        other = {"authorization": "Basic eDp5", "x-api-key": "first"}
        assert (await get("/version", headers=other)).status_code == 200


async def test_a_preflight_needs_no_key(make_server: MakeServer) -> None:
    asks = {"origin": "http://a.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "x-api-key,content-type"
    async with make_server({"api_key": ("first",), "allowed_origins": ("*",)}) as served:
        response = await served.client.options(CHAT, headers=asks)
        assert response.status_code == 200
        assert "x-api-key" in response.headers["access-control-allow-headers"]
    async with make_server({"api_key": ("first",)}) as served:
        response = await served.client.options(CHAT, headers=asks)
        assert response.status_code == 405, "no key is missing: nothing is allowed across origins"
        response = await served.client.options(CHAT, headers={"origin": "http://a.example"})
        assert response.status_code == 401


async def test_the_root_of_a_model_is_its_path(served: Served) -> None:
    (card,) = (await served.client.get("/v1/models")).json()["data"]
    assert card["root"] == served.llm.config.model
    assert Path(card["root"]).is_dir()
