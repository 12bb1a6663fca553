"""10,000 tokens on the page without a long frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .browser import Tab, running_chromium
from .conftest import MakeFake
from .test_web_texts import ANSWER

STREAM = """
  window.streamTokens = (tokens, each) => {
    const event = (delta, finish_reason) => {
      const choices = [{ index: 0, delta, finish_reason }];
      return "data: " + JSON.stringify({ choices }) + "\\n\\n";
    };
    const real = window.fetch;
    window.fetch = async (url, options) => {
      if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
      const encoder = new TextEncoder();
      let at = 0;
      const body = new ReadableStream({
        async pull(controller) {
          await new Promise((resolve) => setTimeout(resolve, 10));
          const part = tokens.slice(at, (at += each)).map((content) => event({ content }, null));
          if (at >= tokens.length) part.push(event({}, "stop"), "data: [DONE]\\n\\n");
          controller.enqueue(encoder.encode(part.join("")));
          if (at >= tokens.length) controller.close();
        },
      });
      window.fetch = real;
      return new Response(body, { headers: { "content-type": "text/event-stream" } });
    };
  };
"""
NUM_TOKENS, LONGEST_MS = 10_000, 50.0
LOOP = """() => {
  let sum = 0;
  for (let n = 0; n < 1e7; n += 1) sum = (sum * 31 + n) | 0;
  return sum;
}"""
LOOP_MS = 80.0
"""More than `LOOP` took where the limit was set, and the longest task 21."""
NUM_LET_OFF = 3
"""Tasks that may be the browser's own, such as a whole collection of garbage."""


def test_ten_thousand_tokens_without_a_long_frame(fake_server: MakeFake) -> None:
    """The page's own work, in CPU time of its thread: what else the machine does is not counted,
    and a slower one has as much more time as a loop takes longer there."""
    text = ANSWER * (4 * NUM_TOKENS // len(ANSWER) + 1)
    tokens = [text[at : at + 4] for at in range(0, 4 * NUM_TOKENS, 4)]
    with running_chromium() as browser, fake_server() as server:
        tab = Tab(browser, f"{server.url}/")
        tab.context.add_init_script(STREAM)
        tab.open()
        loop = traced(tab, lambda: tab.page.evaluate(LOOP))
        tab.page.evaluate("([tokens, each]) => streamTokens(tokens, each)", [tokens, 50])

        def stream() -> None:
            tab.send("x")
            tab.has_ended()

        tasks = traced(tab, stream)
        length = len(tab.answers().inner_text())
        assert not tab.troubles
        tab.context.close()
    print(loop[-3:], len(tasks), tasks[-8:])
    assert length > 2.5 * NUM_TOKENS
    assert len(tasks) > 100, "the trace is of another thread"
    assert tasks[-1 - NUM_LET_OFF] < LONGEST_MS * max(1.0, loop[-1] / LOOP_MS)


def traced(tab: Tab, act: Callable[[], Any]) -> list[float]:
    """Milliseconds of CPU of each task of the page's main thread meanwhile, the longest last."""
    browser = tab.context.browser
    categories = ["toplevel", "disabled-by-default-devtools.timeline"]
    browser.start_tracing(page=tab.page, categories=categories)
    try:
        act()
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    found: dict[tuple[int, int], list[float]] = {thread: [] for thread in threads}
    for event in events:
        thread = (event.get("pid"), event.get("tid"))
        if event.get("name") == "RunTask" and thread in found and "tdur" in event:
            found[thread].append(event["tdur"] / 1000)
    return sorted(max(found.values(), key=sum))
