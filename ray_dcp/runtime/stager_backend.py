"""The staging backend with Ray: the node's stager writes a rank's bytes, even if that died."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ray_dcp.errors import CheckpointError
from ray_dcp.io.threads import Stop
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Ack, OpKey, PartsHeld, SaveGo, SaveStaged, TakeOver, Target
from ray_dcp.runtime import ray_calls
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.rank_save import Captured, attempt, await_outcome, check_unchanged, refusal
from ray_dcp.runtime.stager import Reporter
from ray_dcp.runtime.staging import Staged
from ray_dcp.stage.values import StageKey

if TYPE_CHECKING:
    from ray_dcp.runtime.session import Session
    from ray_dcp.runtime.staging_backend import Finish


REPORT_METHOD = "take_report"
"""Method of the coordinator that takes `StageReport`s."""


def name_of(key: OpKey, epoch: int) -> str:
    """Returns what a stager calls a save: enough to tell a coordinator which it is.

    Args:
        key: The operation.
        epoch: Of the coordinator that planned it.

    Example:
        >>> key_of(name_of(OpKey("run/1", 7), 2))
        (OpKey(session='run/1', seq=7, step=0), 2)
    """
    return f"{epoch}:{key.seq}.{key.step}:{key.session}"


def key_of(name: str) -> tuple[OpKey, int]:
    """Returns the operation and the epoch that `name_of` made a name of."""
    epoch, at, session = name.split(":", 2)
    seq, step = at.split(".")
    return OpKey(session, int(seq), int(step)), int(epoch)


class StagerBackend:
    """Keeps the bytes with the stager of this rank's node.

    Args:
        session: Of this rank.
    """

    kind = "stager"
    survives = True

    def __init__(self, session: Session) -> None:
        self.num_bytes = 0
        self.takeovers = 0
        self._incarnation = 0
        self._session = session
        self._staged: Staged | None = None
        self._finish: SaveStaged | None = None
        self._target = Target("")
        self._commit_timeout_s: float | None = None
        self._create_if_absent = True
        self._vitals: RankProgress | None = None
        self._last: tuple[int, int] = (0, 0)

    def stage(
        self,
        key: OpKey,
        go: SaveGo,
        captured: Captured,
        target: Target,
        options: SaveOptions,
        vitals: RankProgress,
    ) -> CheckpointError | None:
        """See `StagingBackend.stage`."""
        rank = self._session.rank
        held: PartsHeld | None = None
        error: CheckpointError | None = None
        if go.plan.files:
            hand_in = partial(self._hand_in, key, go, captured, target, options, vitals.stop)
            held, error = attempt(hand_in, "staging", rank)
        self._target = target
        self._commit_timeout_s = options.commit_timeout_s
        self._create_if_absent = go.create_if_absent
        self._vitals = vitals
        self._finish = SaveStaged(key, rank, go.attempt, go.epoch, self._incarnation, error, held)
        return error

    def finish(self) -> Finish:
        """See `StagingBackend.finish`."""
        if self._finish is None:
            raise CheckpointError("finish comes after stage. Please report this")
        return await_outcome(
            self._finish,
            self._target,
            hand_over=self._hand_over,
            timeout_s=self._commit_timeout_s,
            vitals=self._vitals,
            create_if_absent=self._create_if_absent,
        )

    def progress(self) -> tuple[int, int]:
        """See `StagingBackend.progress`."""
        found = None if self._staged is None else self._staged.progress()
        if found is not None:
            self._last = (found.written_bytes, found.num_bytes)
        return self._last

    def release(self, *, committed: bool) -> None:
        """See `StagingBackend.release`."""
        if self._staged is not None:
            self._staged.release(committed=committed)

    def _hand_in(
        self,
        key: OpKey,
        go: SaveGo,
        captured: Captured,
        target: Target,
        options: SaveOptions,
        stop: Stop,
    ) -> PartsHeld:
        session = self._session
        staged = self._staged = session.staging().stage(
            StageKey(name_of(key, go.epoch), session.rank, go.attempt),
            go.plan,
            captured,
            target=target,
            options=options,
            reporter=Reporter(session.coordinator(), REPORT_METHOD),
            stop=stop,
        )
        try:
            check_unchanged(captured)
        except CheckpointError:
            staged.cancel()
            raise
        self.num_bytes = staged.num_bytes
        self._last = (0, staged.num_bytes)
        self._incarnation = staged.key.incarnation
        return self._tell(staged, key, go.attempt, go.epoch, self._incarnation)

    def _hand_over(self, asked: TakeOver) -> PartsHeld:
        if self._staged is None or self._finish is None:
            raise CheckpointError("nothing is staged that could be handed over")
        helper = None if asked.lost else self._helper(asked.helpers)
        stop = None if self._vitals is None else self._vitals.stop
        self._staged.hand_over(helper, files=asked.files, incarnation=asked.incarnation, stop=stop)
        self.takeovers += 1
        last = self._finish
        return self._tell(self._staged, last.key, last.attempt, last.epoch, asked.incarnation)

    def _helper(self, names: tuple[str, ...]) -> Any:
        """Returns the handle of one of the stagers that are done, another one for each rank."""
        for turn in range(len(names)):
            name, _, _ = names[(self._session.rank + turn) % len(names)].partition("#")
            with suppress(ValueError):
                return ray_calls.get_actor(name, namespace=self._session.namespace)
        raise CheckpointError("no stager that has ended its own part is there any more")

    def _tell(
        self,
        staged: Staged,
        key: OpKey,
        attempt_id: str,
        epoch: int,
        incarnation: int,
    ) -> PartsHeld:
        """Tells the coordinator who holds the bytes; only then may the rank die."""
        session = self._session
        stager = staged.stager_name
        held = PartsHeld(key, session.rank, attempt_id, epoch, stager, incarnation)
        reply = session.call(held)
        if not isinstance(reply, Ack):
            raise refusal(reply, session.rank)
        return held
