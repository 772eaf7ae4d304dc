"""A plain torchrun script saves through a Ray of its own, and leaves nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from tests.async_programs import large_is
from tests.integration.test_runtime_own_ray import LEASE_S, REPOSITORY, plain_environment
from tests.polling import eventually, session_members


def run(action: str, folder: Path, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Returns how torchrun ended."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={num_ranks}", "--local-addr=127.0.0.1",
         "-m", "tests.integration.torchrun_script", action, str(folder), str(LEASE_S)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPOSITORY, timeout=400,
        env=plain_environment(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip


def torchrun(action: str, folder: Path, num_ranks: int) -> tuple[list[dict[str, Any]], str]:
    """Returns what each rank tells, by rank, and all that was printed."""
    finished = run(action, folder, num_ranks)
    assert finished.returncode == 0, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    told = sorted(map(json.loads, lines), key=lambda facts: facts["rank"])
    assert [facts["rank"] for facts in told] == list(range(num_ranks)), finished.stdout
    return told, finished.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder in which two ranks have saved, what they told, and what they printed."""
    folder = tmp_path_factory.mktemp("torchrun")
    return folder, *torchrun("save", folder, 2)


def test_two_ranks_save_through_one_ray_and_one_loads_the_same_without_any(saved):
    folder, (one, other), _ = saved
    assert one["session"] == other["session"]
    assert one["supervisor_pid"] == other["supervisor_pid"]
    assert one["digests"] == other["digests"]
    assert ray_dcp.open(folder / "all").world_size == 2
    (alone,), _ = torchrun("load", folder, 1)
    assert alone["digests"] == one["digests"]
    assert not alone["uses_ray"]


def test_a_group_of_one_and_a_process_without_group_save_beside_the_others(saved):
    folder, _, printed = saved
    for rank in range(2):
        found = {"w": torch.zeros(5, dtype=torch.int64), "note": ""}
        ray_dcp.load(found, checkpoint_id=folder / f"rank-{rank}", no_dist=True)
        assert found["w"].tolist() == [rank] * 5
        assert found["note"] == f"rank {rank}"
        assert ray_dcp.open(folder / f"rank-{rank}").world_size == 1
    assert sorted(ray_dcp.open(folder / "both").tensors) == ["of 0", "of 1"]
    assert "refused: " in printed
    assert "rank 1" in printed
    assert not (folder / "nobody").exists()


def test_nothing_of_its_ray_is_left_after_the_lease(saved):
    _, (facts, _), _ = saved
    assert eventually(lambda: not session_members(facts["supervisor_pid"]))
    assert eventually(lambda: not Path(facts["directory"]).exists())


def test_a_staged_save_survives_rank_0_that_had_started_its_ray(tmp_path):
    finished = run("die", tmp_path, 2)
    assert finished.returncode != 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    path = tmp_path / "staged"
    assert eventually(lambda: ray_dcp.outcome(path, facts["attempt"]) == "committed")
    assert large_is(str(path), 3, 2)
    assert ray_dcp.verify(path).ok
    assert eventually(lambda: not session_members(facts["supervisor_pid"]))
    assert eventually(lambda: not Path(facts["directory"]).exists())
