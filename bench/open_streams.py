"""Many streams that stay open for long: is the memory of each process flat meanwhile?

    python bench/open_streams.py --streams 1000 --minutes 60 [--step-ms 1000] [--flags "..."]

`vllmx serve` over a fake model that costs nothing and makes a token a step for each stream, which
are not over before 4,000 steps. Reported are what each process holds more than before the streams,
for each of them (goal: 60 KB in the API process), and its memory in the first and in the last third
of the time (goal: the same).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from residence import Residence
from serve import fake_model
from served import vllmx
from vllmx.bench.figures import show
from vllmx.bench.processes import server_process
from vllmx_testing.fake_checkpoint import install_fake_plugin

_SAMPLE_S = 10.0
_SETTLE_S = 15.0
"""The seconds after the last stream has begun until the memory is looked at."""
_TOKENS = 4000
"""The tokens of each stream: the model's context holds them, and they take over an hour."""
_BODY = {"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}


async def one(host: str, port: int, begun: asyncio.Event) -> int:
    """A stream, read until it is cancelled or broken; returns how many events came."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(_BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    count = 0
    try:
        async for line in reader:
            if line.startswith(b"data: {"):
                count += 1
                begun.set()
    except asyncio.CancelledError:
        return count
    finally:
        begun.set()
        writer.close()
    return -1


async def run(options: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    residence = Residence(pid)
    residence.look()
    begun = [asyncio.Event() for _ in range(options.streams)]
    tasks = [asyncio.ensure_future(one(host, int(port), each)) for each in begun]
    await asyncio.gather(*(each.wait() for each in begun))
    await asyncio.sleep(_SETTLE_S)
    residence.look()
    before, after = (mb for _, mb in residence.samples)
    residence.samples.clear()
    watch = asyncio.ensure_future(residence.watch(_SAMPLE_S))
    await asyncio.sleep(options.minutes * 60)
    watch.cancel()
    for task in tasks:
        task.cancel()
    counts = await asyncio.gather(*tasks)
    return {
        "memory": residence.thirds(),
        "KB of a stream": {
            name: round((mb - before.get(name, 0.0)) / options.streams * 1e3, 1)
            for name, mb in after.items()
        },
        "streams that broke": sum(count < 0 for count in counts),
        "events of each": (min(counts), max(counts)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=1000.0)
    parser.add_argument("--flags", default="", help="more flags of vllmx serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plugins = install_fake_plugin(Path(scratch) / "plugins")
        folder = fake_model(Path(scratch) / "model", options.step_ms / 1e3)
        flags = ("--model", str(folder), "--backend", "fake", *options.flags.split())
        flags += ("--max-num-seqs", str(options.streams))
        flags += ("--num-kv-blocks", str(options.streams * 256))
        paths = [str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = vllmx(*flags)
        with server_process(command, environment) as server:
            found = asyncio.run(run(options, server.url, server.pid))
    print(show(found.pop("memory"), as_json=False))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
