"""Files that somebody made to harm the reader: each is small, and what it asks for is not.

`python -m tests.support.hostile` decodes them one after the other and prints what came out, and the
most memory that it took; the tests run it as a process of its own.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_dcp import CheckpointError
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record, sealed, unsealed
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.format.safetensors import parse_header, saved_offsets
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.format.torch_items import ZSTD, parse_torch_save, unpacked_item
from ray_dcp.torch_adapter.objects import load_object
from tests.support.format_cases import Stored, forged, manifest, mixed_table

LIMIT_S = 60
"""How much CPU a file may take, in seconds."""
FREE_BYTES = 256 << 20
BYTES_A_BYTE = 150


def text(value: str) -> bytes:
    """A text in a pickle of protocol 2."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """A number in a pickle of protocol 2."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(dotted: str) -> bytes:
    """A class or function in a pickle of protocol 2."""
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def ops(*parts: bytes | str | int) -> bytes:
    """Opcodes, texts and numbers of a pickle of protocol 2, one after the other."""
    return b"".join(
        part if isinstance(part, bytes) else text(part) if isinstance(part, str) else number(part)
        for part in parts
    )


def call(dotted: str, *args: bytes | str | int) -> bytes:
    """A call in a pickle of protocol 2."""
    return name(dotted) + b"(" + ops(*args) + b"tR"


def item(pickled: bytes, method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """An item of torch.save whose `data.pkl` holds these opcodes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for record, data in more.items():
            archive.writestr(f"archive/{record}", data)
    return buffer.getvalue()


def encoded(value: str) -> bytes:
    """Bytes in a pickle of protocol 2."""
    return call("_codecs.encode", text(value), text("latin1"))


PLAIN = (b"K\3", b"X\1\0\0\0<", b"NNN", b"J\xff\xff\xff\xff" * 2, b"K\0")
"""The state of the dtype of a number."""


def dtype(code: str, *state: bytes) -> bytes:
    """A dtype of numpy in a state, that of a number if none is given."""
    made = call("numpy.dtype", text(code), b"\x89", b"\x88")
    return made + b"(" + b"".join(state or PLAIN) + b"tb"


def begun(start: bytes = b"K\0\x85") -> bytes:
    """An array of numpy before its state."""
    return call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), start, encoded("b"))


def array(shape: bytes, kind: bytes, values: bytes, start: bytes = b"K\0\x85") -> bytes:
    """An array of numpy."""
    return begun(start) + b"(K\1" + shape + kind + b"\x89" + values + b"tb"


LYING = (b"K\3", text("|"), b"N", b"N", b"N", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff", b"K\0")
"""The state of a dtype that says of itself that it holds no pointers."""


BIT_GENERATOR = "numpy.random._pickle.__bit_generator_ctor"


def scalar(*parts: bytes) -> bytes:
    """A scalar of numpy."""
    return call("numpy._core.multiarray.scalar", *parts)


def generator(kind: str, state: bytes) -> bytes:
    """A generator of numpy that is given a state."""
    made = call(BIT_GENERATOR, text(kind))
    return made + b"}(" + text("bit_generator") + text(kind) + text("state") + state + b"ub"


def words(**fields: bytes) -> bytes:
    """A dict of texts in a pickle."""
    return b"}(" + b"".join(text(key) + value for key, value in fields.items()) + b"u"


MANY = number(1 << 36)
DEEP = b")" + b"\x85" * 1_000_000
KEYS = array(b"M\x70\x02\x85", dtype("u4"), encoded("\0" * 2496))

OBJECT = (b"K\3", text("|"), b"NNN", b"J\xff\xff\xff\xff" * 2, b"K\x3f")
"""The state of the dtype of objects."""
BYTE = (*OBJECT[:-1], b"K\0")
"""The state of the dtype of a byte."""
ROOM = (b"K\3", text("|"), b"NNN", number(999_999_999), b"K\1", b"K\0")
"""The state of a dtype whose elements are 1 GB long."""


OF_OBJECTS = dtype("O8", *OBJECT)
OF_POINTERS = dtype("O8", *LYING)
F8 = dtype("f8")


def record(*fields: tuple[str, bytes], length: int, flags: int = 16) -> bytes:
    """A dtype with fields, all at the start."""
    names = b"(" + b"".join(text(name) for name, _ in fields) + b"t"
    inside = b"}(" + b"".join(text(name) + kind + b"K\0\x86" for name, kind in fields) + b"u"
    told = (number(length), b"K\1", number(flags))
    return dtype(f"V{length}", b"K\3", text("|"), b"N", names, inside, *told)


def seeded(entropy: bytes, pool: bytes = b"K\4", key: bytes = b")") -> bytes:
    """What generators of numpy are seeded by."""
    made = call(
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        name("numpy.random.bit_generator.SeedSequence"),
        number(65708578),
        b"N",
    )
    words = array(b"K\4\x85", dtype("u4"), encoded("\0" * 16))
    return made + b"(" + entropy + b"K\0" + words + pool + key + b"tb"


def storage(count: bytes, kind: str = "torch.FloatStorage", location: str = "cpu") -> bytes:
    """The storage `0` of an item."""
    return b"(" + text("storage") + name(kind) + text("0") + text(location) + count + b"tQ"


def view(
    size: bytes,
    stride: bytes,
    offset: bytes = b"K\0",
    count: bytes = b"K\1",
    kind: str = "torch.FloatStorage",
) -> bytes:
    """A tensor on the storage `0`."""
    on, hooks = storage(count, kind), call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", on, offset, size, stride, b"\x89", hooks)


LONGS = [view(size, size, kind="torch.LongStorage") for size in (b"K\1\x85", b"K\1K\1\x86")]
"""Tensors of one number, of one and of two dimensions."""


def on_storage(pickled: bytes, data: bytes = b"0000") -> bytes:
    """An item with one storage."""
    return item(pickled, **{"data/0": data})


def often(count: int, made: bytes, *parts: bytes) -> bytes:
    """A list of the same call many times, with what it calls and its arguments in the memo."""
    return b"](" + made + b"q\0(" + b"".join(parts) + b"tq\1" + b"h\0h\1R" * count + b"e"


def nested(levels: int, inner: bytes, begin: bytes, end: bytes) -> bytes:
    """A value in a value in …."""
    return begin * levels + inner + end * levels


PICKLES: dict[str, bytes] = {
    "objects of a shape longer than their list": array(
        ops(1 << 20, b"\x85"), OF_OBJECTS, ops(b"]N", b"a")
    ),
    "an array of fewer bytes than its shape": array(ops(1 << 30, b"\x85"), F8, encoded("A" * 8)),
    "an array without bytes of 2**61 elements": array(
        ops(1 << 61, b"\x85"),
        dtype("S0", b"K\x03", text("|"), b"NNN", b"K\x00", b"K\x01", b"K\x00"),
        encoded(""),
    ),
    "an array that holds itself": ops(
        begun(), b"q\x00(K\x01K\x01\x85", OF_OBJECTS, b"\x89]h\x00atb"
    ),
    "arrays of objects in each other": nested(
        10_000, b"N", ops(begun(), b"(K\x01K\x01\x85", OF_OBJECTS, b"\x89]"), b"atb"
    ),
    "a scalar of 1 GB": scalar(dtype("V999999999", *ROOM)),
    "records in records, wide": b"".join(
        ops(
            record(
                *(
                    (str(n), ops(b"h", bytes([level - 1])) if level else dtype("i1", *BYTE))
                    for n in range(60)
                ),
                length=1,
            ),
            b"q",
            bytes([level]),
        )
        for level in range(6)
    ),
    "generators made of one name": often(
        20_000, name("numpy.random._pickle.__generator_ctor"), text("MT19937")
    ),
    "a seed with a pool of 2**40 words": seeded(b"K\x01", pool=number(1 << 40)),
    "words of another dtype": generator(
        "MT19937",
        words(key=array(b"Mp\x02\x85", dtype("u1", *BYTE), encoded("\x00" * 624)), pos=b"K\x00"),
    ),
    "words of Python, the place behind them": ops(
        call("random.Random"), b"(K\x03(", b"K\x01" * 624, 1 << 30, b"tNtb"
    ),
    "a set a byte": b"\x8f" * 1_000_000,
    "deques made often": often(200_000, name("collections.deque")),
    "a list filled often": often(
        20_000, name("builtins.set"), ops(b"](", b"NK\x01K\x02" * 10_000, b"e")
    ),
    "a key that is wide at every depth": ops(
        "a" * 1_000_000,
        b"0(",
        b"K\x01" * 1000,
        b"tq\x00",
        b"".join(b"(" + (b"h" + bytes([n])) * 1000 + b"tq" + bytes([n + 1]) for n in range(3)),
        b"}h\x03Ns",
    ),
    "a wide key used often": ops(b"(", b"K\x01" * 4000, b"tq\x00](", b"}h\x00Ns" * 100_000, b"e"),
    "a deque that is filled when others are in each other around it": ops(
        nested(
            600,
            ops(name("collections.deque"), b")Rq\x00"),
            ops(name("collections.deque"), b"]"),
            b"a\x85R",
        ),
        b"h\x00(",
        nested(600, b"N", ops(name("collections.deque"), b"]"), b"a\x85R"),
        b"e0",
    ),
    "default dicts in each other": nested(
        30_000, b"N", ops(call("collections.defaultdict"), b"N"), b"s"
    ),
    "an attribute that shadows a method": ops(
        call("collections.OrderedDict"), b"}", "items", name("builtins.bytearray"), b"sb"
    ),
    "a year before all others": call("datetime.date", encoded("\x00\x00\x01\x01")),
    "a fraction that fills the memory": call("fractions.Fraction", "1e999999999"),
    "a stream before its first byte": ops(name("_io.BytesIO"), b")\x81(", encoded("a"), -1, b"Ntb"),
    "a value that is not complete": call("numpy.dtype", "O8", b"\x89", b"\x88"),
    "a default that calls what is not allowed": call(
        "collections.defaultdict", name("_codecs.encode")
    ),
    "a new object of a function": ops(name("_codecs.encode"), b")\x81"),
    "a list of a range": call("builtins.list", call("builtins.range", MANY)),
    "a set of a range": call("builtins.set", call("builtins.range", MANY)),
    "a deque of a range": call("collections.deque", call("builtins.range", MANY)),
    "a size of a range": call("torch.Size", call("builtins.range", MANY)),
    "bytes of a length": call("builtins.bytes", MANY),
    "a text encoded by a codec": call("_codecs.encode", "a", "zip"),
    "an array begun with a length": array(
        b"K\x01\x85", F8, encoded("\x00" * 8), start=ops(MANY, b"\x85")
    ),
    "pointers that are bytes": array(b"K\x01\x85", OF_POINTERS, encoded("A" * 8)),
    "numbers that are pointers": array(
        b"K\x01\x85", dtype("i8", *LYING[:7], b"K?"), encoded("A" * 8)
    ),
    "a field behind its record": array(
        b"K\x01\x85",
        dtype(
            "V8",
            b"K\x03",
            text("|"),
            b"N",
            ops("a", b"\x85"),
            ops(b"}", "a", dtype("i4"), 1 << 30, b"\x86s"),
            b"K\x08",
            b"K\x01",
            b"K\x10",
        ),
        encoded("A" * 8),
    ),
    "the one dtype of all objects": ops(
        call("numpy.dtypes.ObjectDType"), b"(", b"".join(LYING), b"tb"
    ),
    "a dtype that changes once it is used": ops(
        b"](",
        array(
            b"K\x01\x85",
            ops(call("numpy.dtype", "V8", b"\x89", b"\x88"), b"q\x00"),
            encoded("A" * 8),
        ),
        b"h\x00(K\x03",
        "|",
        b"N",
        "a",
        b"\x85",
        b"}",
        "a",
        dtype("O8", *LYING[:7], b"K?"),
        b"K\x00\x86s",
        b"K\x08K\x01K\x1btbe",
    ),
    "a name hidden behind a text": ops(b"](", "ctorch\n", call("builtins.bytearray", MANY), b"e"),
    "a place behind the words of MT19937": generator(
        "MT19937", words(key=KEYS, pos=number(1 << 24))
    ),
    "a place before the words of Philox": ops(
        generator("Philox", words(key=KEYS)), b"}(", "buffer_pos", -9, b"ub"
    ),
    "a key nested a million deep": ops(b"}", DEEP, b"Ns"),
    "an encoding nested a million deep": call("_codecs.encode", "a", DEEP),
    "a function of the system": call("os.system", "true"),
    "an instance": ops(b"(", "true", b"ios\nsystem\n"),
    "an object": ops(b"(", name("os.system"), "true", b"o"),
    "a name on the stack": ops("os", "system", b"\x93"),
    "an id of something else": ops("os", b"Q"),
    "a state for a class": ops(name("builtins.dict"), words(a=b"N"), b"b"),
    "a getattr": call("builtins.getattr", name("builtins.dict"), "fromkeys"),
}
"""What is in items without storages."""

ON_STORAGE: dict[str, bytes] = {
    "a state of torch's generator that is short": ops(
        call("torch._C.Generator", call("torch.device", "cpu")),
        b"(K\x01N",
        view(b"K\x01\x85", b"K\x01\x85"),
        b"tb",
    ),
    "a tensor with a negative stride": view(
        b"K\x02\x85", b"J\xff\xff\xff\xff\x85", offset=b"K\x00"
    ),
    "a tensor with hooks": call(
        "torch._utils._rebuild_parameter",
        view(b"K\x01\x85", b"K\x01\x85"),
        b"\x88",
        ops(b"}K\x00", name("builtins.bytearray"), b"s"),
    ),
    "a tensor whose data is an attribute": call(
        "torch._tensor._rebuild_from_type_v2",
        name("torch._utils._rebuild_tensor"),
        name("torch.Tensor"),
        ops(b"(", storage(b"K\x01"), b"K\x00K\x01\x85K\x01\x85t"),
        ops(b"}", "data", view(b"K\x01\x85", b"K\x01\x85"), b"s"),
    ),
    "a tensor of a function of the system": call(
        "torch._tensor._rebuild_from_type_v2",
        name("builtins.bytearray"),
        name("torch.Tensor"),
        ops(MANY, b"\x85"),
        b"}",
    ),
    "a quantised tensor of 2**36 elements": call(
        "torch._utils._rebuild_qtensor",
        storage(b"K\x04", "torch.QInt8Storage"),
        b"K\x00",
        ops(1 << 36, b"\x85"),
        b"K\x00\x85",
        ops(b"(", name("torch.per_tensor_affine"), b"G?\xf0\x00\x00\x00\x00\x00\x00K\x00t"),
        b"\x89",
        call("collections.OrderedDict"),
    ),
}
"""What is in items with one storage of four bytes."""

NESTED: dict[str, bytes] = {
    case: nested(50_000, b"N", begin, end)
    for case, begin, end in (
        ("lists", b"]", b"a"),
        ("tuples", b"", b"\x85"),
        ("dicts", b"}N", b"s"),
        ("ordered dicts", b"ccollections\nOrderedDict\n)RN", b"s"),
        ("frozen sets", b"cbuiltins\nfrozenset\n]", b"a\x85R"),
        ("counters", b"ccollections\nCounter\n)RN", b"s"),
        ("namespaces of argparse", b"cargparse\nNamespace\n)R}X\1\0\0\0a", b"sb"),
        ("namespaces", b"ctypes\nSimpleNamespace\n)R}X\1\0\0\0a", b"sb"),
    )
}
"""Values that are made, and freed: Python frees them by recursion, which has to have a bound."""

OBJECTS: dict[str, Callable[[], bytes]] = {
    **{case: partial(item, pickled) for case, pickled in PICKLES.items()},
    **{case: partial(on_storage, pickled) for case, pickled in ON_STORAGE.items()},
    "a sparse tensor whose indices lie outside": lambda: on_storage(
        call(
            "torch._utils._rebuild_sparse_tensor",
            call("torch.serialization._get_layout", "torch.sparse_coo"),
            ops(b"(", LONGS[1], LONGS[0], b"K\2\x85t"),
        ),
        b"A" * 8,
    ),
    "a nested tensor behind its buffer": lambda: on_storage(
        call("torch._utils._rebuild_nested_tensor", LONGS[0], LONGS[1], LONGS[1], LONGS[0]),
        b"A" * 8,
    ),
    "a compressed pickle": lambda: item(b"](" + b"K\1" * (16 << 20) + b"e", zipfile.ZIP_DEFLATED),
    "a bare pickle, as before torch 1.6": lambda: b"\x80\x02N.",
}


CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))


def tensors(names: list[str], chunks: list[ChunkStorageMetadata], place: _StorageInfo) -> Any:
    """What Metadata says of tensors that have the same chunks at the same place."""
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks)
    return {
        "state_dict_metadata": dict.fromkeys(names, entry),
        "storage_data": {MetadataIndex(name, torch.Size([0])): place for name in names},
    }


def stock(**changes: Any) -> Metadata:
    """Metadata as stock DCP would write it."""
    fields = tensors(["w"], [CHUNK], _StorageInfo("__0_0.distcp", 0, 9))
    return Metadata(**({**fields, "planner_data": {"w": ("w",)}} | changes))


def dumped(**changes: Any) -> bytes:
    return pickle.dumps(stock(**changes), 4)


def alone(opcodes: bytes) -> bytes:
    """A pickle of these opcodes; that it is no Metadata shows only at its end."""
    return b"\x80\x04" + opcodes + b"."


def repeated(num_chunks: int, *transforms: list[str]) -> bytes:
    """Three thousand tensors whose chunks, or transforms, are one long list."""
    names, place = [f"w{i}" for i in range(3000)], _StorageInfo("__0_0.distcp", 0, 9, *transforms)
    return dumped(**tensors(names, [CHUNK] * num_chunks, place))


def equal_hashes() -> bytes:
    """Offsets whose tuples all have one hash; found by inverting the last step of that hash."""
    opcodes = [name("torch.distributed.checkpoint.metadata.MetadataIndex"), b"q\0}("]
    for pair in colliding_pairs(20_000):
        place = b"".join(map(number, pair)) + b"\x86"
        opcodes += [b"h\0)\x81", words(fqn=text("w"), offset=place), b"bN"]
    return alone(b"".join(opcodes) + b"u")


@cache
def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Returns pairs of numbers whose tuples have one hash (xxHash's mixing, as CPython has it)."""
    mask, p1, p2, p5 = (
        (1 << 64) - 1,
        11400714785074694791,
        14029467366897019727,
        2870177450012600261,
    )
    inverse1, inverse2 = pow(p1, -1, 1 << 64), pow(p2, -1, 1 << 64)

    def rotated(x: int, by: int) -> int:
        return ((x << by) | (x >> (64 - by))) & mask

    found, first = [], 1
    target = 0x1234567890ABCDEF
    while len(found) < count:
        acc = rotated((p5 + first * p2) & mask, 31) * p1 & mask
        # acc2 = rotated(acc + second * p2, 31) * p1, wanted to be the target
        wanted = rotated(target * inverse1 & mask, 33)
        second = (wanted - acc) * inverse2 & mask
        if second < (1 << 61) - 1:
            found.append((first, second))
        first += 1
    assert len({hash(pair) for pair in found[:50]}) == 1
    return found


METADATA: dict[str, Callable[[], bytes]] = {
    "long paths built of one text": lambda: alone(
        name("pathlib.PosixPath")
        + b"q\0"
        + text("a" * 30_000)
        + text("b" * 30_000)
        + b"\x86q\1("
        + b"h\0h\1R" * 200_000
        + b"t"
    ),
    "one chunk in lists that are shared": lambda: repeated(100_000),
    "one list of transforms for every item": lambda: repeated(1, ["x"] * 1_000_000),
    "offsets of one hash": equal_hashes,
    "a key as long as the file": lambda: alone(
        b"(" + b"K\1" * 300_000 + b"tq\0}(" + b"h\0N" * 300_000 + b"u"
    ),
    "a chain of one dict": lambda: dumped(
        planner_data=__import__("collections").ChainMap(
            *[{f"w{i}": ("w",) for i in range(20_000)}] * 20_000
        )
    ),
    "an empty list a byte": lambda: alone(b"(" + b"]" * 2_000_000 + b"t"),
}


def zeros_table() -> bytes:
    """A chunk table of a million rows that are alike, in as few bytes as may be."""

    def edit(stored: Stored) -> None:
        stored.groups[0] = [np.zeros(1 << 20, np.int64) for _ in stored.groups[0]]
        stored.runs[0][:] = 1 << 20, 0
        stored.index[0][-1] = 1 << 20

    return forged(encode_table(mixed_table()), edit)


def lists_table() -> bytes:
    """A chunk table with as many empty paths as may be claimed."""
    return forged(
        encode_table(mixed_table()), lambda stored: stored.fields.update(paths=[[]] * 2_000_000)
    )


def long_text_table() -> bytes:
    """A chunk table with one very long name, packed as well as zstd can."""
    text = b'[{"version":1,"names":["%s"]},[]]' % (b"a" * (400 << 20))
    packed = zstandard.compress(text)
    return packed + struct.pack("<QQQ", len(packed), len(text), len(packed) + 24)


def header(fields: Any, more: int = 0) -> bytes:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(data) + more) + data


def tensor(shape: list[Any], *offsets: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HEADERS: dict[str, bytes] = {
    "a length of 99 MB": struct.pack("<Q", 99_000_000) + b"{}",
    "a name twice": header(
        b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "half a surrogate pair": header({"\ud800": tensor([1], 0, 4)}),
    "lists nested a million deep": header(b"[" * 1_000_000 + b"]" * 1_000_000),
    "a number of a million digits": header(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}'
    ),
    "a shape of huge numbers": header({"w": tensor([1 << 61] * 64, 0, 4)}),
    "an offset that is no number": header(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[NaN,Infinity]}}'
    ),
    "tensors that overlap": header({"w": tensor([2], 0, 8), "v": tensor([2], 4, 12)}),
    "metadata that is no text": header({"__metadata__": {"a": [1]}}),
    "a file of lists": header(b'{"a":[' + b"[]," * 300_000 + b"[]]}"),
    "a dtype that is not read here": header({"w": tensor([2], 0, 1, dtype="F4")}),
}


ABORT = unsealed("record", encode_record(AbortRecord(attempt="a1", reason="late", rank=3)))
COMMIT = unsealed("record", encode_record(manifest()))

RECORDS: dict[str, bytes] = {
    "lists nested a million deep": b"[" * 1_000_000 + b"]" * 1_000_000,
    "a rank that is no number": ABORT.replace(b":3", b":NaN"),
    "a field twice": ABORT.replace(b'"rank":3', b'"rank":3,"rank":4'),
    "a reason with half a surrogate pair": ABORT.replace(b"late", b"\\ud800"),
    "an attempt that climbs": ABORT.replace(b"a1", b"../a1"),
    "names of 100 million files in one line": COMMIT.replace(b"..3", b"..99999999"),
    "a name in a range and by itself": COMMIT.replace(b"__{0..3}_0.x", b"a3\\na{1..3}"),
    "a place of blocks of no bytes": COMMIT.replace(b"1024,4", b"0,4"),
    "a version of a million digits": ABORT.replace(b'_version":', b'_version":' + b"9" * 1_000_000),
}

OTHERS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
    "zstd: 256 MiB of zeros": (
        lambda: zstandard.compress(b"PK" + bytes(1 << 28)),
        lambda data: unpacked_item(data, [ZSTD], max_bytes=1 << 20),
    ),
    "item: a directory of 65,535 records": (
        lambda: (
            b"PK\3\4"
            + bytes(1000)
            + b"PK\1\2" * 10
            + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65_534, 65_534, 1 << 20, 0, 0)
        ),
        lambda data: load_object(data, fqn="a"),
    ),
    "item: a tensor of 2**62 elements": (
        lambda: on_storage(view(ops(1 << 62, b"\x85"), b"K\1\x85", count=number(1 << 62))),
        lambda data: parse_torch_save(data, len(data)),
    ),
}


def _made(value: bytes | Callable[[], bytes]) -> bytes:
    return value if isinstance(value, bytes) else value()


def cases() -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]]:
    """Returns every file and what reads it, by `kind: name`."""
    kinds: tuple[tuple[str, dict[str, Any], Callable[[bytes], Any]], ...] = (
        ("object", OBJECTS, lambda data: load_object(data, fqn="a")),
        ("nested", NESTED, lambda data: load_object(item(data), fqn="a")),
        (".metadata", METADATA, decode_metadata),
        ("safetensors", HEADERS, parse_header),
        ("record", RECORDS, lambda data: decode_record(sealed("record", data))),
    )
    found = {
        f"{kind}: {case}": (partial(_made, made), read)
        for kind, table, read in kinds
        for case, made in table.items()
    }
    found["table: a million equal rows"] = (zeros_table, decode_table)
    found["table: 2 million empty paths"] = (lists_table, decode_table)
    found["table: a name of 400 MB"] = (long_text_table, decode_table)
    found["safetensors: offsets in a list nested a million deep"] = (
        lambda: b"[" * 1_000_000,
        lambda data: saved_offsets({"DCP_SHARDING_INFO": data.decode()}),
    )
    return found | OTHERS


def attempt(data: bytes, read: Callable[[bytes], Any]) -> tuple[str, str, float, int]:
    """Returns class and text of what was raised, seconds, and bytes of memory that it took."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, start = _status_bytes("VmRSS"), time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        read(data)
        found, told = "nothing", ""
    except CheckpointError as error:
        found, told = type(error).__name__, str(error)
    except Exception as error:
        found, told = f"foreign {type(error).__name__}", str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return found, told, time.perf_counter() - start, max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main(chosen: str = "") -> None:
    """Prints one line of JSON a case. What asks for more than 12 GiB more gets none."""
    made = {case: (make(), read) for case, (make, read) in cases().items() if chosen in case}
    room = _status_bytes("VmSize") + (12 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    for case, (data, read) in made.items():
        print(json.dumps([case, len(data), "started"]), flush=True)
        print(json.dumps([case, len(data), *attempt(data, read)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
