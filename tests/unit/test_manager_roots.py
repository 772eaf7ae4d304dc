"""Who may write to a root, who reads from it, what is known of its steps, and what faults leave."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ray_dcp
from ray_dcp import errors
from ray_dcp.format import manifest
from ray_dcp.format.names import CATALOGUE
from ray_dcp.format.step_info import (
    CatalogueRow,
    StepInfo,
    decode_catalogue,
    decode_info,
    encode_catalogue,
    encode_info,
)
from ray_dcp.io.announced_deletions import Announced
from ray_dcp.io.lease_holders import _started, this_process
from ray_dcp.manager import (
    BestN,
    CheckpointManager,
    Item,
    LatestN,
    background,
    collective_actions,
    reader_leases,
    writer_lease,
)
from ray_dcp.manager.catalogue import FOLDER, look, write_catalogue
from ray_dcp.manager.reader_leases import ReaderLease, Readers
from ray_dcp.manager.writer_lease import WriterLease
from ray_dcp.place.delete import delete
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import KeyMissingError
from tests.crash.registry import NEW, NEXT, OLD, Place
from tests.support.manager_places import (
    HERE,
    folders_of,
    in_this_thread,
    root_of,
    save_step,
    settings,
    writer_of,
)
from tests.support.storages import Fault, Script, UnconditionalStorage, interpose

pytestmark = pytest.mark.filterwarnings("ignore:.*only if there is none:UserWarning")

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = replace(this_process(), machine="another machine", host="elsewhere")
GONE = replace(this_process(), pid=2**22 + 1, started="1")


@pytest.fixture
def storage(request):
    """An empty storage in memory, for managers that do everything in this thread."""
    name = "roots-" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    found = MemoryStorage(name)
    found.delete([entry.key for entry in found.list()])
    with in_this_thread():
        yield found


def right(storage, holder=HERE, **given) -> WriterLease:
    return WriterLease(root_of(storage), holder=holder, **given)


def manager_of(path, **given) -> CheckpointManager:
    return CheckpointManager(path, 1, chkpt_on_preemption=False, **given)


def state(step=0):
    return {"w": torch.full((8,), float(step))}


# --- one writer ---------------------------------------------------------------------------------


WRITES = """
import sys, torch
from ray_dcp.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], 1)
manager.save(1, {"w": torch.ones(8)})
print("saved", flush=True)
sys.stdin.readline()
"""


def test_a_second_process_is_refused_while_the_first_lives_and_succeeds_it_when_it_died(
    tmp_path, programs
):
    first = programs.start("-c", WRITES, str(tmp_path))
    try:
        assert first.stdout.readline() == "saved\n"
        manager = manager_of(tmp_path)
        with pytest.raises(
            errors.CheckpointExistsError, match=rf"process {first.pid} on .*takeover=True"
        ):
            manager.save(2, state(2))
        assert manager.all_steps() == [1]
        found = state()
        assert manager.restore("latest", found).step == 1
        with pytest.raises(errors.CheckpointExistsError):
            manager.delete(1)
        with pytest.raises(errors.CheckpointExistsError):
            manager.tag(1, "mine")
    finally:
        first.kill()
    assert manager.save(2, state(2))
    assert manager.all_steps() == [1, 2]
    manager.close()


def test_the_later_manager_of_one_process_writes_and_the_earlier_is_told(tmp_path):
    earlier, later = manager_of(tmp_path), manager_of(tmp_path)
    earlier.save(1, state(1))
    later.save(2, state(2))
    with pytest.raises(errors.CheckpointExistsError, match="since this manager opened it"):
        earlier.save(3, state(3))
    assert earlier.all_steps() == [1, 2]
    earlier.close()
    later.save(3, state(3))
    later.close()


def test_a_manager_that_was_succeeded_renews_its_lease_no_more(tmp_path):
    """As each time that a cell of a notebook makes a manager and does not close it."""
    managers = [manager_of(tmp_path, lease_s=0.3) for _ in range(2)]
    before = set(threading.enumerate())

    def beats() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [each for each in new if each.name == "ray_dcp beat"]

    managers[0].save(1, state(1))
    (first,) = beats()
    managers[1].save(2, state(2))
    first.join(30)
    assert not first.is_alive()
    assert len(beats()) == 1
    for manager in managers:
        manager.close()


@pytest.mark.parametrize(
    ("holder", "event", "outcome"),
    [
        (ELSEWHERE, "", "after 30 s"),
        (ELSEWHERE, "beats", "on elsewhere, which lives"),
        (ELSEWHERE, "gives back", "at once"),
        (replace(ELSEWHERE, nonce=HERE.nonce), "", "at once"),
        (replace(HERE, nonce="of an earlier manager"), "", "at once"),
        (GONE, "", "at once"),
    ],
)
def test_a_writer_is_succeeded_once_it_has_ended(storage, monkeypatch, holder, event, outcome):
    first, waited = right(storage, holder), []
    first.take()
    if event == "gives back":
        first.give_back()

    def wait(seconds):
        waited.append(seconds)
        if event == "beats":
            first._beat(1, len(waited))

    second = right(storage, lease_s=30.0)
    monkeypatch.setattr(writer_lease.time, "sleep", wait)
    if "lives" in outcome:
        with pytest.raises(errors.CheckpointExistsError, match=outcome):
            second.take()
        first.check()
        return
    second.take()
    assert [sum(waited) >= 30.0, bool(waited)] == [outcome == "after 30 s"] * 2
    if event != "gives back":
        with pytest.raises(errors.CheckpointExistsError, match=f"process {os.getpid()}"):
            first.check()


def test_of_two_that_come_at_once_one_has_the_right(storage, monkeypatch):
    first, second = right(storage), right(storage, replace(HERE, nonce="second"))
    interpose(monkeypatch, MemoryStorage, "write", "*/writer-00000001.json", second.take)
    first.take()
    first.check()
    with pytest.raises(errors.CheckpointExistsError, match="since this manager opened it"):
        second.check()


def test_a_step_that_is_committed_after_its_writer_was_overtaken_keeps_what_was_told_of_it(storage):
    first = writer_of(storage)
    place = first.begin(1, metrics={"loss": 1}, metadata={"who": "first"})
    second = writer_of(storage, max_to_keep=1)
    save_step(second, storage, 2, NEW)
    save_step(second, storage, 3, NEXT)
    assert not list(storage.list("step-00000001/step-info-"))  # as a crash would have left it
    Place(first.root.open(place.name)).save(OLD, 2)
    first.finish(place, True)
    found = look(root_of(storage), settings().names).steps[1]
    assert (found.info.metrics, found.info.metadata) == ({"loss": 1.0}, {"who": "first"})


def test_a_read_only_manager_writes_nothing(tmp_path):
    writer = manager_of(tmp_path)
    writer.save(1, state(1))
    reader = CheckpointManager(tmp_path, read_only=True)
    assert not reader.should_save(1)
    for call in (
        lambda: reader.save(2, state()),
        lambda: reader.save_async(2, state(), force=True),
        lambda: reader.delete(1),
        lambda: reader.rewind(0),
        lambda: reader.tag(1, "mine"),
    ):
        with pytest.raises(errors.InvalidRequestError, match="read_only"):
            call()
    assert reader.restore("latest", state()).step == 1
    reader.close()
    writer.save(2, state(2))
    writer.close()


# --- readers ------------------------------------------------------------------------------------


def announce(storage, attempt="0123456789abcdef"):
    """Announces a deletion of step 1, as one that is decided now, or was left by a crash."""
    mark = Announced(1, attempt, "step-00000001")
    storage.write(f"{FOLDER}/{mark.key}", b"")
    return mark


def test_a_reader_on_another_machine_keeps_its_step_as_long_as_it_beats(storage, monkeypatch):
    root = root_of(storage)
    now = [0.0]
    monkeypatch.setattr(reader_leases, "time", SimpleNamespace(monotonic=lambda: now[0]))
    readers = Readers(lease_s=30.0, holder=HERE)
    reader = ReaderLease(root, 7, lease_s=30.0, holder=ELSEWHERE)
    reader.__enter__()
    shared = root.shared
    assert readers.is_live(shared, reader._key)
    now[0] = 29.0
    reader._beat(1)
    assert readers.is_live(shared, reader._key)
    now[0] = 58.0
    assert readers.is_live(shared, reader._key)
    now[0] = 60.0
    assert not readers.is_live(shared, reader._key)
    dead = ReaderLease(root, 7, lease_s=30.0, holder=GONE)
    dead.__enter__()
    assert not readers.is_live(shared, dead._key)
    assert shared.list("reading/") == []


def test_a_manager_whose_run_was_moved_says_so(tmp_path):
    manager = manager_of(tmp_path / "run")
    manager.save(1, state(1))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(errors.CheckpointExistsError, match="the directory was moved, deleted"):
        manager.save(2, state(2))
    manager.close()
    with manager_of(tmp_path / "moved") as other:
        other.save(2, state(2))
        assert other.all_steps() == [1, 2]


def test_follow_gives_each_new_newest_step_and_keeps_it_meanwhile(tmp_path):
    manager = manager_of(tmp_path, max_to_keep=1)
    reader = CheckpointManager(tmp_path, read_only=True)
    todo = iter([(1, 2), (3,), ()])

    def train(_seconds):
        for step in next(todo):
            manager.save(step, state(step))
        manager.join()

    reader._wait = train
    seen = []
    for step in reader.follow(poll_s=0.0, timeout_s=60.0):
        found = state()
        reader.restore(step, found)
        seen.append((step, found["w"][0].item()))
        assert list(Path(tmp_path, FOLDER, "reading").glob(f"{step}.*"))
        if step == 3:
            break
    assert seen == [(2, 2.0), (3, 3.0)]
    assert list(reader.follow(newer_than=3, timeout_s=0.0, poll_s=0.0)) == []
    assert not list(Path(tmp_path, FOLDER).glob("reading/*"))
    manager.close()


def test_follow_gives_the_steps_that_are_saved_after_a_rewind(tmp_path):
    manager = manager_of(tmp_path)
    reader = CheckpointManager(tmp_path, read_only=True)

    def train() -> Iterator[None]:
        for step in (2, 4, 6):
            manager.save(step, state(step))
        yield
        manager.rewind(4)
        yield  # Step 4 is the newest again, but not new.
        for step in (5, 6):
            manager.save(step, state(step))
            yield

    training = train()
    reader._wait = lambda _seconds: next(training)
    followed = reader.follow(poll_s=0.0, timeout_s=60.0)
    assert [next(followed) for _ in range(3)] == [6, 5, 6]
    followed.close()
    manager.close()
    with pytest.raises(errors.InvalidRequestError, match="newer_than must be a step"):
        next(reader.follow(newer_than="4"))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["write", "beat", "end", "twice"])
def test_a_reader_that_is_interrupted_leaves_no_lease(tmp_path, monkeypatch, when):
    manager = manager_of(tmp_path)
    manager.save(1, state(1))
    write, renewed = LocalStorage.write, reader_leases.renewed
    begun: list[Callable[[int], bool]] = []

    def write_and_stop(storage, key, *given, **more):
        write(storage, key, *given, **more)
        if key.startswith("reading/"):
            interrupt()

    def renewed_and_stop(beat: Callable[[int], bool], _every_s: float) -> None:
        begun.append(beat)
        interrupt()

    if when == "write":
        monkeypatch.setattr(LocalStorage, "write", write_and_stop)
    elif when == "beat":
        monkeypatch.setattr(reader_leases, "renewed", renewed_and_stop)
    else:
        monkeypatch.setattr(reader_leases, "renewed", lambda *given: renewed(*given) and interrupt)
    if when == "twice":
        monkeypatch.setattr(LocalStorage, "delete", interrupt)
    with pytest.raises(KeyboardInterrupt), manager.reading(1):
        pass
    monkeypatch.undo()
    assert not any(beat(1) for beat in begun), "the thread began, and nobody can stop it"
    left = list(Path(tmp_path, FOLDER).glob("reading/*"))
    assert len(left) == (when == "twice")
    manager.delete(1)  # What is left protects nothing in its own process.


def test_a_restore_whose_caller_has_left_takes_no_lease(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    manager.save(1, state(1))
    late: list[Callable[[], object]] = []

    def begin(work: Callable[[], object], _name: str) -> None:
        late.append(work)
        interrupt()

    monkeypatch.setattr(background, "begin", begin)
    with pytest.raises(KeyboardInterrupt):
        manager.restore("latest", state())
    monkeypatch.undo()
    late[0]()
    assert not list(Path(tmp_path, FOLDER).glob("reading/*"))
    manager.delete(1)


def test_a_step_whose_save_is_interrupted_twice_can_be_saved_again(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)

    def run_save(*_given, **_more):
        monkeypatch.setattr(background, "begin", interrupt)
        interrupt()

    monkeypatch.setattr(collective_actions, "run_save", run_save)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, state(1))
    monkeypatch.undo()
    assert manager.save(1, state(1))
    manager.close()


def test_a_manager_whose_close_is_interrupted_is_closed_by_the_next(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    manager.save(1, state(1))
    monkeypatch.setattr(background, "begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    monkeypatch.undo()
    manager.close()
    assert list(Path(tmp_path, FOLDER).glob("writer-*.released"))
    with pytest.raises(errors.InvalidRequestError, match="is closed"):
        manager.save(2, state(2))


# --- deletion -----------------------------------------------------------------------------------


def test_a_step_that_is_saved_again_while_its_deletion_is_decided_is_not_deleted(
    storage, monkeypatch
):
    writer = writer_of(storage, max_to_keep=1)
    save_step(writer, storage, 1, OLD)
    # The deletion of step 1 was announced, nothing protected it, and now it is committed.
    record = "*/step-00000001/manifest-00000002.json"
    begun = interpose(
        monkeypatch, MemoryStorage, "write", record, lambda: writer.begin(1, replace=True)
    )
    save_step(writer, storage, 2, NEW)
    writer.finish(begun[0], False)  # what was to replace it was never saved
    assert list(look(root_of(storage), settings().names).steps) == [1, 2]


def test_a_replacing_save_that_fails_leaves_the_tags_of_what_stands(tmp_path):
    manager = manager_of(tmp_path, max_to_keep=1)
    manager.save(1, state(1), tags=["good"])
    manager.save(2, state(2))
    for tags in ((), ["good", "other"]):
        with pytest.raises(errors.CheckpointError):
            manager.save(1, {"w": torch.ones(2, device="meta")}, replace=True, tags=tags)
        assert manager.step_info(1).tags == {"good"}
    manager.save(3, state(3))
    manager.join()
    assert manager.all_steps() == [1, 3]
    manager.save(1, state(1), replace=True, tags=["other"])
    assert manager.step_info(1).tags == {"good", "other"}
    manager.close()


@pytest.mark.parametrize("what", ["reading", "tags"])
def test_what_protects_a_step_is_there_before_deletions_are_aborted(storage, monkeypatch, what):
    """Else a deletion that is announced in between would not see it."""
    writer = writer_of(storage)
    save_step(writer, storage, 1, OLD)
    seen = interpose(
        monkeypatch, MemoryStorage, "list", "*deleting/1.*",
        lambda: len(storage.list(f"{FOLDER}/{what}/1.")), times=None,
    )  # fmt: skip
    if what == "tags":
        writer.tag(1, "good")
    else:
        read_by_another(root_of(storage))
    assert seen == [1]


def test_what_was_announced_before_another_deletion_is_deleted_no_more_after(storage):
    writer = writer_of(storage)
    root = root_of(storage)
    attempt = save_step(writer, storage, 1, OLD)
    save_step(writer, storage, 2, NEW)
    mark = announce(storage)  # nothing protected it, and its record is on its way
    writer.delete(2)
    with pytest.raises(errors.CheckpointExistsError, match="its deletion was aborted"):
        delete(root.below(mark.name), opener=root.opener, attempt=mark.attempt, expected=attempt)
    assert 1 in look(root, settings().names).steps


def refuse_records(monkeypatch, kind):
    """Lets the storage take no record of a kind; returns those that were to be written."""
    refused, writes = [], MemoryStorage.write

    def write(self, key, data, **how):
        if "/manifest-" in key and isinstance(record := manifest.decode_record(data), kind):
            refused.append(record)
            raise errors.StorageError("the network is gone")
        return writes(self, key, data, **how)

    monkeypatch.setattr(MemoryStorage, "write", write)
    return refused


def test_a_writer_that_could_not_end_a_deletion_does_so_before_it_saves(storage, monkeypatch):
    attempt = save_step(writer_of(storage), storage, 1, OLD)
    root, mark = root_of(storage), announce(storage)
    writer = writer_of(storage)
    refuse_records(monkeypatch, manifest.AbortRecord)
    with pytest.raises(errors.StorageError, match="the network is gone"):
        writer.begin(3)
    monkeypatch.undo()
    writer.begin(3)
    with pytest.raises(errors.CheckpointExistsError, match="its deletion was aborted"):
        delete(root.below(mark.name), opener=root.opener, attempt=mark.attempt, expected=attempt)


def test_a_reader_that_could_not_end_a_deletion_keeps_nothing(storage, monkeypatch):
    save_step(writer_of(storage), storage, 1, OLD)
    announce(storage)
    refuse_records(monkeypatch, manifest.AbortRecord)
    with pytest.raises(errors.StorageError, match="the network is gone"):
        read_by_another(root_of(storage))
    assert [e.key for e in storage.list(FOLDER) if "reading/" in e.key] == []


@pytest.mark.parametrize("call", [{"step": 2}, {"step": 4, "tags": ["a tag"]}])
def test_a_call_that_is_refused_makes_no_room_for_a_save(storage, call):
    writer = writer_of(storage, max_to_keep=2)
    for step in (1, 2):
        save_step(writer, storage, step, OLD)
    writer.finish(writer.begin(3), False, no_space=True)
    with pytest.raises(errors.InvalidRequestError):
        writer.begin(**call)
    assert list(writer.look().steps) == [1, 2]
    writer.begin(4)
    assert list(writer.look().steps) == [2]


def test_the_record_of_a_deletion_that_failed_deletes_nothing_when_it_arrives(storage, monkeypatch):
    writer = writer_of(storage)
    root = root_of(storage)
    attempt = save_step(writer, storage, 1, OLD)
    late = refuse_records(monkeypatch, manifest.DeleteRecord)
    with pytest.raises(errors.StorageError):
        writer.delete(1)
    monkeypatch.undo()
    folder = root.below("step-00000001")
    with pytest.raises(errors.CheckpointExistsError, match="its deletion was aborted"):
        delete(folder, opener=root.opener, attempt=late[0].attempt, expected=attempt)
    assert list(look(root, settings().names).steps) == [1]


def test_who_loses_the_right_between_look_and_record_deletes_nothing(storage, monkeypatch):
    """Also where an announced deletion can't be ended, as nothing is created only if absent."""
    unsafe = UnconditionalStorage(storage)
    writer = writer_of(unsafe)
    save_step(writer, unsafe, 1, OLD)
    other = right(unsafe, replace(HERE, nonce="other"))
    taken = interpose(monkeypatch, MemoryStorage, "list", "*reading/1.", other.take, after=True)
    with pytest.raises(errors.CheckpointExistsError, match="since this manager opened it"):
        writer.delete(1)
    assert taken
    assert list(look(root_of(unsafe), settings().names).steps) == [1]


def read_by_another(root):
    lease = ReaderLease(root, 1, lease_s=30.0, holder=HERE)
    lease.__enter__()
    return lease


@pytest.mark.parametrize("protect", ["lease", "tag"])
@pytest.mark.filterwarnings("ignore:.*about to be deleted:UserWarning")
def test_without_conditional_create_what_is_protected_before_the_record_stands(
    storage, monkeypatch, protect
):
    """The deleter lies still between its look at tags and leases and its record."""
    unsafe = UnconditionalStorage(storage)
    writer = writer_of(unsafe)
    save_step(writer, unsafe, 1, OLD)

    def protected():
        if protect == "lease":
            assert "about to be deleted" in read_by_another(root_of(unsafe)).unsure
        else:
            writer.tag(1, "fine")

    done = interpose(monkeypatch, MemoryStorage, "list", "*tags/1.", protected, after=True)
    with pytest.raises(errors.CheckpointExistsError, match="its deletion was aborted"):
        writer.delete(1)
    assert done
    assert list(look(root_of(unsafe), settings().names).steps) == [1]


def test_without_conditional_create_tag_and_lease_say_what_they_cannot_promise(storage):
    """The deleter has looked for its announcement, and its record is on its way."""
    told = []

    def between(key):
        if key == "step-00000001/manifest-00000002.json" and not told:
            told.append(read_by_another(root_of(storage_now)).unsure)
            writer.root.shared.write(mark.key, b"")
            with pytest.warns(UserWarning, match="still happens"):
                writer.tag(1, "fine")

    mark = Announced(1, "0123456789abcdef", "step-00000001")
    storage_now = UnconditionalStorage(storage, between=between)
    writer = writer_of(storage_now)
    save_step(writer, storage_now, 1, OLD)
    writer.delete(1)
    assert "still happens" in told[0]
    # Nothing is announced: whoever deletes later sees the lease, and nothing is left open.
    save_step(writer, storage_now, 1, NEW)
    assert read_by_another(root_of(storage_now)).unsure == ""


# --- the catalogue ------------------------------------------------------------------------------


def test_a_step_whose_record_is_damaged_is_listed_not_counted_and_not_deleted(tmp_path, caplog):
    manager = manager_of(tmp_path, max_to_keep=1)
    manager.save(1, state(1))
    manager.close()
    Path(tmp_path, FOLDER, CATALOGUE).unlink()
    (record,) = tmp_path.glob("step-*/manifest-*.json")
    record.write_bytes(record.read_bytes().replace(b"manifest", b"mannifest", 1))
    manager = manager_of(tmp_path, max_to_keep=1)
    for step in (2, 3):
        manager.save(step, state(step))
    manager.join()
    assert manager.all_steps() == [1, 3]
    assert "is not known" in caplog.text
    with pytest.raises(errors.DamagedCheckpointError):
        manager.restore(1, state())
    manager.close()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b'{"digest":"', None, "traversal", "low", pytest.param(10**400, id="large")],
)
def test_an_info_that_is_not_what_was_written_is_damaged(damage):
    info = StepInfo(step=1, created_s=2.0, metrics={"loss": 1.0}, items={"model": "model.3"})
    data = encode_info(info)
    assert b"order_s" not in data
    later = replace(info, order_s=3.5)
    assert [decode_info(data), decode_info(encode_info(later))] == [info, later]
    row = CatalogueRow("step-1", 1, 1, "0" * 16, 2.0, later)
    assert decode_catalogue(encode_catalogue([row])) == [row]
    if damage is None:
        damage = data.replace(b"1.0", b"1.5")
    elif damage == "traversal":
        damage = encode_info(replace(info, items={"model": "../../etc"}))
    elif not isinstance(damage, bytes):
        damage = encode_info(replace(info, metrics={"loss": damage}))
    with pytest.raises(errors.DamagedCheckpointError):
        decode_info(damage)


def test_the_catalogue_file_saves_reading_and_nothing_depends_on_it(storage):
    root, names = root_of(storage), settings().names
    writer = writer_of(storage)
    for step in (1, 2, 3):
        save_step(writer, storage, step, OLD, metrics={"loss": step}, tags=["a"])
    first = look(root, names)
    assert first.num_read == 3
    write_catalogue(root, first)
    second = look(root, names)
    assert (second.num_read, second.steps, second.tags) == (0, first.steps, first.tags)
    save_step(writer, storage, 4, NEW)
    save_step(writer, storage, 2, NEW, replace=True, metrics={"loss": 9})
    writer.delete(3, force=True)
    third = look(root, names)
    assert list(third.steps) == [1, 2, 4]
    assert third.steps[2].info.metrics == {"loss": 9.0}
    key = f"{FOLDER}/{CATALOGUE}"
    storage.write(key, storage.read(key)[:-9] + b"12345678\n")
    assert look(root, names).steps == third.steps
    # A folder that was removed and saved to again begins at the same slot.
    storage.delete([e.key for e in storage.list("step-00000001/")])
    save_step(writer_of(storage, order="any"), storage, 1, NEW, metrics={"loss": 2})
    found = look(root, names, third).steps[1]
    assert (found.last_slot, found.info.metrics) == (third.steps[1].last_slot, {"loss": 2.0})


def test_a_step_that_was_deleted_halfway_is_not_there_whatever_the_catalogue_says(storage):
    root, names = root_of(storage), settings().names
    writer = writer_of(storage)
    for step in (1, 2):
        save_step(writer, storage, step, OLD)
    write_catalogue(root, look(root, names))
    place = root.below(names.name_of(1))
    stands = Fault(operation="delete", error=5)
    with Script([stands]) as script:
        report = delete(place, opener=lambda target: script.wrap(root.opener(target)))
    assert report.warnings  # its files are there, and the record that it was deleted
    assert [*root.opener(place).list("chunks.")]
    assert list(look(root, names).steps) == [2]


def test_a_deletion_that_fails_disturbs_no_save_and_is_done_by_a_later_one(storage, caplog):
    fails = Fault(operation="delete", key="step-00000001/*", error=5, times=2)
    with Script([fails]) as script:
        wrapped = script.wrap(storage)
        writer = writer_of(wrapped, max_to_keep=1)
        save_step(writer, wrapped, 1, OLD)
        save_step(writer, wrapped, 2, NEW)
        assert folders_of(storage) == {"step-00000001", "step-00000002", FOLDER}
        assert caplog.text.count("could not be deleted") == 1
        writer.close()
    save_step(writer_of(storage, max_to_keep=1), storage, 3, NEW)
    assert folders_of(storage) == {"step-00000003", FOLDER}


def test_a_step_whose_commit_was_decided_against_is_not_there(tmp_path):
    """The abort record in the slot below decides, whatever a record above it says."""
    step = tmp_path / "step-00000001"
    with ray_dcp.CheckpointManager(tmp_path, save_interval=1) as manager:
        manager.save(1, {"w": torch.ones(2)})
    data = (step / manifest.record_key(1)).read_bytes()
    attempt = manifest.decode_record(data).attempt
    (step / manifest.record_key(2)).write_bytes(data)
    late = manifest.encode_record(
        manifest.AbortRecord(attempt=attempt, reason="it was late", rank=None)
    )
    (step / manifest.record_key(1)).write_bytes(late)
    (tmp_path / FOLDER / CATALOGUE).unlink(missing_ok=True)
    with ray_dcp.CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == []
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.load({"w": torch.ones(2)}, checkpoint_id=step)


# --- what can't be read is not decided on ---------------------------------------------------------

KEEPS_BEST = LatestN(1) | BestN(1, "loss")
LOSSES = {1: 0.1, 2: 0.9, 3: 0.5}


def best_manager_of(path, **given) -> CheckpointManager:
    return manager_of(path, **{"retention": KEEPS_BEST, **given})


def crashed_run(path: Path) -> Path:
    """Returns the info of the best step of a run whose process died before its catalogue."""
    with best_manager_of(path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), metrics={"loss": LOSSES[step]})
    (path / FOLDER / CATALOGUE).unlink()
    (info,) = path.glob("step-00000001/step-info-*.json")
    return info


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_the_best_step_stays_when_what_was_told_of_it_is_damaged(tmp_path, caplog, damage):
    info = crashed_run(tmp_path)
    data = info.read_bytes()
    info.write_bytes(
        {"flip": flipped(data, len(data) // 2), "truncate": data[:40], "empty": b""}[damage]
    )
    with best_manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert 1 in manager.all_steps()
        manager.save(4, state(4), metrics={"loss": 0.7})
        manager.join()
        # The others go as ever: the best of those that are known stays, and the newest.
        assert manager.all_steps() == [1, 3, 4]
        found = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert [("step-00000001" in one.getMessage()) for one in found] == [True]
        assert "stays" in found[0].getMessage()
        info.write_bytes(data)
        manager.save(5, state(5), metrics={"loss": 0.8})
        manager.join()
        assert manager.all_steps() == [1, 5]


@pytest.mark.parametrize("what", ["step-info-", "manifest-"])
def test_one_read_that_gives_another_byte_changes_nothing(tmp_path, monkeypatch, caplog, what):
    crashed_run(tmp_path)
    real, left = LocalStorage.read, [1]

    def read(self, key, *where):
        data = real(self, key, *where)
        if left and "step-00000001" in f"{self.url}/{key}" and what in key:
            left.pop()
            return flipped(data, len(data) // 2)
        return data

    monkeypatch.setattr(LocalStorage, "read", read)
    with best_manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert left == []
        assert manager.all_steps() == [1, 3]
        assert manager.best_step() == 1
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_what_is_not_known_is_not_known_to_the_next_process_either(tmp_path):
    crashed_run(tmp_path).write_bytes(b"")
    for step in (3, 4):
        with best_manager_of(tmp_path) as manager:
            manager.save(step, state(step), metrics={"loss": LOSSES[3]})
            manager.join()
            assert 1 in manager.all_steps()


def test_an_info_that_was_listed_and_is_gone_makes_no_step_go(tmp_path, monkeypatch):
    crashed_run(tmp_path)
    gone, key = KeyMissingError("gone"), "*/step-00000001/step-info-*"
    interpose(monkeypatch, LocalStorage, "read", key, gone, times=None)
    with best_manager_of(tmp_path) as manager:
        manager.save(3, state(3), metrics={"loss": LOSSES[3]})
        manager.join()
        assert 1 in manager.all_steps()


# --- leases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b'{"pid": ', b"\xff\xfe"])
def test_a_writer_lease_that_cannot_be_read_is_not_taken(storage, content):
    first = writer_of(storage)
    first.begin(1)
    (key,) = [entry.key for entry in storage.list(f"{FOLDER}/writer-")]
    storage.write(key, content)
    with pytest.raises(errors.CheckpointExistsError, match=r"can't be read.*takeover=True"):
        writer_of(storage).begin(2)
    first.begin(2)
    writer_of(storage, takeover=True).begin(3)


def test_a_readers_lease_that_cannot_be_read_keeps_its_step(storage, caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reader_leases, "time", SimpleNamespace(monotonic=lambda: now[0]))
    readers = Readers(lease_s=30.0, holder=HERE)
    shared = root_of(storage).shared
    shared.write("reading/1.abc", b"{")
    for now[0] in (0.0, 29.0, 31.0, 1e6):
        assert readers.is_live(shared, "reading/1.abc")
    assert [one.getMessage().count("reading/1.abc") for one in caplog.records] == [1]
    assert "remove" in caplog.text


def test_a_process_that_proc_hides_lives(monkeypatch):
    """As with /proc mounted with hidepid=2, and a process of another user."""
    hidden = replace(HERE, pid=2**22 + 3, started="7")

    def kill(pid, number):
        assert (pid, number) == (hidden.pid, 0)
        raise PermissionError

    assert hidden.lives_here(HERE) is False
    monkeypatch.setattr(os, "kill", kill)
    assert hidden.lives_here(HERE) is True


# --- names that somebody else gave --------------------------------------------------------------

STRAYS = (
    f"{FOLDER}/writer-00000001 (conflicted copy).json",
    f"{FOLDER}/writer-x.json",
    f"{FOLDER}/writer-00000001-LAPTOP.beat",
    f"{FOLDER}/writer-",
    f"{FOLDER}/tags/1.",
    f"{FOLDER}/tags/x.best",
    f"{FOLDER}/tags/1 (conflicted copy).best",
    f"{FOLDER}/notes/1 (conflicted copy).txt",
    f"{FOLDER}/reading/x",
    f"{FOLDER}/reading/2 (conflicted copy).abc",
    f"{FOLDER}/deleting/1",
    f"{FOLDER}/deleting/1.0123456789abcdef.step-00000001 (conflicted copy)",
    f"{FOLDER}/catalogue (conflicted copy).json",
    "step-00000001 (conflicted copy)/manifest-00000001.json",
    "step-00000001/manifest-00000001 (conflicted copy).json",
    "step-00000001/step-info-00000000 (conflicted copy).json",
    "step-00000001/manifest-x.json",
    "step-x/manifest-00000001.json",
    "step-00000002/model (conflicted copy)/manifest-00000001.json",
    "step-00000002/model.x/__0_0.distcp",
)


def test_stray_files_of_a_sync_tool_stop_nothing_and_stay(tmp_path):
    for step in (1, 2):
        with best_manager_of(tmp_path, retention=LatestN(2)) as manager:
            manager.save(step, state(step), metrics={"loss": 1})
    for stray in STRAYS:
        (tmp_path / stray).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / stray).write_bytes(b"?")
    before = {one.name for one in tmp_path.iterdir()}
    with best_manager_of(tmp_path, retention=LatestN(2)) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore("auto", state()).step == 2
        with manager.reading(2):
            manager.save(3, state(3), metrics={"loss": 1})
        manager.save(3, state(4), metrics={"loss": 1}, replace=True)
        manager.tag(3, "fine")
        manager.join()
        assert manager.all_steps() == [2, 3]
        manager.delete(2)
    run = ray_dcp.open(tmp_path)
    assert [one.step for one in run if one.state == "committed"] == [3]
    assert ray_dcp.verify(run["latest"].url).ok
    assert ray_dcp.load_newest(state(), tmp_path).step == 3
    kept = [one for one in STRAYS if "/deleting/" not in one]
    changed = [one for one in kept if (tmp_path / one).read_bytes() != b"?"]
    assert changed == []
    assert {one.name for one in tmp_path.iterdir()} == before | {"step-00000003"}


# --- deletions ----------------------------------------------------------------------------------


def test_a_deletion_that_cannot_read_a_record_deletes_nothing(storage):
    """The record may be what ends the deletion, or commit another checkpoint."""
    writer = writer_of(storage)
    attempt = save_step(writer, storage, 1, OLD)
    folder = writer.root.below("step-00000001")
    key = "step-00000001/manifest-00000002.json"
    storage.write(key, b"?")
    for how in ({"expected": attempt}, {"expected": attempt, "attempt": "0123456789abcdef"}):
        with pytest.raises(errors.DamagedCheckpointError, match="manifest-00000002"):
            delete(folder, opener=writer.root.opener, **how)
    storage.delete([key])
    assert list(writer.look().steps) == [1]


def test_who_copies_a_live_run_is_told_whose_lease_the_copy_has_and_how_to_take_it(tmp_path):
    parent = os.getppid()
    alive = replace(this_process(), pid=parent, started=_started(parent))
    run, copy = tmp_path / "run", tmp_path / "copy"
    with best_manager_of(run) as manager:
        manager.save(1, state(1), metrics={"loss": 1})
    lease = WriterLease(root_of(LocalStorage(run)), holder=alive)
    lease.take()
    shutil.copytree(run, copy)
    refused = rf"lease of process {parent} .*writes to {run}\. If this is a copy.*takeover=True"
    with (
        best_manager_of(copy) as manager,
        pytest.raises(errors.CheckpointExistsError, match=refused),
    ):
        manager.save(2, state(2), metrics={"loss": 1})
    with best_manager_of(copy, takeover=True) as manager:
        assert manager.save(2, state(2), metrics={"loss": 1})
    lease.check()
    with (
        best_manager_of(run) as manager,
        pytest.raises(errors.CheckpointExistsError, match="is written"),
    ):
        manager.save(2, state(2), metrics={"loss": 1})


def test_an_item_with_a_record_that_cannot_be_read_goes_with_its_step(tmp_path):
    options = {"items": {"model": Item(), "ema": Item()}, "retention": LatestN(1)}
    with best_manager_of(tmp_path, **options) as manager:
        manager.save(1, {name: state(1) for name in options["items"]})
        (tmp_path / "step-00000001" / "model" / "manifest-00000001.json").write_bytes(b"?")
        manager.save(2, {name: state(2) for name in options["items"]})
        manager.join()
        assert manager.all_steps() == [2]
        assert not list(tmp_path.glob("step-00000001/*/*.distcp"))
        assert manager.restore("latest", {"ema": state()}).step == 2
