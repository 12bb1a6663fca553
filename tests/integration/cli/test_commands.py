"""The commands as a user types them, on the demo model and the best backend of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked


def vllmx(*arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run(*arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    return done


GREEDY = ("--temperature", "0", "--max-tokens", "12")


def test_complete_streams_one_prompt() -> None:
    """Started as a user does; the commands below are forked."""
    command = [sys.executable, "-m", "vllmx", "complete", "--prompts", "Once upon a time", *GREEDY]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("Once upon a time, there was a")


def test_complete_takes_prompts_from_flags_a_file_and_stdin(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('Once upon a time\n{"prompt": "The sun"}\n')
    runs = [
        vllmx("complete", "--prompts", "Once upon a time | The sun", "--json", *GREEDY),
        vllmx("complete", "--prompts-file", str(file), "--json", *GREEDY),
        vllmx("complete", "--prompts-file", "-", "--json", *GREEDY, stdin=file.read_text()),
        vllmx("complete", "--json", *GREEDY, stdin=file.read_text()),
    ]
    assert len({run.stdout for run in runs}) == 1
    records = [json.loads(line) for line in runs[0].stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["Once upon a time", "The sun"]
    assert records[0]["completion_tokens"] == 12
    assert records[0]["finish_reason"] == "length"


def test_lines_have_their_own_parameters_and_batches_their_answers(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    ask = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ask}
    lines = [{"prompt": "Once upon a time", "max_tokens": 2}, batch, {"prompt": "The sun"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = vllmx("complete", "--prompts-file", str(file), "--json", *GREEDY).stdout
    first, second, third = (json.loads(line) for line in out.splitlines())
    assert (first["completion_tokens"], third["completion_tokens"]) == (2, 12)
    assert second["custom_id"] == "a"
    message = second["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello! How can I help you today?"}


def test_complete_as_chat() -> None:
    out = vllmx("complete", "--chat", "--prompts", "Hello!", *GREEDY).stdout
    assert out == "Hello! How can I help you today?\n"


def test_chat_reads_lines_and_commands() -> None:
    script = "Hello!\n/nonsense\n/set temperature 0\n/again\n/quit\n"
    out = vllmx("chat", "--temperature", "0", stdin=script).stdout
    assert out.count("Hello! How can I help you today?") == 2
    assert "unknown command /nonsense" in out


def test_env_and_plugins_for_scripts() -> None:
    facts = json.loads(vllmx("env", "--json").stdout)
    assert facts["backends"]["numpy"] == "available"
    assert facts["versions"]["vllmx"]
    found = json.loads(vllmx("plugins", "--json").stdout)
    assert any("model llama" in plugin["provides"] for plugin in found["plugins"])
    assert not found["conflicts"]


def test_bench_reports_json() -> None:
    out = vllmx(
        "bench", "throughput", "--n", "1,2", "--input-len", "8", "--output-len", "4",
        "--repeat", "1", "--json",
    ).stdout  # fmt: skip
    records = json.loads(out)
    assert [record["n"] for record in records] == [1, 2]
    assert all(record["output_tokens_per_s"] > 0 for record in records)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "/does/not/exist"], "/does/not/exist"),
        (["complete", "--backend", "nonsense", "-p", "x"], "no backend named 'nonsense'"),
        (["complete"], "there is no prompt, standard input is empty"),
        (["complete", "-p", " | "], "there is no prompt, --prompts is empty"),
        (["complete", "--prompts-file", "/dev/null"], "there is no prompt, /dev/null is empty"),
        (["quantize", "demo", "/dev/null"], "/dev/null exists: say --overwrite"),
        (["complete", "--max-model-len", "100000", "-p", "x"], "2048"),
        (["complete", "--temperature", "-1", "-p", "x"], "temperature must be between"),
        (["complete", "-p", "word " * 4000], "2048"),
        (["complete", "--num-kv-blocks", "1", "--max-model-len", "2048", "-p", "x"], "block"),
        (["complete", "--kv-cache-memory-bytes", "9", "--max-model-len", "2048", "-p", "x"], "KV"),
        (["frobnicate"], "there is no command"),
        (["serve", "--frobnicate"], "no such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    done = vllmx(*arguments, code=2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = vllmx("serve", "/does/not/exist", "--port", str(port), code=2)
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "--port" in done.stderr
