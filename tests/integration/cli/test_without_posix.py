"""Commands without what Python lacks on Windows; the rest of Windows is not simulated."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import mmap, os, signal, socket, subprocess, sys

for module in ("fcntl", "resource", "termios", "pwd", "grp", "readline"):
    sys.modules[module] = None
lacking = {
    os: "fork geteuid getuid setsid killpg sched_getaffinity sched_setaffinity pread preadv pwrite"
    " posix_fadvise getloadavg memfd_create statvfs fchmod chown register_at_fork O_NOFOLLOW"
    " O_CLOEXEC O_DIRECTORY O_NONBLOCK",
    socket: "AF_UNIX send_fds recv_fds SO_REUSEPORT",
    mmap: "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MADV_HUGEPAGE MADV_DONTNEED PROT_READ PROT_WRITE",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGQUIT SIGCHLD SIGPIPE pthread_sigmask",
}
for module, names in lacking.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
from vllmx.cli import main

main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_model_answers_in_this_process() -> None:
    """With a schema, which is checked without a child process."""
    line = '{"prompt": "Once", "max_tokens": 30, "structured_outputs": {"json": {"const": 7}}}'
    command = [sys.executable, "-c", WITHOUT, "complete", "--model", "demo"]
    done = subprocess.run(
        command, input=line, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "Once7"), done.stderr


def test_a_chat_answers() -> None:
    done = run("run", "demo", "Once upon a time", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_servers_say_where_they_run() -> None:
    for command in (["serve", "demo"], ["core", "demo", "--listen", "127.0.0.1:1"]):
        done = run(*command)
        assert done.returncode == 2
        assert f"error: `vllmx {command[0]}` needs Linux or macOS: run it in WSL 2" in done.stderr
