"""Session discovery from a torch process group or the Ray Train context: its ranks, and its Ray.

Making a session is collective: one broadcast from the group's first rank and one gather of errors,
so that either every rank has the session or every rank raises. If the first rank finds no Ray, it
starts one for the job.

If that Ray is lost, each rank attaches to the next one with its next call. That is no collective,
as ranks notice the loss at different times: the job's store has the address of the next one, and
the ranks' calls keep their numbers, so that its coordinator knows which ranks a call waits for.

The ranks of a job find their session in one way: all by their process group, or all by `connect`. A
rank that uses `connect` never takes part in the group's broadcast, and the others would wait there
until the group's own timeout. The job's store, which torch has anyway, shows which way each rank
uses: see `await_group`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.liveness import LONG_WAIT_S
from ray_dcp.core.processes import ProcessLock
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
    ParticipantError,
    RankDisagreementError,
)
from ray_dcp.runtime import private_ray, ray_private
from ray_dcp.runtime.actor_names import group_name
from ray_dcp.runtime.attach import attach, attach_named, attached_address, leave_lost
from ray_dcp.runtime.private_ray import PrivateRay, start_private_ray

if TYPE_CHECKING:
    from ray_dcp.runtime.session import GroupSessions, Session


_STORE_KEY = "ray_dcp/private_ray"

_START_S = 120.0
"""How long a private Ray may take to start, in seconds."""
_ANSWER_S = 30.0
"""How much longer the other ranks wait for its address, in seconds."""

_continuing = ProcessLock()
_refused: set[int] = set()
"""Numbers of the private Rays that did not start, as far as this process knows."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Invite:
    """What the first rank broadcasts: which Ray, and the session's name."""

    address: str
    token_path: str | None
    name: str


def session_of(
    process_group: Any, make: type[Session], sessions: GroupSessions, *, lease_s: float
) -> Session | None:
    """Returns the session for a group, after making it; None where the process is alone.

    Args:
        process_group: A torch process group; None for the whole job.
        make: What a rank makes once it knows the name, its rank and the number of ranks.
        sessions: Those that this process has; the new one is added.
        lease_s: How long what is started for the session stays unused, in seconds.

    Raises:
        InvalidRequestError: This process is not in the group.
        RankDisagreementError: Another rank uses `connect`.
        ParticipantError: Some rank can't come to the session's Ray.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidRequestError(
                "Expected torch.distributed to be initialised, as a process_group was given, but "
                "it is not. Call torch.distributed.init_process_group first, or leave it out",
                key="process_group",
            )
        return _train_session(make, sessions, lease_s)
    group = dist.group.WORLD if process_group is None else process_group
    known, session = sessions.of(group)
    if session is not None and session.connection.is_lost:
        return _continued(group, session, sessions)
    if known:
        return session
    # Why: a second thread's broadcast would get in between, and each take the other's answer.
    with sessions.making(group):
        known, session = sessions.of(group)
        if not known:
            if process_group is None:
                ranks = dist.get_process_group_ranks(group)
                await_group(ray_private.job_store(), ranks, dist.get_rank())
            session = _make(dist, group, make, lease_s)
            sessions.set(group, session)
    return session


def _continued(group: Any, lost: Session, sessions: GroupSessions) -> Session:
    """Returns the session after one whose private Ray was lost: not collective."""
    with _continuing:
        _, session = sessions.of(group)
        if session is not None and session is not lost:
            return session
        if ray_private.job_store() is None:
            lost.connection.check()
        try:
            # Why first: the next one ends when nobody has come to it for the lease.
            leave_lost()
            own = _private_ray_of_the_job(lost.lease_s)
            attach(own.address, own.token_path)
            session = lost.continued(Path(own.directory).name)
        except CheckpointError:
            raise
        except Exception as error:
            raise ParticipantError(
                f"Coming to another Ray after the job's own was lost failed: "
                f"{type(error).__name__}: {error}. Call again",
                rank=lost.rank,
            ) from error
        sessions.set(group, session)
        logger.warning(
            "The Ray that this job had started for itself was lost; rank %d goes on with another "
            "one at %s. If that happens again, look at the memory of this machine, or set "
            "RAY_ADDRESS",
            lost.rank,
            own.address,
        )
        return session


def _make(dist: Any, group: Any, make: type[Session], lease_s: float) -> Session | None:
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidRequestError(
            f"Expected this process (rank {dist.get_rank()}) to be in the process group, but it "
            f"is not. Only the group's ranks call save or load with it",
            rank=dist.get_rank(),
            key="process_group",
        )
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return None
    call, error = _invite(dist, group, lease_s) if rank == 0 else (None, None)
    box: list[Any] = [call or error]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    session = None
    if isinstance(box[0], _Invite):
        session, error = _join_session(box[0], make, rank, world_size, lease_s)
    else:
        error = box[0]
    errors: list[CheckpointError | None] = [None] * world_size
    dist.all_gather_object(errors, error, group=group)
    failed = {index: found for index, found in enumerate(errors) if found is not None}
    if failed:
        raise _combined(failed, world_size)
    return session


def _invite(dist: Any, group: Any, lease_s: float) -> tuple[_Invite | None, CheckpointError | None]:
    """Returns what to broadcast; an error too, or the other ranks would wait."""
    ranks = dist.get_process_group_ranks(group)
    name = group_name(ranks[0], len(ranks))
    try:
        address = attach_named(None)
        joined = private_ray.joined()
        if address is not None:
            token_path = None if joined is None else joined.token_path
            return _Invite(address, token_path, name), None
        own = _private_ray_of_the_job(lease_s)
        return _Invite(own.address, own.token_path, name), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the other ranks wait in the broadcast
        failed = ParticipantError(f"Starting a Ray failed: {type(error).__name__}: {error}", rank=0)
        return None, failed


def _private_ray_of_the_job(lease_s: float) -> PrivateRay:
    """Returns the Ray of this job, started by whoever of its ranks asks first.

    Several groups of one job may make their first session at the same time; the job's store lets
    one of them start it. Where the store can't be had, each group's first rank starts its own.
    Those that were lost, or did not start, have numbers, too: the next one follows them.
    """
    store, number = ray_private.job_store(), 0
    while True:
        if number not in _refused:
            own = _private_ray(store, number, lease_s)
            if not own.is_lost:
                return own
        number += 1


def _private_ray(store: Any, number: int, lease_s: float) -> PrivateRay:
    key = f"{_STORE_KEY}/{number}"
    if store is None or store.add(f"{key}/asked", 1) == 1:
        try:
            own = start_private_ray(lease_s=lease_s, start_timeout_s=_START_S)
        except CheckpointError as error:
            _refused.add(number)
            if store is not None:
                store.set(f"{key}/address", f"error {error}")
            raise
        logger.info(
            "No Ray was named, so this job has started one of its own at %s: about 0.8 GB of "
            "memory on this machine, files in %s. It ends %g s after its last use (process %d). "
            "To use a cluster instead, set RAY_ADDRESS",
            own.address,
            own.directory,
            lease_s,
            own.supervisor_pid,
        )
        if store is not None:
            store.set(f"{key}/address", own.encode())
        return own
    try:
        store.wait([f"{key}/address"], timedelta(seconds=_START_S + _ANSWER_S))
    except RuntimeError as error:  # torch's own timeout error is one, in every version
        _refused.add(number)
        raise ParticipantError(
            f"Expected another rank to start a Ray within {_START_S + _ANSWER_S:g} s, but there is "
            f"no answer ({error}). Look whether it lives, then call again"
        ) from error
    answer = bytes(store.get(f"{key}/address")).decode()
    if answer.startswith("error "):
        _refused.add(number)
        raise ParticipantError(f"Another rank could not start a Ray: {answer[6:]}")
    return PrivateRay.decode(answer)


def _join_session(
    call: _Invite, make: type[Session], rank: int, world_size: int, lease_s: float
) -> tuple[Session | None, CheckpointError | None]:
    try:
        attach(call.address, call.token_path)
        session = make(call.name, rank, world_size, lease_s=lease_s)
        session.register()
    except CheckpointError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the other ranks wait in the gather
        return None, ParticipantError(
            f"Connecting to Ray failed: {type(error).__name__}: {error}", rank=rank
        )
    return session, None


def _combined(failed: dict[int, CheckpointError], world_size: int) -> CheckpointError:
    if len(failed) == world_size and len({str(error) for error in failed.values()}) == 1:
        return failed[0]
    lines = [f"rank {rank}: {error}" for rank, error in failed.items()]
    first = next(iter(failed))
    return ParticipantError(
        f"Expected all {world_size} ranks to come to one session, but {len(failed)} could not:\n"
        + "\n".join(lines),
        rank=first,
    ).with_failures(
        {
            rank: error.failures.get(rank, error.failures[next(iter(error.failures))])
            for rank, error in failed.items()
        }
    )


def _train_session(make: type[Session], sessions: GroupSessions, lease_s: float) -> Session | None:
    """Returns the session of a Ray Train worker that has no torch process group."""
    if attached_address() is None:
        return None
    ranks = ray_private.train_ranks()
    if ranks is None or ranks[1] == 1:
        return None
    with sessions.making(_TrainGroup):
        known, session = sessions.of(_TrainGroup)
        if not known:
            from ray.train.collective import broadcast_from_rank_zero

            rank, world_size, experiment = ranks
            word = broadcast_from_rank_zero(secrets.token_hex(8))
            session = make(f"train-{experiment}-{word}", rank, world_size, lease_s=lease_s)
            session.register()
            sessions.set(_TrainGroup, session)
    return session


class _TrainGroup:
    """Stands for the worker group of Ray Train: a worker process lives in only one."""


LOOK_S = 10.0
"""How long to wait for the others before it is asked whether they will ever come, in seconds."""

LONGEST_S = 1800.0
"""After this the group's own collective names who is missing, in seconds: torch's default."""

_KEY = "ray_dcp/discovery"


def announce_connect(connected: bool = True) -> None:
    """Notes in the job's store that this rank uses `connect`, if there is a process group already.

    Args:
        connected: False takes that back: the rank closed its session, or could not connect.
    """
    store, rank = ray_private.job_place()
    if store is not None and connected:
        store.set(f"{_KEY}/connect/{rank}", "connect")
    elif store is not None:
        store.delete_key(f"{_KEY}/connect/{rank}")


@contextmanager
def connect_announced() -> Iterator[None]:
    """Announces that this rank uses `connect`; takes it back when that fails."""
    announce_connect()
    try:
        yield
    except BaseException:
        announce_connect(False)
        raise


def await_group(store: Any, ranks: Sequence[int], rank: int, look_s: float = LOOK_S) -> None:
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
    begin_s, is_logged = time.monotonic(), False
    while missing and (waited_s := time.monotonic() - begin_s) < LONGEST_S:
        if waited_s >= LONG_WAIT_S and not is_logged:
            logger.warning(
                "Rank %d has waited %.0f s to make a session: %s of the process group called "
                "neither save nor load. All ranks of a group have to",
                rank,
                waited_s,
                name_ranks(missing),
            )
            is_logged = True
        if _all_set(store, [f"{group}/{other}" for other in missing], look_s):
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


def _all_set(store: Any, keys: list[str], look_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=look_s))
    except RuntimeError:  # torch's own timeout error is one, in every version
        return False
    return True
