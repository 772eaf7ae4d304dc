"""`SaveBeforeResize` as Ray Train's controller calls it, with workers in this process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray.cloudpickle

from ray_dcp.errors import InvalidRequestError
from ray_dcp.integrations.train import callback
from ray_dcp.integrations.train.callback import SaveBeforeResize
from ray_dcp.integrations.train.save_requests import Asked, SaveRequests
from tests.polling import eventually


class Group:
    """A worker group of one."""

    def __init__(self) -> None:
        self.requests = SaveRequests()
        self.requests.open(4)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.requests, method)(*arguments)]

    def save(self, step: int) -> Asked:
        """Makes the save that is asked for at a step, without lingering."""
        assert eventually(lambda: has_asked(self))
        asked = self.requests.at(step, 1)
        assert asked is not None
        self.requests.ended(replace(asked, linger_s=0.0), committed=True)
        return asked


@dataclass(frozen=True)
class Notice:
    """As Ray Train's `PreemptionInfo`."""

    deadline_ms: float | None
    preempted_node_to_ranks: tuple[str, ...] = ("node",)


@dataclass(frozen=True)
class State:
    """As one of a controller's."""

    preemption_info: Notice | None = None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(callback, "_Workers", lambda group: group)
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


def in_s(seconds: float) -> Notice:
    return Notice((time.time() + seconds) * 1000)


def has_asked(group: Group) -> bool:
    return group.requests._asked is not None


def preemption_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "ray_dcp preemption"]


def test_a_resize_waits_for_the_save_and_the_workers_for_their_end(group: Group):
    controller = threading.Thread(
        target=started(group).before_controller_execute_resize_decision, args=(None,)
    )
    controller.start()
    assert eventually(lambda: has_asked(group))
    assert controller.is_alive()
    assert group.save(5).linger_s > 30.0
    controller.join(180)
    assert not controller.is_alive()


def test_a_restart_after_a_failure_asks_nobody_and_the_next_resize_does(group: Group, caplog: Any):
    one = started(group)
    one.before_controller_execute_failure_decision(None)
    one.before_controller_execute_resize_decision(None)
    assert not has_asked(group)
    assert caplog.text == ""
    group.requests.close(1)
    one.before_controller_execute_resize_decision(None)
    assert "No save before a resize: rank(s) [0] have no open checkpointer" in caplog.text


def test_a_group_that_has_ended_is_not_asked(group: Group):
    one = started(group)
    one.before_worker_group_shutdown(group)
    one.before_controller_execute_resize_decision(None)
    one.after_controller_state_update(None, State(in_s(100.0)))
    assert preemption_threads() == []
    assert not has_asked(group)


def test_of_two_nodes_that_are_drained_the_second_has_a_save_made_too(
    group: Group, rounds: list[float | None]
):
    one = started(group)
    first, second = in_s(100.0), in_s(101.0)
    one.after_controller_state_update(None, State(first))
    assert eventually(lambda: has_asked(group))
    one.after_controller_state_update(None, State(first))
    one.after_controller_state_update(None, State(second))
    assert len(preemption_threads()) == 2
    saved = [group.save(step) for step in (5, 6)]
    assert saved[0].seq != saved[1].seq
    assert eventually(lambda: preemption_threads() == [])


def test_a_later_notice_ends_the_rounds_of_the_one_before(group: Group, rounds: list[float | None]):
    one = started(group)
    rounds += [0.0, 0.0]
    one.after_controller_state_update(None, State(in_s(100.0)))
    assert eventually(lambda: has_asked(group))
    one._known = in_s(101.0)
    group.save(5)
    assert eventually(lambda: preemption_threads() == [])
    assert not has_asked(group)


def test_after_the_last_save_that_fits_the_ranks_wait_for_the_node_to_go(
    group: Group, rounds: list[float | None]
):
    one = started(group)
    rounds.append(0.0)
    group.requests.took(stage_s=0.1, commit_s=4.0)
    one.after_controller_state_update(None, State(in_s(1000.0)))
    assert group.save(5).linger_s == 0.0, "there is time for another one"
    group.requests.took(stage_s=0.1, commit_s=400.0)
    assert group.save(6).linger_s > 900.0
    assert eventually(lambda: preemption_threads() == [])


def test_nobody_waits_where_no_deadline_is_known(group: Group):
    one = started(group)
    one.after_controller_state_update(None, State(Notice(None)))
    assert group.save(5).linger_s == 0.0
    assert eventually(lambda: preemption_threads() == [])


def test_workers_that_can_not_be_asked_do_not_end_the_run(group: Group, caplog: Any):
    def dead(*_: Any) -> list[Any]:
        raise TimeoutError("no answer")

    one = started(group)
    group.call = dead  # type: ignore[method-assign]
    one.before_controller_execute_resize_decision(None)
    assert "could not be asked: TimeoutError: no answer" in caplog.text


def test_it_travels_to_the_controller(group: Group):
    there = ray.cloudpickle.loads(ray.cloudpickle.dumps(SaveBeforeResize(limit_s=7.0)))
    assert there._limit_s == 7.0


@pytest.mark.parametrize("limit_s", [0, -1.0, True, "10", float("nan")])
def test_a_limit_that_is_none_is_named(limit_s: Any):
    with pytest.raises(InvalidRequestError, match="limit_s"):
        SaveBeforeResize(limit_s)
