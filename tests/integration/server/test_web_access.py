"""The page by axe-core: what keeps people from it who use a keyboard or a screen reader."""

from __future__ import annotations

import pytest

from .browser import OpenTab, Tab, set_number

sync_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")

MARKDOWN = """# Title

`code`, **bold**, [a link](https://example.org), $x^2$

```python
def f() -> str: return "x"
```

| a | b |
|-|-|
| 1 | 2 |
"""


def has_no_findings(tab: Tab) -> None:
    found = sync_playwright.Axe().run(tab.page)
    assert found.response["violations"] == [], found.generate_report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_tab: OpenTab, scheme: str) -> None:
    tab = open_tab(color_scheme=scheme)
    has_no_findings(tab)
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    tab.answers_with({"reasoning_content": "hm"}, {"content": MARKDOWN}, {"tool_calls": [call]})
    tab.send("hello")
    tab.has_ended()
    has_no_findings(tab)
    set_number(tab, "Max tokens", "5")
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.evaluate("() => (window.prompt = () => 'short')")
    tab.page.get_by_role("button", name="Save as preset").click()
    tab.page.get_by_label("Token probabilities").select_option("on")
    tab.page.get_by_label("Close the settings").click()
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label("Compare with").select_option("preset:short")
    has_no_findings(tab)
    tab.page.unroute("**/v1/chat/completions")
    tab.send("compare")
    tab.has_ended(3)
    tab.page.locator(".tokens summary").first.click()
    tab.page.get_by_role("button", name="Server status").click()
    has_no_findings(tab)
    tab.page.locator("main").press("?")
    tab.page.locator("dialog[open]").wait_for()
    has_no_findings(tab)
