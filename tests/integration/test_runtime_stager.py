"""Staging under real Ray: bytes are written as the rank would, whoever is killed; nothing stays."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.core import bounds
from ray_dcp.errors import LimitError, ParticipantError
from ray_dcp.options import SaveOptions
from ray_dcp.session import ray_calls
from ray_dcp.session.names import stager_name, stagers_key
from ray_dcp.session.ray_calls import store_bytes
from ray_dcp.stage import link as staging_link
from ray_dcp.stage.link import RankStaging
from ray_dcp.stage.orders import StageKey
from ray_dcp.stage.stager_options import StagerOptions
from ray_dcp.store.environment import StorageVariables
from tests.support.processes import eventually, lives
from tests.support.programs.held_writes import hang_writes
from tests.support.servers.s3 import shared_memory
from tests.support.staging import MIB, Share, end_stagers, same_files, share, stagers_on

pytestmark = pytest.mark.usefixtures("ray_session")


SMALL = StagerOptions(limit_bytes=64 * MIB)
BUDGET_BYTES = 105_000_000
LIMITED = StagerOptions(limit_bytes=BUDGET_BYTES)


class Book:
    """Notes the reports of files; answers them once it may, and others at once."""

    def __init__(self, answers: bool = True) -> None:
        self.reports: list[Any] = []
        self.held: list[Any] = []
        self.answers = answers

    async def call(self, report) -> Any:
        import asyncio

        from ray_dcp.commit_protocol.messages import Ack, PartsHeld

        if isinstance(report, PartsHeld):
            self.held.append(report)
        else:
            self.reports.append(report)
            while not self.answers:
                await asyncio.sleep(0.01)
        return Ack()

    async def told(self) -> list[Any]:
        return self.reports

    async def told_of_held(self) -> list[Any]:
        return self.held

    async def answer(self) -> None:
        self.answers = True


@pytest.fixture
def namespace():
    """A namespace of its own, whose stagers end with the test."""
    name = f"t{secrets.token_hex(4)}"
    yield name
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == name:
            ray.kill(ray.get_actor(actor["name"], name))


@pytest.fixture
def book():
    actor = ray.remote(num_cpus=0)(Book).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def stuck_book():
    """A book that answers nothing before it is told to: staged bytes have to stay."""
    actor = ray.remote(num_cpus=0)(Book).remote(False)
    yield actor
    ray.kill(actor)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Target, Target]:
    return Target(str(tmp_path / "stager")), Target(str(tmp_path / "rank"))


def opened(namespace: str, options: StagerOptions = SMALL, name: str = "rank 0") -> RankStaging:
    return RankStaging(name, namespace=namespace, lease_s=60, options=options)


def staged(staging: RankStaging, what: Share, target: Target, actor=None, save="s", **options):
    return staging.stage(
        StageKey(OpKey(save, 0), 0, "a1"), what.plan, what.items, target=target,
        options=SaveOptions(**options), reporter=actor,
    )  # fmt: skip


def told(book, number: int) -> list[Any]:
    assert eventually(lambda: len(ray.get(book.told.remote())) >= number)
    return ray.get(book.told.remote())


def test_a_node_has_one_stager_whose_budget_is_half_of_its_object_store(namespace):
    end_stagers()
    one, other = (opened(namespace, StagerOptions(), name) for name in ("a", "b"))
    info = one.info()
    assert info["pid"] == other.info()["pid"]
    assert info["node_id"] == ray.get_runtime_context().get_node_id()
    half = int(store_bytes(info["node_id"]) / 2)
    assert eventually(lambda: one.info()["limit_bytes"] == half)
    assert set(one.info()["ranks"]) == {"a", "b"}
    other.close()
    assert eventually(lambda: one.info()["ranks"] == ["a"])
    one.close()


def test_a_rank_is_staged_once_the_coordinator_knows_who_holds_its_bytes(namespace, book, places):
    """From then on the rank may die: the next coordinator asks that stager."""
    staging = opened(namespace)
    done = staged(staging, share([3 * MIB] * 2), places[0], book)
    (held,) = ray.get(book.told_of_held.remote())
    assert (held.rank, held.attempt, held.stager) == (0, "a1", done.stager)
    assert held.num_bytes == done.num_bytes
    staging.close()


def test_a_stager_whose_writers_hang_writes_for_others_and_is_replaced(namespace, book, places):
    one, other = opened(namespace), opened(namespace, name="rank 1")
    pid = one.info()["pid"]
    hang_writes(one.link().handle)
    hanging = Target(f"{places[0].url}/hangs")
    held = staged(one, share([2 * MIB] * 6, part_bytes=2 * MIB), hanging, book, "hangs")
    what = share([3 * MIB] * 2)
    what.written(places[1])
    held.release()  # as its rank does when the save has failed
    assert staged(other, what, places[0], book, "t").num_bytes
    assert eventually(lambda: same_files(*places))
    assert eventually(lambda: not lives(pid))
    # Neither rank was told; the next save of each finds another stager.
    for number, staging in enumerate((one, other)):
        again = Target(f"{places[0].url}-{number}")
        staged(staging, what, again, book, f"u{number}")
        assert eventually(lambda again=again: same_files(again, places[1]))
        assert staging.info()["pid"] != pid
        staging.close()


def _break_watch(stager: Any) -> None:
    def broken(_: float) -> list[str]:
        raise ZeroDivisionError

    stager._queue.stuck = broken


def test_a_stager_whose_watch_breaks_ends_and_is_replaced(namespace, book, places):
    staging = opened(namespace)
    pid = staging.info()["pid"]
    ray.get(staging.link().handle.__ray_call__.remote(_break_watch))
    assert eventually(lambda: not lives(pid))
    what = share([3 * MIB])
    what.written(places[1])
    staged(staging, what, places[0], book)
    assert eventually(lambda: same_files(*places))
    staging.close()


def test_a_stager_that_is_slow_to_start_is_awaited_and_the_rank_logs_it(
    namespace, monkeypatch, caplog
):
    monkeypatch.setattr(bounds, "LONG_WAIT_S", 0.0)
    opened(namespace, StagerOptions(), "early").close()
    (said,) = caplog.messages
    assert said.startswith("Rank early has waited 0 s for a stager to start and answer")


@ray.remote(num_cpus=0)
def lost_object():
    raise OSError("it is gone")


def test_bytes_that_the_object_store_does_not_return_fail_the_save(namespace, places, monkeypatch):
    monkeypatch.setattr(staging_link.ActorLink, "put", lambda *_: lost_object.remote())
    staging = opened(namespace)
    with pytest.raises(ParticipantError, match="did not return them to the stager: RayTaskError"):
        staged(staging, share([2 * MIB]), places[0])
    assert eventually(lambda: staging.info()["used_bytes"] == 0)
    staging.close()


def store_bytes_free() -> float:
    return float(ray.available_resources().get("object_store_memory", 0.0))


def num_spilled() -> int:
    """Returns how many objects Ray has spilled so far, and how many it has on disk at all."""
    from ray._private import internal_api, worker

    reply = internal_api.get_memory_info_reply(
        internal_api.get_state_from_address(worker.global_worker.gcs_client.address)
    )
    stats = reply.store_stats
    return int(stats.spilled_objects_total + stats.object_store_bytes_fallback)


def test_ranks_wait_for_the_budget_of_the_object_store_and_nothing_is_spilled(
    namespace, book, tmp_path
):
    sizes = [10_000_000] * 9
    ranks = [Victim.remote(namespace, LIMITED, f"rank {number}") for number in range(4)]
    before = num_spilled()
    ray.get([rank.warm.remote(sum(sizes)) for rank in ranks])
    watcher = opened(namespace, LIMITED, "watcher")
    targets = [Target(str(tmp_path / f"stager{number}")) for number in range(4)]
    asked = [
        rank.stage.remote(sizes, target, book) for rank, target in zip(ranks, targets, strict=True)
    ]
    done: list[Any] = []
    most = 0
    while len(done) < len(asked):
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0.05)
        most = max(most, watcher.info()["used_bytes"])
    ray.get(asked)
    what = share(sizes, part_bytes=9 * MIB)
    told(book, 4 * len(what.plan.files))
    what.written(Target(str(tmp_path / "rank")))
    assert all(same_files(target, Target(str(tmp_path / "rank"))) for target in targets)
    assert 2 * BUDGET_BYTES / 4 < most <= BUDGET_BYTES
    assert num_spilled() == before
    assert eventually(lambda: watcher.info()["used_bytes"] == 0)
    watcher.close()


def test_warming_touches_as_much_of_the_object_store_as_the_state_takes(namespace):
    num_faults = ray.get(Victim.remote(namespace, LIMITED).warm.remote(40 * MIB))
    assert num_faults >= 40 * MIB / resource.getpagesize()


@ray.remote(num_cpus=0)
class Victim:
    """A rank in a process of its own."""

    def __init__(
        self, namespace: str, options: StagerOptions = SMALL, name: str = "rank 0"
    ) -> None:
        self.staging = opened(namespace, options, name)

    def pid(self) -> int:
        return os.getpid()

    def warm(self, num_bytes: int) -> int:
        """Returns how many pages were touched for the first time."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.staging.warm(num_bytes).result(180)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def stage(self, sizes, target, book, **options) -> None:
        what = share(sizes, part_bytes=9 * MIB)
        staged(self.staging, what, target, book, save=target.url, **options)

    def stage_and_die(self, sizes, target, book) -> None:
        what = share(sizes)
        real, calls = what.items.source, []

        def source(row):
            calls.append(row)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(row)

        what.items.source = source
        staged(self.staging, what, target, book)


def test_a_rank_killed_while_it_stages_leaves_nothing(namespace, book, places):
    victim = Victim.remote(namespace)
    watcher = opened(namespace, name="watcher")
    victim.stage_and_die.remote([12 * MIB] * 5, places[0], book)
    (report,) = told(book, 1)
    assert isinstance(report.error, ParticipantError)
    assert eventually(lambda: watcher.info()["used_bytes"] == 0)
    assert eventually(lambda: watcher.info()["ranks"] == ["watcher"])
    assert not list(Path(places[0].url).rglob("*"))
    watcher.close()


def test_a_stager_killed_while_a_rank_stages_is_replaced(namespace, places):
    what = share([12 * MIB] * 8)
    what.written(places[1])
    staging = opened(namespace)
    pid = staging.info()["pid"]
    real, calls = what.items.source, []

    def source(row):
        calls.append(row)
        if len(calls) == 4:
            os.kill(pid, signal.SIGKILL)
        return real(row)

    what.items.source = source  # asked for while the rank copies
    staged(staging, what, places[0])
    assert staging.info()["pid"] != pid
    assert eventually(lambda: same_files(*places))
    staging.close()


def test_when_everybody_is_killed_the_store_is_free_again(namespace, stuck_book, places):
    before = shared_memory()
    # What tests before this one had in it goes soon.
    whole = ray.cluster_resources()["object_store_memory"]
    assert eventually(lambda: store_bytes_free() >= whole - MIB)
    victim = Victim.remote(namespace)
    # Why kept: else the bytes go as soon as they are written.
    begun = victim.stage.remote([8 * MIB] * 3, places[0], stuck_book, keep_in_memory=1)
    ray.get(begun, timeout=400)
    pid = ray.get(victim.pid.remote())
    watcher = opened(namespace, name="watcher")
    stager = watcher.info()["pid"]
    watcher.close()
    del watcher
    assert eventually(lambda: store_bytes_free() <= whole - 24 * MIB)
    for one in (pid, stager):
        os.kill(one, signal.SIGKILL)
    assert eventually(lambda: not lives(pid) and not lives(stager))
    assert eventually(lambda: store_bytes_free() >= whole - MIB)
    assert not [name for name in shared_memory() - before if "dcp" in name]


def test_a_capture_that_fails_gives_everything_back(namespace, places):
    what = share([12 * MIB] * 4)
    staging = opened(namespace)

    def source(row):
        if row == 2:
            raise ValueError("this tensor is gone")
        return np.zeros(12 * MIB, np.uint8).data

    what.items.source = source
    with pytest.raises(ValueError, match="this tensor is gone"):
        staged(staging, what, places[0])
    assert eventually(lambda: staging.info()["used_bytes"] == 0)
    assert not list(Path(places[0].url).rglob("*"))
    staging.close()


def test_a_stager_leaves_when_it_is_idle_but_not_while_a_rank_lives(namespace):
    victim = Victim.remote(namespace)
    rank = ray.get(victim.pid.remote(), timeout=400)
    node_id = ray.get_runtime_context().get_node_id()
    other = f"{namespace}-lease"
    staging = RankStaging("r", namespace=other, lease_s=1.0)
    pid = staging.info()["pid"]
    started_s = time.monotonic()
    assert eventually(lambda: time.monotonic() - started_s > 3)
    assert lives(pid)
    staging.close()
    assert eventually(lambda: not lives(pid))
    assert lives(rank)
    assert not stagers_on(node_id, other)
    assert not ray_calls.names_from(stagers_key(node_id, stager_name(node_id, "", other), other))


def test_a_window_that_the_store_of_another_node_does_not_take_is_refused(namespace, places):
    staging = opened(namespace, StagerOptions(limit_bytes=8 * MIB))
    link = staging.link()
    what = share([MIB])
    order = what.order(StageKey(OpKey("s", 0), 0, "a1"), places[0], 64 * MIB)
    with pytest.raises(LimitError, match="window"):
        link.call("begin", link.stager, order, None, StorageVariables({}), timeout_s=30)
    staging.close()
