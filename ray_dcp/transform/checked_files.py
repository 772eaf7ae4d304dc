"""The data files of a checkpoint, read once, by who writes their bytes elsewhere.

What is damaged is found by the check of `verify`, while the bytes pass.
"""

from __future__ import annotations

from collections.abc import Callable

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.damage import DAMAGE
from ray_dcp.core.processes import Stop
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.store.storage import Storage
from ray_dcp.view.file_check import FileCheck, rows_by_file
from ray_dcp.view.progress import Meter


class CheckedFiles:
    """Reads the data files of a checkpoint from start to end, for who passes their bytes on.

    Args:
        storage: Storage of the checkpoint.
        checkpoint: The opened checkpoint.
        stop: Ends a long read early, by `KeyboardInterrupt`.

    Raises:
        DamagedCheckpointError: The chunk table is damaged.
        StorageError: The chunk table can't be read.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, stop: Stop) -> None:
        self._storage, self._checkpoint, self._stop = storage, checkpoint, stop
        self._table = checkpoint.table
        self._numbers = {key: number for number, key in enumerate(self._table.files)}
        self._rows = rows_by_file(self._table)

    def read(
        self, key: str, num_bytes: int, sink: Callable[[memoryview], object], meter: Meter
    ) -> str | None:
        """Reads a data file once, and returns what is damaged in it, or None.

        Args:
            key: Name of the file. One that the chunk table does not name has the digest that its
                manifest tells: the chunk table itself.
            num_bytes: Its length.
            sink: Is called with all of its bytes, in their order. The caller takes them back if
                the file is damaged.
            meter: Counts the bytes.

        Raises:
            StorageError: The file can't be read.
        """
        checkpoint, number = self._checkpoint, self._numbers.get(key)
        if number is None:
            return self._read_table(key, num_bytes, sink, meter)
        ends_of = checkpoint.check_file
        check = FileCheck(
            self._storage, self._table, key, self._rows[number], checkpoint.transforms,
            ends_of.end_of(number, num_bytes) if ends_of else b"", self._stop, meter, sink,
        )  # fmt: skip
        check.read(num_bytes, num_bytes if checkpoint.manifest is not None else None)
        check.count(num_bytes)
        if not check.problems:
            return None
        # Why: a save of this process could link to files of this checkpoint.
        DAMAGE.add(self._storage.url)
        more = f", and {n} more like it" if (n := len(check.problems) - 1) else ""
        return f"{check.problems[0]}{more}"

    def _read_table(
        self, key: str, num_bytes: int, sink: Callable[[memoryview], object], meter: Meter
    ) -> str | None:
        data = self._storage.read(key, 0, num_bytes)
        meter.add(len(data), key)
        sink(memoryview(data))
        manifest = self._checkpoint.manifest
        if manifest is None or digest_bytes(data).hex() == manifest.table.digest:
            return None
        return f"expected the bytes of {key} that the manifest names, found others"
