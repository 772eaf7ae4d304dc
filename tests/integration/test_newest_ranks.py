"""The newest good step on real ranks: what one of them reads damaged is passed over by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.runtime.worker_group import WorkerGroup
from tests.attempts import Attempt, attempt, files_at, one_error, save_sound, sound_state
from tests.checkpoints import flip

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def workers(ray_session):
    with WorkerGroup(2) as group:
        yield group


def try_newest(run: str, **how: Any) -> Attempt:
    """Returns on a rank the report, and what the state holds then."""

    def load() -> Any:
        state = sound_state(0, fill=False)
        report = ray_dcp.load_newest(state, run, **how)
        expected = sound_state(report.step)
        assert torch.equal(state["sharded"].to_local(), expected["sharded"].to_local())
        assert torch.equal(state["plain"], expected["plain"])
        assert (state["step"], state["note"]) == (expected["step"], expected["note"])
        return report

    return attempt(load)


def reports(attempts: list[Attempt]) -> list[Any]:
    for one in attempts:
        if one.error is not None:
            raise one.error
    return [one.value for one in attempts]


def test_both_ranks_fall_back_to_the_same_step(workers, tmp_path):
    for step in (9, 10, 11):
        workers.run(save_sound, f"{tmp_path}/step-{step}", step)
    uncommitted = tmp_path / "step-12"
    uncommitted.mkdir()
    (uncommitted / "__0_0.0123456789abcdef.distcp").write_bytes(b"x" * 100)

    found = reports(workers.run(try_newest, str(tmp_path)))
    assert {report.step for report in found} == {11}
    assert {Path(path).name for report in found for path, _ in report.skipped} == {"step-12"}

    # Rank 1's part alone: rank 0 has read its own of the newer step by then.
    (mine,) = (tmp_path / "step-11").glob("__1_*.distcp")
    for offset in range(0, mine.stat().st_size, 512):
        flip(mine, offset)
    attempts = workers.run(try_newest, str(tmp_path))
    found = reports(attempts)
    assert {report.step for report in found} == {10}
    assert {report.checkpoint_id for report in found} == {f"{tmp_path}/step-10"}
    for report in found:
        assert [Path(path).name for path, _ in report.skipped] == ["step-12", "step-11"]
        ((path, error),) = report.damaged
        assert path == f"{tmp_path}/step-11"
        assert isinstance(error, DamagedCheckpointError)
        assert mine.name in str(error)
    assert len(attempts[0].warnings) == 1
    assert mine.name in attempts[0].warnings[0]
    assert attempts[1].warnings == ()

    # A file that is gone, and then nothing that is sound.
    next((tmp_path / "step-10").glob("__0_*.distcp")).unlink()
    assert {report.step for report in reports(workers.run(try_newest, str(tmp_path)))} == {9}
    before = files_at(tmp_path)
    error = one_error(
        workers.run(try_newest, str(tmp_path), newer_than=9), DamagedCheckpointError,
        f"{tmp_path}/step-11", f"{tmp_path}/step-10",
    )  # fmt: skip
    assert "may hold parts" in str(error)
    assert files_at(tmp_path) == before
    # The session goes on.
    workers.run(save_sound, f"{tmp_path}/step-13", 13)
    assert {report.step for report in reports(workers.run(try_newest, str(tmp_path)))} == {13}
