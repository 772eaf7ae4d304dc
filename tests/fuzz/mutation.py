"""Ways to spoil bytes, with an eye to what they are: opcodes of pickles, numbers, JSON."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
from typing import Any

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
