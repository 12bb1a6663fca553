"""A batch without a server: the same lines, answered by the same routes, from file to file."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.files import replacing
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server.apis.batches.api import BatchesApi
from vllmx_server.apis.batches.input import ANY_ENDPOINT
from vllmx_server.apis.batches.runner import KeptFiles
from vllmx_server.apis.batches.store import Batch
from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.host.apis import load_apis
from vllmx_server.host.app import build_app
from vllmx_server.store.database import Storage, StorageError, new_id, now

_CENTURY_S = 100 * 365 * 86400
_LOOK_S = 0.2
_SHOWN_ERRORS = 5


def run_batch(
    engine: EngineConfig, source: Path, output: Path, report: Callable[[Batch], None]
) -> Batch:
    """Answers the lines of `source` and writes `output`: answers first, then what failed, each in
    the order of the input. Answers are kept next to the output until all are there, so that the
    same call goes on after it was killed.

    Args:
        report: called with the progress, a few times a second.

    Raises:
        ConfigError: a file cannot be used, or the input has lines that are not requests.
        VllmxError: the typed errors of loading.
    """
    progress = output.with_name(output.name + ".progress")
    if not source.is_file():
        raise ConfigError(f"cannot read {source}: there is no such file")
    config = ServerConfig(
        data_dir=str(progress),
        max_file_bytes=1 << 40,
        max_stored_bytes=1 << 50,
        max_stored_files=1 << 30,
        max_stored_days=36500,
    )
    storage, apis = Storage(config.data_dir), load_apis(config)
    files = next(api for api in apis if isinstance(api, BatchesApi)).open(storage)
    try:
        batch = asyncio.run(_run(engine, config, storage, apis, files, source, output, report))
    except StorageError as error:
        raise ConfigError(
            f"cannot write {output} or what is kept in {progress} until it is whole:"
            f" {error.reason}. Make room there and run the same command again: it goes on with what"
            " is left"
        ) from None
    finally:
        for api in apis:
            api.close()
        storage.close()
    shutil.rmtree(progress, ignore_errors=True)
    if batch.errors:
        raise ConfigError(_what_is_wrong(source, batch))
    return batch


async def _run(
    engine: EngineConfig,
    config: ServerConfig,
    storage: Storage,
    apis: Sequence[Api],
    kept: KeptFiles,
    source: Path,
    output: Path,
    report: Callable[[Batch], None],
) -> Batch:
    batch = await _batch(kept, source, output)
    if batch.is_open:
        async with await AsyncLLM.start(engine) as llm:
            build_app(llm, config, storage, apis=apis)
            dying = asyncio.ensure_future(llm.until_dead())
            kept.runner.begin(batch)
            try:
                while batch.is_open and not dying.done():
                    await asyncio.wait((dying,), timeout=_LOOK_S)
                    report(batch)
            finally:
                dying.cancel()
                await kept.runner.stop()
            if batch.is_open:
                raise dying.result()
    if not batch.errors:
        await kept.files.on_thread(partial(_write, kept, batch, output))
    return batch


async def _batch(kept: KeptFiles, source: Path, output: Path) -> Batch:
    """The batch that an earlier call has begun, or a new one."""
    digest = await kept.files.on_thread(partial(_digest, source))
    known, _ = await kept.batches.page("", None, 1)
    if known:
        (found,) = await kept.batches.open_ones() or known
        if (found.metadata or {}).get("sha256") != digest:
            raise ConfigError(
                f"{output}.progress belongs to another input: delete it, or name another output"
            )
        return found
    path = await kept.files.on_thread(kept.files.new_path)
    await kept.files.on_thread(partial(shutil.copyfile, source, path))
    file = kept.files.new_file("", source.name, "batch", source.stat().st_size, _CENTURY_S)
    await kept.files.keep([(file, path)])
    batch = Batch(
        id=new_id("batch_"),
        owner="",
        endpoint=ANY_ENDPOINT,
        input_file_id=file.id,
        completion_window="",
        created_at=now(),
        expires_at=now() + _CENTURY_S,
        metadata={"sha256": digest},
    )
    await kept.batches.save(batch)
    return batch


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(kept: KeptFiles, batch: Batch, output: Path) -> None:
    """Writes both files of the batch as one, which is whole or not there."""
    try:
        with replacing(output) as out:
            for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
                with kept.files.path(file_id).open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None


def _what_is_wrong(source: Path, batch: Batch) -> str:
    shown = [
        f"line {error.line}: {error.message}" if error.line else error.message
        for error in batch.errors[:_SHOWN_ERRORS]
    ]
    more = len(batch.errors) - len(shown)
    return f"{source}: {'; '.join(shown)}" + (f"; and {more} more" if more else "")
