"""Files and batches of a server."""

from __future__ import annotations

from vllmx_server.apis.batches.files import Files, Quota
from vllmx_server.apis.batches.line import LineAnswerer
from vllmx_server.apis.batches.line_slots import LineSlots
from vllmx_server.apis.batches.runner import BatchRunner
from vllmx_server.apis.batches.store import Batches
from vllmx_server.config import ServerConfig
from vllmx_server.generating.served import Served
from vllmx_server.store.ids import now
from vllmx_server.store.storage import Storage


class KeptFiles:
    """Files, and batches over them.

    Attributes:
        runner: works on the batches; set before the first request.
    """

    def __init__(self, config: ServerConfig, storage: Storage) -> None:
        quota = Quota(config.max_stored_bytes, config.max_stored_files)
        self.files = Files(storage.database, storage.folder, quota, config.lifetime_s)
        self.batches = Batches(storage.database, config.max_stored_files)
        self.runner: BatchRunner
        self._lifetime_s = config.lifetime_s

    async def clean(self) -> None:
        """Deletes what is too old."""
        await self.files.clean()
        await self.batches.forget_before(now() - self._lifetime_s)


def batch_runner(kept: KeptFiles, served: Served) -> BatchRunner:
    """The runner of a server, whose lines take the rows that other requests leave free."""
    llm = served.llm
    slots = LineSlots(
        lambda: llm.info.max_num_seqs, lambda: max(0, llm.num_in_flight - slots.num_taken)
    )
    assert served.app is not None
    return BatchRunner(
        kept.batches,
        kept.files,
        LineAnswerer(served.app, served.endpoints),
        slots,
        served.config.max_body_bytes,
        lambda: llm.is_ready or served.sleeps_idle,
    )
