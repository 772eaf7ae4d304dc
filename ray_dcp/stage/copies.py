"""A spool that also keeps copies of what other nodes keep in memory."""

from __future__ import annotations

from ray_dcp.stage.jobs import Job
from ray_dcp.stage.spool import Spool
from ray_dcp.stage.values import Slot, StagedCopy, StageKey

__all__ = ["CopyingSpool"]


class CopyingSpool(Spool):
    """See `Spool`. A copy is a share that is sealed from the start, and never written."""

    def begin_copy(self, copied: StagedCopy) -> tuple[Slot, ...] | None:
        """Takes that what another node keeps is to be copied here; returns where to.

        Returns:
            None when there is no room that nobody needs, or it is here already.
        """
        order, plan = copied.order, copied.order.plan
        with self._lock:
            channel = self._channels.get("arena")
            if channel is None or plan is None or order.key in self._jobs:
                return None
            layout = self._known.layout(order, plan)
            room = channel.ledger.num_idle
            if order.window_bytes > channel.slot_bytes or layout.num_windows > room:
                return None
            job = self._add(Job(order, plan, layout, None, channel, channel.arena, self._new()))
            job.is_sealed = job.rank_is_done = job.is_committed = True
            job.reports = dict(zip(job.files, copied.reports, strict=True))
            channel.ledger.begin(order.key, order.owner, [{0}] * layout.num_windows, keep=True)
            self._pump(channel)
            if len(job.slots) < layout.num_windows:
                self._forget(job)
                return None
            return tuple(job.slots)

    def end_copy(self, key: StageKey, *, is_whole: bool) -> bool:
        """Takes that all of a copy is here, or that it never will be; returns whether it stays."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.channel is None:
                return False
            if is_whole:
                for window in range(job.layout.num_windows):
                    job.channel.ledger.delivered(key, window)
                job.channel.ledger.finished(key, 0)
                job.is_over = True
                self._tidy(job)
            if not job.is_kept:
                self._forget(job)
            return job.is_kept
