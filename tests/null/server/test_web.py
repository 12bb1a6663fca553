"""The page at "/" without a browser: its files, what is said with them, and who gets them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest
import vllmx_server
from vllmx_server.apis.web import routes as web

from .conftest import MakeServer, Served

FOLDER = Path(vllmx_server.__file__).parent / "web"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
LARGEST = 192_000
"""Bytes without KaTeX, which comes with the first formula."""


async def test_every_file_has_its_type_and_the_policy(served: Served) -> None:
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg", "txt": "text/plain"}
    for path in ("", *(f"web/{name}" for name in FILES if name != web.PAGE)):
        response = await served.client.get(f"/{path}")
        kind = types.get(path.rpartition(".")[2], "text/html")
        assert response.status_code == 200, path
        assert response.headers["content-type"].startswith(kind)
        assert response.content == (FOLDER / (path.removeprefix("web/") or web.PAGE)).read_bytes()
        check_policy(response)


def check_policy(response: httpx.Response) -> None:
    policy = dict(
        part.partition(" ")[::2] for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'", "no code may make HTML or scripts out of text"
    assert "unsafe" not in str(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_browsers_ask_again_and_are_told_that_nothing_changed(served: Served) -> None:
    first = await served.client.get("/web/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        response = await served.client.get("/web/app.js", headers={"if-none-match": given})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tag
        check_policy(response)
    other = await served.client.get("/web/app.js", headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


async def test_packed_for_those_who_take_it(served: Served) -> None:
    sizes = {}
    for given in ("gzip, br", "br;q=1, GZIP ; q=0.5", "gzip;q=0", ""):
        is_packed = given not in ("gzip;q=0", "")
        async with served.client.stream(
            "GET", "/web/app.js", headers={"accept-encoding": given}
        ) as response:
            raw = b"".join([piece async for piece in response.aiter_raw()])
        assert response.headers["vary"] == "Accept-Encoding"
        assert (response.headers.get("content-encoding") == "gzip") == is_packed, given
        assert int(response.headers["content-length"]) == len(raw)
        body = gzip.decompress(raw) if is_packed else raw
        assert body == (FOLDER / "app.js").read_bytes()
        sizes[is_packed] = len(raw)
    assert sizes[True] < sizes[False] / 2


async def test_head(served: Served) -> None:
    for path in ("/", "/web/style.css"):
        head, get = await served.client.head(path), await served.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert {**head.headers, "x-request-id": "", "date": ""} == {
            **get.headers,
            "x-request-id": "",
            "date": "",
        }
        assert (await served.client.post(path)).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["", "/", "index.html", "app.JS", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor",
     "vendor/", "/etc/passwd", "%2fetc%2fpasswd", "vendor/../app.js", "app.js%00"],
)  # fmt: skip
async def test_nothing_else_is_to_be_had(served: Served, path: str) -> None:
    reader, writer = await served.connect()
    writer.write(f"GET /web/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"404", head


async def test_the_page_needs_no_key_and_opens_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("secret",)}) as served:
        assert (await served.client.get("/")).status_code == 200
        assert (await served.client.get("/web/app.js")).status_code == 200
        for path in ("/web", "/webs", "/index.html", "/v1/models", "/metrics", "/web/../metrics"):
            assert (await served.client.get(path)).status_code == 401, path
        response = await served.client.get("/", headers={"host": "evil.example"})
        assert response.status_code == 403


async def test_switched_off(make_server: MakeServer) -> None:
    async with make_server({"web": False, "api_key": ("secret",)}) as served:
        for path in ("/", "/web/app.js"):
            assert (await served.client.get(path)).status_code == 401
            key = {"authorization": "Bearer secret"}
            assert (await served.client.get(path, headers=key)).status_code == 404


async def test_routes_have_names_in_logs_and_metrics(served: Served) -> None:
    for path in ("/", "/web/app.js", "/web/made/up"):
        await served.client.get(path)
    text = (await served.client.get("/metrics")).text
    assert 'handler="/",' in text
    assert 'handler="/web/{name}",method="GET",status="2xx"' in text
    assert "made" not in text


def test_all_files_together_are_small() -> None:
    sizes = {name: (FOLDER / name).stat().st_size for name in FILES}
    assert sum(sizes.values()) - sizes["vendor/katex.js"] < LARGEST, sizes
    assert {name.rpartition(".")[2] for name in FILES} <= set(web._TYPES)


def test_no_foreign_host_and_no_way_to_make_html() -> None:
    """The address in the icon is the name of SVG's elements, and fetched by nobody."""
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        if name.startswith("vendor/"):
            continue
        hosts = set(re.findall(r"(?:https?:)?//([a-z0-9-]+\.[a-z0-9.-]+)", text, re.I))
        assert hosts <= {"www.w3.org"}, name
        ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|srcdoc"
        assert not re.search(rf"{ways}|dangerously|DOMParser|@import", text), name
        assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=\"|\sstyle=\"", text), name


def test_modules_import_files_that_are_there() -> None:
    for name in SCRIPTS:
        text = (FOLDER / name).read_text(encoding="utf-8")
        for target in re.findall(r'\bfrom ?"([\w./-]+)"', text):
            assert target.startswith("./"), (name, target)
            assert ((FOLDER / name).parent / target).is_file(), (name, target)


def test_our_scripts_are_short() -> None:
    long = {
        name: count
        for name in SCRIPTS
        if (count := len((FOLDER / name).read_text().splitlines())) > 400
    }
    assert not long


def test_licences_go_with_what_is_not_ours() -> None:
    text = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    for word in ("preact.js", "hooks.js", "htm.js", "Jason Miller", "MIT", "Apache License 2.0"):
        assert word in text
