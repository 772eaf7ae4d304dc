"""The sessions of this process: one from `connect`, and one for each living process group.

It also checks that the ranks of a job find their session in one way: all by their process group, or
all by `connect`. A rank that uses `connect` never takes part in the group's broadcast, and the
others would wait there until the group's own timeout. The job's store, which torch has anyway,
tells them apart.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ray_dcp.errors import RankDisagreementError
from ray_dcp.protocol.error_aggregation import name_ranks
from ray_dcp.protocol.liveness import LONG_WAIT_S

if TYPE_CHECKING:
    from ray_dcp.runtime.session import Session


@dataclass(frozen=True)
class _Entry:
    group: weakref.ref[Any]
    session: Session | None


_lock = threading.Lock()
_explicit: list[Session] = []
_groups: dict[int, _Entry] = {}


def explicit() -> Session | None:
    """Returns the open session that `connect` made, if any."""
    return _explicit[0] if _explicit else None


def set_explicit(session: Session) -> None:
    """Makes a session the one of this process."""
    _explicit[:] = [session]


def of_group(group: Any) -> tuple[bool, Session | None]:
    """Returns whether this very group object has been here, and its session.

    A group that was destroyed and made again is another object, and has no session yet.
    """
    with _lock:
        entry = _groups.get(id(group))
        if entry is None or entry.group() is not group:
            return False, None
        if entry.session is not None and entry.session.closed:
            return False, None
        return True, entry.session


def set_group(group: Any, session: Session | None) -> None:
    """Notes the session of a group (None: a group of one) and closes those of dead groups."""
    with _lock:
        dead = [key for key, entry in _groups.items() if entry.group() is None]
        entries = [_groups.pop(key) for key in dead]
        _groups[id(group)] = _Entry(weakref.ref(group), session)
    for entry in entries:
        if entry.session is not None:
            entry.session.close()


def forget(session: Session) -> None:
    """Drops a session that was closed."""
    if _explicit and _explicit[0] is session:
        leaves_connect()
        _explicit.clear()


def close_all() -> None:
    """Closes every session of this process."""
    with _lock:
        sessions = [*_explicit, *(entry.session for entry in _groups.values() if entry.session)]
        _groups.clear()
    for session in sessions:
        session.close()


LOOK_S = 10.0
"""How long to wait for the others before it is asked whether they will ever come, in seconds."""

LONGEST_S = 1800.0
"""After this the group's own collective tells who is missing, in seconds: torch's default."""

_KEY = "ray_dcp/company"

logger = logging.getLogger(__name__)


def connects(store: Any = None, rank: int | None = None) -> None:
    """Tells the job that this rank comes by `connect`, if there is a process group already.

    Args:
        store: The job's store; that of the default process group by default.
        rank: In the default group.
    """
    _tell(store, rank, lambda store, key: store.set(key, "connect"))


@contextmanager
def announced() -> Iterator[None]:
    """Tells that this rank comes by `connect`; takes it back when that fails."""
    connects()
    try:
        yield
    except BaseException:
        leaves_connect()
        raise


def leaves_connect(store: Any = None, rank: int | None = None) -> None:
    """Takes that back: this rank closed its session, and comes by the group from now on.

    Args:
        store: As for `connects`.
        rank: As for `connects`.
    """
    _tell(store, rank, lambda store, key: store.delete_key(key))


def meet(store: Any, ranks: Sequence[int], rank: int, look_s: float = LOOK_S) -> None:
    """Returns when all ranks of a group have come to make their session, or could still.

    Args:
        store: The job's store; None: nobody can be asked.
        ranks: Of the group, in the default group.
        rank: This one, in the default group.
        look_s: How often to look, in seconds.

    Raises:
        RankDisagreementError: A rank that is awaited uses `connect`.
    """
    if store is None:
        return
    group = f"{_KEY}/{len(ranks)}-{min(ranks)}-{max(ranks)}"
    store.set(f"{group}/{rank}", "group")
    missing = [other for other in ranks if other != rank]
    begin_s, is_told = time.monotonic(), False
    while missing and (waited_s := time.monotonic() - begin_s) < LONGEST_S:
        if waited_s >= LONG_WAIT_S and not is_told:
            logger.warning(
                "Rank %d has waited %.0f s to make a session: %s of the process group called "
                "neither save nor load. All ranks of a group have to",
                rank,
                waited_s,
                name_ranks(missing),
            )
            is_told = True
        if _all_came(store, [f"{group}/{other}" for other in missing], look_s):
            return
        missing = [other for other in missing if not store.check([f"{group}/{other}"])]
        connected = [other for other in missing if store.check([f"{_KEY}/connect/{other}"])]
        if connected:
            store.delete_key(f"{group}/{rank}")
            raise RankDisagreementError(
                f"Expected all ranks to come to one session, but {name_ranks(connected)} called "
                f"ray_dcp.connect, and rank {rank} relies on the torch process group. Call "
                f"connect on every rank, or on none",
                rank=rank,
            )


def _all_came(store: Any, keys: list[str], look_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=look_s))
    except RuntimeError:  # torch's own timeout error is one, in every version
        return False
    return True


def _tell(store: Any, rank: int | None, say: Callable[[Any, str], object]) -> None:
    if store is None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.runtime import ray_private

        store, rank = ray_private.job_place()
    if store is not None:
        say(store, f"{_KEY}/connect/{rank}")


def may_have_company() -> bool:
    """Returns whether this process could be a rank: it uses Ray, or a process group of several."""
    distributed = sys.modules.get("torch.distributed")
    if "ray" in sys.modules or distributed is None or not distributed.is_available():
        return "ray" in sys.modules
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)
