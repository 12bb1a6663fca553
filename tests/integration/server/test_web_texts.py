"""What models may write, in a browser: hostile markdown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .browser import Tab, running_chromium
from .conftest import MakeFake

MEGABYTE = 1 << 20
HOSTILE = {
    "scripts": (
        "<script>hacked = 1; alert(1)</script><img src=x onerror='hacked = 1'><svg onload=alert(1)>"
        "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>"
        "<style>*{display:none}</style>\n\n<a href='javascript:hacked = 1'>a</a>\n\n"
        "```html\n</code></pre><script>hacked = 1</script>\n```"
        "\n\n| <b onclick=alert(1)>x</b> |\n|-|\n| <script>hacked = 1</script> |"
    ),
    "links": (
        "[a](javascript:hacked=1) [b](JaVaScRiPt:hacked=1) [c](java\tscript:hacked=1) "
        "[d](data:text/html,<script>hacked=1</script>) [e](vbscript:x) [f](//evil.example) "
        '[g](/v1/models) [h](https://good.example/"onmouseover="hacked=1) <javascript:hacked=1> '
        "![i](javascript:hacked=1) [j](&#106;avascript:hacked=1) [k](blob:x) [l](file:///etc/passwd)"
    ),
    "one long word": "x" * MEGABYTE,
    "one long line": "word " * (MEGABYTE // 5),
    "a long line of code": "```js\n" + "let x = `" * (MEGABYTE // 36),
    "nested quotes": ">" * 100_000 + " deep",
    "nested lists": "\n".join("  " * n + "- deep" for n in range(500)),
    "brackets": "[" * 20_000 + "](" * 20_000,
    "stars": "**a* " * 5_000,
    "formulas": (
        "$$\\def\\a{\\a\\a}\\a$$ $\\href{javascript:hacked=1}{x}$ $\\htmlClass{a}{x}$ $"
        + "{" * 3000
        + "$ "
        + "$x_1$ " * 3000
        + "$a " * 5000
        + "\n$$\nnever closed "
        + "x\n" * 500
    ),
    "control characters": "\x00\x01\x1b[31m\u202e\u2066 \ufeff\ud83d \r\n\r",
}
"""The texts that a page must live through, by what they are."""
INNER = """() => {
  const inner = [...document.querySelectorAll(".prose *")];
  const depth = (node) => (node.matches(".prose") ? 0 : 1 + depth(node.parentElement));
  return {
    names: [...new Set(inner.map((node) => node.localName))],
    links: inner.filter((node) => node.href).map((node) => node.protocol),
    rels: inner.filter((node) => node.href).map((node) => node.rel),
    handlers: inner.flatMap((node) => node.getAttributeNames()).filter((name) => /^on/.test(name)),
    depth: Math.max(0, ...inner.map(depth)),
    length: document.querySelector(".answer .prose").textContent.length,
    hacked: typeof hacked,
  };
}"""
MATH = {"math", "semantics", "annotation", "mrow", "mi", "mn", "mo", "msub", "mtext", "mstyle"}
ALLOWED = {
    "a", "blockquote", "br", "button", "code", "em", "figcaption", "figure", "h2", "li", "ol", "p",
    "path", "pre", "span", "strong", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul",
    "div", "del",
}  # fmt: skip


@pytest.fixture(scope="module")
def tab(fake_server: MakeFake) -> Iterator[Tab]:
    with running_chromium() as browser, fake_server() as server:
        tab = Tab(browser, f"{server.url}/")
        tab.open()
        yield tab
        tab.context.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_markdown(tab: Tab, name: str) -> None:
    """Text stays text, links lead to the web alone, and the page goes on."""
    tab.troubles.clear()
    text = HOSTILE[name]
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("button", name="New chat").click()
    pieces = [text[at : at + 5000] for at in range(0, len(text), 5000)]
    tab.answers_with(*({"content": piece} for piece in pieces))
    tab.send("x")
    tab.has_ended()
    found = tab.page.evaluate(INNER)
    assert set(found["names"]) <= ALLOWED | MATH
    assert set(found["links"]) <= {"https:"}
    assert set(found["rels"]) <= {"noopener noreferrer nofollow"}
    assert not found["handlers"]
    assert found["hacked"] == "undefined"
    assert found["depth"] < 60
    if name.startswith("one long"):
        assert found["length"] > 0.99 * len(text), "nothing is lost"
    assert not tab.troubles


def test_a_text_in_any_pieces_is_drawn_the_same(tab: Tab) -> None:
    """The blocks of a text that came by single characters, looked at after each, are those of the
    text as a whole."""
    same = tab.page.evaluate(
        """async (text) => {
          const { MarkdownDocument, parse } = await import("./web/markdown.js");
          const { EventReader } = await import("./web/sse.js");
          const document = new MarkdownDocument();
          for (const char of text) {
            document.append(char);
            document.view();
          }
          const isSame = JSON.stringify(document.end()) === JSON.stringify(parse(text));
          const reader = new EventReader();
          const sent = ": ping\\r\\n\\r\\ndata: ä€\\ndata: 2\\n\\ndata:3\\r\\n\\r\\n";
          const bytes = new TextEncoder().encode(sent);
          const events = [...bytes].flatMap((byte) => reader.feed(Uint8Array.of(byte)));
          return { isSame, events };
        }""",
        ANSWER,
    )
    assert same == {"isSame": True, "events": ["ä€\n2", "3"]}


ANSWER = """# A title

Some *words* and **more of ~~them~~**, `code` and [a link](https://a.example/b_(c) "t"), https://b.example.
A line, and $x_1$ or snake_case_name, 2 * 3 * 4.

1. one
2. two
   - nested
     with more

   ```py
   text = "a" # b
   ```
- [x] done
- [ ] not yet

> quoted
> - item

| a | b |
|:--|--:|
| 1 | `x` |
| 2 | \\| |

```js
/* a comment
over lines */ const x = 1; // and
```

Heading
-------
The end
"""
