"""Tools of MCP servers in Responses: real servers, and a model that answers from a script."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from vllmx_core.errors import ContextLengthError
from vllmx_server.apis.responses.answers import Response, ResponsesEvent
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.mcp import servers as tool_server_module
from vllmx_server.mcp import transports
from vllmx_server.mcp.servers import ToolServers
from vllmx_server.mcp.settings import read_servers

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .scripted_model import PROMPT_TOKENS, CutAnswer, Script
from .test_batches import begin, content, ended
from .test_keys import key_file
from .test_messages import named_events

pytest.importorskip("mcp", reason="the package mcp is not installed")

SERVER = str(Path(__file__).parents[1] / "mcp" / "scripted_server.py")
WELL = {
    "type": "mcp",
    "server_label": "well",
    "require_approval": "never",
    "allowed_tools": ["echo", "fail", "hang", "env"],
}
PATIENT = {"startTimeoutSeconds": PATIENCE_S, "callTimeoutSeconds": PATIENCE_S}


def scripted(mode: str, **fields: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-S", SERVER, mode], **PATIENT, **fields}


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture(scope="module")
def tool_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServers]:
    path = tmp_path_factory.mktemp("mcp") / "mcp.json"
    well = scripted("well", maxResultBytes=1000)
    entries = {"well": well, "down": scripted("dies"), "hangs": well, "stands": well}
    path.write_text(json.dumps({"mcpServers": entries}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_server_module, "_CLOSE_S", 600)
        patch.setattr(transports, "_CODE_S", PATIENCE_S)
        servers = ToolServers(read_servers(path, "--mcp-config"))
        yield servers
        servers.close()


@pytest.fixture
async def served(make_server: MakeServer, tool_servers: ToolServers) -> AsyncIterator[Served]:
    async with make_server({"mcp_max_rounds": 3, "api_key": ("k",)}) as running:
        running.state.store(KeptResponses).tool_servers = tool_servers
        running.client.headers["authorization"] = "Bearer k"
        yield running


async def ask(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post("/v1/responses", json={"input": "hi", "tools": [WELL], **body})


async def answered(served: Served, **body: Any) -> dict[str, Any]:
    response = await ask(served, **body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert msgspec.to_builtins(msgspec.convert(found, Response)) == found
    return found  # type: ignore[no-any-return]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


async def test_a_call_that_a_stop_string_cut_is_not_run(served: Served) -> None:
    Script(served, CutAnswer(call("well__echo", a=1)[:-20]))
    made = await answered(served)
    assert [item["status"] for item in made["output"] if item["type"] == "mcp_call"] == [
        "incomplete"
    ]


async def test_calls_are_run_and_their_results_read(served: Served) -> None:
    script = Script(served, "<think>\nsee\n</think>\n\nWait." + call("well__echo", a=1), "Done.")
    made = await answered(served, instructions="Be brief.")
    assert kinds(made) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    tools, _, first, called, last = made["output"]
    assert [tool["name"] for tool in tools["tools"]] == ["echo", "fail", "env", "hang"]
    assert first["content"][0]["text"] == "Wait."
    assert last["content"][0]["text"] == "Done."
    assert (called["status"], called["server_label"], called["name"]) == (
        "completed",
        "well",
        "echo",
    )
    assert json.loads(called["arguments"]) == json.loads(called["output"]) == {"a": 1}
    assert [t["function"]["name"] for t in script.options[0].tools] == [
        "well__echo",
        "well__fail",
        "well__env",
        "well__hang",
    ]
    system, user, turn, result = script.asked[1]
    assert (system["content"], user["content"]) == ("Be brief.", "hi")
    assert (turn["content"], turn["reasoning_content"]) == ("Wait.", "see")
    (written,) = turn["tool_calls"]
    assert written["function"]["name"] == result["name"] == "well__echo"
    assert (result["role"], result["content"]) == ("tool", '{"a": 1}')
    assert written["id"] == result["tool_call_id"]
    usage = made["usage"]
    assert usage["input_tokens"] == 2 * PROMPT_TOKENS
    assert usage["output_tokens"] > 40
    key = (await served.client.get("/v1/usage")).json()
    assert str(usage["output_tokens"]) in json.dumps(key)


async def test_the_stream_tells_the_same(served: Served) -> None:
    answers = (call("well__echo", a=1) + "\n" + call("echo", b=2) + call("well__fail"), "Done.")
    Script(served, *answers)
    whole = await answered(served)
    Script(served, *answers)
    response = await ask(served, stream=True)
    events = named_events(response.text)
    for _, event in events:
        assert msgspec.to_builtins(msgspec.convert(event, ResponsesEvent)) == event
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:6] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
    ]
    told = [name for name in names[6:] if not name.endswith(".delta")]
    assert told == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done") * 3,
        "mcp_call.completed",
        "output_item.done",
        "mcp_call.completed",
        "output_item.done",
        "mcp_call.failed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    items = [event["item"] for name, event in events if name == "response.output_item.done"]
    final = events[-1][1]["response"]
    assert items == final["output"]
    assert final["usage"] == whole["usage"]
    deltas = [e["delta"] for name, e in events if name == "response.mcp_call_arguments.delta"]
    assert "".join(deltas) == "".join(item.get("arguments", "") for item in items)
    failed = items[3]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert failed["error"] == {
        "type": "mcp_tool_execution_error",
        "content": [{"type": "text", "text": "no such city"}],
    }
    for mine, other in zip(items, whole["output"], strict=True):
        assert {**mine, "id": ""} == {**other, "id": ""}


async def test_a_conversation_goes_on_after_calls(served: Served) -> None:
    Script(served, call("well__echo", a=1), "Done.")
    first = await answered(served)
    script = Script(served, "Again.")
    second = await answered(served, input="and?", previous_response_id=first["id"])
    assert kinds(second) == ["message"], "the tools were listed before"
    assert [message["role"] for message in script.asked[0]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert script.asked[0][1]["tool_calls"][0]["function"]["name"] == "well__echo"
    by_hand = Script(served, "Again.")
    hi, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "and?"}
    await answered(served, input=[hi, *first["output"], more])
    assert by_hand.asked[0] == script.asked[0]


async def test_rounds_calls_and_tokens_are_bounded(served: Served) -> None:
    echo = call("well__echo")
    script = Script(served, echo, echo, "Enough.")
    made = await answered(served, tool_choice="required")
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert [each.tool_choice for each in script.options] == ["required", "auto", "auto"]
    assert [bool(each.tools) for each in script.options] == [True, True, False]
    Script(served, echo + "\n" + echo, "Enough.")
    made = await answered(served, max_tool_calls=1)
    assert [item["status"] for item in made["output"][1:3]] == ["completed", "failed"]
    assert "not run" in made["output"][2]["error"]["message"]
    script = Script(served, echo, "Done.")
    used = (await answered(served, max_output_tokens=50))["usage"]["output_tokens"]
    assert script.params[1].max_tokens == 50 - (used - 3)
    Script(served, echo)
    cut = await answered(served, max_output_tokens=10)
    assert (cut["status"], cut["output"][1]["status"]) == ("incomplete", "completed")


async def test_the_clients_own_functions_are_the_clients(served: Served) -> None:
    own = {"type": "function", "name": "echo", "parameters": {"type": "object"}}
    Script(served, call("well__echo", a=1) + "\n" + call("echo", b=2))
    made = await answered(served, tools=[WELL, own])
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert made["output"][1]["status"] == "completed"
    chosen = {"type": "mcp", "server_label": "well", "name": "echo"}
    script = Script(served, "Fine.")
    await answered(served, tools=[WELL, own], tool_choice=chosen)
    assert script.options[0].tool_choice == "well__echo"
    twice = {**own, "name": "well__echo"}
    assert (await ask(served, tools=[WELL, twice])).status_code == 400


async def test_a_servers_tools_are_allowed(served: Served) -> None:
    """One by its name, or all of them, beside the client's own; what was required is so once."""
    own = {"type": "function", "name": "own", "parameters": {"type": "object"}}
    one = {"type": "mcp", "server_label": "well", "name": "echo"}
    every = {"type": "mcp", "server_label": "well"}
    function = {"type": "function", "name": "own"}
    for allowed, names in (
        ([one, function], ["well__echo", "own"]),
        ([every], ["well__echo", "well__fail", "well__hang", "well__env"]),
    ):
        script = Script(served, call("well__echo", text="x"), "Done.")
        choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
        response = await answered(served, tools=[WELL, own], tool_choice=choice)
        assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
        assert [each.tool_choice for each in script.options] == ["required", "auto"]
        assert [sorted(each.allowed_tools) for each in script.options] == [sorted(names)] * 2
    for tool, words in (
        ({"type": "mcp", "server_label": "odd"}, "none of the MCP servers"),
        ({"type": "mcp", "server_label": "well", "name": "odd"}, "none of the tools of MCP"),
        ({"type": "web_search"}, "of which the request has no tool"),
        ({"type": "function", "name": "odd"}, "none of the tools"),
    ):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [tool]}
        refused = await ask(served, tools=[WELL, own], tool_choice=choice)
        assert refused.status_code == 400
        assert words in refused.text


async def test_a_server_that_is_down_is_told_of(served: Served) -> None:
    script = Script(served, "Sorry.")
    made = await answered(served, tools=[{**WELL, "server_label": "down", "allowed_tools": None}])
    assert made["output"][0]["error"] == "it ended with code 1"
    assert made["output"][0]["tools"] == []
    assert script.options[0].tools is None


DOWN = {**WELL, "server_label": "down", "allowed_tools": None}
OWN = {"type": "function", "name": "own", "parameters": {"type": "object"}}


def allowing(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "mcp", "server_label": "down"},
        {"type": "mcp", "server_label": "down", "name": "echo"},
        allowing("required", {"type": "mcp", "server_label": "down"}),
        allowing("required", {"type": "mcp", "server_label": "down", "name": "echo"}),
    ],
)
async def test_a_call_that_only_a_server_that_is_down_could_take(
    served: Served, choice: str | dict[str, Any]
) -> None:
    Script(served, "Sorry.")
    response = await ask(served, tools=[DOWN], tool_choice=choice)
    assert response.status_code == 424, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("external_connector_error", "tool_choice")
    assert "the MCP server 'down' cannot be reached (it ended with code 1)" in error["message"]


@pytest.mark.parametrize("other", [WELL, OWN])
async def test_another_tool_may_take_the_call(served: Served, other: dict[str, Any]) -> None:
    name = "own" if other is OWN else "well__echo"
    Script(served, call(name), "Done.")
    made = await answered(served, tools=[DOWN, other], tool_choice="required")
    assert {"mcp_call", "function_call"} & set(kinds(made))


async def test_who_leaves_ends_the_calls(served: Served, tool_servers: ToolServers) -> None:
    Script(served, call("hangs__hang"))
    begun = asyncio.Event()

    async def leave() -> None:
        tools = [{**WELL, "server_label": "hangs"}]
        body = {"input": "hi", "tools": tools, "stream": True}
        async with served.client.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if "mcp_call_arguments.done" in line:
                    begun.set()
                    return

    await leave()
    assert begun.is_set()
    await served.in_flight_become(0)


async def test_one_in_the_background_is_cancelled_in_a_call(served: Served) -> None:
    Script(served, call("stands__hang"))
    tools = [{**WELL, "server_label": "stands"}]
    made = (await ask(served, background=True, tools=tools)).json()
    path = f"/v1/responses/{made['id']}"
    async with asyncio.timeout(PATIENCE_S):
        while (await served.client.get(path)).json()["status"] != "in_progress":
            await asyncio.sleep(0.01)
    cancelled = (await served.client.post(path + "/cancel")).json()
    assert (cancelled["status"], cancelled["error"]) == ("cancelled", None)
    assert [item.get("status") for item in cancelled["output"][1:]] in ([], ["incomplete"])
    await served.in_flight_become(0)


async def test_a_round_that_the_engine_refuses_fails_the_response(served: Served) -> None:
    Script(served, call("well__echo"), ContextLengthError("too long"))
    events = named_events((await ask(served, stream=True)).text)
    name, last = events[-1]
    assert name == "response.failed"
    assert last["response"]["error"]["message"] == "too long"
    assert last["response"]["output"][1]["status"] == "completed"
    Script(served, call("well__echo"), ContextLengthError("too long"))
    assert (await ask(served)).status_code == 400


@pytest.mark.parametrize(
    ("tool", "param", "message"),
    [
        ({"server_url": "http://127.0.0.1:1/"}, "tools[0].server_url", "the operator names"),
        ({"command": "sh"}, "tools[0].command", "the operator names"),
        ({"headers": {}}, "tools[0].headers", "the operator names"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id", "the operator names"),
        ({"server_label": "other"}, "tools[0].server_label", "'well', 'down'"),
        ({"require_approval": "always"}, "tools[0].require_approval", 'must be "never"'),
        ({"require_approval": None}, "tools[0].require_approval", 'must be "never"'),
        ({"allowed_tools": ["nope"]}, "tools[0].allowed_tools", "'nope'"),
        ({"allowed_tools": {"tool_names": ["die", "nope"]}}, "tools[0].allowed_tools", "'nope'"),
    ],
)
async def test_what_only_operators_say(
    served: Served, tool: dict[str, Any], param: str, message: str
) -> None:
    response = await ask(served, tools=[{**WELL, **tool}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_keys_use_the_servers_that_are_theirs(
    tmp_path: Path, make_server: MakeServer, tool_servers: ToolServers
) -> None:
    path = key_file(tmp_path, ann={"mcp_servers": ["well", "down"]}, bob={})
    async with make_server({"api_keys_file": path, "api_key": ("k",)}) as served:
        served.state.store(KeptResponses).tool_servers = tool_servers
        for key, label, status in (
            ("secret-ann", "well", 200),
            ("secret-ann", "stands", 403),
            ("secret-bob", "well", 403),
            ("k", "well", 403),
            ("secret-bob", "there is none", 403),
        ):
            Script(served, "Fine.")
            served.client.headers["authorization"] = f"Bearer {key}"
            response = await ask(served, tools=[{**WELL, "server_label": label}])
            assert response.status_code == status, response.text
            if status == 403:
                error = response.json()["error"]
                assert error["param"] == "tools[0].server_label"
                assert ("well" in error["message"]) == (key == "secret-ann" or label == "well")
        served.client.headers["authorization"] = "Bearer secret-bob"
        items = [{"custom_id": "a", "method": "POST", "url": "/v1/responses",
                  "body": {"model": "fake", "input": "hi", "tools": [WELL]}}]  # fmt: skip
        batch = await ended(served, await begin(served, items, endpoint="/v1/responses"))
        records = await content(served, batch["error_file_id"])
        assert [each["response"]["status_code"] for each in records] == [403]


async def test_clients_list_and_call_tools(
    tmp_path: Path, make_server: MakeServer, tool_servers: ToolServers
) -> None:
    tool_servers.settled("down").result(PATIENCE_S)
    path = key_file(tmp_path, ann={"mcp_servers": ["well", "down"]}, bob={})
    async with make_server({"api_keys_file": path}) as served:
        served.state.store(KeptResponses).tool_servers = tool_servers
        post, get = served.client.post, served.client.get
        served.client.headers["authorization"] = "Bearer secret-ann"
        well, down = (await get("/v1/mcp/servers")).json()["data"]
        assert well["tools"][0]["function"]["name"] == "well__echo"
        assert well["error"] is None
        assert (down["tools"], down["error"] is None) == ([], False)
        echo = {"server_label": "well", "name": "well__echo", "arguments": {"a": "é"}}
        for name in ("well__echo", "echo"):
            made = (await post("/v1/mcp/call", json={**echo, "name": name})).json()
            assert (json.loads(made["output"]), made["is_error"]) == ({"a": "é"}, False)
        failed = await post("/v1/mcp/call", json={**echo, "name": "fail"})
        assert failed.json() == {"output": "no such city", "is_error": True}
        for body, status, param in (
            ({**echo, "name": "none"}, 400, "name"),
            ({**echo, "server_label": "stands"}, 403, "server_label"),
            ({**echo, "arguments": "{}"}, 400, "arguments"),
        ):
            refused = await post("/v1/mcp/call", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
        served.client.headers["authorization"] = "Bearer secret-bob"
        assert (await get("/v1/mcp/servers")).json()["data"] == []
        assert (await post("/v1/mcp/call", json=echo)).status_code == 403


async def test_nothing_of_this_without_the_operator(make_server: MakeServer) -> None:
    async with make_server() as served:
        assert (await served.client.get("/v1/mcp/servers")).json()["data"] == []
        body = {"server_label": "well", "name": "echo"}
        response = await served.client.post("/v1/mcp/call", json=body)
        assert "the MCP servers are: none" in response.json()["error"]["message"]
        response = await ask(served)
        assert response.status_code == 400
        assert "--mcp-config" in response.json()["error"]["message"]
    include = {"include": ["message.output_text.logprobs"]}
    async with make_server() as served:
        assert (await ask(served, **include)).status_code == 400
