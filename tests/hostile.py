"""Files that somebody made to harm the reader: each is small, and what it asks for is not.

`python -m tests.hostile` decodes them one after the other and prints what came out, and the most
memory that it took; the tests run it as a process of its own.
"""

from __future__ import annotations

import functools
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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.format.safetensors_frame import parse_header, saved_offsets
from ray_dcp.format.stream_transforms import ZSTD, unpacked_item
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.format.torch_items import parse_torch_save
from ray_dcp.seam.objects import load_object
from tests.format_cases import mixed_table

LIMIT_S = 60
FREE_BYTES = 256 << 20
BYTES_A_BYTE = 120


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


def call(dotted: str, *args: bytes) -> bytes:
    """A call in a pickle of protocol 2."""
    return name(dotted) + b"(" + b"".join(args) + b"tR"


def item(pickled: bytes, **more: bytes) -> bytes:
    """An item of torch.save whose `data.pkl` holds these opcodes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for record, data in more.items():
            archive.writestr(f"archive/{record}", data)
    return buffer.getvalue()


def deflated(pickled: bytes) -> bytes:
    """The same, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def encoded(value: str) -> bytes:
    """Bytes in a pickle of protocol 2."""
    return call("_codecs.encode", text(value), text("latin1"))


def dtype(code: str, *state: bytes) -> bytes:
    """A dtype of numpy, with a state of its own if one is given."""
    made = call("numpy.dtype", text(code), b"\x89", b"\x88")
    return made + b"(" + b"".join(state) + b"tb" if state else made


def array(shape: bytes, kind: bytes, values: bytes, start: bytes = b"K\0\x85") -> bytes:
    """An array of numpy."""
    reconstruct = call(
        "numpy._core.multiarray._reconstruct", name("numpy.ndarray"), start, encoded("b")
    )
    return reconstruct + b"(K\1" + shape + kind + b"\x89" + values + b"tb"


LYING = (b"K\3", text("|"), b"N", b"N", b"N", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff", b"K\0")
"""The state of a dtype that says of itself that it holds no pointers."""


def generator(kind: str, state: bytes) -> bytes:
    """A generator of numpy that is given a state."""
    made = call("numpy.random._pickle.__bit_generator_ctor", text(kind))
    return made + b"}(" + text("bit_generator") + text(kind) + text("state") + state + b"ub"


def words(**fields: bytes) -> bytes:
    """A dict of texts in a pickle."""
    return b"}(" + b"".join(text(key) + value for key, value in fields.items()) + b"u"


MANY = number(1 << 36)
DEEP = b")" + b"\x85" * 1_000_000
KEYS = array(b"M\x70\x02\x85", dtype("u4"), encoded("\0" * 2496))

OBJECTS: dict[str, Callable[[], bytes]] = {
    "a list of a range": lambda: item(call("builtins.list", call("builtins.range", MANY))),
    "a tuple of a range": lambda: item(call("builtins.tuple", call("builtins.range", MANY))),
    "a set of a range": lambda: item(call("builtins.set", call("builtins.range", MANY))),
    "a frozenset of a range": lambda: item(
        call("builtins.frozenset", call("builtins.range", MANY))
    ),
    "a deque of a range": lambda: item(call("collections.deque", call("builtins.range", MANY))),
    "a counter of a range": lambda: item(call("collections.Counter", call("builtins.range", MANY))),
    "a size of a range": lambda: item(call("torch.Size", call("builtins.range", MANY))),
    "a range by its old name": lambda: item(
        call("__builtin__.list", call("__builtin__.xrange", MANY))
    ),
    "bytes of a length": lambda: item(call("builtins.bytes", MANY)),
    "a bytearray of a length": lambda: item(call("builtins.bytearray", MANY)),
    "a bytearray by its old name": lambda: item(call("__builtin__.bytearray", MANY)),
    "a text of lists of lists": lambda: item(
        b"]q\0"
        + b"".join(
            b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(40)
        )
        + call("builtins.str", b"h\x28")
    ),
    "a text encoded by a codec": lambda: item(call("_codecs.encode", text("a"), text("zip"))),
    "a long text encoded often": lambda: item(
        b"]("
        + text("a" * 100_000)
        + b"q\0"
        + text("latin1")
        + b"\x86q\1"
        + (name("_codecs.encode") + b"h\1R") * 100_000
        + b"e"
    ),
    "a list copied often": lambda: item(
        b"](](" + b"K\1" * 100_000 + b"e\x85q\1" + (name("builtins.list") + b"h\1R") * 50_000 + b"e"
    ),
    "an array of a length": lambda: item(call("numpy.ndarray", MANY + b"\x85")),
    "an array begun with a length": lambda: item(
        array(b"K\1\x85", dtype("f8"), encoded("\0" * 8), start=MANY + b"\x85")
    ),
    "pointers that are bytes": lambda: item(
        array(b"K\1\x85", dtype("O8", *LYING), encoded("A" * 8))
    ),
    "pointers that are bytes, in a scalar": lambda: item(
        call("numpy._core.multiarray.scalar", dtype("O8", *LYING), encoded("A" * 8))
    ),
    "numbers that are pointers": lambda: item(
        array(b"K\1\x85", dtype("i8", *LYING[:7], b"K\x3f"), encoded("A" * 8))
    ),
    "a field behind its record": lambda: item(
        array(
            b"K\1\x85",
            dtype(
                "V8",
                b"K\3",
                text("|"),
                b"N",
                text("a") + b"\x85",
                b"}" + text("a") + dtype("i4") + number(1 << 30) + b"\x86s",
                b"K\x08",
                b"K\1",
                b"K\x10",
            ),
            encoded("A" * 8),
        )
    ),
    "the one dtype of all objects": lambda: item(
        call("numpy.dtypes.ObjectDType") + b"(" + b"".join(LYING) + b"tb"
    ),
    "a dtype that changes once it is used": lambda: item(
        b"]("
        + array(
            b"K\1\x85",
            call("numpy.dtype", text("V8"), b"\x89", b"\x88") + b"q\5",
            encoded("A" * 8),
        )
        # What it says of itself now is right, but not of the bytes above.
        + b"h\5(K\3"
        + text("|")
        + b"N"
        + text("a")
        + b"\x85"
        + b"}"
        + text("a")
        + dtype("O8", *LYING[:7], b"K\x3f")
        + b"K\0\x86s"
        + b"K\x08K\1K\x1btbe"
    ),
    "a name hidden behind a text": lambda: item(
        b"](" + text("ctorch\n") + call("builtins.bytearray", MANY) + b"e"
    ),
    "a place behind the words of MT19937": lambda: item(
        generator("MT19937", words(key=KEYS, pos=number(1 << 24)))
    ),
    "a place before the words of MT19937": lambda: item(
        generator("MT19937", words(key=KEYS, pos=number(-5)))
    ),
    "a place before the words of Philox": lambda: item(
        generator("Philox", words(key=KEYS)) + b"}(" + text("buffer_pos") + number(-9) + b"ub"
    ),
    "a key nested a million deep": lambda: item(b"}" + DEEP + b"Ns"),
    "a key nested a million deep, beside a harmless class": lambda: item(
        b"](" + call("torch.Size", b")") + b"}" + DEEP + b"Nse"
    ),
    "an element nested a million deep": lambda: item(call("builtins.set", b"](" + DEEP + b"e")),
    "an encoding nested a million deep": lambda: item(call("_codecs.encode", text("a"), DEEP)),
    "a compressed pickle": lambda: deflated(b"](" + b"K\1" * (16 << 20) + b"e"),
    "a function of the system": lambda: item(call("os.system", text("true"))),
    "a function by its old name": lambda: item(call("__builtin__.eval", text("1"))),
    "an instance": lambda: item(b"(" + text("true") + b"ios\nsystem\n"),
    "an object": lambda: item(b"(" + name("os.system") + text("true") + b"o"),
    "an extension": lambda: item(b"\x82\x01"),
    "a name on the stack": lambda: item(text("os") + text("system") + b"\x93"),
    "an id of something else": lambda: item(text("os") + b"Q"),
    "a state for a class": lambda: item(name("builtins.dict") + words(a=b"N") + b"b"),
    "a getattr": lambda: item(call("builtins.getattr", name("builtins.dict"), text("fromkeys"))),
    "pickles as before torch 1.6": lambda: (
        b"\x80\x02"
        + number(0x1950A86A20F9469CFC6C)
        + b"."
        + b"\x80\x02"
        + number(1001)
        + b"."
        + b"\x80\x02}."
        + b"\x80\x02"
        + call("builtins.list", call("builtins.range", MANY))
        + b"."
    ),
}


def stock(**changes: Any) -> Metadata:
    """Metadata as stock DCP would write it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    properties = TensorProperties(torch.float32)
    fields: dict[str, Any] = {
        "state_dict_metadata": {"w": TensorStorageMetadata(properties, torch.Size([4]), [chunk])},
        "planner_data": {"w": ("w",)},
        "storage_data": {MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 9)},
    }
    return Metadata(**(fields | changes))


def dumped(**changes: Any) -> bytes:
    return pickle.dumps(stock(**changes), 4)


def alone(opcodes: bytes) -> bytes:
    """A pickle of these opcodes; that it is no Metadata shows only at its end."""
    return b"\x80\x04" + opcodes + b"."


def repeated_chunks() -> bytes:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    chunks = [chunk] * 100_000
    properties = TensorProperties(torch.float32)
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names = [f"w{i}" for i in range(3000)]
    place = _StorageInfo("__0_0.distcp", 0, 9)
    return dumped(
        state_dict_metadata={
            n: TensorStorageMetadata(properties, torch.Size([4]), chunks) for n in names
        },
        storage_data={MetadataIndex(n, torch.Size([0])): place for n in names},
    )


def repeated_transforms() -> bytes:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    properties, many = TensorProperties(torch.float32), ["x"] * 1_000_000
    names = [f"w{i}" for i in range(3000)]
    return dumped(
        state_dict_metadata={
            n: TensorStorageMetadata(properties, torch.Size([4]), [chunk]) for n in names
        },
        storage_data={
            MetadataIndex(n, torch.Size([0])): _StorageInfo("a", 0, 9, many) for n in names
        },
    )


def equal_hashes() -> bytes:
    """Offsets whose tuples all have one hash; found by inverting the last step of that hash."""
    opcodes = [name("torch.distributed.checkpoint.metadata.MetadataIndex"), b"q\0}("]
    for pair in colliding_pairs(20_000):
        place = b"".join(map(number, pair)) + b"\x86"
        opcodes += [b"h\0)\x81", words(fqn=text("w"), offset=place), b"bN"]
    return alone(b"".join(opcodes) + b"u")


@functools.cache
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
    "one chunk in lists that are shared": repeated_chunks,
    "one list of transforms for every item": repeated_transforms,
    "offsets of one hash": equal_hashes,
    "integers of one hash": lambda: alone(
        b"}(" + b"".join(number(i * ((1 << 61) - 1)) + b"N" for i in range(1, 30_000)) + b"u"
    ),
    "a key as long as the file": lambda: alone(
        b"(" + b"K\1" * 300_000 + b"tq\0}(" + b"h\0N" * 300_000 + b"u"
    ),
    "a chain of one dict": lambda: dumped(
        planner_data=__import__("collections").ChainMap(
            *[{f"w{i}": ("w",) for i in range(20_000)}] * 20_000
        )
    ),
    "a name twice": lambda: alone(b"}(" + (text("w") + b"N") * 2 + b"u"),
    "an empty list a byte": lambda: alone(b"(" + b"]" * 2_000_000 + b"t"),
    "an empty dict a byte": lambda: alone(b"(" + b"}" * 2_000_000 + b"t"),
}


def zeros_table() -> bytes:
    """A chunk table whose one chunk has 33 million equal checksums."""
    arrow = pq.read_table(pa.BufferReader(encode_table(mixed_table()))).slice(0, 1)
    count = 1 << 25
    checks = pa.LargeListArray.from_arrays(
        pa.array([0, count], pa.int64()), pa.array(np.zeros(count, np.uint64))
    )
    index = arrow.schema.get_field_index("checks")
    arrow = arrow.set_column(index, arrow.schema.field("checks"), checks)
    sink = io.BytesIO()
    pq.write_table(arrow, sink, compression="zstd", use_dictionary=["checks.list.element"])
    return sink.getvalue()


def texts_table() -> bytes:
    """A chunk table with one long text in a path, a hundred times."""
    arrow = pq.read_table(pa.BufferReader(encode_table(mixed_table()))).slice(0, 1)
    for name, value in (("path", ["a" * 1_000_000] * 100), ("path_is_index", [False] * 100)):
        index = arrow.schema.get_field_index(name)
        field = arrow.schema.field(name)
        arrow = arrow.set_column(index, field, pa.array([value], field.type))
    sink = io.BytesIO()
    pq.write_table(arrow, sink, compression="zstd", store_schema=True)
    return sink.getvalue()


def header(fields: Any, more: int = 0) -> bytes:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(data) + more) + data


def tensor(shape: list[Any], *offsets: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HEADERS: dict[str, Callable[[], bytes]] = {
    "a length of 2**63": lambda: struct.pack("<Q", 1 << 63) + b"{}",
    "a length of 99 MB": lambda: struct.pack("<Q", 99_000_000) + b"{}",
    "a name twice": lambda: header(
        b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "half a surrogate pair": lambda: header({"\ud800": tensor([1], 0, 4)}),
    "lists nested a million deep": lambda: header(b"[" * 1_000_000 + b"]" * 1_000_000),
    "a number of a million digits": lambda: header(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}'
    ),
    "a shape of huge numbers": lambda: header({"w": tensor([1 << 61] * 64, 0, 4)}),
    "a shape of 100,000 dimensions": lambda: header({"w": tensor([1] * 100_000, 0, 4)}),
    "a negative offset": lambda: header({"w": tensor([1], -4, 0)}),
    "an offset that is no number": lambda: header(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[NaN,Infinity]}}'
    ),
    "an offset that is true": lambda: header({"w": tensor([True], 0, 4)}),
    "tensors that overlap": lambda: header({"w": tensor([2], 0, 8), "v": tensor([2], 4, 12)}),
    "a gap": lambda: header({"w": tensor([1], 0, 4), "v": tensor([1], 8, 12)}),
    "metadata that is no text": lambda: header({"__metadata__": {"a": [1]}}),
    "a file of lists": lambda: header(b'{"a":[' + b"[]," * 300_000 + b"[]]}"),
    "a dtype that is not read here": lambda: header({"w": tensor([2], 0, 1, dtype="F4")}),
}


def record(body: bytes) -> bytes:
    from ray_dcp.format.checksums import digest_bytes

    return b'{"digest":"' + digest_bytes(body).hex().encode() + b'","record":' + body + b"}\n"


ABORT = encode_record(AbortRecord(attempt="a1", reason="late", rank=3))[
    len(b'{"digest":"') + 32 + len(b'","record":') : -2
]

RECORDS: dict[str, Callable[[], bytes]] = {
    "lists nested a million deep": lambda: record(b"[" * 1_000_000 + b"]" * 1_000_000),
    "a rank of a million digits": lambda: record(ABORT.replace(b":3", b":" + b"9" * 1_000_000)),
    "a rank that is no number": lambda: record(ABORT.replace(b":3", b":NaN")),
    "a rank that is negative": lambda: record(ABORT.replace(b":3", b":-3")),
    "a field twice": lambda: record(ABORT.replace(b'"rank":3', b'"rank":3,"rank":4')),
    "a reason with half a surrogate pair": lambda: record(ABORT.replace(b"late", b"\\ud800")),
    "an attempt that climbs": lambda: record(ABORT.replace(b"a1", b"../a1")),
    "a version of a million digits": lambda: record(
        ABORT.replace(b'_version":', b'_version":' + b"9" * 1_000_000)
    ),
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
        lambda: item(
            call(
                "torch._utils._rebuild_tensor_v2",
                b"("
                + text("storage")
                + name("torch.FloatStorage")
                + text("0")
                + text("cpu")
                + number(1 << 62)
                + b"tQ",
                b"K\0",
                number(1 << 62) + b"\x85",
                b"K\1\x85",
                b"\x89",
                call("collections.OrderedDict"),
            ),
            **{"data/0": b"0000"},
        ),
        lambda data: parse_torch_save(data, len(data)),
    ),
}


def cases() -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]]:
    """Returns every file and what reads it, by `kind: name`."""
    kinds: tuple[tuple[str, dict[str, Any], Callable[[bytes], Any]], ...] = (
        ("object", OBJECTS, lambda data: load_object(data, fqn="a")),
        (".metadata", METADATA, decode_metadata),
        ("safetensors", HEADERS, parse_header),
        ("record", RECORDS, decode_record),
    )
    found = {
        f"{kind}: {case}": (make, read) for kind, made, read in kinds for case, make in made.items()
    }
    found["table: 33 million equal checksums"] = (zeros_table, decode_table)
    found["table: a long text a hundred times"] = (texts_table, decode_table)
    found["safetensors: offsets in a list nested a million deep"] = (
        lambda: b"[" * 1_000_000,
        lambda data: saved_offsets({"DCP_SHARDING_INFO": data.decode()}),
    )
    return found | OTHERS


def attempt(data: bytes, read: Callable[[bytes], Any]) -> tuple[str, str, float, int]:
    """Returns class and text of what was raised, seconds, and bytes of memory that it took."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, start = _status_bytes("VmRSS"), time.perf_counter()
    signal.alarm(LIMIT_S)
    try:
        read(data)
        found, told = "nothing", ""
    except CheckpointError as error:
        found, told = type(error).__name__, str(error)
    except Exception as error:
        found, told = f"foreign {type(error).__name__}", str(error)
    signal.alarm(0)
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
