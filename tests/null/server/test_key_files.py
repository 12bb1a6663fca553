"""Files of keys, and the command that writes them."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from vllmx.cli.keys import keys
from vllmx_core.errors import ConfigError
from vllmx_server.limits.key_records import KeyRecord, digest_of, read_keys

from .test_keys import key_file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "is wrong"),
        ('{"keys": [{"name": "a"}]}', "sha256"),
        ('{"keys": [{"name": "a b", "sha256": "' + "0" * 64 + '"}]}', "name"),
        ('{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "rpm": 3}]}', "rpm"),
        (
            '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "concurrency": 0}]}',
            "concurrency",
        ),
        (
            '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "priority_range": "x"}]}',
            "priority-range",
        ),
        ('{"keys": ' + "[" * 5000 + "]" * 5000 + "}", "is"),
        ('{"keys": [], "keys": []}', "'keys' appears twice"),
        (
            '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "share": 1, "share": 9}]}',
            "'share' appears twice",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert said in caught.value.message


def test_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    one = {"name": "a", "sha256": "0" * 64}
    for other in ({"name": "a", "sha256": "1" * 64}, {"name": "b", "sha256": "0" * 64}):
        path = tmp_path / "keys.json"
        path.write_text(json.dumps({"keys": [one, other]}))
        with pytest.raises(ConfigError, match="two entries"):
            read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever opens one waits until somebody writes, and a server that reads its keys again would
    stand still."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"not a regular file.*vllmx keys add"):
        read_keys(tmp_path / "pipe")


def test_a_file_of_many_keys_is_looked_through_once(tmp_path: Path) -> None:
    """To compare each name with all others would take minutes for so many."""
    path = tmp_path / "keys.json"
    many = [{"name": f"k{number}", "sha256": f"{number:064x}"} for number in range(100_000)]
    path.write_text(json.dumps({"keys": many}))
    assert len(read_keys(path)) == len(many)


def test_the_command_makes_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(keys, [*arguments, "--file", str(path)])
        if done.exception is not None:
            raise done.exception
        return done.output.strip()

    key = run("add", "ann", "--requests-per-minute", "5", "--model", "m")
    boss = run("add", "boss", "--admin", "--mcp-server", "files", "--mcp-server", "web")
    assert key != boss
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == (
        KeyRecord("ann", digest_of(key), models=("m",), requests_per_minute=5),
        KeyRecord("boss", digest_of(boss), admin=True, mcp_servers=("files", "web")),
    )
    assert run("list").splitlines()[0].startswith("ann  models m, requests_per_minute 5")
    assert "admin True, mcp_servers files web" in run("list").splitlines()[1]
    with pytest.raises(ConfigError, match="has a key for 'ann'"):
        run("add", "ann")
    with pytest.raises(ConfigError, match="letters, digits"):
        run("add", "a b")
    run("remove", "ann")
    with pytest.raises(ConfigError, match="it has: boss"):
        run("remove", "ann")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b"], "a key's name must be 1 to 64 letters.*got 'a b'"),
        (["bob", "--share", "nan"], "--share has a value that cannot be: expected `float` >= 0.0"),
    ],
)
def test_records_that_are_not_made(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = tmp_path / "keys.json"
    done = CliRunner().invoke(keys, ["add", *arguments, "--file", str(path)])
    assert isinstance(done.exception, ConfigError)
    assert re.match(message, done.exception.message), done.exception.message
    assert not path.exists()


def run_keys(*arguments: str) -> Any:
    return CliRunner().invoke(keys, [*arguments])


@pytest.mark.parametrize("is_there", [True, False])
def test_the_file_behind_a_link_is_changed(tmp_path: Path, is_there: bool) -> None:
    real, link = tmp_path / "secrets" / "keys.json", tmp_path / "keys.json"
    real.parent.mkdir()
    if is_there:
        run_keys("add", "ann", "--file", str(real))
    link.symlink_to(Path("secrets") / "keys.json")
    assert run_keys("add", "bob", "--file", str(link)).exit_code == 0
    assert link.is_symlink()
    assert [record.name for record in read_keys(real)] == ["ann", "bob"][not is_there :]
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert run_keys("remove", "bob", "--file", str(link)).exit_code == 0
    assert link.is_symlink()
    assert [path.name for path in real.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["remove", "ann"]])
def test_a_missing_file_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    done = run_keys(*arguments, "--file", str(tmp_path / "none.json"))
    assert isinstance(done.exception, ConfigError)
    assert re.match(r"--file '.*none\.json' cannot be read .*`vllmx keys add`", str(done.exception))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o644, True)])
def test_a_readable_file_of_keys_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = Path(key_file(tmp_path, ann={}))
    path.chmod(mode)
    assert run_keys("list", "--file", str(path)).exit_code == 0
    expected = f"--file {path} may be read by others (mode {mode:04o}): chmod 600 {path}"
    assert [record.getMessage() for record in caplog.records] == [expected] * warns
