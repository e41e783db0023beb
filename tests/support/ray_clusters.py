"""Clusters of Ray on this machine: each of their machines is a group of processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Yield a cluster of two machines with one CPU each, to which this process is connected."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tformer[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 gives workers nothing on a machine with other work
        head = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            add_machine(cluster)
            # Ray prints pages about each process that dies, at any later time.
            patch.setattr("ray._private.worker.print_to_stdstream", lambda *_, **__: None)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            patch.setenv("RAY_ADDRESS", cluster.address)  # of other processes
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_machine(cluster: Any) -> Any:
    """Add a machine with one CPU."""
    return cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
