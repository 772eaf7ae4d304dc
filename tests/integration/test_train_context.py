"""Inside Ray Train, `save` and `load` find the other ranks by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.runtime.attach import attached_address
from ray_dcp.runtime.naming import NAMESPACE, coordinator_name
from ray_dcp.runtime.session import current_session
from tests import programs
from tests.polling import eventually

# Ray Train makes Ray Data's settings, which sets options that Ray Data itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")


def coordinator_lives(session: str) -> bool:
    """Returns whether there is an actor for the session's coordinator."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {"name": coordinator_name(session), "namespace": NAMESPACE} in actors


@pytest.fixture(scope="module", autouse=True)
def train_ray(request):
    """A Ray whose Train looks at its workers often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
        yield request.getfixturevalue("ray_session")


def run(trainer: type, train: Any, folder: Path, **kwargs: Any) -> list[dict[str, Any]]:
    """Returns what each of two workers told."""
    from ray.train import RunConfig, ScalingConfig

    trainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="run", storage_path=str(folder / "train")),
        **kwargs,
    ).fit()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


def tell(folder: str, rank: int, **facts: Any) -> None:
    session = current_session()
    place = {"session": session.name, "world_size": session.world_size, "rank": session.rank}
    facts.update(place, address=attached_address(), epoch=session.coordinator_info()["epoch"])
    Path(folder, f"told-{rank}.json").write_text(json.dumps(facts))


def train_with_a_process_group(config: dict[str, str]) -> None:
    folder = config["folder"]
    programs.seed_all(5)
    programs.build("fsdp2", seed=0)
    programs.train(2)
    programs.save(f"{folder}/c")
    saved = programs.digests()
    programs.build("fsdp2", seed=1)
    programs.restore(f"{folder}/c")
    tell(folder, dist.get_rank(), saved=saved, loaded=programs.digests())


def train_without_a_process_group(config: dict[str, str]) -> None:
    from ray.train import get_context

    folder, rank = config["folder"], get_context().get_world_rank()
    assert not dist.is_initialized()
    state = {"shared": torch.arange(9.0), f"of {rank}": torch.tensor(rank)}
    ray_dcp.save(state, checkpoint_id=f"{folder}/c")
    found = {"shared": torch.zeros(9), "of 0": torch.tensor(-1), "of 1": torch.tensor(-1)}
    ray_dcp.load(found, checkpoint_id=f"{folder}/c")
    loaded = {name: value.tolist() for name, value in found.items()}
    tell(folder, rank, loaded=loaded)


def check_session(told: list[dict[str, Any]], address: str) -> None:
    assert {facts["session"] for facts in told} == {told[0]["session"]}
    assert [facts["rank"] for facts in told] == [0, 1]
    assert {(facts["world_size"], facts["address"]) for facts in told} == {(2, address)}
    assert {facts["epoch"] for facts in told} == {1}
    assert eventually(lambda: not coordinator_lives(told[0]["session"]), 30)


def test_a_torch_trainer_saves_and_loads_and_what_it_saved_loads_outside(train_ray, tmp_path):
    from ray.train.torch import TorchConfig, TorchTrainer

    told = run(
        TorchTrainer, train_with_a_process_group, tmp_path,
        torch_config=TorchConfig(backend="gloo"),
    )  # fmt: skip
    for facts in told:
        assert facts["loaded"] == facts["saved"] == told[0]["saved"]
    check_session(told, train_ray)
    view = ray_dcp.open(tmp_path / "c")
    assert view.world_size == 2
    whole = {"model": {"outlet.weight": torch.zeros(7, 22)}, "notes": {"steps": 0}}
    ray_dcp.load(whole, checkpoint_id=tmp_path / "c", no_dist=True)
    assert whole["notes"]["steps"] == 2
    digests = programs.digests_of({"model": whole["model"]})
    assert digests["model.outlet.weight"] == told[0]["saved"]["model.outlet.weight"]


def test_workers_without_a_process_group_find_each_other_by_the_train_context(train_ray, tmp_path):
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    told = run(DataParallelTrainer, train_without_a_process_group, tmp_path)
    expected = {"shared": list(range(9)), "of 0": 0, "of 1": 1}
    assert [facts["loaded"] for facts in told] == [expected] * 2
    check_session(told, train_ray)
    assert told[0]["session"].startswith("train-")
