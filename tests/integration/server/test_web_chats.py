"""The page at "/" in a browser: chats as files, search, presets, attached files and formulas."""

from __future__ import annotations

import base64
import io
import json
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.waiting import wait_until

from ..whisper_models import sound, wav  # noqa: TID252 - no package to name
from .browser import CHAT, OpenTab, Tab, set_number

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0"
    "000003010100c9fe92ef0000000049454e44ae426082"
)


def test_chats_as_a_file(open_tab: OpenTab, tmp_path: Path) -> None:
    tab = open_tab()
    tab.answers_with({"content": "**kept**", "reasoning_content": "hm"})
    tab.send("keep me")
    tab.has_ended()
    tab.page.get_by_role("button", name="Settings").first.click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Export all").click()
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    other = open_tab()
    other.page.get_by_role("button", name="Settings").first.click()
    other.page.get_by_label("File of chats").set_input_files(path)
    other.page.get_by_text("1 chat was added.").wait_for()
    other.page.locator(".sidebar .title").click()
    assert other.page.locator(".answer strong").text_content() == "kept"
    newer = '{"format": "vllmx-chats", "version": 9}'
    for text, words in (("{}", "no file of chats"), ("[", "not JSON"), (newer, "version is 9")):
        path.write_text(text)
        other.page.get_by_label("File of chats").set_input_files(path)
        other.page.get_by_text(words).wait_for()


def chat_of(nodes: list[dict[str, Any]] | None = None, **chat: Any) -> dict[str, Any]:
    """A chat as a file has it."""
    usual = [
        {"id": "a", "role": "user", "content": "hi"},
        {"id": "b", "parent": "a", "role": "assistant", "content": "yo", "state": "done"},
    ]
    return {"chat": {"title": "T", **chat}, "nodes": nodes or usual}


HOSTILE = {
    "fields": chat_of(
        settings={"system": 5, "schema": 7, "tools": [8], "stop": 9, "temperature": "hot", "x": "y"}
    ),
    "figures": chat_of(
        [{"id": "a", "role": "assistant", "content": "a", "error": {"message": "<b>no</b>"},
          "stats": {"tokens": 5, "seconds": "y", "first": "z", "prompt": 0}}]
    ),
    "circle": chat_of(
        [{"id": "a", "parent": "b", "role": "user", "content": "1"},
         {"id": "b", "parent": "a", "role": "assistant", "content": "2"},
         {"id": "c", "parent": "c", "role": "user", "content": "3"}], leaf="b"
    ),
    "calls": chat_of(
        [{"id": "__proto__", "role": "assistant", "content": "",
          "calls": [None, {"id": "__proto__", "name": "<img src=x onerror=alert(1)>"}]}]
    ),
}  # fmt: skip


def test_hostile_chats_of_a_file(open_tab: OpenTab, tmp_path: Path) -> None:
    """What the page does not know is left out, and nothing of it ends the page, then or later."""
    tab = open_tab()
    path = tmp_path / "chats.json"

    def take(chats: list[Any], words: str) -> None:
        path.write_text(json.dumps({"format": "vllmx-chats", "version": 1, "chats": chats}))
        tab.page.get_by_label("File of chats").set_input_files(path)
        tab.page.get_by_text(words).wait_for()

    tab.page.get_by_role("button", name="Settings").first.click()
    alike = [{"id": "a", "role": "user", "content": "1"}] * 2
    take([None], "a chat has no title")
    take([chat_of(alike)], "two messages have one id")
    take([chat_of([{"role": "user", "content": "1"}])], "or one has none")
    for name, chat in HOSTILE.items():
        chat["chat"]["title"] = name
        take([chat], "1 chat was added.")
        tab.page.get_by_role("button", name=name, exact=True).click()
        tab.page.wait_for_function("name => document.title.startsWith(name)", arg=name)
        count = tab.page.locator("article").count()
        assert count == {"fields": 2, "circle": 2}.get(name, 1)
        tab.answers_with({"content": "still here"})
        tab.send("go on")
        tab.shows("still here")
        assert tab.page.locator("article").count() == count + 2
        tab.page.reload()
        tab.shows("still here")
        tab.page.get_by_role("button", name="Settings").first.click()
    assert tab.page.get_by_label("System prompt").input_value() == ""


TOOL = {"type": "function", "function": {"name": "weather__look", "parameters": {}}}


def test_calls_need_consent_here_and_can_be_stopped(open_tab: OpenTab, tmp_path: Path) -> None:
    """A file of chats cannot agree to calls. *Stop* ends those that run without a question, and
    their results never reach another chat."""
    tab, calls = open_tab(), list[Any]()
    page = tab.page

    def held(route: Any) -> None:
        calls.append(route)

    listed = {"data": [{"server_label": "weather", "tools": [TOOL], "error": None}]}
    page.route("**/v1/mcp/servers", lambda route: route.fulfill(json=listed))
    page.route("**/v1/mcp/call", held)
    page.reload()
    path = tmp_path / "chats.json"
    chat = chat_of(settings={"servers": "weather", "allowed": "weather__look"})
    path.write_text(json.dumps({"format": "vllmx-chats", "version": 1, "chats": [chat]}))
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_label("File of chats").set_input_files(path)
    page.get_by_role("button", name="T", exact=True).click()
    function = {"name": "weather__look", "arguments": "{}"}
    called = {"tool_calls": [{"index": 0, "id": "c1", "function": function}]}
    tab.answers_with(called, finish="tool_calls")
    tab.send("look")
    always = page.get_by_role("button", name="Always run in this chat")
    always.wait_for()
    assert not calls
    for count in (1, 2):
        always.click()
        wait_until(lambda count=count: page.title() and len(calls) == count)
        page.get_by_role("button", name="Stop").click()
        always.wait_for()
    tab.send("look again")
    wait_until(lambda: page.title() and len(calls) == 3)
    page.get_by_role("button", name="Stop").click()
    always.last.click()
    wait_until(lambda: page.title() and len(calls) == 4)
    page.get_by_role("button", name="New chat").click()
    calls[-1].fulfill(json={"output": "sunny", "is_error": False})
    page.get_by_role("button", name="T", exact=True).click()
    always.last.wait_for()
    assert page.locator("article.result").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0


def test_images(open_tab: OpenTab, tmp_path: Path) -> None:
    """Kindly refused for a model that has no eyes, else sent as they are."""
    picture = tmp_path / "dot.png"
    picture.write_bytes(PIXEL)
    tab = open_tab()
    tab.page.locator(".composer input[type=file]").set_input_files(picture)
    tab.page.get_by_text("fake reads text only").wait_for()
    card = {"id": "seer", "max_model_len": 99, "input_modalities": ["text", "image"]}
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    tab.page.reload()
    tab.page.locator("header select").get_by_text("seer").wait_for(state="attached")
    tab.page.locator(".composer input[type=file]").set_input_files(picture)
    tab.page.locator(".thumbs img").wait_for()
    tab.answers_with({"content": "A dot."})
    with tab.page.expect_request(CHAT) as asked:
        tab.send("What is it?")
    image, text = json.loads(asked.value.post_data)["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "What is it?"}
    tab.has_ended()


def test_files_of_text(open_tab: OpenTab, tmp_path: Path) -> None:
    """A file goes along as a fenced block, and another one than text is named."""
    tab = open_tab()
    (tmp_path / "a.py").write_text("x = '```'\n")
    (tmp_path / "b.bin").write_bytes(bytes(range(256)))
    picker = tab.page.locator(".composer input[type=file]")
    picker.set_input_files([tmp_path / "a.py", tmp_path / "b.bin"])
    tab.page.get_by_text("b.bin is neither text").wait_for()
    tab.answers_with({"content": "fine"})
    with tab.page.expect_request(CHAT) as asked:
        tab.send("Explain.")
    content = json.loads(asked.value.post_data)["messages"][0]["content"]
    assert content == "a.py:\n````\nx = '```'\n````\n\nExplain."
    tab.has_ended()
    assert tab.page.locator(".attached summary").text_content().strip() == "a.py"


def test_texts_of_a_pdf_that_chromium_prints(open_tab: OpenTab, tmp_path: Path) -> None:
    """It has subsets of fonts with codes of their own."""
    tab = open_tab()
    printer = tab.context.new_page()
    text = "<h1>Über Chromium</h1><p>An <b>office</b> of letters.</p>"
    printer.set_content(f"{text}<p style='break-before: page'>Page two")
    printer.pdf(path=str(tmp_path / "printed.pdf"))
    printer.close()
    content = sent_with(tab, tmp_path / "printed.pdf")
    assert "Über Chromium\n\nAn office of letters.\n\nPage two\n" in content


def sent_with(tab: Tab, path: Path) -> str:
    """The message that goes to the model with this file."""
    tab.page.locator(".composer input[type=file]").set_input_files(path)
    tab.page.locator(".composer .files li").wait_for()
    tab.answers_with({"content": "fine"})
    with tab.page.expect_request(CHAT) as asked:
        tab.send("Sum up.")
    tab.has_ended()
    return str(json.loads(asked.value.post_data)["messages"][0]["content"])


def test_texts_of_pdf_files(open_tab: OpenTab, tmp_path: Path) -> None:
    """Codes of WinAnsiEncoding and names of letters; and files without a text that can be read."""
    tab = open_tab()
    font = b"/Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding"
    plain = pdf(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Kids[3 0 R]/Count 1/Resources<</Font<</F <<" + font + b"/WinAnsiEncoding>>"
        b"/G <<" + font + b"<</Differences[65/eacute/fi/bullet]>>>> >> >> >>",
        b"<</Type/Page/Parent 2 0 R/Contents 4 0 R>>",
        stream(
            b"BT /F 10 Tf 50 700 Td (A \\(B\\) \\227 2) Tj 60 0 Td [(wo) -20 (rd)-400(next)] TJ"
            b" /G 10 Tf 0 -12 Td <41 42 43> Tj ET"
        ),
    )
    (tmp_path / "plain.pdf").write_bytes(plain)
    content = sent_with(tab, tmp_path / "plain.pdf")
    assert content == "plain.pdf:\n```\nA (B) — 2 word next\néfi•\n```\n\nSum up."
    for name, data, why in (
        ("wide", composite(b"0 65535 500 " * 400, b""), "is too large to be read here"),
        ("locked", plain + b"trailer<</Encrypt 9 0 R>>", "is encrypted"),
        ("scan", plain.replace(b"/Contents 4", b"/Contents 9"), "has no text, only images"),
        ("cut", plain[:100], "is no PDF that can be read"),
        ("loop", pdf(b"<</Pages 1 0 R/Kids[1 0 R 2 0 R]>>", b"2 0 R"), "has no text"),
    ):
        (tmp_path / f"{name}.pdf").write_bytes(data)
        picker = tab.page.locator(".composer input[type=file]")
        picker.set_input_files(tmp_path / f"{name}.pdf")
        tab.page.get_by_text(f"{name}.pdf {why}").wait_for()


def pdf(*objects: bytes) -> bytes:
    """A file of these objects, numbered from 1; the first is the root."""
    numbered = (b"%d 0 obj\n%s\nendobj\n" % pair for pair in enumerate(objects, 1))
    return b"%PDF-1.4\n" + b"".join(numbered) + b"trailer<</Root 1 0 R>>\n"


def test_ranges_of_codes_in_a_pdf_end(open_tab: OpenTab, tmp_path: Path) -> None:
    """Adding 1 does not change codes as large as these."""
    far, wide = b"9007199254740992 9007199254740999 500", b"<%s>" % (b"ff" * 200)
    (tmp_path / "far.pdf").write_bytes(composite(far, wide + wide + b"<0061>"))
    content = sent_with(open_tab(), tmp_path / "far.pdf")
    assert content == "far.pdf:\n```\nAB\n```\n\nSum up."


def composite(widths: bytes, ranges: bytes) -> bytes:
    """A page with the letters AB in a font of two bytes a letter."""
    return pdf(
        b"<</Pages 2 0 R>>",
        b"<</Kids[3 0 R]/Resources<</Font<</F <</Subtype/Type0/ToUnicode 5 0 R"
        b"/DescendantFonts[<</W[-9007199254740999 1 500 " + widths + b"]>>]>> >> >> >>",
        b"<</Contents 4 0 R>>",
        stream(b"BT /F 10 Tf <00010002> Tj ET"),
        stream(b"beginbfrange <0001><0002><0041>" + ranges + b"endbfrange"),
    )


def stream(data: bytes) -> bytes:
    packed = zlib.compress(data)
    head = b"<</Filter/FlateDecode/Length %d>>stream\n" % len(packed)
    return head + packed + b"\nendstream"


def test_formulas_are_drawn(open_tab: OpenTab) -> None:
    tab = open_tab()
    text = (
        "Prices of $5 and $10 stay, \\, too. Inline $a_1 + b$, \\(c\\) and\n"
        "$$\nx\n+ \\frac{1}{2}\n$$\n"
        "and \\[ y \\]\n\n$\\nonsense{$"
    )
    tab.answers_with({"content": text})
    tab.send("formulas")
    tab.has_ended()
    prose = tab.page.locator(".answer .prose")
    prose.locator("math mfrac").wait_for()
    tab.page.wait_for_function("() => document.querySelectorAll('.prose math').length === 4")
    assert "Prices of $5 and $10 stay, \\, too." in prose.text_content()
    assert prose.locator(".math.block").count() == 2
    assert "nonsense{" in prose.text_content()


def test_search_presets_and_markdown(open_tab: OpenTab, tmp_path: Path) -> None:
    tab = open_tab()
    for title, answer in (("first chat", "about apples"), ("second chat", "about pears")):
        tab.page.get_by_role("button", name="New chat").first.click()
        tab.answers_with({"content": answer})
        tab.send(title)
        tab.has_ended()
    search = tab.page.get_by_label("Search chats")
    titles = tab.page.locator(".sidebar .title")
    for words, found in (("APPLES", ["first chat"]), ("second", ["second chat"]), ("plums", [])):
        search.fill(words)
        wait_until(lambda expected=found: titles.all_text_contents() == expected)
    search.fill("")
    titles.nth(1).wait_for()
    titles.first.hover()
    with tab.page.expect_download() as download:
        tab.page.get_by_label("Export second chat as Markdown").click()
    assert download.value.suggested_filename == "second-chat.md"
    path = tmp_path / "chat.md"
    download.value.save_as(path)
    assert path.read_text() == "# second chat\n\n## You\n\nsecond chat\n\n## fake\n\nabout pears\n"
    set_number(tab, "Temperature", "0.3")
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.evaluate("() => (window.prompt = () => 'calm')")
    tab.page.get_by_role("button", name="Save as preset").click()
    tab.page.get_by_label("Temperature", exact=True).fill("0.9")
    tab.page.get_by_label("Preset").select_option("")
    tab.page.get_by_label("Preset").select_option("calm")
    tab.page.wait_for_function(
        "() => document.querySelector('.numbers input').valueAsNumber === 0.3"
    )


def save_preset(tab: Tab, name: str) -> None:
    tab.page.evaluate("name => (window.prompt = () => name)", name)
    tab.page.get_by_role("button", name="Save as preset").click()


def test_token_probabilities(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label("Temperature", exact=True).fill("0")
    tab.page.get_by_label("Max tokens", exact=True).fill("6")
    tab.page.get_by_label("Token probabilities").select_option("on")
    tab.send("hi")
    tab.has_ended()
    tab.page.locator(".tokens summary").click()
    tokens = tab.page.locator(".tokens .token")
    text = tab.answers().locator(".prose").text_content()
    wait_until(lambda: tokens.count() == 6)
    assert "".join(tokens.all_text_contents()).split() == text.split()  # markdown shows no more
    chosen = tab.page.locator(".tokens caption")
    tab.page.locator(".tokens .line").press("ArrowRight")
    assert chosen.locator("code").text_content() == json.dumps(tokens.nth(1).text_content())
    tokens.nth(3).hover()
    assert tab.page.locator(".token.chosen").get_attribute("data-at") == "3"
    assert chosen.text_content().endswith(" %")
    assert tab.page.locator(".tokens tbody tr").count() == 5


def test_answers_side_by_side(open_tab: OpenTab) -> None:
    """Of two settings; the chat goes on with the one that the user takes."""
    tab = open_tab()
    set_number(tab, "Max tokens", "7")
    tab.page.get_by_role("button", name="Settings").first.click()
    save_preset(tab, "short")
    tab.page.get_by_label("Max tokens", exact=True).fill("9")
    tab.page.get_by_label("Close the settings").click()
    tab.page.get_by_role("button", name="Settings").first.click()
    tab.page.get_by_label("Compare with").select_option("preset:short")
    tab.send("which?")
    tab.has_ended(2)
    sides = tab.page.locator(".pair .side")
    assert "9 tokens" in sides.nth(0).locator(".figures").text_content()
    assert "7 tokens" in sides.nth(1).locator(".figures").text_content()
    assert sides.nth(1).locator(".figures").text_content().endswith("fake · short")
    short = sides.nth(1).locator(".prose").text_content()
    tab.page.get_by_role("button", name="Continue with this answer").click()
    tab.page.get_by_label("Compare with").select_option("")
    with tab.page.expect_request(CHAT) as asked:
        tab.send("go on")
    assert json.loads(asked.value.post_data)["messages"][1]["content"].strip() == short.strip()
    tab.has_ended(3)


def test_audio(open_tab: OpenTab, tmp_path: Path) -> None:
    """Files and recordings are sent as WAV of one channel to models that hear."""
    (tmp_path / "two.wav").write_bytes(wav(sound(0.5, rate=48_000), 48_000, channels=2))
    card = {"id": "ear", "max_model_len": 99, "input_modalities": ["text", "audio"]}
    tab = open_tab(permissions=["microphone"])
    picker = tab.page.locator(".composer input[type=file]")
    picker.set_input_files(tmp_path / "two.wav")
    tab.page.get_by_text("fake takes no audio").wait_for()
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    tab.page.reload()
    tab.page.locator("header select").get_by_text("ear").wait_for(state="attached")
    picker.set_input_files(tmp_path / "two.wav")
    tab.page.locator(".composer audio").wait_for()
    tab.page.get_by_role("button", name="Record").click()
    tab.page.wait_for_timeout(1000)  # of sound: a recording of nothing cannot be decoded
    tab.page.get_by_role("button", name="End the recording").click()
    tab.page.wait_for_function("() => document.querySelectorAll('.composer audio').length === 2")
    tab.answers_with({"content": "A tone."})
    with tab.page.expect_request(CHAT) as asked:
        tab.send("What is it?")
    *parts, text = json.loads(asked.value.post_data)["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    first, second = (base64.b64decode(part["input_audio"]["data"]) for part in parts)
    with wave.open(io.BytesIO(first)) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, 16_000)
        assert abs(file.getnframes() - 8_000) < 100
        assert np.abs(np.frombuffer(file.readframes(9_000), np.int16)).max() > 1_000
    assert second.startswith(b"RIFF")
    tab.has_ended()
    assert tab.page.locator(".asked audio").count() == 2
