"""LoRA adapters over HTTP: chosen by `model`, listed, loaded and unloaded by operators."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx_demo.source import MODEL_FOLDER

from tests.lora_files import weights_of, write_peft

from .conftest import RunningServer, running_server

ADMIN = {"Authorization": "Bearer boss"}
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that operators may load, and one next to their folder."""
    folder, weights = tmp_path_factory.mktemp("lora"), weights_of(MODEL_FOLDER)
    for seed, name in enumerate(("cat", "dog")):
        write_peft(folder / "root" / name, weights, seed=seed)
    write_peft(folder / "root" / "large", weights, rank=40)
    shutil.copytree(folder / "root" / "cat", folder / "outside")
    (folder / "root" / "link").symlink_to(folder / "outside")
    mixed = folder / "root" / "mixed"
    mixed.mkdir()
    shutil.copy(folder / "outside" / "adapter_config.json", mixed)
    (mixed / "adapter_model.safetensors").symlink_to(
        folder / "outside" / "adapter_model.safetensors"
    )
    return folder / "root"


@pytest.fixture(scope="module")
def adapted(root: Path) -> Iterator[RunningServer]:
    flags = (f"--lora-modules=cat={root / 'cat'}", f"--lora-root={root}", "--admin-key=boss")
    with running_server(*flags, "--enable-lora", "--max-loras=1", "--api-workers=2") as server:
        yield server


def complete(server: RunningServer, model: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    response = server.post("/v1/completions", body if model is None else {**body, "model": model})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text(answer: dict[str, Any]) -> str:
    found: str = answer["choices"][0]["text"]
    return found


def operate(server: RunningServer, verb: str, **body: Any) -> Any:
    return server.post(f"/v1/{verb}_lora_adapter", body, headers=ADMIN)


def test_requests_choose_an_adapter_by_model(adapted: RunningServer) -> None:
    plain, changed = complete(adapted), complete(adapted, "cat")
    assert (plain["model"], changed["model"]) == ("demo", "cat")
    assert text(plain) != text(changed)
    assert (text(complete(adapted)), text(complete(adapted, "cat"))) == (text(plain), text(changed))
    chat = {"model": "cat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert adapted.post("/v1/chat/completions", chat).json()["model"] == "cat"
    cards = {card["id"]: card for card in adapted.get("/v1/models").json()["data"]}
    assert cards["cat"]["parent"] == "demo"
    assert cards["demo"]["parent"] is None
    assert adapted.get("/v1/models/cat").json()["root"].endswith("cat")


def test_an_unknown_adapter(adapted: RunningServer) -> None:
    response = adapted.post("/v1/completions", {"model": "horse", "prompt": "a"})
    assert response.status_code == 404
    assert "served: demo, cat" in response.json()["error"]["message"]


def test_operators_load_and_unload(adapted: RunningServer, root: Path) -> None:
    before = text(complete(adapted, "cat"))
    assert operate(adapted, "load", lora_name="dog", lora_path="dog").status_code == 200
    dog = text(complete(adapted, "dog"))
    assert dog not in (before, text(complete(adapted)))
    again = operate(adapted, "load", lora_name="dog", lora_path="dog")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    # one slot for two adapters: they take turns, and prefixes are not shared
    in_turn = [text(complete(adapted, name)) for name in ("cat", "dog", "cat")]
    assert in_turn == [before, dog, before]
    path = str(root / "cat")
    swapped = operate(adapted, "load", lora_name="dog", lora_path=path, load_inplace=True)
    assert swapped.status_code == 200, swapped.text
    assert text(complete(adapted, "dog")) == before
    assert operate(adapted, "unload", lora_name="dog").status_code == 200
    assert adapted.post("/v1/completions", {"model": "dog", "prompt": "a"}).status_code == 404
    assert operate(adapted, "unload", lora_name="dog").status_code == 404


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("../outside", 403, "not below --lora-root"),
        ("cat/../cat", 403, "not below --lora-root"),
        ("/etc", 403, "not below --lora-root"),
        ("link", 403, "not below --lora-root"),
        ("mixed", 403, "not below --lora-root"),
        ("nothing", 404, "does not exist"),
        ("large", 400, "rank 40, there is room for 16"),
        ("cat\0", 400, "cannot be"),
    ],
)
def test_paths_that_are_refused(adapted: RunningServer, path: str, status: int, text: str) -> None:
    response = operate(adapted, "load", lora_name="new", lora_path=path)
    assert (response.status_code, text in response.text) == (status, True), response.text


def test_who_may_load(adapted: RunningServer, server: RunningServer) -> None:
    body = {"lora_name": "dog", "lora_path": "dog"}
    assert adapted.post("/v1/load_lora_adapter", body).status_code in (401, 403)
    taken = operate(adapted, "load", lora_name="demo", lora_path="dog")
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")


def test_an_adapter_that_is_deleted_or_damaged_in_use(
    adapted: RunningServer, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "dog", root / "gone")
    assert operate(adapted, "load", lora_name="gone", lora_path="gone").status_code == 200
    before = text(complete(adapted, "gone"))
    weights = root / "gone" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert text(complete(adapted, "gone")) == before
    damaged = operate(adapted, "load", lora_name="gone", lora_path="gone", load_inplace=True)
    assert damaged.status_code in (400, 500), damaged.text
    assert "truncated" in damaged.text or "damaged" in damaged.text
    shutil.rmtree(root / "gone")
    assert text(complete(adapted, "gone")) == before
    assert operate(adapted, "unload", lora_name="gone").status_code == 200


def test_llama_cpp_names_adapters_by_number(root: Path) -> None:
    flags = (f"--lora=cat={root / 'cat'}", f"--lora=dog={root / 'dog'}", "--apis=llamacpp")
    with running_server(*flags) as server:
        listed = server.get("/lora-adapters").json()
        assert [(each["id"], Path(each["path"]).name) for each in listed] == [
            (0, "cat"),
            (1, "dog"),
        ]
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True}

        def content(**fields: Any) -> str:
            response = server.post("/completion", body | fields)
            assert response.status_code == 200, response.text
            found: str = response.json()["content"]
            return found

        named = [text(complete(server, name)) for name in ("demo", "cat", "dog")]
        asked = [[], [{"id": 0, "scale": 1.0}], [{"id": 1, "scale": 1}, {"id": 0, "scale": 0}]]
        assert [content(lora=each) for each in asked] == named
        for lora, said in (
            ([{"id": 2, "scale": 1.0}], "no adapter 2 among 2"),
            ([{"id": 0, "scale": 0.5}], "--lora-scaled"),
            ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "--lora A,B"),
        ):
            refused = server.post("/completion", body | {"lora": lora})
            assert (refused.status_code, said in refused.text) == (400, True), refused.text
