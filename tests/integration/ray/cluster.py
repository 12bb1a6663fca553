"""Two raylets on this machine, until the standard input ends: prints the address of the cluster,
and the process ids of both raylets and of the head's server. Each line of the input adds a raylet
and prints its id."""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def pid(node: Any, kind: str = "raylet") -> int:
    return int(node.all_processes[kind][0].process.pid)


def main() -> None:
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def added() -> int:
        return pid(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))

    head_pids = pid(cluster.head_node), pid(cluster.head_node, "gcs_server")
    print(cluster.address, head_pids[0], added(), head_pids[1], flush=True)
    for _ in sys.stdin:
        print(added(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
