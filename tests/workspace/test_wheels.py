"""What users get: the contents and metadata of the wheels, built as a release builds them."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from importlib.metadata import Distribution, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name
from vllmx_cpu import build

PURE = (
    "vllmx", "vllmx-core", "vllmx-engine", "vllmx-models", "vllmx-server", "vllmx-demo",
    "vllmx-torch", "vllmx-cuda", "vllmx-metal", "vllmx-tp", "vllmx-ray", "vllmx-testing",
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
        with zipfile.ZipFile(wheel) as archive:
            (path,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
            assert b"Apache License" in archive.read(path)
        requires = metadata.get_all("Requires-Dist") or []
        wanted = [line for line in requires if "extra ==" not in line]
        heavy = [line for line in wanted if line.startswith(("torch", "transformers"))]
        assert heavy == (["torch>=2.4"] if name == "vllmx-torch" else []), name


def test_only_the_cpu_wheel_is_for_one_platform(wheels: dict[str, Path]) -> None:
    for name in PURE:
        assert wheels[name].name.endswith("-py3-none-any.whl")
    assert "-py3-none-" in wheels["vllmx-cpu"].name, "ctypes needs no CPython ABI"
    assert not wheels["vllmx-cpu"].name.endswith("-any.whl")
    assert any(path.endswith((".so", ".dylib")) for path in contents(wheels["vllmx-cpu"]))


@pytest.mark.parametrize("state", ["stale", "current"])
def test_the_cpu_wheel_without_a_compiler(root: Path, tmp_path: Path, state: str) -> None:
    """Pure and without a library, or with one of these very sources and the tag of its platform;
    also outside of git, which ignores libraries."""
    copy = tmp_path / "vllmx-cpu"
    # No library either: while one is linked, a part of it lies there that is gone a moment later.
    ignore = shutil.ignore_patterns("build", "__pycache__", f"*{build.LIBRARY.name}*")
    shutil.copytree(root / "packages" / "vllmx-cpu", copy, ignore=ignore)
    library = copy / "src" / "vllmx_cpu" / build.LIBRARY.name
    if state == "stale":
        library.write_bytes(b"old")
    elif build.built_hash() != build.source_hash():
        pytest.skip("the library is not built")
    else:
        shutil.copy(build.LIBRARY, library)
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(copy),
    ]  # fmt: skip
    environment = {**os.environ, "CXX": "/does/not/exist"}
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    has_library = any(path.endswith((".so", ".dylib")) for path in contents(wheel))
    assert has_library == (state == "current") == (not wheel.name.endswith("-none-any.whl"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has such tags")
def test_the_cpu_wheel_says_from_which_glibc_on_it_runs(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    """PyPI refuses linux_x86_64. The linker's own tables say what the library takes from where."""
    name = wheels["vllmx-cpu"].name
    found = re.fullmatch(rf".*-py3-none-manylinux_2_(\d+)_{platform.machine()}\.whl", name)
    assert found, name
    assert any(str(tag) in name for tag in sys_tags()), "pip would not install it here"
    with zipfile.ZipFile(wheels["vllmx-cpu"]) as archive:
        library = archive.extract("vllmx_cpu/libvllmx_cpu.so", tmp_path)
    command = ["readelf", "--wide", "--dynamic", "--version-info", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", text)) <= {
        "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
        "ld-linux-aarch64.so.1",
    }  # fmt: skip
    needed = re.findall(r"Name: (\w+?)_(\d+)\.(\d+)", text)
    assert {library for library, *_ in needed} == {"GLIBC"}
    assert max(17, *(int(minor) for *_, minor in needed)) == int(found[1])


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        (b"GLIBC_2.2.5\0GLIBC_2.29\0GLIBC_2.3.4\0", "manylinux_2_29_x86_64"),
        (b"GLIBC_2.2.5\0", "manylinux_2_17_x86_64"),
        (b"GLIBC_2.29\0GLIBCXX_3.4.30\0", "linux_x86_64"),
        (b"", "linux_x86_64"),
    ],
)
def test_tags_of_the_cpu_wheel(
    root: Path, monkeypatch: pytest.MonkeyPatch, names: bytes, tag: str
) -> None:
    spec = spec_from_file_location("hatch_build", root / "packages/vllmx-cpu/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    assert (
        hook._platform_tag(b"\x7fELF\0libc.so.6\0" + names + b"text GLIBC_2.99 in between\0") == tag
    )
    assert hook._platform_tag(b"MZ\x90\0" + names) == "win_amd64"


OURS = {
    "vllmx": 0.16, "vllmx-core": 0.28, "vllmx-engine": 0.57, "vllmx-models": 0.43,
    "vllmx-server": 0.58, "vllmx-demo": 9.6, "vllmx-cpu": 2.8, "vllmx-torch": 0.1,
    "vllmx-metal": 0.1, "vllmx-cuda": 0.36, "vllmx-tp": 0.07, "vllmx-testing": 0.15,
    "vllmx-ray": 0.02,
}  # fmt: skip
"""Greatest size of each wheel, in MB."""


def test_no_wheel_grows_unnoticed(wheels: dict[str, Path]) -> None:
    sizes = {name: wheel.stat().st_size / 1e6 for name, wheel in wheels.items()}
    print(sizes)  # pytest -rP shows it
    assert not {name: size for name, size in sizes.items() if size > OURS[name]}


def test_the_download_stays_under_48_mb(wheels: dict[str, Path]) -> None:
    """The size of `pip install vllmx[cpu]`, as far as it can be told without the network: our
    wheels, and the files of every library that they need as a wheel would pack them."""
    needed = libraries(["vllmx[cpu]"])
    assert {"numpy", "tokenizers", "hypercorn"} <= needed.keys()
    sizes = {name: packed_bytes(library) for name, library in needed.items()}
    ours = ("vllmx", "core", "engine", "models", "server", "demo", "cpu")
    sizes |= {
        name: wheels[name].stat().st_size
        for name in (part if part == "vllmx" else f"vllmx-{part}" for part in ours)
    }
    total = sum(sizes.values())
    print(total, sorted(sizes.items(), key=lambda item: -item[1]))  # pytest -rP shows it
    assert 25_000_000 < total < 48_000_000


def libraries(wanted: list[str]) -> dict[str, Distribution]:
    """What these requirements bring beside our own packages, as it is installed here."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(text) for text in wanted]
    seen = set()
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        installed = distribution(name)
        if not name.startswith("vllmx"):
            found[name] = installed
        extras = {"", *requirement.extras}
        for text in installed.requires or []:
            need = Requirement(text)
            marker = need.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(need)
    return found


def packed_bytes(library: Distribution) -> int:
    """The size of a library's files but what was compiled after installation, each deflated as
    wheels have them."""
    paths = [Path(str(library.locate_file(file))) for file in library.files or []]
    files = [path for path in paths if path.suffix != ".pyc" and path.is_file()]
    assert files, f"{library.name} lists no files"
    return sum(len(zlib.compress(path.read_bytes(), 6)) for path in files)
