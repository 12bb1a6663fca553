"""Compiles all kernels of a model in parallel at its first start.

NVRTC lets one thread of a process compile at a time, so the work goes to worker processes
(`python -m vllmx_cuda.compiler.compiling`), which store their cubins in the cache.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllmx_core.errors import VllmxError
from vllmx_core.system.processors import available_processors
from vllmx_core.system.progress import show_progress

from vllmx_cuda.compiler.cubins import CubinCache, Keys, Target, Unit, missing
from vllmx_cuda.compiler.nvrtc import CompileError, Nvrtc

logger = logging.getLogger("vllmx.cuda")

MAX_WORKERS = 16
WORKER_PAYS = 3
"""The number of kernels to compile that makes up for the start of one more process."""


def compiled(
    units: Sequence[Unit],
    target: Target,
    compiler: Nvrtc,
    cache: CubinCache,
    *,
    progress: bool = False,
) -> dict[Unit, bytes]:
    """Cubins of all units. Raises CompileError of the first that fails."""
    keys = Keys(target)
    wanted = {unit: keys.key(unit) for unit in dict.fromkeys(units)}
    started, fresh = time.perf_counter(), missing(cache, wanted)
    workers = min(available_processors(), MAX_WORKERS, len(fresh) // WORKER_PAYS)
    if workers > 1:
        _compile_in_workers(fresh, target, cache, workers, progress)
    else:
        for done, unit in enumerate(fresh):
            cache.get_or_compile(wanted[unit], unit, target, compiler)
            if progress:
                show_progress("compiling kernels", done + 1, len(fresh))
    cubins = {
        unit: cache.get_or_compile(key, unit, target, compiler) for unit, key in wanted.items()
    }
    if fresh:
        seconds = time.perf_counter() - started
        logger.info("compiled %d kernel files for %s in %.1f s", len(fresh), target.arch, seconds)
    return cubins


def _compile_in_workers(
    units: Sequence[Unit], target: Target, cache: CubinCache, workers: int, progress: bool
) -> None:
    """Each worker gets the next unit when it has finished one. What goes wrong here goes wrong
    again, and is reported, where the parent finds the cubin missing."""
    jobs, lock, done = iter(units), threading.Lock(), 0

    def next_job() -> Unit | None:
        with lock:
            return next(jobs, None)

    def finished() -> None:
        nonlocal done
        with lock:
            done += 1
            if progress:
                show_progress("compiling kernels", done, len(units))

    threads = [
        threading.Thread(target=_feed, args=(next_job, finished, target, cache))
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _feed(next_job: Any, finished: Any, target: Target, cache: CubinCache) -> None:
    """Runs one worker until there is no job left or it dies."""
    newest = str(target.compiler_version[0])
    command = [sys.executable, "-P", "-m", "vllmx_cuda.compiler.compiling", newest]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        with subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            while (unit := next_job()) is not None:
                job = {
                    "source": str(unit.source),
                    "defines": unit.defines,
                    "arch": target.arch,
                    "include_folders": target.include_folders,
                    "folder": str(cache.folder),
                }
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    break
                finished()
    except BrokenPipeError:  # also where the pipe is closed, with what was not sent
        logger.warning("a process that compiles kernels died; going on without it")


def _serve(lines: Iterator[str], newest: int) -> None:
    """The worker: a job a line in, a line out when it is done, well or not. `newest`: the major
    version of its parent's compiler."""
    compiler = Nvrtc.open(newest)
    for line in lines:
        job = json.loads(line)
        unit = Unit(Path(job["source"]), tuple(job["defines"]))
        target = Target(job["arch"], compiler.version, tuple(job["include_folders"]))
        cache = CubinCache(Path(job["folder"]))
        try:
            cache.get_or_compile(Keys(target).key(unit), unit, target, compiler)
            answer = "compiled"
        except CompileError:
            answer = "failed"
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        _serve(iter(sys.stdin.readline, ""), int(sys.argv[1]))
    except (KeyboardInterrupt, VllmxError):
        sys.exit(1)
