"""A storage that waits at a gate: for ranks that are slow, stuck or hit at a known place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fnmatch import fnmatch

from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import StorageWrapper


class Gate:
    """Lets nothing whose key matches pass before it is opened; tells who has come.

    Args:
        pattern: Of the keys that wait.
        on_arrival: Called once in the thread that comes first, before it waits.
    """

    def __init__(self, pattern: str = "*.distcp", on_arrival: Callable[[], None] = lambda: None):
        self._pattern = pattern
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def open(self):
        self.opened.set()

    def opener(self, target):
        """Opens a storage behind this gate."""
        return GatedStorage(open_storage(target), self)

    def wait(self, key):
        if fnmatch(key, self._pattern):
            with self._lock:
                first = not self.reached.is_set()
                self.reached.set()
            if first:
                self._on_arrival()
            self.opened.wait(180)


class GatedStorage(StorageWrapper):
    def __init__(self, inner, gate):
        super().__init__(inner)
        self._gate = gate

    def read(self, key, start=0, num_bytes=None):
        self._gate.wait(key)
        return super().read(key, start, num_bytes)

    def read_into(self, key, start, target):
        self._gate.wait(key)
        super().read_into(key, start, target)

    def write(self, key, data, *, create=False):
        self._gate.wait(key)
        super().write(key, data, create=create)

    def open_writer(self, key, **how):
        return GatedWriter(super().open_writer(key, **how), key, self._gate)


class GatedWriter:
    def __init__(self, inner, key, gate):
        self._inner, self._key, self._gate = inner, key, gate
        self.commit, self.abort = inner.commit, inner.abort

    def write(self, data):
        self._gate.wait(self._key)
        self._inner.write(data)
