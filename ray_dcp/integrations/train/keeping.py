"""Which checkpoints of a run are kept, where ray_dcp is the one that deletes; on rank 0.

Ray Train refuses to go on with a run when a folder is gone that it has registered. So of a
checkpoint that was reported the record stays that says it was deleted; of others nothing does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.manifest import Manifest, record_key, slot_of
from ray_dcp.integrations.train.names import StepFolder
from ray_dcp.manager.places import Root
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.deleting import delete
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.slots import read_slots

__all__ = ["Keeper", "Owner", "owner_of", "superfluous"]

Owner = Literal["ray_dcp", "ray", "nobody"]
Standing = Literal["committed", "deleted", "nothing"]

logger = logging.getLogger(__name__)


def owner_of(max_to_keep: int, num_to_keep: int | None) -> Owner:
    """Returns who deletes old checkpoints.

    Args:
        max_to_keep: Of the checkpointer; 0 for all.
        num_to_keep: Of Ray Train's `CheckpointConfig`.

    Raises:
        InvalidRequestError: Both would, or `max_to_keep` is no number.

    Example:
        >>> owner_of(3, None), owner_of(0, 3), owner_of(0, None)
        ('ray_dcp', 'ray', 'nobody')
    """
    if isinstance(max_to_keep, bool) or not isinstance(max_to_keep, int) or max_to_keep < 0:
        raise InvalidRequestError(
            f"max_to_keep must be a whole number from 0, but is {max_to_keep!r}", key="max_to_keep"
        )
    if max_to_keep and num_to_keep is not None:
        raise InvalidRequestError(
            f"max_to_keep={max_to_keep} and CheckpointConfig(num_to_keep={num_to_keep}) both say "
            f"what to delete, and each would delete what the other counts on. Leave one of them "
            f"out: Ray Train's keeps by score too, ray_dcp's counts saves that Ray Train was not "
            f"told of as well",
            key="max_to_keep",
        )
    if max_to_keep:
        return "ray_dcp"
    return "nobody" if num_to_keep is None else "ray"


@dataclass(frozen=True)
class Known:
    """What is known of a run."""

    committed: frozenset[StepFolder]
    uncommitted: frozenset[StepFolder]
    """Of worker groups before this one."""
    registered: frozenset[str]
    """Names of folders that Ray Train was told of."""


def superfluous(known: Known, owner: Owner, max_to_keep: int) -> list[tuple[StepFolder, bool]]:
    """Returns the folders that may go, oldest first, each with whether nothing of it need stay.

    What stays in any case: the newest that is committed, the newest that Ray Train was told of, and
    what is newer.

    Args:
        known: Of the run.
        owner: Who deletes.
        max_to_keep: How many ray_dcp keeps.

    Example:
        >>> folders = [StepFolder(step, 1, "7f3c21") for step in (10, 20, 30)]
        >>> known = Known(frozenset(folders), frozenset(), frozenset({folders[0].name}))
        >>> [(one.step, purge) for one, purge in superfluous(known, "ray_dcp", 1)]
        [(20, True)]
    """
    committed = sorted(known.committed)
    if not committed:
        return []
    told = [folder for folder in committed if folder.name in known.registered]
    stays = {committed[-1], *told[-1:]}
    gone: set[StepFolder] = set()
    if owner == "ray_dcp":
        gone.update(committed[:-max_to_keep])
    elif owner == "ray" and told:
        # Why: Ray Train never hears of these, as a newer one was registered instead.
        gone.update(one for one in committed if one < told[-1] and one not in told)
    gone.update(one for one in known.uncommitted if one < committed[-1])
    return [
        (one, one in known.committed and one.name not in known.registered)
        for one in sorted(gone - stays)
    ]


class Keeper:
    """Deletes what is superfluous. Its methods are called from one thread.

    Args:
        root: The folder of the run in which the steps lie.
        owner: Who deletes.
        max_to_keep: How many ray_dcp keeps.
        earlier: Folders that worker groups before this one left.
        registered: Names that Ray Train knows.
        check: Raises when this run has lost the right to write.
        opener: What opens storages.
    """

    def __init__(
        self,
        root: Root,
        owner: Owner,
        max_to_keep: int,
        earlier: Collection[StepFolder],
        registered: Iterable[str],
        *,
        check: Callable[[], object] = lambda: None,
        opener: Callable[[Target], Storage] = open_storage,
    ) -> None:
        self._root = root
        self._owner: Owner = owner
        self._max_to_keep = max_to_keep
        self._unseen = set(earlier)
        self._committed: set[StepFolder] = set()
        self._uncommitted: set[StepFolder] = set()
        self._registered = set(registered)
        self._check = check
        self._opener = opener

    def committed(self, folder: StepFolder) -> None:
        """Notes that a step is committed."""
        self._committed.add(folder)

    def told(self, folder: StepFolder) -> None:
        """Notes that Ray Train was told of one, and deletes what is superfluous now."""
        self._committed.add(folder)
        self._registered.add(folder.name)
        self.tidy()

    def tidy(self) -> None:
        """Deletes what is superfluous; what fails is told in the log, and left for the next."""
        try:
            self._check()
            self._look()
            known = Known(
                frozenset(self._committed), frozenset(self._uncommitted),
                frozenset(self._registered),
            )  # fmt: skip
            for folder, purge in superfluous(known, self._owner, self._max_to_keep):
                self._remove(folder, purge=purge)
        except CheckpointError as error:
            logger.warning("Old checkpoints in %s were not deleted: %s", self._root.url, error)

    def _look(self) -> None:
        for folder in sorted(self._unseen):
            standing = self._standing(folder.name)
            if standing == "committed":
                self._committed.add(folder)
            elif standing == "nothing":
                self._uncommitted.add(folder)
            self._unseen.discard(folder)

    def _standing(self, name: str) -> Standing:
        decides = read_slots(self._opener(self._root.below(name)), tolerant=True).decides
        if decides is None:
            return "nothing"
        return "committed" if isinstance(decides.record, Manifest) else "deleted"

    def _remove(self, folder: StepFolder, *, purge: bool) -> None:
        name = folder.name
        if folder in self._uncommitted and self._standing(name) == "committed":
            # A stager of the group before has committed it since.
            self._uncommitted.discard(folder)
            self._committed.add(folder)
            return
        try:
            report = delete(self._root.below(name), opener=self._opener)
        except CheckpointNotFoundError:
            report = None
        if report is not None and report.warnings:
            logger.warning("%s/%s: %s", self._root.url, name, "; ".join(report.warnings))
            return
        self._committed.discard(folder)
        self._uncommitted.discard(folder)
        if purge:
            self._purge(name)

    def _purge(self, name: str) -> None:
        """Removes what is left, records last and the one that says so at the very end."""
        # Why from the root: a folder that becomes empty is removed by the storage it lies in.
        whole = self._opener(self._root.target)
        keys = [entry.key for entry in self._opener(self._root.below(name)).list()]
        slots = sorted(slot for key in keys if (slot := slot_of(key)) is not None)
        others = [key for key in keys if slot_of(key) is None]
        whole.delete([f"{name}/{key}" for key in others])
        for slot in slots:
            whole.delete([f"{name}/{record_key(slot)}"])
