"""Plans that are kept beside the checkpoints, for the first saves of other jobs."""

import json
import logging
from dataclasses import fields, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import events
from ray_dcp.errors import CheckpointError, InvalidRequestError, StorageError
from ray_dcp.format import plan_template
from ray_dcp.format.plan_template import (
    INDEX_KEY,
    decode_index,
    decode_plan,
    encode_plan,
    is_template,
    template_key,
)
from ray_dcp.manager.settings import Item
from ray_dcp.options import SaveOptions
from ray_dcp.plan import global_plan, structural
from ray_dcp.plan.columns import ColumnsBuilder
from ray_dcp.plan.global_plan import make_plan
from ray_dcp.plan.rank_plan import rank_plan
from ray_dcp.plan.regular import probes
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.values import IntKey
from ray_dcp.protocol import template_place
from ray_dcp.protocol.commands import Failed, Finished, Published, RecordCreated, RecordsRead
from ray_dcp.protocol.messages import OpKey, SaveJoin, SendItems, Target
from ray_dcp.protocol.template_place import of_an_item, place_of_templates
from ray_dcp.protocol.template_tasks import KeepTemplate, ReadTemplate, TemplateRead
from ray_dcp.runtime.perform import perform
from ray_dcp.runtime.plan_templates import MOST_TEMPLATES
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.testing.array_states import ArrayCapture, same_state, sample_state
from ray_dcp.testing.ranks import load_state
from ray_dcp.view.listing import list_checkpoints
from ray_dcp.view.verify import verify
from tests.property.test_structure import like_fsdp, same
from tests.protocol_play import BUILT, Play, planned
from tests.unit.test_regular import task_of
from tests.warm_ranks import Warm

KEPT = SaveOptions(num_threads=1, plan_templates=True)
KEY = bytes(range(32))


class Job(Warm):
    """A job that saves steps into one folder; `restart_job` begins another."""

    def __init__(self, root, world_size=3):
        self.root = root
        super().__init__(world_size, f"{root}/step-0")

    def restart_job(self, world_size=3, nodes=None):
        self.restart(world_size)
        self.nodes = nodes or self.nodes
        self.restart_coordinator()

    def step(self, number, states=None, options=KEPT, **how):
        self.url = f"{self.root}/step-{number}"
        states = sample_state(number) if states is None else states
        return [result.get() for result in self.save(states, options=options, **how)]

    @property
    def origins(self):
        return {reply.origin for reply in self.replies if not isinstance(reply, SendItems)}

    @property
    def plans(self):
        return open_storage(Target(f"{self.root}/.manager/plans"))

    def kept(self):
        return [entry.key for entry in self.plans.list()]

    def loads(self, state, world_size=2):
        return same_state(state, load_state(open_storage(Target(self.url)), state, world_size))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "run")


def test_the_first_save_of_a_restarted_job_moves_no_rows_and_makes_no_plan(job):
    job.step(0)
    assert job.origins == {"cold"}
    assert job.senders == {0, 1, 2}
    job.step(1)
    assert job.origins == {"warm"}
    job.restart_job()
    job.step(2)
    assert job.origins == {"template"}
    assert (job.senders, job.plans_made) == (set(), 0)
    assert not any(isinstance(reply, SendItems) for reply in job.replies)
    assert job.loads(sample_state(2))
    job.step(3)
    assert job.was_warm
    assert job.origins == {"warm"}
    assert job.loads(sample_state(3))


JOINT = replace(KEPT, files_per_node=1)


@pytest.fixture
def joint_job(job):
    """One of four ranks on two nodes, whose stagers write a file each."""
    job.staged = True
    job.restart_job(4, ["x", "x", "y", "y"])
    return job


def data_files(url):
    storage = open_storage(Target(url))
    return {
        entry.key.partition(".")[0]: storage.read(entry.key)
        for entry in storage.list()
        if entry.key.endswith(".distcp")
    }


def test_ranks_that_share_files_begin_with_a_template_too(joint_job, tmp_path):
    job = joint_job
    job.step(0, options=JOINT)
    assert (job.origins, job.senders) == ({"cold"}, {0, 1, 2, 3})
    job.restart_job(4, ["p", "p", "q", "q"])
    job.step(1, options=JOINT)
    assert job.origins == {"template"}
    assert (job.senders, job.plans_made) == (set(), 0)
    assert job.loads(sample_state(1))
    assert verify(job.url).ok
    cold = Job(tmp_path / "cold")
    cold.staged = True
    cold.restart_job(4, ["x", "x", "y", "y"])
    cold.step(1, options=JOINT)
    assert cold.origins == {"cold"}
    assert data_files(job.url) == data_files(cold.url)
    assert sorted(data_files(job.url)) == ["__0_0", "__2_0"]
    job.step(2, options=JOINT)
    assert job.was_warm
    only_template(job)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (["x", "y", "y", "y"], JOINT),
        (["x", "y", "x", "y"], JOINT),
        (["x", "x", "y", "y"], replace(KEPT, files_per_node=2)),
        (["x", "x", "y", "y"], KEPT),
    ],
)
def test_other_nodes_or_another_bound_make_another_plan(joint_job, nodes, options):
    job = joint_job
    job.step(0, options=JOINT)
    job.restart_job(4, nodes)
    job.step(1, options=options)
    assert job.origins == {"cold"}
    assert job.loads(sample_state(1))
    job.restart_job(4, nodes)
    job.step(2, options=options)
    assert job.origins == {"template"}
    assert job.loads(sample_state(2))


def test_a_rank_that_writes_itself_gets_no_share_of_a_file(joint_job):
    job = joint_job
    job.step(0, options=JOINT)
    job.restart_job(4, ["x", "x", "y", "y"])
    job.staged = False
    job.step(1, options=JOINT)
    assert job.origins == {"cold"}
    assert len(data_files(job.url)) == 4


def test_a_template_of_files_shared_over_nodes_is_not_used():
    place = Target("memory://shared-over-nodes/plans")
    open_storage(place).write(template_key(KEY), encode_plan(joint_plan(), KEY))
    for nodes, is_used in [((0, 0, 1, 1), True), ((0, 1, 1, 1), False), ((), False)]:
        found = perform(ReadTemplate(place, KEY, 4, nodes)).plan
        assert (found is not None) == is_used


def test_another_job_with_the_same_layout_uses_it_too(job, tmp_path):
    place = f"{tmp_path}/plans"
    options = replace(KEPT, plan_templates_in=place)
    job.step(0, options=options)
    other = Job(tmp_path / "other")
    other.step(7, options=options)
    assert other.origins == {"template"}
    assert other.loads(sample_state(7))
    assert not (tmp_path / "run/.manager").exists()
    assert len([key for key in open_storage(place).list() if is_template(key.key)]) == 1


def test_a_save_by_a_template_writes_the_bytes_of_a_cold_one(job, tmp_path):
    job.step(0)
    job.restart_job()
    job.step(5)
    cold = Job(tmp_path / "cold")
    cold.step(5)
    assert (job.origins, cold.origins) == ({"template"}, {"cold"})
    assert data_files(job.url) == data_files(cold.url) != {}


def test_where_contents_differ_a_new_plan_is_made(job):
    job.step(0)
    job.restart_job()
    states = [sample_state(1), sample_state(1), {**sample_state(1), "note": "mine"}]
    outcome = job.step(1, states)[0]
    assert job.plans_made == 1
    assert job.origins == {"cold"}
    assert "'note' on rank 2" in outcome.warnings[0]


def test_what_differed_when_it_was_planned_may_differ_by_a_template_too(job):
    def states(step, ranks):
        return [
            {**sample_state(step), "note": f"of {rank}" if rank in ranks else "same"}
            for rank in range(3)
        ]

    job.step(0, states(0, {1, 2}))
    job.restart_job()
    outcome = job.step(1, states(1, {2}))[0]
    assert job.origins == {"template"}
    assert "'note' on rank 2" in outcome.warnings[0]
    assert job.loads({**sample_state(1), "note": "same"})
    job.restart_job()
    with pytest.raises(CheckpointError, match="'note' on rank 1"):
        job.step(2, states(2, {1}), replace(KEPT, replicas="check"))


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.restart_job(2),
        lambda job: setattr(job, "more", {"rep.more": np.arange(3)}),
        lambda job: setattr(job, "options", replace(KEPT, part_bytes=4096)),
        lambda job: setattr(job, "options", replace(KEPT, container="safetensors")),
        lambda job: setattr(job, "options", replace(KEPT, dedup_save_to_lowest_rank=True)),
    ],
)  # fmt: skip
def test_another_layout_world_or_option_is_cold(job, change):
    job.step(0)
    job.restart_job()
    change(job)
    state = {**sample_state(1), **getattr(job, "more", {})}
    job.step(1, state, getattr(job, "options", KEPT))
    assert job.origins == {"cold"}
    assert job.loads(state)
    assert len([key for key in job.kept() if is_template(key)]) == 2


def only_template(job):
    (name,) = [key for key in job.kept() if is_template(key)]
    return name


def spoilt(data, how):
    match how:
        case "empty":
            return b""
        case "foreign":
            return b"PK\x03\x04 something else" * 100
        case "short":
            return data[: len(data) // 2]
        case "long":
            return data + b"x"
        case "head only":
            return data[:40]
        case "flipped":
            return data[:100] + bytes([data[100] ^ 1]) + data[101:]
        case "magic":
            return b"X" + data[1:]
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how", ["empty", "foreign", "short", "long", "head only", "flipped", "magic"]
)
def test_a_spoilt_template_is_told_in_the_log_and_replaced(job, how, caplog):
    job.step(0)
    name = only_template(job)
    data = job.plans.read(name)
    job.plans.write(name, spoilt(data, how))
    job.restart_job()
    with caplog.at_level(logging.DEBUG, "ray_dcp.runtime.plan_templates"):
        job.step(1)
    assert job.origins == {"cold"}
    assert job.loads(sample_state(1))
    assert "a new plan is made" in caplog.text
    assert job.plans.read(name) == data
    job.restart_job()
    job.step(2)
    assert job.origins == {"template"}


def test_the_template_of_another_layout_is_not_used_under_this_name(job):
    job.step(0)
    mine = only_template(job)
    job.step(1, {**sample_state(1), "rep.more": np.arange(3)})
    (other,) = {key for key in job.kept() if is_template(key)} - {mine}
    job.plans.write(mine, job.plans.read(other))
    job.restart_job()
    job.step(2)
    assert job.origins == {"cold"}
    assert job.loads(sample_state(2))


def test_a_template_of_another_version_is_not_used(job, monkeypatch):
    monkeypatch.setattr(plan_template, "__version__", "0.0.0")
    job.step(0)
    monkeypatch.undo()
    job.restart_job()
    job.step(1)
    assert job.origins == {"cold"}


def test_a_template_of_another_world_is_not_used():
    place = Target("memory://another-world/plans")
    open_storage(place).write(template_key(KEY), encode_plan(row_plan(ranks=3), KEY))
    found = [perform(ReadTemplate(place, KEY, ranks)).plan for ranks in (2, 3, 4)]
    assert [plan is not None for plan in found] == [False, True, False]


def test_only_the_last_used_are_kept(job):
    def layout(number):
        return {"rep.w": np.arange(number + 2.0)}

    seen = []
    for number in range(MOST_TEMPLATES):
        job.step(number, layout(number))
        seen += [key for key in job.kept() if is_template(key) and key not in seen]
    assert decode_index(job.plans.read(INDEX_KEY)) == seen[::-1]
    # Another job uses the oldest, which so becomes the newest.
    job.restart_job()
    job.step(10, layout(0))
    assert job.origins == {"template"}
    order = [seen[0], *seen[:0:-1]]
    assert decode_index(job.plans.read(INDEX_KEY)) == order
    # What crashed processes left goes too: templates that nobody noted, and unfinished files.
    orphan = template_key(bytes(32))
    job.plans.write(orphan, b"left")
    (job.root / f".manager/plans/.tmp-0123456789ab-{orphan}").write_bytes(b"left")
    (job.root / ".manager/plans/notes.txt").write_bytes(b"mine")
    job.step(11, layout(50))
    kept = [key for key in job.kept() if is_template(key)]
    assert len(kept) == MOST_TEMPLATES
    assert set(order[:-1]) < set(kept)
    assert orphan not in kept
    assert job.plans.unpublished() == ()
    assert (job.root / ".manager/plans/notes.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b'{"used": 3}', b'{"used": [3, "../x.plan"]}'])
def test_a_damaged_index_is_begun_anew(job, index):
    job.step(0)
    job.plans.write(INDEX_KEY, index)
    job.restart_job()
    job.step(1)
    assert job.origins == {"template"}
    assert decode_index(job.plans.read(INDEX_KEY)) == [only_template(job)]


@pytest.mark.parametrize("can_write", [True, False])
def test_a_job_keeps_a_plan_once_or_tries_it_once(job, monkeypatch, can_write):
    tasks = []

    def note(task):
        tasks.append(task)
        return Warm.perform(job, task)

    monkeypatch.setattr(job, "perform", note)
    if not can_write:
        job.root.mkdir()
        (job.root / ".manager").write_bytes(b"a file")
    for number in range(3):
        job.step(number)
    kept = [task for task in tasks if isinstance(task, KeepTemplate)]
    assert [task.is_there for task in kept] == [False]
    job.restart_job()
    for number in range(3, 5):
        job.step(number)
    kept = [task for task in tasks if isinstance(task, KeepTemplate)]
    assert [task.is_there for task in kept] == [False, can_write]


@pytest.mark.parametrize("which", [".plan", INDEX_KEY])
def test_who_tidies_up_takes_no_template_from_another_job_for_good(job, monkeypatch, which):
    taken = []

    original = local.publish

    def publish(temp, path, **how):
        if path.endswith(which) and not taken:
            # Another job that writes a template just then finds a temporary file.
            taken.extend(entry.key for entry in job.plans.unpublished())
            job.plans.delete(taken)
        return original(temp, path, **how)

    monkeypatch.setattr(local, "publish", publish)
    job.step(0)
    monkeypatch.undo()
    assert len(taken) == 1
    assert decode_index(job.plans.read(INDEX_KEY)) == [only_template(job)]
    job.restart_job()
    job.step(1)
    assert job.origins == {"template"}


class Refusing(MemoryStorage):
    """Refuses what is asked of the folder of templates."""

    refused = ("read", "write", "list", "delete")

    def _refuse(self, what):
        if ".manager" in self.url and what in self.refused:
            raise StorageError(f"no {what}", key=what)

    def read(self, key, start=0, num_bytes=None):
        self._refuse("read")
        return super().read(key, start, num_bytes)

    def write(self, key, data, *, create=False):
        self._refuse("write")
        super().write(key, data, create=create)

    def delete(self, keys):
        self._refuse("delete")
        super().delete(keys)

    def list(self, prefix=""):
        self._refuse("list")
        return super().list(prefix)


@pytest.mark.parametrize(
    "refused", [("read",), ("write",), ("list",), ("delete",), Refusing.refused]
)
def test_a_place_that_refuses_is_no_error(refused, monkeypatch, caplog):
    monkeypatch.setattr(Refusing, "refused", refused)
    monkeypatch.setattr("ray_dcp.store.opening.MemoryStorage", Refusing)
    job = Job(f"memory://refusing-{'-'.join(refused)}")
    with caplog.at_level(logging.DEBUG, "ray_dcp.runtime.plan_templates"):
        for number in range(MOST_TEMPLATES + 1):
            job.step(number, {"rep.w": np.arange(number + 2.0)})
        job.restart_job()
        job.step(9, {"rep.w": np.arange(MOST_TEMPLATES + 2.0)})
    assert job.origins == ({"cold"} if "read" in refused or "write" in refused else {"template"})
    assert "is not kept in" in caplog.text or "a new plan is made" in caplog.text
    assert job.loads({"rep.w": np.arange(MOST_TEMPLATES + 2.0)})


def test_a_root_that_can_only_be_written_below_a_step_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.manager").write_bytes(b"a file, so that no folder can be made")
    job = Job(tmp_path / "run")
    job.step(0)
    job.restart_job()
    job.step(1)
    assert job.origins == {"cold"}
    assert job.loads(sample_state(1))


def test_a_place_that_can_not_be_opened_is_no_error(job):
    options = replace(KEPT, plan_templates_in="nosuch://bucket/plans")
    job.step(0, options=options)
    assert job.origins == {"cold"}
    assert job.loads(sample_state(0))


def test_events_and_reports_say_where_the_plan_is_from(tmp_path):
    told = []
    unsubscribe = events.subscribe(told.append)
    try:
        for step in range(2):
            state = {"w": torch.full((3,), float(step)), "step": step}
            ray_dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", options=KEPT)
        handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "step-2", options=KEPT)
        handle.result(180)
    finally:
        unsubscribe()
    assert [event.plan for event in told if event.is_end] == ["cold", "template", "template"]
    assert handle.report().plan == "template"
    view = ray_dcp.open(tmp_path / "step-2")
    assert view["w"][0:3].tolist() == [1.0, 1.0, 1.0]
    # For the trace it is a look at the storage, as that at what stands there.
    spans = [span.phase for span in view.trace.spans if span.rank is None]
    assert (spans.count("look"), spans.count("plan")) == (2, 0)
    # A process that is alone keeps no coordinator: each of its saves is the first of one.
    assert ray_dcp.SaveReport(path="", staging="", attempt=None).plan is None


def test_a_manager_keeps_them_in_its_root_also_for_items(tmp_path):
    item = Item(save_options=KEPT)
    told = []
    unsubscribe = events.subscribe(told.append)
    try:
        for step in (1, 2):
            with ray_dcp.CheckpointManager(
                tmp_path, 1, max_to_keep=1, items={"model": item, "data": item}
            ) as manager:
                states = {"model": {"w": torch.full((3,), float(step))}, "data": {"at": step}}
                assert manager.save(step, states)
                assert manager.all_steps() == [step]
    finally:
        unsubscribe()
    inside = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.plan")}
    assert inside == {(".manager", "plans")}
    ends = [(event.plan, event.checkpoint_id) for event in told if event.is_end]
    plans = {url.rpartition("/")[2]: plan for plan, url in ends if "00000002/" in url}
    assert plans == {"model": "template", "data": "template"}


def test_what_was_not_kept_as_its_save_failed_the_next_one_keeps(job, monkeypatch):
    def fail(task):
        name = type(task).__name__
        return Failed(StorageError("no")) if name == "WriteTable" else Warm.perform(job, task)

    monkeypatch.setattr(job, "perform", fail)
    with pytest.raises(StorageError):
        job.step(0)
    monkeypatch.undo()
    assert job.kept() == []
    job.step(1)
    assert (job.origins, job.plans_made) == ({"warm"}, 0)
    only_template(job)


def test_small_saves_leave_nothing_beside_them_and_ask_for_nothing(job, monkeypatch):
    usual = SaveOptions(num_threads=1)
    tasks = []
    monkeypatch.setattr(
        job, "perform", lambda task: tasks.append(type(task).__name__) or perform(task)
    )
    job.step(0, options=usual)
    assert job.senders == {0, 1, 2}
    assert [path.name for path in job.root.iterdir()] == ["step-0"]
    assert {"ReadTemplate", "KeepTemplate"}.isdisjoint(tasks)
    # From a size on they are kept, without being asked for.
    monkeypatch.setattr(template_place, "WORTH_CHUNKS", 10)
    job.restart_job()
    job.step(1, options=usual)
    only_template(job)
    job.restart_job()
    job.step(2, options=usual)
    assert job.origins == {"template"}
    job.restart_job()
    tasks.clear()
    job.step(3, options=replace(usual, plan_templates=False))
    assert (job.origins, job.senders) == ({"cold"}, {0, 1, 2})
    assert {"ReadTemplate", "KeepTemplate"}.isdisjoint(tasks)


def test_a_bound_on_files_that_joins_none_leaves_templates_as_they_are(job):
    # Here nobody stages, so each file is of one rank.
    bounded = replace(KEPT, files_per_node=2)
    job.step(0, options=bounded)
    only_template(job)
    job.restart_job()
    job.step(1, options=bounded)
    assert job.origins == {"template"}


def test_nobody_takes_the_folder_for_a_checkpoint(job):
    from ray_dcp.runtime.collecting import collect
    from ray_dcp.view.runs import list_run

    for number in range(2):
        job.step(number)
    listed = list_checkpoints(str(job.root))
    assert [(item.name, item.state) for item in listed] == [
        ("step-0", "committed"), ("step-1", "committed"),
    ]  # fmt: skip
    assert [folder.name for folder in list_run(str(job.root)).steps] == ["step-1", "step-0"]
    assert verify(f"{job.root}/step-1").ok
    before = job.kept()
    collect(f"{job.root}/step-1")
    assert job.kept() == before != []


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("/run/step-7", {}, "/run/.manager/plans"),
        ("/run/step-7/", {}, "/run/.manager/plans"),
        ("file:///run/7", {}, "file:///run/.manager/plans"),
        ("s3://bucket/step7", {}, "s3://bucket/.manager/plans"),
        ("memory://run/step-7", {}, "memory://run/.manager/plans"),
        ("/run/final", {}, None),
        ("/run/final", {"plan_templates": True}, "/run/.manager/plans"),
        ("/run/step-7", {"plan_templates": False, "plan_templates_in": "/plans"}, None),
        ("/run/final", {"plan_templates_in": "/plans"}, "/plans"),
        ("/step-7", {}, None),
        ("memory://step-7", {}, None),
        ("s3://7", {}, None),
        ("zip::s3://bucket/run/step-7", {}, None),
    ],
)
def test_all_steps_of_a_run_have_one_place(url, options, expected):
    found = place_of_templates(Target(url), SaveOptions(**options))
    assert (None if found is None else found.url) == expected


def test_credentials_go_nowhere_else():
    target = Target("s3://bucket/run/step-7", {"secret_access_key": "hush"}, "filesystem")
    here = place_of_templates(target, SaveOptions())
    same = place_of_templates(target, SaveOptions(plan_templates_in="s3://bucket/plans"))
    other = place_of_templates(target, SaveOptions(plan_templates_in="/plans"))
    assert here.storage_options == same.storage_options == {"secret_access_key": "hush"}
    assert (other.storage_options, other.filesystem) == ({}, None)


def test_items_of_a_step_share_the_place_of_the_step():
    auto, never = SaveOptions(), SaveOptions(plan_templates=False)
    assert of_an_item(Target("/run/step-7"), auto).plan_templates_in == "/run/.manager/plans"
    given = SaveOptions(plan_templates_in="/plans")
    assert of_an_item(Target("/run/step-7"), given).plan_templates_in == "/plans"
    assert of_an_item(Target("/run/step-7"), never).plan_templates is False
    assert of_an_item(Target("run/step-7"), auto).plan_templates is False


@pytest.mark.parametrize(
    "wrong", [{"plan_templates": "yes"}, {"plan_templates": 1}, {"plan_templates_in": "plans"},
              {"plan_templates_in": 3}]
)  # fmt: skip
def test_wrong_options_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        SaveOptions(**wrong)


# --- the file -----------------------------------------------------------------------------------


@pytest.fixture
def small_classes(monkeypatch):
    monkeypatch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 0)
    monkeypatch.setattr(structural, "LEAST_RANKS_A_CLASS", 1)
    monkeypatch.setattr(structural, "MANY_ROWS", 0)


def row_plan(container="torch_save", ranks=3):
    # What differs is a group of its own.
    states = [{**sample_state(1), "note": f"of {rank}"} for rank in range(ranks)]
    columns = [ArrayCapture(states[rank], rank, ranks).columns for rank in range(ranks)]
    return make_plan(columns, container=container)


def joint_plan():
    """Two files of two ranks each, with extents that begin on several pages."""

    def columns(rank):
        builder = ColumnsBuilder()
        for index in range(3):
            builder.tensor(f"w{rank}.{index}", "float32", (900 + rank,))
        builder.object(f"note {rank}")
        return builder.build()

    return make_plan([columns(rank) for rank in range(4)], nodes=(0, 0, 1, 1), files_per_node=1)


def structural_plan():
    columns = like_fsdp(64, uneven=True)
    return perform(task_of(columns, set(probes(64)))).plan


ROW_PLANS = {
    "torch_save": row_plan,
    "safetensors": lambda: row_plan("safetensors"),
    "joint": joint_plan,
}


@pytest.mark.parametrize("make", ROW_PLANS.values(), ids=ROW_PLANS.keys())
def test_a_plan_of_rows_comes_back_as_it_was(make):
    plan = make()
    data = encode_plan(plan, KEY)
    again = decode_plan(data, KEY)
    same(plan, again)
    assert {field.name for field in fields(plan)} == vars(again).keys()
    assert encode_plan(again, KEY) == data
    for rank in range(plan.world_size):
        same(rank_plan(plan, rank), rank_plan(again, rank))


def test_numbers_as_keys_come_back_as_such():
    builder = ColumnsBuilder()
    builder.object("a.7.0", path=("a", IntKey(7), 0))
    builder.object("a.7", path=("a", "7"))
    plan = make_plan([builder.build()])
    found = decode_plan(encode_plan(plan, KEY), KEY).table.paths
    assert found == plan.table.paths
    assert [[type(one) for one in path] for path in found] == [[str, IntKey, int], [str, str]]


def test_a_plan_of_a_regular_layout_comes_back_as_it_was(small_classes):
    plan = structural_plan()
    assert isinstance(plan, StructuralPlan)
    data = encode_plan(plan, KEY)
    again = decode_plan(data, KEY)
    assert isinstance(again, StructuralPlan)
    assert plan.__getstate__().keys() == again.__getstate__().keys()
    assert again.digest == plan.digest
    same(plan, again)
    for rank in (0, 5, 63):
        same(rank_plan(plan, rank), rank_plan(again, rank))
    # A thousandth of the bytes that the rows would take.
    assert len(data) < 8 * plan.few.num_chunks + 4096


def test_a_plan_that_is_too_large_has_no_template(monkeypatch):
    plan = row_plan()
    for name in ("MOST_ROWS", "MOST_RAW_BYTES", "MOST_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(plan_template, name, 3)
            assert encode_plan(plan, KEY) is None
    storage = LocalStorage("/nowhere")
    monkeypatch.setattr(plan_template, "MOST_ROWS", 3)
    assert not isinstance(perform(KeepTemplate(Target("/nowhere"), KEY, plan, False)), Failed)
    assert storage.list() == []


def unpacked(data):
    raw = pa.decompress(
        data[plan_template._HEAD_BYTES :], codec="zstd", asbytes=True,
        decompressed_size=int.from_bytes(data[22:30], "little"),
    )  # fmt: skip
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def packed(head, arrays):
    words = json.dumps(head).encode()
    raw = len(words).to_bytes(8, "little") + words + bytes(arrays)
    body = pa.compress(raw, codec="zstd", asbytes=True)
    digest = blake2b(body, digest_size=32).digest()
    return b"ray_dcp plan template\n" + len(raw).to_bytes(8, "little") + digest + body


WRONG = st.sampled_from(
    [-1, 0, 1, 2, 3, 64, 1 << 31, 1 << 40, 1 << 63, 1 << 70, 0.5, True, None, "", "x", [], {}, [[]]]
)


@settings(max_examples=45, deadline=None)
@given(st.data(), st.booleans())
def test_a_head_that_somebody_made_up_is_refused_or_changes_nothing(data, regular):
    plan = PLANS[regular]()
    good = encode_plan(plan, KEY)
    head, arrays = unpacked(good)
    assert decode_plan(packed(head, arrays), KEY).digest == plan.digest
    at, inner = head, data.draw(st.sampled_from(sorted(head)))
    while isinstance(at[inner], (list, dict)) and at[inner] and data.draw(st.integers(0, 6)):
        at = at[inner]
        inner = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    at[inner] = data.draw(WRONG)
    try:
        found = decode_plan(packed(head, arrays), KEY)
    except CheckpointError:
        return
    assert found.digest == plan.digest


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans())
def test_numbers_that_somebody_made_up_are_refused(data, regular):
    plan = PLANS[regular]()
    head, arrays = unpacked(encode_plan(plan, KEY))
    place = data.draw(st.integers(0, len(arrays) - 1))
    arrays[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError):
        decode_plan(packed(head, arrays), KEY)


def cached(make):
    found = []

    def get():
        if not found:
            found.append(make())
        return found[0]

    return get


def small_structural_plan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 0)
        patch.setattr(structural, "LEAST_RANKS_A_CLASS", 1)
        patch.setattr(structural, "MANY_ROWS", 0)
        return structural_plan()


PLANS = {False: cached(row_plan), True: cached(small_structural_plan)}


def of_table(**changed):
    return lambda plan: replace(plan, table=replace(plan.table, **{
        name: change(getattr(plan.table, name)) for name, change in changed.items()
    }))  # fmt: skip


def of_groups(**changed):
    return lambda plan: replace(plan, groups=replace(plan.groups, **{
        name: change(getattr(plan.groups, name)) for name, change in changed.items()
    }))  # fmt: skip


def of_plan(**changed):
    return lambda plan: replace(
        plan, **{name: change(getattr(plan, name)) for name, change in changed.items()}
    )


def named(key):
    return of_table(files=lambda files: (key, *files[1:]))


def first_is(value):
    def change(array):
        array = array.copy()
        array[0] = value
        return array

    return change


FORGED = {
    "a file outside": named("../../outside.{attempt}.distcp"),
    "a file anywhere": named("/etc/x.{attempt}.distcp"),
    "a file without attempt": named("__0_0.distcp"),
    "a file of another rank": named("__1_7.{attempt}.distcp"),
    "the metadata": named(".metadata"),
    "a box outside its tensor": of_table(size=lambda size: size + 1),
    "a chunk of no tensor": of_table(tensor=first_is(99)),
    "a chunk of no file": of_table(file=first_is(99)),
    "files in another order": of_table(file=lambda file: file[::-1].copy()),
    "other blocks": of_table(block_bytes=lambda block: block + 1),
    "another writer": of_plan(source_rank=lambda rank: 1 - rank),
    "a row below 0": of_plan(source_row=first_is(-1)),
    "a start below 0": of_plan(source_start=first_is(-1)),
    "a length below 0": of_plan(file_bytes=first_is(-1)),
    "a rank that there is not": of_plan(file_rank=lambda rank: rank + 7),
    "another container": of_plan(container=lambda _: "zip"),
    "a header too many": of_plan(file_headers=lambda headers: (b"x", *headers)),
    "a group of no rank": of_groups(rank=lambda rank: rank + 7),
    "ranks in another order": of_groups(rank=lambda rank: rank[::-1].copy()),
    "groups in another order": of_groups(group=lambda group: -group),
    "a group beyond all": of_groups(group=lambda group: group + (1 << 30)),
    "a place below 0": of_groups(place=first_is(-1)),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_template_that_somebody_signed_anew_is_held_against_its_bounds(how):
    forged = FORGED[how](row_plan())
    forged = replace(forged, digest=global_plan.digest_of(forged))
    data = encode_plan(forged, KEY)
    with pytest.raises(CheckpointError):
        decode_plan(data, KEY)


def each(change):
    """Changes a column of `joint_plan`, by index."""
    return lambda column: np.array([change(*row) for row in enumerate(column.tolist())])


def swapped(one, other):
    def change(array):
        array = array.copy()
        array[[one, other]] = array[[other, one]]
        return array

    return change


# Of its first file these are items 0 to 2 of rank 0, 3 to 5 of rank 1, and objects of both.
FORGED_JOINT = {
    "a lowest rank that is another": lambda plan: of_plan(file_rank=lambda rank: rank + 1)(
        of_table(files=lambda _: ("__1_0.{attempt}.distcp", "__3_0.{attempt}.distcp"))(plan)
    ),
    "a rank that there is not": of_plan(source_rank=each(lambda i, rank: 4 if i == 15 else rank)),
    "ranks in turns": of_plan(source_rank=swapped(2, 3)),
    "objects in another order": of_plan(source_rank=swapped(6, 7)),
    "an object before the rest": of_table(
        payload_offset=swapped(5, 6), payload_bytes=swapped(5, 6), item_offset=swapped(5, 6),
        item_bytes=swapped(5, 6), block_bytes=swapped(5, 6), tensor=swapped(5, 6),
        size=swapped(5, 6), offset=swapped(5, 6),
    ),
    "an extent on the page of another": of_table(
        item_offset=each(lambda i, at: at - 4096 * (i in (3, 4, 5))),
        payload_offset=each(lambda i, at: at - 4096 * (i in (3, 4, 5))),
    ),
    "items on each other": of_table(
        item_offset=each(lambda i, at: at - 64 * (i == 1)),
        payload_offset=each(lambda i, at: at - 64 * (i == 1)),
    ),
    "items behind the end of their file": of_plan(file_bytes=lambda lengths: lengths - 1),
    "an item without a place": of_table(item_offset=first_is(-1)),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGED_JOINT)
def test_files_of_several_ranks_are_held_against_how_they_are_laid_out(how):
    plan = joint_plan()
    assert decode_plan(encode_plan(plan, KEY), KEY).digest == plan.digest
    forged = FORGED_JOINT[how](plan)
    forged = replace(forged, digest=global_plan.digest_of(forged))
    assert forged.digest != plan.digest
    with pytest.raises(CheckpointError, match="items that their ranks write"):
        decode_plan(encode_plan(forged, KEY), KEY)


def test_every_byte_is_covered_by_a_digest():
    """Also what the plan's own digest leaves out: headers of files, and what differed."""
    data = encode_plan(row_plan("safetensors"), KEY)
    for place in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CheckpointError):
            decode_plan(bytes(damaged), KEY)


def test_a_short_template_does_not_take_much_memory():
    body = pa.compress(bytes(1 << 20), codec="zstd", asbytes=True)
    digest = blake2b(body, digest_size=32).digest()
    for claim in (1 << 40, (1 << 64) - 1, 0, 7, 1 << 10):
        data = b"ray_dcp plan template\n" + claim.to_bytes(8, "little") + digest + body
        with pytest.raises(CheckpointError):
            decode_plan(data, KEY)


# --- the machine --------------------------------------------------------------------------------


def recalling():
    """A save of two ranks that waits for a template to be read."""
    play = Play(options=KEPT)
    for rank in range(2):
        join = SaveJoin(OpKey("run", 0), rank, 2, Target("memory://run/step-1"), KEPT, b"")
        assert play.send(replace(join, fingerprint=bytes([rank + 1] * 32))) is None
    assert play.task.place.url == "memory://run/.manager/plans"
    assert play.task.world_size == 2
    return play


def test_a_template_that_takes_too_long_is_not_waited_for():
    play = recalling()
    late = play.todo[0]
    play.expire()
    asked = [reply for reply in play.replies.values() if isinstance(reply, SendItems)]
    assert asked == [SendItems(rows=True)] * 2
    # What comes later is dropped.
    assert play.coordination.performed(late.key, late.task, TemplateRead(row_plan())) == ()


def test_a_rank_that_dies_meanwhile_fails_the_save():
    play = recalling()
    play.lose(1)
    assert "rank 1" in play.replies[0, "SaveJoin"].error.message


def test_a_template_is_looked_for_once():
    play = recalling()
    play.done(TemplateRead(None))
    for rank in range(2):
        join = SaveJoin(OpKey("run", 0), rank, 2, Target("memory://run/step-1"), KEPT, b"rows")
        play.send(replace(join, fingerprint=bytes([rank + 1] * 32), asked=1))
    assert type(play.task).__name__ == "ReadRecords"


def test_a_failing_look_is_a_miss():
    play = recalling()
    play.fail(StorageError("no"))
    assert {type(reply) for reply in play.replies.values()} == {SendItems}


def test_a_template_that_can_not_be_written_to_the_end_keeps_no_save_open():
    play = recalling()
    play.done(TemplateRead(plan_of_two()))
    play.done(RecordsRead(0, None, None, ()))
    for rank in range(2):
        play.receipt(rank)
    for result in (BUILT, Finished(), RecordCreated(1), Published()):
        play.done(result)
    # All were told, and the next save may begin.
    assert {type(play.reply(rank, "SaveReceipt")).__name__ for rank in range(2)} == {"SaveOutcome"}
    (task,) = [todo.task for todo in play.todo]
    assert isinstance(task, KeepTemplate)
    assert task.is_there
    play.expire()
    assert play.coordination.active == ()
    play.done(Failed(StorageError("late")))


def plan_of_two():
    return replace(planned(2).plan, digest=bytes([7] * 32))
