"""`vllmx plan` of models on a hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import PATIENCE_S

from .test_plan import DENSE, form, planned


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository; `files` has what is in it."""

    files: dict[str, bytes]
    asked: list[str]
    endpoint: str

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path} {self.headers.get('Range')}")
        if path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(d)} for name, d in self.files.items()]
            body = json.dumps({"id": "org/model", "sha": "0" * 40, "siblings": siblings}).encode()
            self._send(200, body)
            return
        data = self.files[path.rpartition("/")[2]]
        wanted = re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range") or "")
        if wanted:
            self._send(206, data[: int(wanted[1]) + 1])
        else:
            self._send(200, data)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        size = len(body)
        for name, value in {
            "Content-Length": size,
            "ETag": '"1"',
            "X-Repo-Commit": "0" * 40,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing."""


SCRIPT = """
import sys
from vllmx.cli.plan import plan
from vllmx_models.formats import header_only
header_only.FIRST_BYTES = 64  # so that a header must be asked for several times
plan([*sys.argv[1:], "--on", "h100", "--json"])
"""


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    handler = type("OneHub", (Hub,), {"files": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def planned_from(hub: type[Hub], home: Path, model: str) -> dict[str, Any]:
    """Plans in a process of its own: the hub's client reads its environment when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    clean = {key: value for key, value in clean.items() if "proxy" not in key.lower()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model],
        env={**clean, "HF_HOME": str(home / "hub"), "HF_ENDPOINT": hub.endpoint},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_of_the_hub_is_planned_by_its_config(hub: type[Hub], tmp_path: Path) -> None:
    hub.files |= {"config.json": json.dumps(DENSE).encode(), "model.safetensors": b"w" * 100}
    found = planned_from(hub, tmp_path, "org/model")
    assert found["parameters"] == pytest.approx(8.03e9, rel=0.001)
    assert not any("safetensors" in line and "resolve" in line for line in hub.asked)


def test_a_quantised_model_of_the_hub_is_sized_by_its_files(hub: type[Hub], tmp_path: Path) -> None:
    quantised = DENSE | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    hub.files |= {"config.json": json.dumps(quantised).encode(), "model.safetensors": b"w" * 4000}
    found = planned_from(hub, tmp_path, "org/model")
    assert [each["form"] for each in found["forms"]] == ["stored"]
    assert form(found, "stored")["weight_bytes"] == pytest.approx(4000)


def test_a_model_that_was_downloaded_is_planned_without_the_hub(
    hub: type[Hub], tmp_path: Path
) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    home = tmp_path / "hub" / "hub" / "models--org--model"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(DENSE))
    write_gguf(snapshot / "model.gguf")
    assert planned_from(hub, tmp_path, "org/model:model.gguf")["forms"]
    (snapshot / "model.gguf").unlink()
    found = planned_from(hub, tmp_path, "org/model")
    assert found["parameters"] == pytest.approx(8.03e9, rel=0.001)


def test_a_gguf_file_of_the_hub_is_planned_by_its_header(hub: type[Hub], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    hub.files["model.gguf"] = path.read_bytes()
    found = planned_from(hub, tmp_path, "org/model:model.gguf")
    assert found == planned(str(path), "--on", "h100") | {"model": "org/model:model.gguf"}
    assert form(found, "stored")["weight_bytes"] == found["parameters"] * 34 / 32
    ranges = [line.rpartition(" ")[2] for line in hub.asked if "GET /org" in line]
    assert ranges[:3] == ["bytes=0-63", "bytes=0-255", "bytes=0-1023"]
    assert int(ranges[-1].rpartition("-")[2]) < path.stat().st_size - 1


def write_gguf(path: Path) -> None:
    """A Llama in Q8_0 whose header takes a few kilobytes, its weights more."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {n}" for n in range(300)])
    shapes = {
        "token_embd": (300, 128),
        "output": (300, 128),
        "blk.0.attn_q": (128, 128),
        "blk.0.attn_k": (64, 128),
        "blk.0.attn_v": (64, 128),
        "blk.0.attn_output": (128, 128),
        "blk.0.ffn_gate": (256, 128),
        "blk.0.ffn_up": (256, 128),
        "blk.0.ffn_down": (128, 256),
    }
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, (rows, cols) in shapes.items():
        blocks = np.zeros((rows, cols // 32 * 34), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(128, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
