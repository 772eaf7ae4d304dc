"""`ReplicaQuorum`: which replicas of a run save a step together.

Replicas train by themselves, and may die and be replaced while the others train on. Each says when
it is ready to save a step; those that are ready for the highest step save it together, as the ranks
of one session. The lowest of them leads.

    ready(rank, step) --> waits --> all that are awaited are ready, or late --> SaveQuorum
                            +----> others are at a later step, or have saved this one --> None

A replica that makes steps is awaited for `PRESENT_S`; one that has only begun, once for `NEW_S`, as
it may still be receiving its state; one that is lost, or that missed a quorum, not at all, until it
makes its first step or is ready for one.

The quorum reads no clock and does no I/O: events go in, answers come out. If its process ends, the
next one knows nobody, and so awaits all replicas once for `NEW_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ray_dcp.core import bounds

_LIMITS = {"new": bounds.NEW_S, "present": bounds.PRESENT_S}


@dataclass(frozen=True)
class ReadyToSave:
    """Replica → coordinator: it is ready to save a step. Answer: `SaveQuorum`, or None."""

    rank: int
    world_size: int
    """Number of replicas of the run."""
    process: str
    """Identity of its process: that of a replacement differs."""
    step: int | None
    """The step; None if the replica has made its last one."""
    is_anew: bool = False
    """Whether a new session is needed, because the last save failed."""
    went_back: bool = False
    """Whether the replica has restored an earlier step since it took part."""


@dataclass(frozen=True)
class SaveQuorum:
    """The replicas that save a step together."""

    session: str
    """Distinguishes sessions: the same as in the last quorum if its replicas are the same."""
    ranks: tuple[int, ...]
    """Ranks of the replicas, in the order of their numbers in the session."""
    missing: tuple[tuple[int, str], ...] = ()
    """`(rank, reason)` of the other replicas of the run."""


Answers = list[tuple[int, SaveQuorum | None]]
"""`(rank, answer)` of replicas that wait."""


@dataclass
class _Replica:
    process: str = ""
    state: Literal["new", "present", "absent"] = "new"
    why: str = "has not begun"
    """Why it is missing, if it is absent."""
    ready: ReadyToSave | None = None
    ready_s: float = 0.0


class ReplicaQuorum:
    """The replicas of one run, and the step that they save next.

    Args:
        world_size: Number of replicas of the run.
        new_session: Returns a word that no session had before.

    Examples:
        >>> quorum = ReplicaQuorum(2, iter("abc").__next__)
        >>> quorum.ready(ReadyToSave(1, 2, "p", 10), now_s=0.0)
        []
        >>> quorum.look(now_s=bounds.NEW_S)  # doctest: +NORMALIZE_WHITESPACE
        [(1, SaveQuorum(session='a', ranks=(1,),
                        missing=((0, 'was not ready for step 10 within 2 s'),)))]
    """

    def __init__(self, world_size: int, new_session: Callable[[], str]) -> None:
        self._replicas = {rank: _Replica() for rank in range(world_size)}
        self._new_session = new_session
        self._last_step = -1
        self._last: SaveQuorum | None = None
        self._members: dict[int, str] = {}
        """Processes of the last quorum, by rank."""

    @property
    def is_waiting(self) -> bool:
        """Whether a replica waits for an answer."""
        return any(one.ready is not None for one in self._replicas.values())

    def begin(self, rank: int, process: str) -> None:
        """Registers the process of a replica, which replaces an earlier one."""
        one = self._replicas[rank]
        if one.process != process:
            self._replicas[rank] = _Replica(process)

    def steps(self, rank: int, process: str) -> None:
        """Records that the process of a replica makes its first step."""
        self.begin(rank, process)
        self._replicas[rank].state = "present"

    def ready(self, request: ReadyToSave, now_s: float) -> Answers:
        """Accepts that a replica is ready to save a step; it may say so again.

        Args:
            request: What it says.
            now_s: Current time, in seconds.
        """
        rank, step = request.rank, request.step
        self.steps(rank, request.process)
        one = self._replicas[rank]
        others = {rank: one.process for rank, one in self._replicas.items()}
        if request.went_back or not self._members.items() & others.items():
            # Why the second: who is left has restored an earlier step, and makes these again.
            self._last_step, self._last = -1, None
        if step is not None and step <= self._last_step:
            is_member = step == self._last_step and self._members.get(rank) == request.process
            return [(rank, self._last if is_member else None)]
        if one.ready is None or one.ready.step != step:
            one.ready_s = now_s
        one.ready = request
        return self.look(now_s)

    def lost(self, rank: int, process: str, why: str, now_s: float) -> Answers:
        """Records that the process of a replica has ended; ignores one that was replaced."""
        one = self._replicas[rank]
        if one.process == process:
            self._replicas[rank] = _Replica("", "absent", why)
        return self.look(now_s)

    def look(self, now_s: float) -> Answers:
        """Returns the answers that are due.

        Args:
            now_s: Current time, in seconds.
        """
        step, together, late = self._waiting()
        answers: Answers = [(rank, None) for rank in late]
        for rank in late:
            self._replicas[rank].ready = None
        if not together or (self.next_s or now_s) > now_s:
            return answers
        since_s = min(self._replicas[rank].ready_s for rank in together)
        for rank, one in self._replicas.items():
            if rank not in together and one.state != "absent" and not self._is_closing(one):
                limit_s = now_s - since_s
                one.state = "absent"
                one.why = f"was not ready for {_named(step)} within {limit_s:.0f} s"
        requests = {rank: self._replicas[rank].ready for rank in together}
        members = {rank: self._replicas[rank].process for rank in together}
        is_anew = any(one is not None and one.is_anew for one in requests.values())
        if self._last is None or members != self._members or is_anew:
            session = self._new_session()
        else:
            session = self._last.session
        missing = tuple(
            (rank, "has made its last step" if self._is_closing(one) else one.why)
            for rank, one in self._replicas.items()
            if rank not in together
        )
        found = SaveQuorum(session, tuple(together), missing)
        for rank in together:
            self._replicas[rank].ready = None
        self._members, self._last = members, found
        self._last_step = self._last_step if step is None else step
        return [*answers, *((rank, found) for rank in together)]

    @property
    def next_s(self) -> float | None:
        """When the replicas that are ready wait no longer for others, in seconds; None: now."""
        _, together, _ = self._waiting()
        if not together:
            return None
        since_s = min(self._replicas[rank].ready_s for rank in together)
        limits = [
            _LIMITS[one.state]
            for rank, one in self._replicas.items()
            if rank not in together and one.state != "absent" and not self._is_closing(one)
        ]
        return since_s + max(limits) if limits else None

    def _waiting(self) -> tuple[int | None, list[int], list[int]]:
        """Returns the step that is saved next, the replicas ready for it, and those behind."""
        ready = {rank: one.ready for rank, one in self._replicas.items() if one.ready is not None}
        steps = [one.step for one in ready.values() if one.step is not None]
        if not steps:
            return None, sorted(ready), []
        step = max(steps)
        late = [rank for rank, one in ready.items() if one.step is not None and one.step < step]
        return step, sorted(rank for rank, one in ready.items() if one.step == step), late

    @staticmethod
    def _is_closing(one: _Replica) -> bool:
        return one.ready is not None and one.ready.step is None


def _named(step: int | None) -> str:
    return "the end" if step is None else f"step {step}"
