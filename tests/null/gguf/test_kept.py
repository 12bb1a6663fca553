"""What `vllmx quantize` keeps of a folder besides its weights, and what it says that it lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from vllmx.cli.quantize import quantize as command
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.core.generation_config import eos_ids
from vllmx_engine.text.gguf_backends import PRE_TOKENIZERS
from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.quantize.convert import Summary, quantize
from vllmx_models.formats.gguf.quantize.losses import COMPOSED, WHOLE_TOKENS
from vllmx_models.formats.safetensors import open_weights

REGISTRY = load_registry()
GLM = ("<|user|>", "<|observation|>")
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))


def edit(folder: Path, name: str, change: Edit) -> None:
    """Changes a JSON file of the folder, or makes it."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def convert(source: Path) -> Summary:
    return quantize(REGISTRY, source, source.parent / "out.gguf", "q4_0", threads=2)


def read(path: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """(tokenizer, sampling defaults, config) of a file."""
    checkpoint = open_checkpoint(REGISTRY, path)
    found = gguf_tokenizer(checkpoint.tokenizer), dict(checkpoint.generation_config)
    checkpoint.weights.close()
    return *found, checkpoint.config


def mark(tokenizer: dict[str, Any], *texts: str) -> list[int]:
    """Makes special tokens out of the last ones of the vocabulary; returns their ids."""
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    ids = []
    for text in texts:
        index = vocab.pop("".join(merges.pop()))
        vocab[text] = index
        entry = {**tokenizer["added_tokens"][0], "id": index, "content": text}
        tokenizer["added_tokens"].append(entry)
        ids.append(index)
    return ids


def ends_of(folder: Path) -> frozenset[int]:
    own = eos_ids(json.loads((folder / "generation_config.json").read_text()))
    return Tokenizer.from_folder(folder).eos_token_ids | set(own)


def set_ends(folder: Path, texts: tuple[str, ...], where: str) -> list[int]:
    ids: list[int] = []
    edit(folder, "tokenizer.json", lambda content: ids.extend(mark(content, *texts)))
    for name in ("config.json", "generation_config.json"):
        edit(folder, name, lambda content: content.pop("eos_token_id"))
    edit(folder, where, lambda content: content.update(eos_token_id=[0, *ids]))
    return ids


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("texts", [GLM, ("<stop>",), ("<stop>", "<halt>"), (*GLM, "<a>", "<b>")])
def test_the_file_ends_where_the_folder_does(
    folder: Path, texts: tuple[str, ...], where: str
) -> None:
    set_ends(folder, texts, where)
    summary = convert(folder)
    assert read(summary.path)[0].eos_token_ids == ends_of(folder)
    assert summary.lost == ()


def test_glm_has_the_keys_that_llama_cpp_writes(folder: Path) -> None:
    ids = set_ends(folder, GLM, "generation_config.json")
    checkpoint = open_checkpoint(REGISTRY, convert(folder).path)
    checkpoint.weights.close()
    keys = (checkpoint.tokenizer[f"tokenizer.ggml.{name}_token_id"] for name in ("eot", "eom"))
    assert list(keys) == ids


def test_roles_of_glm_end_a_sequence_without_a_key(folder: Path) -> None:
    """As in files of other converters; one of the two alone is a role of other models."""
    for texts, more in ((GLM, 2), (GLM[:1], 0)):
        edit(folder, "tokenizer.json", lambda content, texts=texts: mark(content, *texts))
        checkpoint = open_checkpoint(REGISTRY, convert(folder).path)
        checkpoint.weights.close()
        assert len(gguf_tokenizer(checkpoint.tokenizer).eos_token_ids) == 2 + more
        shutil.copy(MODEL_FOLDER / "tokenizer.json", folder)


def test_end_tokens_without_a_place_are_named(folder: Path) -> None:
    ids = set_ends(folder, ("<a>", "<b>", "<c>"), "config.json")
    summary = convert(folder)
    assert read(summary.path)[0].eos_token_ids == ends_of(folder) - {ids[2]}
    (line,) = summary.lost
    assert "end tokens '<c>'" in line
    assert "stop_token_ids" in line


def test_an_end_that_the_tokenizer_does_not_name(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", lambda content: content.pop("eos_token"))
    edit(folder, "generation_config.json", lambda content: content.update(eos_token_id=7))
    tokenizer = read(convert(folder).path)[0]
    assert tokenizer.eos_token_id == 7


def test_named_tokens_of_any_file_are_kept(folder: Path) -> None:
    def bare(content: dict[str, Any]) -> None:
        for name in ("bos_token", "eos_token", "pad_token"):
            content.pop(name)

    edit(folder, "tokenizer_config.json", bare)
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    edit(folder, "special_tokens_map.json", lambda content: content.update(special))
    ours, theirs = read(convert(folder).path)[0], Tokenizer.from_folder(folder)
    assert ours.bos_token_id == theirs.bos_token_id == 1
    assert ours.eos_token_id == theirs.eos_token_id == 2


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_another_file_declares_are_kept(folder: Path, name: str) -> None:
    def shorter(content: dict[str, Any]) -> None:
        del content["model"]["vocab"]["".join(content["model"]["merges"].pop())]

    edit(folder, "tokenizer.json", shorter)
    declared = {"4095": {"content": "<more>", "special": True}}
    edit(folder, "tokenizer_config.json", lambda content: content.pop("added_tokens_decoder"))
    if name == "added_tokens.json":
        edit(folder, name, lambda content: content.update({"<more>": 4095}))
    else:
        edit(folder, name, lambda content: content.update(added_tokens_decoder=declared))
    tokenizers = (read(convert(folder).path)[0], Tokenizer.from_folder(folder))
    for tokenizer in tokenizers:
        assert tokenizer.encode("a <more> b")[1:-1].count(4095) == 1


def test_bytes_that_are_spelt_as_characters_need_no_fallback(folder: Path) -> None:
    edit(folder, "tokenizer.json", lambda content: content["model"].update(byte_fallback=True))
    convert(folder)
    read_back, _, _ = read(folder.parent / "out.gguf")
    for text in ("Hello <think> world", "  two\n\n lines", "café 😀"):
        assert read_back.encode(text) == Tokenizer.from_folder(folder).encode(text)


def test_chat_templates_of_all_files_are_kept(folder: Path) -> None:
    legacy = {"chat_template": {"default": "old", "rag": "{{ rag }}"}}
    edit(folder, "chat_template.json", lambda content: content.update(legacy))
    (folder / "chat_template.jinja").write_text("{{ new }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    expected = {"default": "{{ new }}", "rag": "{{ rag }}", "tool_use": "{{ tools }}"}
    assert dict(Tokenizer.from_folder(folder).chat_templates) == expected
    assert dict(read(convert(folder).path)[0].chat_templates) == expected


def test_sampling_defaults_without_a_key_are_named(folder: Path) -> None:
    values = {
        "presence_penalty": 1.5,
        "max_new_tokens": 512,
        "top_k": 7.0,
        "min_p": "some",
        "transformers_version": "4.55.0",
        "do_sample": True,
        "typical_p": None,
    }
    edit(folder, "generation_config.json", lambda content: content.update(values))
    summary = convert(folder)
    assert set(summary.lost) == {
        "generation_config.json: presence_penalty = 1.5",
        "generation_config.json: max_new_tokens = 512",
        "generation_config.json: min_p = 'some'",
    }
    assert read(summary.path)[1]["top_k"] == 7


LOST: dict[str, tuple[str, Edit, str]] = {
    "normalizer": (
        "tokenizer.json",
        lambda content: content.update(normalizer={"type": "NFKC"}),
        "the normalizer NFKC",
    ),
    "spaces beside added tokens": (
        "tokenizer.json",
        lambda content: content["added_tokens"][1].update(rstrip=True),
        "added tokens with rstrip: '<|im_start|>'",
    ),
    "whole tokens": (
        "tokenizer.json",
        lambda content: content["model"].update(ignore_merges=True),
        "ignore_merges = True",
    ),
    "marks": (
        "tokenizer.json",
        lambda content: content.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {
                    "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
                },
            }
        ),
        "puts around a text: '<|im_start|>'",
    ),
    "a named token that is not there": (
        "tokenizer_config.json",
        lambda content: content.update(bos_token="<begin>"),
        "bos_token '<begin>': the vocabulary does not have it",
    ),
    "image tower": (
        "config.json",
        lambda content: content.update(vision_config={"depth": 2}),
        "vision_config, the part of the model that sees images",
    ),
    "end beyond the vocabulary": (
        "generation_config.json",
        lambda content: content.update(eos_token_id=[2, 0, 9999]),
        "the end token 9999: the model has none",
    ),
    "prompts": (
        "config_sentence_transformers.json",
        lambda content: content.update(prompts={"query": "Find: ", "document": ""}),
        "the prompts 'query', 'document'",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_is_lost_is_named(folder: Path, case: str) -> None:
    name, change, line = LOST[case]
    if case == "prompts":
        (folder / "modules.json").write_text("[]")
    edit(folder, name, change)
    (found,) = convert(folder).lost
    assert line in found


def test_pooling_is_kept(folder: Path) -> None:
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    edit(folder, "1_Pooling/config.json", lambda content: content.update(pooling_mode="lasttoken"))
    summary = convert(folder)
    assert summary.lost == ()
    kinds = read(summary.path)[2]["modules"]
    assert kinds == [{"kind": "pooling", "pooling": "last"}, {"kind": "normalize"}]
    again = quantize(REGISTRY, summary.path, folder / "again.gguf", "q4_0", threads=2)
    assert read(again.path)[2]["modules"] == kinds
    assert again.lost == ()


@pytest.mark.parametrize("case", ["another head", "the head alone"])
def test_a_tied_model_keeps_what_is_stored(folder: Path, case: str) -> None:
    path, table = folder / "model.safetensors", "model.embed_tokens.weight"
    source = open_weights(path)
    weights = {name: source.part(name).dequantize() for name in source.names()}
    source.close()
    head = weights[table].copy()
    if case == "another head":
        head[7, 7] = 3
    else:
        del weights[table]
    safetensors.numpy.save_file(weights | {"lm_head.weight": head}, path)
    written = quantize(REGISTRY, folder, folder.parent / "out.gguf", "f32", threads=2)
    file = GGUFFile(written.path)
    name = "output.weight" if case == "another head" else "token_embd.weight"
    found = file.data(name).view(np.float32)
    assert "token_embd.weight" in file.tensors
    assert ("output.weight" in file.tensors) == (case == "another head")
    file.close()
    np.testing.assert_array_equal(found, head.reshape(-1))
    assert written.lost == ()


def test_the_command_prints_it(folder: Path) -> None:
    def values(content: dict[str, Any]) -> None:
        content.update(frequency_penalty=0.5)

    edit(folder, "generation_config.json", values)
    arguments = [str(folder), str(folder.parent / "out.gguf"), "--type", "q4_0", "--quiet", "-y"]
    shown = CliRunner().invoke(command, arguments)
    line = "generation_config.json: frequency_penalty = 0.5"
    assert shown.output.endswith(f"not in the file:\n  {line}\n")
    shown = CliRunner().invoke(command, [*arguments, "--json"])
    assert json.loads(shown.output)["not_written"] == [line]


def test_a_folder_that_a_file_holds_wholly_says_nothing(folder: Path) -> None:
    assert convert(folder).lost == ()


def test_what_readers_do_is_what_the_converter_thinks() -> None:
    kinds = PRE_TOKENIZERS.items()
    assert {name for name, kind in kinds if kind.nfc} == COMPOSED
    assert {name for name, kind in kinds if kind.ignore_merges} == WHOLE_TOKENS
