"""The page at "/" in a browser, over a real server with the fake model."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

from .browser import CHAT, OpenTab, set_number
from .conftest import MakeFake, RunningServer, running_server

SCRIPTED = Path(__file__).parents[2] / "null" / "mcp" / "scripted_server.py"


def test_an_answer_streams_and_is_kept(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.page.wait_for_function("() => document.querySelector('header select')?.value === 'fake'")
    set_number(tab, "Max tokens", "30")
    with tab.page.expect_request(CHAT) as asked:
        tab.send("Hello <b>there</b>")
    body = json.loads(asked.value.post_data)
    assert body["messages"] == [{"role": "user", "content": "Hello <b>there</b>"}]
    assert (body["max_tokens"], body["stream"], body["model"]) == (30, True, "fake")
    tab.has_ended()
    assert "30 tokens" in tab.page.locator(".figures").text_content()
    assert "Max tokens" in tab.page.locator(".ending").text_content()
    shown = tab.answers().inner_text()
    tab.page.reload()
    tab.has_ended()
    assert tab.answers().inner_text() == shown
    assert tab.page.locator(".asked .verbatim").text_content() == "Hello <b>there</b>"
    assert tab.page.locator(".sidebar .title").text_content() == "Hello <b>there</b>"


def test_stop_then_go_on(open_tab: OpenTab, page_server: RunningServer) -> None:
    tab = open_tab()
    tab.send("a long one")
    tab.grows()
    tab.page.get_by_label("Stop").click()
    tab.has_ended()
    assert "Stopped." in tab.page.locator(".ending").text_content()
    page_server.becomes_idle()
    before = len(tab.answers().text_content())
    with tab.page.expect_request(CHAT) as asked:
        tab.page.get_by_role("button", name="Continue").click()
    body = json.loads(asked.value.post_data)
    assert body["continue_final_message"] is True
    assert body["messages"][-1]["role"] == "assistant"
    assert tab.grows() >= before - 40  # the line on its end, with its buttons, is gone
    tab.page.keyboard.press("Escape")
    tab.has_ended()
    page_server.becomes_idle()


IS_KEPT = """async () => {
  const open = indexedDB.open("vllmx");
  await new Promise((resolve) => (open.onsuccess = resolve));
  const all = open.result.transaction("nodes").objectStore("nodes").getAll();
  await new Promise((resolve) => (all.onsuccess = resolve));
  open.result.close();
  return all.result.some((node) => node.role === "assistant" && node.content.length > 5);
}"""
"""Whether a part of an answer is kept already, which happens about every second."""


def test_a_reload_in_the_middle_keeps_what_came(
    open_tab: OpenTab, page_server: RunningServer
) -> None:
    tab = open_tab()
    tab.send("a long one")
    tab.grows()
    wait_until(lambda: tab.page.evaluate(IS_KEPT))
    tab.page.reload()
    tab.has_ended()
    page_server.becomes_idle()
    assert len(tab.answers().locator(".prose").text_content()) > 3
    assert "left before the answer was complete" in tab.page.locator(".ending").text_content()


def test_branches(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.answers_with({"content": "first"})
    tab.send("one")
    tab.has_ended()
    tab.answers_with({"content": "second"})
    tab.page.get_by_label("Regenerate").click()
    tab.shows("second")
    assert tab.page.locator(".branches").text_content().strip() == "2/2"
    tab.page.get_by_label("Earlier version").click()
    tab.shows("first")
    tab.answers_with({"content": "third"})
    tab.page.locator(".asked").hover()
    tab.page.get_by_label("Edit", exact=True).click()
    tab.page.get_by_label("Edit the message").fill("two")
    tab.page.get_by_label("Edit the message").press("Enter")
    tab.shows("third")
    tab.page.locator(".asked").hover()
    tab.page.get_by_label("Earlier version").click()
    tab.shows("second")
    assert tab.page.locator(".asked .verbatim").text_content() == "one"


def test_thoughts_calls_and_their_results(open_tab: OpenTab) -> None:
    tab = open_tab()
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    tab.answers_with(
        {"reasoning_content": "I should *look*"},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
        finish="tool_calls",
    )
    tab.send("weather?")
    tab.has_ended()
    thoughts = tab.page.locator("details.thoughts")
    assert not thoughts.locator(".prose").is_visible()
    thoughts.locator("summary").click()
    assert thoughts.locator("em").text_content() == "look"
    assert '"city": "Oslo"' in tab.page.locator(".call pre").text_content()
    tab.answers_with({"content": "It rains."})
    tab.page.get_by_label("Result of weather").fill("rain")
    with tab.page.expect_request(CHAT) as asked:
        tab.page.get_by_role("button", name="Send the results").click()
    messages = json.loads(asked.value.post_data)["messages"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    tab.shows("It rains.")


def test_settings_reach_the_request(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.answers_with({"content": "{}"})
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("0.5")
    tab.page.get_by_label("Tools").fill('[{"name": "f"}]')
    for tools, words in (
        ("[null]", "Each of the list must be an object"),
        ("{}", "must be a list"),
    ):
        tab.page.get_by_label("Tools").fill(tools)
        tab.page.get_by_text(words).wait_for()
    tab.page.get_by_label("Tools").fill('[{"name": "f"}]')
    tab.page.get_by_label("JSON schema of the answer").fill('{"type": ')
    tab.page.get_by_label("Close the settings").click()
    tab.send("x")
    tab.page.get_by_text("not valid JSON yet").wait_for()
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    with tab.page.expect_request(CHAT) as asked:
        tab.page.get_by_role("button", name="Send").click()
    body = json.loads(asked.value.post_data)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.5
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tools"] == [{"type": "function", "function": {"name": "f"}}]
    tab.has_ended()


@pytest.fixture
def held_port() -> Iterator[str]:
    """A port for one server after another, which no other program can take in between."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


def test_a_wrong_key_and_a_dead_server(
    open_tab: OpenTab, fake_server: MakeFake, chat_flags: tuple[str, ...], held_port: str
) -> None:
    flags = (*chat_flags, "--api-key", "sesame", "--port", held_port)
    with fake_server(*flags) as server:
        tab = open_tab(server.url)
        tab.page.get_by_label("Key", exact=True).fill("wrong")
        tab.page.get_by_role("button", name="Use the key").click()
        tab.page.get_by_text("refuses this key").wait_for()
        tab.page.get_by_label("Key", exact=True).fill("sesame")
        tab.page.get_by_role("button", name="Use the key").click()
        tab.page.locator("dialog").wait_for(state="detached")
        assert tab.page.evaluate("localStorage.getItem('vllmx.key')") is None
        tab.send("a long one")
        tab.grows()
        server.process.kill()
        tab.has_ended()
    tab.page.locator(".banner").wait_for()
    assert tab.page.locator(".ending.failed").is_visible()
    tab.send("is anybody there?")
    tab.has_ended(2)
    with fake_server(*flags):
        tab.page.locator(".banner").wait_for(state="detached")
        set_number(tab, "Max tokens", "5")
        tab.page.get_by_role("button", name="Try again").click()
        tab.has_ended(2)
        assert "5 tokens" in tab.page.locator(".figures").last.text_content()


def test_the_live_panel(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.page.get_by_role("button", name="Server status").click()
    tab.page.locator(".plot", has_text="Running").get_by_text("0", exact=True).wait_for()
    assert len(tab.page.locator(".plot").all()) == 7
    more = "".join(
        f'vllmx:{name}{{model_name="{model}"}} {value}\n'
        for model, running, used in (("a", 2, 0.75), ("b", 1, 0.5))
        for name, value in (("num_requests_running", running), ("kv_cache_usage_perc", used))
    )
    tab.page.route("**/metrics", lambda route: route.fulfill(body=route.fetch().text() + more))
    tab.page.locator(".plot", has_text="Running").get_by_text("3", exact=True).wait_for()
    tab.page.locator(".plot", has_text="KV cache").get_by_text("75 %", exact=True).wait_for()
    assert not tab.page.locator(".replicas").count()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    more += "".join(
        f'vllmx:{name}{{model_name="c",replica="{number}"}} {value}\n'
        for number in (10, 9)
        for name, value in zip(names, (number, 1, 0.25), strict=True)
    )
    table = tab.page.locator(".replicas tbody tr")
    table.first.wait_for()
    assert [row.split() for row in table.all_inner_texts()] == [
        ["9", "9", "1", "25", "%"],
        ["10", "10", "1", "25", "%"],
    ]


def test_states_of_models_and_a_refusal_that_is_no_matter_of_keys(open_tab: OpenTab) -> None:
    page = open_tab().page
    states = {"one": "loaded", "two": "unloaded", "three": "loading", "four": "failed"}
    cards = [{"id": name, "state": state} for name, state in states.items()]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.get_by_label("Model").focus()
    page.locator("option", has_text="two (on demand)").wait_for(state="attached")
    shown = page.locator("header option").all_inner_texts()
    assert shown == [
        "one",
        "two (on demand)",
        "three (loading …)",
        "four (cannot be loaded)",
    ]
    error = {"error": {"message": "no", "type": "permission_error", "code": "forbidden"}}
    page.route("**/metrics", lambda route: route.fulfill(status=403, json=error))
    page.get_by_role("button", name="Server status").click()
    page.get_by_text("No figures at the moment.").wait_for()
    assert page.locator("dialog").count() == 0
    error["error"]["code"] = "invalid_api_key"
    page.locator("dialog").wait_for()


def test_keys_colours_and_a_narrow_screen(open_tab: OpenTab) -> None:
    tab = open_tab(viewport={"width": 390, "height": 780}, color_scheme="dark")
    page = tab.page
    page.locator("main").click()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("to the message").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "composer"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Colours as the system has them").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert not page.locator(".sidebar").is_visible()
    page.get_by_role("button", name="Chats").click()
    page.locator(".sidebar").wait_for(state="visible")
    page.get_by_label("Close the list").click()
    tab.answers_with({"content": "x" * 300 + "\n\n|" + "wide|" * 60 + "\n|" + "-|" * 60})
    tab.send("y" * 300)
    tab.has_ended()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_nothing_is_asked_of_another_host(open_tab: OpenTab, page_server: RunningServer) -> None:
    tab = open_tab()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.answers_with({"content": "![x](https://evil.example/x.png) [y](https://evil.example)"})
    tab.send("x")
    tab.has_ended()
    tab.page.reload()
    tab.has_ended()
    foreign = [url for url in asked if not re.match(rf"{page_server.url}/|data:|blob:", url)]
    assert asked
    assert not foreign


def test_tools_of_mcp_servers_run_when_the_user_agrees(tmp_path: Path, open_tab: OpenTab) -> None:
    """The demo model calls a tool of a real server: once asked about, then without a question."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    path = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-S", str(SCRIPTED), "weather"]}
    path.write_text(json.dumps({"mcpServers": {"weather": entry}}))
    with running_server("--mcp-config", str(path)) as server:
        wait_until(lambda: server.get("/v1/mcp/servers").json()["data"][0]["tools"])
        tab = open_tab(server.url)
        set_number(tab, "Temperature", "0")
        tab.page.get_by_role("button", name="Settings").first.click()
        tab.page.get_by_label("weather 1 tool").check()
        tab.page.get_by_label("Close the settings").click()
        tab.send("What is the weather in Paris?")
        tab.page.get_by_role("button", name="Run", exact=True).click()
        tab.page.locator(".prose").get_by_text("21").first.wait_for()
        assert '"temperature": 21' in tab.page.locator(".result pre").text_content()
        call = {"index": 0, "id": "c1"}
        called = {"name": "weather__get_weather", "arguments": '{"city": "Oslo"}'}
        tab.answers_with({"tool_calls": [{**call, "function": called}]}, finish="tool_calls")
        tab.send("And in Oslo?")
        tab.page.get_by_role("button", name="Always run in this chat").click()
        tab.has_ended(2 + 1 + 16)  # a model that calls for ever is stopped
        tab.page.get_by_role("button", name="Run", exact=True).wait_for()
        assert tab.page.locator("article.result").count() == 1 + 16
