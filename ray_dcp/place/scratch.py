"""Temporary directories beside what a command writes, by whose names their owners can be asked.

A process that is killed leaves its directory; the next command at the place deletes it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.io.lease_holders import LeaseHolder, this_process
from ray_dcp.place.done_marks import remove_mark

_NAME = re.compile(
    r"\.ray-dcp-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d*)-(?P<work>[0-9a-f]{16})"
)


@contextmanager
def scratch(
    parent: Path, work: str = "", *, is_kept: Callable[[Path], bool] = lambda made: False
) -> Iterator[Path]:
    """Yields a new directory in another one, and deletes it afterwards.

    Directories there whose processes are known to be dead are deleted, too.

    Args:
        parent: The other directory.
        work: What is made, as 16 hex digits, for `dead_scratch`.
        is_kept: Whether the directory stays if the block fails, so that the repeated command finds
            it.

    Raises:
        OSError: It can't be made.
    """
    remove_dead_scratch(parent)
    here = this_process()
    owner = f"{_machine(here)}-{here.pid}-{here.started}"
    made = parent / f".ray-dcp-{owner}-{work or secrets.token_hex(8)}"
    made.mkdir(mode=0o755)
    try:
        yield made
    except BaseException:
        if not is_kept(made):
            shutil.rmtree(made, ignore_errors=True)
        raise
    remove_mark(partial(shutil.rmtree, made, ignore_errors=True))


def remove_dead_scratch(parent: Path) -> None:
    """Deletes the directories of `scratch` in another one whose processes are known to be dead."""
    for one in dead_scratch(parent):
        shutil.rmtree(one, ignore_errors=True)


def dead_scratch(parent: Path, work: str = "") -> list[Path]:
    """Returns the directories of `scratch` in another one whose processes are known to be dead.

    Args:
        parent: The other directory.
        work: Only those of this work; of any if empty.
    """
    here, found = this_process(), []
    with suppress(OSError):
        for name in sorted(os.listdir(parent)):
            one = _NAME.fullmatch(name)
            if one is None or one["machine"] != _machine(here) or work not in ("", one["work"]):
                continue
            holder = LeaseHolder(here.machine, int(one["pid"]), one["started"])
            if holder.lives_here(here) is False:
                found.append(parent / name)
    return found


def _machine(here: LeaseHolder) -> str:
    return digest_bytes(here.machine.encode()).hex()[:8]
