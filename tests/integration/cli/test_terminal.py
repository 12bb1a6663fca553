"""`vllmx chat` in a terminal: pastes, the history file, a full context."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllmx.terminal.history import MAX_ENTRIES, load, save

from tests.waiting import PATIENCE_S


class Terminal:
    """A program in a pseudo terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master, self.process, self.seen = master, process, ""

    def until(self, text: str, count: int = 1) -> None:
        """Reads until the text was seen so many times since the start."""
        while self.seen.count(text) < count:
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended without {text!r}: {self.seen!r}") from None

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


@contextmanager
def terminal(state: Path, *arguments: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllmx", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def needs_gnu_readline() -> None:
    readline = pytest.importorskip("readline")
    if "GNU" not in (readline.__doc__ or ""):
        pytest.skip("Python's line editor here is not GNU readline")


def test_a_paste_is_one_question_and_the_history_is_kept(tmp_path: Path) -> None:
    needs_gnu_readline()
    chat = ("chat", "--temperature", "0", "--max-tokens", "3")
    with terminal(tmp_path, *chat) as first:
        first.until("> ")
        first.type("\x1b[200~one\rtwo\x1b[201~\r")
        first.until("tokens/s")
        first.type("/show\r")
        first.until("parameters: ")
        assert first.seen.count("user: ") == 1
        assert "user: one\r\ntwo" in first.seen
        first.type("/quit\r")
        assert first.process.wait(PATIENCE_S) == 0
    kept = tmp_path / "vllmx" / "chat_history.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert load(kept) == ["one\ntwo", "/show", "/quit"]
    with terminal(tmp_path, *chat, "--no-history") as second:
        second.until("> ")
        second.type("/quit\r")
        assert second.process.wait(PATIENCE_S) == 0
    assert len(load(kept)) == 3
    with terminal(tmp_path, *chat) as third:
        third.until("> ")
        third.type("\x1b[A\x1b[A\r")  # two up: /show
        third.until("parameters: ")
        third.type("/quit\r")
        assert third.process.wait(PATIENCE_S) == 0


def test_a_full_context_says_how_to_make_room(tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--max-model-len", "64", "--temperature", "0") as chat:
        chat.until("> ")
        chat.type("Tell me a long story about a fox and a hen.\r")
        chat.until("/undo takes back the last question, /reset forgets")
        chat.type("And then what happened to the fox?\r")
        chat.until("/undo takes back the last question, /reset forgets", 2)
        chat.type("/reset\r")
        chat.until("The conversation starts anew.")
        chat.type("/quit\r")
        assert chat.process.wait(PATIENCE_S) == 0


def test_quantize_asks_before_it_replaces(tmp_path: Path) -> None:
    model = tmp_path / "small.gguf"
    model.write_text("mine")
    with terminal(tmp_path, "quantize", "demo", str(model)) as quantize:
        quantize.until("exists. Replace it? [y/N]")
        quantize.type("n\r")
        assert quantize.process.wait(PATIENCE_S) == 130
    assert model.read_text() == "mine"


def test_the_history_is_bounded_and_survives_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    save(path, [str(i) for i in range(MAX_ENTRIES + 5)])
    assert load(path) == [str(i) for i in range(5, MAX_ENTRIES + 5)]
    path.write_bytes(b'"a"\nnonsense\n[1]\n"b"\n')
    assert load(path) == ["a", "b"]
    path.write_bytes(b"\xff")
    assert load(path) == []
    assert load(tmp_path / "none") == []
    save(Path("/dev/null/folder/history"), ["x"])


def test_commands_and_files_are_completed(tmp_path: Path) -> None:
    needs_gnu_readline()
    (tmp_path / "a note.txt").write_text("one")
    (tmp_path / "notes.txt").write_text("The fox is red.")
    with terminal(tmp_path, "run", "demo", "--temperature", "0", "--max-tokens", "4") as chat:
        chat.until("> ")
        chat.type("/spec\t")
        chat.until("/speculate")
        chat.type(" ngram\r")
        chat.until("drafts by: ngram")
        chat.type(f"/file {tmp_path}/not\t\r")
        chat.until("goes with the next question (1 attached)")
        chat.type("What is red?\r")
        chat.until("tokens/s")
        chat.type("/show\r")
        chat.until("The fox is red.\r\n\r\nWhat is red?")
        chat.type("/speculate nothing\r")
        chat.until("--speculate must be one of")
        chat.type("And green?\r")
        chat.until("tokens/s", 2)
        chat.type("/quit\r")
        assert chat.process.wait(PATIENCE_S) == 0
