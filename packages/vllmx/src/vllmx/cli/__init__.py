"""The entry point of the `vllmx` command; `vllmx.cli.group` has the commands.

Before `main` has set up Ctrl-C, only modules that are loaded anyway are imported, since Ctrl-C may
come during imports. An earlier one gives a traceback of the interpreter's start.
"""

import _signal as signal  # type: ignore[import-not-found]  # which imports no `enum`
import gc
import sys


def main() -> None:
    """Runs the command line; exit codes are those of docs/commands.md."""
    gc.set_threshold(50_000)  # a start leaves no garbage; looking for it took an eighth of one
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback
    from vllmx.cli.errors import run
    from vllmx.cli.group import cli

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(cli))
