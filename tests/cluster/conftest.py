"""A Ray cluster of two nodes on this machine, for all tests of this folder; runs share its actors,
so that each starts at once.
"""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbcd.engines.cluster.engine import actors_kept

STORE = 100 * 2**20
PATIENT = {  # Ray takes what does not answer within seconds for dead; on a busy machine it is not
    "RAY_gcs_server_request_timeout_seconds": "180",
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_health_check_timeout_ms": "60000",
    # no processes beside those that are asked for: each imports much
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[Any]:
    """The cluster. Its second node can be removed."""
    os.environ.update(PATIENT)  # read when it is imported, and by its processes when they start
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    root = Path(__file__).parents[2]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root / "tests")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = _started(Cluster)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        with actors_kept():
            yield cluster
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
            cluster.shutdown()
            gc.collect()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _started(make: Callable[[], Any]) -> Any:
    """Two nodes. On a busy machine one of Ray's processes now and then does not come up within
    Ray's 30 s, so this tries again.
    """
    for tries_left in reversed(range(8)):
        cluster = make()
        try:
            cluster.add_node(
                num_cpus=2, object_store_memory=STORE, include_dashboard=False
            )  # the first is the head
            cluster.second = cluster.add_node(
                num_cpus=2, num_gpus=1, object_store_memory=STORE
            )  # a GPU on paper only
        except Exception:
            cluster.shutdown()
            if not tries_left:
                raise
        else:
            return cluster
    raise AssertionError
