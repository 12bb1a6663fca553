"""Requests that two servers could read in two ways, from raw sockets."""

from __future__ import annotations

import json

import pytest

from .conftest import Served
from .test_http1 import GET, is_closed, read_answer

POST = b"POST /version HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n1\r\nx\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding : chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nContent-Length: 0\r\n\r\nx", 400),
        (POST + b"Content-Length: 1, 0\r\n\r\nx", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: +1\r\n\r\nx", 400),
        (POST + b"Content-Length: 0x1\r\n\r\nx", 400),
        (POST + b"Content-Length: 1 0\r\n\r\nx", 400),
        (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (POST + b"X: 1\r\n Content-Length: 1\r\n\r\nx", 400),
        (POST + b"X: 1\nContent-Length: 1\r\n\r\nx", 400),
        (POST.replace(b"\r\n", b"\n") + b"\n", 400),
        (POST + b"X: a\rContent-Length: 1\r\n\r\nx", 400),
        (POST + b"X: a\0\r\n\r\n", 400),
        (POST + b"\0: a\r\n\r\n", 400),
        (POST + b": a\r\n\r\n", 400),
        (POST + b"Host: b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET  /version HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET\t/version HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /ver\0sion HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"G(T /version HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"/version HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /version\r\nHost: a\r\n\r\n", 400),
        (b"GET /version HTTP/1.1x\r\nHost: a\r\n\r\n", 400),
        (b"GET /version HTTP/0.9\r\nHost: a\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("before", [b"", GET])
async def test_what_can_be_read_in_two_ways_ends_the_connection(
    served: Served, request_: bytes, status: int, before: bytes
) -> None:
    """One answer, and none to what stands behind it."""
    reader, writer = await served.connect()
    writer.write(before + request_ + GET)
    if before:
        assert (await read_answer(reader))[0] == 200
    found, headers, body = await read_answer(reader)
    assert (found, headers["connection"]) == (status, "close")
    assert json.loads(body)["error"]["code"] == "bad_http"
    await is_closed(reader)


@pytest.mark.parametrize(
    "body",
    [
        b"-1\r\nx\r\n0\r\n\r\n",
        b"0x1\r\nx\r\n0\r\n\r\n",
        b"1 1\r\nx\r\n0\r\n\r\n",
        b"g\r\nx\r\n0\r\n\r\n",
        b"1;a\nb\r\nx\r\n0\r\n\r\n",
        b"1\r\nxy0\r\n\r\n",
        b"1\nx\n0\n\n\r\n\r\n",
        b"f" * 21 + b"\r\nx\r\n0\r\n\r\n",
    ],
)
async def test_chunks_that_are_none(served: Served, body: bytes) -> None:
    reader, writer = await served.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + body + GET)
    status, headers, _ = await read_answer(reader)
    assert (status, headers["connection"]) == (400, "close")
    await is_closed(reader)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://localhost/version HTTP/1.1", 404),
        (b"get /version HTTP/1.1", 405),
        (b"BREW /version HTTP/1.1", 405),
        (b"CONNECT localhost:1 HTTP/1.1", 404),
        (b"GET /version#/health HTTP/1.1", 404),
        (b"GET /%2e%2e/version HTTP/1.1", 404),
    ],
)
async def test_requests_for_nothing_of_ours(served: Served, line: bytes, status: int) -> None:
    reader, writer = await served.connect()
    writer.write(line + b"\r\nHost: localhost\r\n\r\n")
    assert (await read_answer(reader))[0] == status
    writer.write(GET)
    assert (await read_answer(reader))[0] == 200
