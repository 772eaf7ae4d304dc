"""Loading the newest good checkpoint of a run: which step, the same on all ranks; what is told."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ray_dcp
from ray_dcp import errors, loading
from ray_dcp.commit_protocol.messages import LoadDone, OpKey, Target
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.options import LoadOptions
from ray_dcp.rank import rank_load
from ray_dcp.rank.rank_load import StepRange, falls_back, load_newest_rank
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from tests.support import checkpoints
from tests.support.arrays import ArrayWork, state_of
from tests.support.storages import Fault, FaultyStorage
from tests.support.world import load_rank, run_ranks, save

STEPS = (8, 9, 10)


@pytest.fixture
def run(request):
    name = "newest-" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    storage = MemoryStorage(name)
    storage.delete([entry.key for entry in storage.list()])
    for step in STEPS:
        save(state_of(step), 2, f"{storage.url}/step-{step}")
    return storage


def ranks_of(url, world_size, *, shapes=None, steps=None, openers=None, options=None, runs=None):
    """Returns the generators of a load of the newest, and each rank's works, oldest first."""
    works = [[] for _ in range(world_size)]
    shapes = shapes or state_of()

    def one(rank):
        numbers = count()

        def next_key():
            return OpKey("newest", next(numbers))

        def load(checkpoint_id, is_late):
            def plan(checkpoint):
                works[rank].append(ArrayWork(checkpoint, shapes, rank, world_size))
                return works[rank][-1]

            return load_rank(
                next_key(), rank=rank, world_size=world_size, target=Target(checkpoint_id),
                options=options or LoadOptions(), plan=plan,
                opener=(openers or {}).get(rank, open_storage),
            )  # fmt: skip

        return load_newest_rank(
            next_key(), rank=rank, world_size=world_size,
            run=Target(runs[rank] if runs else url),
            steps=(steps or {}).get(rank, StepRange()) if isinstance(steps, dict)
            else steps or StepRange(),
            timeout_s=60, load=load,
        )  # fmt: skip

    return [one(rank) for rank in range(world_size)], works


def load(url, world_size=2, **how):
    """Returns what each rank found, after a look that they found and hold the same."""
    performers = {key: how.pop(key) for key in ("fate", "choose") if key in how}
    ranks, works = ranks_of(url, world_size, **how)
    found = [result.get() for result in run_ranks(ranks, **performers)]
    assert len({(one.checkpoint_id, one.step) for one in found}) == 1
    assert len({str([(path, str(why)) for path, why in one.skipped]) for one in found}) == 1
    for work in works:
        work[-1].check(state_of(found[0].step))
    return found[0]


def error_of(url, world_size=2, **how):
    """Returns the one error with which all ranks that ended ended."""
    performers = {key: how.pop(key) for key in ("fate", "choose") if key in how}
    ranks, _ = ranks_of(url, world_size, **how)
    results = [result for result in run_ranks(ranks, **performers) if result.ended]
    assert results
    assert len({(type(result.error), str(result.error)) for result in results}) == 1
    return results[0].error


# which step


def test_the_newest_is_loaded_on_any_world_size(run):
    for world_size in (1, 2, 3):
        found = load(run.url, world_size)
        assert (found.step, found.skipped) == (10, ())
        assert found.checkpoint_id == f"{run.url}/step-10"


def test_steps_are_numbers_and_not_words(run):
    save(state_of(100), 1, f"{run.url}/step-100")
    save(state_of(11), 1, f"{run.url}/step-0000011")
    assert load(run.url).step == 100
    assert load(run.url, steps=StepRange(at_most=99)).step == 11


@pytest.mark.parametrize(
    ("bounds", "step"),
    [({"at_most": 9}, 9), ({"newer_than": 9}, 10), ({"newer_than": 7, "at_most": 8}, 8)],
)  # fmt: skip
def test_bounds_choose_among_the_steps(run, bounds, step):
    assert load(run.url, steps=StepRange(**bounds)).step == step


def test_no_fallback_goes_beyond_the_bounds(run):
    spoil(run, 10, "data is gone")
    error = error_of(run.url, steps=StepRange(newer_than=9))
    assert type(error) is errors.DamagedCheckpointError
    assert "step-9:" not in str(error)
    error = error_of(run.url, steps=StepRange(newer_than=10))
    assert type(error) is errors.CheckpointNotFoundError
    assert "newer than 10" in str(error)


@pytest.mark.parametrize(
    "bounds",
    [{"at_most": "9"}, {"newer_than": True}, {"at_most": 1.5}, {"at_most": 3, "newer_than": 3}],
)
def test_bounds_that_mean_nothing_are_refused(bounds):
    with pytest.raises(errors.InvalidRequestError, match=r"whole number|no step"):
        StepRange(**bounds)


# falling back


def spoil(run, step, how):
    """Damages one step of a run."""
    place = MemoryStorage(f"{run.url.removeprefix('memory://')}/step-{step}")
    keys = [entry.key for entry in place.list()]
    data = next(key for key in keys if key.endswith(".distcp"))
    table = next(key for key in keys if key.startswith("chunks."))
    key = {"data": data, "table": table, "manifest": record_key(1)}[how.split()[0]]
    content = bytearray(place.read(key))
    match how.split()[-1]:
        case "gone":
            place.delete([key])
        case "cut":
            place.write(key, content[: len(content) // 2])
        case "flipped":
            # Not the checksums at its end, which are read before anything else.
            for at in range(0, len(content) // 2, 64):
                content[at] ^= 4
            place.write(key, content)
    return key


DAMAGE = ["data is gone", "data is flipped", "table is cut", "manifest is flipped"]


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_falls_back_to_the_next_older_step_on_all_ranks(run, how):
    key = spoil(run, 10, how)
    found = load(run.url, 3)
    assert found.step == 9
    ((path, error),) = found.skipped
    assert path == f"{run.url}/step-10"
    assert isinstance(error, errors.DamagedCheckpointError)
    assert key in str(error)
    spoil(run, 9, how)
    found = load(run.url)
    assert found.step == 8
    assert [path for path, _ in found.skipped] == [f"{run.url}/step-10", f"{run.url}/step-9"]


@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_one_rank_that_reads_damage_is_enough(run, unlucky):
    """The others have read the newer step whole, and hold the older one all the same."""

    def opened(target):
        storage = open_storage(target)
        if not target.url.endswith("step-10"):
            return storage
        fault = Fault(operation="read_into", key="*", effect="flip", times=None)
        return FaultyStorage(storage, [fault])

    found = load(run.url, 3, openers={unlucky: opened})
    assert found.step == 9
    assert found.skipped[0][1].rank == unlucky


def test_an_uncommitted_an_aborted_and_a_deleted_step_are_no_candidates(run):
    left = MemoryStorage(f"{run.url.removeprefix('memory://')}/step-12")
    left.write("__0_0.0123456789abcdef.distcp", b"x")
    aborted = MemoryStorage(f"{run.url.removeprefix('memory://')}/step-11")
    aborted.write(
        record_key(1), encode_record(AbortRecord(attempt="a", reason="deadline", rank=None))
    )
    ray_dcp.delete(f"{run.url}/step-10")
    found = load(run.url)
    assert found.step == 9
    assert [(path, type(why)) for path, why in found.skipped] == [
        (f"{run.url}/step-12", errors.UncommittedCheckpointError),
        (f"{run.url}/step-11", errors.UncommittedCheckpointError),
        (f"{run.url}/step-10", errors.CheckpointNotFoundError),
    ]


def test_a_step_that_is_gone_by_the_time_it_is_tried_is_passed_over(run, monkeypatch):
    real = rank_load.list_run

    def list_and_lose(target):
        listed = real(target)
        lost = MemoryStorage(f"{run.url.removeprefix('memory://')}/step-10")
        lost.delete([entry.key for entry in lost.list()])
        return listed

    monkeypatch.setattr(rank_load, "list_run", list_and_lose)
    found = load(run.url)
    assert found.step == 9
    assert type(found.skipped[0][1]) is errors.CheckpointNotFoundError


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_events_makes_ranks_take_different_steps(run, seed):
    spoil(run, 10, DAMAGE[seed % len(DAMAGE)])
    order = np.random.default_rng(seed)
    found = load(
        run.url, 3, choose=lambda n: int(order.integers(n)),
        fate=lambda _: "twice" if order.random() < 0.3 else "live",
    )  # fmt: skip
    assert found.step == 9


# not falling back


@pytest.mark.parametrize("fate", ["die", "freeze"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_rank_that_is_lost_is_no_reason_to_fall_back(run, fate, damaged):
    if damaged:
        spoil(run, 10, "data is flipped")

    def lose_one(request):
        return fate if isinstance(request, LoadDone) and request.rank == 1 else "live"

    error = error_of(run.url, 3, fate=lose_one)
    assert "rank 1" in f"{error} {getattr(error, '__notes__', '')}"
    assert isinstance(error.failures[1][0], errors.ParticipantError)
    if not damaged:
        assert isinstance(error, errors.ParticipantError)
        assert isinstance(error, errors.DeadlineError) == (fate == "freeze")
    # A rank that is merely silent may be slow: it is missed when it does not come to the next try,
    # which is of the same step.
    assert "skipped" not in str(getattr(error, "__notes__", ""))
    assert isinstance(error, errors.DeadlineError) == (fate == "freeze")


def test_a_slow_reader_has_its_time_before_the_next_step_is_given_up(torch_run, monkeypatch):
    """The others wait for it when they join the load of the next step."""
    joined = []
    real = loading.RankLoad

    def note(**how):
        joined.append((how["target"].url[-2:], how["options"].plan_timeout_s))
        return real(**how)

    monkeypatch.setattr(loading, "RankLoad", note)
    checkpoints.data_file(torch_run / "step-10").unlink()
    options = LoadOptions(plan_timeout_s=50, read_timeout_s=700)
    load_newest(state_at(0), torch_run, options=options)
    assert joined == [("10", 50), ("10", 750), ("-9", 750)]


@pytest.mark.parametrize("operation", ["read", "read_into"])
def test_a_storage_that_fails_is_no_reason_to_fall_back(run, operation):
    spoil(run, 10, "table is gone")

    def opened(target):
        script = [
            Fault(operation=operation, key="*[pq]*", error=errors.StorageError("[ETIMEDOUT] away"))
        ]
        return FaultyStorage(open_storage(target), script)

    error = error_of(run.url, openers={1: opened})
    assert type(error) is errors.StorageError
    assert "away" in str(error)
    (note,) = [note for note in error.__notes__ if "skipped" in note]
    assert f"{run.url}/step-10" in note


def test_a_state_dict_that_does_not_fit_is_told_at_once(run):
    error = error_of(run.url, shapes=state_of(0, more=np.zeros(3)))
    assert type(error) is errors.MissingKeyError
    assert error.checkpoint_id == f"{run.url}/step-10"


def test_an_error_with_another_cause_on_another_rank_does_not_fall_back():
    damaged = errors.DamagedCheckpointError("x", rank=0)
    both = {0: (damaged, None), 1: (errors.DamagedCheckpointError("y"), None)}
    assert falls_back(damaged.with_failures(both))
    for other in (
        ValueError("z"),
        errors.ParticipantError("z"),
        errors.CheckpointError("of a newer version"),
    ):
        assert not falls_back(damaged.with_failures({**both, 2: (other, None)}))


def test_ranks_that_ask_for_other_things_are_told(run):
    for how in (
        {"steps": {0: StepRange(), 1: StepRange(at_most=9)}},
        {"runs": [run.url, f"{run.url}/"]},
    ):
        error = error_of(run.url, **how)
        assert type(error) is errors.RankDisagreementError
        assert "newest step" in str(error)


# nothing


def test_nothing_there_says_what_is_there(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_bytes(b"x")
    error = error_of(str(tmp_path))
    assert type(error) is errors.CheckpointNotFoundError
    assert "logs/" in str(error)
    assert str(tmp_path) in str(error)
    assert "found nothing" in str(error_of(str(tmp_path / "no" / "such")))


@pytest.mark.parametrize(
    ("damaged", "kind"),
    [
        ((), errors.CheckpointNotFoundError),
        ((9,), errors.DamagedCheckpointError),
        (STEPS, errors.DamagedCheckpointError),
    ],
)
def test_where_no_step_loads_each_is_named_with_its_damage(run, damaged, kind):
    names = [spoil(run, step, "data is flipped") for step in damaged]
    for step in STEPS:
        place = MemoryStorage(f"{run.url.removeprefix('memory://')}/step-{step}")
        place.delete([] if step in damaged else [record_key(1)])
    error = error_of(run.url)
    assert type(error) is kind
    assert all(name in str(error) for name in [*names, *(f"step-{step}" for step in STEPS)])
    assert ("may hold parts" in str(error)) == bool(damaged)


def test_a_run_that_can_not_be_listed_fails_on_all_ranks(run, monkeypatch):
    def refuse(_):
        raise errors.StorageError("no access")

    monkeypatch.setattr(rank_load, "list_run", refuse)
    error = error_of(run.url, 3)
    assert type(error) is errors.StorageError
    monkeypatch.setattr(rank_load, "list_run", lambda _: 1 / 0)
    assert "ZeroDivisionError" in str(error_of(run.url, 3))


# the public function


class Counter:
    """A `Stateful` that tells how often it was loaded."""

    def __init__(self, value):
        self.value, self.loads = value, 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        self.loads += 1


def state_at(step, **more):
    return {"w": torch.full((3000,), float(step)), "c": Counter(step), "n": {"step": step}, **more}


@pytest.fixture
def torch_run(tmp_path):
    for step in STEPS:
        ray_dcp.save(state_at(step), checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    return tmp_path


def load_newest(state, run, **how):
    """Returns the report and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = ray_dcp.load_newest(state, run, no_dist=True, **how)
    return report, [str(warning.message) for warning in told]


def test_a_fallback_is_loud_and_whole(torch_run):
    damaged = checkpoints.data_file(torch_run / "step-10")
    checkpoints.flip(damaged, damaged.stat().st_size // 2)
    (torch_run / "step-11").mkdir()
    (torch_run / "step-11" / "__0_0.0123456789abcdef.distcp").write_bytes(b"x")
    state = state_at(0)
    weight = state["w"]
    state["m"] = {}
    report, (told,) = load_newest(state, torch_run)
    assert report.step == 9
    assert [Path(path).name for path, _ in report.skipped] == ["step-11", "step-10"]
    assert [Path(path).name for path, _ in report.damaged] == ["step-10"]
    assert damaged.name in told
    assert "checksum" in told
    assert f"ray-dcp verify {torch_run / 'step-10'}" in told
    assert state["w"] is weight
    assert (weight == 9).all()
    assert (state["c"].value, state["n"]["step"]) == (9, 9)
    assert pickle.loads(pickle.dumps(report)).step == 9


def test_a_planner_is_set_up_for_each_try(torch_run):
    class Noting(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            setups.append(sorted(metadata.state_dict_metadata))
            super().set_up_planner(state_dict, metadata, is_coordinator)

    setups = []
    checkpoints.data_file(torch_run / "step-10").unlink()
    state = state_at(0)
    report, _ = load_newest(state, torch_run, planner=Noting())
    assert (report.step, report.path, len(setups)) == (9, "planner hooks", 3)
    assert (state["w"] == 9).all()


def test_stock_and_plain_checkpoints_are_steps_too(tmp_path):
    checkpoints.save_stock(tmp_path / "step-1", {"w": torch.ones(5)})
    (tmp_path / "step-2").mkdir()
    save_file({"w": torch.full((5,), 2.0)}, tmp_path / "step-2" / "model.safetensors")
    checkpoints.save_stock(tmp_path / "step-3", {"w": torch.full((5,), 3.0)})
    state = {"w": torch.zeros(5)}
    assert load_newest(state, tmp_path)[0].step == 3
    checkpoints.data_file(tmp_path / "step-3").unlink()
    report, told = load_newest(state, tmp_path)
    assert (report.step, state["w"][0], len(told)) == (2, 2, 1)
    (tmp_path / "step-2" / "model.safetensors").write_bytes(b"rubbish")
    report, told = load_newest(state, tmp_path)
    assert (report.step, state["w"][0], len(told)) == (1, 1, 2)


def test_values_that_a_failed_step_overwrote_are_not_left_as_they_were(tmp_path):
    """A half-read newer value must not pass as the one that was there before."""
    small, large = torch.ones(10), torch.ones(3000)
    ray_dcp.save({"w": small}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    ray_dcp.save({"w": small, "x": large}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    damaged = checkpoints.data_file(tmp_path / "step-2")
    partial = LoadOptions(strict=False)

    def target():
        return {"w": torch.zeros(10), "x": torch.zeros(3000), "y": torch.zeros(2)}

    assert load_newest(target(), tmp_path, options=partial)[0].missing == ("y",)
    checkpoints.flip(damaged, damaged.stat().st_size - 5000)
    with pytest.raises(errors.MissingKeyError, match=r"may have overwritten.*'x'") as told:
        ray_dcp.load_newest(target(), tmp_path, no_dist=True, options=partial)
    assert "'y'" not in str(told.value)
    assert "step-2" in str(told.value.__notes__)
    # What it never touched may stay: here the newer one lacks it, too.
    state = {"w": torch.zeros(10), "y": torch.full((2,), 7.0)}
    (tmp_path / "step-3").mkdir()
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-3", dirs_exist_ok=True)
    (tmp_path / "step-2" / "manifest-00000001.json").unlink()
    shutil.rmtree(tmp_path / "step-2")
    checkpoints.data_file(tmp_path / "step-3").write_bytes(b"")
    report, _ = load_newest(state, tmp_path, options=partial)
    assert (report.step, report.missing) == (1, ("y",))
    assert state["y"].tolist() == [7, 7]


class Trouble:
    """A class that no safe load knows."""

    def __init__(self):
        self.x = 1


def test_an_object_that_a_safe_load_refuses_is_not_passed_over(tmp_path):
    ray_dcp.save({"o": 1}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.warns(UserWarning, match="Trouble"):
        ray_dcp.save({"o": Trouble()}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    with pytest.raises(errors.UnsafeCheckpointError, match="Trouble"):
        ray_dcp.load_newest({"o": None}, tmp_path, no_dist=True)
    state = {"o": None}
    report, _ = load_newest(state, tmp_path, options=LoadOptions(weights_only=False))
    assert report.step == 2
    assert isinstance(state["o"], Trouble)


def test_the_agreed_steps_are_plain_data(run):
    """What rank 0 sends can be read by a rank of another version, and runs no code."""
    sent = []

    def note(request):
        sent.append(getattr(request, "outbox", {}).get(1))
        return "live"

    load(run.url, fate=note)
    assert json.loads(sent[0])[1] == [["step-10", 10], ["step-9", 9], ["step-8", 8]]
