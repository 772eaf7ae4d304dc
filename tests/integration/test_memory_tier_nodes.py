"""Several nodes: memory that a job finds on others when it comes back, and one that is drained."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import ray
import torch
from ray.core.generated import autoscaler_pb2

import ray_dcp
from ray_dcp.manager import BeforeEnd, OnPreemption
from ray_dcp.session import ray_calls
from ray_dcp.session.names import kept_key
from ray_dcp.worker_group import WorkerGroup, this_rank
from tests.integration.test_memory_tier import spoil
from tests.support.daemons import NODE, Daemons
from tests.support.processes import eventually
from tests.support.programs import async_saves as programs
from tests.support.staging import stagers_on

OLD, NEW, BOTH = "old", "new", "both"


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, each with an object store and seats for ranks."""
    store = {"object_store_memory": 192 << 20}
    with closing(Daemons(**store, resources={OLD: 9, BOTH: 1})) as daemons:
        ray.init(daemons.address(), log_to_driver=False, configure_logging=False)
        daemons.cluster.add_node(**{**NODE, **store, "resources": {NEW: 9, BOTH: 1}})
        yield daemons.cluster
        ray.shutdown()


def ranks_on(node: str, number: int) -> WorkerGroup:
    return WorkerGroup(number, resources={node: 1}, run_timeout_s=400, release_s=60)


def node_ids() -> dict[str, str]:
    return {
        name: node["NodeID"] for node in ray.nodes() for name in (OLD, NEW)
        if name in node["Resources"]
    }  # fmt: skip


def test_a_job_on_another_node_restores_from_its_peers_memory_without_reading_storage(
    cluster, tmp_path
):
    world_size = 3
    with ranks_on(OLD, 2) as ranks:
        ranks.run(programs.save_kept, str(tmp_path), world_size)
    path = tmp_path / f"step-{world_size}"
    spoil(path)  # who takes a byte from there notices
    with ranks_on(NEW, world_size) as ranks:
        assert set(ranks.run(node_of_rank)) == {node_ids()[NEW]}
        came = ranks.run(programs.kept_is, str(path), world_size)
    assert [one.error for one in came] == [None] * world_size
    read, from_memory = came[0].value
    assert read == from_memory > 40 << 20
    assert lent(OLD) == []


def test_ranks_on_both_nodes_take_from_both_memories(cluster, tmp_path):
    apart = WorkerGroup(2, resources={BOTH: 1}, run_timeout_s=400, release_s=60)
    with apart as ranks:
        assert set(ranks.run(node_of_rank)) == set(node_ids().values())
        ranks.run(programs.save_kept, str(tmp_path), 1, await_files=1)
        attempt = ray_dcp.open(tmp_path / "step-1").attempt
        # A node finds the others by what they have registered.
        assert eventually(lambda: len(ray_calls.names_from(kept_key(attempt))) == 2)
        spoil(tmp_path / "step-1")
        came = ranks.run(programs.kept_is, str(tmp_path / "step-1"), 1)
    assert [one.error for one in came] == [None, None]
    read, from_memory = came[0].value
    assert read == from_memory > 40 << 20
    assert lent(OLD) == lent(NEW) == []


def test_a_node_whose_stager_is_gone_is_not_asked_and_storage_has_all(cluster, tmp_path):
    with ranks_on(OLD, 2) as ranks:
        ranks.run(programs.save_kept, str(tmp_path), 4)
    for stager in stagers_on(node_ids()[OLD]):
        ray.kill(stager)
    with ranks_on(NEW, 2) as ranks:
        came = ranks.run(programs.kept_is, str(tmp_path / "step-4"), 4)
    assert [one.error for one in came] == [None, None]
    read, from_memory = came[0].value
    assert read > 40 << 20
    assert from_memory == 0
    assert ray_dcp.verify(tmp_path / "step-4").ok


def node_of_rank() -> str:
    return ray.get_runtime_context().get_node_id()


def lent(node: str) -> list:
    """Returns what a node's stagers have lent and not got back."""
    asked = [
        stager.__ray_call__.remote(lambda stager: stager._queue.borrowers())
        for stager in stagers_on(node_ids()[node])
    ]
    return [borrower for found in ray.get(asked) for borrower in found]


def drain(node_id: str, deadline_s: float) -> None:
    """Drains a node, as a cloud's notice or `ray drain-node` does."""
    gcs = ray.get_runtime_context().gcs_address
    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + deadline_s) * 1000)
    assert ray._raylet.GcsClient(address=gcs).drain_node(node_id, preempted, "", deadline_ms)[0]


def made_managers(root: Path) -> list[ray_dcp.CheckpointManager]:
    end = ray_dcp.CheckpointManager(
        root / "end", save_policy=BeforeEnd(least_s=500.0), chkpt_on_preemption=False
    )
    return [end, ray_dcp.CheckpointManager(root / "signal", save_policy=OnPreemption())]


def are_due(step: int) -> list[bool]:
    rank = this_rank()
    assert rank is not None
    return [manager.should_save(step) for manager in rank.state]


def saved_at(step: int) -> list[int]:
    rank = this_rank()
    assert rank is not None
    end, _ = rank.state
    assert end.save(step, {"w": torch.ones(2)})
    return end.all_steps()


def test_a_save_is_due_before_the_end_of_a_node_that_ray_drains(cluster, tmp_path):
    leaving = cluster.add_node(**{**NODE, "resources": {"leaving": 2}})
    with ranks_on("leaving", 2) as ranks:
        ranks.keep(made_managers, tmp_path)
        assert ranks.run(are_due, 1) == [[False, False]] * 2
        # Two saves of 500 s fit just so.
        drain(leaving.node_id, 1000.0)
        # Ray sends no signal, so that a policy of signals knows of nothing.
        assert ranks.run(are_due, 1) == [[True, False]] * 2
        assert ranks.run(saved_at, 1) == [[1]] * 2
        assert ranks.run(are_due, 2) == [[False, False]] * 2
    cluster.remove_node(leaving)
