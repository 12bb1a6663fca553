"""Flags, environment, config file: who wins, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from vllmx.cli.command import ModelCommand
from vllmx.cli.flag_texts import HELP
from vllmx.cli.options import engine_options, options_of, resolve
from vllmx.cli.serve import HELP as SERVER_HELP
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, ModelNotFoundError
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.checked_flags import check_flags
from vllmx_engine.engine import Engine
from vllmx_engine.text.model_files import template_of
from vllmx_server.config import ServerConfig


def configs(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    """What a command with these arguments would be configured with."""
    found: list[Any] = []

    @click.command(cls=ModelCommand)
    @engine_options
    @options_of(ServerConfig, SERVER_HELP)
    def command(**flags: Any) -> None:
        found.extend(resolve((EngineConfig, ServerConfig), flags))

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return found[0], found[1]


def test_every_field_has_a_flag_with_help() -> None:
    assert set(HELP) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(SERVER_HELP) == {field.name for field in dataclasses.fields(ServerConfig)}


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 32\napi-key: [a, b]\n")
    monkeypatch.setenv("VLLMX_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("VLLMX_PORT", "4")
    engine, server = configs("--config", str(file), "--port", "5")
    assert (server.port, engine.max_num_seqs, engine.block_size) == (5, 3, 32)
    assert server.api_key == ("a", "b")
    assert engine.max_queue == EngineConfig().max_queue
    assert configs("--config", str(file), "--max-num-seqs", "none")[0].max_num_seqs is None


def test_the_config_file_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 7\n")
    monkeypatch.setenv("VLLMX_CONFIG", str(file))
    assert configs()[0].seed == 7


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--m", "x"], "model", "x"),
        (["--w", "x"], "model", "x"),
        (["--f", "x"], "model", "x"),
        (["x"], "model", "x"),
        (["--d", "cpu"], "backend", "cpu"),
        (["--no-context-cache"], "enable_prefix_caching", False),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--gpu-memory-utilization", "0.5"], "memory_fraction", 0.5),
        (["--target-itl", "none"], "target_itl", "none"),
        (["--max-model-len", "77"], "max_model_len", 77),
    ],
)
def test_aliases_of_both_families(arguments: list[str], name: str, value: object) -> None:
    assert getattr(configs(*arguments)[0], name) == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a", "--model", "b"], "named twice"),
        (["--max-model-len", "many"], "--max-model-len must be an integer, got 'many'"),
        (["--max-model-len", "0"], "between 1 and"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--block-size", "7"], "--block-size must be"),
        (["--memory-fraction", "1.5"], "--memory-fraction"),
        (["--ssl-certfile", "x"], "go together"),
        (["--config", "missing.yaml"], "cannot read the config file"),
    ],
)
def test_bad_values_name_the_flag_and_the_limit(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configs(*arguments)


LAUGHS = "- &a0 [1]\n" + "".join(
    f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
)
"""A list that is short to write, and has more members than anybody could look through."""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("prot: 1", "unknown key 'prot'"),
        ("- 1", "must hold keys and values"),
        ("{", "not valid YAML"),
        ("? {a: 1, a: 2}\n: 3", r"not valid YAML: [^\n]*unhashable key[^\n]*$"),
        (LAUGHS, "must hold keys and values"),
        ("port: 1\nport: 2", "the key 'port' twice: keep one"),
        ("models:\n- {name: a, model: /x, dtype: f16, dtype: bf16}", "the key 'dtype' twice"),
        ("a: " + "[" * 5000 + "]" * 5000, "not valid YAML"),
        ("port: [1]", "port"),
        ("enforce-eager: perhaps", "must be true or false"),
    ],
)
def test_bad_config_files_are_refused(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=text):
        configs("--config", str(file))


def test_a_bad_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMX_SEED", "x")
    with pytest.raises(ConfigError, match="VLLMX_SEED"):
        configs()


def test_yaml_reads_off_as_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("speculate: off\n")
    monkeypatch.setenv("VLLMX_SPECULATE", "ngram")
    assert configs("--config", str(file))[0].speculate == "ngram"
    monkeypatch.delenv("VLLMX_SPECULATE")
    assert configs("--config", str(file))[0].speculate == "off"


@pytest.mark.parametrize(
    ("written", "text"),
    [("007", "007"), ("1.10", "1.10"), ("0x1F", "0x1F"), ("1_000", "1_000"), ("12:30", "12:30"),
     ("7", "7"), (".5", ".5"), ("'007'", "007")],
)  # fmt: skip
def test_numbers_of_the_file_are_texts_as_they_are_written(
    tmp_path: Path, written: str, text: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"served-model-name: {written}\napi-key: [{written}, b]\nmax-num-seqs: 0x10\n")
    engine, server = configs("--config", str(file))
    assert (engine.name, server.api_key, engine.max_num_seqs) == (text, (text, "b"), 16)


@pytest.mark.parametrize("written", ["yes", "2024-01-01", "[yes]"])
def test_what_is_no_text_is_refused(tmp_path: Path, written: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"served-model-name: {written}\n")
    with pytest.raises(ConfigError, match="must be a text"):
        configs("--config", str(file))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--served-model-name", "a", "b"],
        ["m", "--served-model-name", "a", "b", "--port", "1"],
        ["--served-model-name", "a", "--port", "1", "--alias", "b"],
        ["--served_model_name=a", "-a", "b"],
    ],
)
def test_other_commands_take_the_first_of_several_names(arguments: list[str]) -> None:
    assert configs(*arguments)[0].name == "a"


@pytest.mark.parametrize("model", ["org/model", "demo", "."])
def test_a_model_behind_names_is_the_model(model: str) -> None:
    engine = configs("--served-model-name", "a", "b", model)[0]
    assert (engine.name, engine.model) == ("a", model)
    assert configs("--served-model-name", "a", model)[0].model == model


def test_a_template_in_one_line_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = load_registry()
    line = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(line)
    for flag in (line, str(tmp_path / "t.jinja")):
        config = configs("--chat-template", flag)[0]
        check_flags(config, registry)
        assert template_of(config.chat_template) == line
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{x}").write_text("of the file")
    assert template_of("{x}") == "of the file"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--chat-template", "none.jinja"), "--chat-template none.jinja does not exist"),
        (("--chat-template", "{% for %}"), "--chat-template cannot be used: "),
        (("--tool-parser", "hermess"), "is not a known format; did you mean 'hermes'"),
        (("--override-generation-config", '{"top_k": "x"}'), "has a bad value"),
        (("--generation-config", "/none"), "/none.* does not exist"),
        (("--chat-template-kwargs", "{"), "must be a JSON object"),
        (("--tokenizer", "/none"), "--tokenizer /none does not exist"),
    ],
)
def test_flags_are_checked_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], text: str
) -> None:
    def looked_for(*_: object, **__: object) -> None:
        raise AssertionError("the model was looked for")

    monkeypatch.setattr("vllmx_engine.client.inline.find_model", looked_for)
    config = configs(*arguments)[0]
    with pytest.raises((ConfigError, ModelNotFoundError), match=text):
        check_flags(config)
    with pytest.raises((ConfigError, ModelNotFoundError), match=text):
        Engine(config)
