"""The example of a third party, as a third party's users meet it: a wheel that pip installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
from vllmx_core.backend import LoadOptions
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Driver
from vllmx_testing.plugins import check_plugin

registry = load_registry()
info = next(p for p in registry.plugins if p.key == "vllmx-example-model:example-model")
assert info.error is None, info
config = {
    "architectures": ["PhiForCausalLM"], "vocab_size": 61, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}
model = registry.model_for(config).load()(config)
source = random_weights(model)
options = LoadOptions(dtype="f32", max_model_len=64, num_kv_blocks=64, max_num_seqs=4)
ids = {}
for spec in registry.all(BackendSpec):
    if spec.unavailable_reason() is None:
        loaded = spec.load()().load(model, source, options)
        ids[spec.name] = Driver(loaded, chunk=7).generate([[1, 2, 3], list(range(20))], 16)
        loaded.close()
provides = check_plugin("vllmx_example_model.plugin").provides
print(json.dumps({"version": info.version, "provides": provides, "ids": ids}))
"""


def run(*command: str, **environment: str) -> str:
    """Standard output; the rest is shown when it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH into which pip installed the example's wheel, without a network."""
    folder = tmp_path_factory.mktemp("example")
    example = str(root / "examples" / "vllmx-example-model")
    offline = ("-q", "--no-deps", "--no-index")
    run("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", str(folder), example)
    (wheel,) = folder.glob("vllmx_example_model-*.whl")
    run("-m", "pip", "install", *offline, "--target", str(folder / "site"), str(wheel))
    return str(folder / "site")


def test_the_registry_finds_it_and_its_model_runs_on_every_backend(installed: str) -> None:
    found = json.loads(run("-c", SCRIPT, PYTHONPATH=installed).splitlines()[-1])
    assert found["version"] == "0.1.0"
    assert found["provides"] == [
        "model phi",
        "model flex-olmo",
        "model mamba2",
        "model olmo-hybrid",
        "model electra",
        "model electra-classifier",
    ]
    expected = found["ids"]["numpy"]
    assert [len(output) for output in expected] == [16, 16]
    assert all(ids == expected for ids in found["ids"].values()), found["ids"]


def test_its_own_tests_pass(root: Path, installed: str) -> None:
    tests = str(root / "examples" / "vllmx-example-model" / "tests")
    run("-m", "pytest", tests, "-p", "no:cacheprovider", PYTHONPATH=installed)


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("An MoE decoder in one file", "flex_olmo.py"),
        ("Recurrent layers in one file", "mamba2.py"),
        ("A hybrid in one file", "olmo_hybrid.py"),
        ("A model that answers with vectors in one file", "electra.py"),
    ],
)
def test_the_tutorial_shows_the_file_that_is_tested(root: Path, heading: str, name: str) -> None:
    page = (root / "docs" / "plugins.md").read_text()
    part = page.split(f"### {heading}\n")[1].split("\n##")[0]
    blocks = [block.split("```")[0] for block in part.split("```python\n")[1:]]
    package = root / "examples" / "vllmx-example-model" / "src" / "vllmx_example_model"
    source = (package / name).read_text()
    assert len(blocks) == 2
    assert all(block.strip() in source for block in blocks)
