"""Plugins: what is refused, what is recorded, and who wins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import (
    BackendUnavailableError,
    ConfigError,
    PluginClashError,
    PluginError,
    UnsupportedModelError,
)
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.providers import OUR_DISTRIBUTIONS
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import API_VERSION, BackendSpec, ModelSpec, WeightFormatSpec
from vllmx_testing.fake_checkpoint import FakePlugin, install_fake_plugin

HERE = __name__


def plugin(**hooks: Any) -> SimpleNamespace:
    """An object whose hooks return the given values."""

    def hook(name: str, value: Any) -> Callable[[], Any]:
        def function() -> Any:
            return value() if callable(value) else value

        function.__name__ = name
        return hookimpl(function)

    return SimpleNamespace(**{name: hook(name, value) for name, value in hooks.items()})


def backend(name: str, priority: int = 0, probe: str = "os:getpid") -> BackendSpec:
    return BackendSpec(name, "builtins:object", probe=probe, priority=priority)


def model(name: str, *architectures: str, **fields: Any) -> ModelSpec:
    return ModelSpec(name, "builtins:dict", architectures, **fields)


def test_a_conflict_breaks_only_what_uses_that_name() -> None:
    registry = Registry()
    registry.add(plugin(vllmx_backends=(backend("x"), backend("y"))), "first:p")
    models = (model("m", "A", "B"), model("n", "C"))
    registry.add(plugin(vllmx_backends=(backend("x"),), vllmx_models=models), "second:p")
    registry.add(plugin(vllmx_models=(model("o", "A"),)), "third:p")
    with pytest.raises(PluginClashError, match=r"backend 'x'.*first:p and second:p.*--prefer"):
        registry.get(BackendSpec, "x")
    with pytest.raises(PluginClashError, match=r"architecture 'A'.*second:p and third:p"):
        registry.model_for({"architectures": ["A"]})
    assert registry.get(BackendSpec, "y").name == "y"
    assert [spec.name for spec in registry.all(BackendSpec)] == ["y"]
    assert registry.model_for({"architectures": ["B"]}).name == "m"
    assert registry.model_for({"architectures": ["C"]}).name == "n"
    conflicts, notes = registry.conflicts()
    assert [line.split(" is ")[0] for line in conflicts] == ["architecture 'A'", "backend 'x'"]
    assert not notes
    registry.add(plugin(vllmx_weight_formats=(WeightFormatSpec("x", "a:b", ("*",)),)), "other:p")
    assert registry.get(WeightFormatSpec, "x").name == "x", "another kind is another name"
    with pytest.raises(PluginClashError, match=r"architecture 'A' is provided twice by fourth:p"):
        registry.add(plugin(vllmx_models=(model("q", "A"), model("r", "A"))), "fourth:p")


def test_the_user_decides_a_conflict() -> None:
    registry = Registry()
    specs = [backend("x"), backend("x"), backend("x")]
    for spec, key in zip(specs, ("first:p", "second:p", "third:p"), strict=True):
        registry.add(plugin(vllmx_backends=(spec,)), key)
    for wanted, winner in (("second", "second:p"), ("third:p", "third:p")):
        registry.prefer([wanted])
        assert registry.provider(registry.get(BackendSpec, "x")) == winner
        assert registry.conflicts()[0] == []
    with pytest.raises(ConfigError, match=r"--prefer 'secnd'.*did you mean 'second'\?"):
        registry.prefer(["secnd"])


def test_ours_wins_with_a_note_unless_the_plugin_is_preferred() -> None:
    """A plugin's architecture that vllmx later ships itself, beside one that it alone has."""
    registry = Registry()
    theirs = (model("acme-phi", "Phi", gguf_names=("phi",)), model("acme-new", "New"))
    registry.add(plugin(vllmx_models=(model("phi", "Phi", gguf_names=("phi",)),)), "vllmx-models:m")
    registry.add(plugin(vllmx_models=theirs), "acme:p")
    assert registry.model_for({"architectures": ["Phi"]}).name == "phi"
    assert registry.model_for({"architectures": ["New"]}).name == "acme-new"
    conflicts, notes = registry.conflicts()
    assert not conflicts
    assert (
        "architecture 'Phi' comes from vllmx-models:m, not from acme:p: --prefer acme" in notes[1]
    )
    registry.prefer(["acme"])
    assert registry.model_for({"architectures": ["Phi"]}).name == "acme-phi"
    found = registry.gguf_model_for("phi")
    assert found is not None
    assert found.name == "acme-phi"


def test_our_distributions_are_those_of_this_tree() -> None:
    packages = Path(__file__).parents[3] / "packages"
    assert {path.name for path in packages.iterdir()} == OUR_DISTRIBUTIONS


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"vllmx_backend": ()}, r"no hook 'vllmx_backend', did you mean vllmx_backends"),
        ({"vllmx_models": [model("m", "A")]}, "returned list, expected a tuple of ModelSpec"),
        ({"vllmx_models": None}, "returned NoneType"),
        ({"vllmx_models": (backend("x"),)}, "returned BackendSpec, expected ModelSpec"),
        ({"vllmx_models": (model("m", "A", api=API_VERSION + 1),)}, "upgrade vllmx"),
        ({"vllmx_models": lambda: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_a_wrong_plugin_is_refused_and_leaves_nothing(hooks: dict[str, Any], message: str) -> None:
    registry = Registry()
    with pytest.raises(PluginError, match=message):
        registry.add(plugin(vllmx_weight_formats=(), **hooks), "bad:p")
    assert not registry.plugins
    assert not registry.all(ModelSpec)
    registry.add(plugin(vllmx_models=(model("m", "A"),)), "bad:p")


def test_an_unmarked_hook_or_one_with_arguments_is_refused() -> None:
    def vllmx_models() -> tuple[ModelSpec, ...]:
        return ()

    def vllmx_backends(registry: Registry) -> tuple[BackendSpec, ...]:
        return ()

    with pytest.raises(PluginError, match="not marked"):
        Registry().add(SimpleNamespace(vllmx_models=vllmx_models), "bad:p")
    with pytest.raises(PluginError, match="bad:p"):
        Registry().add(SimpleNamespace(vllmx_backends=hookimpl(vllmx_backends)), "bad:p")


def test_failures_are_recorded_and_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllmx_test_broken.py").write_text("import does_not_exist\n")
    hook = "from vllmx_core.plugins.hooks import hookimpl\n@hookimpl\ndef vllmx_modles(): ...\n"
    (tmp_path / "vllmx_test_misspelt.py").write_text(hook)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint(name, value, "vllmx")
        for name, value in (
            ("a", "vllmx_test_broken"),
            ("b", "vllmx_test_misspelt"),
            ("c", "vllmx_testing.fake_checkpoint:FakePlugin"),
            ("c", "vllmx_testing.fake_checkpoint:FakePlugin"),
        )
    ]
    registry = load_registry(points)
    assert [info.key for info in registry.plugins] == ["unknown:a", "unknown:b", "unknown:c"]
    errors = [info.error for info in registry.plugins]
    assert "does_not_exist" in (errors[0] or "")
    assert "vllmx_models" in (errors[1] or "")
    assert errors[2] is None
    assert "backend fake" in registry.plugins[2].provides


def test_a_clash_between_installed_plugins_disturbs_nothing_else() -> None:
    core = EntryPoint("core", "vllmx_core.plugin", "vllmx")
    fake = EntryPoint("fake", "vllmx_testing.fake_checkpoint:FakePlugin", "vllmx")
    second = EntryPoint("second", f"{HERE}:SecondNumpy", "vllmx")
    registry = load_registry([core, fake, second])
    assert [info.error for info in registry.plugins] == [None, None, None]
    with pytest.raises(PluginClashError, match=r"backend 'numpy'.*unknown:core and unknown:second"):
        registry.choose_backend("numpy")
    assert registry.get(BackendSpec, "fake").name == "fake"
    twice = EntryPoint("twice", "vllmx_core.plugin", "vllmx")
    registry = load_registry([core, twice])
    assert "both unknown:core and unknown:twice" in (registry.plugins[1].error or "")
    assert registry.choose_backend("numpy")[0].name == "numpy"


class SecondNumpy:
    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        return (backend("numpy"),)


def test_unknown_names_list_the_known() -> None:
    registry = Registry()
    with pytest.raises(
        PluginError, match="no weight format named 'gguf'; known: none is installed"
    ):
        registry.get(WeightFormatSpec, "gguf")
    registry.add(FakePlugin, "test:fake")
    with pytest.raises(PluginError, match="no backend named 'x'; known: fake"):
        registry.get(BackendSpec, "x")


def test_the_architecture_decides_and_the_model_type_stands_in() -> None:
    registry = Registry()
    specs = (model("one", "A", model_types=("a",)), model("two", "B", "C"))
    registry.add(plugin(vllmx_models=specs), "p:p")
    assert registry.model_for({"architectures": ["X", "C"]}).name == "two"
    assert registry.model_for({"model_type": "a"}).name == "one"
    wrong: list[dict[str, Any]] = [
        {},
        {"architectures": ["X"], "model_type": "a"},
        {"architectures": "A"},
        {"architectures": [1]},
        {"architectures": 7},
    ]
    for config in wrong:
        with pytest.raises(UnsupportedModelError, match="known: A, B, C"):
            registry.model_for(config)


def no(reason: str = "no device: buy one") -> str:
    return reason


def broken() -> str:
    raise OSError("driver gone")


def runs() -> None:
    return None


def test_auto_takes_the_greatest_priority_that_runs_and_says_why() -> None:
    registry = Registry()
    specs = (
        backend("big", 9, f"{HERE}:no"),
        backend("odd", 8, f"{HERE}:broken"),
        backend("small", 1, f"{HERE}:runs"),
        backend("smaller", 0, f"{HERE}:runs"),
        backend("hidden", -1, f"{HERE}:runs"),
    )
    registry.add(plugin(vllmx_backends=specs), "p:p")
    spec, reason = registry.choose_backend()
    assert spec.name == "small"
    assert "big: no device" in reason
    assert "odd: its probe failed: OSError: driver gone" in reason
    assert registry.choose_backend("hidden")[0].name == "hidden"
    for name in ("big", "odd"):
        with pytest.raises(BackendUnavailableError, match=name):
            registry.choose_backend(name)


def test_auto_without_a_backend_that_runs_lists_every_reason() -> None:
    registry = Registry()
    with pytest.raises(BackendUnavailableError, match="pip install"):
        registry.choose_backend()
    registry.add(plugin(vllmx_backends=(backend("big", 9, f"{HERE}:no"),)), "p:p")
    with pytest.raises(BackendUnavailableError, match="big: no device"):
        registry.choose_backend()
    specs = (backend("numpy", -1, f"{HERE}:runs"), backend("metal", -1, f"{HERE}:runs"))
    registry.add(plugin(vllmx_backends=(*specs, backend("torch", -1, f"{HERE}:no"))), "q:q")
    with pytest.raises(BackendUnavailableError) as caught:
        registry.choose_backend()
    assert "pip install 'vllmx[cpu]'; or ask for one by its name: " in caught.value.message
    assert caught.value.message.endswith("--backend metal or numpy")


def test_the_only_backend_that_can_run_is_chosen_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry()
    specs = (
        backend("big", 9, f"{HERE}:no"),
        backend("numpy", -2, f"{HERE}:runs"),
        backend("torch", -1, f"{HERE}:runs"),
    )
    registry.add(plugin(vllmx_backends=specs), "p:p")
    spec, reason = registry.choose_backend()
    assert spec.name == "torch"
    assert "the only one that can run here" in reason
    assert "big: no device: buy one" in reason
    assert "pip install 'vllmx[cpu]'" in caplog.text


@pytest.mark.parametrize("name", ["cpu", "cuda", "metal", "torch"])
def test_a_backend_of_ours_that_is_not_installed_is_named_with_the_command(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=rf"pip install 'vllmx\[{name}\]'"):
        Registry().choose_backend(name)


def test_a_missing_implementation_is_named() -> None:
    for implementation in ("does_not_exist:x", "os:does_not_exist"):
        with pytest.raises(PluginError, match=implementation):
            BackendSpec("x", implementation, probe="os:getpid", priority=0).load()


def test_core_registers_without_numpy() -> None:
    code = (
        "import sys; import vllmx_core.plugins.registry as r;"
        "registry = r.Registry();"
        "import vllmx_core.plugin as p; registry.add(p, 'core');"
        "assert registry.choose_backend('numpy')[0].name == 'numpy';"
        "assert 'numpy' not in sys.modules and 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_see_the_fake_plugin_by_its_folder(tmp_path: Path) -> None:
    folder = install_fake_plugin(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r});"
        "from vllmx_core.plugins.registry import load_registry; registry = load_registry();"
        "print([p.key for p in registry.plugins if not p.error and 'fake' in p.key])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['vllmx-fake:fake']"
