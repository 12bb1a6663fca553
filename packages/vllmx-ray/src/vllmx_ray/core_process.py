"""The host of a replica's core: `python -P -m vllmx_ray.core_process`, started by an actor."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from vllmx_core.errors import VllmxError
from vllmx_core.system.greeter import listen
from vllmx_core.system.logs import configure_logging
from vllmx_engine.core.found_model import find_model
from vllmx_engine.link.core_host import serve_core
from vllmx_engine.wire.ipc import ErrorRecord

from vllmx_ray.child import Parent
from vllmx_ray.messages import Order, Report, order_decoder

HOST = "RAY_REPLICA_HOST"
"""The variable with the address of this node."""


async def _serve() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def on_end() -> None:
        loop.call_soon_threadsafe(ended.set)

    parent: Parent[Order] = Parent(order_decoder, on_end)
    order = await asyncio.to_thread(parent.message)
    logging.getLogger("vllmx").setLevel(order.log_level)
    try:
        found = await asyncio.to_thread(find_model, order.config)
        listener = listen((os.environ[HOST], 0))
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        parent.tell(Report(address=address))
        ready = Report(address=address, is_ready=True)
        serving = asyncio.ensure_future(
            serve_core(found, listener, order.key, lambda: parent.tell(ready))
        )
        ending = asyncio.ensure_future(ended.wait())
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()
    except VllmxError as error:
        parent.tell(Report(error=ErrorRecord.of(error)))


if __name__ == "__main__":
    configure_logging("info")
    asyncio.run(_serve())
    sys.exit(0)
