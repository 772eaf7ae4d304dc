"""What a node keeps in memory survives the loss of that node: the next one has a copy."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import ray_dcp
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import hooks
from ray_dcp.runtime.peer_copy import next_node
from tests.integration.test_memory_tier import spoil
from tests.polling import eventually

LENGTH = 3 << 20


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster with a head node, where this process is, and another node."""
    directory = Path(tempfile.mkdtemp(prefix="rp", dir="/tmp"))
    (directory / "ray").mkdir()
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(directory)
    node = {
        "num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False,
        "node_ip_address": "127.0.0.1", "temp_dir": str(directory / "ray"),
    }  # fmt: skip
    with hooks.loopback_addresses():
        with hooks.signal_handlers_kept():
            cluster = Cluster(initialize_head=True, head_node_args=node)
            ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        try:
            other = cluster.add_node(**node, resources={"other": 1})
            cluster.wait_for_nodes()
            yield cluster, other
        finally:
            ray.shutdown()
            cluster.shutdown()
            os.environ.pop("RAY_TMPDIR")
            if before is not None:
                os.environ["RAY_TMPDIR"] = before


@ray.remote(num_cpus=0, resources={"other": 1})
class OnTheOtherNode:
    def save(self, path: str, value: float) -> str:
        with closing(ray_dcp.connect(name="peer-copy", lease_s=30.0)):
            handle = ray_dcp.async_save(
                {"w": torch.full((LENGTH,), value), "note": f"of {value}"},
                checkpoint_id=path,
                options=SaveOptions(keep_in_memory=1, keep_peer_copy=True),
            )
            handle.committed(180)
            return handle.report().attempt


def load(path: str) -> tuple[float, int, int]:
    state = {"w": torch.zeros(LENGTH), "note": ""}
    report = ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["note"] == f"of {state['w'][0]}"
    assert bool((state["w"] == state["w"][0]).all())
    return float(state["w"][0]), report.bytes_read, report.bytes_from_memory


def test_a_copy_survives_the_node_that_it_was_made_of(two_nodes, tmp_path):
    cluster, other = two_nodes
    actor = OnTheOtherNode.remote()
    for value in (1.0, 2.0):
        path = str(tmp_path / f"step-{value:.0f}")
        attempt = ray.get(actor.save.remote(path, value), timeout=400)
        here = ray.get_runtime_context().get_node_id()
        copied = f"kept:{attempt}:{here}"
        assert eventually(lambda: hooks.recall(copied) != "")  # noqa: B023
    cluster.remove_node(other, allow_graceful=False)
    spoil(tmp_path / "step-2")
    value, read, from_memory = load(path)
    assert value == 2.0
    assert read == from_memory > 4 * LENGTH
    # Only the last one is kept, there as here.
    assert load(str(tmp_path / "step-1"))[2] == 0


def test_a_node_that_is_alone_has_nobody_to_copy_to():
    assert next_node("a", ["a"]) is None
    assert next_node("b", ["a", "b"]) == "a"
