"""Runs every command that README.md, CONTRIBUTING.md and the pages of docs/ show, with tiny models
in place of those that they name. A server answers a question before it is ended."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked
from tests.waiting import PATIENCE_S

from ...null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from ..whisper_models import sound, wav  # noqa: TID252
from .conftest import PLAIN, RunningServer, running_server
from .page_models import FILES, HUB, TEXT, Make, furnish, makes

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

PICTURE = data_url(stored(picture(24, 16)))
SOUND = base64.b64encode(wav(sound(1))).decode()
SHOWN_TO: dict[str, list[dict[str, Any]]] = {
    "images": [{"type": "image_url", "image_url": {"url": PICTURE}}],
    "audio chats": [{"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}],
}
"""What is said to models of a kind, in place of words."""

NOT_RUN = {
    r"git clone ": "fetches these files",
    r"python3 -m venv ": "is what CI begins with",
    r"\.venv/bin/python -m pytest": "is the suite of which this is a part",
    r"\.venv/bin/pre-commit ": "is a program of others, and writes into the repository",
    r"vllmx pull ": "asks the hub; test_pull.py has a small one",
    r"pip install ": "asks an index of packages",
    r"docker ": "needs Docker's service; test_deploy_page.py reads the files",
    r"kubectl ": "needs a cluster; test_deploy_page.py reads the manifest",
    r"helm ": "needs one too; test_helm_chart.py renders the chart",
    r"vllmx serve MODEL --lora ": "needs adapters; test_adapters.py has some",
    r"vllmx core ": "serves other hosts; test_replica_hosts.py has some",
    r"vllmx serve \S+ --replica-hosts ": "needs such hosts",
    r"vllmx serve MODEL --ray-address ": "needs a cluster of Ray",
    r"vllmx quantize MODEL merged.gguf": "needs one too; test_lora.py has some",
    r"python bench/": "takes minutes and large models; test_moving_page.py looks for the flags",
    r"ANTHROPIC_BASE_URL=\S+ .* claude$": "is a program of others; its API has tests of its own",
}
"""What is not run here, by how it begins, and why."""

REPLACED = (
    (r"/(?:srv/)?models/", "./"),
    (r"model\.gguf --mmproj", "seeing.gguf --mmproj"),
    (r"(serve .*(?:--mmproj|:Qwen3-VL).*)", r"\1 --tokenizer tokenizer"),  # they have no words
    (r"/run/vllmx/", "./"),
    (r"--host 0\.0\.0\.0", "--host 127.0.0.1"),
    (r"--port \d+", "--port 0"),
    (r"--listen \S+", "--listen 127.0.0.1:0"),
    (r"vllmx tune", "vllmx tune --seconds 0.1 --requests 2 --input-len 4 --output-len 2"
     " --max-rate 1 --precision 1"),
    (r"--input-len 512 --output-len 128", ""),
    (r"bench throughput", "bench throughput --input-len 16 --output-len 4"),
    (r"bench speculate", "bench speculate --output-len 4 --repeat 1"),
    (r"ngram(,suffix)?,twin", "ngram"),  # tiny models have no layers that 4 bits fit
    (r"--speculate model:\S+", "--speculate suffix"),
    (r"vllmx run qwen3:4b", "vllmx run Qwen/Qwen3-0.6B"),  # whose stand-in is in the cache
    (r"(vllmx ps)", r"\1 --url http://127.0.0.1:8000"),
    (r"(vllmx top)", r"\1 --url http://127.0.0.1:8000 --count 1"),  # else it never ends
    (r'eval "\$\((vllmx completion zsh)\)"', r"\1"),  # that shell is seldom there, and ...
    (r"(vllmx completion fish) \| source", r"\1"),  # ... neither is this one
)  # fmt: skip
"""What is replaced in a command before it runs, in this order."""

# --- what the pages show --------------------------------------------------------------------------
PROGRAMS = r"vllmx|curl|docker|kubectl|helm|git|python3?|pip|openssl|eval|\.venv/bin/\S+"
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S+ +)*(?:{PROGRAMS}) .*|[A-Z_]+=.* claude)", re.DOTALL)


def commands(page: Path) -> list[str]:
    """In a block of a shell every line is one; in others those that begin with a program are."""
    text = page.read_text(encoding="utf-8")
    found: list[str] = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind in ("", "sh", "bash"):
            found += _commands(block, every=bool(kind))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found += _commands("\n".join(re.findall(r"^ {4}(\S.*)", outside, re.MULTILINE)), every=False)
    if page.name == "moving.md":  # its tables have what is to be typed here behind what was typed
        found += re.findall(r"`(vllmx [^`]+)`", outside)
    return found


def _commands(block: str, *, every: bool) -> Iterator[str]:
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        command = COMMAND.fullmatch(line.strip())
        if command is None:
            assert not every or not line.strip(), f"no command that is known here: {line}"
            continue
        text = command[1]
        while not _is_closed(text):
            text += "\n" + next(lines)
        yield text


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def is_run(command: str) -> bool:
    return not any(re.match(start, command) for start in NOT_RUN)


def replaced(command: str) -> str:
    for pattern, new in REPLACED:
        command = re.sub(pattern, new, command)
    return re.sub("^curl", "curl -sS --fail-with-body", command)


SHOWN = {str(page.relative_to(ROOT)): commands(page) for page in PAGES}
RUN = {page: [each for each in shown if is_run(each)] for page, shown in SHOWN.items()}


FIRST = {
    replaced(command): page for page, found in reversed(RUN.items()) for command in reversed(found)
}
"""The page that shows a command first: a server is started once."""


def test_what_is_not_run_is_shown_and_the_rest_is_there() -> None:
    shown = [command for found in SHOWN.values() for command in found]
    for start in NOT_RUN:
        assert any(re.match(start, command) for command in shown), f"no page shows {start} any more"
    for pattern, _ in REPLACED:
        found = [command for command in shown if is_run(command) and re.search(pattern, command)]
        assert found, f"no command has {pattern} any more"
    told = " ".join(shown)
    for name in (*TEXT, *FILES, *HUB):
        assert re.search(rf"(?<![\w.-]){name}(?![\w-])", told), f"no command names {name} any more"
    assert (
        sum(command.startswith("vllmx serve") for found in RUN.values() for command in found) > 30
    )


# --- how they run ---------------------------------------------------------------------------------
def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }


SHELL = set("();<>|&")


def run(command: str, folder: Path, page: str) -> str:
    """What a command prints; chat hears one question. A shell starts those of README.md, and those
    that are more than a command of ours; the others are forked, which takes a third of the time."""
    joined = any(set(word) <= SHELL for word in shlex.shlex(command, "", True, True))
    if page != "README.md" and command.startswith("vllmx ") and not joined:
        words = shlex.split(command, comments=True)[1:]
        done = forked.run(*words, stdin="Hello!\n", environment=environment(folder), cwd=folder)
    else:
        done = subprocess.run(
            ["bash" if command.startswith("eval") else "sh", "-c", command],
            cwd=folder,
            env=os.environ | environment(folder),
            input="Hello!\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return str(done.stdout)


@contextlib.contextmanager
def ranks(page: str, folder: Path) -> Iterator[str]:
    """The host of ranks that a page shows: where it listens."""
    (command,) = (each for each in RUN[page] if each.startswith("vllmx rank"))
    words = shlex.split(replaced(command), comments=True)[1:]
    with subprocess.Popen(
        [sys.executable, "-m", "vllmx", *words], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the host of ranks ended"
                found = re.search(r"wait at (\S+)", line)
            yield found[1]
        finally:
            process.kill()


@contextlib.contextmanager
def started(page: str, command: str, folder: Path) -> Iterator[RunningServer]:
    """The server of a command, and its ranks on another host where it has such."""
    with contextlib.ExitStack() as stack:
        if "--rank-hosts" in command:
            place = stack.enter_context(ranks(page, folder))
            command = re.sub(r"--rank-hosts \S+", f"--rank-hosts {place}", command)
        flags = shlex.split(command, comments=True)[2:]
        if "--port" not in flags:
            flags += ["--port", "0"]
        yield stack.enter_context(running_server(*flags, environment=environment(folder)))


def kind_of(serve: str) -> str:
    """The kind of model that a command serves."""
    kind = next((kind for name, kind in HUB.items() if name in serve), "text")
    return "images" if kind == "image files" or "--mmproj" in serve else kind


def ask(server: RunningServer, command: str, key: str | None) -> None:
    """One question to each model of a server, in the form that its kind of model answers."""
    with_key = {} if key is None else {"authorization": f"Bearer {key}"}
    listed = server.get("/v1/models", headers=with_key)
    assert listed.status_code == 200, listed.text
    kind = kind_of(command)
    for card in listed.json()["data"]:
        body: dict[str, Any] = {"model": card["id"]}
        path = "/v1/chat/completions"
        if kind == "audio":
            url, files = f"{server.url}/v1/audio/transcriptions", {"file": wav(sound(0.2))}
            answer = httpx.post(url, data=body, files=files, headers=with_key, **PLAIN)
            assert answer.status_code == 200, (command, answer.text)
            continue
        if kind == "embed":
            path = "/v1/embeddings"
            body["input"] = "Hello!"
        elif kind in ("rerank", "classify"):
            path = "/v1/rerank"
            body |= {"query": "Hello!", "documents": ["one", "two"]}
        elif kind == "encoder-decoder":
            path = "/v1/completions"
            body |= {"prompt": "w7 w8", "max_tokens": 4}
        else:
            content = SHOWN_TO.get(kind, "Hello!")
            body |= {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = server.post(path, body, headers=with_key)
        assert answer.status_code == 200, (command, answer.text)


def fits(curl: str, serve: str) -> bool:
    """Whether a question is one for the server of a command; the demo answers the rest."""
    if "--unix-socket" in curl:
        return "--admin-uds" in serve
    return curl_path(curl).endswith("/embeddings") and kind_of(serve) == "embed"


def curl_path(curl: str) -> str:
    return next(word for word in shlex.split(curl) if word.startswith("http"))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return makes(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_commands_of_the_page_run(
    page: str,
    server: RunningServer,
    stand_in: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    furnish(tmp_path, " ".join(RUN[page]), (ROOT / page).read_text(encoding="utf-8"), stand_in)
    monkeypatch.chdir(tmp_path)
    curls = [replaced(each) for each in RUN[page] if each.startswith("curl")]
    serves = [each for each in RUN[page] if each.startswith("vllmx serve")]
    key = None
    for command in RUN[page]:
        text = replaced(command).replace("http://127.0.0.1:8000", server.url)
        if command.startswith("vllmx serve"):
            if FIRST[replaced(command)] != page:
                continue
            given = re.search(r"--api-key (\S+)", command)
            with started(page, text, tmp_path) as running:
                ask(running, command, given[1] if given else key)
                for curl in curls:
                    if fits(curl, command):
                        run(curl.replace("http://127.0.0.1:8000", running.url), tmp_path, page)
        elif command.startswith("curl"):
            if not any(fits(command, serve) for serve in serves):
                run(text, tmp_path, page)
        elif not command.startswith("vllmx rank"):  # runs beside the servers that name it
            printed = run(text, tmp_path, page)
            made = re.search(r"^vx-\S+", printed, re.MULTILINE)
            key = made[0] if made else key
