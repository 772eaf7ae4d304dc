import dataclasses
import json

import pytest

from ray_dcp import errors
from ray_dcp.format import manifest as mf

ENTRY = mf.FileEntry("__0_0.a1.distcp", 4096, "00" * 16)
MANIFEST = mf.Manifest(
    attempt="a1",
    epoch=3,
    world_size=8,
    container="torch_save",
    created_s=1.7e9 + 0.1,
    files=(ENTRY, mf.FileEntry("a1/rank-00000-part-00000.safetensors", 0, "ff" * 16)),
    table=mf.FileEntry("table.a1.table", 10, "12" * 16),
    metadata=mf.FileEntry(".metadata", 20, "34" * 16),
    replaced_metadata="56" * 16,
    plan_digest="78" * 32,
    num_tensors=2,
    num_chunks=3,
    payload_bytes=1 << 62,
    previous_slot=6,
)
ABORT = mf.AbortRecord(attempt="a2", reason="rank 3 came too late: ü", rank=3)
DELETE = mf.DeleteRecord(
    attempt="a3",
    reason="the user asked",
    created_s=1.7e9,
    replaced_metadata="56" * 16,
    previous_slot=9,
    decided=(mf.Verdict("a1", True), mf.Verdict("a2", False)),
)


def signed(fields):
    """Bytes that carry a right digest whatever they say."""
    return mf.sealed("record", fields if isinstance(fields, bytes) else mf.canonical(fields))


def fields_of(record):
    return json.loads(mf.encode_record(record))["record"]


@pytest.mark.parametrize(
    "record",
    [
        MANIFEST,
        dataclasses.replace(MANIFEST, metadata=None, replaced_metadata=None, files=()),
        DELETE,
        ABORT,
        dataclasses.replace(ABORT, rank=None, reason=""),
    ],
)
def test_a_record_is_read_back_equal_and_written_again_the_same(record):
    data = mf.encode_record(record)
    assert mf.decode_record(data) == record
    assert mf.encode_record(mf.decode_record(data)) == data
    assert json.loads(data)["record"]["attempt"] == record.attempt


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"container": "zarr"}, "found 'zarr'"),
        ({"format_version": 2, "more": 1}, "found version 2"),
    ],
)
def test_another_format_says_to_upgrade_and_is_not_called_damaged(change, told):
    with pytest.raises(errors.CheckpointError, match=f"{told}.*upgrade ray_dcp") as caught:
        mf.decode_record(signed({**fields_of(MANIFEST), **change}))
    assert not isinstance(caught.value, errors.DamagedCheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": True}, {"epoch": 1.0}, {"epoch": 1 << 63}, {"attempt": ""},
        {"attempt": "../a"}, {"attempt": 5}, {"created_s": 5}, {"files": {}}, {"files": [5]},
        {"plan_digest": "zz"}, {"plan_digest": "ABCD"}, {"kind": "other"}, {"kind": []},
        {"format_version": 0}, {"format_version": "1"}, {"more": 1}, {"num_tensors": None},
        {"table": {"key": "t", "num_bytes": 1}}, {"replaced_metadata": 5},
        {"metadata": None}, {"replaced_metadata": None},
        *({"decided": decided} for decided in (
            5, ["a"], [{"attempt": "a"}], [{"attempt": "a", "committed": 1}],
            [{"attempt": "../a", "committed": True}],
            [{"attempt": "a", "committed": True}, {"attempt": "a", "committed": False}],
        )),
        *({"files": {"keys": keys, "num_bytes": [1, 1], "digests": "00" * 32}}
          for keys in ("x\nx", "x1\nx{1..1}", "x{01..01}\nx01")),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_or_range_is_damage(change):
    with pytest.raises(errors.DamagedCheckpointError):
        mf.decode_record(signed({**fields_of(MANIFEST), **change}))


@pytest.mark.parametrize(
    "body",
    [b"5", b"[]", b"null", b"{}", b'{"a":1' + b"0" * 5000 + b"}", b"\xff", b"{",
     b'{"format_version":1,"kind":"abort" ,"attempt":"a","reason":"","rank":null}',],
)  # fmt: skip
def test_signed_nonsense_is_damage(body):
    with pytest.raises(errors.DamagedCheckpointError):
        mf.decode_record(signed(body))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"created_s": float("nan")}, {"attempt": "a/b"}, {"world_size": 2.0},
        {"table": mf.FileEntry("../x", 1, "00" * 16)}, {"created_s": 5},
        {"files": (mf.FileEntry("x", 1, "00"),)},
    ],
)  # fmt: skip
def test_a_record_that_could_not_be_read_back_is_never_written(change):
    with pytest.raises(errors.InternalError):
        mf.encode_record(dataclasses.replace(MANIFEST, **change))


def test_slots_and_their_keys():
    for slot in (1, 7, 99_999_999, 100_000_000):
        assert mf.slot_of(mf.record_key(slot)) == slot
    assert mf.record_key(1) == "manifest-00000001.json"
    for key in ("manifest-00000000.json", "manifest-1.json", "manifest-000000001.json",
                "x/manifest-00000001.json", "manifest-00000001.json.tmp", "manifest-0000000١.json",
                "manifest-00000001.json\n"):  # fmt: skip
        assert mf.slot_of(key) is None
    with pytest.raises(errors.InternalError):
        mf.record_key(0)


def commit(attempt):
    return dataclasses.replace(MANIFEST, attempt=attempt)


def abort(attempt):
    return dataclasses.replace(ABORT, attempt=attempt)


def delete(attempt, *decided):
    return dataclasses.replace(
        DELETE, attempt=attempt, decided=tuple(mf.Verdict(name, False) for name in decided)
    )


@pytest.mark.parametrize(
    ("records", "slot"),
    [
        ({}, None),
        ({1: abort("a"), 2: commit("a")}, None),
        ({1: commit("a"), 2: abort("a")}, 1),
        ({1: commit("a"), 2: abort("b"), 3: commit("b")}, 1),
        ({1: commit("a"), 2: commit("b"), 3: commit("a")}, 2),
        ({1: commit("a"), 2: delete("d")}, 2),
        ({1: delete("d"), 2: commit("b")}, 2),
        ({1: commit("a"), 2: abort("d"), 3: delete("d")}, 1),
        # What a record says of an earlier attempt counts as naming it.
        ({3: delete("d", "a"), 4: commit("a")}, 3),
        ({2: abort("d"), 3: delete("d", "a"), 4: commit("a")}, 4),
    ],
)
def test_the_first_record_that_names_an_attempt_decides_and_a_delete_as_a_commit(records, slot):
    assert mf.deciding(records) == (None if slot is None else (slot, records[slot]))


def with_files(**changes):
    names = tuple(f"__{rank}_0.a1.distcp" for rank in range(1000))
    files = mf.FilesColumns(names, tuple(range(1000)), "0f" * 16 * 1000)
    record = dataclasses.replace(MANIFEST, files=files)
    fields = fields_of(record)
    fields["files"] |= changes
    return record, signed(fields)


def test_files_are_columns_and_names_that_count_are_one_line():
    record, data = with_files()
    assert mf.encode_record(record) == data
    assert mf.decode_record(data) == record
    assert record.files[7] == mf.FileEntry("__7_0.a1.distcp", 7, "0f" * 16)
    assert fields_of(record)["files"]["keys"] == "__{0..999}_0.a1.distcp"


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        (("a", "b"), "a\nb"),
        (("a1", "a2", "a4"), "a{1..2}\na4"),
        (("a08", "a09", "a10"), "a{08..10}"),
        (("a8", "a9", "a010"), "a{8..9}\na010"),
        (("1_0", "1_1", "2_0", "2_1"), "1_{0..1}\n2_{0..1}"),
        (("x9" * 200 + "1", "x9" * 200 + "2"), "x9" * 200 + "1\n" + "x9" * 200 + "2"),
        (("9" * 20 + "1", "9" * 20 + "2"), "9" * 20 + "1\n" + "9" * 20 + "2"),
    ],
)
def test_names_are_read_back_as_they_were(keys, lines):
    files = mf.FilesColumns(keys, (5,) * len(keys), "0f" * 16 * len(keys))
    record = dataclasses.replace(MANIFEST, files=files)
    assert fields_of(record)["files"]["keys"] == lines
    assert mf.decode_record(mf.encode_record(record)).files == files


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": [*range(999), 1 << 63]},
        {"num_bytes": [*range(999), True]},
        {"digests": "0F" * 16 * 1000},
        {"keys": "\n".join(["same"] * 1000)},
        {"keys": "\n".join([*map(str, range(999)), "../x"])},
        {"keys": "../{0..999}"},
        {"keys": "x{0..1000}"},
        {"keys": "x{0..998}"},
        {"keys": "x{0..99999999999999}"},
        {"keys": "x{999..0}"},
        {"keys": "y" * 400 + "{0..999}"},
        {"more": 1},
    ],
)
def test_files_that_do_not_fit_are_damage(changes):
    with pytest.raises((errors.DamagedCheckpointError, errors.UnsafeCheckpointError)):
        mf.decode_record(with_files(**changes)[1])
