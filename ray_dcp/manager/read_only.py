"""`ReadOnlySteps`: what any process may ask about a root at any time, without a lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.leases import Lease
from ray_dcp.manager.restoring import SavedStep, best_step_of, saved_step
from ray_dcp.manager.retention import Mode
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.writer import Writer
from ray_dcp.store.opening import open_storage


class ReadOnlySteps:
    """The part of a `CheckpointManager` that only looks.

    Args:
        root: Where.
        settings: Of the manager.
        writer: What it looks with.
    """

    def __init__(self, root: Root, settings: Settings, writer: Writer) -> None:
        self._root = root
        self._settings = settings
        self._writer = writer
        self._closed = False
        self._wait: Callable[[float], object] = threading.Event().wait

    @property
    def path(self) -> str:
        """Absolute path or URL of the root."""
        return self._root.url

    def all_steps(self) -> list[int]:
        """Returns the committed steps, ascending, by a new look at the storage.

        Raises:
            StorageError: It can't be read.

        Complexity:
            One listing, and one small read for each step that is new since the last look.
        """
        return list(self._writer.look().steps)

    def latest_step(self) -> int | None:
        """Returns the newest committed step; None when there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Returns the step with the best value of a metric; None where no step has it.

        Args:
            metric: Name; that of the retention's `BestN` if None.
            mode: "min" or "max"; that of `BestN`, or else "min", if None.

        Raises:
            InvalidRequestError: It is not clear which metric is meant.
        """
        return best_step_of(self._writer.look(), self._settings.retention, metric, mode)

    def step_info(self, step: int) -> SavedStep:
        """Returns what is known of a step: metrics, metadata, tags, items, and where it is.

        Raises:
            CheckpointNotFoundError: It is not committed.
        """
        catalogue = self._writer.look()
        found = catalogue.steps.get(step)
        if found is None:
            known = list(catalogue.steps)[-8:]
            raise CheckpointNotFoundError(
                f"expected step {step} in {self.path}, found {known or 'no committed step'}",
                step=step,
            )
        return saved_step(found, self.path, catalogue.tags.get(step, frozenset()))

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Keeps a step from being deleted while it is entered, by whichever process writes.

        Args:
            step: Which step.

        Yields:
            Path or URL of its folder.

        Raises:
            CheckpointNotFoundError: It is not committed, or is being deleted.
            StorageError: The lease could not be written.
        """
        with Lease(self._root, step, open_storage, lease_s=self._settings.lease_s):
            yield self.step_info(step).checkpoint_id

    def follow(
        self,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        poll_s: float = 10.0,
    ) -> Iterator[int]:
        """Waits for new steps, and gives the newest each time; for evaluation beside the training.

        While the body of the loop runs, the step is not deleted.

        Args:
            newer_than: Only later steps than this; any if None.
            timeout_s: The iterator ends when no new step comes for so long; never if None.
            poll_s: How often to look, in seconds.

        Yields:
            A step that was committed.

        Raises:
            StorageError: The storage can't be read.
        """
        last = -1 if newer_than is None else newer_than
        since_s = time.monotonic()
        while not self._closed:
            newest = self.latest_step()
            if newest is not None and newest > last:
                try:
                    with self.reading(newest):
                        last = newest
                        yield newest
                except CheckpointNotFoundError:
                    continue  # deleted since it was listed: there is a newer one
                since_s = time.monotonic()
                continue
            if timeout_s is not None and time.monotonic() - since_s >= timeout_s:
                return
            self._wait(poll_s if timeout_s is None else min(poll_s, timeout_s))
