"""One rank of `test_metal_ring`: `python -m tests.backend.metal_ring_process REGION RANK RANKS OUT
[relayed]`. It writes the logits of each model and what sums went through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import vllmx_metal.backend
from vllmx_core.sharding.model import sharded
from vllmx_metal.ranks import MetalRanks
from vllmx_metal.ring import meet
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from .metal_ring_models import MODELS, chunks, options
from .test_sharding import of

RELAY = """
import socket, sys, threading, time
def copy(one, other):
    while data := one.recv(1 << 16):
        other.sendall(data)
listener = socket.create_server(("127.0.0.1", 0))
listener.settimeout(60)  # or it would outlive a rank that has failed
print(listener.getsockname()[1], flush=True)
taken = listener.accept()[0]
made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=copy, args=(made, taken), daemon=True).start()
copy(taken, made)
"""


def relay_calls() -> list[subprocess.Popen[str]]:
    """Puts somebody else between this rank and the next one, who hands on all that is said."""
    real, relays = mx.distributed.init, []

    def init(**how: Any) -> Any:
        addresses = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        host, port = addresses[0][0].split(":")
        relay = subprocess.Popen(
            [sys.executable, "-c", RELAY, port], stdout=subprocess.PIPE, text=True
        )
        relays.append(relay)
        assert relay.stdout is not None
        addresses[0] = [f"{host}:{int(relay.stdout.readline())}"]
        Path(os.environ["MLX_HOSTFILE"]).write_text(json.dumps(addresses))
        return real(**how)

    mx.distributed.init = init
    return relays


def main() -> None:
    """All models on one ring, as a process has one; or one model where somebody listens."""
    region, rank, ranks, out = Region(int(sys.argv[1]), int(sys.argv[3])), *sys.argv[2:5]
    own = SharedMemoryCommunicator(region, int(rank))
    relays = relay_calls() if rank == "1" and "relayed" in sys.argv else []
    joined: list[MetalRanks | None] = []

    def once(communicator: Any) -> MetalRanks | None:
        if not joined:
            joined.append(meet(communicator))
        return joined[0]

    vllmx_metal.backend.meet = once
    found: dict[str, Any] = {}
    for name, config in list(MODELS.items())[: 1 if "relayed" in sys.argv else None]:
        model, source = of(config)
        mine = sharded(model, source, 64, int(rank), int(ranks))
        loaded = vllmx_metal.backend.MetalBackend().load(mine, source, options(communicator=own))
        found[name] = chunks(loaded)
        loaded.close()
    for relay in relays:
        relay.kill()
        relay.wait()
    assert joined[0] is not None
    np.savez(out, over=np.array(joined[0].over), **found)


if __name__ == "__main__":
    main()
