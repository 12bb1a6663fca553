"""Several models by flags and in the YAML file, and what is wrong with some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from vllmx.cli import serve as serve_module
from vllmx.cli.serve import serve
from vllmx_core.errors import ConfigError
from vllmx_server.host.models.config import ModelConfig


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, list[ModelConfig]]:
    """What `vllmx serve` would run: the first engine, and all models where they are several."""
    found: list[Any] = []
    monkeypatch.setattr(serve_module, "hold_standard_streams", lambda: None)
    monkeypatch.setattr(
        "vllmx_server.host.run.run_server",
        lambda engine, server, *, models, on_ready: found.append((engine, models)),
    )
    done = CliRunner().invoke(serve, list(arguments), catch_exceptions=True)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exception is None, done.exception
    return found[0]  # type: ignore[no-any-return]


def test_flags_and_keys_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, models = asked(
        monkeypatch,
        "--max-num-seqs=9",
        "--model=small=/models/a,max_num_seqs=4,alias=s,alias=tiny",
        "--model=big=/models/b,load=on-demand,dtype=f32",
    )
    assert [(each.name, each.engine.model) for each in models] == [
        ("small", "/models/a"),
        ("big", "/models/b"),
    ]
    assert engine == models[0].engine
    assert [each.engine.max_num_seqs for each in models] == [4, 9]
    assert models[0].aliases == ("s", "tiny")
    assert [each.on_demand for each in models] == [False, True]


def test_a_model_alone_is_what_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    for argument in ("/models/a", str(odd), "org/repo:file.gguf"):
        engine, models = asked(monkeypatch, "--model", argument)
        assert (engine.model, models) == (argument, [])
    assert asked(monkeypatch, "--model", "one=/models/a")[1][0].name == "one"


def test_models_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "vllmx.yaml"
    path.write_text(
        "max-num-seqs: 7\nmodels:\n- small=/models/a\n"
        "- {name: big, model: /models/b, load: on-demand, aliases: [b, large], dtype: f16}\n"
    )
    _, models = asked(monkeypatch, "--config", str(path))
    assert [each.name for each in models] == ["small", "big"]
    assert models[1].aliases == ("b", "large")
    assert {each.engine.max_num_seqs for each in models} == {7}


@pytest.mark.parametrize("alias", ["{x: 1}", "[[b]]", "['']", "null"])
def test_an_alias_is_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alias: str) -> None:
    path = tmp_path / "vllmx.yaml"
    path.write_text(f"models:\n- {{name: a, model: /models/a, alias: {alias}}}\n")
    with pytest.raises(ConfigError, match="as alias: it must be a name or several"):
        asked(monkeypatch, "--config", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=a=/x", "--model=a=/y"], "two models are called 'a'"),
        (["--model=a=/x,alias=b", "--model=b=/y"], "two models are called 'b'"),
        (["--model=a=/x", "--model=/y"], "has no name"),
        (["--model=a=/x,lod=start", "--model=b=/y"], "unknown key 'lod'; did you mean 'load'"),
        (["--model=a=/x,load=never", "--model=b=/y"], "load=never"),
        (["--model=a=/x,load=on-demand"], "first one"),
        (["--model=a=/x,dtype", "--model=b=/y"], "'dtype' is not of the form key=value"),
        (["--model=a=/x", "--model=b=/y", "/z"], "'/z' needs a name to be served with others"),
        (
            ["--model=a=/x,memory_fraction=0.7", "--model=b=/y,memory_fraction=0.4"],
            r"take 1.1 of the memory by memory_fraction \(a 0.7, b 0.4\).*lower some",
        ),
        (["--model=a=/x,memory_fraction=0.9", "--model=b=/y"], "leaves nothing of 0.9 for b"),
        (["--model=a=/x,memory_fraction=2", "--model=b=/y"], "above 0 and at most 1, got 2"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(monkeypatch, *arguments)


def test_models_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(*arguments: str) -> list[float | None]:
        engine, models = asked(monkeypatch, *arguments)
        assert engine == models[0].engine
        assert models[0].memory_part in (None, engine.memory_fraction)
        return [each.memory_part and round(each.memory_part, 6) for each in models]

    more = ("--model=b=/y", "--model=c=/z", "--model=d=/u,load=on-demand")
    assert parts("--model=a=/x", *more) == [0.3, 0.3, 0.3, None]
    assert parts("--model=a=/x", *more, "--memory-fraction=0.6") == [0.2, 0.2, 0.2, None]
    assert parts("--model=a=/x,memory_fraction=0.5", *more) == [0.5, 0.2, 0.2, None]
    sized = "--model=a=/x,kv_cache_memory_bytes=1GiB"
    assert parts(sized, *more) == [None, 0.45, 0.45, None]
    on_demand = ("--model=b=/y", "--model=c=/z,load=on-demand,memory_fraction=0.8")
    assert parts("--model=a=/x", *on_demand) == [0.45, 0.45, 0.8]


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (("--served-model-name", "a", "b", "007"), ""),
        (("--served-model-name", "a", "--served-model-name", "b", "-a", "007"), ""),
        ((), "served-model-name: [a, b, 007]"),
        ((), "alias: [a, b, 007]"),
        (("--served-model-name", "a", "b", "007"), "served-model-name: [c, d]"),
    ],
)
def test_one_model_of_several_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], content: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    engine, (model,) = asked(monkeypatch, "/x", *arguments, "--config", str(file))
    assert (engine.name, model.name, model.engine.model) == ("a", "a", "/x")
    assert model.aliases == ("b", "007")


@pytest.mark.parametrize(
    ("content", "mode", "warns"),
    [("api-key: a", 0o644, 1), ("admin_key: a", 0o640, 1), ("api-key: a", 0o600, 0),
     ("port: 1", 0o644, 0)],
)  # fmt: skip
def test_keys_in_a_readable_config_file_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    content: str,
    mode: int,
    warns: int,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    file.chmod(mode)
    asked(monkeypatch, "/x", "--config", str(file))
    assert sum("may be read by others" in r.getMessage() for r in caplog.records) == warns
