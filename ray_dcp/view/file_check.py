"""The check of one data file, from its first byte to its last.

The bytes that were checked can be passed on in their order, so that a copy need not read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import block_checks
from ray_dcp.core.processes import Stop
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import DamagedCheckpointError, StorageError
from ray_dcp.format.torch_items import torch_save_frame
from ray_dcp.io.reader import item_bytes_at_most, locate_item
from ray_dcp.store.storage import Storage
from ray_dcp.view.progress import Meter
from ray_dcp.view.stock_items import check_stock_item
from ray_dcp.view.wording import few

_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class Problem:
    """Bytes of a checkpoint that are missing, or are not those that were committed."""

    file: str
    """Key of the file, relative to the checkpoint."""
    fqn: str | None
    """Tensor or object that the bytes belong to; None if they belong to none."""
    start: int
    """First byte concerned in the file."""
    stop: int
    """End of the last byte concerned."""
    what: str
    """What was expected and what was found."""

    def __str__(self) -> str:
        whose = "" if self.fqn is None else f" of {self.fqn!r}"
        return f"{self.file} bytes [{self.start}, {self.stop}){whose}: {self.what}"


def rows_by_file(table: ChunkTable) -> list[list[int]]:
    """Returns the chunks of each data file, in the order of their bytes."""
    order = np.lexsort((table.item_offset, table.file))
    bounds = np.searchsorted(table.file[order], np.arange(len(table.files) + 1))
    return [order[bounds[i] : bounds[i + 1]].tolist() for i in range(len(table.files))]


@dataclass
class FileCheck:
    """Checks one data file from start to end; has the fields of a `VerifyReport`."""

    _storage: Storage
    _table: ChunkTable
    key: str
    _rows: list[int]
    """Chunks of the file."""
    _transforms: Sequence[tuple[str, ...] | None] | None
    _end: bytes | str
    """The checksums at the end of the file, or a description of their damage."""
    _stop: Stop
    """Ends the check of a long file early."""
    _meter: Meter
    """Counts the bytes of the file."""
    _sink: Callable[[memoryview], object] | None = None
    """Gets all bytes of the file in their order, if given."""
    checked_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[Problem] = field(default_factory=list)
    _num_bytes: int = 0
    _counted_bytes: int = 0
    _passed_bytes: int = 0
    _window_start: int = 0
    _window: memoryview = field(default_factory=lambda: memoryview(b""))

    def run(self, num_bytes: int | None, expected_bytes: int | None) -> None:
        """Checks the file, and notes what the storage can't read.

        Args:
            num_bytes: Actual length; None if the file does not exist.
            expected_bytes: Length by the manifest; None if unknown.
        """
        if num_bytes is None:
            names = list(dict.fromkeys(map(self._name, self._rows)))
            losses = f", and with it bytes of {few(names)}" if names else ""
            self._report(None, 0, expected_bytes or 0, f"the file is missing{losses}")
            return
        try:
            self.read(num_bytes, expected_bytes)
        except StorageError as error:
            what = f"unreadable: {error.message}"
            self.unread.append(Problem(self.key, None, 0, num_bytes, what))

    def read(self, num_bytes: int, expected_bytes: int | None) -> None:
        """Checks the file, which exists, and passes its bytes on.

        Args:
            num_bytes: Actual length.
            expected_bytes: Length by the manifest; None if unknown.

        Raises:
            StorageError: It can't be read.
        """
        self._num_bytes = num_bytes
        if expected_bytes is not None and num_bytes != expected_bytes:
            low, high = sorted((num_bytes, expected_bytes))
            self._report(None, low, high, f"expected {expected_bytes} bytes, found {num_bytes}")
        self._check_items(checksummed=expected_bytes is not None)
        if self._sink is not None:
            # Why not those of the file: these were compared with their digest.
            end = self._end if isinstance(self._end, bytes) else b""
            self._pass_on(num_bytes - len(end))
            self._sink(memoryview(end))

    def of(self, key: str, table: ChunkTable, rows: list[int]) -> FileCheck:
        """Returns this check as that of another name of the file, in which no byte is read again.

        Args:
            key: The other name.
            table: Chunk table of the checkpoint that has it.
            rows: Chunks of the file there, which lie as in this one.
        """
        names = {self._name(row): table.names[int(table.tensor[other])]
                 for row, other in zip(self._rows, rows, strict=True)}  # fmt: skip
        problems = [
            replace(one, file=key, fqn=None if one.fqn is None else names[one.fqn])
            for one in self.problems
        ]
        notes = [note.replace(self.key, key) for note in self.notes]
        return replace(self, key=key, checked_bytes=0, problems=problems, notes=notes)

    def count(self, position: int) -> None:
        """Counts the bytes before a position."""
        if position > self._counted_bytes:
            self._meter.add(position - self._counted_bytes, self.key)
            self._counted_bytes = position

    def _check_items(self, *, checksummed: bool) -> None:
        end = 0
        for row in self._rows:
            start = int(self._table.item_offset[row])
            stop = start + int(self._table.item_bytes[row])
            if stop > self._num_bytes:
                what = f"expected {stop} bytes or more, but the file has {self._num_bytes}"
                self._report(row, start, stop, what)
                continue
            if self._table.block_bytes[row] > 0:
                self._check_gap(end, start)
                self._check_frame(row, start, stop)
                if isinstance(self._end, bytes):
                    self._check_payload(row)
            elif self._table.payload_offset[row] < 0:
                self._check_zip(row, start, stop)
            else:
                self.notes.append(f"{self.key} has no checksums: only its length was checked")
            end = stop
        if checksummed:
            self._check_end(end)

    def _check_end(self, start: int) -> None:
        """Checks the bytes after the last item: zeros, and the checksums of the file."""
        if isinstance(self._end, str):
            # Why the whole file: without checksums, its intact bytes are unknown.
            self._report(None, 0, self._num_bytes, self._end)
            return
        # Careful: a wrong length has been reported already.
        stop = max(start, self._num_bytes - len(self._end))
        self._check_gap(start, stop)
        self.checked_bytes += self._num_bytes - stop

    def _check_gap(self, start: int, stop: int) -> None:
        for low in range(start, stop, _WINDOW_BYTES):
            high = min(stop, low + _WINDOW_BYTES)
            self._compare(None, low, bytes(high - low), "expected zeros between items")

    def _check_frame(self, row: int, start: int, stop: int) -> None:
        """Checks the bytes around the raw bytes of a tensor, which dtype and size determine."""
        table = self._table
        low = int(table.payload_offset[row])
        high = low + int(table.payload_bytes[row])
        if (low, high) == (start, stop):
            return
        tensor = table.tensor[row]
        size = tuple(table.size[row, : table.ndim[tensor]].tolist())
        frame = torch_save_frame(table.dtypes[table.dtype[tensor]], size)
        what = "expected the frame of a tensor of this dtype and shape"
        self._compare(row, start, frame.header, what)
        self._compare(row, high, frame.footer, what)

    def _compare(self, row: int | None, start: int, expected: bytes, what: str) -> None:
        found = bytes(self._bytes(start, start + len(expected)))
        self.checked_bytes += len(expected)
        if found != expected:
            pair = (np.frombuffer(data, np.uint8) for data in (found, expected))
            wrong = np.flatnonzero(np.not_equal(*pair))
            low, high = start + int(wrong[0]), start + int(wrong[-1]) + 1
            self._report(row, low, high, f"{what}, found other bytes")

    def _check_payload(self, row: int) -> None:
        table = self._table
        start, num_bytes = int(table.payload_offset[row]), int(table.payload_bytes[row])
        block = int(table.block_bytes[row])
        checks = table.checks[table.check_start[row] : table.check_start[row + 1]]
        step = max(_WINDOW_BYTES // block, 1) * block
        bad: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for low in range(0, num_bytes, step):
            high = min(num_bytes, low + step)
            found = block_checks(self._bytes(start + low, start + high), block)
            first = low // block
            bad.append(first + np.flatnonzero(found != checks[first : first + len(found)]))
        self.checked_bytes += num_bytes
        blocks = np.concatenate(bad)
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            if len(run):
                low, high = int(run[0]) * block, min(num_bytes, (int(run[-1]) + 1) * block)
                what = f"{len(run)} block(s) do not match their checksums"
                self._report(row, start + low, start + high, what)

    def _check_zip(self, row: int, start: int, stop: int) -> None:
        transforms = (self._transforms[row] if self._transforms is not None else None) or ()
        most_bytes = item_bytes_at_most(self._table, row)
        try:
            if not transforms and self._table.kind[self._table.tensor[row]] == Kind.TENSOR:
                locate_item(self._storage, self._table, row)  # as a load locates its raw bytes
            checked, note = check_stock_item(
                self._storage, self.key, start, stop, transforms=transforms, max_bytes=most_bytes
            )
        except DamagedCheckpointError as error:
            self._report(row, start, stop, error.message)
            return
        self.checked_bytes += checked
        self.count(stop)
        if note is not None:
            self.notes.append(f"{self.key}: {note}")

    def _bytes(self, start: int, stop: int) -> memoryview:
        """Returns bytes of the file, and reads ahead, as items are adjacent."""
        if not self._window_start <= start <= stop <= self._window_start + len(self._window):
            self._pass_on(start)
            length = min(max(stop - start, _WINDOW_BYTES), self._num_bytes - start)
            self._window = self._read(start, length, stop - start)
            self._window_start = start
            self.count(start)
        return self._window[start - self._window_start : stop - self._window_start]

    def _read(self, start: int, num_bytes: int, least_bytes: int) -> memoryview:
        if self._stop.asked:
            raise KeyboardInterrupt
        data = memoryview(self._storage.read(self.key, start, num_bytes))
        if len(data) < least_bytes:
            stop = start + least_bytes
            raise StorageError(
                f"expected bytes [{start}, {stop}) of {self.key}, but it became shorter",
                key=self.key,
            )
        return data

    def _pass_on(self, stop: int) -> None:
        """Passes on the bytes before a position, of the window that was checked if it has them."""
        while self._sink is not None and self._passed_bytes < stop:
            start = self._passed_bytes
            held = self._window[max(start - self._window_start, 0) : stop - self._window_start]
            if not held or start < self._window_start:
                length = min(stop - start, _WINDOW_BYTES)
                held = self._read(start, length, length)
            self._passed_bytes += len(held)
            self._sink(held)

    def _name(self, row: int) -> str:
        return self._table.names[int(self._table.tensor[row])]

    def _report(self, row: int | None, start: int, stop: int, what: str) -> None:
        fqn = None if row is None else self._name(row)
        self.problems.append(Problem(self.key, fqn, start, stop, what))
