"""`Replicas`: a worker among those of a Ray Train run that replaces them one by one.

With replica groups (`TorchftConfig`) each worker trains in a process group of its own; Ray Train
replaces one that failed while the others train on. Nobody may therefore wait for all workers of the
run: there is no broadcast of Ray Train, and no session that is made once. Before each save the
coordinator of the worker group decides which replicas are there (`replica_quorum`); they save in a
session of theirs. What a replica does alone, as to restore, it does in a session of one.

`join_replicas` makes a worker a member, and waits for nobody. Each process names the folders of the
steps that it leads, so that those of two leaders never meet; one that leads anew takes the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from ray.exceptions import RayTaskError

from ray_dcp.commit_protocol.replica_quorum import ReadyToSave, SaveQuorum
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.integrations import ray_train
from ray_dcp.integrations.ray_train import (
    DueReport,
    GroupNames,
    JoinedGroup,
    NeededSteps,
    RunFacts,
    begun_in,
    check_folder,
    naming_run,
    target_of_run,
    writer_of,
)
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.settings import Settings
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.session.session import Session
from ray_dcp.store.opening import absolute_target

logger = logging.getLogger(__name__)


@dataclass
class Replicas(JoinedGroup):
    """A worker among the replicas of a run. The session is that of its last quorum.

    The report to Ray Train needs all workers of the run: only a quorum of all of them reports.
    """

    facts: RunFacts = field(kw_only=True)
    alone: Session = field(kw_only=True)
    """The session of this worker alone."""
    replica: RayTransport = field(kw_only=True)
    """Reaches the coordinator of the replicas, which knows this worker."""
    quorum: SaveQuorum | None = None
    """That of the last save; None if this worker did not take part."""

    def __post_init__(self) -> None:
        self._used: dict[int, Session] = {}
        """Sessions of the saves that may not have ended, by step."""
        self._sessions: dict[str, Session] = {}
        """Open sessions of quorums, by the word of the quorum."""
        self._has_stepped = self._was_there = False
        self._leads = self._has_failed = self._went_back = False
        self._told: tuple[tuple[int, str], ...] = ()

    def steps(self) -> None:
        """See `JoinedGroup.steps`."""
        if not self._has_stepped:
            self._has_stepped = True
            self.replica.replica_steps(self.facts.rank, self.facts.world_size)

    def gather(self, step: int | None) -> bool:
        """See `JoinedGroup.gather`."""
        rank, world_size = self.facts.rank, self.facts.world_size
        self.quorum = None
        self.quorum = self.replica.ready(
            ReadyToSave(
                rank, world_size, "", step, is_anew=self._has_failed, went_back=self._went_back
            )
        )
        if self.quorum is None:
            self._leads = False
            if step is not None:
                logger.warning(
                    "Rank %d takes no part in the save of step %d: other replicas have saved that "
                    "step, or are at a later one. It takes part in the next save that it reaches "
                    "with them",
                    rank,
                    step,
                )
            return False
        self._has_failed, self._went_back, self._was_there = False, False, True
        self._enter(self.quorum)
        if step is not None:
            self._used[step] = self.session
        if self.session.rank == 0 and self.quorum.missing not in ((), self._told):
            logger.warning(
                "%s by %d of %d replicas: %s",
                "The run ends" if step is None else f"Step {step} is saved",
                self.session.world_size,
                world_size,
                "; ".join(f"rank {one} {why}" for one, why in self.quorum.missing),
            )
        self._told = self.quorum.missing
        return True

    def _enter(self, quorum: SaveQuorum) -> None:
        """Makes the session of a quorum that of this worker; one that leads anew gets a writer."""
        session = self._sessions.get(quorum.session)
        if session is None:
            number = quorum.ranks.index(self.facts.rank)
            name, actor = f"{_actor_of(self.facts)}/{quorum.session}", _actor_of(self.facts)
            session = RayTransport(name, number, len(quorum.ranks), actor=actor).join()
            self._sessions[quorum.session] = session
        self.session = session
        if session.rank == 0 and not self._leads:
            # Why a new one: another process may have had the lease meanwhile, and the old writer
            # of this one would refuse to save for that.
            self.writer.close(0.0)
            self.writer = writer_of(self.facts, self.writer.root, self.settings)
            if self.needed is not None:
                self.needed.refresh()
        self._leads = session.rank == 0

    def agreed_reports(
        self, due: list[DueReport], agree: Callable[..., Any]
    ) -> Sequence[DueReport]:
        """See `JoinedGroup.agreed_reports`; what rank 0 has, if all workers of the run are there.

        *Why*: `ray.train.report` waits for all of them. One that was replaced does not know which
        saves were committed before.
        """
        if self.quorum is None or self.quorum.missing:
            return ()
        try:
            agreed: list[DueReport] = agree("what is reported", lambda _: due)
        except CheckpointError as error:
            logger.warning("Nothing is reported to Ray Train now: %s", error)
            return ()
        return agreed

    def report(self, checkpoint: Any, metrics: Mapping[str, Any], validation: Any) -> None:
        """See `JoinedGroup.report`; a replica that is lost meanwhile is no error of the others."""
        try:
            ray_train.report(checkpoint, metrics, validation)
        except RayTaskError as error:
            if not ray_train.has_timed_out(error):
                raise
            logger.warning("Ray Train did not get the report of %s: %s", checkpoint, error.cause)

    def failed(self) -> None:
        """See `JoinedGroup.failed`."""
        self._has_failed = True

    def leave_others(self) -> None:
        """See `JoinedGroup.leave_others`."""
        self.session, self._leads = self.alone, False
        self._went_back = self._was_there

    def tidy(self, pending: Collection[int]) -> None:
        """See `JoinedGroup.tidy`."""
        self._used = {step: one for step, one in self._used.items() if step in pending}
        kept = (*self._used.values(), self.session)
        for word in [word for word, one in self._sessions.items() if one not in kept]:
            self._sessions.pop(word).close()

    def leave(self, timeout_s: float) -> None:
        """See `JoinedGroup.leave`."""
        self.writer.close(timeout_s)
        for session in self._sessions.values():
            session.close()
        self.replica.end_replica(self.facts.rank)
        self.alone.close()


def _actor_of(facts: RunFacts) -> str:
    return f"train-{facts.name}-{facts.replicas_of}"


def join_replicas(
    facts: RunFacts,
    folder: str,
    settings: Settings,
    needed: NeededSteps | None,
    storage_options: Mapping[str, object] | None,
) -> JoinedGroup:
    """Joins a worker group of replicas, and returns this worker's membership. Waits for nobody.

    Args:
        facts: As for `join`.
        folder: As for `join`.
        settings: As for `join`.
        needed: As for `join`.
        storage_options: As for `join`.

    Raises:
        InvalidRequestError: An argument is invalid, or a replica has several workers.
        CheckpointExistsError: Another live run of this name writes here.
        CheckpointError: The storage can't be listed, or the coordinator is out of reach.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidRequestError(
            f"Expected replica groups of one worker, as Ray Train makes them, but the torch "
            f"process group of rank {facts.rank} has {dist.get_world_size()}. For replicas of "
            f"several workers that Ray Train does not replace one by one, use TorchConfig"
        )
    root = Root(absolute_target(target_of_run(facts, check_folder(folder), storage_options)))
    number, word, has_steps = begun_in(root, bounds.REPLICA_STAGED_S)
    settings = replace(settings, kept=needed, names=GroupNames(group=number, word=word))
    writer = writer_of(facts, root, settings)
    with naming_run(writer, facts.name):
        writer.check_lease_free()
    if needed is not None:
        needed.refresh()
    actor = _actor_of(facts)
    replica = RayTransport(f"{actor}/alone-{word}", 0, 1, actor=actor)
    replica.begin_replica(facts.rank, facts.world_size)
    alone = Session(replica)
    alone.own_values = facts.rank, facts.world_size
    return Replicas(
        writer,
        settings,
        alone,
        True,
        bounds.REPLICA_STAGED_S,
        has_steps,
        needed,
        facts=facts,
        alone=alone,
        replica=replica,
    )
