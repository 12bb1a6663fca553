"""check_plugin finds what a plugin's author got wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllmx_core.errors import PluginError
from vllmx_testing.plugins import check_plugin

HEADER = """
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec, ModelSpec, WeightFormatSpec
"""
MODEL = """
@hookimpl
def vllmx_models():
    return (ModelSpec("m", {implementation!r}, ("A",)),)
"""
BACKEND = """
def probe():
    {probe}

@hookimpl
def vllmx_backends():
    return (BackendSpec("b", {implementation!r}, probe=__name__ + ":probe", priority=1),)
"""
GOOD_BACKEND = "vllmx_core.reference.backend:ReferenceBackend"


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> tuple[str, ...]:
    """Writes a plugin module and checks it, here and in the fresh interpreter."""
    (folder / f"{name}.py").write_text(HEADER + source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return check_plugin(name).provides


def test_a_good_plugin_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODEL.format(implementation="vllmx_testing.fake_checkpoint:FakeModel")
    source += BACKEND.format(implementation=GOOD_BACKEND, probe="return 'no device: buy one'")
    provides = check(tmp_path, monkeypatch, "vllmx_good", source)
    assert provides == ("backend b", "model m")


PROBLEMS = {
    "nothing": ("", "provides nothing"),
    "misspelt": ("@hookimpl\ndef vllmx_model():\n    return ()", "did you mean vllmx_models"),
    "unmarked": ("def vllmx_models():\n    return ()", "not marked"),
    "no_module": (MODEL.format(implementation="nowhere.at_all:X"), "nowhere.at_all"),
    "no_attribute": (MODEL.format(implementation="os.path:Nothing"), "Nothing"),
    "no_colon": (MODEL.format(implementation="os.path"), "not 'package.module:attribute'"),
    "not_callable": (MODEL.format(implementation="os.path:sep"), "not callable"),
    "no_gguf": (
        MODEL.format(implementation="builtins:dict").replace(
            '("A",))', '("A",), gguf_names=("a",), gguf="os.path:Nothing")'
        ),
        "cannot import 'os.path:Nothing'",
    ),
    "half_gguf": (
        MODEL.format(implementation="builtins:dict").replace('("A",))', '("A",), gguf="x:y")'),
        "go together",
    ),
    "heavy_import": (
        "import numpy\n" + MODEL.format(implementation="builtins:dict"),
        "importing it imports numpy",
    ),
    "heavy_probe": (
        BACKEND.format(implementation=GOOD_BACKEND, probe="import numpy"),
        "its hooks or probes import numpy",
    ),
    "failing_probe": (
        BACKEND.format(implementation=GOOD_BACKEND, probe="raise OSError('gone')"),
        "its probe raised OSError: gone",
    ),
    "odd_probe": (
        BACKEND.format(implementation=GOOD_BACKEND, probe="return True"),
        "its probe returned True",
    ),
    "no_backend": (
        BACKEND.format(implementation="builtins:dict", probe="return None"),
        "has no name, load, environment",
    ),
    "doubled": (
        "@hookimpl\ndef vllmx_models():\n"
        "    return tuple(ModelSpec('m', 'builtins:dict', (a,)) for a in 'AB')",
        "model 'm' is provided twice",
    ),
    "not_a_function": ("vllmx_models = ()", "vllmx_models is not a function"),
    "no_prefix": ("def vlmx_models():\n    return ()", "did you mean vllmx_models"),
    "other_name": ("@hookimpl\ndef my_hook():\n    return ()", "my_hook"),
    "nobody_reads": (
        "@hookimpl\ndef vllmx_readers():\n    return ()",
        "vllmx_readers",
    ),
    "no_way_to_it": (
        MODEL.format(implementation="builtins:dict").replace('("A",)', "()"),
        "names no architecture",
    ),
    "capitals": (
        "from vllmx_core.plugins.specs import QuantizerSpec\n@hookimpl\ndef vllmx_quantizers():\n"
        "    return (QuantizerSpec('Q4', 'builtins:dict'),)",
        "small letters",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, message = PROBLEMS[name]
    with pytest.raises(PluginError) as caught:
        check(tmp_path, monkeypatch, f"vllmx_bad_{name}", source)
    assert message in caught.value.message


def test_every_problem_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODEL.format(implementation="os.path:sep")
    source += BACKEND.format(implementation=GOOD_BACKEND, probe="return 3")
    with pytest.raises(PluginError, match=r"probe returned 3.*not callable"):
        check(tmp_path, monkeypatch, "vllmx_bad_twice", source)


def test_a_plugin_that_cannot_be_imported_is_named() -> None:
    for plugin in ("does_not_exist.plugin", "vllmx_core.plugin:nothing"):
        with pytest.raises(PluginError, match=plugin):
            check_plugin(plugin)


@pytest.mark.parametrize("plugin", ["vllmx_core", "vllmx_models", "vllmx_cpu", "vllmx_demo"])
def test_our_own_plugins_pass(plugin: str) -> None:
    pytest.importorskip(f"{plugin}.plugin")
    assert check_plugin(f"{plugin}.plugin").provides
