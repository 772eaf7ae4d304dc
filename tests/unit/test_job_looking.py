"""The commands and views on a run of `JobCheckpoints`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.job.step_files import create_record
from ray_dcp.place import step_deletion
from ray_dcp.store.local import LocalStorage
from ray_dcp.view import run_listing
from tests.support import job_runs


def invoke(*arguments: object) -> Result:
    # Why so wide: no column is left out, whatever its cells say.
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(one) for one in arguments])


def lines(*arguments: object, exit_code: int = 0) -> list[str]:
    result = invoke(*arguments)
    assert result.exit_code == exit_code, result.output
    return result.output.splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job") / "run"
    job_runs.make(root)
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def step(run: Path, number: int) -> Path:
    return run / f"step-{number:08}"


def states(run: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads(invoke("ls", run, "--json").stdout)}


def test_each_step_has_a_line_with_its_parts_and_from_where_they_are_kept(made: Path):
    head, one, two, three, four, why = lines("ls", made)
    assert "PARTS" in head
    assert "  buffer, policy  " in one
    assert "  buffer, policy (kept from step 1)  latest best" in two
    assert three.split()[:2] == ["step-00000003", "aborted"]
    assert four.split()[:3] == ["step-00000004", "in", "flight"]
    assert why == "step-00000004: parts are there, and no record of the step: policy"
    told = {row["name"]: row for row in json.loads(invoke("ls", made, "--json").stdout)}
    parts = told["step-00000002"]["parts"]
    assert parts["policy"] == {"folder": "policy", "version": 7, "kept_from": 1}
    assert parts["buffer"] == {"folder": "buffer", "version": None, "kept_from": None}
    assert told["step-00000001"]["parts"]["buffer"]["version"] == 7
    view: Any = ray_dcp.open(made)
    assert view.step(2).parts["policy"].kept_from == 1
    assert view[2].parts == view.step(2).parts
    assert view.step("latest").step == 2


def test_a_part_of_a_step_that_is_not_committed_is_no_checkpoint_that_stands(run: Path):
    assert states(run)["step-00000004/policy"] == "in flight"
    shown = lines("show", run)
    assert shown[0].startswith(f"{run}: a run of 4 checkpoints")
    assert "states, by names and lengths of files: 2 committed, 1 aborted, 1 in flight" in shown
    assert any("policy (kept from step 1)" in line for line in shown)
    assert lines("watch", run, "--looks", 1)[-1].startswith("step-00000004: in flight")
    assert not any("step-00000004" in line for line in lines("verify", run))
    assert lines("verify", run)[-1] == "newest good: step 2"
    assert [one.step for one in ray_dcp.follow(run, timeout_s=0.01)] == [1, 2]
    _, left, way_out = lines("gc", run, "--yes")
    assert "left alone" in left
    assert "--abort-unfinished" in way_out
    lines("rm", step(run, 4), "--yes")
    assert not list(step(run, 4).rglob("*.distcp"))
    assert lines("ls", run)[-1] == "1 deleted step: --all"


def data(run: Path) -> set[str]:
    """Folders of the run that have data."""
    return {str(path.parent.relative_to(run)) for path in run.rglob("*.distcp")}


def test_the_parts_that_a_crashed_job_left_are_collected_and_no_others(run: Path):
    kept = {f"step-0000000{n}{part}" for n in (1, 2) for part in ("", "/buffer", "/policy")}
    # Another folder of the same number, as worker groups of Ray Train leave them.
    other = Path(shutil.copytree(step(run, 1), run / "g2-step-00000004"))
    kept |= {f"{other.name}{part}" for part in ("", "/buffer", "/policy")}
    ray_dcp.open_run(run).tag(other.name, "release")
    planned = lines("gc", run, "--abort-unfinished", "--dry-run")
    assert any(line.startswith("step-00000004/policy: would delete ") for line in planned)
    assert data(run) == {*kept, "step-00000004/policy"}
    lines("gc", run, "--abort-unfinished", "--yes")
    assert data(run) == kept
    assert "step-00000004" not in states(run)
    assert not list(step(run, 4).glob("step-info-*"))
    assert ray_dcp.open_run(run).step(other.name).tags == ("release",)
    assert lines("gc", run, "--abort-unfinished", "--yes")[-1] == "freed 0 B"


def test_a_job_whose_parts_were_collected_commits_no_step_without_them(tmp_path: Path):
    job = job_runs.JobRun(tmp_path)
    for _ in range(2):
        # The second time it is begun after the record of the first deletion.
        place, records = job.begin(1, {"policy": job_runs.policy(1.0)})
        assert states(tmp_path)[place.name] == "in flight"
        lines("gc", tmp_path, "--abort-unfinished", "--yes")
        error = create_record(job.writer, place, records)
        assert isinstance(error, CheckpointExistsError)
        job.writer.finish(place, False)
        assert place.name not in states(tmp_path)
        assert data(tmp_path) == set()
    job.save(1, {"policy": job_runs.policy(2.0), "buffer": job_runs.buffer(2.0)})
    assert states(tmp_path)["step-00000001"] == "committed"
    job.writer.close()


def interrupted(run: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[], object]) -> None:
    """Has a deletion of step 1 die when its record exists and its parts are still there."""

    class DiedError(BaseException):
        """Ends the process."""

    def die(*_: object) -> None:
        raise DiedError

    with monkeypatch.context() as patched:
        patched.setattr(step_deletion.StepDeletion, "_delete_item", die)
        with pytest.raises(DiedError):
            remove()
    assert {"step-00000001/policy", "step-00000001/buffer"} < data(run)


@pytest.mark.parametrize("later", ["rm", "gc", "delete", "job"])
def test_the_parts_of_a_step_whose_deletion_was_interrupted_are_shown_and_deleted(
    run: Path, monkeypatch: pytest.MonkeyPatch, later: str
):
    interrupted(run, monkeypatch, lambda: lines("rm", f"{run}@1", "--yes"))
    assert any("parts of it are left: buffer, policy" in one for one in lines("ls", run))
    assert {states(run)[f"step-00000001/{part}"] for part in ("policy", "buffer")} == {"in flight"}
    assert lines("verify", run)[-1] == "newest good: step 2"
    assert not any("step-00000001" in line for line in lines("verify", run))
    if later == "rm":
        lines("rm", step(run, 1), "--yes")
    elif later == "gc":
        lines("gc", run, "--yes")
    elif later == "delete":
        ray_dcp.delete(step(run, 1))
    else:
        job = job_runs.JobRun(run)
        assert job.writer.remove_leftovers() == {}
        job.writer.close()
    assert not any(folder.startswith("step-00000001") for folder in data(run))
    assert not list(step(run, 1).glob("step-info-*"))
    assert {"step-00000002/policy", "step-00000002/buffer"} < data(run)
    assert "step-00000001" not in states(run)


def test_a_step_that_python_deletes_goes_with_its_parts(run: Path):
    planned = ray_dcp.delete(step(run, 2), dry_run=True)
    assert {"step-00000002", "step-00000002/policy", "step-00000002/buffer"} < data(run)
    report = ray_dcp.delete(step(run, 2))
    assert not any(folder.startswith("step-00000002") for folder in data(run))
    assert planned.deleted == report.deleted
    folders = {key.rpartition("/")[0] for key in report.deleted}
    assert folders == {"", "buffer", "policy"}
    assert not any("/" in one.key for one in report.kept)


def test_what_the_user_keeps_in_a_step_s_folder_is_no_part(run: Path):
    for name in ("ema", "policy.x"):
        ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=step(run, 4) / name)
    found = states(run)
    assert found["step-00000004/ema"] == found["step-00000004/policy.x"] == "committed"
    lines("gc", run, "--abort-unfinished", "--yes")
    assert {"step-00000004/ema", "step-00000004/policy.x"} < data(run)
    assert "step-00000004/policy" not in data(run)


@pytest.mark.parametrize("how", ["gone", "short", "replaced"])
def test_a_part_that_is_damaged_makes_its_step_damaged(run: Path, how: str):
    part = step(run, 2) / "buffer"
    if how == "gone":
        shutil.rmtree(part)
    elif how == "short":
        next(part.glob("*.distcp")).write_bytes(b"")
    else:
        ray_dcp.delete(part)
    assert states(run)["step-00000002"] == "damaged"
    told = lines("ls", run, "--check", exit_code=1)
    assert any(line.startswith("step-00000002: buffer: ") for line in told)
    assert lines("verify", run, exit_code=1)[-1] == "newest good: step 1"
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert ray_dcp.open_run(run)["latest"].url.endswith("step-00000001")
    copied = lines("cp", run, run.parent / "copy", exit_code=1)
    assert any("step-00000002: not copied" in line for line in copied)
    assert not step(run.parent / "copy", 2).exists()


def test_the_copy_of_a_run_has_whole_parts_and_opens_as_a_run_of_the_job(run: Path):
    copy, one = run.parent / "copy", run.parent / "one"
    lines("cp", run, copy, "--verify")
    lines("cp", f"{run}@2", one, "--verify")
    shutil.rmtree(run)
    assert states(copy).keys() == {
        f"step-0000000{n}{part}" for n in (1, 2) for part in ("", "/buffer", "/policy")
    }
    with ray_dcp.JobCheckpoints(copy, ("policy", "buffer"), read_only=True) as job:
        assert job.all_steps() == [1, 2]
        last = job.latest()
        assert last is not None
        with last:
            assert (last.step, last.kept_from, last.versions) == (2, {"policy": 1}, {"policy": 7})
            assert last.value("policy")["model"]["w"].tolist() == [1.0] * 3000
            assert last.value("buffer")["at"] == 2
    assert ray_dcp.read_state_dict(one / "policy")["model"]["w"][0] == 1


def test_a_step_that_its_storage_does_not_read_is_neither_whole_nor_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    inner = LocalStorage.read

    def read(self: LocalStorage, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        # Its last bytes, which are read to open it, are there.
        if self.url.endswith("step-00000002/buffer") and key.endswith(".distcp") and not start:
            raise StorageError("input/output error")
        return inner(self, key, start, num_bytes)

    with ray_dcp.JobCheckpoints(run, ("policy", "buffer"), read_only=True) as job:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "read", read)
            with pytest.raises(StorageError, match=r"step 2 .* can't be verified"):
                job.latest()
            assert job.latest(verifies=False).step == 2
        assert job.latest().step == 2


def test_a_step_is_removed_with_its_parts_and_what_was_kept_of_it_stays(run: Path):
    planned = lines("rm", f"{run}@1", "--dry-run")
    assert sum("would delete" in line for line in planned) == 3
    lines("rm", f"{run}@1", "--yes")
    assert not list(step(run, 1).rglob("*.distcp"))
    assert ray_dcp.verify(step(run, 2)).ok


def test_a_part_is_named_where_one_checkpoint_is_asked_for(run: Path, tmp_path: Path):
    assert lines("show", f"{run}@2", "--part", "policy")[0].startswith(f"{step(run, 2)}/policy: ")
    told = lines("show", f"{run}@2", "--part", "critic", exit_code=2)
    assert told == [f"Error: expected the part 'critic' in {step(run, 2)}, found buffer, policy"]
    told = lines("show", step(run, 2) / "policy", "--part", "policy", exit_code=2)
    assert "it is a checkpoint of one state" in told[0]
    lines("export", f"{run}@2", tmp_path / "w.pt", "--part", "policy", "--format", "torch")
    assert torch.load(tmp_path / "w.pt")["model"]["w"][0] == 1
    assert lines("reshard", f"{run}@1", "--to", 2, "--part", "policy")[-1].startswith("at most")


def test_the_parts_of_a_range_of_steps_are_averaged_and_a_kept_one_counts_once(run: Path):
    mean = run.parent / "mean"
    lines("average", f"{run}@1..4", "--part", "buffer", "-o", mean / "buffer")
    assert ray_dcp.read_state_dict(mean / "buffer")["rows"].tolist() == [1.5] * 100
    for n, sources in enumerate(([f"{run}@1..2"], [f"{run}@1", f"{run}@2"], [run, "--last", 2])):
        told = lines("average", *sources, "--part", "policy", "-o", mean / f"policy{n}")
        assert told[-1] == f"counted once: {step(run, 2)}/policy is kept from step 1"
        state = ray_dcp.read_state_dict(mean / f"policy{n}")
        assert state["model"]["w"].tolist() == [1.0] * 3000
    told = lines("average", f"{run}@5..9", "--part", "buffer", "-o", mean / "none", exit_code=2)
    assert "expected steps from 5 to 9" in told[0]


def test_steps_are_compared_part_by_part(run: Path):
    told = lines("diff", f"{run}@1", f"{run}@2", "--exit-code", exit_code=1)
    assert told[0].endswith("/step-00000002/buffer")
    assert told[1].startswith("2 changed")
    assert told[-2].endswith("/step-00000002/policy")
    assert told[-1].startswith("1 unchanged; 0 B differ")
    assert lines("diff", f"{run}@1", f"{run}@2", "--exit-code", "--part", "policy")
    value = json.loads(invoke("diff", f"{run}@1", f"{run}@2", "--json").stdout)
    assert value["parts"]["buffer"]["counts"] == {"changed": 2}


def test_the_timeline_of_a_step_has_a_lane_for_each_part(run: Path, tmp_path: Path):
    head, _, buffer, policy, record, *_ = lines("timeline", f"{run}@2")
    assert head.startswith(f"{step(run, 2)}: 2 parts, committed after ")
    assert policy.split() == ["policy", "kept", "from", "step", "1"]
    # The record is created when all parts are durable.
    assert buffer.rindex("█") < record.index("█")
    assert "rank 0" in "\n".join(lines("timeline", f"{run}@2", "--part", "buffer"))
    lines("timeline", f"{run}@1", "--chrome", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == [
        f"{name}: {lane}"
        for name in ("buffer", "policy", "record")
        for lane in ("coordinator", "rank 0")
    ]
    assert len({one["pid"] for one in events}) == 6


def test_a_step_that_is_deleted_while_it_is_listed_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    list_one = run_listing._list_one

    def look(storage: Any, root: Any, directory: str, *rest: Any, **how: Any) -> Any:
        if directory.startswith("step-00000002/"):
            monkeypatch.undo()
            lines("rm", step(run, 2), "--yes")
        return list_one(storage, root, directory, *rest, **how)

    monkeypatch.setattr(run_listing, "_list_one", look)
    found = {one.name: one.state for one in run_listing.list_checkpoints(run)}
    assert found["step-00000002"] == "deleted"
    assert found["step-00000001"] == "committed"


def part_of(run: Path, name: str) -> ray_dcp.Part:
    """Returns the token of a part of the newest step."""
    with ray_dcp.JobCheckpoints(run, ("policy", "buffer"), read_only=True) as job:
        last = job.latest()
        assert last is not None
        with last:
            return last.part(name)


def open_part(run: Path) -> ray_dcp.Part:
    """Returns the token of a part of a step that is being saved."""
    place = str(step(run, 4) / "policy")
    return ray_dcp.Part(place, name="policy", step=4, attempt="0123456789abcdef")


def into() -> dict[str, Any]:
    return {"rows": torch.zeros(100), "at": 0}


def test_the_newest_of_a_part_is_that_part_and_no_other(run: Path):
    state = into()
    report = ray_dcp.load_newest(state, part_of(run, "buffer"))
    assert (report.step, report.skipped, state["at"]) == (2, (), 2)
    assert report.checkpoint_id == str(step(run, 2) / "buffer")
    for given in ({"at_most": 1}, {"newer_than": 0}, {"trust": "eval_ok"}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(given))}= .*part of step 2"):
            ray_dcp.load_newest(into(), part_of(run, "buffer"), **given)
    with pytest.raises(InvalidRequestError, match="'policy' is one of step 4 while"):
        ray_dcp.load_newest(into(), open_part(run))
    # One of another moment would not go with the other parts.
    buffer = part_of(run, "buffer")
    next((step(run, 2) / "buffer").glob("*.distcp")).write_bytes(b"")
    state = into()
    with pytest.raises(DamagedCheckpointError, match="step-00000002/buffer"):
        ray_dcp.load_newest(state, buffer)
    assert state["at"] == 0


def manager_of(run: Path, **given: Any) -> ray_dcp.CheckpointManager:
    items = {"policy": ray_dcp.manager.Item(), "buffer": ray_dcp.manager.Item()}
    given = {"items": items, **given}
    return ray_dcp.CheckpointManager(run, no_dist=True, chkpt_on_preemption=False, **given)


def test_a_manager_restores_the_item_that_a_part_names(run: Path):
    with manager_of(run, read_only=True) as manager:
        state = into()
        report = manager.restore(part_of(run, "buffer"), state)
        assert (report.step, [*report.reports], state["at"]) == (2, ["buffer"], 2)
        with pytest.raises(InvalidRequestError, match="'policy' is one of step 4 while"):
            manager.restore(open_part(run), into())
        with pytest.raises(InvalidRequestError, match=r"as item 'buffer', found the part 'buffer'"):
            manager.restore(2, {"buffer": part_of(run, "buffer")})
        elsewhere = ray_dcp.Part(str(run.parent / "b" / "step-1" / "buffer"), name="buffer", step=1)
        with pytest.raises(InvalidRequestError, match=r"part 'buffer' of step 1 lies in .*/b/step"):
            manager.restore(elsewhere, into())


def test_a_part_is_refused_by_name_where_none_can_be(run: Path):
    part = part_of(run, "buffer")
    is_no_run = r"expected a run, .* but 'buffer' is a part of step 2.*; give the run, .*/run \["
    for use in (
        manager_of,
        lambda one: ray_dcp.JobCheckpoints(one, ("buffer",)),
        ray_dcp.follow,
        lambda one: ray_dcp.record_metrics(one, 2, {"loss": 1.0}),
    ):
        with pytest.raises(InvalidRequestError, match=is_no_run):
            use(part)  # type: ignore[operator]
    with manager_of(run) as manager:
        for save in (manager.save, manager.save_async):
            with pytest.raises(InvalidRequestError, match=r"a step, found the part 'buffer'.*save"):
                save(part, {"policy": into(), "buffer": into()})
            with pytest.raises(InvalidRequestError, match=r"as item 'buffer', found the part"):
                save(9, {"policy": into(), "buffer": part})
        assert manager.all_steps() == [1, 2]
    assert not list((step(run, 2) / "buffer").glob("*/"))


def test_a_step_of_ones_choice_is_protected_while_it_is_read(run: Path):
    steps = ray_dcp.JobCheckpoints(run, ("policy", "buffer"), read_only=True)
    with steps.at(1) as found:
        assert (found.step, found.versions, found.kept_from) == (1, {"policy": 7, "buffer": 7}, {})
        assert ray_dcp.read_state_dict(found.part("policy"))["model"]["w"][0] == 1.0
        assert "being read" in invoke("rm", f"{run}@1", "--yes").output
    for number in (3, 4, 9):  # given up, cut off, never begun
        with pytest.raises(CheckpointNotFoundError, match=rf"step {number} in .*steps are 1, 2"):
            steps.at(number)
