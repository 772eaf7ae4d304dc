"""`ray_dcp.train` in real Ray Train runs: killed ranks, another size, S3, trials, wrong calls.

And `save` and `load` by themselves, which find the other ranks of a run.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.distributed.checkpoint import format_utils

import ray_dcp
from ray_dcp.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    RankDisagreementError,
)
from ray_dcp.integrations import save_requests
from ray_dcp.integrations.ray_train import parse
from ray_dcp.manager import BestN, LatestN
from ray_dcp.session.discovery import current_session
from ray_dcp.session.names import NAMESPACE, coordinator_name
from ray_dcp.session.ray_cluster import attached_address
from ray_dcp.train import SaveBeforeResize
from tests.integration.test_frameworks import example
from tests.support.processes import eventually
from tests.support.programs import models as programs
from tests.support.programs import replica_groups, train_folders, tune_trials
from tests.support.programs import train as train_programs
from tests.support.programs.held_writes import hold_writes
from tests.support.programs.train import (
    made,
    mean_losses,
    note,
    notes,
    train_one_step,
    uninterrupted,
)
from tests.support.servers.s3 import fresh_place

# Ray Train makes Ray Data's settings, which sets options that Ray Data itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")

NUM_STEPS = 24
LAST_SAVED = 20
ASKED_AT = 6
"""Steps after which a save is asked for, and a rank killed."""


@pytest.fixture(scope="module", autouse=True)
def train_ray(request, server):
    """A Ray whose Train looks at its workers often, with what S3 asks for in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key_id)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_access_key)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield request.getfixturevalue("own_ray_session")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run that the tests go on with, one after the other, with no other one between them:

    a test that fails ends what the module shares.
    """
    return tmp_path_factory.mktemp("train")


class SavesThenKills(SaveBeforeResize):
    """Does once what a resize does, and then kills a rank instead.

    Made from `RAY_TRAIN_CALLBACKS`, as an operator gives it to all runs.
    """

    def __init__(self) -> None:
        super().__init__(limit_s=60)
        self.folder = os.environ["NOTES_OF_THE_RUN"]
        self.is_over = False

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Ray Train's controller calls it after each look at its workers."""
        if self.is_over or len(list(notes(Path(self.folder), "step"))) < 2 * ASKED_AT:
            return
        self.is_over = True
        group = self._group
        self.before_controller_execute_resize_decision(None)
        (pid,) = ray.get([group.execute_single_async(1, os.getpid)])
        os.kill(pid, signal.SIGKILL)


def fit(
    train_fn: Any,
    folder: Path,
    num_workers: int,
    validation_config: Any = None,
    torch_config: Any = None,
    **run: Any,
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": 0.5}
        ),
        torch_config=torch_config or TorchConfig(backend="gloo"),
        validation_config=validation_config,
        run_config=RunConfig(
            name="run", storage_path=str(folder / "runs"),
            failure_config=FailureConfig(max_failures=1), **run,
        ),
    ).fit()  # fmt: skip


def train_in_two_shards(config: dict[str, str]) -> None:
    import ray.train
    import torch.distributed as dist

    folder, rank, world_size = config["folder"], dist.get_rank(), dist.get_world_size()
    if ray.train.get_checkpoint() is None:
        save_different_steps(folder, rank)
        save_and_load_by_themselves(folder, rank)
    state = made("fsdp2")
    asked = told_when_asked()
    keep = LatestN(1) | BestN(1, "val_samples", "min")
    with ray_dcp.train.checkpointer(save_interval=4, retention=keep) as ckpt:
        done = ckpt.restore(state)
        note(folder, rank, restored=done, samples=state["samples"])
        for step in range(0 if done is None else done + 1, NUM_STEPS):
            # However late the controller looks: it finds ranks that have steps left.
            assert done is not None or step != 2 * ASKED_AT or asked.wait(180)
            loss = train_one_step(state, step, rank, world_size)
            note(folder, rank, step=step, loss=loss, world_size=world_size)
            ckpt.save(step, state, metrics={"loss": loss}, validation=True)
        ray.train.get_all_reported_checkpoints()  # returns when all of them are validated
    reported = ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )
    note(folder, rank, reported=[(one.checkpoint.path, one.metrics["step"]) for one in reported])
    validated = [one.metrics for one in reported if "val_samples" in one.metrics]
    note(folder, rank, validated=[(one["step"], one["val_samples"]) for one in validated])
    note(folder, rank, local=os.listdir("."))


def count_samples(checkpoint: Any) -> dict[str, int]:
    """Validates a checkpoint, in a task of Ray Train's controller."""
    state = {"samples": -1}
    ray_dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {"val_samples": state["samples"]}


def told_when_asked() -> threading.Event:
    """Returns what is set when this process has been asked to save."""
    asked, ask = threading.Event(), save_requests.REQUESTS.ask

    def told(what: save_requests.RequestedSave) -> bool:
        found = ask(what)
        asked.set()
        return found

    save_requests.REQUESTS.ask = told
    return asked


def save_different_steps(folder: str, rank: int) -> None:
    with ray_dcp.train.checkpointer(folder="different") as ckpt:
        try:
            ckpt.save(rank + 1, {"w": torch.ones(2)})
        except RankDisagreementError as error:
            note(folder, rank, refused=str(error))


def save_and_load_by_themselves(folder: str, rank: int) -> None:
    programs.seed_all(5)
    programs.build("fsdp2", seed=0)
    programs.train(2)
    programs.save(f"{folder}/c")
    saved = programs.digests()
    programs.build("fsdp2", seed=1)
    programs.restore(f"{folder}/c")
    note(folder, rank, saved=saved, loaded=programs.digests(), **session_facts(current_session()))


def session_facts(session: Any) -> dict[str, Any]:
    return {
        "session": session.name, "size": session.world_size, "number": session.rank,
        "address": attached_address(), "epoch": session.coordinator_info()["epoch"],
    }  # fmt: skip


def coordinator_lives(session: str) -> bool:
    """Returns whether there is an actor for the session's coordinator."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {"name": coordinator_name(session), "namespace": NAMESPACE} in actors


def check_session(told: list[dict[str, Any]], address: str, size: int = 2) -> None:
    assert {facts["session"] for facts in told} == {told[0]["session"]}
    assert sorted(facts["number"] for facts in told) == [*range(size)]
    assert {(facts["size"], facts["address"]) for facts in told} == {(size, address)}
    assert {facts["epoch"] for facts in told} == {1}
    assert eventually(lambda: not coordinator_lives(told[0]["session"]))


def rows_of(step: int) -> dict[str, Any]:
    """Returns what a buffer's actor would."""
    return {"rows": torch.full((1 << 15,), float(step)), "at": step}


def fail() -> None:
    raise ValueError("the buffer is empty")


def train_with_parts(config: dict[str, str]) -> None:
    import torch.distributed as dist

    folder, rank = config["folder"], dist.get_rank()
    rows, failing = ray.remote(rows_of), ray.remote(fail)
    state = {"w": torch.zeros(4)}

    def restored(ckpt: Any) -> None:
        state["w"].fill_(9)
        done = ckpt.restore(state)
        buffer = ray.get(ckpt.ref("buffer"))
        found = [done, state["w"][0].item(), buffer["rows"][-1].item(), buffer["at"]]
        note(folder, rank, found=[*found, ckpt.value("cursor"), [*ckpt.restored_parts]])

    with ray_dcp.train.checkpointer(on_error="raise", max_to_keep=1) as ckpt:
        for step in (1, 2):
            state["w"].fill_(step)
            parts = {"buffer": rows.remote(step), "cursor": {"value": [step]}}
            ckpt.save(step, state, parts=parts if rank == 0 else None)
        try:
            ckpt.save(3, state, parts={"buffer": failing.remote(), "cursor": 3})
        except ray_dcp.CheckpointError as error:
            note(folder, rank, failed=str(error))
        restored(ckpt)
        for step in (4, 5):
            state["w"].fill_(step)
            ckpt.save(step, state, parts={"buffer": rows.remote(step), "cursor": {"value": step}})
        ckpt.save(6, {"w": torch.full((4,), 6.0)})
        note(folder, rank, url=ckpt.url)
    # As the next worker group does, of which a part of the newest step is damaged.
    with ray_dcp.train.checkpointer() as ckpt:
        assert ckpt.restore(state) == 6
        assert not ckpt.restored_parts
        ckpt.save(7, state, parts={"buffer": rows.remote(7), "cursor": 7})
        ckpt.save(8, state, parts={"buffer": rows.remote(8), "cursor": 8})
    if rank == 0:
        (data,) = Path(ckpt.url).glob("*-step-00000008/buffer/*.distcp")
        data.write_bytes(data.read_bytes()[:-4096])
    dist.barrier()
    with ray_dcp.train.checkpointer() as ckpt:
        restored(ckpt)


def test_parts_are_committed_with_the_ranks_state_and_come_back(train_ray, tmp_path):
    fit(train_with_parts, tmp_path, 2)
    failed = [one["failed"] for one in notes(tmp_path, "failed")]
    assert len(failed) == 2
    assert all("value of the part 'buffer', but the task" in one for one in failed)
    assert all("ValueError: the buffer is empty" in one for one in failed)
    found = [one["found"] for one in notes(tmp_path, "found")]
    both = ["buffer", "cursor"]
    first, second = [2, 2.0, 2.0, 2, {"value": [2]}, both], [7, 6.0, 7.0, 7, 7, both]
    assert found == [first, first, second, second]
    # Each step is a checkpoint by itself, with its parts beside.
    (url, _) = (one["url"] for one in notes(tmp_path, "url"))
    run = ray_dcp.open_run(url)
    assert [one.step for one in run if one.is_readable and not one.is_item] == [2, 6, 7]
    # Of the step whose buffer failed, the other part went with the next commits.
    assert not list(Path(url).glob("*-step-00000003/**/*.distcp"))
    assert run.step(8).state == "damaged"
    assert "buffer" in run.step(8).detail
    assert sorted(run.step(7).parts) == both
    state = {"w": torch.zeros(4)}
    assert ray_dcp.load_newest(state, url, at_most=7, no_dist=True).step == 7
    assert state["w"].tolist() == [6.0] * 4
    assert ray_dcp.verify(run.step(7).path).ok
    mean = ray_dcp.average([run.step(6).path, run.step(7).path], tmp_path / "mean")
    assert mean.averaged == ("w",)
    ray_dcp.delete(run.step(7).path)
    assert not list(Path(url).glob("*-step-00000007/**/*.distcp"))


def test_a_killed_rank_costs_no_step_when_the_run_was_asked_to_save(train_ray, folder, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", f"{__name__}.{SavesThenKills.__name__}")
    monkeypatch.setenv("NOTES_OF_THE_RUN", str(folder))
    from ray.train import ValidationConfig

    result = fit(train_in_two_shards, folder, 2, ValidationConfig(count_samples))
    assert sorted(one["rank"] for one in notes(folder, "refused")) == [0, 1]
    begun = [one["restored"] for one in notes(folder, "restored")]
    asked = begun[-1]
    assert begun == [None, None, asked, asked]
    assert asked >= ASKED_AT - 1
    steps = [one["step"] for one in notes(folder, "step") if one["rank"] == 0]
    assert steps == list(range(NUM_STEPS)), "steps were lost or redone"
    restored = [one["samples"] for one in notes(folder, "samples")]
    assert restored[-1] == (asked + 1) * train_programs.BATCH
    losses = mean_losses(folder)
    expected = uninterrupted(NUM_STEPS)
    assert [losses[step] for step in range(NUM_STEPS)] == pytest.approx(expected, abs=1e-5)
    for told in notes(folder, "reported"):
        folders = [path for path, _ in told["reported"]]
        assert len(folders) == len(set(folders))
        assert told["reported"][-1] == [result.checkpoint.path, LAST_SAVED]
        assert asked in [step for _, step in told["reported"]]
    assert all(one["local"] == [] for one in notes(folder, "local"))
    for told in notes(folder, "validated"):
        steps = dict(told["validated"])
        assert steps == {step: (step + 1) * train_programs.BATCH for step in steps}
        assert {0, LAST_SAVED - 4} <= steps.keys()
    kept = [one.step for one in ray_dcp.open(f"{folder}/runs/run/checkpoints") if one.is_readable]
    assert kept == [0, LAST_SAVED], "of those that were validated, the best and the newest"
    assert result.metrics["step"] == LAST_SAVED
    loaded = {"samples": -1}
    report = ray_dcp.load(loaded, checkpoint_id=result.checkpoint, no_dist=True)
    assert report.loaded == ("samples",)
    assert loaded["samples"] == (LAST_SAVED + 1) * train_programs.BATCH


def test_workers_save_and_load_by_themselves_and_what_they_saved_loads_outside(train_ray, folder):
    """In the run before: a plain `save` and `load` find the other ranks of a Ray Train run."""
    told = list(notes(folder, "saved"))
    for facts in told:
        assert facts["loaded"] == facts["saved"] == told[0]["saved"]
    check_session(told, train_ray)
    assert ray_dcp.open(folder / "c").world_size == 2
    whole = {"model": {"outlet.weight": torch.zeros(7, 22)}, "notes": {"steps": 0}}
    ray_dcp.load(whole, checkpoint_id=folder / "c", no_dist=True)
    assert whole["notes"]["steps"] == 2
    digests = programs.digests_of({"model": whole["model"]})
    assert digests["model.outlet.weight"] == told[0]["saved"]["model.outlet.weight"]


# A worker that is killed while its save is on the way from memory to storage


def test_one_worker_goes_on_with_what_is_in_memory_only(train_ray, folder):
    """It begins with what two shards saved, and is killed once a save of its own is staged."""
    from ray.train import CheckpointConfig

    def open_when_restarted() -> None:
        assert eventually(lambda: len(list(notes(folder, "attempt"))) == 2)
        (folder / "gate").touch()

    with ThreadPoolExecutor(1) as beside:
        opened = beside.submit(open_when_restarted)
        result = fit(
            train_alone, folder, 1,
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        )  # fmt: skip
        opened.result()
    assert result.error is None
    (begun,) = notes(folder, "begun")
    assert begun["begun"] == LAST_SAVED
    expected = uninterrupted(NUM_STEPS)
    assert begun["loss"] == pytest.approx(expected[LAST_SAVED + 1], abs=1e-5)
    assert begun["committed"] == 0, "the save was to be in memory only"
    (told,) = notes(folder, "resumed")
    assert told["resumed"] == LAST_SAVED + 1
    assert told["loss"] == pytest.approx(expected[LAST_SAVED + 2], abs=1e-5)


def train_alone(config: dict[str, str]) -> None:
    """Goes on with what two shards saved; then finds that it was taken away."""
    import ray.train

    folder = config["folder"]
    note(folder, 0, attempt=os.getpid())
    state = made("bare")
    with ray_dcp.train.checkpointer() as ckpt:
        done = ckpt.restore(state)
        loss = train_one_step(state, done + 1)
        if done == LAST_SAVED:
            hold_writes(ckpt._group.session, Path(folder, "gate"))
            ckpt.save(done + 1, state)
            committed = Path(folder).glob(f"runs/run/checkpoints/*-{done + 1:08d}/manifest-*")
            note(folder, 0, begun=done, loss=loss, committed=len(list(committed)))
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(done + 1, state, metrics={"loss": torch.tensor(loss)})
    # What Ray Train has registered is taken away while the run goes on.
    assert str(done + 1) in ray.train.get_checkpoint().path
    whole = ray.train.CheckpointConsistencyMode.COMMITTED
    ray.train.get_all_reported_checkpoints(consistency_mode=whole)
    shutil.rmtree(f"{folder}/runs/run/checkpoints")
    with (
        ray_dcp.train.checkpointer() as ckpt,
        pytest.raises(CheckpointNotFoundError, match="Bring them back"),
    ):
        ckpt.restore(state)
    note(folder, 0, resumed=done, loss=loss)


# Workers that save to folders of their own, which Ray Train merges


def test_the_folders_that_workers_report_are_merged_into_whole_checkpoints(train_ray, tmp_path):
    result = fit(train_folders.train, tmp_path, 2)
    assert result.error is None
    begun = [one["begun"] for one in notes(tmp_path, "begun")]
    assert begun == [-1, -1, *[train_folders.KILLED_AT - 1] * 2]
    losses, expected = mean_losses(tmp_path), uninterrupted(train_folders.STEPS)
    assert [losses[step] for step in range(train_folders.STEPS)] == pytest.approx(expected, 1e-5)
    refused = [one["refused"] for one in notes(tmp_path, "refused")]
    assert len(refused) == 4
    assert all("ray_dcp.train.checkpointer" in error for error in refused)
    assert [one["copied"] for one in notes(tmp_path, "copied")] == [train_folders.STEPS - 1] * 2
    assert len([*notes(tmp_path, "missing")]) == 2

    whole = Path(result.checkpoint.path)
    view = ray_dcp.open(whole)
    assert view.world_size == 2
    assert ray_dcp.verify(whole).ok
    ours, theirs = ray_dcp.read_state_dict(whole), tmp_path / "stock.pt"
    format_utils.dcp_to_torch_save(whole, theirs)
    stock = torch.load(theirs, weights_only=False)["app"]
    assert stock["step"] == ours["app"]["step"] == train_folders.STEPS - 1
    assert stock["model"].keys() == ours["app"]["model"].keys()
    for name, value in stock["model"].items():
        assert value.equal(ours["app"]["model"][name])

    # What only some of the workers have uploaded is not taken as a checkpoint.
    for rank, error in ((1, DamagedCheckpointError), (0, CheckpointNotFoundError)):
        half = tmp_path / f"without-{rank}"
        shutil.copytree(whole, half)
        parts = half.glob(f"__{rank}_*") if rank else [*half.glob("[!_]*"), *half.glob("__0_*")]
        for part in parts:
            part.unlink()
        with pytest.raises(error):
            ray_dcp.read_state_dict(half)


# Workers that are replicas, which Ray Train replaces one by one


def test_replicas_save_together_and_train_on_where_one_dies_in_a_save(train_ray, tmp_path):
    """The save is lost by name; the next one is made by who is left, later ones by all again."""
    result = fit(
        replica_groups.train, tmp_path, 2,
        torch_config=replica_groups.ReplicaConfig(backend="gloo"),
    )  # fmt: skip
    assert result.error is None
    killed = replica_groups.KILLED_AT
    began = [(one["rank"], one["began"]) for one in notes(tmp_path, "began")]
    assert sorted(began[:2], key=lambda one: one[0]) == [(0, None), (1, None)]
    assert began[2:] == [(replica_groups.KILLED, killed + 1)]
    run = ray_dcp.open(tmp_path / "runs" / "run" / "checkpoints")
    steps = {one.step: one for one in run if one.state == "committed"}
    last = replica_groups.STEPS - 1
    assert sorted(steps) == [step for step in range(last + 1) if step != killed]
    sizes = {step: one.view.world_size for step, one in steps.items()}
    assert sizes == {step: 1 if step == killed + 1 else 2 for step in steps}
    again = {one["rank"]: (one["w"], one["own"]) for one in notes(tmp_path, "own")}
    assert again == {rank: ([last + 1.0], 100 * last + rank) for rank in (0, 1)}
    lost = {one["rank"]: one["lost"] for one in notes(tmp_path, "lost")}
    assert lost[1] == []
    assert len(lost[0]) == 1
    assert f"Step {killed} is not saved" in lost[0][0]
    assert f"rank {replica_groups.KILLED}" in lost[0][0]

    found = parse(result.checkpoint.path)
    assert found is not None
    assert found.step == last
    state = {"w": torch.zeros(1000), "own": ray_dcp.PerRank(0, resized=lambda own, *_: own)}
    ray_dcp.load(state, checkpoint_id=result.checkpoint, no_dist=True)
    assert state["w"].unique().tolist() == [last + 1.0]
    assert state["own"].value == [100 * last, 100 * last + 1]


def test_the_torchft_run_of_the_documentation_replaces_a_worker_and_saves(train_ray, tmp_path):
    example("ray_train_replicas.py")["main"](str(tmp_path), 30, 12)
    run = ray_dcp.open(tmp_path / "replicas" / "checkpoints")
    steps = [step.step for step in run]
    assert steps[:2] == [5, 10]
    assert steps[-1] == 30
    assert (tmp_path / "killed").exists()


# Trials of Ray Tune, whose workers have no process group


def test_trials_side_by_side_on_s3_keep_to_themselves(train_ray, server, tmp_path):
    from ray import tune

    place = fresh_place(server)
    url = (
        f"{place.url}?scheme=http&region={place.storage_options['region']}"
        f"&endpoint_override={str(place.storage_options['endpoint']).removeprefix('http://')}"
    )
    trials = tune.Tuner(
        tune_trials.trial,
        param_space={
            "train_fn": f"{__name__}.{train_beside_another.__name__}", "url": url,
            "folder": str(tmp_path), "number": tune.grid_search([0, 1]),
        },
        run_config=tune.RunConfig(name="tune", storage_path=str(tmp_path / "tune")),
    ).fit()  # fmt: skip
    assert [one.error for one in trials] == [None, None]
    for number, size in ((0, 2), (1, 1)):
        told = [one for one in notes(tmp_path, "loaded") if one["trial"] == number]
        expected = {"shared": [number] * 9, **{f"of {rank}": rank for rank in range(size)}}
        assert [one["loaded"] for one in told] == [expected] * size
        assert told[0]["session"].startswith("train-")
        # It also ends: Ray would have taken it away with the trial, and started it again nowhere.
        check_session(told, train_ray, size)
        state = {"shared": torch.zeros(9)}
        run = place / f"trial-{number}" / "checkpoints"
        assert ray_dcp.load_newest(state, run, no_dist=True).step == 2
        assert state["shared"].tolist() == [number] * 9


def train_beside_another(config: dict[str, Any]) -> None:
    from ray.train import get_context

    folder, number = Path(config["folder"]), config["number"]
    rank, size = get_context().get_world_rank(), get_context().get_world_size()
    assert not torch.distributed.is_initialized()
    with ray_dcp.train.checkpointer() as ckpt:
        (folder / f"here-{number}").touch()
        assert eventually((folder / f"here-{1 - number}").exists)
        for step in (1, 2):
            state = {"shared": torch.full((9,), float(number)), f"of {rank}": torch.tensor(rank)}
            ckpt.save(step, state, metrics={"number": number})
        found = {"shared": torch.zeros(9), **{f"of {one}": torch.tensor(-1) for one in range(size)}}
        assert ckpt.restore(found) == 2
        loaded = {name: value.tolist() for name, value in found.items()}
        note(str(folder), rank, trial=number, loaded=loaded, **session_facts(ckpt._group.session))


def test_the_elastic_run_of_the_documentation_saves_its_steps(train_ray, tmp_path):
    example("ray_train_elastic.py")["main"](str(tmp_path), 20)
    run = ray_dcp.open(tmp_path / "elastic" / "checkpoints")
    assert [step.step for step in run] == [10, 20]
