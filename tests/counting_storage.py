"""A storage that counts what is read of data files."""

from __future__ import annotations

from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import StorageWrapper
from ray_dcp.view.checkpoint_view import CheckpointView


class Counting(StorageWrapper):
    """Passes reads on, and counts the bytes of each key."""

    def __init__(self, url: str) -> None:
        super().__init__(open_storage(url))
        self.bytes_read: dict[str, int] = {}
        self.ranges = 0

    def _count(self, key: str, num_bytes: int) -> None:
        self.bytes_read[key] = self.bytes_read.get(key, 0) + num_bytes
        self.ranges += 1

    @property
    def payload_bytes(self) -> int:
        data = (".distcp", ".safetensors")
        return sum(n for key, n in self.bytes_read.items() if key.endswith(data))

    def read(self, key, start=0, num_bytes=None):
        data = super().read(key, start, num_bytes)
        self._count(key, len(data))
        return data

    def read_into(self, key, start, target):
        super().read_into(key, start, target)
        self._count(key, len(target))


def counted_view(path: object) -> tuple[CheckpointView, Counting]:
    """Returns a view that reads through a counting storage."""
    storage = Counting(str(path))
    return CheckpointView(storage, read_checkpoint(storage, checks_later=True)), storage
