"""Ranks survive the loss of a Ray that they never asked for, and save on."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import ray_dcp
from tests.forked_programs import Programs
from tests.integration.test_runtime_own_ray import LEASE_S, plain_environment
from tests.polling import eventually, session_members

LIMIT_S = 1
"""After which Ray ends a driver that has no control store, in seconds; 60 by default."""


def test_ranks_outlive_each_ray_that_they_lose_and_save_with_the_next_one(tmp_path):
    # Why a process of its own that is forked: Ray reads the limit when it is imported.
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(LIMIT_S)}
    words = (str(tmp_path), str(LEASE_S), str(LIMIT_S))
    with closing(Programs(**limit)) as programs:
        ended = programs.run(
            "-m", "tests.integration.lost_ray_script", *words, ranks=2,
            env=plain_environment(**limit),
        )  # fmt: skip
    said = [one.stderr for one in ended]
    assert [one.returncode for one in ended] == [0, 1], said
    # Ray's handler of uncaught exceptions has no control store to tell it to.
    assert "an error of the training script's own" in said[1]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    found = [*range(0, 1 << 20, 100_000)]
    for facts in ranks:
        # In the second case rank and stager share no memory.
        for what, staging in (("gcs_server", "stager"), ("raylet", "object_store")):
            assert facts[f"found {what}"] == found
            assert facts[f"staging {what}"] == staging
        # What had all its answers before the coordinator ended is done, and no error.
        told = {what: facts[what] for what in ("raylet", "load") if what in facts}
        for victim in ("gcs_server", "supervisor"):
            told[victim] = facts[victim]
            assert "the Ray that this job started for itself" in facts[victim]
            assert "it was lost" in facts[victim]
            assert "the next save or load starts another one" in facts[victim]
        assert {error.partition(":")[0] for error in told.values()} == {"ParticipantError"}
    assert ranks[0]["supervisors"] == ranks[1]["supervisors"]
    assert len(ranks[0]["supervisors"]) == 4
    kept = {"before", "last", *(f"{when} {what}" for when in ("next", "after") for what in (
        "gcs_server", "raylet"))}  # fmt: skip
    kept |= {"raylet"} if "raylet" not in ranks[0] else set()
    names = kept | {"gcs_server", "raylet", "supervisor"}
    assert {name for name in names if committed(tmp_path / name)} == kept
    for supervisor, directory in zip(ranks[0]["supervisors"], ranks[0]["directories"], strict=True):
        assert eventually(lambda pid=supervisor: not session_members(pid))
        assert eventually(lambda path=directory: not Path(path).exists())


def committed(path: Path) -> bool:
    try:
        return ray_dcp.verify(path).ok
    except ray_dcp.CheckpointNotFoundError:
        return False
