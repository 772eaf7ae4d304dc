"""The sessions of this process: one from `connect`, and one for each living process group."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.runtime.session import Session

__all__ = ["close_all", "explicit", "forget", "of_group", "set_explicit", "set_group"]


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
        from ray_dcp.runtime.company import leaves_connect

        leaves_connect()
        _explicit.clear()


def close_all() -> None:
    """Closes every session of this process."""
    with _lock:
        sessions = [*_explicit, *(entry.session for entry in _groups.values() if entry.session)]
        _groups.clear()
    for session in sessions:
        session.close()
