"""Receipts of many files as columns: 10,000 of them are a few arrays and not 10,000 objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import DamagedCheckpointError, InternalError
from ray_dcp.format.checksums import DIGEST_BYTES, digest
from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.values import Int64Array, UInt64Array
from ray_dcp.protocol.messages import DeferredPlace, FileReceipt

__all__ = ["FileReceipts", "join_receipts", "pack_receipts"]

_T = TypeVar("_T", bound=np.generic)

_SEPARATOR = "\n"
"""Between keys: no key that we give has one."""


@dataclass(frozen=True, eq=False)
class FileReceipts:
    """What `FileReceipt` says, of `f` files.

    Attributes:
        file: int64[f], indices into the plan's files.
        keys: All keys, one a line.
        num_bytes: int64[f].
        digests: 16 bytes for each file.
        count: int64[f], how many block checksums each has.
        parts: uint64[…], those of all files one after another, in any number of arrays.
        num_places: int64[f], how many deferred items each has.
        places: int64[k, 4], row, item offset, item bytes and block bytes of each.
        proof: Digest of `checks` by whoever found `digests` right; empty when nobody has looked.
    """

    file: Int64Array
    keys: str
    num_bytes: Int64Array
    digests: bytes
    count: Int64Array
    parts: tuple[UInt64Array, ...]
    num_places: Int64Array
    places: Int64Array
    proof: bytes = b""

    def __len__(self) -> int:
        return len(self.file)

    def __iter__(self) -> Iterator[FileReceipt]:
        starts, firsts = offsets_of(self.count).tolist(), offsets_of(self.num_places).tolist()
        keys = self.keys.split(_SEPARATOR)
        for index, file in enumerate(self.file.tolist()):
            places = self.places[firsts[index] : firsts[index + 1]].tolist()
            yield FileReceipt(
                file,
                keys[index],
                int(self.num_bytes[index]),
                self.digest_of(index),
                self.checks[starts[index] : starts[index + 1]],
                tuple(DeferredPlace(*place) for place in places),
            )

    @cached_property
    def checks(self) -> UInt64Array:
        """The block checksums of all files."""
        # Why late: a commit of 10,000 ranks has 100 MB of them and needs no second copy.
        return _joined(self.parts, np.uint64)

    @property
    def lengths(self) -> list[tuple[str, int]]:
        """Key and length of each file."""
        keys = self.keys.split(_SEPARATOR) if len(self) else []
        return list(zip(keys, self.num_bytes.tolist(), strict=True))

    def digest_of(self, index: int) -> bytes:
        """Returns the digest of one file's block checksums."""
        return self.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]

    def take(self, order: Int64Array) -> FileReceipts:
        """Returns some of them, in an order.

        Args:
            order: int64[m], positions.
        """
        if np.array_equal(order, np.arange(len(self))):
            return self
        keys = self.keys.split(_SEPARATOR)
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        checks = _rows(offsets_of(self.count), order)
        places = _rows(offsets_of(self.num_places), order)
        return FileReceipts(
            self.file[order],
            _SEPARATOR.join(map(keys.__getitem__, order.tolist())),
            self.num_bytes[order],
            digests[order].tobytes(),
            self.count[order],
            (self.checks[checks],),
            self.num_places[order],
            self.places[places],
        )

    def bad_digests(self) -> list[str]:
        """Returns the keys of those whose checksums do not have their digest.

        Files without any are passed over: their checksums may be at their own end.
        """
        # Why the proof: one digest of all is much less than one for each of 10,000 files.
        if self.proof and self.proof == _proof(self.checks, self.digests):
            return []
        starts = offsets_of(self.count).tolist()
        bad = [
            index
            for index in np.flatnonzero(self.count).tolist()
            if digest(self.checks[starts[index] : starts[index + 1]]) != self.digest_of(index)
        ]
        keys = self.keys.split(_SEPARATOR) if bad else []
        return [keys[index] for index in bad]

    def proven(self) -> FileReceipts:
        """Returns the same with a proof, for the way to the coordinator.

        Raises:
            DamagedCheckpointError: A receipt's checksums do not have its digest.
        """
        check_digests(self)
        proof = _proof(self.checks, self.digests)
        return replace(self, proof=proof)


def check_digests(receipts: FileReceipts) -> None:
    """Checks that the checksums are those that were sent.

    Raises:
        DamagedCheckpointError: They are not; all files concerned are named.
    """
    bad = receipts.bad_digests()
    if bad:
        raise DamagedCheckpointError(
            "the checksums in a receipt arrived other than they were sent, for "
            f"{', '.join(sorted(bad))}: save again"
        )


def pack_receipts(receipts: Iterable[FileReceipt]) -> FileReceipts:
    """Returns receipts as columns, in their order.

    Raises:
        InternalError: One can't be: its key has a line break, or its digest another length.
    """
    found = list(receipts)
    for one in found:
        if _SEPARATOR in one.key or len(one.digest) != DIGEST_BYTES:
            raise InternalError(
                f"expected a receipt with a key of one line and a digest of {DIGEST_BYTES} bytes, "
                f"found {one.key!r} and {len(one.digest)} bytes. Please report this",
                key=one.key,
            )
    places = [
        (place.row, place.item_offset, place.item_bytes, place.block_bytes)
        for one in found
        for place in one.deferred
    ]
    return FileReceipts(
        _column([one.file for one in found]),
        _SEPARATOR.join([one.key for one in found]),
        _column([one.num_bytes for one in found]),
        b"".join([one.digest for one in found]),
        _column([len(one.checks) for one in found]),
        (_joined([one.checks for one in found], np.uint64),),
        _column([len(one.deferred) for one in found]),
        np.array(places, dtype=np.int64).reshape(-1, 4),
    )


def join_receipts(parts: Sequence[FileReceipts | FileReceipt]) -> FileReceipts:
    """Returns all receipts as one table, by file.

    Args:
        parts: In any order.

    Raises:
        InternalError: Two are of one file.
        DamagedCheckpointError: What came together is not what was sent.
    """
    alone = [part for part in parts if isinstance(part, FileReceipt)]
    tables = [part for part in parts if isinstance(part, FileReceipts) and len(part)]
    if alone:
        tables.append(pack_receipts(sorted(alone, key=lambda one: one.file)))
    for table in tables:
        check_digests(table)
    tables.sort(key=lambda table: int(table.file[0]))
    whole = FileReceipts(
        _joined([table.file for table in tables], np.int64),
        _SEPARATOR.join([table.keys for table in tables]),
        _joined([table.num_bytes for table in tables], np.int64),
        b"".join([table.digests for table in tables]),
        _joined([table.count for table in tables], np.int64),
        tuple(part for table in tables for part in table.parts),
        _joined([table.num_places for table in tables], np.int64),
        np.concatenate([np.zeros((0, 4), np.int64), *(table.places for table in tables)]),
    )
    whole = whole.take(np.argsort(whole.file, kind="stable"))
    twice = np.flatnonzero(np.diff(whole.file) == 0)
    if len(twice):
        keys, at = whole.keys.split(_SEPARATOR), int(twice[0])
        raise InternalError(
            f"Expected one receipt for file {whole.file[at]}, but found two: "
            f"{keys[at]} and {keys[at + 1]}. Please report this",
            key=keys[at + 1],
        )
    return whole


def _proof(checks: UInt64Array, digests: bytes) -> bytes:
    return digest(checks) + digest(np.frombuffer(digests, np.uint64))


def _rows(starts: Int64Array, order: Int64Array) -> Int64Array:
    counts = np.diff(starts)[order]
    return np.repeat(starts[order], counts) + within(counts)


def _column(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def _joined(parts: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]) if len(parts) != 1 else parts[0]
