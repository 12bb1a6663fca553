"""Everything a developer or a release runs: `nox -l` lists it, `nox -s tests` is the usual one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]
ROOT = Path(__file__).parent
PACKAGES = sorted((ROOT / "packages").iterdir())
DIST = ROOT / "dist"


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite on editable installs; arguments go to pytest."""
    session.install("-r", "requirements-dev.txt")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check, ruff format and mypy --strict."""
    session.install("-r", "requirements-dev.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation site into build/site, with the pages that are made from the code."""
    session.install("-r", "requirements.txt", "zensical==0.0.73")
    session.run("python", "docs/site.py")


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds a wheel of every package into dist/."""
    _build(session, "--wheel")


@nox.session
def release(session: nox.Session) -> None:
    """Builds and checks the files of a release in dist/: sdists and wheels of one version, and one
    token from a fresh installation of them. docs/releasing.md has the whole procedure."""
    wanted = f"vllmx[cpu]=={_version(session)}"
    _build(session)
    windows(session)
    session.install("twine")
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    fresh = Path(session.create_tmp()).absolute() / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    programs = fresh / "bin"
    install = ("install", "--quiet", "--find-links", str(DIST), wanted)
    session.run(str(programs / "pip"), *install, external=True)
    complete = ("complete", "--model", "demo", "--prompts", "Once upon", "--max-tokens", "1")
    session.run(str(programs / "vllmx"), *complete, external=True)
    fill = str(ROOT / "docs/deploy/recipes/fill.py")
    session.run("python", fill, str(DIST), _version(session), str(ROOT / "build" / "recipes"))


@nox.session
def windows(session: nox.Session) -> None:
    """Compiles the CPU backend for Windows by Zig and adds its wheel to dist/."""
    session.install("build", "hatchling", "ziglang==0.17.1")
    command = ("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(DIST))
    compiler = "python -m ziglang c++ -target x86_64-windows-gnu"
    session.run(*command, str(ROOT / "packages" / "vllmx-cpu"), env={"CXX": compiler})


def _build(session: nox.Session, *kinds: str) -> None:
    """Builds every package into dist/: an sdist, and the wheel from the sdist, so that a file
    missing there is noticed; with `--wheel` only the wheel."""
    session.install("build", "hatchling")
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        options = (*kinds, "--no-isolation", "--outdir", str(DIST))
        session.run("python", "-m", "build", *options, str(package))


def _version(session: nox.Session) -> str:
    """The version of all packages; different ones end the session."""
    texts = [(package / "pyproject.toml").read_text() for package in PACKAGES]
    versions = {tomllib.loads(text)["project"]["version"] for text in texts}
    if len(versions) != 1:
        session.error(f"packages have different versions: {', '.join(sorted(versions))}")
    return str(versions.pop())


@nox.session
def installed(session: nox.Session) -> None:
    """The tests against installed wheels: what a user gets, nothing from the source tree."""
    wheels(session)
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    tools = [line for line in lines if line and not line.startswith(("#", "-"))]
    session.install(*tools)
    session.install("--no-index", "--no-deps", *map(str, sorted(DIST.glob("*.whl"))))
    session.install(*(f"{wheel}" for wheel in map(str, sorted(DIST.glob("*.whl")))))
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """One benchmark: `nox -s bench -- host`, `-- serve`, `-- startup`, `-- peers_cpu`."""
    session.install("-r", "requirements-dev.txt")
    name, *arguments = session.posargs or ["host"]
    session.run("python", f"bench/{name}.py", *arguments)


@nox.session
def kernels(session: nox.Session) -> None:
    """Plants bugs into the CUDA kernels, one after the other; the tests must find each. Without
    arguments also compiles every kernel for every type, head size and architecture."""
    session.install("-r", "requirements-dev.txt")
    session.run("python", "-m", "tests.kernels.cuda_mutations", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tests.kernels.cuda_matrix")


@nox.session(venv_backend="none")
def arm(session: nox.Session) -> None:
    """The CPU kernels on emulated ARM, a quarter of an hour; arguments go to pytest."""
    session.run(sys.executable, "-m", "tests.kernels.arm", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Each fuzz target for ten minutes; one with `nox -s fuzz -- gguf -max_total_time=60`."""
    session.install("-r", "requirements-dev.txt", "atheris")
    targets = sorted(
        path.stem.removeprefix("fuzz_") for path in (ROOT / "tests/fuzz").glob("fuzz_*.py")
    )
    for name in session.posargs[:1] or targets:
        options = session.posargs[1:] or ["-max_total_time=300"]
        for kind in ([], ["--changed"]):
            session.run("python", "tests/fuzz/run.py", *kind, name, *options)


@nox.session
def chance(session: nox.Session) -> None:
    """Tests over the fake model beside two busy processes, with the core's updates merged as far as
    can be, not at all, and at random; arguments are the seeds, by default 1 to 3."""
    session.install("-r", "requirements-dev.txt")
    seeds = session.posargs or ["1", "2", "3"]
    updates = [f"--updates={how}" for how in ("all", "none", *seeds)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        folders = (f"tests/null/{name}" for name in ("frontend", "mcp", "server"))
        session.run("python", "-m", "pytest", "-n", "2", *folders, *updates)
    finally:
        for process in busy:
            process.kill()


@nox.session
def classes(session: nox.Session) -> None:
    """Runs every causal class of transformers by --model-impl transformers."""
    session.install("-r", "requirements-dev.txt")
    tests = "tests/integration/parity/test_transformers_classes.py"
    session.run("python", "-m", "pytest", tests, env={"VLLMX_EVERY_CLASS": "1"})


@nox.session
def openapi(session: nox.Session) -> None:
    """Some thousand requests made of the API's document, other ones each time; the argument is how
    many of each operation and kind."""
    session.install("-r", "requirements-dev.txt")
    session.run(
        "python",
        "-m",
        "pytest",
        "tests/null/server/test_conformance.py",
        env={"VLLMX_OPENAPI_EXAMPLES": (session.posargs or ["300"])[0]},
    )


@nox.session
def llama(session: nox.Session) -> None:
    """Runs the files of `vllmx quantize` in llama.cpp, which it builds first (some minutes)."""
    session.install("-r", "requirements-dev.txt")
    peers = Path(session.create_tmp()).absolute()
    session.run("python", "bench/peers_cpu.py", "--setup-llama", "--peers-dir", str(peers))
    programs = peers / "llama.cpp" / "build" / "bin"
    session.run(
        "python",
        "-m",
        "pytest",
        "-rs",
        "tests/integration/test_quantize.py",
        *session.posargs,
        env={"VLLMX_LLAMA_CPP": str(programs)},
    )


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Sets one version everywhere: `nox -s bump -- 0.2.0`."""
    if len(session.posargs) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+\S*", session.posargs[0]):
        session.error("give the new version: nox -s bump -- 0.2.0")
    new = session.posargs[0]
    old = re.escape(_version(session))
    for package in PACKAGES:
        init = package / "src" / package.name.replace("-", "_") / "__init__.py"
        for path in (package / "pyproject.toml", init):
            text = re.sub(
                rf'^((__)?version(__)? = )"{old}"', rf'\1"{new}"', path.read_text(), flags=re.M
            )
            path.write_text(
                re.sub(rf"\b(vllmx[a-z-]*(?:\[\w+\])?)=={old}(?=[\";])", rf"\1=={new}", text)
            )
