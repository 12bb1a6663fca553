"""One look for every error, exit codes, nearest names, and Ctrl-C at any time."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from vllmx.cli.errors import run
from vllmx.cli.group import SHELLS, cli
from vllmx_core.errors import ConfigError, EngineDeadError, StepTimeoutError

from tests.waiting import PATIENCE_S


def command(error: BaseException | None) -> click.Command:
    @click.command()
    def raises() -> None:
        if error is not None:
            raise error

    return raises


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, 0, ""),
        (ConfigError("no such thing: say it"), 2, "error: no such thing: say it\n"),
        (click.ClickException("Bad file."), 2, "error: bad file.\n"),
        (ConfigError("FalconH1ForCausalLM is new"), 2, "error: FalconH1ForCausalLM is new\n"),
        (EngineDeadError("the core is gone"), 1, "error: the core is gone\n"),
        (StepTimeoutError("it hangs"), 1, "error: it hangs\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(1), 1, ""),
    ],
)
def test_each_kind_of_end_has_its_code(
    error: BaseException | None, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(error), []) == code
    assert capsys.readouterr().err.lstrip("\n") == text


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(command(ZeroDivisionError()), [])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("srve", "error: there is no command 'srve'; did you mean 'serve'?\n  `vllmx --help` says"),
        ("qqqq", "; known: serve, chat, complete"),
        ("serve --prot 1", "'--port'"),
        ("bench thruput", "'throughput'"),
        ("complete --log-level loud", "error: --log-level must be one of debug, info"),
        ("chat --log-level degub", "did you mean 'debug'?"),
        ("serve --backend cup --port 0", "no backend named 'cup'; did you mean 'cpu'?"),
        ("serve --isq q4_k_n", "did you mean 'q4_k_"),
        ("serve --scheduling-policy prioriti", "did you mean 'priority'?"),
        ("serve a b", "error: got unexpected extra argument (b)\n  `vllmx serve --help` says more"),
    ],
)
def test_what_is_mistyped_is_named_with_the_nearest(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--backend" in arguments:
        pytest.importorskip("vllmx_cpu")
    assert run(cli, arguments.split()) == 2
    assert text in capsys.readouterr().err


INTERRUPT = """
import builtins, os, signal, sys
plain, target = builtins.__import__, sys.argv[1]
def importing(name, *rest):
    if name == target:
        builtins.__import__ = plain
        os.kill(os.getpid(), signal.SIGINT)
    return plain(name, *rest)
builtins.__import__ = importing
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from vllmx.cli import main
sys.argv = ["vllmx", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(
    "module", ["typing", "importlib", "click", "vllmx_core.errors", "numpy", "vllmx_core.sampling"]
)
def test_ctrl_c_during_imports_leaves_no_traceback(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, module, "complete", "--prompts", "a"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode in (130, -signal.SIGINT)
    assert not done.stderr.strip()


def test_nothing_is_read_from_disk_before_ctrl_c_is_seen_to() -> None:
    program = "import sys; old = set(sys.modules); import vllmx.cli; print(set(sys.modules) - old)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    read = ast.literal_eval(done.stdout) - {*sys.builtin_module_names}
    assert read <= {"__future__", "vllmx", "vllmx.cli"}


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_VLLMX_COMPLETE" in result.output


def test_completion_knows_commands_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import BashComplete

    completer = BashComplete(cli, {}, "vllmx", "_VLLMX_COMPLETE")
    assert [item.value for item in completer.get_completions([], "ser")] == ["serve"]
    found = [item.value for item in completer.get_completions(["serve"], "--max-m")]
    assert found == ["--max-model-len"]
    assert not completer.get_completions(["serve"], "--trust-remote"), (
        "flags of others are not offered"
    )
