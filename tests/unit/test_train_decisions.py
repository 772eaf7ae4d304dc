"""Ray Train without Ray: names, deletions, reports, and who saves at which step."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidRequestError,
)
from ray_dcp.format.step_info import info_key
from ray_dcp.integrations.train import callback, reports, save_requests
from ray_dcp.integrations.train.callback import SaveBeforeResize
from ray_dcp.integrations.train.checkpointer import Save, UnderWay
from ray_dcp.integrations.train.joining import (
    Retention,
    RunFacts,
    StepFolder,
    check_folder,
    owner_of,
    parse,
    superfluous,
    take_lease,
    target_of_run,
)
from ray_dcp.integrations.train.save_requests import Asked, SaveRequests, ask_all
from ray_dcp.io.records import Announced
from ray_dcp.manager.catalogue import Catalogue, Root
from ray_dcp.manager.leases import LeaseHolder, ReaderLease
from ray_dcp.runtime.garbage_collection import delete
from ray_dcp.view.run_listing import list_run
from tests.polling import eventually

# --- names ---------------------------------------------------------------------------------------


def folder(step: int, group: int = 1, word: str = "0a1b2c") -> StepFolder:
    return StepFolder(step, group, word)


def test_the_later_of_two_groups_that_saved_a_step_is_tried_first(tmp_path: Path):
    for group in (2, 11, 3):
        ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / folder(7, group).name)
    listed = list_run(tmp_path).steps
    assert [(one.step, parse(one.name)) for one in listed] == [
        (7, folder(7, 11)), (7, folder(7, 3)), (7, folder(7, 2)),
    ]  # fmt: skip


def test_outside_of_the_run_or_of_a_worker_it_says_what_to_use_instead():
    for name in ("../elsewhere", "/abs", "s3://bucket/x", "a/b", "", ".hidden", 3):
        with pytest.raises(InvalidRequestError, match="RunConfig"):
            check_folder(name)
    with pytest.raises(InvalidRequestError, match="CheckpointManager"):
        ray_dcp.train.checkpointer()


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_interval": 0}, {"on_error": "ignore"}, {"check_preemption_every": -1},
        {"options": {"max_pending": 2}}, {"load_options": 3},
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(wrong: dict[str, Any]):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        ray_dcp.train.checkpointer(**wrong)


# --- retention -----------------------------------------------------------------------------------


def test_one_side_deletes_and_where_that_is_ray_train_only_what_it_never_hears_of_goes():
    for both, told in (((3, 5), "Leave one of them out"), ((-1, None), "max_to_keep")):
        with pytest.raises(InvalidRequestError, match=told):
            owner_of(*both)
    steps = [folder(n) for n in (1, 2, 3, 4)]
    names = [one.name for one in steps]
    assert superfluous(steps, [], [names[0], names[2]], "ray", 0) == [steps[1]]
    assert superfluous(steps, [], [], "ray", 0) == []
    # The one before the newest may still be reported.
    assert superfluous(steps[:3], [], names[:1], "ray", 0) == []
    # What ray_dcp deletes: the newest that Ray Train was told of stays, whatever is newer.
    assert superfluous(steps, [], names[:1], "ray_dcp", 1) == [steps[1], steps[2]]


def test_without_an_owner_only_what_killed_groups_left_goes():
    steps = [folder(n, 2) for n in (5, 6)]
    left = (folder(4, 1), folder(9, 1))
    names = [one.name for one in steps]
    assert superfluous(steps, left, names, "nobody", 0) == [left[0]]
    assert superfluous([], left, [], "ray_dcp", 1) == []


def save(root: Path, *folders: StepFolder) -> None:
    for one in folders:
        ray_dcp.save({"w": torch.ones(3)}, checkpoint_id=root / one.name)
        (root / one.name / info_key(0)).write_bytes(reports.encoded_metrics(one.step, {}))


def test_of_what_was_reported_the_record_stays_and_of_the_rest_nothing(tmp_path: Path):
    steps = [folder(n) for n in (1, 2, 3)]
    save(tmp_path, *steps)
    keeper = Retention(Root(Target(str(tmp_path))), "ray_dcp", 1, 2, [steps[0].name])
    keeper.told(steps[2])
    left = sorted(path.name for path in tmp_path.glob("g*"))
    assert left == [steps[0].name, steps[2].name]
    assert [path.suffix for path in (tmp_path / steps[0].name).glob("manifest*")] == [".json"]
    with pytest.raises(CheckpointNotFoundError, match="deleted"):
        ray_dcp.load({"w": torch.ones(3)}, checkpoint_id=tmp_path / steps[0].name)
    assert ray_dcp.load_newest({"w": torch.zeros(3)}, tmp_path).step == 3


def test_what_a_killed_group_has_committed_after_all_is_not_taken_for_rubbish(tmp_path: Path):
    old, new = folder(5, 1), folder(6, 2)
    (tmp_path / old.name).mkdir()
    (tmp_path / old.name / "__0_0.0123456789abcdef.distcp").write_bytes(b"x")
    save(tmp_path, new)
    keeper = Retention(Root(Target(str(tmp_path))), "nobody", 0, 2, [])
    chosen, _ = keeper._look()
    assert [one.name for one in chosen] == [old.name]
    save(tmp_path, old)
    left = keeper._deletions.remove_all(chosen, lambda: (chosen, Catalogue()))
    assert isinstance(left[old.name], CheckpointExistsError)
    keeper.told(new)
    assert ray_dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / old.name).loaded == ("w",)


def test_what_has_a_tag_or_is_read_stays(tmp_path: Path):
    steps = [folder(n) for n in (1, 2, 3)]
    save(tmp_path, *steps)
    root = Root(Target(str(tmp_path)))
    ray_dcp.open(tmp_path).tag(1, "release")
    with ReaderLease(root, 2, lease_s=30.0):
        Retention(root, "ray_dcp", 1, 2, []).told(steps[2])
    assert {one.name for one in list_run(tmp_path).steps} == {one.name for one in steps}
    Retention(root, "ray_dcp", 1, 2, []).told(steps[2])
    assert [one.step for one in list_run(tmp_path).steps] == [3, 1]


@pytest.mark.parametrize("what", [info_key(0), "manifest-00000001.json"])
def test_what_cannot_be_read_stays(tmp_path: Path, what: str):
    steps = [folder(n) for n in (1, 2, 3)]
    save(tmp_path, *steps)
    (tmp_path / steps[0].name / what).write_bytes(b"?")
    Retention(Root(Target(str(tmp_path))), "ray_dcp", 1, 2, []).told(steps[2])
    assert [one.step for one in list_run(tmp_path).steps] == [3, 1]


def test_a_run_that_lost_its_right_deletes_nothing(tmp_path: Path, caplog: Any):
    steps = [folder(n) for n in (1, 2)]
    save(tmp_path, *steps)

    def lost() -> None:
        raise CheckpointExistsError("another one")

    root = Root(Target(str(tmp_path)))
    Retention(root, "ray_dcp", 1, 2, [], check=lost).told(steps[1])
    assert len(list_run(tmp_path).steps) == 2
    assert "another one" in caplog.text


# --- two runs of one name ------------------------------------------------------------------------


def test_a_second_run_of_one_name_is_refused_while_the_first_lives_but_no_later_group_of_it(
    tmp_path: Path,
):
    root = Root(Target(str(tmp_path)))
    elsewhere = LeaseHolder("other machine", 1, "1", "far", "run-1")
    beats, waited = iter(range(100)), []
    storage = root.shared
    storage.write("writer-00000001.json", elsewhere.encode())

    def beat(_: float) -> None:
        storage.write("writer-00000001.beat", str(next(beats)).encode())

    with pytest.raises(CheckpointExistsError, match="RunConfig"):
        take_lease(root, "run-2", "run", beats=False, wait=beat)
    assert take_lease(root, "run-1", "run", beats=False, wait=waited.append).is_taken
    assert waited == []
    storage.write("writer-00000003.json", elsewhere.encode())
    assert take_lease(root, "run-3", "run", beats=False, wait=waited.append).is_taken
    assert waited


def test_what_an_earlier_group_is_about_to_delete_stays_when_the_next_one_has_the_lease(
    tmp_path: Path,
):
    root, name = Root(Target(str(tmp_path))), folder(1).name
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / name)
    mark = Announced(1, "0123456789abcdef", name)  # its record is on its way
    root.shared.write(mark.key, b"")
    assert take_lease(root, "run-1", "run", beats=False).is_taken
    with pytest.raises(CheckpointExistsError, match="somebody who keeps it"):
        delete(root.below(name), attempt=mark.attempt)
    assert len(list_run(tmp_path).steps) == 1


# --- where it goes -------------------------------------------------------------------------------


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


# --- reports -------------------------------------------------------------------------------------


def test_metrics_become_numbers_and_what_can_not_is_named():
    assert reports.check_metrics({"loss": torch.tensor(2.0), "n": 1}) == {"loss": 2.0, "n": 1}
    assert reports.check_metrics(None) == {}
    for wrong, told in (({"grad": torch.ones(2)}, "'grad' is a tensor of"), ([1], "dict")):
        with pytest.raises(InvalidRequestError, match=told):
            reports.check_metrics(wrong)


# --- saves that are under way --------------------------------------------------------------------


@pytest.mark.parametrize("said", ["committed", "aborted", "open"])
def test_an_outcome_that_nobody_told_is_asked_of_the_storage(said: str):
    """One that stays unknown ends the rank, whatever on_error says."""
    asked: list[str] = []
    handle: Future[Any] = Future()
    handle.set_exception(CommitUnknownError("?", attempt="a"))
    handle.result = lambda timeout=None: None  # type: ignore[method-assign]
    under_way = UnderWay(1, ask=lambda *_: asked.append(said) or said, wait=lambda _: None)
    under_way.add(Save(folder(1), Target("/run"), {}, handle))
    if said == "open":
        with pytest.raises(CommitUnknownError):
            under_way.ended(all_of_them=True)
        assert len(asked) >= 3
    else:
        (ended,) = under_way.ended(all_of_them=True)
        assert (ended.error is None) == (said == "committed")


# --- asking for a save ---------------------------------------------------------------------------


class Asking:
    """Ranks that are asked in this process, each with `SaveRequests` of its own."""

    def __init__(self, *last_steps: int) -> None:
        self.ranks = [SaveRequests() for _ in last_steps]
        for one, last in zip(self.ranks, last_steps, strict=True):
            one.open(last)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(one, method)(*arguments) for one in self.ranks]

    def saved(self, first: list[int], last: int) -> list[list[int]]:
        """Returns at which steps each rank is asked to save, from where it is up to a step."""
        return [
            [step for step in range(begin, last) if one.at(step, 1) is not None]
            for one, begin in zip(self.ranks, first, strict=True)
        ]


@pytest.mark.parametrize("last_steps", [(4, 4), (3, 5), (-1, -1), (7, 2, 5)])
def test_ranks_at_different_steps_save_the_same_one(last_steps: tuple[int, ...]):
    ranks = Asking(*last_steps)
    assert ask_all(ranks.call, "a", "resize") is None
    saved = ranks.saved([last + 1 for last in last_steps], 20)
    assert saved == [[max(last_steps) + 1]] * len(last_steps)


def test_a_rank_that_is_held_decides_nothing_until_it_is_told_or_its_asker_is_gone(
    monkeypatch: Any,
):
    ranks = Asking(4)
    one = ranks.ranks[0]
    assert one.hold("a") is not None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.at(5, 1)))
    thread.start()
    assert eventually(lambda: one._changed._waiters)  # type: ignore[attr-defined]
    assert found == []
    assert one.ask(Asked("a", "resize", 4))
    thread.join(180)
    assert [asked.seq for asked in found] == ["a"]
    monkeypatch.setattr(save_requests, "HOLD_S", 0.01)
    assert one.hold("b") is not None
    assert one.at(6, 1) is None
    assert not one.ask(Asked("b", "resize", 5))


def test_a_save_is_only_asked_for_when_it_fits_into_the_time_left():
    ranks = Asking(4, 4)
    ranks.ranks[1].took(stage_s=3.0, commit_s=10.0)
    assert "no save fits in 2.0 s" in ask_all(ranks.call, "a", "preemption", left_s=2.0)
    assert ranks.ranks[0].at(5, 1) is None
    assert ask_all(ranks.call, "b", "preemption", left_s=5.0) is None


@pytest.mark.parametrize(
    ("left_s", "took_s", "linger_s"),
    [(30.0, None, 0.0), (12.0, None, 99.0), (30.0, 12.0, 99.0), (None, None, 99.0)],
)
def test_ranks_linger_when_no_further_save_would_fit(
    left_s: float | None, took_s: float | None, linger_s: float
):
    ranks = Asking(4)
    ranks.ranks[0].took(stage_s=0.1, commit_s=4.0)
    assert ask_all(ranks.call, "a", "", linger_s=99.0, left_s=left_s, took_s=took_s) is None
    asked = ranks.ranks[0].at(5, 1)
    assert asked is not None
    assert asked.linger_s == linger_s


@dataclass(frozen=True)
class Notice:
    """As Ray Train's `PreemptionInfo`."""

    deadline_ms: float | None
    preempted_node_to_ranks: tuple[str, ...] = ("node",)


def test_without_the_callback_ray_train_is_asked_at_the_same_calls_and_once_a_notice(
    monkeypatch: Any,
):
    import ray.train

    notices = [None, Notice(None), Notice(None), Notice(time.time() * 1000)]
    said: list[Any] = []
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: notices.pop(0))
    monkeypatch.setattr(reports, "broadcast", lambda value: said.append(value) or value)
    preemption = reports.Preemption(2, 0)
    asked = [preemption.asks(step) for step in range(1, 9)]
    assert [one and (one.reason, one.after_step) for one in asked] == [
        None, None, None, ("preemption", 3), None, None, None, None,
    ]  # fmt: skip
    assert said == [True, False], "the second leaves no time, on rank 0's word"
    assert notices == []
    assert reports.Preemption(0, 0).asks(1) is None


# --- `SaveBeforeResize`, as Ray Train's controller calls it ---------------------------------------


class Group(Asking):
    """A worker group of one."""

    def __init__(self) -> None:
        super().__init__(4)
        (self.requests,) = self.ranks

    def save(self, step: int) -> Asked:
        """Makes the save that is asked for at a step, without lingering."""
        assert eventually(lambda: has_asked(self))
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


def test_who_can_not_be_asked_or_was_not_does_not_end_the_run(group: Group, caplog: Any):
    """A restart after a failure asks nobody, and the next resize does."""
    for limit_s in (0, -1.0, True, "10", float("nan")):
        with pytest.raises(InvalidRequestError, match="limit_s"):
            SaveBeforeResize(limit_s)
    one = started(group)
    one.before_controller_execute_failure_decision(None)
    one.before_controller_execute_resize_decision(None)
    assert not has_asked(group)
    assert caplog.text == ""
    group.requests.close(1)
    one.before_controller_execute_resize_decision(None)
    assert "No save before a resize: rank(s) [0] have no open checkpointer" in caplog.text

    def dead(*_: Any) -> list[Any]:
        raise TimeoutError("no answer")

    group.call = dead  # type: ignore[method-assign]
    one.before_controller_execute_resize_decision(None)
    assert "could not be asked: TimeoutError: no answer" in caplog.text


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
