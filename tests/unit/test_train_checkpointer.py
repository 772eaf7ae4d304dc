"""`ray_dcp.train.checkpointer` on one rank, with what it reports to Ray Train noted instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.asynchronous import run_async_save
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidRequestError,
)
from ray_dcp.integrations.train import checkpointer, joining, reports
from ray_dcp.integrations.train.joining import RunFacts, parse
from ray_dcp.integrations.train.save_requests import REQUESTS, RequestedSave
from ray_dcp.manager import BestN, LatestN, collective_actions
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.tasks import settle
from ray_dcp.store.local import LocalStorage
from ray_dcp.train import Checkpointer
from tests.support.processes import eventually
from tests.unit.test_train_decisions import Notice

Make = Callable[..., Checkpointer]


class Alone(InlineSession):
    """A session without a stager."""

    def staging(self, _options: object = None) -> Alone:
        return self

    def warm(self, num_bytes: int, touched: object) -> Future[None]:
        return Future()


class Train:
    """What Ray Train is asked and told: reports, and what it knows of checkpoints."""

    def __init__(self, patch: pytest.MonkeyPatch, storage_path: Path) -> None:
        from ray.train.v2._internal.execution.storage import StorageContext

        storage = StorageContext(str(storage_path), "run")
        self.facts = RunFacts(0, 1, "run", "id", None, 0.0, storage, str(storage_path))
        self.reported: list[tuple[int, dict[str, Any]]] = []
        self.validations: list[Any] = []
        self.known: dict[str, reports.ReportedStep] = {}
        self.registered: str | None = None
        patch.setattr(checkpointer, "run_facts", lambda: self.facts)
        patch.setattr(joining, "session_for", lambda *_: Alone())
        patch.setattr(joining, "InlineSession", ())  # so that no session of Ray is made
        patch.setattr(reports, "broadcast", lambda value: value)
        patch.setattr(reports, "report", self.report)
        patch.setattr(reports, "registered", lambda: self.registered)
        patch.setattr(reports, "reported_folders", lambda: self.known)

    def report(self, checkpoint: Any, metrics: dict[str, Any], validation: Any) -> None:
        folder = parse(checkpoint.path)
        assert folder is not None
        self.reported.append((folder.step, dict(metrics)))
        self.validations.append(validation)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.reported]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    return Train(monkeypatch, tmp_path)


@pytest.fixture
def make(train: Train) -> Iterator[Make]:
    """Makes checkpointers of one run, each of a new worker group."""
    made: list[Checkpointer] = []

    def making(interval: int = 1, **given: Any) -> Checkpointer:
        options = {name: given.pop(name) for name in ("when_full", "max_pending") if name in given}
        given["options"] = SaveOptions(**options)
        made.append(ray_dcp.train.checkpointer(save_interval=interval, **given))
        return made[-1]

    yield making
    for one in made:
        with suppress(CheckpointError):
            one.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4,), float(value)), "note": value}


def steps_of(ckpt: Checkpointer) -> list[int]:
    return sorted(one.step for one in ray_dcp.open(ckpt.url) if one.state == "committed")


def test_due_steps_are_saved_and_each_is_reported_when_the_next_has_begun(make: Make, train: Train):
    with make(interval=3) as ckpt:
        saved = []
        for step in range(8):
            assert ckpt.should_save(step) == (step % 3 == 0)
            if ckpt.save(step, state(step), {"loss": torch.tensor(float(step))}):
                saved.append((step, train.steps))
    assert saved == [(0, []), (3, [0]), (6, [0, 3])]
    assert train.reported[-1] == (6, {"step": 6, "loss": 6.0})


def test_the_newest_step_comes_back_and_is_reported_where_nobody_knew_of_it(
    make: Make, train: Train
):
    with make() as ckpt:
        assert ckpt.restore(state()) is None
        ckpt.save(3, state(3.0), {"loss": 0.5})
    train.reported.clear()
    with make() as ckpt:
        found = state()
        assert ckpt.restore(found) == 3
        assert (found["w"].tolist(), found["note"]) == ([3.0] * 4, 3.0)
        assert train.reported == [(3, {"step": 3, "loss": 0.5})]
        assert ckpt.restored is not None
        assert (ckpt.restored.step, ckpt.restored.loaded) == (3, ("note", "w"))
        with pytest.raises(InvalidRequestError, match="not newer than step 3"):
            ckpt.save(3, found)


def test_a_run_goes_back_to_the_newest_step_that_it_has_saved_itself(make: Make, train: Train):
    with make() as ckpt:
        assert ckpt.restore(state()) is None
        for step in (1, 2):
            ckpt.save(step, state(step))
        assert ckpt.should_save(3)
        found = state(float("nan"))
        assert ckpt.restore(found) == 2
        assert steps_of(ckpt) == [1, 2], "what other ranks still save is not to be missed"
        assert found["w"].tolist() == [2.0] * 4
        assert train.steps == [1], "what this group saved is reported once, by the next save"
        held = REQUESTS.hold("asked")
        assert held is not None
        assert held.last_step == 2
        assert REQUESTS.ask(RequestedSave("asked", "resize", held.last_step))
        assert ckpt.save(3, found)
        assert REQUESTS.state("asked") in ("saving", "committed")
    assert train.steps == [1, 2, 3]


@pytest.mark.parametrize("name", ["../elsewhere", "/abs", "s3://b/x", "a/b", "", ".hidden", 3])
def test_a_folder_outside_of_the_run_is_refused(make: Make, name: Any):
    with pytest.raises(InvalidRequestError, match="RunConfig"):
        make(folder=name)


def test_what_ray_train_knows_of_and_is_gone_is_an_error(make: Make, train: Train):
    train.registered = "/run/g0001-0a1b2c-step-00000005"
    with make() as ckpt, pytest.raises(CheckpointNotFoundError, match="Bring them back"):
        ckpt.restore(state())


def test_saving_without_having_restored_is_told(make: Make):
    with make() as ckpt:
        ckpt.save(1, state())
    with make() as ckpt, pytest.warns(UserWarning, match="training began anew"):
        ckpt.save(1, state())


def unsaveable() -> dict[str, Any]:
    return {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_a_failed_save_warns_or_raises_and_training_goes_on(
    make: Make, train: Train, on_error: Any
):
    raised = pytest.raises(CheckpointError) if on_error == "raise" else nullcontext()
    with make(on_error=on_error) as ckpt:
        ckpt.save(0, state())
        ckpt.save(1, unsaveable())
        with pytest.warns(UserWarning, match="Step 1 is not saved"), raised:
            ckpt.save(2, state())
    assert train.steps == [0, 2]


@pytest.mark.parametrize("became", ["committed", "aborted", "open"])
def test_an_outcome_that_nobody_reported_is_read_from_storage(
    make: Make, train: Train, monkeypatch: pytest.MonkeyPatch, became: str
):
    """One that stays unknown ends the rank, whatever `on_error` is."""
    waits: list[float] = []

    def unheard(decision: Any, *args: Any, **how: Any) -> Any:
        attempt = "0123456789abcdef"
        if became == "committed":
            attempt = run_async_save(decision, *args, **how).result().attempt
        if became == "aborted":
            settle(decision.target, attempt, reason="another rank gave up", rank=1)
        handle: Any = Future()
        handle.set_exception(CommitUnknownError("?", attempt=attempt))
        handle.checkpoint_id = decision.target.url
        return handle

    monkeypatch.setattr(collective_actions, "run_async_save", unheard)
    monkeypatch.setattr(collective_actions.time, "sleep", waits.append)
    raised = pytest.raises(CommitUnknownError) if became == "open" else nullcontext()
    warned = (
        pytest.warns(UserWarning, match="was aborted") if became == "aborted" else nullcontext()
    )
    with raised, warned, make() as ckpt:
        ckpt.save(1, state())
    assert train.steps == ([1] if became == "committed" else [])
    assert len(waits) == (3 if became == "open" else 1)


def test_an_error_in_training_waits_for_no_other_rank(make: Make, train: Train):
    with pytest.raises(KeyboardInterrupt), make() as ckpt:  # noqa: PT012
        ckpt.save(1, state())
        raise KeyboardInterrupt
    assert train.reported == []
    with pytest.raises(InvalidRequestError, match="is closed"):
        ckpt.save(2, state())


# --- retention ------------------------------------------------------------------------------------


def test_old_steps_are_deleted_where_ray_dcp_is_the_owner(make: Make):
    with make(max_to_keep=2) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step))
    assert steps_of(ckpt) == [4, 5]
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.load_newest(state(), ckpt.url, at_most=3)


def test_what_ray_train_never_hears_of_goes_where_it_deletes(make: Make, train: Train):
    train.facts = RunFacts(**{**vars(train.facts), "num_to_keep": 3, "poll_s": 1e6})
    with pytest.raises(InvalidRequestError, match="Leave one of them out"):
        make(max_to_keep=3)
    with make() as ckpt:  # it polls so rarely that only the first and the last are reported
        for step in range(1, 5):
            ckpt.save(step, state(step))
    assert train.steps == [1, 4]
    assert steps_of(ckpt) == [1, 4]


def test_what_was_reported_last_stays_and_so_does_what_has_a_tag(make: Make, train: Train):
    train.facts = RunFacts(**{**vars(train.facts), "poll_s": 1e6})
    ckpt = make(max_to_keep=1)
    for step in range(1, 5):
        ckpt.save(step, state(step))
        if step == 2:
            assert eventually(lambda: 1 in steps_of(ckpt))
            ray_dcp.open(ckpt.url).tag(1, "release")
    assert train.steps == [1]
    ckpt.close()
    assert steps_of(ckpt) == [1, 4]


def test_what_a_killed_group_left_is_removed_and_a_step_that_it_committed_stays(
    make: Make, tmp_path: Path
):
    with make() as ckpt:
        ckpt.save(5, state(5))
        ckpt.save(6, state(6))
    left = Path(ckpt.url) / "g0001-0a1b2c-step-00000005"
    left.mkdir()
    (left / "__0_0.0123456789abcdef.distcp").write_bytes(b"x")
    with make() as ckpt:
        ckpt.restore(state())
        ckpt.save(7, state(7))
    assert steps_of(ckpt) == [5, 6, 7]
    assert not list(left.glob("*.distcp"))


def test_the_result_of_a_validation_decides_what_is_kept_and_none_is_deleted_before(
    make: Make, train: Train
):
    train.facts = RunFacts(**{**vars(train.facts), "poll_s": 1e6})
    ckpt = make(retention=LatestN(1) | BestN(1, "val_loss"))
    losses = {1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}
    for step in losses:
        ckpt.save(step, state(step), {"loss": 1.0}, validation={"sample": step})
    assert eventually(lambda: 4 in steps_of(ckpt))
    assert train.steps == [1, 2, 3], "a step that is to be validated is always reported"
    assert train.validations == [{"sample": step} for step in train.steps]
    assert steps_of(ckpt) == [1, 2, 3, 4], "none is deleted before its validation has ended"
    names = ckpt._settings.names
    train.known = {
        names.name_of(step): reports.ReportedStep({"val_loss": loss})
        for step, loss in losses.items()
    }
    ckpt.close()
    assert steps_of(ckpt) == [2, 4]


# --- requested saves ------------------------------------------------------------------------------


def ask(linger_s: float, after_step: int) -> None:
    assert REQUESTS.hold("asked") is not None
    assert REQUESTS.ask(RequestedSave("asked", "resize", after_step, linger_s))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_a_step_that_is_requested_is_saved_and_the_request_answered(make: Make, train: Train):
    with make(interval=100) as ckpt:
        assert not ckpt.save(1, state())
        ask(0.0, after_step=2)
        assert [ckpt.save(step, state()) for step in (2, 3, 4)] == [False, True, False]
        assert eventually(lambda: REQUESTS.state("asked") == "committed")
    assert train.steps == [3]
    ckpt = make(interval=100, on_error="raise")
    assert ckpt.restore(state()) == 3
    ask(1000.0, after_step=4)
    with pytest.warns(UserWarning, match="not saved"), pytest.raises(CheckpointError):
        ckpt.save(5, unsaveable())
    assert REQUESTS.state("asked") == "failed"


def test_before_the_workers_end_a_rank_waits_for_the_commit_and_makes_no_step(
    make: Make, train: Train
):
    ckpt = make(interval=100, when_full="skip")
    ask(1000.0, after_step=1)
    thread = threading.Thread(target=ckpt.save, args=(2, state()))
    thread.start()
    assert eventually(lambda: REQUESTS.state("asked") == "committed")
    assert thread.is_alive()
    assert train.reported == []
    REQUESTS.drop("asked")
    thread.join(180)
    assert not thread.is_alive()
    assert train.steps == [2]


def test_a_damaged_step_is_passed_over_loudly_and_saved_again_beside_it(make: Make):
    with make() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    for path in Path(ckpt.url).glob("*-step-00000002/*.distcp"):
        path.write_bytes(b"")
    with make(max_to_keep=2) as ckpt:
        with pytest.warns(UserWarning, match="instead of the newer step 2"):
            assert ckpt.restore(state()) == 1
        ckpt.save(2, state(22))
        found = state()
        assert ckpt.restore(found) == 2
        assert found["note"] == 22
        ckpt.save(3, state(3))
    assert ray_dcp.load_newest(state(), ckpt.url, at_most=2).step == 2


# --- the end, and the lease -----------------------------------------------------------------------


def test_nothing_is_saved_after_the_end(make: Make, train: Train):
    ckpt = make()
    ckpt.save(1, state())
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(2, state()), lambda: ckpt.restore(state())):
        with pytest.raises(InvalidRequestError, match="is closed"):
            call()
    assert train.steps == [1]


def beats() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "ray_dcp beat"]


@pytest.mark.parametrize("fails", ["listing", "broadcast", "session"])
def test_a_group_that_could_not_join_renews_no_lease(
    make: Make, train: Train, monkeypatch: pytest.MonkeyPatch, fails: str
):
    """Else the run is refused to whoever comes next, as long as this process lives."""
    before = beats()

    def fail(*_: Any) -> Any:
        raise ConnectionError(fails)

    match fails:
        case "listing":
            monkeypatch.setattr(joining.NeededSteps, "refresh", fail)
        case "broadcast":
            monkeypatch.setattr(reports, "broadcast", fail)
        case "session":
            monkeypatch.setattr(joining, "session_for", fail)
    with pytest.raises(ConnectionError):
        make(max_to_keep=1)
    assert beats() == before
    shared = LocalStorage(train.facts.storage.experiment_fs_path + "/checkpoints/.manager")
    keys = {entry.key for entry in shared.list("writer-")}
    assert "writer-00000001.released" in keys


def test_a_later_group_of_the_run_replaces_an_earlier_one_and_another_run_is_refused(
    make: Make, train: Train, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = joining.this_process
    beat = iter(range(100))

    def far() -> Any:
        holder = elsewhere()
        return type(holder)("another machine", 1, "1", "far", holder.nonce)

    monkeypatch.setattr(joining, "this_process", far)
    first = make()
    first.save(1, state())
    shared = first._root.shared
    monkeypatch.setattr(joining, "this_process", elsewhere)
    second = make()
    second.restore(state())
    second.save(2, state())
    with pytest.warns(UserWarning, match="is written by"):
        first.save(2, state())
    second.close()
    assert steps_of(second) == [1, 2]
    monkeypatch.setattr(joining, "this_process", far)
    make()
    monkeypatch.setattr(joining, "this_process", elsewhere)
    train.facts = RunFacts(**{**vars(train.facts), "run_id": "another fit"})

    def waits(_event: Any, _seconds: float | None = None) -> bool:
        shared.write("writer-00000003.beat", str(next(beat)).encode())
        return False

    monkeypatch.setattr(threading.Event, "wait", waits)
    with pytest.raises(CheckpointExistsError, match="a RunConfig"):
        make()


def test_without_the_callback_ray_train_is_asked_at_the_same_calls_and_once_a_notice(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    import ray.train

    notices = [None, Notice(None), Notice(None), Notice(time.time() * 1000)]
    decided: list[Any] = []
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: notices.pop(0))
    ckpt = make(interval=100, check_preemption_every=2)
    monkeypatch.setattr(reports, "broadcast", lambda value: decided.append(value) or value)
    due = [ckpt.should_save(step) for step in range(1, 9)]
    assert due == [False, False, False, True, False, False, False, False]
    assert decided == [True, False], "the second leaves no time, as rank 0 decides"
    assert notices == []
