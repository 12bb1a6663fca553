"""The distributions agree with each other, and with what the README and CI say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from vllmx_core.plugins.backend_choice import PACKAGED_BACKENDS

EXPECTED = {
    "vllmx",
    "vllmx-core",
    "vllmx-cpu",
    "vllmx-cuda",
    "vllmx-demo",
    "vllmx-engine",
    "vllmx-metal",
    "vllmx-models",
    "vllmx-ray",
    "vllmx-server",
    "vllmx-testing",
    "vllmx-torch",
    "vllmx-tp",
}


def test_the_list_of_packages_is_the_one_that_the_design_names(
    projects: dict[str, dict[str, Any]],
) -> None:
    assert set(projects) == EXPECTED
    assert all(data["project"]["name"] == name for name, data in projects.items())


def test_all_versions_are_equal_and_siblings_are_pinned_exactly(
    root: Path, projects: dict[str, dict[str, Any]]
) -> None:
    versions = {data["project"]["version"] for data in projects.values()}
    assert len(versions) == 1
    version = versions.pop()
    for name, data in projects.items():
        extras = data["project"].get("optional-dependencies", {})
        for requirement in (
            *data["project"]["dependencies"],
            *(r for v in extras.values() for r in v),
        ):
            if requirement.startswith("vllmx"):
                assert requirement.split("==")[0].split("[")[0] in EXPECTED
                assert requirement.partition(";")[0].endswith(f"=={version}")
        module = name.replace("-", "_")
        init = (root / "packages" / name / "src" / module / "__init__.py").read_text()
        assert re.search(rf'^__version__ = "{re.escape(version)}"$', init, re.M), name
        assert (root / "packages" / name / "src" / module / "py.typed").exists(), name


def test_every_package_is_built_the_same_way(projects: dict[str, dict[str, Any]]) -> None:
    for name, data in projects.items():
        assert data["build-system"]["build-backend"] == "hatchling.build", name
        wheel = data["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel["core-metadata-version"] == "2.4", name
        assert data["project"]["license"] == "Apache-2.0", name
        assert data["project"]["requires-python"] == ">=3.11,<3.14", name


def test_requirements_list_every_package(root: Path) -> None:
    """torch comes with the developers' requirements alone: nobody gets it without asking."""
    users = (root / "requirements.txt").read_text()
    developers = (root / "requirements-dev.txt").read_text().splitlines()
    listed = {f"-e packages/{name}" for name in EXPECTED}
    assert "torch" not in users
    assert listed <= {*users.splitlines(), *developers}


def test_backends_that_are_extras(projects: dict[str, dict[str, Any]]) -> None:
    """The error of one that is not installed names the extra."""
    extras = projects["vllmx"]["project"]["optional-dependencies"]
    for name in PACKAGED_BACKENDS:
        assert [Requirement(need).name for need in extras[name]] == [f"vllmx-{name}"]


def test_all_is_every_backend_of_the_platform(projects: dict[str, dict[str, Any]]) -> None:
    needs = [
        Requirement(need) for need in projects["vllmx"]["project"]["optional-dependencies"]["all"]
    ]
    for system, machine, missing in (
        ("linux", "x86_64", {"vllmx-metal"}),
        ("darwin", "arm64", {"vllmx-cuda"}),
        ("darwin", "x86_64", {"vllmx-cuda", "vllmx-metal"}),
    ):
        environment = {"sys_platform": system, "platform_machine": machine}
        found = {
            need.name for need in needs if need.marker is None or need.marker.evaluate(environment)
        }
        assert found == {f"vllmx-{name}" for name in PACKAGED_BACKENDS} - missing


def test_the_kit_brings_pytest(projects: dict[str, dict[str, Any]]) -> None:
    """Nobody who installs vllmx gets the suites, nor the emulator."""
    needs = projects["vllmx-testing"]["project"]["dependencies"]
    assert "pytest" in [Requirement(need).name for need in needs]
    for name, data in projects.items():
        assert not [need for need in data["project"]["dependencies"] if "vllmx-testing" in need], (
            name
        )


def test_every_package_has_the_license(root: Path, projects: dict[str, dict[str, Any]]) -> None:
    """A copy in each, for a wheel takes nothing from outside of its folder."""
    for name, data in projects.items():
        assert data["project"]["license-files"] == ["LICENSE"], name
        assert (root / "packages" / name / "LICENSE").read_text() == (root / "LICENSE").read_text()


def test_no_extra_but_its_own_pulls_torch(projects: dict[str, dict[str, Any]]) -> None:
    extras = projects["vllmx"]["project"]["optional-dependencies"]
    assert {name for name, needs in extras.items() if "torch" in str(needs)} == {
        "torch",
        "transformers",
        "all",
    }
    needs_torch = {
        name for name, data in projects.items() if "torch" in str(data["project"]["dependencies"])
    }
    assert needs_torch == {"vllmx-torch"}


def test_mlx_comes_with_the_metal_backend_alone(projects: dict[str, dict[str, Any]]) -> None:
    """Built for Apple's GPUs on a Mac; its CPU build, for tests, on Linux."""
    needs = {
        name: [need for need in data["project"]["dependencies"] if need.startswith("mlx")]
        for name, data in projects.items()
    }
    assert {name for name, found in needs.items() if found} == {"vllmx-metal"}
    assert projects["vllmx"]["project"]["optional-dependencies"]["metal"] == [
        "vllmx-metal==" + (projects["vllmx-metal"]["project"]["version"])
    ]
    wanted = {
        ("darwin", "arm64"): [set()],
        ("darwin", "x86_64"): [],
        ("linux", "x86_64"): [{"cpu"}],
        ("linux", "aarch64"): [{"cpu"}],
    }
    for (system, machine), extras in wanted.items():
        environment = {"sys_platform": system, "platform_machine": machine}
        found = [Requirement(need) for need in needs["vllmx-metal"]]
        installed = [need for need in found if need.marker and need.marker.evaluate(environment)]
        assert [need.extras for need in installed] == extras, (system, machine)


def test_the_readme_shows_the_commands_that_ci_runs(root: Path) -> None:
    readme = (root / "README.md").read_text()
    ci = (root / ".ci" / "run").read_text()
    for command in (
        "python3 -m venv .venv",
        ".venv/bin/pip install -r requirements-dev.txt",
        ".venv/bin/python -m pytest",
    ):
        assert command in readme
        assert command in ci
