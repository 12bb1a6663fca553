"""A small server that speaks the protocol of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights " * 5000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.gguf": b"another format",
    "Q8/big-00001-of-00002.gguf": b"first half",
    "Q8/big-00002-of-00002.gguf": b"second half",
    "mmproj-F16.gguf": b"a tower",
    "mmproj-BF16.gguf": b"the same in bfloat16",
    "pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
    "consolidated.safetensors": b"second copy",
    "gptq_model-4bit-128g.safetensors": b"under a name of AutoGPTQ",
}


class Hub:
    """Repositories and what happened to them.

    Attributes:
        url: the value of HF_ENDPOINT.
        repos: files by repository. org/gated and org/private want TOKEN, org/broken fails, and
            others are not found; all have one commit and one branch.
        sizes: sizes that the lists of files claim instead of the true ones.
        cut_bytes: the place in weight files where connections break; None: they do not.
        ranges: the Range headers that were sent.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        self.url = ""
        self.repos = repos
        self.sizes: dict[str, int] = {}
        self.cut_bytes: int | None = None
        self.ranges: list[str] = []


@contextmanager
def serving_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub on the loopback."""
    served = Hub(repos)
    handler = type("Handler", (HubHandler,), {"hub": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class HubHandler(BaseHTTPRequestHandler):
    """Answers of a hub."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "/resolve/" in path:
            self._resolve(*path.strip("/").split("/resolve/"))
            return
        kind = "/tree/" if "/tree/" in path else "/revision/"
        model, _, rest = path.removeprefix("/api/models/").partition(kind)
        files = self.hub.repos.get(model, {})
        if model == "org/broken":
            self._send(503, b"{}")
        elif (not files or model in ("org/private",)) and not self._authorised():
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest not in ("main", COMMIT) and kind in path:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "/tree/":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(name, data)}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        else:
            siblings = [self._sibling(name, data) for name, data in files.items()]
            info = {"id": model, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info).encode())

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        size = self.hub.sizes.get(name, len(data))
        found: dict[str, Any] = {"rfilename": name, "size": size, "blobId": etag(name, data)}
        if is_large(name):
            found["lfs"] = {"sha256": etag(name, data), "size": size, "pointerSize": 134}
        return found

    def _resolve(self, model: str, rest: str) -> None:
        if model == "org/gated" and not self._authorised():
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        name = rest.partition("/")[2]
        data = self.hub.repos[model][name]
        headers = {"ETag": f'"{etag(name, data)}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("range", "")
        begin = 0
        if self.command == "GET" and asked.startswith("bytes="):
            self.hub.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and is_large(name) and self.hub.cut_bytes is not None:
            self._begin(200 if not begin else 206, headers | {"Content-Length": str(len(data))})
            self.wfile.write(data[begin : self.hub.cut_bytes])
            self.wfile.flush()
            self.close_connection = True
            return
        self._send(206 if begin else 200, data[begin:], headers)

    def _authorised(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Keeps the test's standard error for the progress bar."""


def is_large(name: str) -> bool:
    """True for files that a hub stores as large ones, whose ETag is their SHA-256."""
    return name.endswith((".safetensors", ".gguf"))


def etag(name: str, data: bytes) -> str:
    """The name of a file's blob in a cache."""
    return (hashlib.sha256 if is_large(name) else hashlib.sha1)(data).hexdigest()
