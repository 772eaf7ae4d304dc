"""Ranks survive the loss of a Ray that they never asked for, and save on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ray_dcp
from tests.integration.test_runtime_own_ray import LEASE_S, REPOSITORY, plain_environment
from tests.polling import eventually, session_members

LIMIT_S = 1
"""After which Ray ends a driver that has no control store, in seconds; 60 by default."""


@pytest.mark.parametrize(
    ("victim", "then"),
    [
        ("gcs_server", "again"),
        ("raylet", "raise"),
        ("raylet", "busy"),
        ("supervisor", "leave"),
    ],
)
def test_ranks_outlive_their_ray_and_save_with_the_next_one(tmp_path, victim, then):
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--local-addr=127.0.0.1", "-m", "tests.integration.lost_ray_script",
         victim, then, str(tmp_path), str(LEASE_S), str(LIMIT_S)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=REPOSITORY, timeout=400,
        env=plain_environment(
            OMP_NUM_THREADS="1", RAY_gcs_rpc_server_reconnect_timeout_s=str(LIMIT_S)
        ),
        check=False,
    )  # fmt: skip
    assert (finished.returncode == 0) == (then != "raise"), finished.stderr
    assert ("an error of the training script's own" in finished.stderr) == (then == "raise")
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    saves_on = then in ("again", "busy")
    for facts in ranks:
        assert facts["lived"]
        # What had all its answers before the coordinator ended is done, and no error.
        errors = [facts[what] for what in ("error", "load error") if what in facts]
        assert [error.partition(":")[0] for error in errors] == ["ParticipantError"] * len(errors)
        if then != "busy":
            assert "the Ray that this job started for itself" in facts["error"]
            assert "it was lost" in facts["error"]
            assert "the next save or load starts another one" in facts["error"]
    assert ranks[0]["supervisors"] == ranks[1]["supervisors"]
    if saves_on:
        found = [*range(0, 1 << 20, 100_000)]
        assert [(facts["found"], facts["staging"]) for facts in ranks] == [(found, "stager")] * 2
        assert len(set(ranks[0]["supervisors"])) == 2
    kept = {"before", "next", "after"} if saves_on else {"before"}
    kept |= {"lost"} if "error" not in ranks[0] else set()
    assert {name for name in ("before", "lost", "next", "after") if committed(tmp_path / name)} == (
        kept
    )
    for supervisor, directory in zip(ranks[0]["supervisors"], ranks[0]["directories"], strict=True):
        assert eventually(lambda pid=supervisor: not session_members(pid))
        assert eventually(lambda path=directory: not Path(path).exists())


def committed(path: Path) -> bool:
    try:
        return ray_dcp.verify(path).ok
    except ray_dcp.CheckpointNotFoundError:
        return False
