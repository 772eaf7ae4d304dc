"""How a process finds its session: `connect`, a torch process group, or the Ray Train context.

Creating the session of a group is collective: one broadcast from the group's first rank and one
gather of errors, so that either every rank has the session or every rank raises. The first rank
decides: if it is in a Ray, or `RAY_ADDRESS` names one, all ranks use that one; else they
communicate over sockets. No Ray is ever started here.
"""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ray_dcp.commit_protocol.error_aggregation import combine
from ray_dcp.core import bounds
from ray_dcp.core.processes import begin
from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    InvalidRequestError,
)
from ray_dcp.options import check_above_0, plain_integer
from ray_dcp.rank.rank_save import result_or_error
from ray_dcp.session.connection import named_address
from ray_dcp.session.group_sessions import sessions
from ray_dcp.session.job_store import (
    announce_connect,
    job_store,
    naming_lost_ranks,
)
from ray_dcp.session.meeting import await_group
from ray_dcp.session.names import NAMESPACE
from ray_dcp.session.session import Session
from ray_dcp.session.socket_transport import forget_key, join_by_store


def group_name(first_rank: int, world_size: int) -> str:
    """Returns a new name for the session of a torch process group."""
    return f"group-{first_rank}-{world_size}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class _Invite:
    """The broadcast of the first rank."""

    name: str
    """Name of the session."""
    address: str | None
    """Address of the Ray that all ranks use; None if there is none."""


def connect(
    address: str | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    name: str | None = None,
    namespace: str = NAMESPACE,
    timeout_s: float = 600.0,
    lease_s: float = bounds.ACTOR_LEASE_S,
) -> Session:
    """Returns the session of this process among ranks that share only a name.

    Every rank calls it; it returns when all have. From then on `save` and `load` use the session,
    until it is closed.

    Args:
        address: Ray cluster. If None, `RAY_ADDRESS` applies, or the cluster that this process is
            connected to; no other cluster is ever used.
        rank: Number of this process, from 0.
        world_size: Number of processes.
        name: Name that the processes share; may be omitted by one that is alone. The next run of
            the job may use the same name.
        namespace: Ray namespace of the coordinator.
        timeout_s: How long to wait for the other ranks, in seconds.
        lease_s: How long an unused coordinator stays, in seconds.

    Raises:
        InvalidRequestError: No cluster was named, an argument is invalid, or this process has an
            open session from another `connect`.
        ParticipantError: The cluster can't be reached, or a rank did not come.
    """
    rank, world_size = plain_integer(rank), plain_integer(world_size)
    timeout_s = check_above_0(timeout_s, "timeout_s")
    lease_s = check_above_0(lease_s, "lease_s")
    check_connect(address, rank, world_size, name)
    from ray_dcp.session.ray_cluster import attach_named
    from ray_dcp.session.ray_transport import RayTransport

    if attach_named(address) is None:
        raise InvalidRequestError(
            "Expected a Ray cluster, but none was named. Give connect(address=...), set "
            "RAY_ADDRESS, or call ray.init() first",
            key="address",
        )
    shared = name or f"alone-{secrets.token_hex(6)}"
    place = RayTransport(shared, rank, world_size, namespace=namespace, lease_s=lease_s)
    with connect_announced():
        generation = place.enter(secrets.token_hex(8), timeout_s)
    name = f"{shared}/{generation}"
    session = RayTransport(
        name, rank, world_size, actor=shared, namespace=namespace, lease_s=lease_s
    ).join()
    sessions.explicit, session.on_close = session, _end_connect
    return session


def _end_connect() -> None:
    sessions.explicit = None
    announce_connect(False)


def current_session(
    process_group: Any = None, no_dist: bool = False, timeout_s: float = bounds.FIRST_CALL_S
) -> Session | None:
    """Returns this rank's session for a group, and creates it on the first call.

    The first call for a group is collective over that group; later ones are not. The session is
    searched for in this order: an explicit `connect`, the initialised torch process group, the Ray
    Train context.

    Args:
        process_group: A torch process group; None for the whole job.
        no_dist: Whether this process saves or loads alone.
        timeout_s: How long the first call waits for the other ranks, in seconds.

    Returns:
        None for a process that is alone, which uses `session_alone` without Ray.

    Raises:
        InvalidRequestError: This process is not in the group.
        ParticipantError: Some rank can't join the session; raised on all ranks.
        DeadlineError: Some rank called neither save nor load in time.
    """
    if no_dist:
        return None
    if process_group is None and sessions.explicit is not None:
        return sessions.explicit
    if process_group is None and not may_be_distributed():
        return None
    return session_of(process_group, timeout_s)


def check_alone(*, saves: bool) -> None:
    """Checks that a process without a group is not one of several of a launcher such as torchrun.

    They would each save the whole of what they have to one path. Those with numbers above 0 are
    refused, so that the checkpoint of rank 0 stands; a warning says what is missing.

    Args:
        saves: Whether the process saves; loads only warn.

    Raises:
        InvalidRequestError: The process has another number than 0, and saves.
    """
    world_size, rank = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    if not world_size.isdecimal() or int(world_size) <= 1 or _has_group():
        return
    told = (
        f"this process is rank {rank or '?'} of {world_size} by RANK and WORLD_SIZE of its "
        f"environment, but torch.distributed has no process group, so that each of them "
        f"{'saves' if saves else 'loads'} alone. Call torch.distributed.init_process_group() "
        f"before; or give no_dist=True, with a path of its own for each process that saves"
    )
    if saves and rank not in ("", "0"):
        raise InvalidRequestError(
            f"Expected a process group: {told}. Nothing was written, as all would overwrite each "
            f"other",
            rank=int(rank) if rank.isdecimal() else None,
            key="no_dist",
        )
    warnings.warn(told, UserWarning, stacklevel=2)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def may_be_distributed() -> bool:
    """Returns whether this process may be a rank: it uses Ray, or a process group of several."""
    distributed = sys.modules.get("torch.distributed")
    if "ray" in sys.modules or distributed is None or not distributed.is_available():
        return "ray" in sys.modules
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def check_connect(address: Any, rank: Any, world_size: Any, name: Any) -> None:
    """Raises `InvalidRequestError` for invalid arguments of `connect`, or a second `connect`."""
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
    if sessions.explicit is not None:
        raise InvalidRequestError(
            f"Expected one connect at a time, but {sessions.explicit!r} is open. Close it first",
            rank=rank,
        )


def session_of(process_group: Any, timeout_s: float = bounds.FIRST_CALL_S) -> Session | None:
    """Returns the session of a group, created on the first call; None if the process is alone.

    Args:
        process_group: A torch process group; None for the whole job.
        timeout_s: How long to wait for the other ranks, in seconds.

    Raises:
        InvalidRequestError: This process is not in the group.
        DeadlineError: Some rank called neither save nor load in time.
        RankDisagreementError: Another rank uses `connect`.
        ParticipantError: Some rank can't join the session.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidRequestError(
                "Expected torch.distributed to be initialised, as a process_group was given, but "
                "it is not. Call torch.distributed.init_process_group first, or leave it out",
                key="process_group",
            )
        return _train_session()
    group = dist.group.WORLD if process_group is None else process_group
    known, session = sessions.of(group)
    if known:
        return session
    # Why: a second thread's broadcast would get in between, and each take the other's answer.
    with sessions.making(group):
        known, session = sessions.of(group)
        if not known:
            with naming_lost_ranks(dist.get_rank()):
                _meet(dist, group, timeout_s)
                session = _make(dist, group, timeout_s)
            sessions.set(group, session)
    return session


def _meet(dist: Any, group: Any, timeout_s: float) -> None:
    """Waits for the other ranks of a group to make its session."""
    if dist.get_rank(group) < 0:
        return
    ranks, num_met = dist.get_process_group_ranks(group), _num_met.get(group, 0)
    name = "world" if group is dist.group.WORLD else getattr(group, "group_name", "")
    store = job_store(timeout_s)
    await_group(store, ranks, dist.get_rank(), timeout_s=timeout_s, name=f"{name}/{num_met}")
    _num_met[group] = num_met + 1


def _make(dist: Any, group: Any, timeout_s: float) -> Session | None:
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
    invite = partial(_invite, dist, group)
    invited, error = result_or_error(invite, "using Ray", 0) if rank == 0 else (None, None)
    box: list[Any] = [invited or error]
    root = dist.get_global_rank(group, 0)
    run = partial(_run_collective, dist.get_rank(), timeout_s)
    run(partial(dist.broadcast_object_list, box, src=root, group=group))
    session = None
    if isinstance(box[0], _Invite):
        join = partial(_join_session, box[0], rank, world_size, timeout_s)
        session, error = result_or_error(join, "connecting to the other ranks", rank)
    else:
        error = box[0]
    errors: list[CheckpointError | None] = [None] * world_size
    run(partial(dist.all_gather_object, errors, error, group=group))
    if rank == 0 and isinstance(invited, _Invite) and invited.address is None:
        forget_key(invited.name)
    failed = {index: found for index, found in enumerate(errors) if found is not None}
    if failed:
        if session is not None:
            session.close()
        raise combine(failed, None)
    return session


def _run_collective(rank: int, timeout_s: float, collective: Callable[[], object]) -> None:
    """Runs a collective of torch with a deadline.

    *Why*: where a worker process of a rank that was killed outlives it, its connections stay open,
    and torch waits for its own timeout, half an hour.

    Raises:
        DeadlineError: It did not end in time.
    """
    try:
        begin(collective, "session").result(timeout_s)
    except futures.TimeoutError:
        raise DeadlineError(
            f"Expected all ranks to answer rank {rank} within {timeout_s:g} s (plan_timeout_s) "
            f"while the ranks make their session, but some did not. Look which has ended, most "
            f"likely rank 0: its log says why",
            rank=rank,
        ) from None


def _invite(dist: Any, group: Any) -> _Invite:
    """Returns the broadcast of the first rank, after connecting to the Ray that was named."""
    ranks = dist.get_process_group_ranks(group)
    name = group_name(ranks[0], len(ranks))
    ray = sys.modules.get("ray")
    if named_address() is None and not (ray is not None and ray.is_initialized()):
        return _Invite(name, None)
    from ray_dcp.session.ray_cluster import attach_named

    return _Invite(name, attach_named(None))


def _join_session(invite: _Invite, rank: int, world_size: int, timeout_s: float) -> Session:
    if invite.address is None:
        return join_by_store(job_store(timeout_s), invite.name, rank, world_size)
    from ray_dcp.session.ray_cluster import attach
    from ray_dcp.session.ray_transport import RayTransport

    attach(invite.address)
    return RayTransport(invite.name, rank, world_size).join()


def _train_session() -> Session | None:
    """Returns the session of a Ray Train worker that has no torch process group."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray_dcp.session import ray_calls

    ranks = ray_calls.train_ranks()
    if ranks is None or ranks[1] == 1:
        return None
    with sessions.making(_TrainGroup):
        known, session = sessions.of(_TrainGroup)
        if not known:
            from ray.train.collective import broadcast_from_rank_zero

            from ray_dcp.session.ray_transport import RayTransport

            rank, world_size, experiment = ranks
            word = broadcast_from_rank_zero(secrets.token_hex(8))
            made = RayTransport(f"train-{experiment}-{word}", rank, world_size).join()
            sessions.set(_TrainGroup, made)
            return made
    return session


def session_in_ray(
    wait_until_ended: Callable[[Session], object], is_used: Callable[[Session], bool]
) -> Session | None:
    """Returns a session for a process that is alone in a Ray; None if it uses none.

    Such a process is an actor or a task without a process group, or a driver. What it saves in the
    background is then staged in Ray's object store, and outlives it.

    Args:
        wait_until_ended: Waits for the saves of the session; `ray.shutdown` calls it.
        is_used: Returns whether a session has saves that have not ended.

    Raises:
        ParticipantError: The coordinator is out of reach.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray_dcp.session import ray_calls
    from ray_dcp.session.ray_transport import RayTransport

    if not ray_calls.is_on_a_node():
        return None
    _, job = ray_calls.this_connection() or ("", secrets.token_hex(8))
    # Why one coordinator for all of a job and environment: an actor starts in a second, and stays
    # two minutes; and it commits with the keys of its environment, which may change.
    shared = f"alone-{ray_calls.job_of(job)}"
    with sessions.making(_Alone):
        alone = _alone.setdefault(shared, _Alone())
        known, session = sessions.of(alone)
        if known:
            return session
        # Why not the last one: another thread may be about to save with it.
        for name in [name for name in list(_alone)[:-2] if name != shared]:
            _, session = sessions.of(_alone[name])
            if session is None or not is_used(session):
                del _alone[name]  # which closes the session, below
                ray_calls.before_shutdown.pop(name, None)
        made = RayTransport(f"{shared}/{secrets.token_hex(8)}", 0, 1, actor=shared).join()
        ray_calls.before_shutdown[shared] = partial(wait_until_ended, made)
        sessions.set(alone, made)
        return made


class _Alone:
    """Represents a process that is alone in a Ray, as long as its environment is the same."""


_alone: dict[str, _Alone] = {}
"""By the name of the job and its environment."""


class _TrainGroup:
    """Represents the worker group of Ray Train: a worker process belongs to only one."""


@contextmanager
def connect_announced() -> Iterator[None]:
    """Announces that this rank uses `connect`; takes that back if the context raises."""
    announce_connect()
    try:
        yield
    except BaseException:
        announce_connect(False)
        raise


_num_met: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How often the ranks of a group have met to make a session. *Why*: what they wrote for the last
one is still in the store. *Why* of the group object: a process that outlives a resize is in a new
group, in which others are for the first time."""
