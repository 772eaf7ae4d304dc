"""How a process finds its session: `connect`, a torch process group, or the Ray Train context.

Making the session of a group is collective: one broadcast from the group's first rank and one
gather of errors, so that either every rank has the session or every rank raises. The first rank
decides: where it is in a Ray, or `RAY_ADDRESS` names one, all come to that; else they talk over
sockets. No Ray is ever started here.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import Any

from ray_dcp.core.checks import check_above_0
from ray_dcp.errors import CheckpointError, InvalidRequestError, ParticipantError
from ray_dcp.runtime.actor_names import LEASE_S, NAMESPACE, group_name, named_address
from ray_dcp.runtime.process_group import await_group, connect_announced, job_store
from ray_dcp.runtime.session import Session, sessions
from ray_dcp.runtime.socket_session import forget_key, join_by_store


@dataclass(frozen=True)
class _Invite:
    """What the first rank broadcasts."""

    name: str
    """Of the session."""
    address: str | None
    """Of the Ray that all are to be in; None: there is none."""


def connect(
    address: str | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    name: str | None = None,
    namespace: str = NAMESPACE,
    timeout_s: float = 600.0,
    lease_s: float = LEASE_S,
) -> Session:
    """Returns the session of this process among ranks that know each other only by a name.

    Every rank calls it; it returns when all have. From then on `save` and `load` use it, until it
    is closed.

    Args:
        address: Ray cluster. `RAY_ADDRESS` counts when it is None, and the cluster that this
            process is connected to; no other cluster is ever used.
        rank: Number of this process, from 0.
        world_size: Number of processes.
        name: What the processes share; may be left out by one that is alone. The same name may be
            used again by the next run of the job.
        namespace: Ray namespace for the coordinator.
        timeout_s: How long to wait for the other ranks, in seconds.
        lease_s: How long an unused coordinator stays, in seconds.

    Raises:
        InvalidRequestError: No cluster was named, an argument is wrong, or this process has an
            open session from another `connect`.
        ParticipantError: The cluster can't be reached, or a rank did not come.
    """
    check_connect(address, rank, world_size, name, timeout_s)
    check_above_0(lease_s, "lease_s")
    from ray_dcp.runtime.attach import attach_named
    from ray_dcp.runtime.ray_session import RaySession

    if attach_named(address) is None:
        raise InvalidRequestError(
            "Expected a Ray cluster, but none was named. Give connect(address=...), set "
            "RAY_ADDRESS, or call ray.init() first",
            key="address",
        )
    shared = name or f"alone-{secrets.token_hex(6)}"
    place = RaySession(shared, rank, world_size, namespace=namespace, lease_s=lease_s)
    with connect_announced():
        generation = place.enter(secrets.token_hex(8), timeout_s)
    session = RaySession(
        f"{shared}/{generation}",
        rank,
        world_size,
        actor=shared,
        namespace=namespace,
        lease_s=lease_s,
    )
    session.register()
    sessions.explicit = session
    return session


def current_session(
    process_group: Any = None, no_dist: bool = False, *, lease_s: float = LEASE_S
) -> Session | None:
    """Returns this rank's session for a group, after making it when it is the first time.

    The first call for a group is collective over that group; later ones are not. Looked for in
    this order: an explicit `connect`; the initialised torch process group; the Ray Train context.

    Args:
        process_group: A torch process group; None for the whole job.
        no_dist: This process saves or loads alone.
        lease_s: How long the coordinator's actor stays when it is unused, in seconds.

    Returns:
        None for a process that is alone: `InlineSession` does it, without Ray.

    Raises:
        InvalidRequestError: This process is not in the group.
        ParticipantError: Some rank can't come to the session; raised on all ranks.
    """
    if no_dist:
        return None
    if process_group is None and sessions.explicit is not None:
        return sessions.explicit
    if process_group is None and not may_be_distributed():
        return None
    return session_of(process_group, lease_s=check_above_0(lease_s, "lease_s"))


def may_be_distributed() -> bool:
    """Returns whether this process could be a rank: it uses Ray, or a process group of several."""
    distributed = sys.modules.get("torch.distributed")
    if "ray" in sys.modules or distributed is None or not distributed.is_available():
        return "ray" in sys.modules
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def check_connect(address: Any, rank: Any, world_size: Any, name: Any, timeout_s: Any) -> None:
    """Raises `InvalidRequestError` for arguments that `connect` can't use, or a second connect."""
    if address is not None and (not isinstance(address, str) or not address):
        raise InvalidRequestError(
            f"Expected address to name a Ray cluster, such as 'host:6379' or 'auto', but found "
            f"{address!r}",
            key="address",
        )
    numbers = (rank, world_size)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or not (
        0 <= rank < world_size
    ):
        raise InvalidRequestError(
            f"Expected a rank from 0 to world_size - 1, but found rank={rank!r}, "
            f"world_size={world_size!r}. Give each process its own number",
            key="rank",
        )
    if name is None and world_size > 1:
        raise InvalidRequestError(
            f"Expected a name that the {world_size} ranks share, but found none. Give "
            f"connect(name=...), the same on every rank",
            key="name",
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidRequestError(
            f"Expected name to be a string of at least one character, but found {name!r}",
            key="name",
        )
    check_above_0(timeout_s, "timeout_s")
    if sessions.explicit is not None:
        raise InvalidRequestError(
            f"Expected one connect at a time, but {sessions.explicit!r} is open. Close it first",
            rank=rank,
        )


def session_of(process_group: Any, *, lease_s: float) -> Session | None:
    """Returns the session for a group, after making it; None where the process is alone.

    Args:
        process_group: A torch process group; None for the whole job.
        lease_s: How long what is started for the session stays unused, in seconds.

    Raises:
        InvalidRequestError: This process is not in the group.
        RankDisagreementError: Another rank uses `connect`.
        ParticipantError: Some rank can't come to the session.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidRequestError(
                "Expected torch.distributed to be initialised, as a process_group was given, but "
                "it is not. Call torch.distributed.init_process_group first, or leave it out",
                key="process_group",
            )
        return _train_session(lease_s)
    group = dist.group.WORLD if process_group is None else process_group
    known, session = sessions.of(group)
    if known:
        return session
    # Why: a second thread's broadcast would get in between, and each take the other's answer.
    with sessions.making(group):
        known, session = sessions.of(group)
        if not known:
            if process_group is None:
                ranks = dist.get_process_group_ranks(group)
                await_group(job_store(), ranks, dist.get_rank())
            session = _make(dist, group, lease_s)
            sessions.set(group, session)
    return session


def _make(dist: Any, group: Any, lease_s: float) -> Session | None:
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
    call, error = _invite(dist, group) if rank == 0 else (None, None)
    box: list[Any] = [call or error]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    session = None
    if isinstance(box[0], _Invite):
        session, error = _join_session(box[0], rank, world_size, lease_s)
    else:
        error = box[0]
    errors: list[CheckpointError | None] = [None] * world_size
    dist.all_gather_object(errors, error, group=group)
    if rank == 0 and isinstance(call, _Invite) and call.address is None:
        forget_key(job_store(), call.name)
    failed = {index: found for index, found in enumerate(errors) if found is not None}
    if failed:
        if session is not None:
            session.close()
        raise _combined(failed, world_size)
    return session


def _invite(dist: Any, group: Any) -> tuple[_Invite | None, CheckpointError | None]:
    """Returns what to broadcast; an error too, or the other ranks would wait."""
    ranks = dist.get_process_group_ranks(group)
    name = group_name(ranks[0], len(ranks))
    if not _is_named():
        return _Invite(name, None), None
    from ray_dcp.runtime.attach import attach_named

    try:
        return _Invite(name, attach_named(None)), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the other ranks wait in the broadcast
        failed = ParticipantError(f"Using Ray failed: {type(error).__name__}: {error}", rank=0)
        return None, failed


def _is_named() -> bool:
    """Returns whether there is a Ray to use: this process is in it, or `RAY_ADDRESS` names it."""
    ray = sys.modules.get("ray")
    return named_address() is not None or bool(ray is not None and ray.is_initialized())


def _join_session(
    call: _Invite, rank: int, world_size: int, lease_s: float
) -> tuple[Session | None, CheckpointError | None]:
    try:
        if call.address is None:
            return join_by_store(job_store(), call.name, rank, world_size), None
        from ray_dcp.runtime.attach import attach
        from ray_dcp.runtime.ray_session import RaySession

        attach(call.address)
        session = RaySession(call.name, rank, world_size, lease_s=lease_s)
        session.register()
    except CheckpointError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the other ranks wait in the gather
        return None, ParticipantError(
            f"Connecting to the other ranks failed: {type(error).__name__}: {error}", rank=rank
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


def _train_session(lease_s: float) -> Session | None:
    """Returns the session of a Ray Train worker that has no torch process group."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray_dcp.runtime import ray_private

    ranks = ray_private.train_ranks()
    if ranks is None or ranks[1] == 1:
        return None
    with sessions.making(_TrainGroup):
        known, session = sessions.of(_TrainGroup)
        if not known:
            from ray.train.collective import broadcast_from_rank_zero

            from ray_dcp.runtime.ray_session import RaySession

            rank, world_size, experiment = ranks
            word = broadcast_from_rank_zero(secrets.token_hex(8))
            made = RaySession(f"train-{experiment}-{word}", rank, world_size, lease_s=lease_s)
            made.register()
            sessions.set(_TrainGroup, made)
            return made
    return session


class _TrainGroup:
    """Stands for the worker group of Ray Train: a worker process lives in only one."""
