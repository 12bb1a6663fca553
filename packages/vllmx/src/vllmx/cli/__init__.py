"""The entry point of the `vllmx` command; `vllmx.cli.group` has the commands.

Nothing is imported before `main` has seen to Ctrl-C, which may come while modules are imported.
"""

import signal
import sys


def main() -> None:
    """Runs the command line; exit codes are those of docs/commands.md."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback
    from vllmx.cli.errors import run
    from vllmx.cli.group import cli

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(cli))
