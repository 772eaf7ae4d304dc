"""What a spool keeps of written checkpoints, for loads. Used with the spool's lock held."""

from __future__ import annotations

from collections.abc import Mapping

from ray_dcp.stage.jobs import Job
from ray_dcp.stage.kept import Kept, too_many
from ray_dcp.stage.values import InFlight, StageKey

__all__ = ["Shelf"]


class Shelf:
    """The jobs of a spool whose bytes stay.

    Args:
        jobs: Of the spool, oldest first; changed by it only.
    """

    def __init__(self, jobs: Mapping[StageKey, Job]) -> None:
        self._jobs = jobs

    def takes(self, job: Job) -> bool:
        """Returns whether a job that has ended stays, and notes that it does."""
        channel = job.channel
        job.is_kept = (
            job.order.options.keep_in_memory > 0
            and not job.is_dropped
            and channel is not None
            and job.arena is not None
            and job.error is None
            and job.is_written
            and channel.ledger.is_whole(job.order.key)
        )
        return job.is_kept

    def surplus(self) -> list[Job]:
        """Returns the jobs that are not to be kept any longer."""
        kept = [job for job in self._jobs.values() if job.is_kept]
        gone = too_many(
            [
                (
                    job.run,
                    job.order.key.attempt,
                    job.order.options.keep_in_memory,
                    job.is_committed,
                )
                for job in kept
            ]
        )
        return [job for job in kept if job.order.key.attempt in gone or not self.takes(job)]

    def of(self, attempt: str) -> Kept | None:
        """Returns what is kept of an attempt; None when nothing is."""
        jobs = [
            job for job in self._jobs.values() if job.is_kept and job.order.key.attempt == attempt
        ]
        jobs = [job for job in jobs if self.takes(job)]
        files = {file.key: file for job in jobs for file in job.kept_files()}
        arena = jobs[0].arena if jobs else None
        return Kept(arena.address, tuple(files.values())) if files and arena is not None else None

    def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed.

        Args:
            url: Of a checkpoint, or of the folder that it is in.
        """
        below = url.rstrip("/") + "/"
        return [
            InFlight(job.order.target, job.order.key.attempt, job.is_over)
            for job in self._jobs.values()
            if job.error is None
            and not (job.is_committed or job.is_dropped)
            and (job.order.target.url.rstrip("/") + "/").startswith(below)
        ]
