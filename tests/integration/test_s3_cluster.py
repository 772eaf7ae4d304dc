"""A job on two nodes saves to S3, blocking and in the background, and another one loads it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests import programs
from tests.s3_server import fresh_place


@pytest.fixture
def two_nodes(monkeypatch):
    """Two nodes of Ray on this machine; yields the directory of all that they write."""
    import ray
    from ray.cluster_utils import Cluster

    from ray_dcp.runtime import ray_private

    directory = tempfile.mkdtemp(prefix="rc", dir="/tmp")
    (Path(directory) / "ray").mkdir()
    # Why: Ray writes the address of the newest cluster there, and everybody reads it.
    monkeypatch.setenv("RAY_TMPDIR", directory)
    node = {
        "num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False,
        "node_ip_address": "127.0.0.1", "temp_dir": f"{directory}/ray",
    }  # fmt: skip
    with ray_private.loopback_addresses():
        with ray_private.signal_handlers_kept():
            cluster = Cluster(
                initialize_head=True, head_node_args={**node, "resources": {"seat": 1}}
            )
            ray.init(cluster.address, log_to_driver=False, configure_logging=False, namespace="s3")
        cluster.add_node(**node, resources={"seat": 2})
        yield Path(directory)
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def test_a_save_from_two_nodes_is_loaded_at_other_sizes(server, two_nodes):
    import ray

    from ray_dcp.runtime.worker_group import WorkerGroup

    place = fresh_place(server)
    with WorkerGroup(3, resources={"seat": 1.0}) as ranks:
        nodes = ranks.run(lambda: ray.get_runtime_context().get_node_id())
        assert len(set(nodes)) == 2
        ranks.run(programs.save_uneven, place / "step-1")
        ranks.run(programs.save_uneven_in_the_background, place / "step-2")
        for size in (2, 1):
            ranks.resize(size)
            for step in ("step-1", "step-2"):
                for wrong, needed, read in ranks.run(programs.check_uneven, place / step):
                    assert wrong == []
                    assert read <= 1.25 * needed
    secret = server.secret_access_key.encode()
    written = [path for path in two_nodes.rglob("*") if path.is_file() and "logs" in path.parts]
    assert written
    assert [path for path in written if secret in path.read_bytes()] == []
    assert secret.decode() not in os.environ.values()
