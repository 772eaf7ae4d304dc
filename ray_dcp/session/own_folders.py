"""Local folders of Ray Train workers: each saves to its own, which Ray Train merges.

Ray's own examples save so: each worker gives `save` a temporary folder, and reports it with
`Checkpoint.from_directory`. Ray Train uploads all folders to one place.

    rank 0: /tmp/a   __0_0.<attempt>.distcp, chunk table, manifest, .metadata  --+
    rank 1: /tmp/b   __1_0.<attempt>.distcp                                    --+-> the checkpoint
    rank 2: /tmp/c   __2_0.<attempt>.distcp                                    --+

Nobody but a rank sees its folder. So rank 0 runs the coordinator in its own process, which creates
the records in rank 0's folder, and each rank checks that its own files are there before it sends
their receipts. The manifest names the files of all ranks with their digests, so that a folder into
which not all parts were merged is never taken as a whole checkpoint.

*The commit is the report*: when `save` returns, the parts are complete, and Ray Train registers the
merged folder after every worker has uploaded its part. A rank that fails does not report.

*Why new folders*: a record of an earlier save in the folder of another rank would come into the
merged one, over that of rank 0.

`Checkpoint.as_directory` downloads the merged checkpoint to a path that each worker's node has, but
the node of the coordinator may not. If the coordinator finds nothing there, and all ranks have the
folder, rank 0 reads the records (`session_of_copies`).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from dataclasses import dataclass, replace
from typing import Any

from ray_dcp.commit_protocol.commands import Result, Task, WriteTable
from ray_dcp.commit_protocol.error_aggregation import exchanged
from ray_dcp.commit_protocol.garbage import owner_of
from ray_dcp.commit_protocol.messages import Exchange, Target
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.rank.rank_load import drive
from ray_dcp.rank.rank_save import result_or_error
from ray_dcp.session.call import Call
from ray_dcp.session.group_sessions import sessions
from ray_dcp.session.job_store import job_store, naming_lost_ranks
from ray_dcp.session.session import Session
from ray_dcp.session.socket_transport import forget_key, join_by_store
from ray_dcp.store.opening import open_storage

logger = logging.getLogger(__name__)

WAY_OUT = "in Ray Train's workers, ray_dcp.train.checkpointer saves to the storage of the run"


@dataclass(frozen=True)
class OwnFolder:
    """The part of one rank in a save whose folders Ray Train merges."""

    session: Session
    """Its coordinator is in the process of rank 0."""
    first: Target
    """Folder of rank 0, with the records."""
    own: Target
    """Folder of this rank."""

    def begin(self) -> None:
        """Makes this rank's folder, and checks that no checkpoint is in it.

        Raises:
            InvalidRequestError: There are files of a checkpoint.
            OSError: It can't be made.
        """
        storage = open_storage(self.own)
        # Why: a rank may have nothing to write, and reports its folder all the same.
        os.makedirs(storage.url, exist_ok=True)
        keys = [entry.key for entry in storage.list("")]
        left = sorted(key for key in keys if key.endswith(".distcp") or owner_of(key) is not None)
        if left:
            raise InvalidRequestError(
                f"Expected a new folder, as Ray Train merges the folders of all ranks into one "
                f"checkpoint, but {self.own.url} has {', '.join(left[:3])}"
                f"{f' and {len(left) - 3} more' if len(left) > 3 else ''} of an earlier save. Give "
                f"each save a folder of its own, as tempfile.TemporaryDirectory() makes; or, "
                f"{WAY_OUT}",
                rank=self.session.rank,
                key="checkpoint_id",
            )


def own_folder(session: Session, target: Target, options: SaveOptions) -> OwnFolder | None:
    """Returns this rank's part if each rank of a Ray Train run saves to a local folder of its own.

    Collective if the process is a worker of Ray Train and the target is local. Two exchanges more
    in the first such save, one in others.

    Args:
        session: Session of this rank.
        target: Where this rank saves.
        options: Options of the save.

    Returns:
        None if all ranks save to one place.

    Raises:
        CheckpointError: The ranks can't reach rank 0, or made different calls.
    """
    if session.world_size == 1 or not _is_local(target) or not _in_ray_train():
        return None
    told = _told_by_all(session, "the folders of a save", target.url, options)
    urls = [url for url, _ in told]
    if len(set(urls)) == 1:
        return None
    hosted = _hosted(session, told[0][1], options)
    if session.rank == 0:
        logger.info(
            "The ranks save to local folders of their own: the checkpoint is whole and durable "
            "when Ray Train has registered their report; %s",
            WAY_OUT,
        )
    return OwnFolder(hosted, replace(target, url=urls[0]), target)


def session_of_copies(session: Session, target: Target, options: LoadOptions) -> Session | None:
    """Returns a session for a load of which each node of a Ray Train run has a local copy.

    Collective if the process is a worker of Ray Train and the target is local.

    Args:
        session: Session of this rank, whose coordinator found nothing at the target.
        target: Where this rank loads from.
        options: Options of the load.

    Returns:
        None if a rank has no folder there either.

    Raises:
        CheckpointError: The ranks can't reach rank 0, or made different calls.
    """
    if session.world_size == 1 or not _is_local(target) or not _in_ray_train():
        return None
    is_here = os.path.isdir(open_storage(target).url)
    told = _told_by_all(session, "copies of a checkpoint", is_here, options)
    return _hosted(session, told[0][1], options) if all(here for here, _ in told) else None


def _is_local(target: Target) -> bool:
    return target.filesystem is None and target.url.startswith(("/", "file:"))


def _in_ray_train() -> bool:
    if "ray.train" not in sys.modules:
        return False
    from ray_dcp.session import ray_calls

    return ray_calls.train_ranks() is not None


def _told_by_all(
    session: Session, what: str, fact: str | bool, options: SaveOptions | LoadOptions
) -> list[tuple[Any, str]]:
    """Returns the facts of all ranks, each with a random word, by rank."""
    told = json.dumps([fact, secrets.token_hex(8)]).encode()
    inbox = _exchange(session, what, told, options)
    return [tuple(json.loads(inbox[rank])) for rank in range(session.world_size)]


def _exchange(
    session: Session,
    what: str,
    told: bytes,
    options: SaveOptions | LoadOptions,
    error: CheckpointError | None = None,
) -> dict[int, bytes]:
    """Sends the same bytes to every rank, and returns those of every rank."""
    rank, world_size = session.rank, session.world_size
    with Call(session, options.heartbeat_timeout_s) as call:
        request = Exchange(
            call.next_key(),
            rank,
            world_size,
            what,
            dict.fromkeys(range(world_size), told),
            options.plan_timeout_s,
            error,
        )
        return dict(drive(exchanged(request), call.ask))


def _hosted(session: Session, word: str, options: SaveOptions | LoadOptions) -> Session:
    """Returns the session of the same ranks whose coordinator is in the process of rank 0.

    Raises:
        CheckpointError: A rank can't join; raised on all ranks.
    """
    with sessions.making(session):
        known, hosted = sessions.of(session)
        if not known or hosted is None:
            hosted = _host(session, word, options)
            sessions.set(session, hosted)
    return hosted


def _host(session: Session, word: str, options: SaveOptions | LoadOptions) -> Session:
    name = f"{session.name}/folders-{word}"

    def join() -> Session:
        store = job_store() if _has_store() else None
        if store is None:
            raise InvalidRequestError(
                f"Expected one place for all ranks, or a torch process group by which they reach "
                f"rank 0, but found neither. Call torch.distributed.init_process_group, as Ray's "
                f"TorchTrainer does; or, {WAY_OUT}",
                key="checkpoint_id",
            )
        with naming_lost_ranks(session.rank):
            return join_by_store(store, name, session.rank, session.world_size, performer=_perform)

    hosted, error = result_or_error(join, "reaching rank 0", session.rank)
    try:
        _exchange(session, "the session for folders of the ranks' own", b"", options, error)
    except CheckpointError:
        if hosted is not None:
            hosted.close()
        raise
    if session.rank == 0 and hosted is not None:
        forget_key(name)
    if hosted is None:
        raise InvalidRequestError(f"Rank 0 can't be reached; {WAY_OUT}", rank=session.rank)
    return hosted


def _has_store() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _perform(task: Task) -> Result:
    """Performs a task in the folder of rank 0, which has no data files of other ranks.

    Why not checked: each rank checks its own files before it sends their receipts.
    """
    if isinstance(task, WriteTable):
        own = tuple(one for one in task.receipts if one.key.startswith("__0_"))
        task = replace(task, receipts=own)
    return perform(task)
