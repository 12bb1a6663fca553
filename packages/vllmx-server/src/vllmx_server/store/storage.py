"""All that is kept, opened together."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

from vllmx_server.config import ServerConfig
from vllmx_server.store.batches import Batches
from vllmx_server.store.conversations import Conversations
from vllmx_server.store.database import Database, StorageError
from vllmx_server.store.files import Files, Quota
from vllmx_server.store.folder import Folder
from vllmx_server.store.ids import now
from vllmx_server.store.responses import Responses

_DAY_S = 86400


class Storage:
    """Files, batches, responses and conversations over one database.

    Raises ConfigError where the folder cannot be used.
    """

    def __init__(self, config: ServerConfig, folder: Folder | None = None) -> None:
        self.lifetime_s = round(config.max_stored_days * _DAY_S)
        self.folder = folder or Folder(config.data_dir)
        self.database = Database(self.folder.database)
        quota = Quota(config.max_stored_bytes, config.max_stored_files)
        self.files = Files(self.database, self.folder, quota, self.lifetime_s)
        self.batches = Batches(self.database, config.max_stored_files)
        self.responses = Responses(self.database, config.max_stored_bytes, self.lifetime_s)
        self.conversations = Conversations(self.database, config.max_stored_bytes, self.lifetime_s)

    async def check(self) -> None:
        """Raises ConfigError where a folder that was named can keep nothing."""
        try:
            await self.database.run(lambda connection: None)
        except StorageError as error:
            raise ConfigError(
                f"nothing can be kept in --data-dir {self.folder.database} just now"
                f" ({error.reason}): free some space there, or name another folder",
                param="data_dir",
            ) from None

    async def clean(self) -> None:
        """Forgets what is too old."""
        await self.files.clean()
        await self.responses.clean()
        await self.conversations.clean()
        await self.batches.forget_before(now() - self.lifetime_s)

    def close(self) -> None:
        """Waits for what is under way. May be called twice."""
        self.files.close()
        self.database.close()
        self.folder.close()
