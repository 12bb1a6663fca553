"""Images come from data URLs, and from elsewhere only where the operator says so."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.source import ImageSource, check_source, read_source

from tests.http_servers import serving

from .pictures import data_url

NOTHING = ImageLimits()
DATA = b"\x89PNG and more"


def read(url: str, limits: ImageLimits = NOTHING) -> bytes:
    return read_source(ImageSource(url, "there"), limits)


def refused(url: str, limits: ImageLimits = NOTHING) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read(url, limits)
    assert caught.value.param == "there"
    return caught.value.message


def test_data_urls() -> None:
    assert read(data_url(DATA)) == DATA
    assert read(data_url(DATA, "image/jpeg;charset=x")) == DATA
    for wrong in ("data:image/png;base64,$$$", "data:image/png;base64,abc"):
        assert "base64" in refused(wrong)
    for wrong in ("data:image/png,abc", "data:text/html;base64,AAAA", "data:image/png;base64"):
        assert "data URL" in refused(wrong)


def test_base64_in_lines_and_escaped() -> None:
    data = bytes(range(256))
    lines = base64.encodebytes(data).decode()
    escaped = lines.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert {"%2B", "%2f", "%3D"} <= {escaped[at : at + 3] for at in range(len(escaped))}
    for text in (lines, escaped, escaped.replace("\n", "%0D%0a")):
        assert read(f"data:image/png;base64,{text}") == data
    for wrong in ("%41", "QUJD%", "QUJD%3", "QUJ_", "QU=JD", "\ud800", "ä", "QUJ\0"):
        assert "base64" in refused(f"data:image/png;base64,{wrong}")


def test_long_urls_are_not_taken_apart() -> None:
    """They would be kept, or come to millions of parts."""
    assert "data URL" in refused("data:image/png" + ";" * 2000 + ";base64,QUJD")
    for url in ("x" * 20_000, "http://" + "a" * 20_000, "file://" + "/.." * 10_000):
        assert "more than 16384 characters" in refused(url)


def test_bytes_are_bounded_before_they_are_decoded() -> None:
    limits = ImageLimits(max_bytes=1000)
    assert "1000 bytes" in refused(data_url(bytes(1001)), limits)
    with pytest.raises(InvalidRequestError, match="1000 bytes"):
        check_source(ImageSource("data:," + "x" * 2000, "there"), limits)
    assert len(read(data_url(bytes(1000)), limits)) == 1000


def test_files_only_below_the_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "images", tmp_path / "secret"
    folder.mkdir()
    secret.write_bytes(b"secret")
    (folder / "a b.png").write_bytes(DATA)
    (folder / "link.png").symlink_to(secret)
    url = f"file://{folder}/a%20b.png"
    assert "--allowed-local-media-path" in refused(url)
    limits = ImageLimits(folder=folder.resolve(), max_bytes=100)
    assert read(url, limits) == DATA
    for path in (secret, folder / "link.png", folder / ".." / "secret", "/etc/passwd"):
        assert "outside" in refused(f"file://{path}", limits)
    assert "cannot be read" in refused(f"file://{folder}/none.png", limits)
    assert "cannot be read" in refused(f"file://{folder}", limits)
    assert "outside" in refused(f"file://host{folder}/a%20b.png", limits)
    (folder / "large").write_bytes(bytes(101))
    assert "100 bytes" in refused(f"file://{folder}/large", limits)


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        ImageLimits.of(EngineConfig(allowed_local_media_path=str(tmp_path / "none")))
    assert ImageLimits.of(EngineConfig(allowed_local_media_path=str(tmp_path))).folder == tmp_path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        claimed = len(DATA) + 5 if self.path == "/broken" else len(DATA)
        self.send_header("Content-Length", str(claimed))
        self.end_headers()
        self.wfile.write(DATA)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    with serving(Handler) as port:
        yield port


def test_servers_only_where_they_are_named(server: int) -> None:
    base = f"http://127.0.0.1:{server}"
    assert "--allowed-media-domains" in refused(f"{base}/a")
    limits = ImageLimits(domains=("127.0.0.1",))
    assert read(f"{base}/a", limits) == DATA
    assert read(f"{base}/to?/a", limits) == DATA
    assert "404" in refused(f"{base}/none", limits)
    assert "localhost" in refused(f"{base}/to?http://localhost:{server}/a", limits)
    assert "elsewhere" in refused(f"{base}/to?file:///etc/passwd", limits)
    assert "redirects" in refused(f"{base}/to?/to?/to?/to?/to?/a", limits)
    assert "cannot be fetched" in refused(f"{base}/broken", limits)
    small = ImageLimits(domains=("127.0.0.1",), max_bytes=5)
    assert "5 bytes" in refused(f"{base}/a", small)
    with pytest.raises(InvalidRequestError, match="within"):
        read_source(ImageSource(f"{base}/a", "there"), limits, lambda: True)


@pytest.mark.parametrize("url", ["ftp://a/b", "", "a.png", "http://[", "http://a:x/b"])
def test_other_urls(url: str) -> None:
    assert refused(url)
