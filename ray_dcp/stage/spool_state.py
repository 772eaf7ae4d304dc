"""What a spool has, and what it tells of it to whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import numpy as np

from ray_dcp.stage.jobs import Channel, Job
from ray_dcp.stage.kept import Kept, Part
from ray_dcp.stage.shelf import Shelf
from ray_dcp.stage.values import InFlight, StageKey, StageProgress

__all__ = ["SpoolState"]

_JOBS_KEPT = 64
"""Finished jobs whose reports are kept for a coordinator that asks, when nobody releases them."""


class SpoolState:
    """The jobs of a node and its staging memory, to be looked at from any thread.

    Args:
        channels: By name: `"arena"` and `"store"`, or one of them.
    """

    def __init__(self, channels: dict[str, Channel]) -> None:
        self._channels = channels
        self._lock = threading.RLock()
        self._jobs: dict[StageKey, Job] = {}
        self._shelf = Shelf(self._jobs)

    def progress(self, key: StageKey) -> StageProgress | None:
        """Returns how far a job is; None when it is not known."""
        with self._lock:
            job = self._jobs.get(key)
            return None if job is None else job.progress()

    def shares(self, attempt: str) -> list[StageProgress]:
        """Returns how far each share of an attempt is, the later incarnation last."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.order.key.attempt == attempt]
            return [job.progress() for job in jobs if not job.is_dropped]

    def paces(self) -> dict[StageKey, tuple[int, int]]:
        """Returns bytes written and bytes in all of every job that is not kept for loads."""
        with self._lock:
            found = [job.progress() for job in self._jobs.values() if not job.is_kept]
        return {one.key: (one.written_bytes, one.num_bytes) for one in found}

    def kept(self, attempt: str) -> Kept | None:
        """Returns what is kept of an attempt; None when nothing is."""
        with self._lock:
            return self._shelf.of(attempt)

    def kept_attempts(self) -> set[str]:
        """Returns the attempts of which something is kept."""
        with self._lock:
            return {job.order.key.attempt for job in self._jobs.values() if job.is_kept}

    def fetch(self, parts: Sequence[Part]) -> np.ndarray | None:
        """Returns bytes of the arena as uint8[n]; None when they are gone.

        Args:
            parts: As `KeptFile.find` gave them: one after the other. What is nowhere is 0.
        """
        arena = self._channels["arena"].arena
        found = np.zeros(sum(part.num_bytes for part in parts), dtype=np.uint8)
        return found if arena is not None and arena.read_into(parts, found.data) else None

    def num_kept(self) -> int:
        """Returns how many jobs are kept for loads."""
        with self._lock:
            return sum(job.is_kept for job in self._jobs.values())

    def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed."""
        with self._lock:
            return self._shelf.in_flight(url)

    def used_bytes(self) -> int:
        """Returns how much staging memory is granted now."""
        with self._lock:
            return sum(c.ledger.num_used * c.slot_bytes for c in self._channels.values())

    def num_active(self) -> int:
        """Returns how many jobs are not over."""
        with self._lock:
            return sum(not (job.is_over and job.rank_is_done) for job in self._jobs.values())

    def num_adopted(self) -> int:
        """Returns how many jobs read from the memory of another stager."""
        with self._lock:
            return sum(job.channel is None and not job.is_over for job in self._jobs.values())

    def expect(self, owner: str, num_bytes: int) -> list[int]:
        """Returns the arena's slots that a rank will get first for so many bytes."""
        with self._lock:
            channel = self._channels["arena"]
            return channel.ledger.expect(owner, -(-num_bytes // channel.slot_bytes))

    def owned(self, owner: str) -> tuple[int, ...]:
        """Returns the arena's slots that a rank had last; one of its name may need them next."""
        with self._lock:
            channel = self._channels.get("arena")
            return () if channel is None else tuple(channel.ledger.owned(owner))

    def warm(self, index: int) -> None:
        """Touches the memory of a slot of the arena, unless that has happened."""
        channel = self._channels["arena"]
        with self._lock:
            if channel.ledger.is_warm(index) or channel.arena is None:
                return
        channel.arena.touch(index)
        with self._lock:
            channel.ledger.warmed(index)

    def shrink(self, owners: Collection[str]) -> None:
        """Gives memory back to the machine that no rank has used but those that are gone.

        Args:
            owners: Those that are there, or may come again: their slots stay warm.
        """
        channel = self._channels.get("arena")
        while channel is not None and channel.arena is not None:
            # Why one by one: to free a slot takes some milliseconds, in which others wait.
            with self._lock:
                index = channel.ledger.cool(owners)
                if index is None:
                    return
                channel.arena.discard(index)

    # With the lock held

    def _new(self) -> threading.Condition:
        return threading.Condition(self._lock)

    def _add(self, job: Job) -> Job:
        self._jobs[job.order.key] = job
        jobs = self._jobs.values()
        over = [one for one in jobs if one.is_over and one.rank_is_done and not one.is_kept]
        for old in over[:-_JOBS_KEPT]:
            del self._jobs[old.order.key]
        return job
