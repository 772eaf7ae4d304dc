"""Ray Train without Ray: where a run lies, and who saves at which requested step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.errors import InvalidRequestError, LimitError
from ray_dcp.integrations.train import callback, reports, save_requests
from ray_dcp.integrations.train.joining import RunFacts, target_of_run
from ray_dcp.integrations.train.save_requests import RequestedSave, SaveRequests, ask_all
from ray_dcp.train import SaveBeforeResize
from tests.support.processes import eventually

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
    with pytest.raises(InvalidRequestError, match=named):
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
    with pytest.raises(InvalidRequestError, match="leave them out"):
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
    with pytest.raises(InvalidRequestError, match="storage_filesystem"):
        target_of_run(facts_in("bucket/runs", own), "checkpoints", {"region": "x"})


def test_metrics_become_numbers_and_what_can_not_is_named():
    assert reports.check_metrics({"loss": torch.tensor(2.0), "n": 1}) == {"loss": 2.0, "n": 1}
    assert reports.check_metrics(None) == {}
    for wrong, told in (({"grad": torch.ones(2)}, "'grad' is a tensor of"), ([1], "dict")):
        with pytest.raises(InvalidRequestError, match=told):
            reports.check_metrics(wrong)


# --- requested saves ------------------------------------------------------------------------------


class Ranks:
    """Ranks of this process, each with `SaveRequests` of its own."""

    def __init__(self, *last_steps: int) -> None:
        self.ranks = [SaveRequests() for _ in last_steps]
        for one, last in zip(self.ranks, last_steps, strict=True):
            one.open(last)

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
    owner = rank.open(4)
    calls: dict[str, Callable[[], Any]] = {
        "open": lambda: rank.open(4), "close": lambda: rank.close(owner),
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
    monkeypatch.setattr(save_requests, "HOLD_S", 0.01)
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
    monkeypatch.setattr(callback, "_caller", lambda group: group.call)
    return Group()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What is waited before each further round, as it is asked for; none comes after these."""
    waits: list[float | None] = []
    monkeypatch.setattr(callback, "next_round_s", lambda *_: waits.pop(0) if waits else None)
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
        with pytest.raises(InvalidRequestError, match="limit_s"):
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
        raise LimitError("no answer")

    monkeypatch.setattr(callback, "start_thread", fail)
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
