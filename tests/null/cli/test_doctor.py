"""`vllmx doctor`: each fault is found, named and has a remedy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllmx.cli import doctor
from vllmx.cli.errors import run
from vllmx.cli.group import cli

from tests.http_servers import serving

Doctor = Callable[..., dict[str, Any]]


class HubAnswers(BaseHTTPRequestHandler):
    """A hub whose clock is some seconds off."""

    off_s: ClassVar[float] = 0.0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.off_s)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""


@pytest.fixture
def hub() -> Iterator[str]:
    with serving(HubAnswers) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def examine(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """The findings of a run, the worst of each check; `code` is the exit code."""
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "no_proxy",
        "NO_PROXY",
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        free = held.getsockname()[1]

    def examined(*arguments: str) -> dict[str, Any]:
        ports = () if "--port" in arguments else ("--port", str(free))
        code = run(cli, ["doctor", "--json", *ports, *arguments])
        order = ("ok", "warning", "problem")
        listed = json.loads(capsys.readouterr().out)
        return {
            one["check"]: one for one in sorted(listed, key=lambda f: order.index(f["state"]))
        } | {"code": code}

    return examined


def test_a_healthy_machine(examine: Doctor) -> None:
    found = examine("demo")
    states = {check: one["state"] for check, one in found.items() if check != "code"}
    for check in ("backend", "cache", "temporary files", "port", "hub", "model"):
        assert states[check] == "ok", found[check]
    assert "problem" not in states.values()
    assert found["code"] == 0
    assert run(cli, ["doctor", "--port", "1"]) in (0, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>404", "is a web page"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "tensors are claimed"),
        (b"", "fewer than the 24 of a GGUF header"),
    ],
)
def test_a_damaged_file(examine: Doctor, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    found = examine(str(tmp_path / "model.gguf"))
    assert message in found["model"]["text"]
    assert found["code"] == 1


def test_a_model_that_is_not_here(examine: Doctor) -> None:
    found = examine("org/none")
    assert "has no model 'org/none'" in found["model"]["text"]
    assert found["code"] == 1


def test_a_name_too_long_for_a_file(examine: Doctor) -> None:
    found = examine("a" * 5000)
    assert "has no model" in found["model"]["text"]
    assert found["code"] == 1


def test_a_model_that_is_not_whole_is_named(examine: Doctor, tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "hub" / "models--org--half" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    found = examine()
    assert found["cache"]["text"] == "org/half: the weights are missing"
    assert "`vllmx pull org/half`" in found["cache"]["remedy"]
    assert found["code"] == 0  # other models work


def test_a_port_that_is_taken(examine: Doctor) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        found = examine("--port", str(holder.getsockname()[1]))
    assert found["port"]["state"] == "warning"
    assert "--port" in found["port"]["remedy"]


def test_a_clock_that_is_wrong(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubAnswers, "off_s", 4000.0)
    found = examine()
    assert found["clock"]["state"] == "problem"
    assert found["code"] == 1


def test_proxies_and_an_unreachable_hub(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    found = examine()
    assert found["proxy"]["text"] == "requests to 127.0.0.1 go to the proxy 127.0.0.1:9"
    assert "NO_PROXY" in found["proxy"]["remedy"]
    assert "cannot be reached" in found["hub"]["text"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "forbids downloads" in examine()["hub"]["text"]


def test_little_memory_and_disk(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda: 1000)
    monkeypatch.setattr(doctor, "_LEAST_BYTES", 1 << 60)
    found = examine("demo")
    for check in ("memory", "cache", "temporary files"):
        assert found[check]["state"] == "warning"
        assert found[check]["remedy"]
    assert "more than the host's free memory" in found["model"]["text"]


def test_a_preset_with_a_mistake(examine: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "config" / "vllmx" / "models.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("a: {repo: x/y, sampel: 1}")
    assert "unknown key 'sampel'" in examine()["short names"]["text"]


def test_a_server_that_is_gone(examine: Doctor) -> None:
    found = examine("--url", "http://127.0.0.1:9")
    assert "no server answers at http://127.0.0.1:9" in found["server"]["text"]
    assert found["code"] == 1
