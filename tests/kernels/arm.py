"""The CPU kernels' tests on 64-bit ARM, emulated: `python -m tests.kernels.arm` (or `nox -s arm`).

The library is cross-compiled; Debian's Python of that architecture and PyPI's wheels are unpacked
beside it and run by QEMU, which needs no ARM machine and no container. What was downloaded stays in
build/arm. Arguments go to pytest; QEMU_CPU names the emulated processor (`max` has everything,
`cortex-a72` only the baseline). Processes that a test would start cannot run: QEMU is not installed
as the system's interpreter of foreign programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm"
SYSTEM, WHEELS, PACKAGES = FOLDER / "system", FOLDER / "wheels", FOLDER / "packages"
DEBIAN, PYTHON = "bookworm", "3.11"  # that release's Python
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
TOOLS = {
    COMPILER: "g++-aarch64-linux-gnu",
    EMULATOR: "qemu-user-static",
    "debootstrap": "debootstrap",
} | ({} if os.geteuid() == 0 else {"fakeroot": "fakeroot"})
REQUIRED = "numpy|msgspec|pluggy|pytest|pytest-asyncio|hypothesis|ml_dtypes|gguf"
TESTS = (
    *(f"tests/kernels/test_cpu_{name}.py" for name in ("rows", "linear", "quantised", "coded")),
    *(f"tests/kernels/test_cpu_{name}.py" for name in ("attention", "sampler", "encode")),
    "tests/backend/test_cpu_isas.py",
    "tests/backend/test_backends.py::TestCpu",
)


def missing() -> str | None:
    """What must be installed first; None: nothing."""
    names = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    return f"to emulate ARM, install: apt install {' '.join(names)}" if names else None


def make_system() -> None:
    """Unpacks Debian's base system and Python; nothing of it is configured or run as a system."""
    if (SYSTEM / "usr" / "bin" / f"python{PYTHON}").exists():
        return
    shutil.rmtree(SYSTEM, ignore_errors=True)
    command = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", "--include=python3"]
    as_root = [] if os.geteuid() == 0 else ["fakeroot"]
    subprocess.run([*as_root, *command, DEBIAN, str(SYSTEM)], check=True)
    for archive in sorted((SYSTEM / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(SYSTEM)], check=True)


def make_wheels() -> None:
    """PyPI's wheels for this architecture, at the versions of requirements-dev.txt."""
    if WHEELS.exists():
        return
    pins = (ROOT / "requirements-dev.txt").read_text()
    found = dict(re.findall(rf"^({REQUIRED})(==\S+)$", pins, re.MULTILINE))
    wanted = [name + found.get(name, "") for name in REQUIRED.split("|")]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    platforms += ["--platform=manylinux2014_aarch64", "--platform=any"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", *platforms]
    partial = WHEELS.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command += ["--implementation=cp", f"--python-version={PYTHON}", f"--target={partial}"]
    subprocess.run([*command, *wanted], check=True)
    partial.rename(WHEELS)


def make_packages() -> None:
    """Our packages as they would be installed: sources, entry points and the library."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    for project in sorted((ROOT / "packages").iterdir()):
        ignored = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
        shutil.copytree(project / "src", PACKAGES, ignore=ignored, dirs_exist_ok=True)
        about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        folder = PACKAGES / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {about['name']}\nVersion: {about['version']}\n")
        points = about.get("entry-points", {}).get("vllmx", {})
        lines = [f"{name} = {module}\n" for name, module in points.items()]
        (folder / "entry_points.txt").write_text("[vllmx]\n" + "".join(lines))
    library = PACKAGES / "vllmx_cpu" / "libvllmx_cpu.so"
    command = [sys.executable, str(PACKAGES / "vllmx_cpu" / "build.py"), "--output", str(library)]
    environment = os.environ | {"CXX": COMPILER}
    objects = ["--objects", str(FOLDER / "objects")]
    subprocess.run([*command, *objects], check=True, env=environment)


def run(arguments: list[str]) -> int:
    """Python with these arguments on the emulated processor; its exit code."""
    environment = {
        "PYTHONHOME": str(SYSTEM / "usr"),
        "PYTHONPATH": f"{PACKAGES}:{WHEELS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "QEMU_CPU": os.environ.get("QEMU_CPU", "max"),
        "QEMU_LD_PREFIX": str(SYSTEM),
    }
    command = [EMULATOR, str(SYSTEM / "usr" / "bin" / f"python{PYTHON}"), *arguments]
    return subprocess.run(command, check=False, cwd=ROOT, env=os.environ | environment).returncode


def main(arguments: list[str]) -> int:
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_system()
    make_wheels()
    make_packages()
    files = [] if any(word.startswith("tests/") for word in arguments) else list(TESTS)
    return run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
