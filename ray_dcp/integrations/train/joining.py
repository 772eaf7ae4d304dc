"""Joins the workers of a group to a run: writer lease, group number, retention.

Rank 0 reads the storage once, and broadcasts the result or the error through Ray Train.

`StepFolder` is the name of a checkpoint's folder. A name is never used twice: Ray Train deletes by
name, and a killed worker group may still have a save in progress. The number of the worker group
comes first, so that of two checkpoints of one step the later one sorts last. The step comes last,
where all of ray_dcp expects it.

    g0003-7f3c21-step-00000120
     |     |          +- step
     |     +------------ random word: distinguishes groups that got the same number
     +------------------ number of the worker group in the run

`Retention`, on rank 0, removes old checkpoints if ray_dcp is the side that deletes. It uses the
manager's `Deletions`, which keep steps that are tagged or being read. Ray Train refuses to continue
a run if a registered folder does not exist, so the delete record of a reported checkpoint remains;
of other checkpoints nothing does.

`run_facts` reads Ray Train's context. Besides the callback, this is the only module of the
integration that uses private APIs of Ray: the checkpoint config, the run's id, and the poll
interval of the controller.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import parse_qsl

import ray

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.checks import check_whole
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.io.threads import Stop
from ray_dcp.manager.catalogue import Catalogue, Root, look_at_folders
from ray_dcp.manager.leases import LEASE_S, Readers, WriterLease, this_process
from ray_dcp.manager.steps import Deletions, Going, going, remove_records
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.memory_tier import NodeMemory
from ray_dcp.runtime.ray_private import TESTED
from ray_dcp.runtime.ray_session import RaySession
from ray_dcp.runtime.session import Session
from ray_dcp.saving import session_for
from ray_dcp.store.location import Location, split_url
from ray_dcp.store.opening import absolute_target, as_target
from ray_dcp.view.run_listing import list_run

_NAME = re.compile(r"g(\d{4,9})-([0-9a-f]{6})-step-(\d{8,18})")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, order=True)
class StepFolder:
    """The folder of a step saved by one worker group; ordered by age.

    Examples:
        >>> folder = StepFolder(120, 3, "7f3c21")
        >>> folder.name, parse(folder.name) == folder
        ('g0003-7f3c21-step-00000120', True)
    """

    step: int
    group: int
    """Number of the worker group in the run, from 1."""
    word: str
    """Random word that distinguishes groups with the same number."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return f"g{self.group:04d}-{self.word}-step-{self.step:08d}"


def parse(name: str) -> StepFolder | None:
    """Returns the step folder of a name, or None for any other name.

    Args:
        name: Name or path of a folder; only its last component is used.
    """
    found = _NAME.fullmatch(name.rstrip("/").rpartition("/")[2])
    return StepFolder(int(found[3]), int(found[1]), found[2]) if found else None


def next_group(names: Iterable[str]) -> int:
    """Returns the number of a new worker group, above those of all existing folders.

    Examples:
        >>> next_group(["g0002-7f3c21-step-00000120", "others"]), next_group([])
        (3, 1)
    """
    found = (parse(name) for name in names)
    return max((folder.group for folder in found if folder is not None), default=0) + 1


def check_folder(folder: object) -> str:
    """Returns the name of a folder in the run after checking it.

    Raises:
        InvalidRequestError: `folder` is not a simple name.

    Examples:
        >>> check_folder("checkpoints")
        'checkpoints'
    """
    if not isinstance(folder, str) or _PART.fullmatch(folder) is None:
        raise InvalidRequestError(
            f"folder must be the name of a folder in the run's own storage (1 to 64 letters, "
            f"digits, '.', '_' or '-'), but is {folder!r}. Ray Train registers checkpoints inside "
            f"RunConfig(storage_path, name) only: choose the place there; for any other one use "
            f"ray_dcp.CheckpointManager",
            key="folder",
        )
    return folder


Owner = Literal["ray_dcp", "ray", "nobody"]

logger = logging.getLogger(__name__)


def owner_of(max_to_keep: int, num_to_keep: int | None) -> Owner:
    """Returns which side deletes old checkpoints.

    Args:
        max_to_keep: Setting of the checkpointer; 0 keeps all.
        num_to_keep: Setting of Ray Train's `CheckpointConfig`.

    Raises:
        InvalidRequestError: Both sides would delete, or `max_to_keep` is invalid.

    Examples:
        >>> owner_of(3, None), owner_of(0, 3), owner_of(0, None)
        ('ray_dcp', 'ray', 'nobody')
    """
    check_whole(max_to_keep, "max_to_keep")
    if max_to_keep and num_to_keep is not None:
        raise InvalidRequestError(
            f"max_to_keep={max_to_keep} and CheckpointConfig(num_to_keep={num_to_keep}) both say "
            f"what to delete, and each would delete what the other counts on. Leave one of them "
            f"out: Ray Train's keeps by score too, ray_dcp's counts saves that Ray Train was not "
            f"told of as well",
            key="max_to_keep",
        )
    if max_to_keep:
        return "ray_dcp"
    return "nobody" if num_to_keep is None else "ray"


def superfluous(
    committed: Iterable[StepFolder],
    uncommitted: Iterable[StepFolder],
    registered: Collection[str],
    owner: Owner,
    max_to_keep: int,
) -> list[StepFolder]:
    """Returns the folders that can be deleted, oldest first.

    The newest committed folder, the newest reported folder and all newer ones are always kept.

    Args:
        committed: Committed folders of the run.
        uncommitted: Uncommitted folders of earlier worker groups.
        registered: Names of the folders that were reported to Ray Train.
        owner: Which side deletes old checkpoints.
        max_to_keep: Number of committed folders that ray_dcp keeps.

    Examples:
        >>> folders = [StepFolder(step, 1, "7f3c21") for step in (10, 20, 30)]
        >>> [one.step for one in superfluous(folders, [], [folders[0].name], "ray_dcp", 1)]
        [20]
    """
    committed = sorted(committed)
    if not committed:
        return []
    told = [folder for folder in committed if folder.name in registered]
    stays = {committed[-1], *told[-1:]}
    gone: set[StepFolder] = set()
    if owner == "ray_dcp":
        gone.update(committed[:-max_to_keep])
    elif owner == "ray" and told:
        # Why: Ray Train can't delete these, as a newer one was reported instead of them.
        gone.update(one for one in committed if one < told[-1] and one not in told)
    gone.update(one for one in uncommitted if one < committed[-1])
    return sorted(gone - stays)


class Retention:
    """Deletes superfluous folders. Not thread-safe.

    Args:
        root: Folder of the run with the steps.
        owner: Which side deletes old checkpoints.
        max_to_keep: Number of committed folders that ray_dcp keeps.
        group: Number of this worker group; only uncommitted folders of earlier groups are deleted.
        registered: Names of the folders that Ray Train has registered.
        check: Raises if this run has lost the writer lease.
    """

    def __init__(
        self,
        root: Root,
        owner: Owner,
        max_to_keep: int,
        group: int,
        registered: Iterable[str],
        *,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._root = root
        self._owner: Owner = owner
        self._max_to_keep = max_to_keep
        self._group = group
        self._registered = set(registered)
        self._found = Catalogue()
        self._deletions = Deletions(root, Readers(lease_s=LEASE_S), check, self._removed)

    def told(self, folder: StepFolder) -> None:
        """Registers a folder that was reported to Ray Train, and deletes superfluous folders."""
        self._registered.add(folder.name)
        try:
            chosen, _ = self._look()
            left = self._deletions.remove_all(chosen, self._look) if chosen else {}
            for name, error in left.items():
                if error is not None:
                    logger.warning("%s/%s: %s", self._root.url, name, error)
        except CheckpointError as error:
            logger.warning("Old checkpoints in %s were not deleted: %s", self._root.url, error)

    def _look(self) -> tuple[list[Going], Catalogue]:
        """Scans the storage; returns the untagged folders to delete, and the catalogue."""
        self._found = look_at_folders(
            self._root, lambda name: getattr(parse(name), "step", None), self._found.folders
        )
        committed = {
            folder: going(one)
            for name, one in self._found.folders.items()
            if (folder := parse(name)) is not None and one.is_ours and one.is_known
        }
        left = (parse(name) for name in self._found.leftovers)
        earlier = {
            one: Going(one.step, one.name, "") for one in left if one and one.group < self._group
        }
        folders = superfluous(committed, earlier, self._registered, self._owner, self._max_to_keep)
        both = committed | earlier
        return [both[one] for one in folders if one.step not in self._found.tags], self._found

    def _removed(self, going: Going) -> None:
        if going.attempt and going.name not in self._registered:
            remove_records(self._root, going.name)


POLL_S = 2.0
"""Default poll interval of Ray Train's controller, in seconds."""

_ENDPOINTS = {"endpoint_override": "endpoint", "region": "region"}


@dataclass(frozen=True)
class RunFacts:
    """Properties of the Ray Train run that this worker belongs to."""

    rank: int
    world_size: int
    name: str
    """`RunConfig.name`."""
    run_id: str
    """Id of this `fit()`."""
    num_to_keep: int | None
    """`CheckpointConfig.num_to_keep`."""
    poll_s: float
    """Poll interval of the controller, in seconds."""
    storage: Any
    """Ray Train's `StorageContext`."""
    storage_path: str
    """`RunConfig.storage_path`."""

    def checkpoint(self, name: str) -> Any:
        """Returns Ray Train's `Checkpoint` for a folder of the run."""
        from ray.train import Checkpoint

        path = self.storage.build_checkpoint_path_from_name(name)
        return Checkpoint(path, filesystem=self.storage.storage_filesystem)


def run_facts() -> RunFacts:
    """Returns the properties of this worker's run.

    Raises:
        InvalidRequestError: This is not a Ray Train worker, or it runs in local mode.
        InternalError: This version of Ray has a different internal structure.
    """
    outside = InvalidRequestError(
        "ray_dcp.train.checkpointer must be called inside the train_fn of a Ray Train (V2) run "
        "with num_workers of 1 or more, on every rank. Elsewhere use ray_dcp.CheckpointManager"
    )
    try:
        from ray.train.v2._internal.execution.context import get_train_context
    except ImportError as error:
        raise _other_ray(error) from error
    try:
        context = get_train_context()
    except RuntimeError as error:
        raise outside from error
    try:
        config: Any = context.train_run_context.run_config
        storage: Any = context.storage_context
        return RunFacts(
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            name=str(config.name),
            run_id=context.train_run_context.run_id,
            num_to_keep=config.checkpoint_config.num_to_keep,
            poll_s=float(os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S") or POLL_S),
            storage=storage,
            storage_path=str(config.storage_path),
        )
    except (AttributeError, TypeError) as error:
        raise _other_ray(error) from error


def target_of_run(
    facts: RunFacts, folder: str, storage_options: Mapping[str, object] | None
) -> Target:
    """Returns the target of a run's checkpoints.

    An object store is accessed by ray_dcp's own client if `RunConfig.storage_path` is a URL of one
    or options are given; otherwise through the filesystem that Ray Train uses.

    Args:
        facts: Properties of the run.
        folder: Name of the folder in the run.
        storage_options: Options of the object store.

    Raises:
        InvalidRequestError: Options are given, but the storage path is not an object store's URL.
    """
    path = facts.storage.build_checkpoint_path_from_name(folder)
    target = as_target(Location(path, filesystem=facts.storage.storage_filesystem))
    if target.filesystem is None:
        if storage_options:
            raise InvalidRequestError(
                f"storage_options are for object stores, but the run lies in {path}; leave them "
                f"out",
                key="storage_options",
            )
        return target
    scheme, rest = split_url(facts.storage_path)
    is_known = scheme in ("s3", "gs", "az") and not facts.storage.custom_fs_provided
    if storage_options is None and (not is_known or not find_spec("obstore")):
        return target
    if not is_known:
        raise InvalidRequestError(
            f"storage_options are for a RunConfig(storage_path) of s3://, gs:// or az:// without "
            f"storage_filesystem, but it is {facts.storage_path!r}; leave them out",
            key="storage_options",
        )
    options = dict(storage_options) if storage_options else _options_in(rest.partition("?")[2])
    return absolute_target(Target(f"{scheme}://{path}", options))


def _options_in(query: str) -> dict[str, object]:
    """Translates the options in a pyarrow URL into those of ray_dcp's client."""
    given = dict(parse_qsl(query))
    options: dict[str, object] = {
        ours: given[theirs] for theirs, ours in _ENDPOINTS.items() if theirs in given
    }
    endpoint = str(options.get("endpoint", ""))
    if endpoint and "://" not in endpoint:
        options["endpoint"] = f"{given.get('scheme', 'https')}://{endpoint}"
    return options


def _other_ray(error: Exception) -> InternalError:
    return InternalError(
        f"Expected a Ray whose Train (V2) works as in {', '.join(TESTED)}.x, but Ray "
        f"{ray.__version__} says {type(error).__name__}: {error}. Install a tested Ray, or leave "
        f"RAY_TRAIN_V2_ENABLED at 1"
    )


STAGED_S = 60.0
"""How long to wait for staged saves of earlier groups on this node, in seconds."""

REGISTERED_S = 5.0
"""Timeout of the query for registered checkpoints, in seconds."""


@dataclass
class Group:
    """This rank's membership in a worker group."""

    root: Root
    number: int
    """Number of the group in the run, from 1."""
    word: str
    session: Session
    owns_session: bool
    has_steps: bool
    """The folder contains steps, of earlier groups or of another program."""
    lease: WriterLease | None = None
    """None except on rank 0."""
    retention: Retention | None = None
    """None except on rank 0."""

    def folder_of(self, step: int) -> StepFolder:
        """Returns the folder for a step saved by this group."""
        return StepFolder(step, self.number, self.word)

    def leave(self) -> None:
        """Releases the lease, and the session if it is owned."""
        if self.lease is not None:
            self.lease.give_back()
        if self.owns_session:
            self.session.close()


def join(
    facts: RunFacts,
    folder: str,
    max_to_keep: int,
    storage_options: Mapping[str, object] | None,
    broadcast: Callable[[Any], Any],
) -> Group:
    """Joins the worker group, and returns this rank's membership. Collective.

    Args:
        facts: Properties of the run.
        folder: Folder of the steps.
        max_to_keep: Number of committed steps that ray_dcp keeps; 0 keeps all.
        storage_options: Options of the object store.
        broadcast: Returns the value of rank 0 on all ranks.

    Raises:
        InvalidRequestError: An argument is invalid, on all ranks.
        CheckpointExistsError: Another live run of this name writes here.
        CheckpointError: The storage can't be listed, or the session can't be created.
    """
    root = Root(absolute_target(target_of_run(facts, check_folder(folder), storage_options)))
    owner = owner_of(max_to_keep, facts.num_to_keep)
    error: Exception | None = None
    begun = lease = retention = None
    if facts.rank == 0:
        try:
            lease = take_lease(root, facts.run_id, facts.name)
            # Why: the only checkpoint may be one that a killed group has staged here.
            NodeMemory().await_staged(root.url, STAGED_S, Stop())
            listed = list_run(root.target)
            number = next_group([*(one.name for one in listed.steps), *listed.others])
            retention = Retention(
                root, owner, max_to_keep, number, _registered(), check=lease.check
            )
            begun = number, secrets.token_hex(3), bool(listed.steps)
        except Exception as failed:  # noqa: BLE001 - the other ranks wait in the broadcast
            error = failed
    # Why truncated: Ray Train broadcasts at most 1 kB.
    why = None if error is None else f"{type(error).__name__}: {error}"[:800]
    told = broadcast((begun, why))
    if error is not None:
        raise error
    if told[1] is not None:
        raise ParticipantError(f"Rank 0 could not begin: {told[1]}", rank=0)
    number, word, has_steps = told[0]
    session: Any = session_for(None, False)
    owns = isinstance(session, InlineSession)
    if owns:
        # Why with Ray even for one rank: its node agent keeps staged saves if the worker is killed.
        session = RaySession(f"train-{facts.name}-{word}", 0, 1)
        session.register()
    return Group(root, number, word, session, owns, has_steps, lease, retention)


def take_lease(root: Root, run_id: str, name: str, **how: Any) -> WriterLease:
    """Acquires the writer lease of a run; takes it over at once from an earlier group of the run.

    Deletions that the earlier group has announced are aborted.

    Args:
        root: Folder of the run.
        run_id: Id of this `fit()`.
        name: Name of the run.
        **how: Arguments of `WriterLease`.

    Raises:
        CheckpointExistsError: Another live run of this name holds the lease.
        StorageError: The storage failed.
    """
    holder = replace(this_process(), nonce=run_id)
    lease = WriterLease(root, holder=holder, **how)
    before = lease.holder()
    try:
        lease.take(even_if_held=before is not None and before.nonce == run_id)
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"Expected to be the only run named {name!r} that writes to {root.url}, but {before} "
            f"does, of another fit(), and lives. Give each run, and each trial of Ray Tune, a "
            f"RunConfig(name=...) of its own, or end that one: its checkpoints can then be resumed "
            f"under the same name",
            checkpoint_id=root.url,
        ) from error
    unsure = root.fence("another worker group writes to the run", None)
    if unsure:
        logger.warning("%s", unsure)
    return lease


def _registered() -> list[str]:
    """Returns the names of the folders that Ray Train has registered."""
    from ray.train import CheckpointConsistencyMode, get_all_reported_checkpoints

    found = get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=REGISTERED_S
    )
    folders = (parse(one.checkpoint.path) for one in found)
    return [folder.name for folder in folders if folder is not None]
