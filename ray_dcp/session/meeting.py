"""The ranks of a process group come together, by the store of torch's job, to make a session.

A rank that uses `connect` never takes part in the group's broadcast, and the other ranks would wait
until the group's own timeout: `await_group` detects that. It also names the ranks that call
nothing, within the deadline of the call.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.core import bounds
from ray_dcp.errors import (
    DeadlineError,
    RankDisagreementError,
)
from ray_dcp.session.job_store import (
    JOB_KEY,
    await_keys,
)

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long to wait for the other ranks, in seconds, before the store is read for whether they
come."""


def await_group(
    store: Any,
    ranks: Sequence[int],
    rank: int,
    look_s: float = LOOK_S,
    *,
    timeout_s: float = bounds.FIRST_CALL_S,
    name: str = "",
) -> None:
    """Waits until all ranks of a group create their session, as long as they may still do so.

    Args:
        store: A client of the job's store; None if there is none to read.
        ranks: Ranks of the group, as numbered in the default group.
        rank: This rank, as numbered in the default group.
        look_s: Interval at which the store is read for ranks that use `connect`, in seconds.
        timeout_s: Deadline for all ranks, in seconds.
        name: Name of the group and of this meeting of it, the same on all ranks.

    Raises:
        RankDisagreementError: A rank that is awaited uses `connect`.
        DeadlineError: A rank did not come in time.
    """
    if store is None:
        return
    own = json.dumps(_place_of(rank))
    group = f"{JOB_KEY}/{name}/{len(ranks)}-{min(ranks)}-{max(ranks)}"
    meeting = _Meeting(store, group, ranks, rank, own)
    begin_s, is_logged = time.monotonic(), False
    while True:
        waited_s = time.monotonic() - begin_s
        missing = meeting.await_ranks(min(look_s, max(timeout_s - waited_s, 0.0)))
        if not missing:
            if meeting.decide(_ALL):
                return
            meeting.follow()
            continue
        waited_s = time.monotonic() - begin_s
        if waited_s >= bounds.LONG_WAIT_S and not is_logged:
            logger.warning(
                "Rank %d has waited %.0f s to make a session: %s of the process group called "
                "neither save nor load. All ranks of a group have to",
                rank,
                waited_s,
                name_ranks(missing),
            )
            is_logged = True
        connected = [one for one in missing if store.check([f"{JOB_KEY}/connect/{one}"])]
        if not connected and waited_s < timeout_s:
            meeting.follow()
            continue
        if not meeting.decide(_LEFT):
            return
        if connected:
            raise RankDisagreementError(
                f"Expected all ranks to come to one session, but {name_ranks(connected)} called "
                f"ray_dcp.connect, and rank {rank} relies on the torch process group. Call "
                f"connect on every rank, or on none",
                rank=rank,
            )
        raise _absent(missing, meeting.places(), timeout_s)


_ALL = "all"
"""How a meeting ended: all ranks came and make the session."""


_LEFT = "left"
"""How a meeting ended: a rank left before all came."""


class _Meeting:
    """The ranks of a group that come together to make a session, by the keys of a store.

    The first rank to decide how a meeting ends decides it for all, by one compare-and-set. *Why*: a
    rank whose deadline passes while the last one comes would leave, and the others wait in the
    broadcast for it. After one has left, the others meet again.

    Args:
        store: A client of the job's store.
        group: Prefix of the keys.
        ranks: Ranks of the group.
        rank: This rank.
        own: What this rank says of itself.
    """

    def __init__(self, store: Any, group: str, ranks: Sequence[int], rank: int, own: str) -> None:
        self._store, self._group = store, group
        self._rank, self._own = rank, own
        self._others = [other for other in ranks if other != rank]
        self._number = -1
        self.follow()

    def await_ranks(self, timeout_s: float) -> list[int]:
        """Waits until all ranks are here; returns those that did not come in time."""
        keys = {self._key(other): other for other in self._others}
        return [keys[key] for key in await_keys(self._store, [*keys], timeout_s)]

    def decide(self, how: str) -> bool:
        """Ends the meeting, unless it has ended; returns whether it ended so.

        If all came while this rank would have left, it has not. If another one left while all were
        here, the next meeting begins.
        """
        ended: bytes = self._store.compare_set(self._key("end"), "", how)
        return ended.decode() == how

    def follow(self) -> None:
        """Goes on to the next meeting if a rank has left this one."""
        while self._number < 0 or self._ended() == _LEFT:
            self._number += 1
        self._store.set(self._key(self._rank), self._own)

    def places(self) -> list[_Place]:
        """Returns where this rank is, and those that came."""
        keys = [self._key(other) for other in self._others]
        came = [key for key in keys if self._store.check([key])]
        return [json.loads(self._own), *(json.loads(self._store.get(key)) for key in came)]

    def _ended(self) -> str:
        key = self._key("end")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _key(self, what: object) -> str:
        return f"{self._group}/{self._number}/{what}"


_Place = Sequence[Any]
"""Name of a host, and the numbers of the ranks there: the first, and the one after the last."""


def _place_of(rank: int) -> _Place:
    """Returns where this rank is, and which others are there as far as its launcher says."""
    local, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (local.isdecimal() and ranks.isdecimal() and os.environ.get("RANK") == str(rank)):
        return platform.node(), rank, rank + 1
    first = rank - int(local)
    return platform.node(), first, first + int(ranks)


def _absent(missing: Sequence[int], places: Sequence[_Place], timeout_s: float) -> DeadlineError:
    """Returns the error that names the ranks that did not come, with their hosts.

    Args:
        missing: The ranks.
        places: Where the others are.
        timeout_s: The deadline, in seconds.
    """
    of_host: dict[str, list[int]] = {}
    for rank in missing:
        hosts = [host for host, first, stop in places if first <= rank < stop]
        of_host.setdefault(hosts[0] if hosts else "a host that no other rank is on", []).append(
            rank
        )
    who = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in of_host.items())
    return DeadlineError(
        f"Expected all ranks of the process group to call save or load within {timeout_s:g} s "
        f"(plan_timeout_s), but these did not: {who}. Every rank calls it, not rank 0 alone: take "
        f"it out of `if rank == 0`, or give no_dist=True for what one process saves by itself. If "
        f"they ended, their logs say why",
        rank=missing[0],
    )
