"""Images come from data URLs, and from elsewhere only where the operator says so."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.system.deadline import Deadline
from vllmx_engine.images.limits import ImageLimits, allowed_hosts
from vllmx_engine.images.source import ImageSource, check_source, read_source

from tests.http_servers import serving

from .pictures import data_url

NOTHING = ImageLimits()
DATA = b"\x89PNG and more"


def allowing(*names: str) -> ImageLimits:
    return ImageLimits(hosts=allowed_hosts(names))


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
    with pytest.raises(ConfigError, match="is not a folder"):
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
    limits = allowing(f"127.0.0.1:{server}")
    assert read(f"{base}/a", limits) == DATA
    assert read(f"{base}/to?/a", limits) == DATA
    assert "404" in refused(f"{base}/none", limits)
    assert "localhost" in refused(f"{base}/to?http://localhost:{server}/a", limits)
    assert "elsewhere" in refused(f"{base}/to?file:///etc/passwd", limits)
    assert "redirects" in refused(f"{base}/to?/to?/to?/to?/to?/a", limits)
    assert "cannot be fetched" in refused(f"{base}/broken", limits)
    small = replace(limits, max_bytes=5)
    assert "5 bytes" in refused(f"{base}/a", small)
    with pytest.raises(InvalidRequestError, match="within"):
        read_source(ImageSource(f"{base}/a", "there"), limits, Deadline(9, lambda: True))


def test_audio_has_the_same_protections_and_its_own_words(server: int) -> None:
    def read_audio(url: str, limits: ImageLimits) -> bytes:
        return read_source(ImageSource(url, "there", "audio"), limits)

    base, limits = (
        f"http://127.0.0.1:{server}",
        replace(allowing(f"127.0.0.1:{server}"), kind="audio"),
    )
    assert read_audio(f"{base}/a", limits) == read(f"{base}/a", limits)
    assert read_audio(data_url(DATA, "audio/wav"), limits) == DATA
    for url, message in (
        (data_url(DATA), "a data URL of an audio in base64: data:audio/wav"),
        ("http://a.org/b", "from where audio files are not fetched here: send the audio in"),
        ("file:///a.wav", "send the audio in a data URL"),
        ("ftp://a/b", "data:audio/wav;base64"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            read_audio(url, limits)
    config = EngineConfig(model="x", max_audio_bytes=3, max_audio_seconds=5)
    small = ImageLimits.of(config, "audio")
    assert small.max_seconds == 5
    with pytest.raises(InvalidRequestError, match=r"audio of more than 3 bytes.*--max-audio-bytes"):
        read_audio(data_url(DATA, "audio/wav"), small)


@pytest.mark.parametrize("url", ["ftp://a/b", "", "a.png", "http://[", "http://a:x/b"])
def test_other_urls(url: str) -> None:
    assert refused(url)


def test_ports_of_hosts() -> None:
    """80 and 443, or those that are named: an image's URL is no way to other services."""
    limits = allowing("a.org", "b.org:8443", "B.org.:9000", "[::1]:81", "::2")
    for url in ("http://a.org/x", "https://A.org/x", "http://a.org:443", "https://b.org:8443/x",
                "http://b.org:9000", "http://[::1]:81", "http://[::2]"):  # fmt: skip
        check_source(ImageSource(url, "there"), limits)
    assert "port 22 of" in refused("http://a.org:22/x", limits)
    assert "--allowed-media-domains b.org:443" in refused("https://b.org/x", limits)
    assert "port 6379" in refused("http://[::2]:6379", limits)
    for wrong in ("http://a.org", "a.org/x", "a.org:x", "a.org:99999", "", "a@b.org", ":80"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            allowed_hosts([wrong])


def test_redirects_to_other_ports_are_refused(server: int) -> None:
    with serving(Handler) as other:
        url = f"http://127.0.0.1:{server}/to?http://127.0.0.1:{other}/a"
        assert f"port {other}" in refused(url, allowing(f"127.0.0.1:{server}"))


# --- slow servers ---------------------------------------------------------------------------------
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd"
ENDLESS = b"x" * 2000


@contextmanager
def dripping(first: bytes, slow: bytes) -> Iterator[str]:
    """The address of a server that says `first` at once and `slow` a byte at a time, each sooner
    than any timeout of a read."""
    gone = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(first)
                for byte in slow:
                    connection.sendall(bytes([byte]))
                    if gone.wait(0.02):
                        return
            except OSError:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        gone.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    ("scheme", "first", "slow"),
    [
        ("http", b"", ANSWER + ENDLESS),
        ("http", b"HTTP/1.1 200 OK\r\n", b"A: " + ENDLESS),
        ("http", b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 400),
        ("http", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n", ENDLESS),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 200),
        ("http", b"HTTP/1.1 302 Found\r\n", b"Location: " + ENDLESS),
        ("https", b"\x16\x03\x03\x10\x00", ENDLESS),
    ],
    ids=["status", "a header", "headers", "continue", "body", "chunks", "redirect", "TLS"],
)
def test_a_server_that_drips_is_left_at_the_deadline(
    scheme: str, first: bytes, slow: bytes
) -> None:
    with dripping(first, slow) as address:
        source = ImageSource(f"{scheme}://{address}/a", "there")
        with pytest.raises(InvalidRequestError, match=r"within 0\.2 s"):
            read_source(source, allowing(address), Deadline(0.2))


def test_the_whole_answer_within_the_deadline() -> None:
    with dripping(ANSWER[:-2], ANSWER[-2:]) as address:
        assert read(f"http://{address}/a", allowing(address)) == b"abcd"


def test_a_resolver_that_hangs_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host: str, *args: int, flags: int = 0, **more: int) -> object:
        if not flags:
            ended.wait(10)
        return look_up(host, *args, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    try:
        with pytest.raises(InvalidRequestError, match=r"within 0\.2 s"):
            read_source(ImageSource("http://a/b", "there"), allowing("a"), Deadline(0.2))
    finally:
        ended.set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_servers_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "30", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with serving(Handler, context) as port:
        url, limits = f"https://localhost:{port}/a", allowing(f"localhost:{port}")
        assert "does not answer" in refused(url, limits)  # nobody vouches for it
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert read(url, limits) == DATA
