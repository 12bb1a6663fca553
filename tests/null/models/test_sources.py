"""Model sources: local paths, and the hub against a small server that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vllmx_models.sources import hub_file, hub_snapshot, local_path

from tests.waiting import PATIENCE_S

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
WANTED = {
    "config.json",
    "model.safetensors",
    "gptq_model-4bit-128g.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
}
SCRIPT = """
import json, sys
from vllmx_core.errors import ModelNotFoundError
from vllmx_models.sources import hub_file, hub_snapshot, hub_tower
model, revision, progress = json.loads(sys.argv[1])
try:
    source = hub_file if ":" in model else hub_snapshot
    path = source(model, revision, progress)
    found = {"path": str(path)}
    if model.endswith(".gguf"):
        found["tower"] = str(hub_tower(path))
    print(json.dumps(found))
except ModelNotFoundError as error:
    print(json.dumps({"error": error.message, "param": error.param}))
"""


class HubHandler(BaseHTTPRequestHandler):
    """org/model is public, org/gated and org/private want TOKEN; one commit, one branch."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "/resolve/" in path:
            self._resolve(*path.strip("/").split("/resolve/"))
            return
        model, _, rest = path.removeprefix("/api/models/").partition("/revision/")
        if "/tree/" in path:
            model, _, rest = path.removeprefix("/api/models/").partition("/tree/")
        files = {n: d for n, d in FILES.items() if "safetensors" not in n or "GGUF" not in model}
        if model == "org/broken":
            self._send(503, b"{}")
        elif model not in ("org/model", "org/gated", "org/model-GGUF") and not self._authorised():
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": model, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info).encode())

    def _resolve(self, model: str, rest: str) -> None:
        if model == "org/gated" and not self._authorised():
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        data = FILES[rest.partition("/")[2]]
        self._send(200, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT})

    def _authorised(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Keeps the test's standard error for the progress bar."""


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def closed_endpoint() -> Iterator[str]:
    """An address where nobody listens, nor can begin to meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def snapshot(
    home: Path,
    endpoint: str,
    model: str = "org/model",
    revision: str | None = None,
    progress: bool = False,
    **environment: str,
) -> tuple[dict[str, str], str]:
    """The source's answer in a process of its own (the hub's client reads its environment when it
    is imported), and what it wrote to standard error."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    clean = {key: value for key, value in clean.items() if "proxy" not in key.lower()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([model, revision, progress])],
        env={**clean, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, str] = json.loads(done.stdout)
    return answer, done.stderr


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_download_then_cache(tmp_path: Path, endpoint: str, closed_endpoint: str) -> None:
    answer, shown = snapshot(tmp_path, endpoint)
    folder = Path(answer["path"])
    assert names(folder) == WANTED
    assert {name: (folder / name).read_bytes() for name in WANTED} == {
        name: FILES[name] for name in WANTED
    }
    assert shown == ""  # no progress was asked for
    again, _ = snapshot(tmp_path, closed_endpoint)
    assert again == answer
    again, _ = snapshot(tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert again == answer


def test_progress_bar(tmp_path: Path, endpoint: str) -> None:
    _, shown = snapshot(tmp_path, endpoint, progress=True)
    assert "100%" in shown


def test_no_network(tmp_path: Path, closed_endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, closed_endpoint)
    assert answer["param"] == "model"
    for part in ("'org/model'", "cannot be reached", "offline", "local copy", "HF_ENDPOINT"):
        assert part in answer["error"]


def test_offline_by_choice(tmp_path: Path, endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint, HF_HUB_OFFLINE="1")
    for part in ("'org/model'", "HF_HUB_OFFLINE", "local copy"):
        assert part in answer["error"]


def test_offline_with_half_a_model(tmp_path: Path, endpoint: str, closed_endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint)
    (Path(answer["path"]) / "model.safetensors").unlink()
    answer, _ = snapshot(tmp_path, closed_endpoint)
    # older clients of the hub hand out the folder as it is; opening it then says what is missing
    assert "cannot be reached" in answer.get("error", "cannot be reached")


@pytest.mark.parametrize("model", ["org/model", "org/model:model.gguf"])
def test_a_branch_that_names_no_snapshot_of_the_cache(
    tmp_path: Path, endpoint: str, model: str
) -> None:
    """A download of a newer commit that never began: the message names the one that is whole."""
    before, _ = snapshot(tmp_path, endpoint, model)
    (ref,) = tmp_path.rglob("refs/main")
    ref.write_text("f" * 40)
    half = ref.parents[1] / "snapshots" / ("e" * 40)
    half.mkdir()
    (half / "config.json").write_text("{}")
    answer, _ = snapshot(tmp_path, endpoint, model, HF_HUB_OFFLINE="1")
    assert f"the cache has {COMMIT} of it whole: --revision {COMMIT} loads that" in answer["error"]
    again, _ = snapshot(tmp_path, endpoint, model, COMMIT, HF_HUB_OFFLINE="1")
    assert again["path"] == before["path"]
    if ":" not in model:  # a download of a newer commit that broke off
        ref.write_text(half.name)
        answer, _ = snapshot(tmp_path, endpoint, model, HF_HUB_OFFLINE="1")
        assert f"--revision {COMMIT} loads that" in answer["error"]
    kept = half.with_name("kept")
    half.with_name(COMMIT).rename(kept)
    again, _ = snapshot(tmp_path, endpoint, model, "kept", HF_HUB_OFFLINE="1")
    assert Path(again["path"]).is_relative_to(kept)


@pytest.mark.parametrize(
    ("model", "revision", "parts"),
    [
        ("org/missing", None, ("'org/missing'", "check the name", "HF_TOKEN")),
        ("org/gated", None, ("is gated", "accept its terms", "HF_TOKEN")),
        ("org/model", "v9", ("'org/model' at revision 'v9'", "no such revision", "--revision")),
        ("org/broken", None, ("answers HTTP 503", "try again later")),
    ],
)
def test_refusals(
    tmp_path: Path, endpoint: str, model: str, revision: str | None, parts: tuple[str, ...]
) -> None:
    answer, _ = snapshot(tmp_path, endpoint, model, revision)
    for part in parts:
        assert part in answer["error"]


@pytest.mark.parametrize("model", ["org/gated", "org/private"])
def test_token(tmp_path: Path, endpoint: str, model: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint, model, COMMIT, HF_TOKEN=TOKEN)
    assert names(Path(answer["path"])) == WANTED


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./missing", "../missing", "~/missing", "a/b/c", "C:\\model", "",
             "x" * 200, "bad name", "org/", "trailing."],
)  # fmt: skip
def test_names_that_are_none_of_the_hub(name: str) -> None:
    assert hub_snapshot(name, None, False) is None


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path(str(tmp_path), None, False) == tmp_path
    assert local_path("~/file.gguf", None, False) == tmp_path / "file.gguf"
    for name in ("~/missing", "~nobody-here/x", "x" * 10_000, "nul\0byte", "Qwen/Qwen3-0.6B"):
        assert local_path(name, None, False) is None


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("model.gguf", {"model.gguf"}),
        (
            "Q8/big-00002-of-00002.gguf",
            {"Q8/big-00001-of-00002.gguf", "Q8/big-00002-of-00002.gguf"},
        ),
    ],
)
def test_one_file_of_a_model_and_its_shards(
    tmp_path: Path, endpoint: str, closed_endpoint: str, name: str, files: set[str]
) -> None:
    answer, _ = snapshot(tmp_path, endpoint, f"org/model:{name}")
    path = Path(answer["path"])
    assert path.name == min(files).rpartition("/")[2]
    folder = path.parents[name.count("/")]
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {*files, "mmproj-BF16.gguf"}
    assert answer["tower"] == str(folder / "mmproj-BF16.gguf")
    offline, _ = snapshot(tmp_path, closed_endpoint, f"org/model:{name}", HF_HUB_OFFLINE="1")
    assert offline == {**answer, "tower": "None"}  # the folder is looked into first


def test_a_file_that_the_model_lacks(tmp_path: Path, endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint, "org/model:other.gguf")
    assert "no file 'other.gguf'" in answer["error"]
    answer, _ = snapshot(tmp_path, endpoint, "org/gated:model.gguf")
    assert "gated" in answer["error"]


def test_a_model_of_gguf_files_asks_for_one(tmp_path: Path, endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint, "org/model-GGUF")
    assert answer["error"].endswith(
        "as in org/model-GGUF:Q8/big-00001-of-00002.gguf; it has Q8/big-00001-of-00002.gguf,"
        " model.gguf"
    )


@pytest.mark.parametrize(
    "name",
    [
        "org/model",
        "org/model:",
        "org/model:x.bin",
        "org/model:../x.gguf",
        "org/model:*.gguf",
        "org/model:/etc/x.gguf",
        "/a/b:x.gguf",
        "c:\\x.gguf",
    ],
)
def test_names_that_are_no_files_on_the_hub(name: str) -> None:
    assert hub_file(name, None, False) is None
