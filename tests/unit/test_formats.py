"""Items of torch.save, headers of safetensors and records: read back, and refused if wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import zstandard

from ray_dcp import (
    DamagedCheckpointError,
    InvalidRequestError,
    UnsupportedValueError,
    errors,
)
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.format import manifest as mf
from ray_dcp.format import safetensors as sf
from ray_dcp.format import torch_items
from ray_dcp.format.torch_items import (
    ZSTD,
    NeedMoreBytes,
    NotPlainTensor,
    check_directory,
    check_plain,
    parse_torch_save,
    torch_save_frame,
    unpacked_item,
)
from tests.support.checkpoints import sharding_metadata
from tests.support.format_cases import saved

SIZES = [(), (0,), (3,), (2, 3), (0, 4), (4, 0), (2, 0, 3), (1, 2, 3, 4, 5), (300, 233)]


HERE = [name for name in torch_items.ITEMSIZE if hasattr(torch, name)]
"""Those that this torch has."""


def quiet_empty(size, dtype):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 and quantised dtypes warn when made.
        return torch.empty(size, dtype=dtype)


def savable_dtypes():
    found = set()
    for dtype in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}:
        try:
            tensor = quiet_empty((2,), dtype)
            torch.save(tensor, io.BytesIO())
        except (KeyError, RuntimeError, NotImplementedError):
            continue
        found.add(str(dtype).removeprefix("torch."))
    return found


def framed(dtype, size):
    num_bytes = math.prod(size) * torch_items.ITEMSIZE[dtype]
    payload = np.random.default_rng(0).integers(0, 2, num_bytes, dtype=np.uint8).tobytes()
    frame = torch_items.torch_save_frame(dtype, size)
    return frame.header + payload + frame.footer, payload


def test_every_dtype_that_torch_saves_raw_has_a_frame_and_torch_s_itemsize():
    assert savable_dtypes() == set(HERE)
    for name in HERE:
        assert getattr(torch, name).itemsize == torch_items.ITEMSIZE[name]


@pytest.mark.parametrize("dtype", HERE)
def test_torch_loads_a_framed_tensor_as_if_it_had_saved_it(dtype):
    for size in SIZES:
        item, payload = framed(dtype, size)
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        like = quiet_empty(size, getattr(torch, dtype))
        assert (loaded.dtype, loaded.shape) == (like.dtype, like.shape)
        assert loaded.stride() == like.stride()
        assert not loaded.requires_grad
        raw = torch.empty(0, dtype=torch.uint8).set_(loaded.untyped_storage())
        assert raw.numpy().tobytes() == payload


FOUR_GIB = 1 << 32
LARGE = [
    (FOUR_GIB - 1024,), (FOUR_GIB - 1,), (3, FOUR_GIB),
]  # fmt: skip


@pytest.mark.parametrize("size", LARGE)
def test_frames_beyond_4_gib_are_valid_zips(size, tmp_path):
    frame = torch_items.torch_save_frame("uint8", size)
    payload_bytes = math.prod(size)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(frame.header)
        file.seek(len(frame.header) + payload_bytes)
        file.write(frame.footer)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert info.file_size == info.compress_size == payload_bytes
        with archive.open(info) as record:
            # Careful: the position after opening is where the raw bytes begin.
            assert record._orig_compress_size == payload_bytes
            assert archive.fp is not None
        assert archive.read("archive/version") == b"3\n"
    found = torch_items.parse_torch_save(frame.header, path.stat().st_size)
    assert (found.size, found.payload_offset) == (size, len(frame.header))
    assert found.payload_bytes == payload_bytes
    os.unlink(path)


def test_tensors_that_can_t_be_framed_are_refused():
    with pytest.raises(UnsupportedValueError, match="found 'qint8'"):
        torch_items.torch_save_frame("qint8", (3,))
    for size in [(-1,), (1 << 40, 1 << 40), (0, 1 << 60, 1 << 60)]:
        with pytest.raises(InvalidRequestError):
            torch_items.torch_save_frame("float32", size)


# Items as torch saves them


def rebuilt(item, found):
    dtype = getattr(torch, found.dtype)
    raw = bytearray(item[found.payload_offset : found.payload_offset + found.payload_bytes])
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, found.storage_offset, found.size, found.stride)


BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.T,
    "stepped": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(4, 6),
    "parameter": torch.nn.Parameter(BASE),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "float8": BASE.to(torch.float8_e4m3fn).T,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_strided_tensor_that_stock_torch_saved_is_found_without_unpickling(name):
    view = VIEWS[name].detach()
    item = saved(VIEWS[name])
    found = parse_torch_save(item[:1024], len(item))
    assert rebuilt(item, found).tolist() == view.tolist()
    assert (found.size, found.stride) == (tuple(view.shape), view.stride())
    whole = view.untyped_storage().nbytes() == view.numel() * view.itemsize
    assert found.is_contiguous == (view.is_contiguous() and whole)


def repacked(item, order, *, method=zipfile.ZIP_STORED, replace=None):
    """The item as a zip with other records: sizes stand in the local headers."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in order:
            new.writestr(
                f"archive/{name}", (replace or {}).get(name) or old.read(f"archive/{name}")
            )
    return out.getvalue()


def test_items_of_older_torch_without_the_newer_records_are_found():
    item = saved(BASE.T)
    for order in [
        ("data.pkl", "data/0", "version"),
        ("data.pkl", "byteorder", "data/0", "version"),
        ("data.pkl", "version", "data/0"),
    ]:
        old = repacked(item, order)
        found = parse_torch_save(old, len(old))
        assert torch.equal(rebuilt(old, found), BASE.T)


def test_a_head_that_is_too_short_says_how_much_to_read_and_then_succeeds():
    item = saved(torch.zeros(3, 4, 5, 6))
    whole = parse_torch_save(item, len(item))
    for length in range(0, whole.payload_offset, 7):
        head, found, asked = item[:length], None, []
        while found is None and len(asked) < 3:
            try:
                found = parse_torch_save(head, len(item))
            except NeedMoreBytes as error:
                asked.append((len(head), error.num_bytes))
                head = item[: error.num_bytes]
        assert found == whole
        assert all(had < wanted <= len(item) for had, wanted in asked)


class Subclass(torch.Tensor):
    pass


NOT_PLAIN = {
    "object": lambda: {"a": 1},
    "subclass": lambda: torch.zeros(3).as_subclass(Subclass),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_no_plain_tensor_is_left_to_torch(name):
    item = saved(NOT_PLAIN[name]())
    with pytest.raises(NotPlainTensor):
        parse_torch_save(item, len(item))


def test_a_compressed_or_big_endian_item_is_left_to_torch():
    item = saved(BASE)
    order = ("data.pkl", "byteorder", "data/0", "version")
    for other in (
        repacked(item, order, method=zipfile.ZIP_DEFLATED),
        repacked(item, order, replace={"byteorder": b"big"}),
        repacked(item, ("data/0", "data.pkl")),
        with_pickle(b"\x80\x02X\x00\x00\x20\x00" + b"x" * (2 << 20) + b"."),
    ):
        with pytest.raises(NotPlainTensor):
            parse_torch_save(other, len(other))


def with_pickle(data):
    return repacked(saved(BASE), ("data.pkl", "data/0"), replace={"data.pkl": data})


def view_pickle(size=(4, 6), stride=(6, 1), offset=0, count=24):
    def ints(values):
        return b"(" + b"".join(b"J" + v.to_bytes(4, "little", signed=True) for v in values) + b"t"

    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuJ" + count.to_bytes(4, "little", signed=True) + b"tQ"
        b"J" + offset.to_bytes(4, "little", signed=True) + ints(size) + ints(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": (5, 6)}, {"stride": (7, 1)}, {"offset": 1}, {"offset": -1}, {"size": (-4, 6)},
        {"stride": (-6, 1)}, {"stride": (6,)}, {"count": 25}, {"count": 2_000_000_000},
        {"count": -24}, {"size": (2_000_000_000,) * 3, "stride": (0,) * 3},
    ],
)  # fmt: skip
def test_a_view_outside_its_storage_is_damage(wrong):
    item = with_pickle(view_pickle(**wrong))
    with pytest.raises((DamagedCheckpointError, NotPlainTensor)):
        parse_torch_save(item, len(item))


@pytest.mark.parametrize("size", [(3,), (1 << 33,)])
def test_a_directory_that_says_anything_else_is_damage(size):
    frame = torch_save_frame("uint8", size)
    item_bytes = len(frame.header) + size[0] + len(frame.footer)
    check_directory(frame.footer, item_bytes)
    errors = 0
    for at in range(len(frame.footer)):
        wrong = bytearray(frame.footer)
        wrong[at] ^= 0xFF
        for data, num_bytes in ((wrong, item_bytes), (wrong[:at], item_bytes - len(wrong) + at)):
            try:
                check_directory(bytes(data), num_bytes)
            except DamagedCheckpointError:
                errors += 1
    # What nobody reads may be anything: names, versions, times, CRCs and attributes.
    assert errors > len(frame.footer) + 80
    entry = frame.footer.rindex(b"PK\1\2")
    assert int.from_bytes(frame.footer[entry + 20 : entry + 24], "little") in (3, 0xFFFFFFFF)
    shorter = frame.footer[: entry + 20] + b"\2\0\0\0" + frame.footer[entry + 24 :]
    for data, num_bytes in ((frame.footer, item_bytes + 1), (shorter, item_bytes)):
        with pytest.raises(DamagedCheckpointError):
            check_directory(data, num_bytes)


# Undoing the zstd of stock DCP's items


ITEM = b"PK\x03\x04" + bytes(range(256)) * 9000


def streamed(data):
    """As DCP writes: frames that do not tell the length of what is in them."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("stored", "layers"),
    [
        (ITEM, 0),
        (streamed(ITEM), 1),
        (zstandard.compress(ITEM), 1),
        (streamed(streamed(ITEM)), 2),
        (streamed(ITEM[:70_000]) + streamed(ITEM[70_000:]), 1),
    ],
    ids=["plain", "zstd", "zstd of told length", "zstd twice", "two frames"],
)
def test_an_item_comes_back(stored, layers):
    assert bytes(unpacked_item(memoryview(stored), [ZSTD] * layers)) == ITEM


def test_what_metadata_does_not_call_compressed_is_not_unpacked():
    stored = streamed(ITEM)
    assert unpacked_item(stored, ()) is stored
    for other in (stored, b"", b"P", b"garbage", ITEM[::-1]):
        told = rf"torch\.save.*{other[:4].hex() or 'nothing'}.*_extension_registry"
        with pytest.raises(DamagedCheckpointError, match=told):
            check_plain(other)


NO_ZSTD = (b"garbage", b"\x28\xb5\x2f\xfd", ITEM, *(streamed(ITEM)[:cut] for cut in (5, 100, -1)))
BOMB = zstandard.compress(b"PK" + bytes(64 << 20))


@pytest.mark.parametrize(
    ("stored", "transforms", "told"),
    [
        *((stored, [ZSTD], "compressed with zstd") for stored in NO_ZSTD),
        *((streamed(ITEM), [*more, name], rf"{name!r}.*_extension_registry")
          for more, name in (([], "stream.mine/1"), ([ZSTD], "stream.mine/1"), ([], ""))),
        (streamed(ITEM), [ZSTD] * 5, "at most 4 layers"),
        (BOMB, [ZSTD], "at most 1000000 bytes"),
    ],
)  # fmt: skip
def test_what_is_not_unpacked_is_refused_in_little_memory(stored, transforms, told):
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match=told):
            unpacked_item(stored, transforms, max_bytes=1_000_000 if stored is BOMB else 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_header_keeps_the_payload_aligned_and_the_small_records_carry_their_crc():
    for dtype, size in [("float32", (3,)), ("uint16", (1, 2, 3, 4, 5)), ("bool", ())]:
        item, _ = framed(dtype, size)
        frame = torch_items.torch_save_frame(dtype, size)
        assert len(frame.header) % torch_items.FRAME_ALIGNMENT == 0
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            names = [info.filename for info in archive.infolist()]
            assert names[-1] == "archive/data/0"
            assert archive.read("archive/byteorder") == b"little"
            assert archive.read("archive/version") == b"3\n"
            assert archive.read("archive/data.pkl").endswith(b".")
            assert archive.getinfo("archive/data/0").CRC == 0


def raw(fields):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


def packed(tensors):
    """Entries and data of tensors, one after the other."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        piece = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            sf.TensorEntry(name, dtype, tuple(tensor.shape), len(data), len(data) + len(piece))
        )
        data += piece
    return entries, data


TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 3, dtype=torch.int64),
    "ü": torch.arange(5, dtype=torch.int8),
}


def test_a_header_is_read_back_and_its_data_is_aligned():
    entries, data = packed(TENSORS)
    metadata = sharding_metadata(dict.fromkeys(TENSORS, (7,)))
    header = sf.header(entries, metadata)
    assert len(header) % sf.DATA_ALIGNMENT == 0
    found = sf.parse_header(header + data, len(header) + len(data))
    assert set(found.entries) == set(entries)
    assert found.data_offset == len(header)
    assert found.metadata == metadata
    assert sf.saved_offsets(found.metadata) == dict.fromkeys(TENSORS, (7,))
    assert sf.saved_offsets({}) is None


def test_dtypes_that_safetensors_lacks_are_refused():
    for dtype in set(ITEMSIZE) - set(sf.ALL_CODES):
        with pytest.raises(UnsupportedValueError, match="leave it out"):
            sf.header([("x", dtype, (1,), 0, ITEMSIZE[dtype])])


def test_a_short_head_says_how_much_to_read():
    header = sf.header([("a", "int8", (3,), 0, 3)])
    for length in (0, 7, 8, 100, len(header) - 1):
        with pytest.raises(NeedMoreBytes) as caught:
            sf.parse_header(header[:length], len(header) + 3)
        assert length < caught.value.num_bytes <= len(header)


GOOD = {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}
WRONG = {
    "a list": [],
    "no JSON": b"{{{{",
    "no utf-8": b"\xff\xff\xff",
    "a number as entry": {"a": 5},
    "unknown dtype": {"a": {**GOOD, "dtype": "F99"}},
    "list as dtype": {"a": {**GOOD, "dtype": []}},
    "no shape": {"a": {"dtype": "I8", "data_offsets": [0, 3]}},
    "float shape": {"a": {**GOOD, "shape": [3.0]}},
    "one offset": {"a": {**GOOD, "data_offsets": [0]}},
    "other length": {"a": {**GOOD, "data_offsets": [0, 4]}},
    "metadata list": {"__metadata__": []},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_contradicts_itself_is_damage(name):
    assert sf.parse_header(raw({"a": GOOD})).entries[0].size == (3,)
    with pytest.raises(DamagedCheckpointError):
        sf.parse_header(raw(WRONG[name]))


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
