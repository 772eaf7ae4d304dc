"""Ray Train without Ray: names, who deletes what, what is reported, and who saves at which step."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    RankDisagreementError,
    SaveSkippedError,
)
from ray_dcp.format.manifest import decode_record, encode_record
from ray_dcp.format.step_info import info_key
from ray_dcp.integrations.train import reports, save_requests
from ray_dcp.integrations.train.checkpointer import (
    Pace,
    Save,
    UnderWay,
    Warned,
    is_misuse,
)
from ray_dcp.integrations.train.joining import (
    Known,
    Retention,
    RunFacts,
    StepFolder,
    check_folder,
    next_group,
    owner_of,
    parse,
    superfluous,
    take_right,
    target_of_run,
)
from ray_dcp.integrations.train.save_requests import (
    Asked,
    SaveRequests,
    ask_all,
    follow,
    next_round_s,
    tier_that_fits,
)
from ray_dcp.manager.catalogue import Catalogue, Root
from ray_dcp.manager.leases import Lease, LeaseHolder, this_process
from ray_dcp.protocol.messages import Target
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.view.listing import list_run
from tests.polling import eventually

REPOSITORY = Path(__file__).parents[2]

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


def test_groups_and_steps_beyond_the_usual_digits_are_read_back():
    for one in (folder(10**12, 9), folder(3, 12345)):
        assert parse(f"/run/checkpoints/{one.name}/") == one


def test_folders_of_ray_train_itself_are_no_steps_of_ours():
    assert parse("checkpoint_2026-11-21_17-02-53.123456") is None
    assert parse("/run/checkpoints/" + folder(5, 3).name) == folder(5, 3)
    assert next_group([folder(5, 9).name, "checkpoint_000099"]) == 10


@pytest.mark.parametrize("name", ["../elsewhere", "/abs", "s3://bucket/x", "a/b", "", ".hidden", 3])
def test_a_place_outside_of_the_run_is_refused_with_the_way_out(name: Any):
    with pytest.raises(InvalidRequestError, match="RunConfig"):
        check_folder(name)


def test_a_run_of_a_newer_version_is_an_error_and_not_a_fresh_start(tmp_path: Path):
    place = tmp_path / folder(3).name
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=place)
    (manifest,) = place.glob("manifest-*")
    record = decode_record(manifest.read_bytes())
    manifest.write_bytes(encode_record(replace(record, format_version=99)))
    with pytest.raises(CheckpointError, match="upgrade ray_dcp") as caught:
        ray_dcp.load_newest({"w": torch.ones(1)}, tmp_path)
    assert not isinstance(caught.value, CheckpointNotFoundError)


def test_naming_it_loads_neither_ray_nor_torch():
    program = (
        "import sys, ray_dcp; ray_dcp.train; import ray_dcp.train as train\n"
        "assert 'checkpointer' in dir(train)\n"
        "assert not {'ray', 'torch'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400, cwd=REPOSITORY)


def test_outside_of_a_worker_it_says_what_to_use_instead():
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


def test_two_owners_of_retention_are_refused_with_the_way_out():
    with pytest.raises(InvalidRequestError, match="Leave one of them out"):
        owner_of(3, 5)
    with pytest.raises(InvalidRequestError, match="max_to_keep"):
        owner_of(-1, None)


def known(committed: list[StepFolder], told: list[StepFolder], left: tuple[StepFolder, ...] = ()):
    return Known(frozenset(committed), frozenset(left), frozenset(one.name for one in told))


def test_where_ray_train_deletes_only_what_it_never_hears_of_goes():
    steps = [folder(n) for n in (1, 2, 3, 4)]
    gone = superfluous(known(steps, [steps[0], steps[2]]), "ray", 0)
    assert gone == [steps[1]]
    assert superfluous(known(steps, []), "ray", 0) == []
    # The one before the newest may still be reported.
    assert superfluous(known(steps[:3], steps[:1]), "ray", 0) == []


def test_the_newest_that_ray_train_was_told_of_stays_whatever_is_newer():
    steps = [folder(n) for n in (1, 2, 3, 4)]
    gone = superfluous(known(steps, [steps[0]]), "ray_dcp", 1)
    assert gone == [steps[1], steps[2]]


def test_without_an_owner_only_what_killed_groups_left_goes():
    steps = [folder(n, 2) for n in (5, 6)]
    left = (folder(4, 1), folder(9, 1))
    assert superfluous(known(steps, steps, left), "nobody", 0) == [left[0]]
    assert superfluous(known([], [], left), "ray_dcp", 1) == []


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
    with Lease(root, 2, open_storage, lease_s=30.0):
        Retention(root, "ray_dcp", 1, 2, []).told(steps[2])
    assert {one.name for one in list_run(tmp_path).steps} == {one.name for one in steps}
    Retention(root, "ray_dcp", 1, 2, []).told(steps[2])
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


def test_a_second_run_of_one_name_is_refused_while_the_first_lives(tmp_path: Path):
    root = Root(Target(str(tmp_path)))
    elsewhere = LeaseHolder("other machine", 1, "1", "far", "run-1")
    beats = iter(range(100))
    storage = open_storage(root.shared)
    storage.write("writer-00000001.json", elsewhere.encode())

    def beat(_: float) -> None:
        storage.write("writer-00000001.beat", str(next(beats)).encode())

    with pytest.raises(CheckpointExistsError, match="RunConfig"):
        take_right(root, "run-2", "run", beats=False, wait=beat)
    right = take_right(root, "run-3", "run", beats=False, wait=lambda _: None)
    assert right.is_taken


def test_a_later_group_of_the_same_run_takes_over_at_once(tmp_path: Path):
    root = Root(Target(str(tmp_path)))
    elsewhere = LeaseHolder("other machine", 1, "1", "far", "run-1")
    open_storage(root.shared).write("writer-00000001.json", elsewhere.encode())
    waited: list[float] = []
    right = take_right(root, "run-1", "run", beats=False, wait=waited.append)
    assert right.is_taken
    assert waited == []
    assert this_process().pid == right._holder.pid


# --- where it goes -------------------------------------------------------------------------------


def facts_in(storage_path: str, filesystem: Any = None) -> RunFacts:
    """Returns the facts of a run with Ray Train's own storage context."""
    from ray.train.v2._internal.execution.storage import StorageContext

    storage = StorageContext(storage_path, "run", filesystem, read_only=True)
    return RunFacts(0, 1, "run", "id", None, 2.0, storage, storage_path)


S3 = "s3://bucket/runs?endpoint_override=localhost:1&scheme=http&region=eu-1"


def test_a_run_on_a_disk_is_saved_to_by_its_path(tmp_path: Path):
    facts = facts_in(str(tmp_path))
    target = target_of_run(facts, "checkpoints", None)
    assert (target.url, target.filesystem) == (f"{tmp_path}/run/checkpoints", None)
    assert facts.checkpoint("checkpoints/x").path == f"{tmp_path}/run/checkpoints/x"
    with pytest.raises(InvalidRequestError, match="leave them out"):
        target_of_run(facts, "checkpoints", {"region": "x"})


def test_a_run_on_s3_is_saved_to_by_the_client_that_can_create_only_if_absent():
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


def test_reports_are_no_faster_than_the_controller_looks_and_the_last_is_made():
    pace = Pace(2.0)
    assert [step for step in range(10) if pace.is_due(100.0 + step)] == [0, 3, 6, 9]
    assert not pace.is_due(110.0)
    assert pace.is_due(110.0, final=True)
    assert pace.is_due(109.0), "a clock that was set back"


def test_what_has_no_time_is_reported():
    pace = Pace(2.0)
    assert pace.is_due(None)
    assert pace.is_due(None)


def test_metrics_become_numbers_and_what_can_not_is_named():
    assert reports.check_metrics({"loss": torch.tensor(2.0), "n": 1}) == {"loss": 2.0, "n": 1}
    assert reports.check_metrics(None) == {}
    with pytest.raises(InvalidRequestError, match="'grad' is a tensor of"):
        reports.check_metrics({"grad": torch.ones(2)})
    with pytest.raises(InvalidRequestError, match="dict"):
        reports.check_metrics([1])


def test_metrics_come_back_from_beside_the_checkpoint():
    storage = MemoryStorage("train-metrics")
    assert reports.read_metrics(storage) == {}
    storage.write(info_key(0), reports.encoded_metrics(3, {"loss": 0.5, "word": "x", "ok": True}))
    assert reports.read_metrics(storage) == {"loss": 0.5}
    storage.write(info_key(0), b"rubbish")
    assert reports.read_metrics(storage) == {}


def test_what_ray_train_registered_and_nobody_finds_is_never_a_fresh_start():
    nothing = CheckpointNotFoundError("nothing")
    reports.refuse_fresh_start(None, "/run/checkpoints", nothing)
    ours = f"/run/checkpoints/{folder(5).name}"
    for path, way_out in ((ours, "Bring them back"), ("/run/checkpoint_1", "ray_dcp.load")):
        with pytest.raises(CheckpointNotFoundError, match=way_out) as caught:
            reports.refuse_fresh_start(path, "/run/checkpoints", nothing)
        assert caught.value.checkpoint_id == path


# --- saves that are under way --------------------------------------------------------------------


class Handle(Future[Any]):
    """A save that ends when the test says so."""


def begun(step: int, error: BaseException | None = None, *, done: bool = True) -> Save:
    handle = Handle()
    if done and error is not None:
        handle.set_exception(error)
    elif done:
        handle.set_result(None)
    return Save(folder(step), Target("/run"), {}, handle)


def steps_of(ended: list[Any]) -> list[tuple[int, bool]]:
    return [(one.save.folder.step, one.error is None) for one in ended]


def test_a_save_is_looked_at_once_the_next_has_begun():
    under_way = UnderWay(1)
    under_way.add(begun(1))
    assert under_way.ended() == []
    under_way.add(begun(2, DeadlineError("late"), done=True))
    assert steps_of(under_way.ended()) == [(1, True)]
    assert steps_of(under_way.ended(all_of_them=True)) == [(2, False)]
    assert len(under_way) == 0


def test_one_that_was_skipped_tells_nothing_of_those_under_way():
    under_way = UnderWay(1)
    under_way.add(begun(1, done=False))
    under_way.add(begun(2, SaveSkippedError("enough")))
    assert steps_of(under_way.ended()) == [(2, False)]
    assert under_way.newest is not None
    assert under_way.newest.folder.step == 1


@pytest.mark.parametrize(("said", "committed"), [("committed", True), ("aborted", False)])
def test_an_outcome_that_nobody_told_is_asked_of_the_storage(said: str, committed: bool):
    under_way = UnderWay(1, ask=lambda *_: said, wait=lambda _: None)
    under_way.add(begun(1, CommitUnknownError("?", attempt="a")))
    ended = [one.error is None for one in _with_result(under_way)]
    assert ended == [committed]


def _with_result(under_way: UnderWay) -> list[Any]:
    newest = under_way.newest
    assert newest is not None
    newest.handle.result = lambda timeout=None: None  # type: ignore[method-assign]
    return under_way.ended(all_of_them=True)


def test_one_that_stays_unknown_ends_the_rank_whatever_on_error_says():
    asked: list[str] = []

    def ask(_: Target, attempt: str) -> str:
        asked.append(attempt)
        return "open"

    under_way = UnderWay(1, ask=ask, wait=lambda _: None)
    under_way.add(begun(1, CommitUnknownError("?", attempt="a")))
    with pytest.raises(CommitUnknownError):
        under_way.ended(all_of_them=True)
    assert len(asked) >= 3


def test_ranks_that_do_not_make_the_same_calls_are_told_from_a_failing_storage():
    wrong = RankDisagreementError("rank 1 saves elsewhere")
    assert is_misuse(wrong)
    assert is_misuse(CheckpointError("two").with_failures({1: (wrong, None)}))  # type: ignore[dict-item]
    assert not is_misuse(DeadlineError("late"))


def test_a_fall_back_and_failed_saves_are_told_on_rank_0_only():
    damaged = (("/run/newer", CheckpointError("cut off")),)
    report = LoadReport(
        loaded=(), missing=(), unexpected=(), cast=(), checkpoint_id="/run/older", step=3,
        skipped=damaged,
    )  # fmt: skip
    Warned(1).fell_back(report, folder(9))
    with (
        pytest.warns(UserWarning, match="/run/newer, which is damaged"),
        pytest.warns(UserWarning, match="registered the newer step 9"),
    ):
        Warned(0).fell_back(report, folder(9))
    warned = Warned(0)
    for count in (1, 2):
        with pytest.warns(UserWarning, match=f"{count} in a row"):
            warned.failed(count, CheckpointError("full"))
    with pytest.warns(UserWarning, match="training began anew"):
        warned.ignored_steps(True, None, "/run")
    warned.ignored_steps(True, None, "/run")
    Warned(0).ignored_steps(True, report, "/run")


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
    assert ask_all(ranks, "a", "resize").asked
    saved = ranks.saved([last + 1 for last in last_steps], 20)
    assert saved == [[max(last_steps) + 1]] * len(last_steps)


def test_a_rank_that_is_held_decides_nothing_until_it_is_told():
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


def test_only_the_checkpointer_that_was_made_last_is_asked():
    ranks = Asking(-1)
    one = ranks.ranks[0]
    assert one.open() == 2
    assert ask_all(ranks, "a", "resize").asked
    assert one.at(5, 1) is None
    one.close(1)
    assert one.at(5, 2) is not None


def test_a_rank_whose_asker_died_goes_on(monkeypatch: Any):
    monkeypatch.setattr(save_requests, "HOLD_S", 0.01)
    one = SaveRequests()
    one.open(4)
    assert one.hold("a") is not None
    assert one.at(5, 1) is None
    assert not one.ask(Asked("a", "resize", 4))


def test_who_asks_while_somebody_asks_is_refused_and_nobody_is_held():
    ranks = Asking(4, 4)
    assert ask_all(ranks, "a", "resize").asked
    assert not ask_all(ranks, "b", "preemption").asked
    assert ranks.saved([5, 5], 8) == [[5], [5]]


def test_ranks_without_a_checkpointer_can_not_be_asked_and_the_others_go_on():
    ranks = Asking(4, 4)
    ranks.ranks[1].close(1)
    result = ask_all(ranks, "a", "resize")
    assert (result.asked, "[1]" in result.why) == (False, True)
    assert ranks.ranks[0].at(5, 1) is None


def test_a_worker_that_does_not_answer_leaves_the_others_free():
    ranks = Asking(4)
    good = ranks.call

    def call(method: str, *arguments: Any) -> list[Any]:
        if method == "ask":
            raise TimeoutError
        return good(method, *arguments)

    ranks.call = call  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        ask_all(ranks, "a", "resize")
    assert ranks.ranks[0].at(5, 1) is None


def test_a_save_is_only_asked_for_when_it_fits_into_the_time_left():
    ranks = Asking(4, 4)
    ranks.ranks[1].took(stage_s=3.0, commit_s=10.0)
    assert ask_all(ranks, "a", "preemption", left_s=2.0).fit == "none"
    assert ranks.ranks[0].at(5, 1) is None
    assert ask_all(ranks, "b", "preemption", left_s=5.0).fit == "memory"
    assert tier_that_fits(20.0, 3.0, 10.0) == "storage"


@pytest.mark.parametrize(
    ("left_s", "took_s", "linger_s"),
    [(30.0, None, 0.0), (12.0, None, 99.0), (30.0, 12.0, 99.0), (None, None, 99.0)],
)
def test_ranks_linger_when_no_further_save_would_fit(
    left_s: float | None, took_s: float | None, linger_s: float
):
    ranks = Asking(4)
    ranks.ranks[0].took(stage_s=0.1, commit_s=4.0)
    assert ask_all(ranks, "a", "", linger_s=99.0, left_s=left_s, took_s=took_s).asked
    asked = ranks.ranks[0].at(5, 1)
    assert asked is not None
    assert asked.linger_s == linger_s


def test_the_asker_learns_how_the_save_ended():
    for committed in (True, False):
        ranks = Asking(4, 4)
        first = ranks.ranks[0]
        assert follow(ranks, "never asked", 10.0) == "failed"
        ask_all(ranks, "a", "preemption")
        assert follow(ranks, "a", 0.0) == "waiting"
        asked = [one.at(5, 1) for one in ranks.ranks]
        assert follow(ranks, "a", 0.0) == "saving"
        for one, request in zip(ranks.ranks, asked, strict=True):
            assert request is not None
            assert follow(ranks, "a", 0.0) == ("saving" if committed or one is first else "failed")
            one.ended(request, committed)
        assert follow(ranks, "a", 10.0) == ("committed" if committed else "failed")


def test_a_rank_lingers_after_the_save_until_it_is_let_go():
    ranks = Asking(4)
    ask_all(ranks, "a", "resize", linger_s=1000.0)
    one = ranks.ranks[0]
    asked = one.at(5, 1)
    assert asked is not None
    thread = threading.Thread(target=one.ended, args=(asked, True))
    thread.start()
    assert eventually(lambda: one._changed._waiters)  # type: ignore[attr-defined]
    assert follow(ranks, "a", 0.0) == "committed"
    one.drop("a")
    thread.join(180)
    assert not thread.is_alive()


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


def test_the_last_round_before_a_node_goes_is_as_late_as_a_save_fits():
    assert next_round_s(0.0, 20.0, 2.0) == 14.0
    assert next_round_s(13.0, 20.0, 2.0) is None
    assert next_round_s(0.0, None, 2.0) is None
    assert next_round_s(0.0, 20.0, None) is None
