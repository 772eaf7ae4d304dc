"""Restores a step on all ranks: the one that is asked for, or the newest that can be loaded."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ray_dcp.entrypoints import load
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingKeyError,
    StorageError,
)
from ray_dcp.manager.catalogue import StepFound, look_at_step
from ray_dcp.manager.places import Root
from ray_dcp.manager.reading import Lease
from ray_dcp.manager.restoring import (
    RestoreReport,
    Wanted,
    candidates,
    check_wanted,
    targets_of,
    unread,
)
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.manager.together import Together
from ray_dcp.manager.writer import Writer
from ray_dcp.options import LoadOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.newest import falls_back
from ray_dcp.seam.report import LoadReport
from ray_dcp.store.opening import open_storage

__all__ = ["Restoring"]

MOST_LOOKS = 20

logger = logging.getLogger(__name__)


class Restoring:
    """One rank's part in a restore.

    Args:
        root: Where.
        settings: Of the manager.
        writer: What rank 0 looks with.
        together: What the ranks agree with.
        process_group: The ranks; the default group if None.
        no_dist: This process is alone.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        writer: Writer,
        together: Together,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> None:
        self._root = root
        self._settings = settings
        self._writer = writer
        self._together = together
        self._group = process_group
        self._no_dist = no_dist

    def restore(
        self, wanted: Wanted, state_dict: Mapping[str, Any], options: LoadOptions | None
    ) -> RestoreReport:
        """Loads a step into a state dict, in place; see `CheckpointManager.restore`."""
        wanted = check_wanted(wanted)
        with ExitStack() as leases:

            def decide(_: Sequence[Any]) -> list[tuple[int, str, dict[str, str]]]:
                return [_told(one) for one in self._chosen(wanted, leases)]

            tries = self._together.agree(f"which step is {wanted!r}", decide)
            return self._first_that_loads(wanted, tries, state_dict, options)

    def _chosen(self, wanted: Wanted, leases: ExitStack) -> list[StepFound]:
        """Returns the steps to try, on rank 0, after making sure that the first stays."""
        left = threading.Event()
        leases.callback(left.set)
        for _ in range(MOST_LOOKS):
            catalogue = self._writer.look()
            found = candidates(wanted, catalogue, self._settings.retention, self._root.url)
            first = found[0]
            lease = Lease(
                self._root, first.step, open_storage, lease_s=self._settings.lease_s
            )  # fmt: skip
            try:
                leases.enter_context(lease)
                if left.is_set():  # nobody waits for the answer any more
                    leases.close()
            except StorageError as error:
                # Why not raised: who may only read can still load; nothing keeps the step then.
                logger.info("Step %d is read without a lease: %s", first.step, error)
                return found
            # Why again: it may have been deleted before the lease was there.
            if look_at_step(self._root, first.name, first.step, open_storage) is not None:
                return found
            lease.__exit__()
        raise StorageError(
            f"{self._root.url} was deleted from {MOST_LOOKS} times while a step was looked for: "
            f"who deletes there all the time? Try again when that is over",
            checkpoint_id=self._root.url,
        )

    def _first_that_loads(
        self,
        wanted: Wanted,
        tries: Sequence[tuple[int, str, Mapping[str, str]]],
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
    ) -> RestoreReport:
        skipped: list[tuple[int, CheckpointError]] = []
        for step, name, saved in tries:
            folder = self._root.below(name)
            try:
                reports = self._load(step, folder, saved, state_dict, options, bool(skipped))
            except CheckpointError as error:
                error.step = step if error.step is None else error.step
                if wanted != "auto" or not falls_back(error):
                    raise
                # Why once more: one read that failed is no proof of damage.
                try:
                    reports = self._load(step, folder, saved, state_dict, options, True)
                except CheckpointError as again:
                    again.step = step if again.step is None else again.step
                    if not falls_back(again):
                        raise
                    skipped.append((step, again))
                    continue
            self._check_replaced(reports, skipped)
            self._tell(step, skipped)
            return RestoreReport(
                step=step, checkpoint_id=folder.url, reports=reports, skipped=tuple(skipped)
            )  # fmt: skip
        raise DamagedCheckpointError(
            f"expected a step that can be loaded, but {unread(skipped, self._root.url)}. The state "
            f"dict may hold parts of what was tried. `ray-dcp verify` lists all the damage",
            checkpoint_id=self._root.url,
        )

    def _load(
        self,
        step: int,
        folder: Target,
        saved: Mapping[str, str],
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
        is_late: bool,
    ) -> dict[str, LoadReport]:
        settings = self._settings
        parts = targets_of(folder, saved, settings.items, settings.unnamed, state_dict, step)
        return {
            name: load(
                state, checkpoint_id=path, planner=item.planner_for_load(),
                process_group=self._group, no_dist=self._no_dist,
                options=_options(options, item, is_late),
            )
            for name, item, path, state in parts
        }  # fmt: skip

    def _check_replaced(
        self, reports: Mapping[str, LoadReport], skipped: Sequence[tuple[int, CheckpointError]]
    ) -> None:
        """Raises `MissingKeyError` when values may hold what a damaged step has put there."""
        left = [key for report in reports.values() for key in report.missing]
        if skipped and left:
            raise MissingKeyError(
                f"a newer step failed after it may have overwritten values that this one lacks, so "
                f"that strict=False can't leave them as they were: "
                f"{', '.join(map(repr, left))}. Make the state dict anew and restore the older "
                f"step into it",
                key=left[0],
            )

    def _tell(self, step: int, skipped: Sequence[tuple[int, CheckpointError]]) -> None:
        """Warns of what was passed over, and lets it be saved again."""
        if not skipped or self._together.session().rank != 0:
            return
        with self._writer.lock:
            self._writer.steps.damaged.update(number for number, _ in skipped)
        for number, error in skipped:
            warnings.warn(
                f"Restored step {step} of {self._root.url} instead of the newer step {number}, "
                f"which can't be loaded: {error}. It neither counts for retention nor is it "
                f"deleted, and may be saved again; look at it with `ray-dcp verify`",
                UserWarning,
                stacklevel=5,
            )


def _told(found: StepFound) -> tuple[int, str, dict[str, str]]:
    info = found.row.info
    return found.step, found.name, {} if info is None else dict(info.items)


def _options(options: LoadOptions | None, item: Item, is_late: bool) -> LoadOptions:
    chosen = options or item.load_options
    if not is_late:
        return chosen
    # Why: a rank that still reads what another found damaged joins the next one late.
    return replace(chosen, plan_timeout_s=chosen.plan_timeout_s + chosen.read_timeout_s)
