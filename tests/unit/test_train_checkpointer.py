"""Ray Train without Ray: a checkpointer of one rank, requested saves, and where a run lies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp import errors
from ray_dcp.asynchronous import run_async_save
from ray_dcp.core import bounds
from ray_dcp.integrations import ray_train, save_requests
from ray_dcp.integrations.ray_train import RunFacts, parse, target_of_run
from ray_dcp.integrations.save_requests import REQUESTS, RequestedSave, SaveRequests, ask_all
from ray_dcp.manager import BestN, LatestN, collective_actions
from ray_dcp.options import SaveOptions
from ray_dcp.place.outcome import settle
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.store.local import LocalStorage
from ray_dcp.train import Checkpointer, SaveBeforeResize
from tests.support.adapter import as_rank
from tests.support.processes import eventually

Make = Callable[..., Checkpointer]


class Train:
    """What Ray Train is asked and told: reports, and what it knows of checkpoints."""

    def __init__(self, patch: pytest.MonkeyPatch, storage_path: Path) -> None:
        from ray.train.v2._internal.execution.storage import StorageContext

        storage = StorageContext(str(storage_path), "run")
        self.facts = RunFacts(0, 1, "run", "id", None, 0.0, storage, str(storage_path))
        self.reported: list[tuple[int, dict[str, Any]]] = []
        self.validations: list[Any] = []
        self.known: dict[str, ray_train.ReportedStep] = {}
        self.registered: str | None = None
        patch.setattr(ray_train, "run_facts", lambda: self.facts)
        patch.setattr(ray_train, "session_for", lambda *_: inline_session())
        patch.setattr(ray_train, "broadcast", lambda value: value)
        patch.setattr(ray_train, "report", self.report)
        patch.setattr(ray_train, "registered", lambda: self.registered)
        patch.setattr(ray_train, "reported_folders", lambda: self.known)

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
        with suppress(errors.CheckpointError):
            one.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4,), float(value)), "note": value}


def steps_of(ckpt: Checkpointer) -> list[int]:
    return sorted(one.step for one in ray_dcp.open(ckpt.url) if one.state == "committed")


def test_due_steps_are_saved_and_each_is_reported_when_the_next_has_begun(make: Make, train: Train):
    with make(interval=3) as ckpt:
        saved = []
        for step in range(8):
            assert ckpt.should_save(np.int64(step)) == (step % 3 == 0)
            if ckpt.save(np.int64(step), state(step), {"loss": torch.tensor(float(step))}):
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
        with pytest.raises(errors.InvalidRequestError, match="not newer than step 3"):
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
    with pytest.raises(errors.InvalidRequestError, match="RunConfig"):
        make(folder=name)


def test_what_ray_train_knows_of_and_is_gone_is_an_error(make: Make, train: Train):
    train.registered = "/run/g0001-0a1b2c-step-00000005"
    with make() as ckpt, pytest.raises(errors.CheckpointNotFoundError, match="Bring them back"):
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
    raised = pytest.raises(errors.CheckpointError) if on_error == "raise" else nullcontext()
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
        handle.set_exception(errors.CommitUnknownError("?", attempt=attempt))
        handle.checkpoint_id = decision.target.url
        return handle

    monkeypatch.setattr(collective_actions, "run_async_save", unheard)
    monkeypatch.setattr(collective_actions.time, "sleep", waits.append)
    raised = pytest.raises(errors.CommitUnknownError) if became == "open" else nullcontext()
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
    with pytest.raises(errors.InvalidRequestError, match="is closed"):
        ckpt.save(2, state())


# --- retention ------------------------------------------------------------------------------------


def test_old_steps_are_deleted_where_ray_dcp_is_the_owner(make: Make):
    with make(max_to_keep=2) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step))
    assert steps_of(ckpt) == [4, 5]
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.load_newest(state(), ckpt.url, at_most=3)


def test_what_ray_train_never_hears_of_goes_where_it_deletes(make: Make, train: Train):
    train.facts = RunFacts(**{**vars(train.facts), "num_to_keep": 3, "poll_s": 1e6})
    with pytest.raises(errors.InvalidRequestError, match="Leave one of them out"):
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
    assert train.steps == [1]
    assert eventually(lambda: steps_of(ckpt) == [1, 4])
    ray_dcp.open(ckpt.url).tag(1, "release")
    ckpt.close()
    assert train.steps == [1, 4]
    assert steps_of(ckpt) == [1, 4]


def test_nothing_is_deleted_while_ray_train_does_not_say_what_it_validates(
    make, train, monkeypatch
):
    def fail() -> None:
        raise TimeoutError("the controller does not answer")

    with make(max_to_keep=1) as ckpt:
        ckpt.save(0, state(0), validation=True)
    with monkeypatch.context() as patch:
        patch.setattr(ray_train, "reported_folders", fail)
        with make(max_to_keep=1) as ckpt:
            ckpt.restore(state())
            for step in (1, 2):
                ckpt.save(step, state(step))
    assert steps_of(ckpt) == [0, 1, 2]
    with make(max_to_keep=1) as ckpt:
        ckpt.restore(state())
        ckpt.save(3, state(3))
    assert steps_of(ckpt) == [3]


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
        names.name_of(step): ray_train.ReportedStep({"val_loss": loss})
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
    with pytest.warns(UserWarning, match="not saved"), pytest.raises(errors.CheckpointError):
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
        with pytest.raises(errors.InvalidRequestError, match="is closed"):
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
            monkeypatch.setattr(ray_train.NeededSteps, "refresh", fail)
        case "broadcast":
            monkeypatch.setattr(ray_train, "broadcast", fail)
        case "session":
            monkeypatch.setattr(ray_train, "session_for", fail)
    with pytest.raises(ConnectionError):
        make(max_to_keep=1)
    assert beats() == before
    shared = LocalStorage(train.facts.storage.experiment_fs_path + "/checkpoints/.manager")
    keys = {entry.key for entry in shared.list("writer-")}
    assert "writer-00000001.released" in keys


def test_a_later_group_of_the_run_replaces_an_earlier_one_and_another_run_is_refused(
    make: Make, train: Train, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = ray_train.this_process
    beat = iter(range(100))

    def far() -> Any:
        holder = elsewhere()
        return type(holder)("another machine", 1, "1", "far", holder.nonce)

    monkeypatch.setattr(ray_train, "this_process", far)
    first = make()
    first.save(1, state())
    shared = first._root.shared
    monkeypatch.setattr(ray_train, "this_process", elsewhere)
    second = make()
    second.restore(state())
    second.save(2, state())
    with pytest.warns(UserWarning, match="is written by"):
        first.save(2, state())
    second.close()
    assert steps_of(second) == [1, 2]
    monkeypatch.setattr(ray_train, "this_process", far)
    make()
    monkeypatch.setattr(ray_train, "this_process", elsewhere)
    train.facts = RunFacts(**{**vars(train.facts), "run_id": "another fit"})

    def waits(_seconds: float) -> None:
        shared.write("writer-00000003.beat", str(next(beat)).encode())

    monkeypatch.setattr(time, "sleep", waits)
    for replicas_of in ("", "a worker group"):
        train.facts = replace(train.facts, replicas_of=replicas_of)
        with pytest.raises(errors.CheckpointExistsError, match="a RunConfig"):
            make()


def test_replicas_are_refused_what_waits_for_all_workers(make: Make, train: Train):
    train.facts = replace(train.facts, replicas_of="a worker group")
    with pytest.raises(errors.InvalidRequestError, match="barrier of all workers"):
        make(check_preemption_every=2)
    with as_rank(0, 2), pytest.raises(errors.InvalidRequestError, match="of one worker"):
        make()


def test_without_the_callback_ray_train_is_asked_at_the_same_calls_and_once_a_notice(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    import ray.train

    notices = [None, Notice(None), Notice(None), Notice(time.time() * 1000)]
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: notices.pop(0))
    ckpt = make(interval=100, check_preemption_every=2)
    due = [ckpt.should_save(step) for step in range(1, 9)]
    assert due == [False, False, False, True, False, False, False, False], "the last is too late"
    assert notices == []


# --- what is refused, and where it goes -----------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"save_interval": 0}, "save_interval"), ({"on_error": "ignore"}, "on_error"),
        ({"check_preemption_every": -1}, "check_preemption_every"),
        ({"options": {"max_pending": 2}}, "options"), ({"load_options": 3}, "load_options"),
        ({}, "CheckpointManager"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_and_outside_of_a_worker_the_way_out(
    wrong: dict[str, Any], named: str
):
    with pytest.raises(errors.InvalidRequestError, match=named):
        ray_dcp.train.checkpointer(**wrong)


def facts_in(storage_path: str, filesystem: Any = None) -> RunFacts:
    """Returns the facts of a run with Ray Train's own storage context."""
    from ray.train.v2._internal.execution.storage import StorageContext

    storage = StorageContext(storage_path, "run", filesystem, read_only=True)
    return RunFacts(0, 1, "run", "id", None, 2.0, storage, storage_path)


S3 = "s3://bucket/runs?endpoint_override=localhost:1&scheme=http&region=eu-1"


def test_a_run_is_saved_to_by_its_path_or_the_client_that_can_create_only_if_absent(
    tmp_path: Path,
):
    facts = facts_in(str(tmp_path))
    target = target_of_run(facts, "checkpoints", None)
    assert (target.url, target.filesystem) == (f"{tmp_path}/run/checkpoints", None)
    assert facts.checkpoint("checkpoints/x").path == f"{tmp_path}/run/checkpoints/x"
    with pytest.raises(errors.InvalidRequestError, match="leave them out"):
        target_of_run(facts, "checkpoints", {"region": "x"})
    target = target_of_run(facts_in(S3), "checkpoints", None)
    assert (target.url, target.filesystem) == ("s3://bucket/runs/run/checkpoints", None)
    assert dict(target.storage_options) == {
        "endpoint": "http://localhost:1", "region": "eu-1",
    }  # fmt: skip
    given = {"endpoint": "http://localhost:2", "region": "eu-2"}
    assert target_of_run(facts_in(S3), "checkpoints", given).storage_options == given


def test_a_filesystem_of_the_users_is_taken_as_it_is():
    from pyarrow import fs

    own = fs.S3FileSystem(region="eu-1", endpoint_override="localhost:1", anonymous=True)
    for path in ("bucket/runs", "s3://bucket/runs"):
        target = target_of_run(facts_in(path, own), "checkpoints", None)
        assert target.filesystem == own
    with pytest.raises(errors.InvalidRequestError, match="storage_filesystem"):
        target_of_run(facts_in("bucket/runs", own), "checkpoints", {"region": "x"})


def test_metrics_become_numbers_and_what_can_not_is_named():
    for two in (torch.tensor(2.0), np.float32(2), np.full((1,), 2.0)):
        told = ray_train.check_metrics({"loss": two, "n": 1})
        assert told == ray_train.numbers_in(told) == {"loss": 2.0, "n": 1}
    with pytest.raises(errors.InvalidRequestError, match="a float can hold"):
        ray_train.check_metrics({"n": 10**400})
    assert ray_train.check_metrics(None) == {}
    given = {"loss": np.float32(2), "n": np.int64(1), "acc": np.array([0.5]), "done": np.True_}
    for found in (given, ray_train.check_metrics(given)):
        assert ray_train.numbers_in(found) == {"loss": 2.0, "n": 1.0, "acc": 0.5}
    for wrong, told in (
        ({"grad": torch.ones(2)}, "'grad' is a tensor of"),
        ({"grad": np.ones(2)}, "'grad' is a tensor of"),
        ([1], "dict"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=told):
            ray_train.check_metrics(wrong)


# --- requested saves of several ranks -------------------------------------------------------------


class Ranks:
    """Ranks of this process, each with `SaveRequests` of its own."""

    def __init__(self, *last_steps: int) -> None:
        self.ranks = [SaveRequests() for _ in last_steps]
        for one, last in zip(self.ranks, last_steps, strict=True):
            one.at(last, one.open())

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(one, method)(*arguments) for one in self.ranks]


REQUEST = RequestedSave("a", "resize", 4)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ("hold", save_requests.HeldRank(4, None, None)),
        ("hold hold", None),
        ("close hold", None),
        ("ask", False),
        ("hold ask", True),
        ("hold ask hold", None),
        ("hold ask at4", None),
        ("hold ask at5", REQUEST),
        ("hold ask at5 at6", None),
        ("hold ask drop at5", None),
        ("hold drop ask", False),
        ("hold ask state", "waiting"),
        ("hold ask at5 state", "saving"),
        ("hold ask at5 committed state", "committed"),
        ("hold ask at5 failed state", "failed"),
        ("hold ask at5 committed open state", "unknown"),
        ("at7 hold", save_requests.HeldRank(7, None, None)),
        ("at7 back hold", save_requests.HeldRank(2, None, None)),
    ],
)
def test_what_a_rank_answers_after_which_events(events: str, found: Any):
    rank = SaveRequests()
    owner = rank.open()
    rank.at(4, owner)
    calls: dict[str, Callable[[], Any]] = {
        "open": rank.open, "close": lambda: rank.close(owner),
        "hold": lambda: rank.hold("a"), "ask": lambda: rank.ask(REQUEST),
        "drop": lambda: rank.drop("a"), "state": lambda: rank.state("a"),
        "committed": lambda: rank.ended(REQUEST, True),
        "failed": lambda: rank.ended(REQUEST, False),
        "back": lambda: rank.went_back(2, owner),
        **{f"at{step}": lambda step=step: rank.at(step, owner) for step in (4, 5, 6, 7)},
    }  # fmt: skip
    assert [calls[event]() for event in events.split()][-1] == found


@pytest.mark.parametrize("last_steps", [(4, 4), (3, 5), (-1, -1), (7, 2, 5)])
def test_ranks_at_different_steps_save_the_same_one(last_steps: tuple[int, ...]):
    ranks = Ranks(*last_steps)
    assert ask_all(ranks.call, "a", "resize") is None
    saved = [
        [step for step in range(last + 1, 20) if one.at(step, 1) is not None]
        for one, last in zip(ranks.ranks, last_steps, strict=True)
    ]
    assert saved == [[max(last_steps) + 1]] * len(last_steps)


def test_a_rank_that_is_held_decides_nothing_until_it_is_asked_or_that_takes_too_long(
    monkeypatch: Any,
):
    one = Ranks(4).ranks[0]
    assert one.hold("a") is not None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.at(5, 1)))
    thread.start()
    assert eventually(lambda: one._changed._waiters)  # type: ignore[attr-defined]
    assert found == []
    assert one.ask(REQUEST)
    thread.join(180)
    assert found == [REQUEST]
    monkeypatch.setattr(bounds, "HOLD_S", 0.01)
    assert one.hold("b") is not None
    assert one.at(6, 1) is None
    assert not one.ask(RequestedSave("b", "resize", 5))


@pytest.mark.parametrize(
    ("durations", "left_s", "took_s", "expected"),
    [
        ((3.0, 10.0), 2.0, None, "no save fits in 2.0 s"),
        ((3.0, 10.0), 5.0, None, 99.0),
        ((0.1, 4.0), 30.0, None, 0.0),
        ((0.1, 4.0), 12.0, None, 99.0),
        ((0.1, 4.0), 30.0, 12.0, 99.0),
        ((0.1, 4.0), None, None, 99.0),
    ],
)
def test_a_save_is_requested_if_it_fits_and_ranks_linger_if_no_further_one_does(
    durations: Any, left_s: float | None, took_s: float | None, expected: Any
):
    ranks = Ranks(4, 4)
    ranks.ranks[1].took(*durations)
    why_not = ask_all(ranks.call, "a", "", linger_s=99.0, left_s=left_s, took_s=took_s)
    requests = [one.at(5, 1) for one in ranks.ranks]
    if why_not is None:
        assert [one and one.linger_s for one in requests] == [expected] * 2
    else:
        assert expected in why_not
        assert requests == [None, None]


# --- `SaveBeforeResize`, as Ray Train's controller calls it ---------------------------------------


@dataclass(frozen=True)
class Notice:
    """As Ray Train's `PreemptionInfo`."""

    deadline_ms: float | None
    preempted_node_to_ranks: tuple[str, ...] = ("node",)


class Group(Ranks):
    """A worker group of one."""

    def __init__(self) -> None:
        super().__init__(4)
        (self.requests,) = self.ranks

    @property
    def has_asked(self) -> bool:
        return self.requests._asked is not None

    def save(self, step: int) -> RequestedSave:
        """Makes the save that is requested at a step, without lingering."""
        assert eventually(lambda: self.has_asked)
        asked = self.requests.at(step, 1)
        assert asked is not None
        self.requests.ended(replace(asked, linger_s=0.0), committed=True)
        return asked


@dataclass(frozen=True)
class State:
    """As one of a controller's."""

    preemption_info: Notice | None = None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(save_requests, "_make_caller", lambda group: group.call)
    return Group()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What is waited before each further round, as it is asked for; none comes after these."""
    waits: list[float | None] = []
    real = save_requests.next_round_s

    def next_round_s(now_s: float, *more: Any) -> float | None:
        if now_s < 1e9:  # not a clock, but `is_last_round`
            return real(now_s, *more)
        return waits.pop(0) if waits else None

    monkeypatch.setattr(save_requests, "next_round_s", next_round_s)
    return waits


def started(group: Group) -> SaveBeforeResize:
    one = SaveBeforeResize(limit_s=30.0)
    one.after_worker_group_start(group)
    return one


def in_s(seconds: float) -> State:
    return State(Notice((time.time() + seconds) * 1000))


def preemption_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "ray_dcp preemption"]


def test_a_resize_waits_for_the_save_and_the_workers_for_their_end(group: Group):
    controller = threading.Thread(
        target=started(group).before_controller_execute_resize_decision, args=(None,)
    )
    controller.start()
    assert eventually(lambda: group.has_asked)
    assert controller.is_alive()
    assert group.save(5).linger_s > 30.0
    controller.join(180)
    assert not controller.is_alive()


def test_who_can_not_be_asked_or_was_not_does_not_end_the_run(
    group: Group, caplog: Any, monkeypatch: Any
):
    """A restart after a failure asks nobody, and the next resize does."""
    for limit_s in (0, -1.0, True, "10", float("nan")):
        with pytest.raises(errors.InvalidRequestError, match="limit_s"):
            SaveBeforeResize(limit_s)
    one = started(group)
    one.before_controller_execute_failure_decision(None)
    one.before_controller_execute_resize_decision(None)
    assert not group.has_asked
    assert caplog.text == ""
    group.requests.close(1)
    one.before_controller_execute_resize_decision(None)
    assert "No save before a resize: rank(s) [0] have no open checkpointer" in caplog.text

    def fail(*_: Any) -> list[Any]:
        raise errors.LimitError("no answer")

    monkeypatch.setattr(save_requests, "start_thread", fail)
    one.after_controller_state_update(None, in_s(100.0))
    assert "No save before a preemption, as workers could not be asked" in caplog.text
    group.call = fail  # type: ignore[method-assign]
    one.before_controller_execute_resize_decision(None)
    assert "could not be asked: LimitError: no answer" in caplog.text


def test_of_two_nodes_that_are_drained_the_second_has_a_save_made_too(
    group: Group, rounds: list[float | None]
):
    one = started(group)
    first, second = in_s(100.0), in_s(101.0)
    one.after_controller_state_update(None, first)
    assert eventually(lambda: group.has_asked)
    one.after_controller_state_update(None, first)
    one.after_controller_state_update(None, second)
    assert len(preemption_threads()) == 2
    saved = [group.save(step) for step in (5, 6)]
    assert saved[0].seq != saved[1].seq
    assert eventually(lambda: preemption_threads() == [])


def test_after_the_last_save_that_fits_the_ranks_wait_for_the_node_to_go(
    group: Group, rounds: list[float | None]
):
    one = started(group)
    rounds.append(0.0)
    group.requests.took(stage_s=0.1, commit_s=4.0)
    one.after_controller_state_update(None, in_s(1000.0))
    assert group.save(5).linger_s == 0.0, "there is time for another one"
    group.requests.took(stage_s=0.1, commit_s=400.0)
    assert group.save(6).linger_s > 900.0
    assert eventually(lambda: preemption_threads() == [])


# --- trusted steps, and parts ---------------------------------------------------------------------


def test_the_newest_trusted_step_comes_back_and_none_is_an_error(make: Make, train: Train):
    with make(trust="ok", max_to_keep=1) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step), {"ok": float(step == 2)})
        url = ckpt.url
    # Retention keeps the newest of them.
    assert [one.step for one in ray_dcp.open_run(url) if one.is_readable] == [2, 4]
    found = state()
    train.registered = f"{url}/{ray_dcp.open_run(url)['latest'].url.rpartition('/')[2]}"
    with make(trust="ok") as ckpt:
        assert ckpt.restore(found, trust="ok") == 2
        assert found["w"].tolist() == [2.0] * 4
        assert ckpt.restore(found) == 4
        for rule in ("release", lambda facts: facts.step > 4):
            with pytest.raises(errors.CheckpointNotFoundError, match="without such a verdict"):
                ckpt.restore(found, trust=rule)
    with make(folder="other") as ckpt:
        train.registered = None
        assert ckpt.restore(found, trust="ok") is None
    train.facts = replace(train.facts, num_to_keep=2)
    with pytest.raises(errors.InvalidRequestError, match=r"trust= .*num_to_keep=2.* deletes it"):
        make(trust="ok")
    with pytest.raises(errors.InvalidRequestError, match="needs trust="):
        make(hold_s=5.0)


def test_a_part_of_a_job_is_refused_by_name(make: Make):
    part = ray_dcp.Part("/run/step-1/policy", name="policy", step=1)
    told = r"found the part 'policy' of step 1; .*async_save\(state, checkpoint_id=part\)"
    with pytest.raises(errors.InvalidRequestError, match=told):
        make(folder=part)
    with make() as ckpt:
        uses: list[Callable[[], Any]] = [
            lambda: ckpt.save(part, state()),  # type: ignore[arg-type]
            lambda: ckpt.save(1, state(), parts={"buffer": part}),
            lambda: ckpt.restore(part),  # type: ignore[arg-type]
        ]
        for use in uses:
            with pytest.raises(errors.InvalidRequestError, match=told):
                use()
        with pytest.raises(errors.InvalidRequestError, match="name of an item must be"):
            ckpt.save(1, state(), parts={"a/b": 1})
        with pytest.raises(errors.InvalidRequestError, match="parts must be a dict"):
            ckpt.save(1, state(), parts=[1])  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidRequestError, match=r"has no parts, but .* 'buffer'"):
            ckpt.value("buffer")
        assert not list(Path(ckpt.url).glob("*-step-*"))
