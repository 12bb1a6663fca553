"""The recipes of other package managers that a release fills in."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAMES = ("-core", "-engine", "-models", "-server", "-demo", "-cpu", "")


def filled(root: Path, tmp_path: Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The formula, the recipe of conda, and the digest of each sdist, for version 1.2.3."""
    digests = {}
    for name in NAMES:
        data = name.encode()
        (tmp_path / f"vllmx{name.replace('-', '_')}-1.2.3.tar.gz").write_bytes(data)
        digests[f"vllmx{name}"] = hashlib.sha256(data).hexdigest()
    script, out = root / "docs/deploy/recipes/fill.py", tmp_path / "out"
    subprocess.run([sys.executable, script, tmp_path, "1.2.3", out], check=True)
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    return (out / "vllmx.rb").read_text(), recipe, digests


def test_versions_and_digests_are_filled_in(root: Path, tmp_path: Path) -> None:
    formula, recipe, digests = filled(root, tmp_path)
    assert f'vllmx-1.2.3.tar.gz"\n  sha256 "{digests["vllmx"]}"' in formula
    assert recipe["context"] == {"version": "1.2.3"}
    assert {one["target_directory"]: one["sha256"] for one in recipe["source"]} == digests
    assert "@VERSION" not in formula
    assert "@SHA256" not in formula + str(recipe)
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c", tmp_path / "out" / "vllmx.rb"], check=True)


def test_the_recipe_of_conda_requires_what_the_packages_do(root: Path, tmp_path: Path) -> None:
    wanted = {}
    for name in NAMES:
        project = tomllib.loads((root / f"packages/vllmx{name}/pyproject.toml").read_text())
        for line in project["project"]["dependencies"]:
            requirement = Requirement(line)
            if not requirement.name.startswith("vllmx-"):
                wanted[canonicalize_name(requirement.name)] = requirement.specifier
        wanted["python"] = Requirement(f"python{project['project']['requires-python']}").specifier
    _, recipe, _ = filled(root, tmp_path)
    listed = map(Requirement, recipe["requirements"]["run"])
    assert {canonicalize_name(one.name): one.specifier for one in listed} == wanted
