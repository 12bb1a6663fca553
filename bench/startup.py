"""Start-up times, each in fresh processes: interpreter, help, first token of `complete`, a server.

    python bench/startup.py [--repeat 7] [--json] [-- FLAGS OF vllmx, e.g. --backend cpu]

The first run of each row warms the file cache and is not counted. Wall seconds; medians are what to
quote, min and max show how noisy the machine was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

from vllmx.bench.processes import startup

TARGETS_S = {"vllmx --help": 0.25, "complete: first token": 1.0}


def process(*arguments: str) -> float:
    """Wall seconds of a whole process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def server(flags: list[str]) -> tuple[float, float]:
    """Seconds until /health answers 200, and until the first streamed token after that start."""
    started = time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "vllmx", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stderr is not None
        url = next(line.strip() for line in running.stderr if line.strip().endswith("/v1"))
        while True:
            try:
                with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.005)
        ready = time.perf_counter() - started
        body = json.dumps({"prompt": "Once", "max_tokens": 4, "stream": True}).encode()
        request = urllib.request.Request(
            f"{url}/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            return ready, time.perf_counter() - started
    finally:
        running.terminate()
        running.wait(30)
        assert running.stderr is not None
        running.stderr.close()


def repeated(measure: Callable[[], float], repeat: int) -> list[float]:
    return [measure() for _ in range(repeat + 1)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("flags", nargs="*", help="after --: flags of complete and serve")
    options = parser.parse_args()
    rows = {
        "python -c pass": repeated(lambda: process("-c", "pass"), options.repeat),
        "import vllmx": repeated(lambda: process("-c", "import vllmx"), options.repeat),
        "vllmx --help": repeated(lambda: process("-m", "vllmx", "--help"), options.repeat),
        "vllmx serve --help": repeated(
            lambda: process("-m", "vllmx", "serve", "--help"), options.repeat
        ),
    }
    figures = startup(options.repeat, options.flags)
    servers = [server(options.flags) for _ in range(options.repeat + 1)][1:]
    rows["serve: ready"] = [ready for ready, _ in servers]
    rows["serve: first streamed token"] = [first for _, first in servers]
    table = {
        name: {"median_s": statistics.median(row), "min_s": min(row), "max_s": max(row)}
        for name, row in rows.items()
    }
    table["complete: first token"] = {
        f"{key}_s": float(figures[f"first_token_{key}_s"]) for key in ("median", "min", "max")
    }
    if options.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{'':30}{'median':>8}{'min':>8}{'max':>8}{'target':>8}   seconds")
    for name, row in table.items():
        target = f"{TARGETS_S[name]:8.2f}" if name in TARGETS_S else ""
        print(f"{name:30}{row['median_s']:8.3f}{row['min_s']:8.3f}{row['max_s']:8.3f}{target}")


if __name__ == "__main__":
    main()
