"""`ray_dcp.train` in real Ray Train runs: a killed rank, another size, calls that are wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.errors import (
    CheckpointNotFoundError,
    InvalidRequestError,
    RankDisagreementError,
)
from ray_dcp.integrations.train.callback import SaveBeforeResize
from tests import train_programs
from tests.train_programs import made, mean_losses, note, notes, train_one_step, uninterrupted

# Ray Train makes Ray Data's settings, which sets options that Ray Data itself has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
    pytest.mark.timeout(360),
]

NUM_STEPS = 24
LAST_SAVED = 20
ASKED_AT = 6
"""Steps after which a save is asked for, and a rank killed."""


@pytest.fixture(scope="module", autouse=True)
def train_ray(request):
    """A Ray whose Train looks at its workers often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        yield request.getfixturevalue("ray_session")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run that the tests go on with, one after the other."""
    return tmp_path_factory.mktemp("train")


class SavesThenKills(SaveBeforeResize):
    """Does once what a resize does, and then kills a rank instead."""

    def __init__(self, folder: str) -> None:
        super().__init__(limit_s=60)
        self.folder = folder
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


def fit(train_fn: Any, folder: Path, num_workers: int, **run: Any) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": 0.5}
        ),
        torch_config=TorchConfig(backend="gloo"),
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
    state = made("fsdp2")
    with ray_dcp.train.checkpointer(save_interval=4) as ckpt:
        done = ckpt.restore(state)
        note(folder, rank, restored=done, samples=state["samples"])
        for step in range(0 if done is None else done + 1, NUM_STEPS):
            loss = train_one_step(state, step, rank, world_size)
            note(folder, rank, step=step, loss=loss, world_size=world_size)
            ckpt.save(step, state, metrics={"loss": loss})
    reported = ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )
    note(folder, rank, reported=[(one.checkpoint.path, one.metrics["step"]) for one in reported])
    note(folder, rank, local=os.listdir("."))


def save_different_steps(folder: str, rank: int) -> None:
    ckpt = ray_dcp.train.checkpointer(folder="different")
    ckpt.save(rank + 1, {"w": torch.ones(2)})
    try:
        ckpt.close()
    except RankDisagreementError as error:
        note(folder, rank, refused=str(error))


def test_a_killed_rank_costs_no_step_when_the_run_was_asked_to_save(train_ray, folder):
    callback = SavesThenKills(str(folder))
    result = fit(train_in_two_shards, folder, 2, callbacks=[callback])
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
    assert result.metrics["step"] == LAST_SAVED
    loaded = {"samples": -1}
    report = ray_dcp.load(loaded, checkpoint_id=result.checkpoint, no_dist=True)
    assert report.loaded == ("samples",)
    assert loaded["samples"] == (LAST_SAVED + 1) * train_programs.BATCH


def test_one_worker_goes_on_with_what_two_shards_saved_and_wrong_calls_are_refused(
    train_ray, folder
):
    from ray.train import CheckpointConfig

    keep = CheckpointConfig(num_to_keep=1)
    result = fit(train_alone_and_wrongly, folder, 1, checkpoint_config=keep)
    assert result.error is None
    (told,) = notes(folder, "alone")
    assert told["alone"] == LAST_SAVED
    expected = uninterrupted(NUM_STEPS)
    assert told["loss"] == pytest.approx(expected[LAST_SAVED + 1], abs=1e-5)


def train_alone_and_wrongly(config: dict[str, str]) -> None:
    """Goes on with what two shards saved; then calls what must be refused."""
    import shutil

    import ray.train

    folder = config["folder"]
    with pytest.raises(InvalidRequestError, match="Leave one of them out"):
        ray_dcp.train.checkpointer(max_to_keep=3)
    with pytest.raises(InvalidRequestError, match="RunConfig"):
        ray_dcp.train.checkpointer(folder="../elsewhere")
    state = made("bare")
    with ray_dcp.train.checkpointer() as ckpt:
        done = ckpt.restore(state)
        loss = train_one_step(state, done + 1)
        ckpt.save(done + 1, state, metrics={"loss": torch.tensor(loss)})
        with pytest.raises(InvalidRequestError, match="not newer"):
            ckpt.save(done + 1, state)
    with pytest.raises(InvalidRequestError, match="is closed"):
        ckpt.save(done + 2, state)
    ckpt.close()
    # What Ray Train has registered is taken away while the run goes on.
    assert str(done + 1) in ray.train.get_checkpoint().path
    whole = ray.train.CheckpointConsistencyMode.COMMITTED
    ray.train.get_all_reported_checkpoints(consistency_mode=whole)
    shutil.rmtree(ckpt.url)
    with (
        ray_dcp.train.checkpointer() as ckpt,
        pytest.raises(CheckpointNotFoundError, match="Bring them back"),
    ):
        ckpt.restore(state)
    note(folder, 0, alone=done, loss=loss)
