"""`vllmx pull`, `list`, `show`, `rm` and `run` against a small hub and a cache of its own."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants
from vllmx.cli.errors import run
from vllmx.cli.group import cli
from vllmx_demo.source import MODEL_FOLDER

from tests.hub_server import COMMIT, Hub, serving_hub

DEMO = {
    name: (Path(MODEL_FOLDER) / name).read_bytes()
    for name in sorted(os.listdir(MODEL_FOLDER))
    if not name.endswith((".md", ".py"))
}
REPOS = {
    "org/demo": DEMO,
    "org/files": {"a-Q4_K_M.gguf": b"GGUF" + b"4" * 40_000, "a-Q8_0.gguf": b"GGUF" + b"8" * 80_000},
    "org/gated": DEMO,
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"no"},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub(REPOS) as served:
        yield served


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def vllmx(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process, with the hub and a cache of its own."""
    for name in [name for name in os.environ if "proxy" in name.lower() or name[:3] == "HF_"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts

    def run_it(*arguments: str, stdin: str = "", offline: bool = False) -> Result:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = run(cli, list(arguments))
        return Result(code, *capsys.readouterr())

    return run_it


def names(vllmx: Run) -> list[str]:
    return [model["name"] for model in json.loads(vllmx("list", "--json").out)]


def test_a_model_is_pulled_listed_run_and_deleted(vllmx: Run, tmp_path: Path, hub: Hub) -> None:
    assert "demo is on this machine already" in vllmx("pull", "demo").out
    done = vllmx("pull", "org/demo")
    assert done.code == 0, done.err
    assert f"org/demo: {len(DEMO)} files," in done.err
    assert "100%" in done.err
    assert "`vllmx run org/demo` chats with it" in done.out
    table = vllmx("list").out
    assert table.splitlines()[1].split()[:2] == ["org/demo", COMMIT[:8]]
    shown = json.loads(vllmx("show", "org/demo", "--json").out)
    assert shown["architecture"] == "Qwen3ForCausalLM"
    assert shown["revision"] == COMMIT
    assert shown["bytes"] == sum(map(len, DEMO.values()))
    said = ("run", "org/demo", "Hello!", "--temperature", "0", "--max-tokens", "8")
    answer = vllmx(*said, offline=True)
    assert answer.code == 0, answer.err
    assert answer.out.strip()
    assert vllmx("rm", "org/demo", stdin="n\n").code == 130
    assert names(vllmx) == ["org/demo"]
    assert "freed" in vllmx("rm", "org/demo", stdin="y\n").out
    assert names(vllmx) == []
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_pull_that_was_cut_goes_on_where_it_ended(vllmx: Run, tmp_path: Path, hub: Hub) -> None:
    hub.cut_bytes = (10 << 20) + 100  # the client writes pieces of 10 MiB
    weights = len(DEMO["model.safetensors"])
    done = vllmx("pull", "org/demo")
    assert done.code == 2
    assert "the download of org/demo broke off" in done.err
    assert "the same command goes on from there" in done.err
    (partial,) = tmp_path.rglob("*.incomplete")
    begun = partial.stat().st_size
    assert 0 < begun < weights
    assert names(vllmx) == []
    hub.cut_bytes = None
    hub.ranges.clear()
    done = vllmx("pull", "org/demo")
    assert done.code == 0, done.err
    assert "are there" in done.err
    assert hub.ranges == [f"bytes={begun}-"]
    (blob,) = tmp_path.rglob("model.safetensors")
    assert blob.read_bytes() == DEMO["model.safetensors"]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_download_that_is_not_what_the_hub_says_is_deleted(
    vllmx: Run, tmp_path: Path, hub: Hub
) -> None:
    done = vllmx("pull", "org/files:Q8")
    assert done.code == 0, done.err
    (file,) = tmp_path.rglob("*.gguf")
    blob = file.resolve()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    file.unlink()
    with blob.with_name(f"{blob.name}.incomplete").open("r+b") as partial:
        partial.truncate(20_000)
        partial.write(b"x")
    done = vllmx("pull", "org/files:Q8")
    assert done.code == 2
    assert "arrived damaged (its SHA-256 is not the hub's)" in done.err
    assert vllmx("pull", "org/files:Q8").code == 0


def test_the_largest_file_that_fits_is_pulled_or_the_one_that_is_named(
    vllmx: Run, tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    done = vllmx("pull", "org/files")
    assert done.code == 0, done.err
    assert "2 GGUF files: a-Q8_0.gguf is the largest that fits" in done.err + caplog.text
    assert names(vllmx) == ["org/files:a-Q8_0.gguf"]
    assert vllmx("pull", "org/files:q4_k_m").code == 0
    assert names(vllmx) == ["org/files:a-Q4_K_M.gguf", "org/files:a-Q8_0.gguf"]
    listing = hub.repos
    hub.repos = {}  # nothing more can be downloaded
    done = vllmx("run", "org/files", "Hello!")  # of two files in the cache the larger one
    assert "a-Q8_0.gguf" in done.err
    assert "cannot be" not in done.err
    hub.repos = listing
    assert vllmx("rm", "-y", "org/files:Q4").code == 0
    assert names(vllmx) == ["org/files:a-Q8_0.gguf"]
    assert len([*tmp_path.rglob("blobs/*")]) == 1
    hub.sizes["a-Q8_0.gguf"] = 1 << 60
    assert vllmx("pull", "org/files").code == 0
    assert names(vllmx) == ["org/files:a-Q4_K_M.gguf", "org/files:a-Q8_0.gguf"]
    hub.sizes["a-Q4_K_M.gguf"] = 1 << 60
    assert "none of the GGUF files of 'org/files' fits 80%" in (vllmx("pull", "org/files").err)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "neither a local path nor a public model"),
        ("org/gated", "accept its terms on the model's page"),
        ("../secret", "is not a model's name"),
        ("org/..", "is not a model's name"),
        ("org/demo:../x.gguf", "is not a model's name"),
        ("org/pickles", "neither safetensors nor GGUF files"),
        ("org/files:a-Q5.gguf", "it has a-Q4_K_M.gguf, a-Q8_0.gguf"),
        ("qwen3:4", "did you mean 'qwen3:4b'?"),
        ("org/demo --revision v9", "no such revision"),
        ("org/demo --source ftp", "--source must be hub or modelscope"),
    ],
)
def test_refusals_name_the_remedy(
    vllmx: Run, tmp_path: Path, hub: Hub, name: str, message: str
) -> None:
    done = vllmx("pull", *name.split())
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_is_too_small_is_said_before_the_download(
    vllmx: Run, tmp_path: Path, hub: Hub
) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    done = vllmx("pull", "org/demo")
    assert done.code == 2
    assert "org/demo needs 1073741824" in done.err
    assert "set HF_HOME to a folder on another disk" in done.err
    assert not list(tmp_path.rglob("blobs/*"))
    offline = vllmx("pull", "org/demo", offline=True)
    assert "HF_HUB_OFFLINE forbids" in offline.err


def test_a_short_name_of_the_user_is_pulled_and_run(vllmx: Run, tmp_path: Path, hub: Hub) -> None:
    presets = tmp_path / "config" / "vllmx" / "models.yaml"
    presets.parent.mkdir(parents=True)
    presets.write_text(
        "fox:tiny:\n  repo: org/demo\n  context: 128\n  sampling: {temperature: 0}\nfox: fox:tiny\n"
    )
    said = ("run", "fox", "Tell me a story about a fox.", "--max-tokens", "8")
    first = vllmx(*said)
    assert first.code == 0, first.err
    assert vllmx(*said, offline=True).out == first.out  # temperature 0
    chat = vllmx("run", "fox:tiny", stdin="/quit\n")
    assert chat.out.startswith("fox:tiny (Qwen3ForCausalLM)")
    assert "context 128." in chat.out
    presets.write_text("fox: {repo: org/demo, contxt: 128}\n")
    refused = vllmx("run", "fox")
    assert refused.code == 2
    assert "unknown key 'contxt'; did you mean 'context'?" in refused.err
