"""A real server in a subprocess: the demo model on the best backend, or a fake model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from vllmx_testing.fake_checkpoint import install_fake_plugin, make_fake_checkpoint

from tests.forked import Forked, watched
from tests.waiting import PATIENCE_S, wait_until

from .browser import OpenTab, Tab, running_chromium

PLAIN: dict[str, Any] = {"timeout": PATIENCE_S, "verify": False}
"""Of a request without TLS: else each reads the list of authorities, for a fiftieth of a second."""
SERVES = re.compile(r'(?:^ +|: )((?:http|unix)\S*)/v1(?:"})?$', re.MULTILINE)
"""The line that says where a server is, as text or as JSON."""


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen[str] | Forked
    lines: list[str]
    """Standard error so far."""
    reader: threading.Thread
    """Ends when standard error does."""

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **PLAIN, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **PLAIN, **options)

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllmx:{name}{{"))

    def core_pid(self) -> int:
        """The process of the engine core."""
        return self.child_pid("vllmx_engine.link.process")

    def child_pid(self, module: str) -> int:
        """The only child that runs this module."""
        (found,) = self.child_pids(module)
        return found

    def child_pids(self, module: str) -> list[int]:
        """The children that run this module."""
        pid = self.process.pid
        found = []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def becomes_idle(self) -> None:
        """Waits until nothing runs and every block is free, as /metrics tells."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(self.metric(name) for name in names))


def _started(
    arguments: tuple[str, ...], environment: dict[str, str], open_files: int | None
) -> tuple[subprocess.Popen[str], IO[str]]:
    command = [sys.executable, "-m", "vllmx", *arguments]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stderr is not None
    return process, process.stderr


@contextmanager
def running_server(
    *flags: str,
    environment: dict[str, str] | None = None,
    open_files: int | None = None,
    unforked: bool = False,
) -> Iterator[RunningServer]:
    """`vllmx serve` on a free port unless one is named, with a lower limit of open files if one is
    given; killed at the end if it does not stop by itself. `unforked`: started as a user does."""
    arguments = ("serve", *(() if "--port" in flags else ("--port", "0")), *flags)
    process, errors = (
        _started(arguments, environment or {}, open_files)
        if unforked or open_files is not None
        else watched(*arguments, environment=environment)
    )
    lines: list[str] = []
    # A full pipe would stop the server.
    reader = threading.Thread(target=lines.extend, args=(errors,), daemon=True)
    try:
        for line in errors:
            lines.append(line)
            if found := SERVES.search(line):
                break
        else:
            raise AssertionError(f"the server ended: {''.join(lines)}")
        reader.start()
        yield RunningServer(found[1], process, lines, reader)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join(20)  # what it reads is not to be closed under it
        errors.close()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The demo model; shared."""
    with running_server("--max-num-seqs", "64") as running:
        yield running


MakeFake = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It needs 20 ms for each step and never ends by itself."""
    folder = tmp_path_factory.mktemp("fake") / "model"
    return make_fake_checkpoint(folder, vocab_size=128, eos_id=None, step_s=0.02)


@pytest.fixture(scope="session")
def hanging_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `fake_model` whose fiftieth step in each process takes an hour."""
    folder = tmp_path_factory.mktemp("hanging") / "model"
    return make_fake_checkpoint(folder, vocab_size=128, eos_id=None, step_s=0.02, hang_steps=[50])


@pytest.fixture(scope="session")
def fake_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which vllmx finds the plugin of the fake model."""
    plugins = install_fake_plugin(tmp_path_factory.mktemp("plugins"))
    paths = [str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def fake_server(fake_model: Path, fake_environment: dict[str, str]) -> MakeFake:
    """`with fake_server(*flags)`: the fake model, unless `--model` names another."""

    def make(*flags: str, **options: Any) -> AbstractContextManager[RunningServer]:
        model = () if "--model" in flags else ("--model", str(fake_model))
        name = () if "--served-model-name" in flags else ("--served-model-name", "fake")
        fixed = (*model, *name, "--backend", "fake")
        return running_server(*fixed, *flags, environment=fake_environment, **options)

    return make


@pytest.fixture
def hanging_server(fake_server: MakeFake, hanging_model: Path) -> MakeFake:
    return partial(fake_server, "--model", str(hanging_model))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_chromium() as running:
        yield running


@pytest.fixture(scope="module")
def chat_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A template without special tokens: the fake model has none."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    return ("--chat-template", str(template))


@pytest.fixture(scope="module")
def page_server(
    browser: Any, fake_server: MakeFake, chat_flags: tuple[str, ...]
) -> Iterator[RunningServer]:
    """A server; it is not started where no browser is."""
    with fake_server(*chat_flags) as running:
        yield running


@pytest.fixture
def open_tab(browser: Any, page_server: RunningServer) -> Iterator[OpenTab]:
    """Opens a tab of `page_server` unless another URL is given. What goes wrong within the page
    fails a test, and so does a dialog that a script opened."""
    tabs: list[Tab] = []

    def make(url: str = page_server.url, **options: Any) -> Tab:
        tab = Tab(browser, f"{url}/", **options)
        tabs.append(tab)
        tab.open()
        return tab

    yield make
    troubles = [trouble for tab in tabs for trouble in tab.troubles]
    for tab in tabs:
        tab.context.close()
    assert not troubles
