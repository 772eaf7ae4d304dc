"""`KeptParts`: which parts a step may link to, so that no flipped bit goes on with a run.

Each step that keeps a part shares its bytes with the one before. The rule is that of saves that
link what is unchanged: a part is linked only by a process that knows its bytes, as it saw them
written or has read them, less than a day and fewer than 100 links ago. Half of that after it knew
them, they are read again in the background. What is found damaged is marked, and kept by no step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import Manifest
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.io.records import read_slots
from ray_dcp.job.step_files import folders_of
from ray_dcp.manager.catalogue import Root, StepFound, look, look_at_step
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.settings import Settings
from ray_dcp.planning.sources import Known
from ray_dcp.stage.write_queue import step_behind
from ray_dcp.transform.copying import link_checkpoint, plan_copy
from ray_dcp.view.damage_marks import mark_found
from ray_dcp.view.verify import verify

_MOST_KNOWN = 1024
"""Most parts that are remembered."""


class KeptParts:
    """Links parts of committed steps into new ones. Thread-safe; its methods are for threads.

    Args:
        root: The run.
        settings: How its steps are named.
        now_s: A clock that never goes back, in seconds.
    """

    def __init__(
        self, root: Root, settings: Settings, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._settings, self._now_s = root, settings, now_s
        self._known: dict[str, Known] = {}
        """By the attempt that committed the part."""
        self._lock = threading.Lock()

    def wrote(self, attempt: str) -> None:
        """Accepts that a part was saved just now."""
        self._put(attempt, Known(self._now_s()))

    def link(self, found: StepFound, part: str, folder: str) -> str:
        """Gives a step the part of an earlier one, and returns the attempt that commits it there.

        Args:
            found: The earlier step.
            part: Name of the part.
            folder: Folder of the part in the new step, below the run.

        Raises:
            CheckpointNotFoundError: The earlier step was deleted meanwhile.
            DamagedCheckpointError: The part is damaged; steps that have it are marked.
            StorageError: The part can't be read.
        """
        root = self._root
        with ReaderLease(root, found.step, lease_s=bounds.LEASE_S):
            source = root.open(folders_of(found)[part])
            checkpoint = read_checkpoint(source, checks_later=True)
            before = checkpoint.attempt or ""
            known = self._known.get(before)
            if known is None or not known.may_be_linked(self._now_s()):
                known = self._read(found, part, before)
            plan = plan_copy(source, checkpoint)
            attempt = link_checkpoint(source, plan, root.below(folder))
        self._put(attempt, known.linked())
        return attempt

    def check_due(self, name: str, step: int) -> None:
        """Reads the parts that a committed step has kept, if they are due; marks what is damaged.

        What can't be read now is read before a step keeps it the next time.

        Args:
            name: Folder of the step.
            step: Its number.
        """
        step_behind(19)
        with suppress(CheckpointError):
            found = look_at_step(self._root, name, step)
            for part, folder in () if found is None else folders_of(found).items():
                attempt = _attempt_at(self._root, folder)
                known = self._known.get(attempt)
                if found and known is not None and known.is_due(self._now_s()):
                    self._read(found, part, attempt)

    def _read(self, found: StepFound, part: str, attempt: str) -> Known:
        """Reads a part of a committed step through its checksums.

        Raises:
            DamagedCheckpointError: It is damaged; steps that have it are marked.
            StorageError: It can't be read.
        """
        since_s, target = self._now_s(), self._root.below(folders_of(found)[part])
        report = verify(target)
        if report.ok:
            known = Known(since_s)
            self._put(attempt, known)
            return known
        told = "; ".join(map(str, (report.problems or report.unread)[:3]))
        more: dict[str, Any] = {"checkpoint_id": target.url, "step": found.step, "key": part}
        if not report.problems:
            raise StorageError(
                f"expected to read the part {part!r} of step {found.step} before a step keeps it, "
                f"but its storage does not read {told}. Save the part in this step",
                **more,
            )
        with self._lock:
            self._known.clear()
        what = f"The part {part!r} is damaged: {told}"
        root = self._root
        mark_found(
            root.target,
            what,
            partial(self._damaged, part),
            "No step keeps it any more",
            root.opener,
        )
        raise DamagedCheckpointError(
            f"expected the part {part!r} of step {found.step} to be whole, so that a step can keep "
            f"it, but it is damaged: {told}. Save the part in this step",
            **more,
        )

    def _damaged(self, part: str) -> dict[int, str]:
        """Returns the committed steps of which a part is damaged, with their attempts."""
        steps = {}
        for found in look(self._root, self._settings.names).steps.values():
            folder = folders_of(found).get(part)
            if folder is not None and verify(self._root.below(folder)).problems:
                steps[found.step] = found.attempt
        return steps

    def _put(self, attempt: str, known: Known) -> None:
        with self._lock:
            self._known.pop(attempt, None)
            self._known[attempt] = known
            while len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]


def _attempt_at(root: Root, folder: str) -> str:
    """Returns the attempt that is committed in a folder.

    Raises:
        StorageError: None is.
    """
    decides = read_slots(root.open(folder)).decides
    if decides is None or not isinstance(decides.record, Manifest):
        raise StorageError(f"{root.below(folder).url} lacks the record that was written there")
    return decides.record.attempt
