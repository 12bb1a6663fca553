"""The cache of compiled kernels: what changes a key, who compiles, what survives damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from vllmx_cuda.compiler.cubins import (
    CubinCache,
    Keys,
    Target,
    Unit,
    cache_folder,
    missing,
    private_folder,
)
from vllmx_cuda.compiler.nvrtc import CompileError

from tests.waiting import PATIENCE_S


@dataclass
class FakeCompiler:
    """Counts, and answers with what it was given."""

    version: tuple[int, int] = (13, 0)
    calls: list[str] = field(default_factory=list)

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        self.calls.append(name)
        return f"cubin of {source}".encode()


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    """A source whose header includes another one, and a system header of an include folder."""
    folder = tmp_path / "kernels"
    (folder / "inner").mkdir(parents=True)
    (folder / "k.cu").write_text('#include "a.h"\n  #  include <system.h>\nkernel')
    (folder / "a.h").write_text('#include "inner/b.h"\n#include <nowhere.h>\n')
    (folder / "inner" / "b.h").write_text("#pragma once\n")
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "system.h").write_text("// 13.0")
    return Unit(folder / "k.cu", ("VX_DTYPE=2",))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target("sm_90a", (13, 0), (str(tmp_path / "system"),))


@pytest.mark.parametrize("changed", ["k.cu", "a.h", "inner/b.h", "../system/system.h"])
def test_a_key_changes_with_each_file_that_is_read(
    unit: Unit, target: Target, changed: str
) -> None:
    before = Keys(target).key(unit)
    assert Keys(target).key(unit) == before
    path = unit.source.parent / changed
    path.write_text(path.read_text() + "// changed\n")
    assert Keys(target).key(unit) != before


def test_a_key_changes_with_definitions_architecture_and_compiler(
    unit: Unit, target: Target
) -> None:
    keys = {
        Keys(target).key(unit),
        Keys(target).key(replace(unit, defines=("VX_DTYPE=1",))),
        Keys(replace(target, arch="sm_80")).key(unit),
        Keys(replace(target, compiler_version=(12, 9))).key(unit),
    }
    assert len(keys) == 4


def test_the_second_start_compiles_nothing(unit: Unit, target: Target, tmp_path: Path) -> None:
    cache, compiler, key = CubinCache(tmp_path / "cache"), FakeCompiler(), Keys(target).key(unit)
    assert missing(cache, {unit: key}) == [unit]
    first = cache.get_or_compile(key, unit, target, compiler)
    assert cache.get_or_compile(key, unit, target, compiler) == first
    assert compiler.calls == ["k.cu"]
    assert missing(cache, {unit: key}) == []
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_compiled_again(
    unit: Unit, target: Target, tmp_path: Path, damage: str
) -> None:
    cache, compiler, key = CubinCache(tmp_path / "cache"), FakeCompiler(), Keys(target).key(unit)
    good = cache.get_or_compile(key, unit, target, compiler)
    path = next((tmp_path / "cache").glob("*.cubin"))
    stored = path.read_bytes()
    path.write_bytes({"cut": stored[:-1], "flipped": stored[:-1] + b"?", "empty": b""}[damage])
    assert cache.load(key) is None
    assert cache.get_or_compile(key, unit, target, compiler) == good
    assert len(compiler.calls) == 2
    assert path.read_bytes() == stored


def test_a_folder_that_cannot_be_written_only_costs_time(
    unit: Unit, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache, compiler = CubinCache(tmp_path / "file" / "cache"), FakeCompiler()
    for _ in range(2):
        assert cache.get_or_compile("0" * 64, unit, target, compiler).startswith(b"cubin of")
    assert len(compiler.calls) == 2
    assert "cannot be cached" in caplog.text


@pytest.fixture(params=["another user's", "writable by others", "a link to either"])
def unsafe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that somebody else can put cubins into."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    if request.param == "another user's":
        if os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        return folder
    folder.chmod(0o777)
    if request.param == "writable by others":
        return folder
    (tmp_path / "link").symlink_to(folder)
    return tmp_path / "link"


def test_a_folder_that_others_can_write_to_is_not_used(
    unit: Unit, target: Target, unsafe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read or written there: what lies there would run on this user's GPU."""
    cache, compiler, key = CubinCache(unsafe), FakeCompiler(), Keys(target).key(unit)
    planted = b"planted"
    (unsafe / f"{key}.cubin").write_bytes(hashlib.sha256(planted).digest() + planted)
    assert cache.load(key) is None
    assert cache.get_or_compile(key, unit, target, compiler).startswith(b"cubin of")
    assert compiler.calls == ["k.cu"]
    assert [path.name for path in unsafe.iterdir()] == [f"{key}.cubin"]
    assert "VLLMX_CACHE_DIR" in caplog.text


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "cuda")
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_only_costs_time(
    unit: Unit,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    cache, compiler, key = CubinCache(tmp_path / "cache"), FakeCompiler(), Keys(target).key(unit)
    assert cache.get_or_compile(key, unit, target, compiler).startswith(b"cubin of")
    assert "No space left" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-written stays"


def test_a_file_system_without_locks_only_costs_time(
    unit: Unit, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    cache, compiler, key = CubinCache(tmp_path / "cache"), FakeCompiler(), Keys(target).key(unit)
    first = cache.get_or_compile(key, unit, target, compiler)
    assert cache.load(key) == first


def test_a_failing_compiler_leaves_nothing_behind(
    unit: Unit, target: Target, tmp_path: Path
) -> None:
    class Failing(FakeCompiler):
        def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
            raise CompileError(name)

    with pytest.raises(CompileError):
        CubinCache(tmp_path / "cache").get_or_compile("0" * 64, unit, target, Failing())
    assert list((tmp_path / "cache").iterdir()) == []


PROCESS = """
import sys, time
from pathlib import Path
from vllmx_cuda.compiler.cubins import CubinCache, Keys, Target, Unit
class Slow:
    version = (13, 0)
    def compile(self, source, name, options):
        with open(sys.argv[3], "a") as log:
            log.write("compiled\\n")
        time.sleep(0.3)
        return b"x" * 100_000
unit, target = Unit(Path(sys.argv[1])), Target("sm_80", (13, 0), ())
cubin = CubinCache(Path(sys.argv[2])).get_or_compile(Keys(target).key(unit), unit, target, Slow())
assert cubin == b"x" * 100_000
"""


def test_processes_that_start_together_compile_once(unit: Unit, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROCESS, str(unit.source), str(tmp_path / "cache"), str(log)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0, 0, 0]
    assert log.read_text() == "compiled\n"


def test_where_caches_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VLLMX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "vllmx"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: ignored
    assert cache_folder() == tmp_path / ".cache" / "vllmx"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/vllmx")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "vllmx"
    monkeypatch.setenv("VLLMX_CACHE_DIR", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is one in a container that runs under a number which nobody has."""
    for name in ("VLLMX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() == Path(tempfile.gettempdir()) / f"vllmx-cache-{os.geteuid()}"
