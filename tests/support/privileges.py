"""Takes the rights of root from a thread: what file permissions forbid is forbidden to it, too."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522
"""`_LINUX_CAPABILITY_VERSION_3`: two words of each set."""
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


def _call(name: str, sets: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(ctypes.byref(header), ctypes.byref(sets)):
        raise OSError(ctypes.get_errno(), f"{name} failed")


@contextmanager
def without_root() -> Iterator[None]:
    """Lets file permissions count for this thread, and for those that it starts, in the block."""
    if os.geteuid() != 0:
        yield
        return
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper words
    _call("capget", sets)
    before, sets[0] = sets[0], sets[0] & ~_OVERRIDES
    _call("capset", sets)
    try:
        yield
    finally:
        sets[0] = before
        _call("capset", sets)
