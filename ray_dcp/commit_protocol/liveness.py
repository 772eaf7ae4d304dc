"""Heartbeats and failure detection: which ranks are alive, frozen or slow.

A rank sends heartbeats while it takes part in an operation, so that the coordinator can distinguish
slow, frozen and absent ranks. A heartbeat is not a step of an operation: it is answered at once,
changes no machine, and may be lost.

`Liveness` records for each rank when its last message arrived, its progress and its last call. It
decides which ranks are frozen, and describes missing ranks in messages; the machines decide the
consequences. This module is pure; the clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ray_dcp.commit_protocol.error_aggregation import Call, describe_call
from ray_dcp.commit_protocol.messages import Left, OpKey, Refused
from ray_dcp.errors import DeadlineError

LONGEST_INTERVAL_S = 5.0
BEATS_IN_TIMEOUT = 6
"""Heartbeats per timeout. *Why* several: a few late or lost ones must not make a rank frozen."""


def beat_interval_s(timeout_s: float) -> float:
    """Returns the interval between heartbeats, in seconds.

    Args:
        timeout_s: `heartbeat_timeout_s`, in seconds.

    Examples:
        >>> beat_interval_s(60.0), beat_interval_s(2.0)
        (5.0, 0.3333333333333333)
    """
    return min(LONGEST_INTERVAL_S, timeout_s / BEATS_IN_TIMEOUT)


@dataclass(frozen=True)
class Doing:
    """Progress of one call of the user on a rank, at the time of a heartbeat.

    It has durations instead of times, so that clocks of two machines are never compared.
    """

    first_seq: int
    """Lowest sequence number of the call's operations."""
    last_seq: int
    """Highest sequence number of the call's operations."""
    phase: str
    """`"capturing"`, `"waiting"`, `"opening"`, `"planning"`, `"staging"` (at
    the node's stager), `"writing"` or `"reading"`."""
    phase_s: float = 0.0
    """Time since the phase began, in seconds."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Bytes to move in this phase; 0 if unknown."""
    quiet_s: float = 0.0
    """Time since bytes last moved, or since the phase began, in seconds."""
    key: str | None = None
    """Storage key in progress; of several, the one that takes longest."""

    def covers(self, key: OpKey) -> bool:
        """Returns whether an operation belongs to this call."""
        return self.first_seq <= key.seq <= self.last_seq


@dataclass(frozen=True)
class Heartbeat:
    """Rank → coordinator: the rank is alive; its progress. Answer: `HeartbeatAck`, at once."""

    session: str
    rank: int
    timeout_s: float
    """Silence, in seconds, after which this rank counts as frozen during the calls in `doings`."""
    doings: tuple[Doing, ...] = ()
    """Progress of each call of the user in progress: the rank is present for their operations."""
    awaits: tuple[OpKey, ...] = ()
    """Operations that the rank has joined, and whose failure it wants to know at once."""
    left: tuple[Left, ...] = ()
    """Operations that the rank has left before their end."""
    hold_s: float = 0.0
    """How long the coordinator may delay the answer until there is an outcome, in seconds."""


@dataclass(frozen=True)
class HeartbeatAck:
    """Coordinator → rank: the coordinator is alive; its identity, and the state of operations."""

    actor_id: str
    num_restarts: int
    """Number of restarts of the actor by Ray when this process began."""
    place: str
    """Place of the coordinator, for messages, for example `"pid 12 on node-3"`."""
    waits: tuple[str, ...] = ()
    """Descriptions of long waits for other ranks, which this rank logs."""
    failed: Mapping[OpKey, Refused] = field(default_factory=dict)
    """The errors of those operations in `Heartbeat.awaits` that have failed."""
    queued: tuple[int, ...] = ()
    """Sequence numbers of this rank's saves that wait in the queue."""
    is_up_to_date: bool = True
    """Whether this incarnation has resumed the planned saves of the previous one. Before that, the
    answer says nothing about operations, and the rank has to send `Heartbeat.left` again."""


class AwakeClock:
    """A clock that stops while its process is stopped.

    *Why*: a process that was stopped for a while must not conclude that all others were silent
    during that time. `tick` has to be called regularly; between two ticks, the clock advances by at
    most twice `tick_s`.

    Args:
        clock: Returns monotonic seconds.
        tick_s: Interval between calls of `tick`, in seconds.

    Examples:
        >>> times = iter([0.0, 1.0, 100.0, 100.5])
        >>> awake = AwakeClock(lambda: next(times), 1.0)
        >>> awake.tick(), awake.tick(), awake()
        (1.0, 3.0, 3.5)
    """

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        self._clock = clock
        self._most_s = 2 * tick_s
        self._ticked_s = clock()
        self._awake_s = 0.0

    def tick(self) -> float:
        """Advances the clock and returns the seconds that this process was awake."""
        now_s = self._clock()
        self._awake_s += min(now_s - self._ticked_s, self._most_s)
        self._ticked_s = now_s
        return self._awake_s

    def __call__(self) -> float:
        """Returns the seconds that this process was awake."""
        return self._awake_s + min(self._clock() - self._ticked_s, self._most_s)


SESSIONS = 1024
"""Most sessions whose ranks are remembered."""

ENDED = 256
"""Most operations whose end times are remembered."""

SLOW_S = 30.0
"""A rank that moved bytes within this time, in seconds, is called slow in messages, else stuck."""


@dataclass
class _Known:
    """State of one rank of one session."""

    heard_s: float | None = None
    timeout_s: float | None = None
    place: str = ""
    doings: tuple[Doing, ...] = ()
    last: tuple[OpKey, Call] | None = None
    promised: dict[OpKey, float] = field(default_factory=dict)
    """Operations during which the rank sends heartbeats, and the time at which it was last present
    for each."""


class Liveness:
    """When the last message of each rank arrived, and what it reported.

    Args:
        clock: Returns the seconds in which this process could receive messages; see `AwakeClock`.

    Examples:
        >>> now = [0.0]
        >>> liveness = Liveness(lambda: now[0])
        >>> doing = Doing(4, 4, "writing", 9.0, 10**9, 4 * 10**9)
        >>> liveness.heartbeat(Heartbeat("run", 1, 60.0, (doing,)))
        >>> now[0] = 2.0
        >>> liveness.describe(OpKey("run", 4), 1)
        'rank 1 last wrote 1.0 of 4.0 GB 2.0 s ago (slow)'

        Two ranks join operation 5 at 10 s, with `heartbeat_timeout_s=60`. Rank 0 says at 65 s that
        it writes, so it counts as present until 125 s. Rank 1 was last heard at 10 s: at 70 s it is
        frozen, whatever the deadline of the phase.

        >>> now[0], key = 10.0, OpKey("run", 5)
        >>> for rank in (0, 1):
        ...     liveness.requested(key, rank, timeout_s=60.0)
        >>> now[0] = 65.0
        >>> liveness.heartbeat(Heartbeat("run", 0, 60.0, (Doing(5, 5, "writing"),)))
        >>> liveness.due_s(key)
        {1: 70.0, 0: 125.0}
        >>> now[0] = 70.0
        >>> list(liveness.silent(key))
        [1]
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._sessions: OrderedDict[str, dict[int, _Known]] = OrderedDict()
        self._ended: OrderedDict[OpKey, float] = OrderedDict()

    # Messages

    def requested(
        self, key: OpKey, rank: int, timeout_s: float | None, call: Call | None = None
    ) -> None:
        """Records that a rank sent a request.

        Args:
            key: The operation.
            rank: The rank.
            timeout_s: Silence, in seconds, after which the rank counts as frozen, if it sends
                heartbeats until this operation has ended for it; None if it does not.
            call: The call, if the request begins an operation.
        """
        known = self._entry_of(key.session, rank)
        known.heard_s = self._clock()
        if timeout_s is not None:
            known.timeout_s = timeout_s
            known.promised[key] = known.heard_s
        if call is not None:
            known.last = (key, call)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Records a heartbeat: its rank is present for the operations in it, and no others."""
        known = self._entry_of(beat.session, beat.rank)
        known.heard_s = now_s = self._clock()
        known.timeout_s = beat.timeout_s
        known.doings = beat.doings
        for key in known.promised:
            if any(doing.covers(key) for doing in beat.doings):
                known.promised[key] = now_s

    def place(self, session: str, rank: int, place: str) -> None:
        """Registers the place of a rank, for example `"pid 12 on node-3"`."""
        self._entry_of(session, rank).place = place

    def ended(self, key: OpKey) -> None:
        """Records that an operation has ended."""
        self._ended[key] = self._clock()
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        for known in self._sessions.get(key.session, {}).values():
            known.promised.pop(key, None)

    # Conclusions

    def silent(self, key: OpKey) -> dict[int, DeadlineError]:
        """Returns the ranks that are no longer present for an operation, each with its error."""
        ranks, now_s = self._sessions.get(key.session, {}), self._clock()
        late = [rank for rank, at_s in self.due_s(key).items() if at_s <= now_s]
        return {rank: self._absent(key, rank, ranks[rank]) for rank in late}

    def due_s(self, key: OpKey) -> dict[int, float]:
        """Returns the clock time until which each participating rank counts as present."""
        found = {}
        for rank, known in self._sessions.get(key.session, {}).items():
            present_s = known.promised.get(key)
            if present_s is None and any(doing.covers(key) for doing in known.doings):
                present_s = known.heard_s
            if present_s is not None and known.timeout_s is not None:
                found[rank] = present_s + known.timeout_s
        return found

    def describe(self, key: OpKey, rank: int) -> str:
        """Returns a description of a missing rank.

        Args:
            key: The operation in which it is missing.
            rank: The rank.
        """
        known = self._sessions.get(key.session, {}).get(rank, _Known())
        who = f"rank {rank} ({known.place})" if known.place else f"rank {rank}"
        now_s = self._clock()
        if known.heard_s is None:
            since_s = now_s - self._began_s
            return f"{who} was never heard by this coordinator, which began {_ago(since_s)}"
        silent_s = now_s - known.heard_s
        doing = next((doing for doing in known.doings if doing.covers(key)), None)
        if doing is not None and silent_s <= 2 * beat_interval_s(known.timeout_s or 0.0):
            return f"{who} {_progress(doing, silent_s)}"
        if known.last is None or known.last[0] == key or doing is not None:
            return f"{who} was last heard {_ago(silent_s)}"
        return f"{who} never called: {self._last_call(known.last)}"

    def _entry_of(self, session: str, rank: int) -> _Known:
        ranks = self._sessions.setdefault(session, {})
        self._sessions.move_to_end(session)
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        known = ranks.get(rank)
        if known is None:  # why not setdefault: it would create an object for every message
            known = ranks[rank] = _Known()
        return known

    def _absent(self, key: OpKey, rank: int, known: _Known) -> DeadlineError:
        silent_s = self._clock() - (known.heard_s or 0.0)
        where = f" ({known.place})" if known.place else ""
        if silent_s < (known.timeout_s or 0.0):
            return DeadlineError(
                f"Expected rank {rank}{where} to take part in operation {key.seq} of session "
                f"{key.session!r} until its end, but it lives and does not wait for it any more: "
                f"it left the call. Look at its log, and call again on every rank",
                rank=rank,
            )
        return DeadlineError(
            f"Expected rank {rank}{where} to be heard every {known.timeout_s:g} s while it takes "
            f"part, but its last sign of life came {_ago(silent_s)}: its process is frozen "
            f"(stopped, swapped out, or a thread holds the GIL), or its machine is out of reach. "
            f"Look at that process, restart rank {rank} and call again; raise heartbeat_timeout_s "
            f"if such pauses are normal",
            rank=rank,
        )

    def _last_call(self, last: tuple[OpKey, Call]) -> str:
        key, call = last[0], describe_call(last[1])
        ended_s = self._ended.get(key)
        end = "has not ended" if ended_s is None else f"ended {_ago(self._clock() - ended_s)}"
        return f"its last operation was #{key.seq} ({call}), which {end}"


def _progress(doing: Doing, silent_s: float) -> str:
    verb = {"writing": "wrote", "reading": "read"}.get(doing.phase)
    if verb is None:
        return f"has been {doing.phase} for {doing.phase_s + silent_s:.1f} s"
    quiet_s = doing.quiet_s + silent_s
    amount = _format_progress(doing.done_bytes, doing.total_bytes)
    state = "slow" if quiet_s <= SLOW_S else f"stuck in {doing.key or 'its own memory'}"
    return f"last {verb} {amount} {_ago(quiet_s)} ({state})"


def _format_progress(done: int, total: int) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((10**9, "GB"), (10**6, "MB")) if max(done, total) >= unit),
        (10**3, "kB"),
    )
    of_total = f" of {total / unit:.1f}" if total else ""
    return f"{done / unit:.1f}{of_total} {name}"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 10 else f"{seconds:.0f} s ago"
