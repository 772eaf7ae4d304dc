import io
import pickle
import zipfile

import pytest
import torch

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format.torch_items import (
    NeedMoreBytes,
    NotPlainTensor,
    check_directory,
    parse_torch_save,
    torch_save_frame,
)
from tests.format_cases import saved


def rebuilt(item, found):
    dtype = getattr(torch, found.dtype)
    raw = bytearray(item[found.payload_offset : found.payload_offset + found.payload_bytes])
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, found.storage_offset, found.size, found.stride)


BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.T,
    "sliced": BASE[1:, 2:4],
    "stepped": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(4, 6),
    "parameter": torch.nn.Parameter(BASE),
    "buffer": torch.nn.Parameter(BASE, requires_grad=False)[1:],
    "0-d": BASE[3, 5],
    "half": BASE.half(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "uint32": torch.arange(5).to(torch.uint32)[2:],
    "float8": BASE.to(torch.float8_e4m3fn).T,
    "wide": torch.zeros(70000, dtype=torch.int64)[69999:],
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


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_and_an_empty_shape_is_found(dtype):
    for size in [(), (3,), (0, 4), (1, 2, 3, 4, 5)]:
        value = torch.empty(size, dtype=getattr(torch, dtype))
        item = saved(value)
        found = parse_torch_save(item, len(item))
        assert (found.dtype, found.size, found.stride) == (dtype, size, value.stride())
        assert found.is_contiguous


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


def test_need_more_bytes_crosses_processes_with_its_number():
    error = pickle.loads(pickle.dumps(NeedMoreBytes("more", num_bytes=9, key="k")))
    assert (error.num_bytes, error.key) == (9, "k")


class Subclass(torch.Tensor):
    pass


NOT_PLAIN = {
    "object": lambda: {"a": 1},
    "number": lambda: 5,
    "list": lambda: [torch.zeros(2)],
    "subclass": lambda: torch.zeros(3).as_subclass(Subclass),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.zeros(3, device="meta"),
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


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", "os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.", "builtins.eval"),
        (b"\x80\x02c__builtin__\nexec\n.", "__builtin__.exec"),
        (b"\x80\x02csubprocess\nPopen\n.", "subprocess.Popen"),
        (b"\x80\x02ctorch.hub\nload\n.", "torch.hub.load"),
        (b"\x80\x02cbuiltins\ngetattr\n.", "builtins.getattr"),
    ],
)
def test_an_item_that_asks_for_code_is_named(data, name):
    item = with_pickle(data)
    with pytest.raises(UnsafeCheckpointError) as caught:
        parse_torch_save(item, len(item))
    assert caught.value.key == name


def view_pickle(size=(4, 6), stride=(6, 1), offset=0, count=24):
    def ints(values):
        return b"(" + b"".join(b"J" + v.to_bytes(4, "little", signed=True) for v in values) + b"t"

    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuJ" + count.to_bytes(4, "little", signed=True) + b"tQ"
        b"J" + offset.to_bytes(4, "little", signed=True) + ints(size) + ints(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


def test_the_pickle_that_the_next_test_damages_is_a_good_one():
    older = view_pickle().replace(b"tensor_v2", b"tensor")
    older = older.replace(b"\x89ccollections\nOrderedDict\n)R", b"")
    for data in (view_pickle(), older):
        item = with_pickle(data)
        assert torch.equal(rebuilt(item, parse_torch_save(item, len(item))), BASE)


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


@pytest.mark.parametrize(
    "data",
    [
        view_pickle() + b"x",
        view_pickle().replace(b"FloatStorage", b"float32"),
        b"\x80\x02" + b"(" * 5000 + b"t" * 5000 + b".",
        b"\x80\x02)" + b"\x85" * 100_000 + b".",
        b"\x80\x02)q\0" + b"h\0h\0\x86q\0" * 200 + b"Q.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)" + b"\x85" * 100_000 + b"R.",
        b"\x80\x02h\x07.",
        b"\x80\x02t.",
        b"\x80\x02R.",
        b"\x80\x02X\xff\xff\xff\x7fab.",
        b"\x80\x02cos",
        b"\x80\x02\xff.",
        b"\x80\x05N.",
    ],
)
def test_a_hostile_pickle_ends_in_an_error_of_ours(data):
    item = with_pickle(data)
    with pytest.raises(CheckpointError):
        parse_torch_save(item, len(item))


def test_an_item_cut_short_is_damage():
    item = saved(BASE)
    with pytest.raises(DamagedCheckpointError):
        parse_torch_save(item[:750], 750)
    with pytest.raises(DamagedCheckpointError, match="zip record"):
        parse_torch_save(b"#" * 2000, 2000)


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
