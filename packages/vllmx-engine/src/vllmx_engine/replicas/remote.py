"""The frontend over the cores of --replica-hosts, which run on other hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from vllmx_core.errors import ConfigError, EngineDeadError
from vllmx_core.system.files import replacing
from vllmx_core.system.handshake import read_key

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.attached_frontend import AttachedFrontend
from vllmx_engine.link.frontend import ASLEEP, Frontend, Listener
from vllmx_engine.link.remote_core import RemoteCore, digest_key, remote_cores
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.wire.messages import CoreInfo

WANTED = ".wanted"
"""The end of the name of the file next to that of --replica-hosts @FILE: a 1 for each line whose
core should run, or a 0. Whoever writes the one reads the other."""


class CalledFrontend(AttachedFrontend):
    """The way to a core that another program starts and ends, as the file of `WANTED` says.

    Args:
        wanted: what that file says, common to all replicas.
        file: its path.
    """

    def __init__(self, core: RemoteCore, wanted: list[bool], number: int, file: Path) -> None:
        super().__init__(core)
        self._wanted, self._number, self._file = wanted, number, file

    def begin_asleep(self, info: CoreInfo) -> None:
        """Takes the description of another core: this one starts with `wake`."""
        self.info, self.status = info, "asleep"

    async def sleep(self, level: int = 2) -> None:
        """Has the core ended, which holds no files whatever the level. Requests in flight are
        lost."""
        self.status = "asleep"
        if self._reattaching is not None:
            self._reattaching.cancel()
            await asyncio.wait([self._reattaching])
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._want(is_wanted=False)
        self._tell_lost(EngineDeadError(ASLEEP))

    async def wake(self) -> None:
        """Has the core started, and waits for it. Raises what `Place.connected` raises."""
        if self.status != "asleep":
            return
        self._want(is_wanted=True)
        await self.begin(self.listener)
        if self.listener is not None:
            self.listener.restarted(self.info)

    def _want(self, *, is_wanted: bool) -> None:
        self._wanted[self._number] = is_wanted
        with replacing(self._file) as file:
            file.write("".join(str(int(one)) for one in self._wanted).encode())


async def attach_remote(found: FoundModel) -> ReplicaFrontend:
    """Reaches all replicas on other hosts. Raises ConfigError."""
    config = found.config
    key = read_key(config.rank_key_file, "replicas")
    cores = await asyncio.to_thread(remote_cores, found, key)
    least = config.min_replicas or len(cores)
    if least > len(cores):
        raise ConfigError(
            f"--min-replicas {least} is more than the {len(cores)} lines of --replica-hosts"
            f" {config.replica_hosts}: add lines",
            param="min_replicas",
        )
    file = Path(f"{config.replica_hosts}{WANTED}".removeprefix("@"))
    wanted = [number < least for number in range(len(cores))]
    begun: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()

    async def start(number: int, told: Listener) -> Frontend:
        if config.min_replicas is None:
            return await AttachedFrontend.start(cores[number], told)
        made = CalledFrontend(cores[number], wanted, number, file)
        if number < least:
            await made.begin(told)
            if number == least - 1:
                begun.set_result(made.info)
        else:
            made.listener = told
            made.begin_asleep(await begun)
        return made

    return await ReplicaFrontend.start(
        digest_key(key) if config.enable_prefix_caching else b"",
        len(cores),
        start,
        least_remote=config.remote_prefill_tokens,
        address=lambda number: cores[number].address,
        least=config.min_replicas,
    )
