"""`GroupSessions`: the sessions of the process groups of this process, and that of `connect`."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

from ray_dcp.core.processes import ProcessLock
from ray_dcp.session.session import Session


class GroupSessions:
    """The sessions of the process groups of this process, and that of `connect`."""

    def __init__(self) -> None:
        self.explicit: Session | None = None
        self._lock = ProcessLock()
        self._groups: dict[int, tuple[weakref.ref[Any], Session | None]] = {}
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def making(self, group: Any) -> threading.Lock:
        """Returns the lock under which the first session of a group is created."""
        with self._lock:
            return self._making[id(group)]

    def of(self, group: Any) -> tuple[bool, Session | None]:
        """Returns whether this very group object is registered, and its session.

        A group that was destroyed and created again is another object, and has no session yet; nor
        has one whose session is outlived.
        """
        with self._lock:
            known, session = self._groups.get(id(group), (None, None))
            if known is None or known() is not group:
                return False, None
            if session is not None and session.is_outlived:
                return False, None
            return True, session

    def set(self, group: Any, session: Session | None) -> None:
        """Registers the session of a group, None for a group of one; closes unused ones."""
        with self._lock:
            dead = [key for key, (known, _) in self._groups.items() if known() is None]
            # Why the group itself: its session is outlived.
            replaced = [id(group)] if id(group) in self._groups else []
            ended = [self._groups.pop(key)[1] for key in {*dead, *replaced}]
            self._groups[id(group)] = (weakref.ref(group), session)
        for each in ended:
            if each is not None:
                each.close()

    def close_all(self) -> None:
        """Closes every session of this process."""
        with self._lock:
            sessions = [self.explicit, *(session for _, session in self._groups.values())]
            self._groups.clear()
        for session in sessions:
            if session is not None:
                session.close()


sessions = GroupSessions()
"""The sessions of this process. A forked child keeps them, and they refuse calls: without them it
would save alone, to the same places."""
