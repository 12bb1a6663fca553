"""What users get: the contents and metadata of the wheels, built as a release builds them."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PURE = (
    "vllmx", "vllmx-core", "vllmx-engine", "vllmx-models", "vllmx-server", "vllmx-demo",
    "vllmx-torch", "vllmx-cuda", "vllmx-metal",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels of all packages, by distribution name."""
    out = tmp_path_factory.mktemp("wheels")
    names = (*PURE, "vllmx-cpu")
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--wheel-dir", str(out),
        *(str(root / "packages" / name) for name in names),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return {path.name.split("-")[0].replace("_", "-"): path for path in out.glob("*.whl")}


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheels_hold_the_package_and_nothing_else(wheels: dict[str, Path], root: Path) -> None:
    assert set(wheels) == {*PURE, "vllmx-cpu"}
    for name, wheel in wheels.items():
        module = name.replace("-", "_")
        found = contents(wheel)
        assert all(path.startswith(f"{module}/") for path in found), name
        assert f"{module}/py.typed" in found
        sources = (root / "packages" / name / "src" / module).rglob("*.py")
        expected = {str(path.relative_to(root / "packages" / name / "src")) for path in sources}
        assert {path for path in found if path.endswith(".py")} == expected
        assert not [path for path in found if "__pycache__" in path or "test" in Path(path).name]


def test_metadata(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(info))
        assert metadata["Metadata-Version"] == "2.4", name
        assert metadata["License-Expression"] == "Apache-2.0", name
        requires = metadata.get_all("Requires-Dist") or []
        heavy = [line for line in requires if line.startswith(("torch", "transformers"))]
        assert heavy == (["torch>=2.4"] if name == "vllmx-torch" else []), name


def test_only_the_cpu_wheel_is_for_one_platform(wheels: dict[str, Path]) -> None:
    for name in PURE:
        assert wheels[name].name.endswith("-py3-none-any.whl")
    assert "-py3-none-" in wheels["vllmx-cpu"].name, "ctypes needs no CPython ABI"
    assert not wheels["vllmx-cpu"].name.endswith("-any.whl")
    assert any(path.endswith((".so", ".dylib")) for path in contents(wheels["vllmx-cpu"]))


def test_our_wheels_leave_room_for_the_libraries_within_40_mb(wheels: dict[str, Path]) -> None:
    """`pip install vllmx[cpu]` downloads under 40 MB; the libraries take about 25 of it."""
    assert sum(wheel.stat().st_size for wheel in wheels.values()) < 15_000_000
