"""`vllmx` commands in processes that are forked where its modules are already imported.

Imports take longer than most commands of tests. Each command has a process all the same, with its
own arguments, environment, folder and streams; only the start differs from `python -m vllmx`. A
user's start is tested by test_lifecycle.py and the first tests of test_commands.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from vllmx_server import apis

from tests.waiting import PATIENCE_S

FORKS = multiprocessing.get_context("forkserver")
APIS = [found.name for found in pkgutil.iter_modules(apis.__path__)]
FORKS.set_forkserver_preload(
    [
        *("vllmx.cli.group", "vllmx.cli.serve", "vllmx.cli.complete", "vllmx_cpu.backend"),
        *("vllmx_engine.engine", "vllmx_engine.text.chat_template", "vllmx_engine.formats.choice"),
        *("vllmx_models.plugin", "vllmx_models.quantization.detect", "vllmx_server.plugin"),
        *("vllmx_server.host.run", "vllmx_server.host.process", "vllmx_server.host.app"),
        *(f"vllmx_server.apis.{name}.{module}" for name in APIS for module in ("api", "routes")),
    ]
)


class Forked:
    """A command's process, as `subprocess.Popen` has one.

    Args:
        environment: what differs from that of this process.
        streams: by their number in the process; others are those of this one.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        streams: Mapping[int, IO[Any]],
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        given = {
            "arguments": arguments,
            "environment": {**os.environ, **(environment or {})},
            "folder": str(cwd or Path.cwd()),
            "streams": {to: Connection(os.dup(each.fileno())) for to, each in streams.items()},
        }
        # By the path of this file: whether the process can import it depends on how pytest began.
        target = (__file__, {"GIVEN": given}, "forked")
        self._process = FORKS.Process(target=runpy.run_path, args=target)
        self._process.start()
        for stream in given["streams"].values():
            stream.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("vllmx", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended, and the fork server says so later
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """What a command writes, and its exit code."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(stdin)
        given.seek(0)
        process = Forked(arguments, {0: given, 1: out, 2: err}, environment, cwd)
        try:
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def watched(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[Forked, IO[str]]:
    """A command's process, and its standard error."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        return Forked(arguments, {2: pipe}, environment), os.fdopen(read)


def _main(given: dict[str, Any]) -> None:
    """In the process itself."""
    for number, stream in given["streams"].items():
        os.dup2(stream.fileno(), number)
        stream.close()
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["vllmx", *given["arguments"]]
    sys.stdin = open(0)  # noqa: SIM115 - instead of the one that multiprocessing has closed

    from vllmx.cli import main

    main()


if __name__ == "forked":
    _main(GIVEN)  # type: ignore[name-defined]  # noqa: F821 - given by runpy
