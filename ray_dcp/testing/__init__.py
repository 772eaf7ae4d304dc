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

Names are loaded on first use: the conformance suites need pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.store.fault_injection import Call as Call
    from ray_dcp.store.fault_injection import CrashError as CrashError
    from ray_dcp.store.fault_injection import Fault as Fault
    from ray_dcp.store.fault_injection import FaultyStorage as FaultyStorage
    from ray_dcp.store.fault_injection import Script as Script
    from ray_dcp.testing.dev_store import DevStore as DevStore
    from ray_dcp.testing.storage_conformance import PartWriterConformance as PartWriterConformance
    from ray_dcp.testing.storage_conformance import StorageConformance as StorageConformance

_HOMES = {
    "Call": "ray_dcp.store.fault_injection",
    "CrashError": "ray_dcp.store.fault_injection",
    "DevStore": "ray_dcp.testing.dev_store",
    "Fault": "ray_dcp.store.fault_injection",
    "FaultyStorage": "ray_dcp.store.fault_injection",
    "PartWriterConformance": "ray_dcp.testing.storage_conformance",
    "Script": "ray_dcp.store.fault_injection",
    "StorageConformance": "ray_dcp.testing.storage_conformance",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_dcp.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
