"""`vllmx run-batch` on the demo model, and over its end by SIGKILL."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllmx_testing.fake_checkpoint import install_fake_plugin, make_fake_checkpoint

from tests.waiting import PATIENCE_S


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def run(*arguments: str, code: int = 0, **options: Any) -> str:
    command = [sys.executable, "-m", "vllmx", "run-batch", *arguments]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def test_lines_of_several_routes(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    talk = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 30}
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": talk}
    source.write_text(line("text") + line("bad", temperature=-1) + json.dumps(chat) + "\n")
    assert "2 answered, 1 failed" in run(str(source), str(out))
    text, answer, bad = records(out)
    assert text["response"]["body"]["choices"][0]["text"].startswith(", there was")
    assert answer["response"]["body"]["choices"][0]["message"]["content"]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "exists" in run("-i", str(source), "-o", str(out), code=2)
    source.write_text(line("a") + "{nonsense\n" + line("a"))
    errors = run("-i", str(source), "-o", str(out), "--overwrite", code=2)
    assert "line 2" in errors
    assert "line 3: the custom_id 'a' is given twice" in errors
    assert len(records(out)) == 3, "an output is not replaced by nothing"


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    model = make_fake_checkpoint(tmp_path / "model", vocab_size=128, eos_id=None)
    plugins = str(install_fake_plugin(tmp_path / "plugins"))
    env = {**os.environ, "PYTHONPATH": plugins}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"c{i}" for i in range(40)]
    source.write_text("".join(map(line, names)))
    flags = [str(source), str(out), "--model", str(model), "--backend", "fake"]

    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    told = run(*flags, code=2, env=env, preexec_fn=without_room)
    assert f"cannot write {out}" in told
    assert "Make room there and run the same command again" in told
    assert "the server's log" not in told
    assert not out.exists()
    run(*flags, env=env)
    assert [record["custom_id"] for record in records(out)] == names


def test_it_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    fake: dict[str, Any] = {"vocab_size": 128, "eos_id": None, "step_s": 0.02}
    # The first run stands still before all is answered, however late it is looked at.
    model = make_fake_checkpoint(tmp_path / "model", **fake, hang_steps=[40])
    plugins = str(install_fake_plugin(tmp_path / "plugins"))
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": plugins}}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"c{i}" for i in range(40)]
    source.write_text("".join(map(line, names)))
    flags = [str(source), str(out), "--model", str(model), "--backend", "fake"]
    flags += ["--max-num-seqs", "2"]
    command = [sys.executable, "-m", "vllmx", "run-batch", *flags]
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        answered = _wait_for_answers(tmp_path / "out.jsonl.progress" / "vllmx.sqlite3", 6)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    make_fake_checkpoint(model, **fake)
    assert "40 answered, 0 failed" in run(*flags, **options)
    found = {each["custom_id"]: each["id"] for each in records(out)}
    assert list(found) == names
    assert {name: found[name] for name in answered} == answered, "none was asked again"


def _wait_for_answers(path: Path, count: int) -> dict[str, str]:
    """The answers that are kept, when there are so many, as custom_id to their own id."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size:
            connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
            try:
                rows = connection.execute("SELECT answer FROM lines WHERE state = 1").fetchall()
            except sqlite3.OperationalError:
                rows = []  # its tables are being made
            finally:
                connection.close()
            if len(rows) >= count:
                answers = [json.loads(row[0]) for row in rows]
                return {each["custom_id"]: each["id"] for each in answers}
        time.sleep(0.05)
    raise AssertionError("no answers came")
