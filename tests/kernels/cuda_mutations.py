"""Plants one bug at a time into a copy of the CUDA kernels and runs the tests that should find it.

`python -m tests.kernels.cuda_mutations [WORD]` (or `nox -s kernels`); exit code 1: one survives.
WORD: only the bugs whose line holds it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllmx_testing.cuda.emulator.build import KERNELS

from .cuda_bugs import attention, codes, linear, peers, rows, sampling
from .cuda_bugs.bug import Bug

TESTS = Path(__file__).parent
FOLDER_VARIABLE = "VLLMX_TESTED_KERNELS"
"""Where conftest.py's emulators take the sources from."""
BUGS = (
    *rows.BUGS,
    *peers.BUGS,
    *sampling.BUGS,
    *attention.BUGS,
    *linear.BUGS,
    *codes.BUGS,
)


def survives(bug: Bug) -> bool:
    """Whether the tests pass in spite of it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kernels"
        shutil.copytree(KERNELS, copy)
        path = copy / bug.source
        text = path.read_text()
        assert bug.old in text, f"{bug.source} has no {bug.old!r}: update this list"
        path.write_text(text.replace(bug.old, bug.new))
        file, _, expression = bug.test.partition(":")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", str(TESTS / file)]
        command += ["-p", "no:cacheprovider", *(["-k", expression] if expression else [])]
        environment = {**os.environ, FOLDER_VARIABLE: str(copy)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest failed to run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [bug for bug in BUGS if word in f"{bug.source}: {bug.what}"]
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for bug, survived in zip(chosen, pool.map(survives, chosen), strict=True):
            print("SURVIVES" if survived else "found   ", f"{bug.source}: {bug.what}", flush=True)
            survivors += survived
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs were found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
