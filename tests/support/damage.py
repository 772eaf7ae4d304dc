"""Small checkpoints of every kind, and every way in which storage spoils a file."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from tests.support import checkpoints

PAGE_BYTES = 4096


def state() -> dict[str, Any]:
    """Returns few bytes of many kinds: several blocks, a 0-d and an empty tensor, odd dtypes."""
    return checkpoints.state(large=(60, 50))


def blank() -> dict[str, Any]:
    """Returns what to load `state` into."""
    empty = state()
    empty["model"] = {name: torch.zeros_like(tensor) for name, tensor in empty["model"].items()}
    return empty | {"step": None, "note[x]": {"text": None, "items": None}}


def tensors() -> dict[str, torch.Tensor]:
    """Returns the plain tensors of `state`, flat."""
    found = state()["model"]
    return {name: found[name] for name in ("weight", "large", "half", "flag", "empty")}


def bits(values: dict[str, Any]) -> dict[str, Any]:
    """Returns something that is equal for values that are equal to the bit."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": v for inner, v in bits(value).items()}
        elif isinstance(value, torch.Tensor):
            raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = (str(value.dtype), tuple(value.shape), raw)
        else:
            found[name] = repr(value)
    return found


def save_ours(path: Path) -> Path:
    """Saves over an earlier save, with an abort record below and one above the manifest."""
    path.mkdir(parents=True)
    lost = encode_record(AbortRecord(attempt="a0", reason="too late", rank=1))
    (path / record_key(1)).write_bytes(lost)
    options = ray_dcp.SaveOptions(part_bytes=12_000)
    ray_dcp.save(state(), checkpoint_id=path, no_dist=True, options=options)
    more = encode_record(AbortRecord(attempt="a9", reason="no answer", rank=None))
    (path / record_key(3)).write_bytes(more)
    return path


def save_stock(path: Path) -> Path:
    """Saves with torch's own DCP."""
    return checkpoints.save_stock(path, state())


def save_stock_zstd(path: Path) -> Path:
    """Saves with torch's own DCP, every item compressed."""
    writer = stock.FileSystemWriter(path, _extensions=[ZStandard()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state(), storage_writer=writer, no_dist=True)
    return path


def save_hub(path: Path) -> Path:
    """Makes a folder as on the Hugging Face hub: two files and an index."""
    path.mkdir(parents=True)
    files = {"model-00001-of-00002.safetensors": ("large",)}
    files["model-00002-of-00002.safetensors"] = ("weight", "half", "flag", "empty")
    for file, names in files.items():
        save_file({name: tensors()[name] for name in names}, path / file)
    index = {
        "metadata": {"total_size": 0},
        "weight_map": {n: f for f, ns in files.items() for n in ns},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return path


SAVES: dict[str, Callable[[Path], Path]] = {
    "ours": save_ours,
    "stock": save_stock,
    "zstd": save_stock_zstd,
    "hub": save_hub,
}


@dataclass(frozen=True)
class Damage:
    """One way to spoil one file."""

    file: str
    start: int
    """First byte that is not what it was."""
    stop: int
    """Behind the last one."""
    data: bytes
    """The file afterwards."""
    what: str
    also: tuple[str, bytes] | None = None
    """Another file that changes too, and what it then holds."""


def _random(file: str, seed: int) -> random.Random:
    """Returns a source that is the same in each run: the id of the attempt is not."""
    return random.Random(f"{re.sub('[0-9a-f]{16}', '', file)} {seed}")


def flips(file: str, data: bytes, count: int, seed: int) -> Iterator[Damage]:
    """Yields single flipped bits, the same for the same seed, spread over all bytes."""
    source = _random(file, seed)
    places = {0, len(data) - 1} | {
        source.randrange(
            len(data) * i // count, max(len(data) * (i + 1) // count, 1 + len(data) * i // count)
        )
        for i in range(count)
    }
    for place in sorted(p for p in places if 0 <= p < len(data)):
        yield flip(file, data, place, source.randrange(8))


def flip(file: str, data: bytes, place: int, bit: int) -> Damage:
    """Returns the damage of one flipped bit."""
    wrong = bytearray(data)
    wrong[place] ^= 1 << bit
    return Damage(file, place, place + 1, bytes(wrong), f"bit {bit} of byte {place} flipped")


def lengths(file: str, data: bytes, count: int, seed: int) -> Iterator[Damage]:
    """Yields files that were cut off, became longer, or lost or gained a piece."""
    source, length = _random(file, seed), len(data)
    for cut in sorted({0, 1, length - 1, *(source.randrange(length) for _ in range(count))}):
        yield Damage(file, cut, length, data[:cut], f"cut off at {cut}")
    for more in (b"\0", bytes(PAGE_BYTES), b"PK\5\6" + bytes(18)):
        yield Damage(file, length, length + len(more), data + more, f"{len(more)} bytes longer")
    at = source.randrange(length)
    for what, wrong in (
        ("lost", data[:at] + data[at + 1 :]),
        ("too many", data[:at] + b"\x5a" + data[at:]),
    ):
        # Why: of equal bytes it does not show which was lost.
        pairs = enumerate(zip(data, wrong, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(length, len(wrong)))
        yield Damage(file, first, max(length, len(wrong)), wrong, f"byte {at} {what}")


def pages(file: str, data: bytes, seed: int) -> Iterator[Damage]:
    """Yields files of which a page was never written, or two pages changed places."""
    source = _random(file, seed)
    starts = list(range(0, len(data), PAGE_BYTES))
    for start in starts[:: max(len(starts) // 8, 1)]:
        stop = min(start + PAGE_BYTES, len(data))
        wrong = data[:start] + bytes(stop - start) + data[stop:]
        if wrong != data:
            yield Damage(file, start, stop, wrong, f"page at {start} zero")
    for _ in range(4 if len(starts) > 2 else 0):
        a, b = sorted(source.sample(starts[:-1], 2))
        one, two = data[a : a + PAGE_BYTES], data[b : b + PAGE_BYTES]
        wrong = data[:a] + two + data[a + PAGE_BYTES : b] + one + data[b + PAGE_BYTES :]
        if wrong != data:
            yield Damage(file, a, b + PAGE_BYTES, wrong, f"pages at {a} and {b} exchanged")


def exchanges(contents: dict[str, bytes]) -> Iterator[Damage]:
    """Yields two files of one kind that changed places."""
    names = sorted(contents)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            same_kind = Path(one).suffix == Path(two).suffix
            if same_kind and contents[one] != contents[two]:
                longest = max(len(contents[one]), len(contents[two]))
                yield Damage(
                    one, 0, longest, contents[two], f"exchanged with {two}", (two, contents[one])
                )


def contents_of(path: Path) -> dict[str, bytes]:
    """Returns every file below a folder by its key."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def outcome(path: Path, expected: dict[str, Any], *, hub: bool) -> CheckpointError | bool:
    """Returns the error of a load, or whether it gave what was saved.

    Any other exception passes through: it is a failure.
    """
    into = {name: torch.zeros_like(t) for name, t in tensors().items()} if hub else blank()
    try:
        ray_dcp.load(into, checkpoint_id=path, no_dist=True)
    except CheckpointError as error:
        return error
    return bits(into) == expected


def names_file(text: str, damage: Damage) -> bool:
    """Tells whether a message names a file that was spoiled."""
    return damage.file in text or (damage.also is not None and damage.also[0] in text)
