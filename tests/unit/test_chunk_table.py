"""Chunk tables: read back equal, refused if they lie, and read in parts if they are in groups."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import (
    CheckpointError,
    DamagedCheckpointError,
    DeadlineError,
    LoadOptions,
    SaveOptions,
    UnsafeCheckpointError,
)
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.columns import MOST_RATIO
from ray_dcp.core.values import IntKey, Kind
from ray_dcp.format import table as table_format
from ray_dcp.format import table as tb
from ray_dcp.format.manifest import encode_record, record_key
from ray_dcp.format.table import check_table, decode_table, encode_table, end_of
from ray_dcp.io.checkpoint import checkpoint_from, newest_record, read_checkpoint
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.memory import MemoryStorage
from tests.support import checkpoints
from tests.support.arrays import same_state, sample_state
from tests.support.format_cases import difference, forged, many_table, mixed_table, slabs, table_of
from tests.support.world import load_ranks, load_state, run_ranks, save_state


def planned():
    """A table as planned: a deferred chunk without place."""
    table = mixed_table()
    place = table.item_offset.copy()
    place[5] = -1
    return dataclasses.replace(
        table,
        item_offset=place,
        payload_offset=np.where(place < 0, -1, table.payload_offset),
    )


def wide():
    """Padded to more columns than any tensor has, unused vocabulary."""
    table = table_of([("w", None, Kind.TENSOR, "int8", (3,), False, [((0,), (3,), 0)])])
    return dataclasses.replace(
        table,
        dtypes=("float32", "int8", "bool"),
        dtype=np.array([1], dtype=np.int8),
        files=("unused", *table.files),
        file=np.array([1], dtype=np.int32),
        shape=np.array([[3, 1, 1]]),
        offset=np.array([[0, 0, 0]]),
        size=np.array([[3, 1, 1]]),
    )


TABLES = {
    "planned": planned,
    "wide": wide,
    "many": lambda: many_table(300),
    "odd names": lambda: table_of(
        [(name, (name, -3, 0, "0", ""), Kind.TENSOR, "int8", (1,), False, [((0,), (1,), 0)])
         for name in ("", "a.b", "ü\u4e2d\n", "x" * 5000, "[0]", "\x00")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_back_with_equal_values_types_and_order(name):
    table = TABLES[name]()
    data = tb.encode_table(table)
    assert difference(tb.decode_table(data), table) == []
    assert tb.encode_table(table) == data


def test_a_number_as_a_key_in_a_path_is_not_its_text_nor_an_index():
    table = changed(mixed_table(), paths=(("m", IntKey(7), "7", 7), *mixed_table().paths[1:]))
    (path, *_) = tb.decode_table(tb.encode_table(table)).paths
    assert (path, [*map(type, path)]) == (("m", "7", "7", 7), [str, IntKey, str, int])


def changed(table, **arrays):
    return dataclasses.replace(table, **arrays)


def at(array, index, value):
    array = array.copy()
    array[index] = value
    return array


WRONG = {
    "tensor index too large": lambda t: changed(t, tensor=at(t.tensor, 0, t.num_tensors)),
    "file index too large": lambda t: changed(t, file=at(t.file, 0, 2)),
    "box beyond its tensor": lambda t: changed(t, offset=at(t.offset, (4, 0), 4)),
    "box before its tensor": lambda t: changed(t, offset=at(t.offset, (4, 0), -1)),
    "overflowing box": lambda t: changed(t, offset=at(t.offset, (4, 0), 2**63 - 1)),
    "a place in padding": lambda _: changed(wide(), offset=np.array([[0, 1, 0]])),
    # Why opaque: else the length of its raw bytes would give it away.
    "a size in padding": lambda _: changed(
        wide(), kind=np.array([Kind.OPAQUE], np.int8), size=np.array([[3, 0, 1]])
    ),
    "negative shape": lambda t: changed(t, shape=at(t.shape, (0, 0), -6)),
    "huge shape": lambda t: changed(t, shape=at(t.shape, (5, slice(None)), 1 << 40)),
    "payload of another length": lambda t: changed(
        t, payload_bytes=at(t.payload_bytes, 0, 52), item_bytes=at(t.item_bytes, 0, 9999)
    ),
    "payload outside its item": lambda t: changed(t, payload_offset=at(t.payload_offset, 5, 0)),
    "item beyond 2**63": lambda t: changed(t, item_offset=at(t.item_offset, 0, 2**63 - 8)),
    "unknown kind": lambda t: changed(t, kind=at(t.kind, 0, 3)),
    "unknown dtype": lambda t: changed(t, dtypes=("float99", *t.dtypes[1:])),
    "tensor without dtype": lambda t: changed(t, dtype=at(t.dtype, 0, -1)),
    "ndim too large": lambda t: changed(t, ndim=at(t.ndim, 0, 6)),
    "negative block": lambda t: changed(t, block_bytes=at(t.block_bytes, 0, -1)),
    "one name twice": lambda t: changed(t, names=(t.names[1], *t.names[1:])),
    "one file twice": lambda t: changed(t, files=(t.files[0],) * 2),
    "columns of different length": lambda t: changed(t, file=t.file[:-1]),
    "missing path": lambda t: changed(t, paths=t.paths[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table_that_contradicts_itself_is_neither_written_nor_believed(name):
    check_table(mixed_table())
    with pytest.raises(DamagedCheckpointError):
        check_table(WRONG[name](mixed_table()))
    with pytest.raises(DamagedCheckpointError):
        tb.encode_table(WRONG[name](mixed_table()))


def test_rows_in_another_order_than_their_files_are_not_written():
    table = many_table(6)
    turned = changed(table, file=table.file[::-1].copy())
    check_table(turned)
    with pytest.raises(DamagedCheckpointError, match="in the order of their files"):
        tb.encode_table(turned)


def test_a_file_outside_the_checkpoint_is_unsafe():
    with pytest.raises(UnsafeCheckpointError):
        check_table(changed(mixed_table(), files=("../x", "y")))


def number(part, column, row, value):
    """An edit of one number of a stored table."""

    def edit(stored):
        getattr(stored, part)[column][row] = value

    return edit


def field(**values):
    return lambda stored: stored.fields.update(values)


def row_number(column, value):
    return lambda stored: stored.groups[0][column].__setitem__(0, value)


MOST = (1 << 63) - 1
PATHS = [list(path) if path else None for path in mixed_table().paths]

STORED_WRONG = {
    "no version": lambda stored: stored.fields.pop("version"),
    "names of nonsense": field(names=[1] * 8),
    "no names": lambda stored: stored.fields.pop("names"),
    "a path of nonsense": field(paths=[{}, *PATHS[1:]]),
    "a number of nonsense in a path": field(paths=[[1 << 64], *PATHS[1:]]),
    "a key that is no number": field(keys=[[0, 0]]),
    "a file more": field(files=["a", "b", "c"]),
    "width of nonsense": field(width=1 << 40),
    "more boxes": field(boxes=1 << 40),
    "digests of nonsense": field(digests="x"),
    "other digests": field(digests="00" * 32),
    "a kind beyond a byte": number("about", 0, 0, 300),
    "a truth value of two": number("about", 3, 0, 2),
    "a row beyond 32 bits": row_number(0, 1 << 40),
    "fewer rows of a file": number("runs", 0, 0, 3),
    "rows without end": number("runs", 0, 0, MOST),
    "a group that begins later": number("index", 0, 0, 1),
    "more deferred rows": number("index", 1, -1, 1),
    "more checksums": number("index", 2, -1, 99),
    "a group beyond the file": number("index", 3, -1, MOST),
    "a box of another group": number("boxes", 0, 0, 1),
    "a box of less": number("boxes", 7, 0, 1),
    "a box before its tensor": number("boxes", 2, 0, -1),
}


@pytest.mark.parametrize("name", STORED_WRONG)
def test_a_stored_table_that_contradicts_itself_is_damage(name):
    data = tb.encode_table(mixed_table())
    assert forged(data, lambda stored: None) == data
    with pytest.raises(DamagedCheckpointError, match="load an earlier step"):
        tb.decode_table(forged(data, STORED_WRONG[name]))


def test_a_newer_version_says_to_upgrade_and_is_not_called_damaged():
    data = forged(tb.encode_table(mixed_table()), field(version=tb.FORMAT_VERSION + 1))
    with pytest.raises(CheckpointError, match="upgrade ray_dcp") as caught:
        tb.decode_table(data)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_table_beyond_the_longest_is_refused_before_it_is_read(monkeypatch):
    data = tb.encode_table(many_table(30))
    monkeypatch.setattr(tb, "MAX_TABLE_BYTES", len(data))
    tb.decode_table(data)
    monkeypatch.setattr(tb, "MAX_TABLE_BYTES", len(data) - 1)
    with pytest.raises(DamagedCheckpointError, match="at most"):
        tb.decode_table(data)


def test_memory_stays_within_a_multiple_of_the_length():
    """Of a table that packs as well as one can: all of its rows are alike."""
    table = checkpoints.large_table(2, 4000, "0" * 16, files=1)
    data = tb.encode_table(table)
    assert len(data) < 2 * table.num_chunks
    tracemalloc.start()
    try:
        tb.decode_table(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * MOST_RATIO * len(data)


WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(table_format, "GROUP_ROWS", 3)


tables = st.builds(
    slabs,
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=4),
    st.lists(st.just(0), max_size=2),
)


@settings(max_examples=25)
@given(tables, st.integers(1, 12))
def test_a_table_in_groups_is_read_back_whole(table, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_format, "GROUP_ROWS", least)
        data = encode_table(table)
    assert difference(decode_table(data), table) == []
    grouped = end_of(data) is not None
    # Groups have whole files.
    assert grouped == (len(table.files) > 1 and table.num_chunks > least and several(table, least))


def several(table, least):
    first = np.searchsorted(table.file, np.arange(len(table.files)))
    return len(np.unique(first[first < table.num_chunks] // least)) > 1


def same_reads(part, whole, wanted):
    """Checks that a part of a table leads to the same reads as all of it."""
    mine, theirs = plan_reads(part, wanted), plan_reads(whole, wanted)
    assert mine.uncovered == theirs.uncovered
    for name in ("wanted", "offset", "size"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    for name in ("file", "item_offset", "payload_offset", "payload_bytes", "tensor"):
        np.testing.assert_array_equal(
            getattr(part, name)[mine.chunk], getattr(whole, name)[theirs.chunk]
        )


# --- whole checkpoints ---------------------------------------------------------------------------


class Counting(MemoryStorage):
    """Tells how many bytes of which file were read."""

    def __init__(self, name):
        super().__init__(name)
        self.reads = []

    def read(self, key, start=0, num_bytes=None):
        data = super().read(key, start, num_bytes)
        self.reads.append((key, len(data)))
        return data

    def of_table(self):
        return sum(length for key, length in self.reads if key.endswith(".table"))


@pytest.fixture
def saved(small_groups):
    """A checkpoint of 8 ranks with a table in groups."""
    storage = Counting("table-groups")
    storage.delete([entry.key for entry in storage.list()])
    save_state(storage, sample_state(3), 8, options=WITHOUT)
    storage.reads.clear()
    return storage


def opened(storage):
    slot, record, _ = newest_record(storage)
    return checkpoint_from(storage, "native", slot, record, checks_later=True)


@pytest.mark.parametrize("world_size", [1, 3, 8, 11])
def test_it_loads_on_any_number_of_ranks(saved, world_size):
    manifest = newest_record(saved).manifest
    assert manifest.table_end.num_bytes < manifest.table.num_bytes
    assert same_state(sample_state(3), load_state(saved, sample_state(3), world_size))


def test_a_rank_reads_its_part_of_the_table_alone(saved):
    whole = read_checkpoint(saved).table
    saved.reads.clear()
    checkpoint = opened(saved)
    assert checkpoint.tensors.names == whole.names
    assert checkpoint.tensors.num_chunks == 0
    end = newest_record(saved).manifest.table_end.num_bytes
    assert saved.of_table() == end
    number = whole.names.index("big")
    # A few columns of it, which one rank had.
    wanted = Wanted(
        np.array([number], np.int32), np.array([[0, 1]]), np.array([[67, 2]]), np.array([8])
    )
    part = checkpoint.narrow([wanted], [])
    assert checkpoint.table is part
    assert 0 < part.num_chunks < whole.num_chunks / 2
    assert saved.of_table() < newest_record(saved).manifest.table.num_bytes
    same_reads(part, whole, wanted)
    # Checksums of the files that it has, and of no other.
    checkpoint.know_checks()
    for row in range(part.num_chunks):
        alike = ("file", "item_offset", "tensor")
        (same,) = np.flatnonzero(
            np.all([getattr(whole, name) == getattr(part, name)[row] for name in alike], axis=0)
        )
        low, high = whole.check_start[same : same + 2]
        mine = part.checks[part.check_start[row] : part.check_start[row + 1]]
        np.testing.assert_array_equal(mine, whole.checks[low:high])
        assert mine.any() or not high > low
    # Narrowed once, it stays so.
    assert checkpoint.narrow([], []) is part


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_damaged_group_is_told_by_who_needs_it(saved):
    manifest = newest_record(saved).manifest
    key, data = manifest.table.key, saved.read(manifest.table.key)
    checkpoint = opened(saved)
    index = checkpoint.chunks._table.index
    last = index.num_groups - 1
    saved.write(key, flipped(data, int(index.start[last]) + 5))
    whole_names = checkpoint.tensors.names
    first = Wanted(
        np.array([whole_names.index("big")], np.int32), np.array([[0, 0]]), np.array([[67, 1]]),
        np.array([8]),
    )  # fmt: skip
    assert index.around([first], []).max() < last
    assert opened(saved).narrow([first], []).num_chunks
    with pytest.raises(DamagedCheckpointError, match="other bytes"):
        _ = opened(saved).table
    with pytest.raises(DamagedCheckpointError):
        load_state(saved, sample_state(3), 2)
    with pytest.raises(DamagedCheckpointError, match="digest"):
        read_checkpoint(saved)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_a_data_file_that_is_gone_is_damage_and_named(tmp_path, verify):
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path, no_dist=True)
    (gone,) = tmp_path.glob("*.distcp")
    gone.unlink()
    options = ray_dcp.LoadOptions(verify=verify)
    with pytest.raises(DamagedCheckpointError, match=rf"{gone.name}.*no such file"):
        ray_dcp.load({"w": torch.zeros(9)}, checkpoint_id=tmp_path, no_dist=True, options=options)


@pytest.mark.parametrize("harm", ["end", "short", "long", "missing", "cut later"])
def test_a_damaged_end_is_told_by_everybody(saved, harm):
    manifest = newest_record(saved).manifest
    key, data = manifest.table.key, saved.read(manifest.table.key)
    if harm == "cut later":
        checkpoint = opened(saved)
        saved.write(key, data[: len(data) // 8])
        with pytest.raises(DamagedCheckpointError, match="cut off"):
            _ = checkpoint.table
        return
    if harm == "missing":
        saved.delete([key])
    else:
        other = {"short": data[:-1], "long": data + b"x", "end": flipped(data, len(data) - 60)}
        saved.write(key, other[harm])
    with pytest.raises(DamagedCheckpointError, match=r"no such file|last"):
        opened(saved)


def resigned(storage, change):
    """Writes another manifest, with a good digest."""
    slot, _, manifest = newest_record(storage)
    storage.write(record_key(slot), encode_record(change(manifest)))


def test_an_end_that_lies_is_damage(saved):
    manifest = newest_record(saved).manifest
    data = saved.read(manifest.table.key)

    def end(num_bytes):
        part = data[len(data) - num_bytes :]
        entry = replace(manifest.table_end, num_bytes=num_bytes, digest=digest_bytes(part).hex())
        return lambda one: replace(one, table_end=entry)

    true = manifest.table_end.num_bytes
    # Shorter: its tensors' rows are not in it. Longer: a group is. None: all of it is.
    for num_bytes in (true - 100, true + 1, len(data), 0):
        resigned(saved, end(num_bytes))
        with pytest.raises(DamagedCheckpointError):
            _ = opened(saved).table
    resigned(
        saved, lambda one: replace(one, table_end=replace(manifest.table_end, num_bytes=1 << 40))
    )
    with pytest.raises(DamagedCheckpointError):
        opened(saved)
    resigned(saved, lambda one: replace(manifest, num_chunks=one.num_chunks + 1))
    with pytest.raises(DamagedCheckpointError, match="chunks"):
        opened(saved)


def test_a_folder_of_it_can_be_looked_at_verified_loaded_and_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(table_format, "GROUP_ROWS", 1)
    state = {f"w{i}": torch.arange(30.0) + i for i in range(6)} | {"step": 7, "o": {"lr": 0.5}}
    options = SaveOptions(part_bytes=1, num_threads=3)
    ray_dcp.save(state, checkpoint_id=tmp_path, options=options)
    (table,) = tmp_path.glob("chunks.*.table")
    assert end_of(table.read_bytes()) is not None
    wanted = {f"w{i}": torch.zeros(30) for i in range(6)} | {"step": 0, "o": {"lr": 0.0}}
    ray_dcp.load(wanted, checkpoint_id=tmp_path)
    assert all(torch.equal(wanted[name], state[name]) for name in state if name[0] == "w")
    assert (wanted["step"], wanted["o"]) == (7, {"lr": 0.5})
    some = {"w3": torch.zeros(30)}
    ray_dcp.load(some, checkpoint_id=tmp_path)
    assert torch.equal(some["w3"], state["w3"])
    assert ray_dcp.verify(tmp_path).ok
    assert list(ray_dcp.open(tmp_path)["w5"][:2]) == [5, 6]
    with pytest.warns(UserWarning, match="disabled"):
        torch.distributed.checkpoint.load(wanted, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="'nothing'"):
        ray_dcp.load({"nothing": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert ray_dcp.delete(tmp_path).kept == ()


# --- what must not go unseen ---------------------------------------------------------------------


WRONG_INDEX = {
    "boxes": (lambda one: one.boxes[-1].__setitem__(0, 0), "boxes around"),
    "digests": (lambda one: one.fields.update(digests="00" * 48), "other bytes"),
    "rows": (lambda one: one.index[0].__setitem__(1, 5), "whole files"),
    "fewer rows": (lambda one: one.index[0].__setitem__(-1, 8), "whole files"),
    "fewer groups": (
        lambda one: one.fields.update(digests=one.fields["digests"][:64]), "chunk table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_INDEX)
def test_an_index_that_lies_is_seen_by_who_reads_all(name, small_groups):
    """Else a fault of a writer would pass `verify` and fail every load."""
    table = slabs(3, [(9, 2)] * 4)
    wrong, told = WRONG_INDEX[name]
    data = encode_table(table)
    assert difference(decode_table(data), table) == []
    with pytest.raises(DamagedCheckpointError, match=told):
        decode_table(forged(data, wrong))


def test_reading_chunks_has_a_deadline(saved, monkeypatch):
    """All but the end of the table is behind a gate that nobody opens in time."""
    monkeypatch.setattr("ray_dcp.commit_protocol.load.MOST_SENT_BYTES", 0)
    entry = newest_record(saved).manifest
    end, gate = entry.table.num_bytes - entry.table_end.num_bytes, threading.Event()
    held = []

    class Held(Counting):
        def read(self, key, start=0, num_bytes=None):
            if key == entry.table.key and start < end and held:
                gate.wait(60)
            held.extend([key] * (key == entry.table.key and start == end))
            return super().read(key, start, num_bytes)

    try:
        ranks, _ = load_ranks(
            sample_state(3), 1, saved.url, options=LoadOptions(plan_timeout_s=1),
            opener=lambda target: Held("table-groups"),
        )  # fmt: skip
        with pytest.raises(DeadlineError, match="which chunks"):
            run_ranks(ranks)[0].get()
        assert held
    finally:
        gate.set()
