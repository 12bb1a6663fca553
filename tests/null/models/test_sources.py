"""Model sources: local paths, and the hub against a small server that speaks its protocol."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllmx_core.errors import CapacityError, ModelNotFoundError
from vllmx_core.weights.file_names import largest_that_fits
from vllmx_models.sources import choose_file, hub_file, hub_snapshot, local_path, modelscope_model

from tests.hub_server import COMMIT, FILES, TOKEN, serving_hub
from tests.waiting import PATIENCE_S

WANTED = {
    "config.json",
    "model.safetensors",
    "gptq_model-4bit-128g.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
}
SCRIPT = """
import json, sys
import vllmx_core.system.logs as logs
logs.configure_logging("warning")
from vllmx_core.errors import ModelNotFoundError
from vllmx_core.errors import CapacityError, ModelNotFoundError
from vllmx_core.weights.file_names import largest_that_fits
from vllmx_models.sources import choose_file, hub_file, hub_snapshot, hub_tower
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


REPOS = {
    **dict.fromkeys(("org/model", "org/gated", "org/private"), FILES),
    "org/model-GGUF": {name: data for name, data in FILES.items() if "safetensors" not in name},
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving_hub(REPOS) as hub:
        yield hub.url


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
    """A download of a newer commit that never began: the only whole one is loaded, with a line,
    unless a revision was asked for."""
    before, _ = snapshot(tmp_path, endpoint, model)
    (ref,) = tmp_path.rglob("refs/main")
    ref.write_text("f" * 40)
    half = ref.parents[1] / "snapshots" / ("e" * 40)
    half.mkdir()
    (half / "config.json").write_text("{}")
    answer, shown = snapshot(tmp_path, endpoint, model, HF_HUB_OFFLINE="1")
    assert answer["path"] == before["path"]
    assert f"org/model is loaded at {COMMIT}, its only whole snapshot" in shown
    answer, _ = snapshot(tmp_path, endpoint, model, "main", HF_HUB_OFFLINE="1")
    assert f"the cache has {COMMIT} of it whole: --revision {COMMIT} loads that" in answer["error"]
    again, _ = snapshot(tmp_path, endpoint, model, COMMIT, HF_HUB_OFFLINE="1")
    assert again["path"] == before["path"]
    if ":" not in model:  # a download of a newer commit that broke off
        ref.write_text(half.name)
        answer, shown = snapshot(tmp_path, endpoint, model, HF_HUB_OFFLINE="1")
        assert answer["path"] == before["path"]
        assert "its only whole snapshot" in shown
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


def test_the_largest_of_several_gguf_files_that_fits_is_loaded(
    tmp_path: Path, endpoint: str
) -> None:
    answer, shown = snapshot(tmp_path, endpoint, "org/model-GGUF")
    assert answer["path"].endswith("/Q8/big-00001-of-00002.gguf")
    assert "2 GGUF files: Q8/big-00001-of-00002.gguf is the largest that fits" in shown
    offline, _ = snapshot(tmp_path, endpoint, "org/model-GGUF", HF_HUB_OFFLINE="1")
    assert offline == answer


def test_a_file_is_named_by_its_type(tmp_path: Path, endpoint: str) -> None:
    answer, _ = snapshot(tmp_path, endpoint, "org/model-GGUF:q8")
    assert answer["path"].endswith("/Q8/big-00001-of-00002.gguf")
    assert snapshot(tmp_path, endpoint, "org/model-GGUF:Q8", HF_HUB_OFFLINE="1")[0] == answer
    answer, _ = snapshot(tmp_path, endpoint, "org/model-GGUF:Q5_K_M")
    assert "no GGUF file with 'Q5_K_M' in its name" in answer["error"]


def test_files_are_chosen_by_the_free_memory() -> None:
    sizes = {
        "a-Q4.gguf": 40,
        "b-Q8-00001-of-00002.gguf": 50,
        "b-Q8-00002-of-00002.gguf": 30,
        "mmproj-F16.gguf": 70,
        "imatrix.gguf": 79,
        "model.safetensors": 60,
    }
    assert largest_that_fits(sizes, 100) == "b-Q8-00001-of-00002.gguf"
    assert largest_that_fits(sizes, 99.9) == "a-Q4.gguf"
    assert largest_that_fits(sizes, 49) is None
    with pytest.raises(CapacityError, match="fits 80% of the free memory"):
        choose_file("org/x", sizes, 49)
    assert choose_file("org/x", {"only.gguf": 100}, 1) == "only.gguf"


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


def test_a_model_of_modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(
        model_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((model_id, revision, allow_patterns))
        if model_id == "org/none":
            raise ValueError("404: not there")
        for name, data in FILES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return str(tmp_path)

    module = types.ModuleType("modelscope")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert modelscope_model("org/model", None, False) is None
    with pytest.raises(ModelNotFoundError, match=r"pip install 'vllmx\[modelscope\]'"):
        modelscope_model("modelscope://org/model", None, False)
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    assert modelscope_model("modelscope://org/model", "v1", False) == tmp_path
    file = modelscope_model("modelscope://org/model:model.gguf", None, False)
    assert file == tmp_path / "model.gguf"
    assert [each[:2] for each in asked] == [("org/model", "v1"), ("org/model", None)]
    assert asked[1][2] == ["model.gguf"]
    for name, reason in (
        ("org/none", "404: not there"),
        ("org/model:other.gguf", "no such weights"),
        ("org/model:../x.gguf", "is not a model of ModelScope"),
    ):
        with pytest.raises(ModelNotFoundError, match=reason):
            modelscope_model(f"modelscope://{name}", None, False)
