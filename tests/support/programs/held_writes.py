"""Stagers that write nothing before they may, or never: saves that can not be committed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import ray

from ray_dcp.session.session import Session
from ray_dcp.store import local
from tests.support.processes import eventually


def hold_writes(session: Session, gate: Path) -> None:
    """Has the stager of this node begin no write to a local file before `gate` is there.

    A stager that takes its place does not wait.
    """
    stager = session.ray.staging().link().handle
    ray.get(stager.__ray_call__.remote(_hold, str(gate)))


def _hold(_stager: Any, gate: str) -> None:
    real = local._pwrite

    def held(*arguments: Any) -> int:
        assert eventually(Path(gate).exists), f"nobody made {gate}"
        return real(*arguments)

    local._pwrite = held


def hang_writes(stager: Any, stuck_s: float = 1.0) -> None:
    """Has a stager's writes below a folder named "hangs" never end; others go on.

    Args:
        stager: Its handle.
        stuck_s: After how long without a byte a writer counts as stuck there, in seconds.
    """
    ray.get(stager.__ray_call__.remote(_hang, stuck_s))


def _hang(_stager: Any, stuck_s: float) -> None:
    from ray_dcp.core import bounds

    def hung(fd: int, *arguments: Any) -> int:
        if "/hangs/" in os.readlink(f"/proc/self/fd/{fd}"):
            threading.Event().wait()
        return real(fd, *arguments)

    real, local._pwrite, bounds.STUCK_S = local._pwrite, hung, stuck_s
