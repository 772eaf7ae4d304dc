"""Two jobs on one Ray: equal names, other environments, a storage that hangs; neither notices."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.core import bounds
from ray_dcp.errors import StorageError
from ray_dcp.options import SaveOptions
from ray_dcp.session import ray_calls
from ray_dcp.session.discovery import current_session
from ray_dcp.session.ray_calls import store_bytes
from tests.support.processes import eventually, lives
from tests.support.programs.held_writes import hold_writes
from tests.support.servers.s3 import DevStore
from tests.support.staging import end_stagers

pytestmark = pytest.mark.usefixtures("ray_session")

MIB = 1 << 20


class Rank:
    """The only rank of a job."""

    def __init__(self, name: str, namespace: str) -> None:
        self.session = ray_dcp.connect(name=name, namespace=namespace)
        self.handle: Any = None

    def stager(self) -> dict[str, Any]:
        """Returns what its stager says of itself, and this process."""
        return {**current_session().ray.staging().info(), "own": os.getpid()}

    def hold(self, gate: str) -> None:
        """Has its stager write nothing before a file is there."""
        hold_writes(self.session, Path(gate))

    def impatient(self) -> None:
        """Waits less than a user does for room that other jobs have."""
        bounds.ROOM_OTHERS_S, bounds.ROOM_LOOK_S = 2.0, 0.2

    def begin(self, path: str, num_bytes: int = MIB, **options: Any) -> str:
        """Begins a save; returns its attempt when it is staged."""
        state = {"w": torch.full((num_bytes,), 7, dtype=torch.uint8)}
        self.handle = ray_dcp.async_save(
            state, checkpoint_id=path, options=SaveOptions(**options)
        )  # fmt: skip
        self.handle.staged(180)
        return str(self.handle.report().attempt)

    def committed(self) -> str:
        """Returns where the bytes were staged, once the save is committed."""
        self.handle.committed(180)
        return str(self.handle.report().staging)

    def seen(self, path: str, num_bytes: int) -> str:
        """Begins a save in the background; returns what it says that it waits for."""
        state = {"w": torch.full((num_bytes,), 7, dtype=torch.uint8)}
        options = SaveOptions(staging="background")
        handle = self.handle = ray_dcp.async_save(state, checkpoint_id=path, options=options)
        found: list[str] = []

        def says() -> bool:
            found[:] = [str(handle.progress)]
            return "room for staged bytes" in found[0] or bool(handle.done())

        assert eventually(says)
        return found[0]


@pytest.fixture
def jobs() -> Iterator[Any]:
    """Makes ranks of jobs of their own: `jobs(name, namespace, variables)`."""
    made: list[Any] = []

    def make(name: str, namespace: str, **variables: str) -> Any:
        environment = {"env_vars": variables} if variables else None
        actor = ray.remote(num_cpus=0)(Rank).options(runtime_env=environment)
        made.append(actor.remote(name, namespace))
        return made[-1]

    yield make
    for one in made:
        ray.kill(one)


def names() -> tuple[str, str, str]:
    """Returns the name of a session, and two namespaces."""
    mark = secrets.token_hex(4)
    return f"train-{mark}", f"team-A-{mark}", f"team-B-{mark}"


def committed(path: Path, attempt: str) -> bool:
    return eventually(lambda: ray_dcp.outcome(path, attempt) == "committed")


def entries_with(text: str) -> list[str]:
    return [name for name in ray_calls.names_from("") if text in name]


def test_a_staged_save_is_not_aborted_by_a_job_of_the_same_name_elsewhere(jobs, tmp_path):
    name, one, other = names()
    first = jobs(name, one)
    ray.get(first.hold.remote(str(tmp_path / "gate")))
    attempt = ray.get(first.begin.remote(str(tmp_path / "c")))
    own = ray.get(first.stager.remote())["own"]
    os.kill(own, signal.SIGKILL)
    second = jobs(name, other)
    ray.get(second.begin.remote(str(tmp_path / "d")))
    assert ray.get(second.committed.remote()) == "object_store"
    assert ray_dcp.outcome(tmp_path / "c", attempt) == "open"
    (tmp_path / "gate").touch()
    assert committed(tmp_path / "c", attempt)
    # Nothing is left in the control store of a session that has ended.
    ray.kill(second)
    assert eventually(lambda: not entries_with(name))


def test_a_stager_writes_with_the_environment_of_its_own_job(jobs, server: DevStore):
    name, space, _ = names()
    folder = secrets.token_hex(6)
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
    }  # fmt: skip
    expired = jobs(f"{name}-1", space, AWS_SECRET_ACCESS_KEY="expired", **variables)
    with pytest.raises(StorageError):
        ray.get(expired.begin.remote(f"s3://ckpt/{folder}/0"))
    pid = ray.get(expired.stager.remote())["pid"]
    secret = server.secret_access_key
    right = jobs(f"{name}-2", space, AWS_SECRET_ACCESS_KEY=secret, **variables)
    ray.get(right.begin.remote(f"s3://ckpt/{folder}/1"))
    assert ray.get(right.committed.remote()) == "object_store"
    assert ray.get(right.stager.remote())["pid"] != pid
    kept = [(key, ray_calls.recall(key)) for key in ray_calls.names_from("")]
    assert not [one for one in kept if secret in str(one)]
    assert secret not in str(ray.util.list_named_actors(all_namespaces=True))


def test_a_stager_ends_soon_after_its_job(jobs, tmp_path):
    name, space, _ = names()
    rank = jobs(name, space)
    ray.get(rank.begin.remote(str(tmp_path / "c")))
    ray.get(rank.committed.remote())
    pid = ray.get(rank.stager.remote())["pid"]
    ray.kill(rank)
    assert eventually(lambda: not lives(pid), 30)
    assert eventually(lambda: not entries_with(space))


@pytest.mark.parametrize("environment", ["the same", "another"])
def test_a_storage_that_hangs_holds_up_no_save_of_another_job(jobs, tmp_path, environment):
    end_stagers()
    name, one, other = names()
    other = one if environment == "the same" else other
    hung, healthy = jobs(f"{name}-1", one), jobs(f"{name}-2", other)
    ray.get(hung.hold.remote(str(tmp_path / "gate")))
    limit_bytes = int(store_bytes(ray.get_runtime_context().get_node_id()) / 2)
    assert eventually(lambda: ray.get(hung.stager.remote())["limit_bytes"] == limit_bytes)
    # All that there is, as nobody else was there.
    attempt = ray.get(hung.begin.remote(str(tmp_path / "hung"), limit_bytes - 2 * MIB))
    ray.get(healthy.impatient.remote())
    said = ray.get(healthy.seen.remote(str(tmp_path / "seen"), 4 * MIB))
    assert ray.get(healthy.committed.remote()) == "process"
    assert f"{name}-1" in said
    assert str(tmp_path / "hung") in said
    assert ray_dcp.outcome(tmp_path / "hung", attempt) == "open"
    used = [ray.get(rank.stager.remote())["used_bytes"] for rank in (hung, healthy)]
    assert sum(used[: 2 if environment == "another" else 1]) <= limit_bytes
    (tmp_path / "gate").touch()
    assert committed(tmp_path / "hung", attempt)
    if environment == "another":
        # From then on each has its half, and nobody else gets it.
        halves = [limit_bytes // 2] * 2
        ranks = (hung, healthy)
        assert eventually(
            lambda: [ray.get(rank.stager.remote())["limit_bytes"] for rank in ranks] == halves
        )
    ray.get(healthy.begin.remote(str(tmp_path / "after"), MIB))
    assert ray.get(healthy.committed.remote()) == "object_store"
