"""`vllmx serve` without a model: those of the hub's cache are listed and loaded on demand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllmx.cli.errors import run
from vllmx.cli.group import cli
from vllmx_demo.source import MODEL_FOLDER

from .conftest import running_server


def test_models_of_the_cache_are_loaded_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("org--demo", "org--half"):
        snapshot = tmp_path / f"models--{name}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for file in Path(MODEL_FOLDER).iterdir():
            if "half" not in name or file.name == "config.json":
                (snapshot / file.name).symlink_to(file)
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    flags = ("--cached-models", "--max-model-len", "256")
    with running_server(*flags, environment=environment) as server:
        listed = server.get("/v1/models").json()["data"]
        assert [(card["id"], card["state"]) for card in listed] == [
            ("demo", "loaded"),
            ("org/demo", "unloaded"),
        ]
        asked = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        for model in ("org/demo", "demo"):
            answer = server.post("/v1/chat/completions", asked | {"model": model})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
        assert run(cli, ["ps", "--url", server.url, "--json"]) == 0
        states = {card["id"]: card["state"] for card in json.loads(capsys.readouterr().out)}
        assert states == {"demo": "loaded", "org/demo": "loaded"}
        assert run(cli, ["ps", "--url", server.url]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["org/demo", "loaded"]
        assert run(cli, ["doctor", "--url", server.url]) == 0
        assert f"server: {server.url} serves demo, org/demo" in capsys.readouterr().out


def test_ps_says_that_no_server_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["ps", "--url", "http://127.0.0.1:9"]) == 2
    assert "start `vllmx serve`" in capsys.readouterr().err
    assert run(cli, ["ps", "--url", "127.0.0.1"]) == 2
