"""Bodies of multipart/form-data: whole, cut anywhere, and broken."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.errors import InvalidRequestError
from vllmx_server.apis.batches.file_routes import Upload
from vllmx_server.http.multipart import file_name

TYPE = "multipart/form-data; boundary=xyz"


def read(*pieces: bytes, content_type: str = TYPE) -> tuple[dict[str, str], str | None, bytes]:
    """(fields, name of the file, its content)."""
    with tempfile.TemporaryDirectory() as folder:
        upload = Upload(content_type, Path(folder, "content"), 1 << 20)
        try:
            for piece in pieces:
                upload.feed(piece)
            upload.finish()
            assert upload.num_bytes == upload.path.stat().st_size
            return upload.fields, upload.name, upload.path.read_bytes()
        finally:
            upload.close()
            assert not upload.path.exists()


PART = b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
BODY = (
    PART + b"one\r\n--xy\r\n-\r\n"
    b"--xyz  \r\ncontent-type: x/y\r\ncontent-disposition: form-data; name=file;"
    b' filename="../q.txt"\r\n\r\n'
    b"\r\n\r\n--xyz--\r\nepilogue"
)
PARTS = ({"a": "one\r\n--xy\r\n-"}, "q.txt", b"\r\n")


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
    assert parts == ({"purpose": "batch"}, "ä b.jsonl", b"\r\n--")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "lacks its closing boundary"),
        (BODY[:-14], "lacks its closing boundary"),
        (PART + b"x", "lacks its closing boundary"),
        (b"--xyz", "lacks its closing boundary"),
        (PART + b"x\r\n--xyz--", "no part named 'file'"),
        (b"preamble\r\n" + BODY, "is broken"),
        (b"--xyzx\r\n", "is broken"),
        (b"--xyz\r\n\r\nx", "has no name"),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx", "has no name"),
        (b"--xyz\r\n" + b"a: b\r\n" * 3000, "is broken.*header count"),
        (b"--xyz\r\na: " + b"b" * 9000, "is broken.*header size"),
        (b"x" * 10_000, "is broken"),
        (
            b"".join(
                b'%b--xyz\r\nContent-Disposition: form-data; name="%d"\r\n\r\n' % (e, i)
                for i, e in enumerate([b"", *[b"\r\n"] * 16])
            ),
            "more than 16 parts",
        ),
        (PART + b"\r\n" + PART + b"\r\n--xyz--", "given twice"),
        (PART + b"\xff\r\n--xyz--", "not UTF-8"),
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
