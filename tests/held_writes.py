"""A stager that writes nothing before it may: saves that are staged and can not be committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from ray_dcp.runtime.session import Session
from ray_dcp.store import local
from tests.polling import eventually


def hold_writes(session: Session, gate: Path) -> None:
    """Has the stager of this node begin no write to a local file before `gate` is there.

    A stager that takes its place does not wait.
    """
    stager = session.staging().link().handle
    ray.get(stager.__ray_call__.remote(_hold, str(gate)))


def _hold(_stager: Any, gate: str) -> None:
    real = local._pwrite

    def held(*arguments: Any) -> int:
        assert eventually(Path(gate).exists), f"nobody made {gate}"
        return real(*arguments)

    local._pwrite = held
