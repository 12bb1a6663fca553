"""`vllmx quantize` over folders whose small files are not what they should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedModelError, VllmxError, WeightFormatError
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize
from vllmx_models.formats.gguf.quantize.writer import write_file

Change = Callable[[dict[str, Any]], object]


def convert(folder: Path) -> None:
    quantize(load_registry(), folder, folder / "out.gguf", "q8_0", threads=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))


def change(path: Path, by: Change) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    by(value)
    path.write_text(json.dumps(value))


def of_model(**values: Any) -> Change:
    return lambda tokenizer: tokenizer["model"].update(values)


def first_token(index: Any) -> Change:
    return lambda tokenizer: tokenizer["model"]["vocab"].update({"odd": index})


def added(**values: Any) -> Change:
    token = {"id": 0, "content": "<odd>", "special": True} | values
    return lambda tokenizer: tokenizer.update(added_tokens=[token])


TOKENIZERS: dict[str, Change] = {
    "empty": lambda value: value.update(
        added_tokens=[], model={"type": "BPE", "vocab": {}, "merges": []}
    ),
    "list": of_model(vocab=["a", "b"]),
    "no number": first_token("1"),
    "negative": first_token(-1),
    "huge": first_token(10**4000),
    "float": first_token(1.0),
    "negative added": added(id=-5),
    "no name": added(content=None),
    "a merge of three": of_model(merges=["a b c"]),
    "a merge of one": of_model(merges=[["a"]]),
    "a merge of no tokens": of_model(merges=[["no", "token"]]),
    "merges without a vocabulary": of_model(vocab={}, merges=[["a", "b"]]),
    "a merge of numbers": of_model(merges=[[1, 2]]),
    "merges are a number": of_model(merges=5),
    "surrogate": lambda value: value["model"]["vocab"].update({"\ud800": 3}),
    "no post-processor's pieces": lambda value: value.update(
        post_processor={"type": "TemplateProcessing", "single": []}
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_odd_tokenizer_is_a_typed_error(folder: Path, name: str) -> None:
    change(folder / "tokenizer.json", TOKENIZERS[name])
    with pytest.raises((WeightFormatError, UnsupportedModelError)) as raised:
        convert(folder)
    assert len(str(raised.value)) < 600
    assert not list(folder.glob("out.gguf*"))


@pytest.mark.parametrize(
    "template",
    [
        "x" * ((1 << 20) + 1),
        [{"name": "default"}],
        [{"name": 1, "template": "x"}],
        {"default": 5},
        5,
        "\ud800",
    ],
)
def test_an_odd_template_is_a_typed_error(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", lambda value: value.update(chat_template=template))
    with pytest.raises((WeightFormatError, UnsupportedModelError)):
        convert(folder)


@pytest.mark.parametrize("data", [b"\xff", b"x" * ((1 << 20) + 1)])
def test_an_odd_template_file_is_a_typed_error(folder: Path, data: bytes) -> None:
    (folder / "chat_template.jinja").write_bytes(data)
    with pytest.raises(WeightFormatError, match="chat_template"):
        convert(folder)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, 10**400, -(1 << 40)])
@pytest.mark.parametrize("key", ["top_k", "temperature"])
def test_sampling_defaults_that_have_no_form_are_refused(
    folder: Path, key: str, value: float
) -> None:
    change(folder / "generation_config.json", lambda config: config.update({key: value}))
    with pytest.raises(UnsupportedModelError, match=key):
        convert(folder)


@pytest.mark.parametrize("value", [-1, 1 << 32, 1e300, "\ud800"])
def test_values_that_the_format_cannot_state_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedModelError):
        write_file(tmp_path / "x.gguf", {"key": value}, [], [])
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_is_no_text_is_converted(tmp_path: Path) -> None:
    name = b"od\xffd".decode("utf-8", "surrogateescape")
    try:
        folder = Path(shutil.copytree(MODEL_FOLDER, tmp_path / name))
    except OSError:
        pytest.skip("the file system wants names that are text")
    convert(folder)
    assert (folder / "out.gguf").is_file()


def test_a_model_without_rotary_embedding_is_refused(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change(
        folder / "config.json",
        lambda config: config.update(
            architectures=["SmolLM3ForCausalLM"], no_rope_layers=[0] * layers
        ),
    )
    with pytest.raises(VllmxError, match="rotary"):
        convert(folder)
