"""A browser for tests of the web page: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHAT = "**/v1/chat/completions"


@contextmanager
def running_chromium() -> Iterator[Any]:
    """A Playwright browser; skips where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"opens the page in a browser, and none is installed: {', '.join(NAMES)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="opens the page by Playwright")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        browser = driver.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """The page in a profile of its own, and what it complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(1000 * PATIENCE_S)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("dialog", self._on_dialog)
        self.url = url

    def _on_console(self, message: Any) -> None:
        """Failed requests are told as errors too, and are what some tests are about."""
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.troubles.append(message.text)

    def _on_dialog(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.locator("#composer").wait_for()

    def send(self, text: str) -> None:
        self.page.locator("#composer").fill(text)
        self.page.locator("#composer").press("Enter")

    def answers(self) -> Any:
        """The shown answers."""
        return self.page.locator("article.answer .body")

    def has_ended(self, count: int = 1) -> None:
        """Waits until so many answers are shown and none streams."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('article.answer').length === count"
            " && !document.querySelector('.body[aria-busy=true], .prose.grows')",
            arg=count,
        )

    def shows(self, text: str) -> None:
        """Waits until a part of an answer is this text."""
        self.page.locator(".prose").get_by_text(text, exact=True).wait_for()

    def grows(self) -> int:
        """Waits until an answer has some text, and gives its length."""
        self.page.wait_for_function(
            "() => document.querySelector('.body[aria-busy=true] .prose')?.textContent.length > 5"
        )
        return len(self.answers().last.inner_text())

    def answers_with(self, *deltas: dict[str, Any], finish: str = "stop") -> None:
        """The next requests for chats have this answer, instead of the server's."""
        body = events(deltas, finish)
        headers = {"content-type": "text/event-stream"}
        self.page.unroute(CHAT)
        self.page.route(CHAT, lambda route: route.fulfill(body=body, headers=headers))


OpenTab = Callable[..., Tab]


def set_number(tab: Tab, label: str, value: str) -> None:
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label(label, exact=True).fill(value)
    tab.page.get_by_label("Close the settings").click()


def events(deltas: Iterable[dict[str, Any]], finish: str) -> str:
    """A stream as the server sends it."""
    choices: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": finish})
    chunks = [f"data: {json.dumps({'choices': [{'index': 0, **one}]})}\n\n" for one in choices]
    return "".join(chunks) + "data: [DONE]\n\n"
