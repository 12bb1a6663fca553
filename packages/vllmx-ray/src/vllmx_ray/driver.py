"""The program that Ray sees: `python -P -m vllmx_ray.driver`, started by the server.

It is a process of its own because Ray's library takes signals, threads and the standard output of
its process. It keeps one placement group and one actor for each replica, and writes the replicas'
addresses to a file, where the server's processes look for them (`--replica-hosts @FILE`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllmx_core.errors import ConfigError, VllmxError
from vllmx_core.system.files import replacing
from vllmx_core.system.logs import configure_logging
from vllmx_engine.replicas.remote import WANTED
from vllmx_engine.wire.ipc import ErrorRecord

from vllmx_ray.child import Parent
from vllmx_ray.messages import Placement, Report, placement_decoder, report_decoder
from vllmx_ray.replica import Replica

logger = logging.getLogger("vllmx.ray")

CONNECT_S = 20.0
_LOOK_S = 0.5
_LOOPBACK = ("127.0.0.1", "::1")


class Cluster:
    """A connection to a Ray cluster. Raises ConfigError if there is none at the address."""

    def __init__(self, address: str) -> None:
        late = threading.Timer(CONNECT_S, self._too_late, (address,))
        late.daemon = True
        late.start()
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="vllmx")
        except Exception as error:  # of many kinds, by the part of Ray that met it
            raise _unreachable(address, str(error).partition("\n")[0]) from error
        finally:
            late.cancel()

    def _too_late(self, address: str) -> None:
        """Ray waits without end for some addresses, and cannot be interrupted."""
        error = _unreachable(address, f"no answer within {CONNECT_S:.0f} s")
        logger.error("%s", error.message)
        logging.shutdown()
        os._exit(UNREACHABLE)

    def check(self, needs: dict[str, float]) -> None:
        """Raises ConfigError if no node has what a replica needs, or if the key would pass through
        a cluster that anybody may join."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = [node["Resources"] for node in nodes]
        if not any(all(one.get(key, 0) >= needs[key] for key in needs) for one in resources):
            most = {key: max(one.get(key, 0) for one in resources) for key in needs}
            raise ConfigError(
                f"a replica needs {_words(needs)} on one node, the nodes of the Ray cluster have at"
                f" most {_words(most)}: add a node, or use fewer --num-threads or ranks",
                param="ray_address",
            )
        is_open = os.environ.get("RAY_AUTH_MODE") != "token"
        others = {node["NodeManagerAddress"] for node in nodes} - {*_LOOPBACK}
        if is_open and len(others) > 1:
            raise ConfigError(
                "this Ray cluster has several hosts and no token: anybody who reaches it can run"
                " programs there; start it with RAY_AUTH_MODE=token (`ray get-auth-token"
                " --generate`), here too",
                param="ray_address",
            )


UNREACHABLE = 3
"""The exit code if Ray does not answer."""


def _unreachable(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"Ray cannot be reached at {address} ({reason}): start it with `ray start --head`, or give"
        " the HOST:PORT of its head by --ray-address",
        param="ray_address",
    )


def _words(resources: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {key}" for key, value in resources.items())


class Placed:
    """A replica: its placement group and its actor."""

    def __init__(self, name: str, order: bytes, needs: dict[str, float]) -> None:
        self._name, self._order, self._needs = name, order, needs
        self._group: Any = None
        self._actor: Any = None
        self._asked: Any = None
        self.report = Report()

    def start(self) -> None:
        """Starts the actor, unless there is one of this name. It outlives this program, which may
        be lost with its node and started again."""
        if self._group is None:
            self._group = _group(self._name, self._needs)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=0
        )
        kind = ray.remote(_Actor)
        self._actor = kind.options(
            name=self._name,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0),
            max_restarts=-1,
            scheduling_strategy=strategy,
        ).remote(self._order)

    def look(self) -> None:
        """Takes the actor's answer to the last question, and asks again. One that is dead or does
        not answer has no address."""
        if self._actor is None:
            self.start()
        if self._asked is None:
            self._asked = self._actor.report.remote()
        try:
            done, _ = ray.wait([self._asked], timeout=0)
            if not done:
                return
            asked, self._asked = self._asked, None
            self.report = report_decoder.decode(ray.get(asked, timeout=_LOOK_S))
        except ray.exceptions.ActorUnavailableError:
            self._asked, self.report = None, Report()  # Ray starts it again
        except ray.exceptions.RayActorError as error:
            if self.report.address:
                logger.error("the actor of a replica has ended: %s", str(error).partition("\n")[0])
            self._asked, self._actor, self.report = None, None, Report()

    @property
    def is_placed(self) -> bool:
        """It has a place on the cluster, or waits for one."""
        return self._group is not None

    def close(self) -> None:
        """Ends the replica."""
        with suppress(RayError):
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actor, self._asked, self._group, self.report = None, None, None, Report()


def _group(name: str, needs: dict[str, float]) -> Any:
    """The placement group of this name."""
    try:
        return get_placement_group(name)
    except ValueError:
        return placement_group([needs], strategy="STRICT_PACK", name=name, lifetime="detached")


class _Actor(Replica):
    """`Replica` with what it needs of Ray."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order, ray.util.get_node_ip_address(), self._give_up)

    def _give_up(self) -> None:
        """Frees the node: nobody else would."""
        remove_placement_group(ray.util.get_current_placement_group())


def _place(placement: Placement, parent: Parent[Placement], ended: threading.Event) -> None:
    """Keeps the replicas until the server ends."""
    needs: dict[str, float] = {"CPU": placement.num_cpus}
    cluster = Cluster(placement.address)
    ranks = placement.order.config.num_ranks
    if _has_gpus(placement):
        needs["GPU"] = ranks
    cluster.check(needs)
    replicas = [
        Placed(f"vllmx-{placement.name}-{row}", msgspec.msgpack.encode(order), needs)
        for row, order in enumerate(map(placement.order_of, range(placement.count)))
    ]
    try:
        _watch(placement, replicas, parent, ended)
    finally:
        for replica in replicas:
            replica.close()
        ray.shutdown()


def _has_gpus(placement: Placement) -> bool:
    """True if replicas run on GPUs: unless a backend for processors is named."""
    config = placement.order.config
    return ray.cluster_resources().get("GPU", 0) > 0 and config.backend not in ("cpu", "numpy")


def _watch(
    placement: Placement,
    replicas: list[Placed],
    parent: Parent[Placement],
    ended: threading.Event,
) -> None:
    written, was_ready, told_s = None, False, time.monotonic()
    while not ended.wait(_LOOK_S):
        wanted = _wanted(placement)
        for replica, is_wanted in zip(replicas, wanted, strict=True):
            if is_wanted:
                replica.look()
            elif replica.is_placed:
                replica.close()
        errors = [each.report.error for each in replicas if each.report.error is not None]
        if errors and not was_ready:
            raise errors[0].rebuild()
        text = "".join(f"{each.report.address}\n" for each in replicas)
        if text != written:
            with replacing(Path(placement.file)) as file:
                file.write(text.encode())
            written = text
        num_ready = sum(each.report.is_ready for each in replicas)
        if num_ready == sum(wanted) and not was_ready:
            was_ready = True
            parent.tell(Report(is_ready=True))
        elif not was_ready and time.monotonic() - told_s > placement.tell_s:
            told_s = time.monotonic()
            logger.warning("%d of %d replicas are ready on Ray", num_ready, sum(wanted))


def _wanted(placement: Placement) -> list[bool]:
    """The replicas that should run."""
    try:
        return [one == "1" for one in Path(placement.file + WANTED).read_text()]
    except FileNotFoundError:
        return [row < placement.least for row in range(placement.count)]


def main() -> int:
    """Returns the exit code."""
    configure_logging("info")
    ended = threading.Event()
    parent: Parent[Placement] = Parent(placement_decoder, ended.set)
    placement = parent.message()
    logger.setLevel(placement.order.log_level)
    try:
        _place(placement, parent, ended)
    except VllmxError as error:
        parent.tell(Report(error=ErrorRecord.of(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
