"""Two nodes: the entry script of `cluster_configs/`, saves to S3, and a node that is drained."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
import torch
from ray._private.state import state
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.utils.data import DataLoader

import ray_dcp
from ray_dcp.worker_group import WorkerGroup
from tests.support.daemons import NODE
from tests.support.programs import models as programs
from tests.support.servers.s3 import fresh_place

# Ray Train makes Ray Data's settings, which sets options that Ray Data itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NOTICE_S = 300
REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "cluster_configs" / "train.py"


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine: the second one has what workers need."""
    directory = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    (directory / "ray").mkdir()
    node = {**NODE, "object_store_memory": 128 << 20, "resources": {"seat": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
        # Why: Ray writes the address of the newest cluster there, and everybody reads it.
        patch.setenv("RAY_TMPDIR", str(directory))
        head = {**node, "num_cpus": 1, "temp_dir": str(directory / "ray")}
        made = Cluster(initialize_head=True, head_node_args=head)
        ray.init(made.address, log_to_driver=False, configure_logging=False)
        made.add_node(**{**node, "num_cpus": 2})
        yield made
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def entry():
    """The script as a module, which workers that can't import it get by value."""
    spec = importlib.util.spec_from_file_location("cluster_configs_entry", SCRIPT)
    module = sys.modules["cluster_configs_entry"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["cluster_configs_entry"]


def arguments(storage, *more):
    """Returns a command line: 50 samples in batches of 6, so that no run ends with an epoch."""
    return [
        "--storage", str(storage), "--name", "ci", "--samples", "50", "--global-batch", "6",
        "--save-every", "3", "--width", "16", "--blocks", "1", "--cpus-per-worker", "0.5",
        "--max-failures", "0", *more,
    ]  # fmt: skip


def losses_without_a_break(entry, steps):
    """Trains in this process alone, on the same batches: what every run has to equal."""
    chosen = entry.make_parser().parse_args(arguments("none"))
    config = {**vars(chosen), "parallel": "none"}
    model, optimizer = entry.build(config, torch.device("cpu"))
    sampler = entry.sampler_for(config, 0, 1)
    loader = DataLoader(entry.Sequences(50, config["length"]), batch_sampler=sampler)
    losses = []
    while len(losses) < steps:
        losses += [entry.train_step(model, optimizer, b, 1.0) for b in sampler.follow(loader)]
    return losses[:steps]


def test_the_entry_script_resumes_by_sample_on_another_number_of_workers(cluster, entry, tmp_path):
    expected = losses_without_a_break(entry, 15)
    first = entry.main(arguments(tmp_path, "--workers", "1", "--steps", "7", "--parallel", "ddp"))
    assert first.metrics["restored"] == -1
    assert first.metrics["samples"] == 42
    assert first.metrics["loss"] == pytest.approx(expected[6], abs=1e-4)
    assert ray_dcp.open(first.checkpoint.path).world_size == 1
    # As the cluster files have it run; with more workers, and parallel in another way.
    more = arguments(tmp_path, "--workers", "1:2", "--steps", "12", "--resize-after", "1000")
    second = entry.main(more)
    assert second.metrics["world_size"] == 2
    assert second.metrics["restored"] == 7
    assert second.metrics["samples"] == 72
    assert second.metrics["loss"] == pytest.approx(expected[11], abs=2e-4)
    assert ray_dcp.open(second.checkpoint.path).world_size == 2
    printed = "".join(path.read_text() for path in log_files(cluster) if path.suffix == ".out")
    assert "restored step 7 on 2 workers: epoch 0, sample 42 of 50" in printed
    assert re.search(r"step 12: loss [0-9.]+, .* epoch 1, 22 of 50 samples", printed), printed
    # As a command, in a Ray that it starts itself.
    last = arguments(tmp_path, "--workers", "1", "--steps", "15", "--parallel", "ddp")
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *last],
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    printed = finished.stdout
    assert finished.returncode == 0, printed + finished.stderr
    assert re.search(r"restored step 12 on 1 workers: epoch 1, sample 22 of 50", printed), printed
    (loss,) = re.findall(r"step 15: loss ([0-9.]+), .* epoch 1, 40 of 50 samples", printed)
    assert float(loss) == pytest.approx(expected[14], abs=2e-4)
    (checkpoint,) = re.findall(r"newest checkpoint Checkpoint\(.*path=(\S+?)\)", printed)
    assert ray_dcp.open(checkpoint).world_size == 1


def log_files(cluster):
    """Returns the files that the nodes have written their logs to."""
    written = Path(cluster.head_node.get_temp_dir_path()).rglob("*")
    return [path for path in written if path.is_file() and "logs" in path.parts]


def test_a_save_to_s3_from_two_nodes_is_loaded_at_other_sizes(server, cluster):
    """Blocking and in the background; and no credential is in what the nodes write."""
    place = fresh_place(server)
    with WorkerGroup(2, resources={"seat": 1}) as ranks:
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
    written = log_files(cluster)
    assert written
    assert [path for path in written if secret in path.read_bytes()] == []
    assert secret.decode() not in os.environ.values()


@ray.remote(num_cpus=1)
class Tenant:
    """Keeps a node from being idle: an idle one ends as soon as it is drained."""

    def node_id(self):
        return ray.get_runtime_context().get_node_id()


def test_a_notice_drains_a_live_node_and_ray_train_can_see_until_when(cluster):
    """The last one here: the node is of no use after it."""
    node_id = next(iter(cluster.worker_nodes)).node_id
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    tenant = Tenant.options(scheduling_strategy=strategy).remote()
    assert ray.get(tenant.node_id.remote()) == node_id
    begin_s = time.time()
    finished = subprocess.run(
        [
            sys.executable, str(SCRIPT.with_name("drain_on_notice.py")), "--source", "now",
            "--deadline", str(NOTICE_S), "--address", cluster.address, "--node-id", node_id,
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # What Ray Train's watcher of preemptions asks.
    ((drained, deadline_ms),) = state.get_draining_nodes().items()
    assert drained == node_id
    assert begin_s + NOTICE_S - 1 <= deadline_ms / 1000 <= time.time() + NOTICE_S + 1
