"""The folder and the database that APIs keep things in."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

from vllmx_server.store.database import Database, StorageError
from vllmx_server.store.folder import Folder


class Storage:
    """Opened together; the database once it is needed.

    Args:
        data_dir: path of the folder; None: nothing outlives the server.
        folder: in place of one that is opened.

    Raises ConfigError where the folder cannot be used.
    """

    def __init__(self, data_dir: str | None, folder: Folder | None = None) -> None:
        self.folder = folder or Folder(data_dir)
        self.database = Database(self.folder.database)

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

    def close(self) -> None:
        """Waits for work in progress. May be called twice."""
        self.database.close()
        self.folder.close()
