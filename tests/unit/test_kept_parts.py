"""A flipped bit does not go on with the parts that steps keep of earlier ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import CheckpointNotFoundError, DamagedCheckpointError
from ray_dcp.planning import sources
from ray_dcp.planning.sources import MOST_AGE_S
from tests.support.checkpoints import flip
from tests.support.job_runs import JobRun, buffer, policy


@pytest.fixture
def run(tmp_path: Path) -> JobRun:
    run = JobRun(tmp_path / "run")
    run.save(1, {"policy": policy(1.0), "buffer": buffer(1.0)}, version=7)
    return run


def keep(run: JobRun, step: int) -> None:
    run.save(step, {"buffer": buffer(float(step))}, keep=["policy"])
    run.kept.check_due(f"step-{step:08}", step)


def data_of(run: JobRun, step: int) -> Path:
    (file,) = (run.root / f"step-{step:08}" / "policy").glob("*.distcp")
    return file


def marked(run: JobRun) -> set[int]:
    return run.writer.look().damaged


def test_who_did_not_see_a_part_written_reads_it_before_a_step_keeps_it(run: JobRun, caplog):
    flip(data_of(run, 1), 5000)
    run.writer.close()
    later = JobRun(run.root)
    with pytest.raises(DamagedCheckpointError, match=r"'policy' of step 1 .*Save the part"):
        keep(later, 2)
    assert marked(later) == {1}
    assert "The steps that have it: 1. No step keeps it" in caplog.text
    assert f"`ray-dcp verify {run.root}`" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match="whole"):
        keep(later, 3)
    # The way out that it names.
    later.save(4, {"policy": policy(4.0), "buffer": buffer(4.0)})
    keep(later, 5)
    assert ray_dcp.read_state_dict(data_of(later, 5).parent)["model"]["w"][0] == 4.0


@pytest.mark.parametrize("why", ["links", "age"])
def test_what_was_kept_for_long_is_read_again_and_damage_is_marked(
    run: JobRun, why: str, monkeypatch
):
    monkeypatch.setattr(sources, "MOST_LINKS", 8)
    run.kept.wrote(ray_dcp.open(data_of(run, 1).parent).attempt)
    flip(data_of(run, 1), 5000)
    num_links = 8 // 2 if why == "links" else 2
    for step in range(2, num_links + 1):
        keep(run, step)
    assert marked(run) == set()
    if why == "age":
        run.now_s = MOST_AGE_S / 2
    keep(run, num_links + 1)
    assert marked(run) == {*range(1, num_links + 2)}
    assert os.path.samefile(data_of(run, 1), data_of(run, 2))
    with pytest.raises(CheckpointNotFoundError, match="whole"):
        keep(run, num_links + 2)


def test_a_part_is_read_once_for_many_that_keep_it(run: JobRun, monkeypatch):
    read = []
    verify = ray_dcp.job.kept_parts.verify
    monkeypatch.setattr(
        "ray_dcp.job.kept_parts.verify", lambda target: read.append(target.url) or verify(target)
    )
    later = JobRun(run.root)
    run.writer.close()
    for step in range(2, 6):
        keep(later, step)
    assert read == [str(data_of(run, 1).parent)]
    later.now_s = MOST_AGE_S
    keep(later, 6)
    assert len(read) == 2
