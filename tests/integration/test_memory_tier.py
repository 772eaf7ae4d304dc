"""Checkpoints that stay in the memory of the nodes: loads take their bytes from there."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest
import ray
import torch

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError, ParticipantError
from ray_dcp.options import SaveOptions
from tests.support.processes import eventually
from tests.support.programs import async_saves as programs

NUM_RANKS = 2


def spoil(folder) -> None:
    """Flips bytes all over the data files: who loads from them notices.

    Not the checksums at their ends, by which what comes from memory is verified.
    """
    for file in folder.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[5000:-8192:4096] = bytes(byte ^ 255 for byte in data[5000:-8192:4096])
        file.write_bytes(data)


def loads(ranks, path, step, **options) -> tuple[int, int]:
    """Returns bytes that were read, and those from memory, after all ranks found the values."""
    came = ranks.run(programs.kept_is, str(path), step, **options)
    assert [one.error for one in came] == [None, None]
    return came[0].value


def test_a_committed_step_is_loaded_from_memory_and_verified(ranks, tmp_path):
    ranks.run(programs.save_kept, str(tmp_path), 1)
    path = tmp_path / "step-1"
    spoil(path)
    read, from_memory = loads(ranks, path, 1, mapped=True)
    assert read == from_memory > 40 << 20
    came = ranks.run(programs.kept_is, str(path), 1, from_memory=False)
    assert {type(one.error) for one in came} == {DamagedCheckpointError}


def test_a_session_in_a_namespace_of_its_own_finds_its_memory(ray_session, tmp_path):
    state = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    into = {"w": torch.zeros(1 << 20)}
    options = SaveOptions(keep_in_memory=1)
    with closing(ray_dcp.connect(namespace="elsewhere", name="elsewhere")) as session:
        stager = session.ray.staging().link().handle
        try:
            handle = ray_dcp.async_save(state, checkpoint_id=tmp_path, options=options)
            handle.committed(180)
            programs.await_kept(session, handle.report().attempt, 1)
            spoil(tmp_path)
            report = ray_dcp.load(into, checkpoint_id=tmp_path)
        finally:
            ray.kill(stager)
    assert report.bytes_read == report.bytes_from_memory >= 4 << 20
    assert into["w"].equal(state["w"])


def test_another_node_is_asked_for_its_memory(ranks, tmp_path):
    ranks.run(programs.save_kept, str(tmp_path), 4)
    spoil(tmp_path / "step-4")
    read, from_memory = loads(ranks, tmp_path / "step-4", 4, unreachable=True)
    assert read == from_memory


def test_memory_that_holds_other_bytes_is_not_believed(ranks, tmp_path):
    ranks.run(programs.save_kept, str(tmp_path), 5)
    view = ray_dcp.open(tmp_path / "step-5")
    assert ranks.run(programs.scribble, view.attempt)[0]
    read, from_memory = loads(ranks, tmp_path / "step-5", 5)
    assert read > 0 == from_memory


def test_a_staged_step_is_waited_for_after_the_death_of_all_ranks(ranks, tmp_path):
    gate = str(tmp_path / "gate")
    ranks.run(programs.save_kept, str(tmp_path), 6)
    with pytest.raises(ParticipantError, match="died"):
        ranks.run(programs.stage_kept_and_die, str(tmp_path / "step-6"), 7, gate)
    ranks.resize(2)
    # The same id was saved again: nobody gets the older one.
    loads(ranks, tmp_path / "step-6", 7, opens=gate)

    def is_in_memory() -> bool:
        # Also windows whose owners are dead are mapped.
        read, from_memory = loads(ranks, tmp_path / "step-6", 7, mapped=True)
        return read == from_memory > 40 << 20

    assert eventually(is_in_memory)
    # The stager is told of no outcome by ranks that are dead; a removed folder has no record of it.
    shutil.rmtree(tmp_path / "step-6")
    polls = ranks.run(programs.polls_for_staged, str(tmp_path))
    assert polls == [1, 1]
