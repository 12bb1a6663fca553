"""The input history of `vllmx chat`, kept across sessions in a file that only its user can read."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllmx_core.system.files import replacing

logger = logging.getLogger("vllmx.chat")

MAX_ENTRIES = 1000
MAX_FILE_BYTES = 4 << 20


def history_path() -> Path:
    """The file in the user's folder for state (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllmx" / "chat_history.jsonl"


def load(path: Path) -> list[str]:
    """The latest entries, oldest first; empty without a readable file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return []
        lines = path.read_text("utf-8").splitlines()[-MAX_ENTRIES:]
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, str):
            found.append(entry)
    return found


def save(path: Path, entries: list[str]) -> None:
    """Replaces the file, mode 0600. If the folder cannot be written, only the history is lost."""
    text = "".join(json.dumps(entry) + "\n" for entry in entries[-MAX_ENTRIES:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, private=True) as file:
            file.write(text.encode())
    except OSError as error:
        logger.info("the history is not kept: %s", error)


class LineEditor:
    """Reads lines with editing, a history, completion and bracketed paste, if Python has readline.

    Args:
        commands: completed by the tabulator.
        file_commands: those that take the name of a file.
    """

    def __init__(
        self, path: Path | None, commands: Sequence[str] = (), file_commands: Sequence[str] = ()
    ) -> None:
        self._path, self._commands, self._file_commands = path, commands, file_commands
        self._new: list[str] = []
        try:
            import readline
        except ImportError:  # then lines are plain
            return
        # Python switches bracketed paste off; with it, several pasted lines are one entry.
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)
        if commands:
            readline.set_completer(self._completion)
            readline.set_completer_delims(" \t\n")
            gnu = "GNU" in (readline.__doc__ or "")
            readline.parse_and_bind("tab: complete" if gnu else "bind ^I rl_complete")
        for entry in load(path) if path is not None else ():
            readline.add_history(entry)
        self._readline: Any = readline

    _readline: Any = None

    def _completion(self, word: str, index: int) -> str | None:
        """The n-th completion: of a command at a line's begin, of a path behind some commands."""
        line = self._readline.get_line_buffer()
        found = list[str]()
        if word == line and line.startswith("/"):
            found = [each for each in self._commands if each.startswith(word)]
        elif line.split(" ")[0] in self._file_commands:
            pattern = glob.escape(os.path.expanduser(word)) + "*"
            found = [path + "/" * os.path.isdir(path) for path in sorted(glob.glob(pattern))]
        return found[index] if index < len(found) else None

    def read(self, prompt: str, more: str) -> str:
        """The next entry; a backslash at the end of a line continues it. Raises EOFError."""
        line = input(prompt)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(more)
        self._remember(line)
        return line

    def _remember(self, line: str) -> None:
        if not line.strip() or self._new[-1:] == [line]:
            return
        self._new.append(line)
        if self._readline is not None:
            self._readline.add_history(line)

    def close(self) -> None:
        """Writes the history: entries that other sessions wrote meanwhile, then this session's."""
        if self._path is not None and self._new:
            save(self._path, [*load(self._path), *self._new])
