"""What is done beside a job on its Ray: evaluating, averaging, dealing rows of Ray Data."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.data import RowsSeen
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.manager import BestN, LatestN
from ray_dcp.transform import averaging
from tests.integration.test_frameworks import EXAMPLES, example
from tests.support import checkpoints
from tests.support.processes import eventually, lives
from tests.support.programs.forks import Programs, plain_environment

pytestmark = pytest.mark.usefixtures("ray_session")


def test_an_evaluator_that_is_killed_evaluates_the_same_step_again(
    tmp_path: Path, programs: Programs
):
    run = tmp_path / "run"
    keep = LatestN(1) | BestN(1, "eval_loss", later=True)
    torch.manual_seed(0)
    with ray_dcp.CheckpointManager(run, retention=keep, no_dist=True) as manager:
        for step in (1, 2, 3):
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            )
            manager.save(step, {"model": model})
        address = ray.get_runtime_context().gcs_address
        env = plain_environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        line = (str(EXAMPLES / "evaluator.py"), str(run), "0.1")
        first = programs.start(*line, env=env)
        # By handle, while it holds the first step, or at latest when it has recorded it.
        assert eventually(lambda: [*(run / ".manager/reading").glob("*")] or not lives(first.pid))
        first.kill()
        manager.join()
        assert manager.all_steps() == [1, 2, 3]
        (ended,) = programs.run(*line, env=env)
        told = [line.partition(":")[0] for line in ended.stdout.splitlines()]
        assert told[-2:] == ["step 2", "step 3"], ended.stderr
        assert all("eval_loss" in manager.step_info(step).metrics for step in (1, 2, 3))
        best = manager.best_step()
        manager.save(4, {"model": model}, metrics={"eval_loss": 1e9})
        manager.join()
        assert manager.all_steps() == sorted({best, 4})
        (ended,) = programs.run(*line, env=env)
        assert ended.stdout == "", ended.stderr


def test_ranks_of_the_named_ray_share_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(averaging, "_MOST_RANKS", 2)
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        state = {f"w{k}": torch.randn(50, 7, generator=generator) for k in range(4)}
        state |= {"half": torch.randn(9, generator=generator).bfloat16(), "step": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / f"run/step-{step}", no_dist=True)
    sources = [f"{tmp_path}/run@{step}" for step in (1, 2, 3)]
    alone = ray_dcp.average(sources, tmp_path / "alone", weights=[1, 2, 4], dtype="float32")
    monkeypatch.setattr(averaging, "RANK_BYTES", 1024)
    seen, leases, lease = [], list[bytes](), tmp_path / "shared/writing-00000001.json"

    def look(progress):
        seen.append(progress)
        leases.extend([lease.read_bytes()] if lease.exists() else [])

    shared = ray_dcp.average(
        sources, tmp_path / "shared", weights=[1, 2, 4], dtype="float32", progress=look
    )  # fmt: skip
    assert seen[-1].done_bytes == seen[-1].total_bytes == shared.num_bytes
    made, other = ray_dcp.open(tmp_path / "shared"), ray_dcp.open(tmp_path / "alone")
    assert (made.world_size, other.world_size) == (2, 1)
    # By it, who repeats the command of a process that was killed fences what its ranks wrote.
    assert {json.loads(one)["attempt"] for one in leases} == {made.attempt}
    assert not lease.exists()
    assert made.names == other.names
    assert made.diff(other).counts == {"unchanged": 6}
    assert made.sources == shared.sources == alone.sources
    # What fails on a rank fails the average, and nothing of it stays.
    place = int(ray_dcp.open(sources[1]).table.payload_offset[0])
    checkpoints.flip(checkpoints.data_file(tmp_path / "run/step-2"), place)
    with pytest.raises(DamagedCheckpointError):
        ray_dcp.average(sources, tmp_path / "failed")
    assert not list((tmp_path / "failed").glob("*.distcp"))


@ray.remote(num_cpus=0)
def consume(shard, num_batches):
    """Plays a worker: goes over its part; returns ids and what would be saved."""
    rows = RowsSeen("id")
    batches = rows.follow(shard.iter_batches(batch_size=5, batch_format="numpy"))
    ids = [int(row) for batch in islice(batches, num_batches) for row in batch["id"]]
    return ids, rows.state_dict()


# Ray Data sets options that it has deprecated itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_of_ray_data_come_once_across_a_resize():
    dataset = ray.data.range(60, override_num_blocks=4)
    seen, driver = [], RowsSeen("id")
    for world_size, num_batches in ((2, 3), (1, 99)):
        shards = driver.left(dataset).streaming_split(world_size, equal=True)
        told = ray.get([consume.remote(shard, num_batches) for shard in shards])
        seen += [row for ids, _ in told for row in ids]
        own = [state["seen"] for _, state in told]
        # As a load by one rank of what several have saved.
        own[0].value = own[0].resized([each.value for each in own], 0, 1)
        driver.load_state_dict({"epoch": 0, "seen": own[0]})
    assert len(seen) == 60
    assert sorted(seen) == list(range(60))


def test_prompts_of_a_job_that_is_killed_are_each_trained_on_once(tmp_path: Path):
    main = example("frontier.py")["main"]
    assert len(main(str(tmp_path / "run"), 5)) == 20  # asserts itself that none is repeated
    manager = ray_dcp.CheckpointManager(tmp_path / "run", no_dist=True, read_only=True)
    state = {"prompts": {"next": 0, "open": ""}}
    with manager:
        manager.restore(5, state)
    first = state["prompts"]["next"]
    # Those in the workers' hands when the job ended come again, and none is left out.
    assert state["prompts"]["open"]
    trained = main(str(tmp_path / "run"), 20)
    assert len(trained) == 80
    assert {*range(first)} <= {*trained}
