"""The stager actor under real Ray: one a node, adopting buffers, keeping its budget, leaving."""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from ray_dcp.errors import LimitError
from ray_dcp.options import SaveOptions
from ray_dcp.plan.columns import ColumnsBuilder
from ray_dcp.plan.global_plan import make_plan
from ray_dcp.plan.rank_plan import rank_plan
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime import hooks
from ray_dcp.runtime.stager import Place, stager_of
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer.writer import write_part
from tests.polling import eventually, lives

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.fixture
def stager(node_id):
    """A stager of its own, in a namespace of its own."""
    handle = stager_of(node_id, namespace=f"t{secrets.token_hex(4)}", lease_s=60, limit_bytes=100)
    yield handle
    ray.kill(handle)


def test_a_node_has_one_stager_and_it_knows_its_node_and_its_budget(node_id):
    namespace = f"t{secrets.token_hex(4)}"
    handles = [stager_of(node_id, namespace=namespace, lease_s=60) for _ in range(2)]
    one, other = ray.get([handle.info.remote() for handle in handles])
    ray.kill(handles[0])
    assert one["pid"] == other["pid"]
    assert one["node_id"] == node_id
    assert 0.69 * (256 << 20) < one["limit_bytes"] <= 0.7 * (256 << 20)


def test_what_it_writes_from_staged_buffers_is_what_a_rank_would_write(stager, tmp_path: Path):
    big = np.arange(300_000, dtype=np.float32)
    small = np.arange(7, dtype=np.int64)
    builder = ColumnsBuilder()
    builder.tensor("big", "float32", big.shape)
    builder.tensor("small", "int64", small.shape)
    builder.object("note")
    part = rank_plan(make_plan([builder.build()]), 0)
    items = [big.tobytes(), small.tobytes(), b"pickled on the rank"]
    joined = np.frombuffer(b"".join(items[1:]), dtype=np.uint8)
    places = {
        0: Place(0, 0, big.nbytes),
        1: Place(1, 0, small.nbytes),
        2: Place(1, small.nbytes, len(items[2])),
    }
    buffers = [ray.put(big.view(np.uint8)), ray.put(joined)]
    options = SaveOptions()
    ours, theirs = Target(str(tmp_path / "rank")), Target(str(tmp_path / "stager"))
    expected = write_part(
        open_storage(ours), part, "a1",
        source=lambda row: memoryview(items[row]), deferred=lambda row: items[row],
        options=options,
    )  # fmt: skip
    staged = ray.get(
        stager.write_part.remote(part, "a1", theirs, buffers, places, options), timeout=60
    )
    assert [receipt.digest for receipt in staged] == [receipt.digest for receipt in expected]
    assert open_storage(theirs).list() == open_storage(ours).list()
    for entry in open_storage(ours).list():
        assert open_storage(theirs).read(entry.key) == open_storage(ours).read(entry.key)


def test_reservations_stay_under_the_limit_and_may_be_asked_for_twice(stager):
    assert ray.get(stager.reserve.remote("a", 60))
    assert ray.get(stager.reserve.remote("a", 60))
    assert not ray.get(stager.reserve.remote("b", 60))
    with pytest.raises(LimitError):
        ray.get(stager.reserve.remote("c", 101))
    ray.get([stager.release.remote("a"), stager.release.remote("a")])
    assert ray.get(stager.reserve.remote("b", 60))
    assert ray.get(stager.info.remote())["reserved_bytes"] == 60


@ray.remote(num_cpus=0)
class Holder:
    def reserve(self, stager) -> int:
        assert ray.get(stager.reserve.remote("mine", 60, hooks.this_caller(os.getpid())))
        return os.getpid()


def test_what_a_dead_rank_reserved_comes_back(stager):
    holder = Holder.remote()
    os.kill(ray.get(holder.reserve.remote(stager)), signal.SIGKILL)
    assert eventually(lambda: ray.get(stager.info.remote())["reserved_bytes"] == 0, 20)


def test_an_idle_stager_leaves_but_not_while_bytes_are_reserved(node_id):
    handle = stager_of(node_id, namespace=f"t{secrets.token_hex(4)}", lease_s=1.0)
    pid = ray.get(handle.info.remote())["pid"]
    ray.get(handle.reserve.remote("a", 10))
    started_s = time.monotonic()
    assert eventually(lambda: time.monotonic() - started_s > 3, 10)
    assert lives(pid)
    ray.get(handle.release.remote("a"))
    assert eventually(lambda: not lives(pid), 20)
