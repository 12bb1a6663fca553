"""Short names of models: the list that ships, a user's own, and llama.cpp's presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from vllmx.cli.chat import chat
from vllmx.cli.presets import find_preset, presets
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the user's folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllmx").mkdir()
    return lambda name, text: (tmp_path / "vllmx" / name).write_text(text) and None


def config(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> EngineConfig:
    """The configuration with which a chat would load its model."""
    found: list[EngineConfig] = []
    monkeypatch.setattr("vllmx.cli.chat.open_chat", lambda config, *rest: found.append(config))
    result = CliRunner().invoke(chat, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_the_list_that_ships_has_no_mistakes(write: Write) -> None:
    found = presets()
    assert found["qwen3:4b"].model == "Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf"
    assert found["qwen3"].model == found["qwen3:8b"].model
    assert all(each.model.count("/") == 1 for each in found.values())


@pytest.mark.parametrize("name", ["demo", "org/repo", "./x", "no-such-name", "/", "x y"])
def test_other_names_are_left_alone(write: Write, name: str) -> None:
    assert find_preset(name) is None


def test_a_short_name_sets_what_flags_do_not(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "models.yaml",
        "mine:\n  repo: org/big\n  file: a.gguf\n  revision: v2\n  template: t.jinja\n"
        "  sampling: {temperature: 0.5, top_k: 7}\n  context: 4k\n  draft: qwen3:0.6b\n",
    )
    found = config(monkeypatch, "mine", "--max-model-len", "100", "--temp", "0.1")
    assert (found.model, found.revision, found.name) == ("org/big:a.gguf", "v2", "mine")
    assert found.max_model_len == 100
    assert found.chat_template is not None
    assert found.chat_template.endswith("vllmx/t.jinja")
    assert found.speculate == "model:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf"
    sampling = json.loads(found.override_generation_config or "")
    assert sampling in ({"temperature": 0.5, "top_k": 7}, {"temperature": 0.1, "top_k": 7})
    assert config(monkeypatch, "mine").max_model_len == 4000
    monkeypatch.setenv("VLLMX_MODEL", "mine")
    assert config(monkeypatch).model == "org/big:a.gguf"


def test_presets_of_llama_cpp_are_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "models.ini",
        "version = 1\n\n[*]\nc = 512\nn-gpu-layers = 99\n; a comment\n"
        "[org/repo:Q8_0]\nhf-repo = org/other\nLLAMA_ARG_CTX_SIZE = 256\ntemp = 0.25\n"
        "[local]\nmodel = ./my.gguf\njinja = true\nload-on-startup = false\n",
    )
    found = config(monkeypatch, "local")
    assert (found.model, found.max_model_len, found.name) == ("./my.gguf", 512, "local")
    other = config(monkeypatch, "org/repo:Q8_0")
    assert (other.model, other.max_model_len) == ("org/other", 256)
    assert json.loads(other.override_generation_config or "") == {"temperature": 0.25}
    write("models.ini", "[local]\nmodel = ./my.gguf\ncontxt-size = 3\n")
    with pytest.raises(ConfigError, match="unknown key 'contxt-size'; did you mean 'ctx-size'"):
        config(monkeypatch, "local")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {repo: x/y, smapling: {}}", "unknown key 'smapling'; did you mean 'sampling'"),
        ("a: {file: x.gguf}", "has no repo"),
        ("a: b", "leads to 'b', which is not a name"),
        ("a: a", "leads to 'a'"),
        ("a: [1]", "must be another name or have keys"),
        ("a: {repo: x/y, source: ftp}", "must be hub or modelscope"),
        ("a: {repo: x/y, sampling: hot}", "sampling must have keys"),
        ("a: {repo: x/y, context: long}", "context must be an integer"),
        ("a: {repo: [x]}", "repo must be a text"),
        ("a: {", "is not valid YAML"),
    ],
)
def test_mistakes_are_named(write: Write, text: str, message: str) -> None:
    write("models.yaml", text)
    with pytest.raises(ConfigError, match=r"models\.yaml") as error:
        find_preset("a")
    assert message in error.value.message


def test_a_broken_ini_is_named(write: Write) -> None:
    write("models.ini", "[a\nx")
    with pytest.raises(ConfigError, match="cannot be read as presets"):
        find_preset("a")
