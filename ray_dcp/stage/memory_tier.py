"""The memory tier, for loads: reads what nodes keep of a checkpoint from there, before storage.

Windows of this node are mapped, and copied to where they belong. Of other nodes the stager sends
the bytes that are asked for, as objects that Ray moves. These bytes are verified like those from
storage. Nothing here decides what is loaded: only committed checkpoints are, and a byte that memory
does not have is read from storage.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray_dcp.core import bounds
from ray_dcp.core.processes import Stop
from ray_dcp.errors import CheckpointError
from ray_dcp.place.outcome import outcome
from ray_dcp.session.names import NAMESPACE, kept_key, parts_of, stagers_key
from ray_dcp.stage.orders import InFlight, StagedWindow
from ray_dcp.stage.tier_files import Part, TierEntry, TierFile, cut
from ray_dcp.stage.window_bytes import WindowBytes, runs_of
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage, StorageWrapper

FETCH_BYTES = 16 << 20
"""How much of another node's memory is asked for at a time."""

FETCHES_AHEAD = 2
"""How many of these a thread asks for before the first one has come: Ray moves one meanwhile."""

logger = logging.getLogger(__name__)


class MemoryTierStorage(StorageWrapper):
    """A storage of which some files are also in memory: those of one attempt that the nodes kept.

    If this node lacks a file, the others are asked.

    Other nodes are asked when this one lacks a file.

    Args:
        inner: The storage that has all bytes.
        attempt: Id of the attempt.
        namespace: Ray namespace of the stagers.
        here: Handles of the stagers of this node.

    Attributes:
        bytes_from_memory: How many bytes were taken from there.
        is_empty: Nothing is kept anywhere.
    """

    # Why: what is in memory is not read.
    read_ahead = None

    def __init__(self, inner: Storage, attempt: str, namespace: str, here: list[Any]) -> None:
        super().__init__(inner)
        self.bytes_from_memory = 0
        self._attempt = attempt
        self._namespace = namespace
        self._lock = threading.Lock()
        self._files: dict[str, _InMemory] = {}
        self._lent: list[_Loan] = []
        self._unasked = True
        # Why first alone: most find all they need here, and Ray's tables take a while to answer.
        self._ask(here, is_here=True)
        self.is_empty = not (self._files or self._find_others())

    @property
    def most_threads(self) -> int | None:
        """How many can copy at a time, where all is in this machine's memory and nobody waits.

        More threads than this do not read sooner; None: nobody knows.
        """
        here = self._files and all(file.is_here for file in self._files.values())
        return len(os.sched_getaffinity(0)) if here else None

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        with self._lock:
            file = self._find(key)
        if file is None or not file.read_into(start, target):
            self._inner.read_into(key, start, target)
            return
        with self._lock:
            self.bytes_from_memory += len(target)

    def close(self) -> None:
        """Releases the mapped windows, which count in the budget until then."""
        for loan in self._lent:
            loan.end()

    def _find(self, key: str) -> _InMemory | None:
        """Returns the place of a file in memory."""
        if key not in self._files and self._unasked:
            from ray.exceptions import RayError

            self._unasked = False
            # Suppressed: Ray's tables do not answer; it comes from storage.
            with suppress(CheckpointError, RayError):
                self._ask(_handles(self._find_others()), is_here=False)
        return self._files.get(key)

    def _find_others(self) -> list[tuple[str, str]]:
        """Returns the stagers of other nodes that keep some of it: actor names and namespaces."""
        from ray_dcp.session import ray_calls

        names = ray_calls.names_from(kept_key(self._attempt, namespace=self._namespace))
        found = [parts_of(name)[-2:] for name in sorted(names)]
        return [(actor, self._namespace) for node, actor in found if node != _node_id()]

    def _ask(self, stagers: list[Any], *, is_here: bool) -> None:
        import ray

        from ray_dcp.session import ray_calls

        asked = {stager.kept.remote(self._attempt): stager for stager in stagers if stager}
        if not asked:
            return
        done, _ = ray_calls.wait([*asked], num_returns=len(asked), timeout=bounds.TIER_ANSWER_S)
        for ref in done:
            # Suppressed: that node has died since.
            with suppress(ray.exceptions.RayError):
                self._add(ray_calls.get(ref), asked[ref], is_here)

    def _add(self, kept: TierEntry | None, stager: Any, is_here: bool) -> None:
        if kept is None:
            return
        loan = _Loan(stager) if is_here else None
        if loan is not None:
            self._lent.append(loan)
        for file in kept.files:
            self._files[file.key] = _InMemory(file, stager, loan)


class NodeMemory:
    """The memory tier of a cluster, for one load.

    Args:
        namespace: Ray namespace of the stagers.
    """

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self._namespace = namespace

    def storage(self, storage: Storage, attempt: str) -> MemoryTierStorage | None:
        """Returns a storage that reads from memory what the nodes kept of an attempt.

        Args:
            storage: The storage that has all bytes.
            attempt: Id of the attempt to load.

        Returns:
            None when there is no Ray here, or nothing is kept.
        """
        ray = _ray()
        if ray is None:
            return None
        # Suppressed: without memory it is loaded from storage.
        with suppress(CheckpointError, ray.exceptions.RayError):
            found = MemoryTierStorage(storage, attempt, self._namespace, self._stagers_here())
            return None if found.is_empty else found
        return None

    def await_staged(self, url: str, timeout_s: float, stop: Stop) -> None:
        """Returns when no save to a place is staged on this node whose outcome is open.

        Such a save is in memory, safe from the death of its ranks, and will be committed in a
        moment: to load what is older would lose it.

        Args:
            url: URL of the checkpoint, or of the folder that contains it.
            timeout_s: Longest wait, in seconds.
            stop: Ends the wait early.
        """
        ray = _ray()
        stagers: list[Any] = []
        # Suppressed: nobody can say what is staged; what was committed is loaded.
        with suppress(CheckpointError, *(() if ray is None else (ray.exceptions.RayError,))):
            stagers = [] if ray is None else self._stagers_here()
        if ray is None or not stagers:
            return
        from ray_dcp.session import ray_calls

        now_s = begin_s = quiet_s = time.monotonic()
        pause_s = 0.02
        while now_s < begin_s + timeout_s and not stop.asked:
            found: list[InFlight] = []
            for stager in [*stagers]:
                try:
                    found += ray_calls.get(
                        stager.in_flight.remote(url), timeout=bounds.TIER_ANSWER_S
                    )
                except ray.exceptions.RayError:
                    stagers.remove(stager)
            left = [one for one in found if _is_open(one)]
            now_s = time.monotonic()
            if not all(one.is_written for one in left):
                quiet_s = now_s
            if not left or now_s > quiet_s + bounds.TIER_COMMIT_S:
                return
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _stagers_here(self) -> list[Any]:
        """Returns this node's stagers: those of earlier runs of the job are among them."""
        from ray_dcp.session import ray_calls

        names = sorted(ray_calls.names_from(stagers_key(_node_id())))
        found = [(actor, space) for *_, space, actor in map(parts_of, names)]
        return _handles([one for one in found if one[1] == self._namespace])


def _is_open(one: InFlight) -> bool:
    """Returns whether a save may still be committed.

    A place that has lost a file that was written has been removed, with all records.
    """
    try:
        if outcome(one.target, one.attempt) != "open":
            return False
        return one.file is None or bool(open_storage(one.target).list(one.file))
    except CheckpointError:
        return False


class _Loan:
    """Windows of this node's stager that this process has mapped, for one load.

    Args:
        stager: Handle of the stager.
    """

    def __init__(self, stager: Any) -> None:
        from ray_dcp.session import ray_calls

        self._stager = stager
        self._who = (ray_calls.this_caller(os.getpid()), secrets.token_hex(6))
        self._lock = threading.Lock()
        self._windows: dict[StagedWindow, WindowBytes | None] = {}

    def map(self, windows: Sequence[StagedWindow]) -> None:
        """Maps the windows that the stager lends, once."""
        import ray

        from ray_dcp.session import ray_calls

        with self._lock:
            wanted = [window for window in windows if window not in self._windows]
            if not wanted:
                return
            self._windows.update(dict.fromkeys(wanted))
            # Suppressed: they are asked for, or come from storage.
            with suppress(CheckpointError, ray.exceptions.RayError):
                asked = self._stager.lend.remote(*self._who, wanted)
                refs = dict(
                    zip(wanted, ray_calls.get(asked, timeout=bounds.TIER_ANSWER_S), strict=True)
                )
                refs = {window: ref for window, ref in refs.items() if ref is not None}
                for window, runs in zip(
                    refs, ray_calls.get([*refs.values()], timeout=bounds.TIER_ANSWER_S), strict=True
                ):
                    self._windows[window] = WindowBytes(runs_of(runs))

    def window(self, window: StagedWindow) -> WindowBytes | None:
        """Returns the bytes of a mapped window."""
        return self._windows.get(window)

    def end(self) -> None:
        """Returns all windows to the stager."""
        from ray_dcp.session import ray_calls

        with self._lock:
            self._windows.clear()
        # Suppressed: the stager is gone, or Ray.
        with suppress(Exception), ray_calls.inside():
            self._stager.take_back.remote(*self._who)


class _InMemory:
    """One file whose bytes a node has in memory.

    Args:
        file: Index of the file's bytes in memory.
        stager: Handle of the stager that keeps it.
        loan: The windows of the stager that this process has mapped; None on another node.
    """

    def __init__(self, file: TierFile, stager: Any, loan: _Loan | None) -> None:
        self._file = file
        self._stager = stager
        self._loan = loan

    @property
    def is_here(self) -> bool:
        """Whether the bytes are on this node."""
        return self._loan is not None

    def read_into(self, start: int, target: memoryview) -> bool:
        """Fills `target` with the file's bytes from `start`; returns whether it could."""
        parts = self._file.find(start, len(target))
        if parts is None:
            return False
        return (self._loan is not None and self._copy(parts, target)) or self._fetch(parts, target)

    def _copy(self, parts: Sequence[Part], target: memoryview) -> bool:
        """Copies from windows that this process has mapped."""
        loan = self._loan
        if loan is None:
            return False
        loan.map(self._file.all_windows)
        for part in parts:
            into, target = target[: part.num_bytes], target[part.num_bytes :]
            if part.window is None:
                continue
            window = loan.window(part.window)
            if window is None:
                return False
            window.read_into(part.offset, into)
        return True

    def _fetch(self, parts: Sequence[Part], target: memoryview) -> bool:
        """Copies bytes that the stager of another node sends."""
        import ray

        from ray_dcp.session import ray_calls

        wanted = [
            cut(parts, low, min(low + FETCH_BYTES, len(target)))
            for low in range(0, len(target), FETCH_BYTES)
        ]
        asked: deque[Any] = deque()
        try:
            for number, some in enumerate(wanted):
                ahead = wanted[number + len(asked) : number + FETCHES_AHEAD]
                asked += [self._stager.fetch.remote(more) for more in ahead]
                runs = ray_calls.get(asked.popleft(), timeout=bounds.TIER_ANSWER_S)
                if runs is None:
                    return False
                came = WindowBytes(runs)
                done = 0
                for part in some:
                    into, target = target[: part.num_bytes], target[part.num_bytes :]
                    if part.window is not None:
                        came.read_into(done, into)
                        done += part.num_bytes
        except ray.exceptions.RayError:
            return False
        return True


def _node_id() -> str:
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def _handles(actors: Sequence[tuple[str, str]]) -> list[Any]:
    """Returns the handles of actors that live, by name and namespace."""
    import ray

    from ray_dcp.session import ray_calls

    found = []
    for name, namespace in actors:
        # Suppressed: it has ended.
        with suppress(ValueError, CheckpointError, ray.exceptions.RayError):
            found.append(ray_calls.get_actor(name, namespace=namespace))
    return found


def _ray() -> Any:
    """Returns the module of Ray if this process uses it, else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
