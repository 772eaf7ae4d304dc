"""How many requests a save, a load and a manager make, and how many of them one after the other."""

from __future__ import annotations

import pytest
import torch

import ray_dcp
from ray_dcp.manager import CheckpointManager
from ray_dcp.store.location import Location
from tests.support.servers.s3 import fresh_place, proxy_before, through

AWAY_S = 0.05


@pytest.fixture
def proxy(server):
    yield from proxy_before(server)


@pytest.fixture
def place(server, proxy):
    found = through(proxy, fresh_place(server))
    # The first save of a process tries what the store can do.
    ray_dcp.save(state(0), checkpoint_id=found / "first", no_dist=True)
    proxy.delay_s = AWAY_S
    proxy.forget()
    return found


def state(step: int) -> dict[str, object]:
    return {f"layers.{i}.weight": torch.full((16,), float(step)) for i in range(8)} | {"step": step}


def test_a_small_save_waits_for_few_requests(place, proxy):
    ray_dcp.save(state(1), checkpoint_id=place / "one", no_dist=True)
    told = "\n".join(proxy.seen)
    assert len(proxy.seen) <= 11, told
    assert proxy.depth <= 8, told
    assert proxy.seen[0].startswith("GET"), told


def test_a_small_load_waits_for_few_requests(place, proxy):
    ray_dcp.save(state(1), checkpoint_id=place / "one", no_dist=True)
    proxy.forget()
    found = state(0)
    ray_dcp.load(found, checkpoint_id=place / "one", no_dist=True)
    told = "\n".join(proxy.seen)
    assert found["step"] == 1
    assert len(proxy.seen) <= 5, told
    assert proxy.depth <= 3, told


def test_a_manager_that_begins_again_does_not_read_every_step(server, place, proxy):
    near = Location(place.url, {**place.storage_options, "endpoint": server.endpoint})
    with CheckpointManager(near / "run", 1, chkpt_on_preemption=False) as manager:
        for step in range(40):
            manager.save(step, state(step))
    proxy.forget()
    again = CheckpointManager(place / "run", 1, chkpt_on_preemption=False)
    again.save(40, state(40))
    assert len(proxy.seen) <= 30, "\n".join(proxy.seen)
    again.close()
