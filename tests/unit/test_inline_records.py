"""What tasks find and leave in the slots of a place."""

import pytest

from ray_dcp.errors import CheckpointExistsError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record, record_key
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.commands import (
    CreateAbort,
    CreateRecord,
    Failed,
    Published,
    PublishMetadata,
    ReadRecord,
    ReadRecords,
    RecordCreated,
    SlotFree,
    SlotTaken,
)
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.records import standing_records
from ray_dcp.runtime.tasks import new_attempt, perform
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import StorageTraits
from tests.inline_ranks import run_ranks
from tests.numpy_ranks import load_and_check, save, save_ranks, state_of


@pytest.fixture
def storage(request):
    return MemoryStorage(request.node.name.replace("[", "-").replace("]", ""))


def abort(attempt):
    return encode_record(AbortRecord(attempt=attempt, reason="test", rank=None))


class CountingStorage:
    """Counts the keys that are read."""

    def __init__(self, inner):
        self.inner, self.keys = inner, []
        self.url, self.traits, self.list, self.write = (
            inner.url, inner.traits, inner.list, inner.write
        )  # fmt: skip

    def read(self, key, *where):
        self.keys.append(key)
        return self.inner.read(key, *where)


def test_metadata_of_a_later_commit_is_never_overwritten_by_a_save_that_lay_still(storage):
    save(state_of(1), 1, storage.url)
    save(state_of(2), 1, storage.url)
    later = storage.read(".metadata")
    late = perform(PublishMetadata(Target(storage.url), 1, b"old"))
    assert late == Published(superseded=True)
    assert storage.read(".metadata") == later
    assert perform(PublishMetadata(Target(storage.url), 2, later)) == Published()


def test_a_record_is_created_once_and_read_back_after(storage):
    target = Target(storage.url)
    assert perform(ReadRecord(target, 1)) == SlotFree(1)
    assert perform(CreateAbort(target, 1, "a1", "why", 3)) == RecordCreated(1)
    taken = SlotTaken(1, "a1", True, storage.read("manifest-00000001.json"))
    assert perform(CreateRecord(target, 1, abort("a2"))) == taken
    assert perform(CreateAbort(target, 1, "a3", "why", None)) == taken
    assert decode_record(taken.record) == AbortRecord(attempt="a1", reason="why", rank=3)


def test_a_storage_that_can_not_create_if_absent_is_asked_first(storage):
    class Plain(CountingStorage):
        def __init__(self, inner):
            super().__init__(inner)
            self.traits = StorageTraits(create_if_absent=False, durable=False, shared=False)
            self.write = self.only_overwrite

        def only_overwrite(self, key, data, *, create=False):
            if create:
                raise StorageError("this storage can't", key=key)
            self.inner.write(key, data)

    task = CreateAbort(Target(storage.url), 1, "a1", "why", None, create_if_absent=False)
    assert perform(task, lambda _: Plain(storage)) == RecordCreated(1)
    other = CreateRecord(Target(storage.url), 1, abort("a2"), create_if_absent=False)
    assert perform(other, lambda _: Plain(storage)).attempt == "a1"


def test_only_the_records_that_can_decide_are_read(storage):
    records = [save(state_of(step), 1, storage.url)[0].manifest for step in range(6)]
    for slot, record in enumerate(records, 1):
        storage.write(record_key(slot), record)
    perform(CreateAbort(Target(storage.url), 7, "x", "why", None))
    counting = CountingStorage(storage)
    found = standing_records(counting)
    assert (found.last_slot, found.slot) == (7, 6)
    assert counting.keys == ["manifest-00000007.json", "manifest-00000006.json"]


def test_an_abort_below_a_manifest_of_the_same_attempt_decides(storage):
    (first,) = save(state_of(1), 1, storage.url)
    (second,) = save(state_of(2), 1, storage.url)
    # As before the second one removed what it replaced.
    storage.write("manifest-00000001.json", first.manifest)
    storage.write("manifest-00000004.json", second.manifest)
    storage.write("manifest-00000002.json", abort(second.attempt))
    storage.write("manifest-00000003.json", abort("other"))
    found = standing_records(storage)
    assert (found.last_slot, found.slot) == (4, 1)
    assert found.manifest.attempt == first.attempt


def test_a_damaged_record_does_not_stop_a_save_but_one_that_must_not_overwrite(storage):
    save(state_of(1), 1, storage.url)
    storage.write("manifest-00000002.json", b"rubbish")
    kept = run_ranks(save_ranks(state_of(2), 1, storage.url, options=SaveOptions(overwrite=False)))
    assert "unreadable records in slots [2]" in kept[0].error.message
    assert type(kept[0].error) is CheckpointExistsError
    (outcome,) = save(state_of(2), 1, storage.url)
    assert outcome.slot == 3
    assert "slot 2 can't be read" in outcome.warnings[0]
    load_and_check(state_of(2), 2, storage.url)


def test_a_slot_whose_record_is_damaged_is_an_error_and_no_free_slot(storage):
    storage.write("manifest-00000001.json", b"rubbish")
    result = perform(CreateRecord(Target(storage.url), 1, abort("a1")))
    assert isinstance(result, Failed)
    assert isinstance(result.error, DamagedCheckpointError)


def test_a_new_place_holds_nothing(storage):
    found = perform(ReadRecords(Target(storage.url)))
    assert (found.last_slot, found.committed, found.replaced) == (0, None, ())


def test_attempts_are_never_the_same():
    assert len({new_attempt() for _ in range(1000)}) == 1000
