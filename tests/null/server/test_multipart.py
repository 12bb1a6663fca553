"""Bodies of multipart/form-data: whole, cut anywhere, and broken."""

from __future__ import annotations

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.errors import InvalidRequestError
from vllmx_server.apis.batches.multipart import MultipartReader, Sink, file_name

TYPE = "multipart/form-data; boundary=xyz"


class Collected:
    """A sink, and the name under which its content is found."""

    def __init__(self, found: list[tuple[str, str | None, bytes]], *names: str | None) -> None:
        self.found, self.names, self.data = found, names, b""

    def write(self, data: bytes) -> None:
        self.data += data

    def end(self) -> None:
        self.found.append((str(self.names[0]), self.names[1], self.data))


def read(*pieces: bytes, content_type: str = TYPE) -> list[tuple[str, str | None, bytes]]:
    found: list[tuple[str, str | None, bytes]] = []

    def open_part(name: str, file: str | None) -> Sink:
        return Collected(found, name, file)

    reader = MultipartReader(content_type, open_part)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return found


PART = b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
BODY = (
    b"preamble\r\n" + PART + b"one\r\n--xy\r\n-\r\n"
    b'--xyz  \r\ncontent-type: x/y\r\ncontent-disposition: form-data; name=f; filename="../q.txt"'
    b"\r\n\r\n\r\n--xyz--\r\nepilogue"
)
PARTS = [("a", None, b"one\r\n--xy\r\n-"), ("f", "q.txt", b"")]


def test_cut_at_every_byte_it_is_the_same() -> None:
    assert read(BODY) == PARTS
    assert read(*(BODY[i : i + 1] for i in range(len(BODY)))) == PARTS
    for at in range(len(BODY)):
        assert read(BODY[:at], BODY[at:]) == PARTS


def test_what_a_client_makes() -> None:
    request = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ("ä b.jsonl", b"\r\n--")}
    )
    parts = read(request.read(), content_type=request.headers["content-type"])
    assert parts == [("purpose", None, b"batch"), ("file", "ä b.jsonl", b"\r\n--")]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends before the first part"),
        (BODY[:-14], "closing boundary is missing"),
        (PART + b"x", "in the content of a part"),
        (b"--xyz", "after a boundary"),
        (b"--xyzx\r\n", "something behind a boundary"),
        (b"--xyz\r\n\r\nx", "no Content-Disposition"),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx", "has no name"),
        (b"--xyz\r\n" + b"a: b\r\n" * 3000, "headers of a part do not end"),
        (b"x" * 10_000, "first boundary does not come"),
        (b"--xyz" + b" " * 10_000, "line does not end"),
        ((PART + b"\r\n") * 17 + b"--xyz--", "more than 16 parts"),
    ],
)
def test_what_is_broken_is_said(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read(body)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 71,
        "multipart/form-data; boundary=\xff",
        "a\r\nb: c",
    ],
)
def test_a_type_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequestError):
        read(b"", content_type=content_type)


@given(st.lists(st.sampled_from([b"--xyz", b"\r\n", b"--", b"\r", b"a", PART, b'"', b"\xff"])))
def test_nothing_else_is_raised(pieces: list[bytes]) -> None:
    with contextlib.suppress(InvalidRequestError):
        read(*pieces)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\windows\\x.jsonl", "x.jsonl"),
        ("/", "file"),
        ("..", "file"),
        ("a\x00b\nc\u202e.txt", "abc.txt"),
        ("x" * 1000, "x" * 255),
        ("", "file"),
    ],
)
def test_names_are_shown_without_folders(given: str, shown: str) -> None:
    assert file_name(given) == shown
