"""Files, OpenAI's batches, and Anthropic's batches of Messages."""

from __future__ import annotations

from vllmx_server.apis.batches import file_routes, message_routes, routes
from vllmx_server.apis.batches.runner import KeptFiles, batch_runner
from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.generating.served import Served
from vllmx_server.store.database import Storage


class BatchesApi(Api):
    routes = (*file_routes.ROUTES, *routes.ROUTES, *message_routes.ROUTES)

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._kept: KeptFiles | None = None
        self._outlives = False

    def open(self, storage: Storage) -> KeptFiles:
        """The files, which work before there is an engine."""
        if self._kept is None:
            self._outlives = storage.folder.outlives
            self._kept = KeptFiles(self.config, storage)
        return self._kept

    def start(self, served: Served) -> None:
        kept = served.stores[KeptFiles] = self.open(served.storage)
        kept.runner = batch_runner(kept, served)

    async def lead(self, *, takes_over: bool) -> None:
        assert self._kept is not None
        if self._outlives and not takes_over:  # other processes go on writing files
            await self._kept.files.clean_strangers()
        if self._outlives or takes_over:
            await self._kept.runner.resume()

    async def clean(self) -> None:
        assert self._kept is not None
        await self._kept.clean()

    async def stop(self) -> None:
        """Takes batches out of the engine."""
        if self._kept is not None:
            await self._kept.runner.stop()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.files.close()
