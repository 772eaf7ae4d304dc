"""What is fuzzed: how to make a good file, how to spoil it, and what then reads it."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import json
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import zstandard

import ray_dcp
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.format import manifest as records
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.format.safetensors import header, parse_header, saved_offsets
from ray_dcp.format.table import GroupedTable, decode_table, encode_table, end_of
from ray_dcp.format.torch_items import ZSTD, parse_torch_save, unpacked_item
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.torch_adapter.objects import load_object
from ray_dcp.view.verify import verify_opened
from tests.support import damage
from tests.support.checkpoints import sharding_metadata
from tests.support.format_cases import Stored, forged, grouped_table, manifest, mixed_table, saved

NUMBERS = (
    0, 1, 2, 3, 63, 64, 127, 128, 255, 256, 4095, 65535, 1 << 16, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, (1 << 61) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2,
    -(1 << 31), -(1 << 63),
)  # fmt: skip
"""Where arithmetic breaks."""
TEXTS = (
    "", "w", "../x", "/etc/passwd", "a/../../x", "\0", "\ud800", "é" * 50, "a" * 5000, "NaN", "..",
    "__0_0.distcp", ".metadata", "C:\\x", "s3://x/y", "\u202e", "torch.float32", "stream.zstd/1",
)  # fmt: skip
"""Where checks of names break."""
GLOBALS = (
    "os system", "builtins eval", "torch Size", "collections OrderedDict", "builtins list",
    "builtins range", "numpy dtype", "numpy ndarray", "numpy._core.multiarray _reconstruct",
    "_codecs encode", "builtins bytearray", "torch._utils _rebuild_tensor_v2", "pathlib PosixPath",
    "torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata "
    "MetadataIndex", "torch.distributed.checkpoint.filesystem _StorageInfo", "random Random",
    "numpy.random._pickle __bit_generator_ctor", "torch FloatStorage", "torch.storage "
    "UntypedStorage", "collections deque", "decimal Decimal", "io BytesIO", "torch.device x",
)  # fmt: skip


def spoiled(data: bytes, source: random.Random) -> bytes:
    """Returns bytes after a few flips, cuts, insertions, repetitions and edge numbers."""
    found = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 3, 8))):
        at = source.randrange(len(found) + 1)
        match source.randrange(9):
            case 0 if at < len(found):
                found[at] ^= 1 << source.randrange(8)
            case 1 if at < len(found):
                found[at] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
            case 2:
                del found[at:]
            case 3:
                del found[at : at + source.choice((1, 2, 4, 8, 64))]
            case 4:
                found[at:at] = source.randbytes(source.choice((1, 2, 4, 8, 64)))
            case 5:
                part = found[at : at + source.choice((1, 4, 16, 100))]
                found[at:at] = part * source.choice((1, 2, 20))
            case 6:
                code = source.choice(("<H", "<I", "<Q", ">I", "<q", "<i"))
                number = source.choice(NUMBERS) & ((1 << 8 * struct.calcsize(code)) - 1)
                code = code.upper()
                found[at : at + struct.calcsize(code)] = struct.pack(code, number)
            case 7:
                other = source.randrange(len(found) + 1)
                length = source.choice((1, 4, 16, 100))
                found[at : at + length] = found[other : other + length]
            case _:
                found[at:at] = source.choice(TEXTS).encode("utf-8", "surrogatepass")
    return bytes(found)


def spoiled_pickle(data: bytes, source: random.Random) -> bytes:
    """Returns a pickle with opcodes dropped, doubled, moved or given other arguments."""
    try:
        places = [place for _, _, place in pickletools.genops(data) if place is not None]
    except Exception:
        return spoiled(data, source)
    if len(places) < 2:
        return spoiled(data, source)
    opcodes = [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]
    for _ in range(source.choice((1, 1, 2, 3, 6))):
        at = source.randrange(len(opcodes))
        match source.randrange(6):
            case 0:
                opcodes[at] = opcodes[at] * source.choice((0, 2, 3, 50))
            case 1:
                opcodes.insert(at, source.choice(opcodes))
            case 2:
                other = source.randrange(len(opcodes))
                opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
            case 3:
                opcodes[at] = _opcode(source)
            case 4:
                start = source.randrange(len(opcodes))
                opcodes[at:at] = opcodes[start : start + source.choice((2, 5, 20))]
            case _:
                opcodes.insert(at, _opcode(source))
    return b"".join(opcodes)


def _opcode(source: random.Random) -> bytes:
    match source.randrange(6):
        case 0:
            number = source.choice(NUMBERS)
            raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        case 1:
            raw = source.choice(TEXTS).encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case 2:
            module, name = source.choice(GLOBALS).split(" ")
            return f"c{module}\n{name}\n".encode()
        case 3:
            return source.choice(
                (b"(", b")", b"]", b"}", b"t", b"\x85", b"\x86", b"\x87", b"R", b"\x81", b"b", b"e")
            )
        case 4:
            return source.choice((b"a", b"s", b"u", b"0", b"1", b"N", b"\x88", b"Q", b".", b"2"))
        case _:
            return (
                source.choice((b"h", b"q", b"j", b"r"))
                + struct.pack("<I", source.choice((0, 1, 5, 300, 1 << 31)))[: source.choice((1, 4))]
            )


def spoiled_json(data: bytes, source: random.Random) -> bytes:
    """Returns JSON with a value or a name replaced, repeated or dropped."""
    try:
        root = json.loads(data)
    except ValueError:
        return spoiled(data, source)
    for _ in range(source.choice((1, 1, 2, 4))):
        _spoil_value(root, source)
    text = io.StringIO()
    json.dump(root, text, ensure_ascii=source.random() < 0.5, separators=(",", ":"))
    return text.getvalue().encode("utf-8", "surrogatepass")


def _spoil_value(root: Any, source: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    todo = [root]
    while todo:
        value = todo.pop()
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in list(inner):
            places.append((value, key))
            if isinstance(below, (dict, list)):
                todo.append(below)
    if not places:
        return
    parent, key = source.choice(places)
    match source.randrange(4):
        case 0:
            del parent[key]
        case 1:
            parent[key] = source.choice(
                (None, True, -1, 1.5, float("nan"), [], {}, [[]], *NUMBERS, *TEXTS)
            )
        case 2 if isinstance(parent, list):
            parent.insert(key, parent[key])
        case _ if isinstance(parent, dict):
            parent[source.choice((*TEXTS, "x"))] = parent[key]


Spoil = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """Something that reads bytes."""

    seeds: Callable[[], list[bytes]]
    """Good files, as they are really written."""
    spoil: Spoil
    read: Callable[[bytes], Any]


@functools.cache
def _objects() -> list[bytes]:
    generator = np.random.default_rng(0)
    values = [
        10,
        {"text": "hello", "items": [1, 2.5, None, True], "tuple": (1, (2, "x"))},
        collections.OrderedDict(a=torch.arange(3), b=[torch.Size([1])]),
        np.arange(6, dtype="i2").reshape(2, 3),
        np.zeros(2, [("a", "i4"), ("b", "M8[ns]"), ("o", "O")]),
        np.float64(3.5),
        generator.bit_generator.state,
        generator,
        random.Random(1),
        {1, 2, "x"},
        b"bytes",
        bytearray(b"more"),
        torch.float32,
        torch.zeros(3).to_sparse(),
    ]
    return [saved(value) for value in values]


def _in_item(spoil: Spoil) -> Spoil:
    """Spoils the pickle in an item, and makes a whole item of it again; or spoils the item."""

    def spoiled_item(data: bytes, source: random.Random) -> bytes:
        if source.random() < 0.3 or not data.startswith(b"PK"):
            return spoiled(data, source)
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                is_pickle = name.endswith("data.pkl")
                new.writestr(name, spoil(content, source) if is_pickle else content)
        return buffer.getvalue()

    return spoiled_item


def _tensors() -> list[bytes]:
    return [
        saved(torch.arange(12.0).reshape(3, 4).T),
        saved(torch.zeros(3, dtype=torch.bfloat16)),
        saved(torch.arange(5)[2:]),
    ]


def _ends() -> list[bytes]:
    data = grouped_table()
    return [data, data[end_of(data) :]]


@functools.cache
def _groups_bytes() -> int:
    return end_of(grouped_table()) or 0


def _read_end(data: bytes) -> None:
    """Reads a table in groups whole, and by its end alone."""
    try:
        decode_table(data)
    except ray_dcp.CheckpointError:
        # Why that length: where the groups would end is the first claim that is compared.
        found = GroupedTable(data, len(data) + _groups_bytes())
        found.index.around([], range(found.tensors.num_tensors))


def _spoiled_table(data: bytes, source: random.Random) -> bytes:
    """Changes what a chunk table says, with digests and lengths that fit; or spoils the file."""
    if source.random() < 0.3:
        return spoiled(data, source)

    def edit(stored: Stored) -> None:
        parts = [stored.about, stored.runs, stored.index, stored.boxes, *stored.groups]
        for _ in range(source.choice((1, 1, 2, 4))):
            column = source.choice(source.choice(parts))
            if len(column):
                at = source.randrange(len(column))
                value = source.choice((int(column[at]) + 1, int(column[at]) - 1, *NUMBERS))
                column[at] = np.array([value % (1 << 64)], np.uint64).astype(np.int64)[0]
        if source.random() < 0.3:
            stored.fields = json.loads(spoiled_json(json.dumps(stored.fields).encode(), source))

    try:
        return forged(data, edit)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return spoiled(data, source)


def _record_seeds() -> list[bytes]:
    table = records.FileEntry("c.table", 5, "0" * 32)
    plain = manifest(files=(replace(table, key="__0_0.a1.distcp"),), deferred=())
    whole = manifest(metadata=replace(table, key=".metadata"), table_end=table)
    abort = records.AbortRecord(attempt="a1", reason="late", rank=3)
    return [records.encode_record(one) for one in (plain, whole, abort)]


def _spoiled_record(data: bytes, source: random.Random) -> bytes:
    """Spoils a record and gives it the digest of what it then says; or spoils all of it."""
    if source.random() < 0.2:
        return spoiled(data, source)
    body = source.choice((spoiled, spoiled_json))(records.unsealed("record", data), source)
    return records.sealed("record", body)


def _headers() -> list[bytes]:
    entries = [("w", "float32", (3, 2), 0, 24), ("v", "bfloat16", (), 24, 26)]
    return [header(entries, sharding_metadata({"w": (3, 0), "v": ()}))[:400], header(entries)[:300]]


def _spoiled_header(data: bytes, source: random.Random) -> bytes:
    if source.random() < 0.3:
        return spoiled(data, source)
    body = spoiled_json(data[8:].rstrip(), source)
    return struct.pack("<Q", len(body)) + body


def _read_header(data: bytes) -> None:
    found = parse_header(data, source_length(data))
    saved_offsets(found.metadata)


def source_length(data: bytes) -> int | None:
    """Returns a length for the file of which this is the header; none for every third."""
    return None if len(data) % 3 == 0 else len(data) + 26


# Whole checkpoints, in memory


@functools.cache
def _checkpoint(kind: str) -> dict[str, bytes]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return damage.contents_of(damage.SAVES[kind](Path(folder) / "c"))


_COUNT = itertools.count()


def _checkpoint_seeds() -> list[bytes]:
    return [pickle.dumps((kind, _checkpoint(kind))) for kind in damage.SAVES]


def _spoiled_checkpoint(data: bytes, source: random.Random) -> bytes:
    """Spoils a file or two, each in its own way; of ours, the manifest then fits the table."""
    kind, files = pickle.loads(data)
    for _ in range(source.choice((1, 1, 2))):
        key = source.choice(sorted(files))
        try:
            files[key] = _way(key)(files[key], source)
        except Exception:
            files[key] = spoiled(files[key], source)
    tables = [key for key in files if key.endswith(".table")]
    if tables and source.random() < 0.8:
        _sign_table(files, tables[0])
    return pickle.dumps((kind, files))


def _way(key: str) -> Spoil:
    if key == ".metadata":
        return spoiled_pickle
    if key.endswith(".table"):
        return _spoiled_table
    if key.startswith("manifest-"):
        return _spoiled_record
    if key.endswith(".index.json"):
        return spoiled_json
    return _spoiled_data


def _spoiled_data(data: bytes, source: random.Random) -> bytes:
    if data[8:9] == b"{":
        length = 8 + int.from_bytes(data[:8], "little")
        return _spoiled_header(data[:length], source) + data[length:]
    return spoiled(data, source)


def _sign_table(files: dict[str, bytes], table: str) -> None:
    for key, data in files.items():
        if not key.startswith("manifest-"):
            continue
        try:
            record = records.decode_record(data)
        except ray_dcp.CheckpointError:
            continue
        if isinstance(record, records.Manifest):
            entry = records.FileEntry(table, len(files[table]), digest_bytes(files[table]).hex())
            files[key] = records.encode_record(replace(record, table=entry))


def _read_checkpoint(data: bytes) -> None:
    kind, files = pickle.loads(data)
    url = f"memory://fuzz/{next(_COUNT)}"
    storage = MemoryStorage(url.removeprefix("memory://"))
    for key, content in files.items():
        storage.write(key, content)
    try:
        into = (
            {name: torch.zeros_like(t) for name, t in damage.tensors().items()}
            if kind == "hub"
            else damage.blank()
        )
        errors = []
        for act in (
            lambda: verify_opened(storage, read_checkpoint(storage)),
            lambda: ray_dcp.load(into, checkpoint_id=url, no_dist=True),
            lambda: _look(url),
        ):
            try:
                act()
            except ray_dcp.CheckpointError as error:
                str(error)
                errors.append(error)
        if errors:
            raise errors[0]
    finally:
        storage.delete([entry.key for entry in storage.list()])


def _look(url: str) -> None:
    view = ray_dcp.open(url)
    for name in view.names[:20]:
        info = view.tensors.get(name)
        if info is None or sum(info.shape) < 10_000:
            value = view[name]
            _ = value if info is None else value[...]


TARGETS: dict[str, Target] = {
    "our .metadata": Target(
        lambda: [encode_metadata(mixed_table(), checkpoint_id="/x", attempt="a1")],
        spoiled_pickle, decode_metadata,
    ),
    "stock .metadata": Target(
        lambda: [_checkpoint(kind)[".metadata"] for kind in ("stock", "zstd")]
        + [pickle.dumps(pickle.loads(_checkpoint("stock")[".metadata"]), 2)],
        spoiled_pickle, decode_metadata,
    ),
    "chunk table": Target(lambda: [encode_table(mixed_table())], _spoiled_table, decode_table),
    "chunk table in groups": Target(_ends, spoiled, _read_end),
    "record": Target(_record_seeds, _spoiled_record, records.decode_record),
    "tensor item": Target(
        _tensors, _in_item(spoiled_pickle), lambda data: parse_torch_save(data[:4096], len(data))
    ),
    "object item": Target(
        _objects, _in_item(spoiled_pickle), lambda data: load_object(data, fqn="a")
    ),
    "safetensors header": Target(_headers, _spoiled_header, _read_header),
    "zstd": Target(
        lambda: [zstandard.compress(b"PK" + bytes(100) + b"x" * 50)],
        spoiled, lambda data: unpacked_item(data, [ZSTD], max_bytes=1 << 20),
    ),
    "checkpoint": Target(_checkpoint_seeds, _spoiled_checkpoint, _read_checkpoint),
}  # fmt: skip
