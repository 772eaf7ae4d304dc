"""For authors of storages and of operations: conformance suites, fault scripts, crash enumeration.

**A storage of your own.** Subclass `StorageConformance` in a test module, and let everything that
ray_dcp does be interrupted on it, at every call::

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path / "checkpoint")

    @pytest.mark.parametrize("operation", registered_operations(), ids=str)
    def test_my_storage_keeps_checkpoints_whole(operation, tmp_path):
        numbers = itertools.count()
        check_crashes(operation, storage=lambda: MyStorage(tmp_path / str(next(numbers))))

**An operation of your own.** Register it, with what stands before and after; the same enumeration
then takes it up. At each of its calls of the storage it dies, or goes on with an error or without
an answer, and the `INVARIANTS` are checked each time:

    >>> from ray_dcp.testing import NEW, OLD, check_crashes, register_operation
    >>> from ray_dcp.testing import unregister_operation
    >>> overwrite = register_operation(
    ...     "doc.overwrite",
    ...     prepare=lambda place: place.save(OLD),
    ...     run=lambda place: place.save(NEW, 3),
    ...     previous=OLD,
    ...     new=NEW,
    ... )
    >>> reached = check_crashes(overwrite, variants=["before"], every=5)
    >>> sorted(reached.stood), reached.told == {"nothing": reached.points["before"]}
    (['new', 'previous'], True)
    >>> unregister_operation("doc.overwrite")

**A single fault.** A `Script` says what goes wrong, and fails the test when it was never hit:

    >>> import errno
    >>> from ray_dcp.errors import StorageError
    >>> from ray_dcp.store.memory import MemoryStorage
    >>> from ray_dcp.testing import Fault, Place, Script
    >>> full = Fault(operation="commit", key="*.distcp", error=errno.ENOSPC)
    >>> with Script([full]) as script:
    ...     try:
    ...         Place(script.wrap(MemoryStorage("doc-full"))).save(NEW)
    ...     except StorageError as error:
    ...         print("ENOSPC" in str(error), error.rank)
    True 0

Names are loaded on first use: the conformance suites need pytest, most others torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.store.faults import Call as Call
    from ray_dcp.store.faults import CrashError as CrashError
    from ray_dcp.store.faults import Fault as Fault
    from ray_dcp.store.faults import FaultyStorage as FaultyStorage
    from ray_dcp.store.faults import Script as Script
    from ray_dcp.testing.crashes import Reached as Reached
    from ray_dcp.testing.crashes import check_crashes as check_crashes
    from ray_dcp.testing.dev_store import DevStore as DevStore
    from ray_dcp.testing.interruptions import ALL_VARIANTS as ALL_VARIANTS
    from ray_dcp.testing.interruptions import CRASHES as CRASHES
    from ray_dcp.testing.invariants import INVARIANTS as INVARIANTS
    from ray_dcp.testing.invariants import Aftermath as Aftermath
    from ray_dcp.testing.part_writer_conformance import (
        PartWriterConformance as PartWriterConformance,
    )
    from ray_dcp.testing.registry import NEW as NEW
    from ray_dcp.testing.registry import NEXT as NEXT
    from ray_dcp.testing.registry import OLD as OLD
    from ray_dcp.testing.registry import Operation as Operation
    from ray_dcp.testing.registry import Place as Place
    from ray_dcp.testing.registry import register_operation as register_operation
    from ray_dcp.testing.registry import registered_operation as registered_operation
    from ray_dcp.testing.registry import registered_operations as registered_operations
    from ray_dcp.testing.registry import unregister_operation as unregister_operation
    from ray_dcp.testing.storage_conformance import StorageConformance as StorageConformance
    from ray_dcp.testing.system_calls import interrupted_system as interrupted_system
    from ray_dcp.testing.unconditional_storage import UnconditionalStorage as UnconditionalStorage

_HOMES = {
    "ALL_VARIANTS": "ray_dcp.testing.interruptions",
    "Aftermath": "ray_dcp.testing.invariants",
    "CRASHES": "ray_dcp.testing.interruptions",
    "Call": "ray_dcp.store.faults",
    "CrashError": "ray_dcp.store.faults",
    "DevStore": "ray_dcp.testing.dev_store",
    "Fault": "ray_dcp.store.faults",
    "FaultyStorage": "ray_dcp.store.faults",
    "INVARIANTS": "ray_dcp.testing.invariants",
    "NEW": "ray_dcp.testing.registry",
    "NEXT": "ray_dcp.testing.registry",
    "OLD": "ray_dcp.testing.registry",
    "Operation": "ray_dcp.testing.registry",
    "PartWriterConformance": "ray_dcp.testing.part_writer_conformance",
    "Place": "ray_dcp.testing.registry",
    "Reached": "ray_dcp.testing.crashes",
    "Script": "ray_dcp.store.faults",
    "StorageConformance": "ray_dcp.testing.storage_conformance",
    "UnconditionalStorage": "ray_dcp.testing.unconditional_storage",
    "check_crashes": "ray_dcp.testing.crashes",
    "interrupted_system": "ray_dcp.testing.system_calls",
    "register_operation": "ray_dcp.testing.registry",
    "registered_operation": "ray_dcp.testing.registry",
    "registered_operations": "ray_dcp.testing.registry",
    "unregister_operation": "ray_dcp.testing.registry",
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
