"""Places the replicas of a server on a Ray cluster, for as long as a context is open."""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.replicas.start import check_replicas

from vllmx_ray.child import Child
from vllmx_ray.messages import Order, Placement

logger = logging.getLogger("vllmx.ray")

_MODULE = "vllmx_ray.driver"
_AGAIN_S = 1.0


@contextmanager
def placed(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yields the configuration of a server over replicas that Ray runs, once all are ready; ends
    them at the end. Raises ConfigError if Ray cannot be reached or has no place for them, and the
    VllmxError that loading met."""
    check_replicas(config)
    if config.kv_disk is not None:
        raise ConfigError(
            "--kv-disk: on Ray replicas have other keys and nodes with each start, so none finds"
            " its blocks again: leave it out, or use --kv-connector",
            param="kv_disk",
        )
    if find_spec("ray") is None:
        raise ConfigError("--ray-address needs Ray: pip install 'vllmx[ray]'", param="ray_address")
    with tempfile.TemporaryDirectory(prefix="vllmx-ray-") as folder:
        key_file, hosts = Path(folder, "key"), Path(folder, "hosts")
        key = secrets.token_hex(32).encode()
        key_file.touch(0o600)
        key_file.write_bytes(key)
        driver = _Driver(_placement(config, key, hosts))
        try:
            driver.wait(config)
            yield replace(
                config,
                ray_address=None,
                replicas=1,
                prefill_replicas=0,
                replica_hosts=f"@{hosts}",
                rank_key_file=str(key_file),
            )
        finally:
            driver.close()


class _Driver:
    """The process that Ray knows, which is started again when it ends; replicas outlive it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._child = Child(_MODULE, placement)
        self._reports = self._child.reports()
        self._closed = threading.Event()
        self._turn = threading.Lock()

    def wait(self, config: EngineConfig) -> None:
        """Returns once all replicas are ready. Raises what `placed` raises."""
        report = next(self._reports, None)
        if report is None:
            raise ConfigError(
                f"Ray cannot be reached at {config.ray_address}, see the log above: start it with"
                " `ray start --head`, or give the HOST:PORT of its head by --ray-address",
                param="ray_address",
            )
        if report.error is not None:
            raise report.error.rebuild()
        threading.Thread(target=self._outlive, name="vllmx-ray", daemon=True).start()

    def _outlive(self) -> None:
        while True:
            for report in self._reports:
                if report.error is not None:
                    logger.error("%s", report.error.message)
            if self._closed.wait(_AGAIN_S):
                return
            logger.error("the driver of Ray has ended: starting it again")
            with self._turn:
                if self._closed.is_set():
                    return
                self._child.close()
                self._child = Child(_MODULE, self._placement)
                self._reports = self._child.reports()

    def close(self) -> None:
        """Ends the driver, and the replicas with it."""
        self._closed.set()
        with self._turn:
            self._child.close()


def _placement(config: EngineConfig, key: bytes, hosts: Path) -> Placement:
    num_cpus = config.num_threads or 1
    own = replace(
        config,
        ray_address=None,
        replicas=1,
        min_replicas=None,
        rank_key_file=None,
        num_threads=num_cpus,
    )
    level = logging.getLogger("vllmx").getEffectiveLevel()
    return Placement(
        address=config.ray_address or "auto",
        count=config.replicas,
        num_cpus=num_cpus,
        order=Order(config=own, key=key, log_level=level),
        name=secrets.token_hex(8),
        file=str(hosts),
        least=config.min_replicas or config.replicas,
    )
