"""Actors and tasks without a process group: what they save in the background outlives them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from ray.util import list_named_actors

import ray_dcp
from ray_dcp.errors import StorageError
from tests.support.processes import eventually

if TYPE_CHECKING:
    from tests.support.servers.s3 import DevStore

pytestmark = pytest.mark.usefixtures("ray_session")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1 << 18,), value)}


class Worker:
    """A process that is alone, as of a buffer or an evaluator."""

    def save(self, path: str) -> int:
        """Saves at once; returns how many actors there are then."""
        ray_dcp.save(state(1.0), checkpoint_id=path)
        ray_dcp.load(state(0.0), checkpoint_id=path)
        return len(list_named_actors(all_namespaces=True))

    def set_variable(self, name: str, text: str) -> None:
        os.environ[name] = text

    def begin(self, path: str, value: float) -> str:
        """Returns where the bytes are when the save has staged them."""
        saving = ray_dcp.async_save(state(value), checkpoint_id=path)
        saving.staged(180)
        return str(saving.report().staging)

    def committed(self, path: str) -> str:
        """Returns where the bytes were staged, once the save is committed."""
        saving = ray_dcp.async_save(state(1.0), checkpoint_id=path)
        saving.committed(180)
        return str(saving.report().staging)

    def manage(self, root: str) -> str:
        """Does the same by a manager."""
        self.manager = ray_dcp.CheckpointManager(root, 1, chkpt_on_preemption=False)
        self.manager.save_async(7, state(7.0))
        return self.manager.path


@ray.remote(num_cpus=0)
def begin(path: str, value: float) -> str:
    return Worker().begin(path, value)


def stands(path: Path, value: float) -> bool:
    def is_there() -> bool:
        try:
            return ray_dcp.verify(path).ok
        except ray_dcp.CheckpointNotFoundError:
            return False

    found = state(0.0)
    assert eventually(is_there)
    ray_dcp.load(found, checkpoint_id=path)
    return bool((found["w"] == value).all())


def test_a_save_of_a_process_that_is_alone_outlives_it(tmp_path: Path):
    before = {one["name"] for one in list_named_actors(all_namespaces=True)}
    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    # What is done at once needs no other process.
    assert ray.get(workers[0].save.remote(f"{tmp_path}/sync")) == len(before)
    places = {f"actor-{number}": 1.0 + number for number in range(2)}
    begun = [
        worker.begin.remote(f"{tmp_path}/{name}", value)
        for worker, (name, value) in zip(workers, places.items(), strict=True)
    ]
    assert ray.get(begun) == ["object_store"] * 2
    run = ray.get(workers[1].manage.remote(f"{tmp_path}/run"))
    for worker in workers:
        ray.kill(worker)
    assert ray.get(begin.remote(f"{tmp_path}/task", 3.0)) == "object_store"
    # One for all of a job and its environment, actors and tasks.
    made = {one["name"] for one in list_named_actors(all_namespaces=True)} - before
    assert sum(":stager:" in name for name in made) == 1, made
    for name, value in {**places, "task": 3.0}.items():
        assert stands(tmp_path / name, value), name
    assert stands(Path(run) / "step-00000007", 7.0)


def test_processes_of_other_environments_commit_with_their_own(
    server: DevStore, monkeypatch: pytest.MonkeyPatch
):
    """Keys of one actor of a job are not those of another, nor of a coordinator that they share."""
    folder = secrets.token_hex(6)
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
    }  # fmt: skip

    def worker(secret: str) -> Any:
        environment = {"env_vars": {**variables, "AWS_SECRET_ACCESS_KEY": secret}}
        return ray.remote(Worker).options(num_cpus=0, runtime_env=environment).remote()

    expired, good = worker("expired"), worker(server.secret_access_key)
    with pytest.raises(StorageError):
        ray.get(expired.committed.remote(f"s3://ckpt/{folder}/0"))
    assert ray.get(good.committed.remote(f"s3://ckpt/{folder}/1")) == "object_store"
    # A driver's environment is its own: Ray passes it to no actor.
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    with pytest.raises(StorageError):
        Worker().committed(f"s3://ckpt/{folder}/2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_access_key)  # keys are renewed
    assert Worker().committed(f"s3://ckpt/{folder}/2") == "object_store"


def test_a_process_that_changes_its_keys_leaves_the_others_theirs(server: DevStore):
    """Also where they had the same ones, and so one coordinator."""
    folder = secrets.token_hex(6)
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }  # fmt: skip
    made = ray.remote(Worker).options(num_cpus=0, runtime_env={"env_vars": variables})
    one, other = made.remote(), made.remote()
    paths = (f"s3://ckpt/{folder}/{number}" for number in range(4))
    for worker in (one, other):
        assert ray.get(worker.committed.remote(next(paths))) == "object_store"
    ray.get(one.set_variable.remote("AWS_SECRET_ACCESS_KEY", "expired"))
    with pytest.raises(StorageError):
        ray.get(one.committed.remote(next(paths)))
    assert ray.get(other.committed.remote(next(paths))) == "object_store"


class Rank:
    """A rank that sets the keys itself, as scripts do, after Ray has started its process."""

    def __init__(self, rank: int, variables: dict[str, str]) -> None:
        self.rank = rank
        os.environ.update(variables)

    def begin(self, name: str) -> None:
        self.session = ray_dcp.connect(rank=self.rank, world_size=2, name=name)

    def save(self, path: str, secret: str) -> str:
        os.environ["AWS_SECRET_ACCESS_KEY"] = secret
        saving = ray_dcp.async_save(state(1.0), checkpoint_id=path)
        try:
            saving.committed(180)
        except StorageError as error:
            return type(error).__name__
        return str(saving.report().staging)

    def end(self) -> None:
        self.session.close()


def test_a_group_commits_with_the_keys_that_its_ranks_set_themselves(server: DevStore):
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
    }  # fmt: skip
    name = secrets.token_hex(6)
    ranks = [ray.remote(Rank).options(num_cpus=0).remote(rank, variables) for rank in range(2)]
    ray.get([rank.begin.remote(name) for rank in ranks], timeout=240)
    good = server.secret_access_key
    for number, secret in enumerate(["expired", good]):
        path = f"s3://ckpt/{name}/{number}"
        saved = ray.get([rank.save.remote(path, secret) for rank in ranks], timeout=240)
        expected = "object_store" if secret == good else "StorageRefusedError"
        assert saved == [expected] * 2
    ray.get([rank.end.remote() for rank in ranks])


def test_a_job_finds_its_steps_with_the_keys_that_its_driver_set(
    server: DevStore, monkeypatch: pytest.MonkeyPatch
):
    """In tasks, too, which know only what Ray started their processes with."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run = ray_dcp.JobCheckpoints(f"s3://ckpt/{secrets.token_hex(6)}", ("cursor",))
    with run.step(1) as step:
        step.put("cursor", [1, 2])
    step.result(120)
    last = run.latest()
    assert last is not None
    with last:
        assert ray.get(last.ref("cursor")) == [1, 2]

    @ray.remote(num_cpus=0)
    def left() -> bool:
        return "AWS_SECRET_ACCESS_KEY" in os.environ

    assert not any(ray.get([left.remote() for _ in range(4)]))
