"""For authors of storages: conformance suites that one subclasses, scripts of faults, a local S3.

**A storage of your own.** Subclass `StorageConformance` in a test module::

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path / "checkpoint")

**A fault.** A `Script` says what goes wrong, and fails the test when it was never hit:

    >>> import errno
    >>> from ray_dcp.errors import StorageError
    >>> from ray_dcp.store.memory import MemoryStorage
    >>> from ray_dcp.testing import Fault, Script
    >>> full = Fault(operation="write", key="*.json", error=errno.ENOSPC)
    >>> with Script([full]) as script:
    ...     try:
    ...         script.wrap(MemoryStorage("doc-full")).write("note.json", b"{}")
    ...     except StorageError as error:
    ...         print("ENOSPC" in str(error))
    True

The conformance suites are loaded on first use: they need pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_dcp.store.fault_injection import Call, CrashError, Fault, FaultyStorage, Script
from ray_dcp.testing.dev_store import DevStore

if TYPE_CHECKING:
    from ray_dcp.testing.storage_conformance import StorageConformance

__all__ = [
    "Call",
    "CrashError",
    "DevStore",
    "Fault",
    "FaultyStorage",
    "Script",
    "StorageConformance",
]


def __getattr__(name: str) -> Any:
    if name != "StorageConformance":
        raise AttributeError(f"module 'ray_dcp.testing' has no attribute {name!r}")
    from ray_dcp.testing import storage_conformance

    return storage_conformance.StorageConformance
