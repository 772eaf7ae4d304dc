"""How the workers of a group join a run: who writes, under which group number, what is kept.

Rank 0 reads the storage once and sends the others the result, or the error, through Ray Train.

`StepFolder` is the name of a checkpoint's folder. A name is never used twice: Ray Train deletes by
name, and a worker group that was killed may still have a save in progress. The number of the worker
group comes first, so that of two checkpoints of one step the later sorts last; the step comes last,
where all of ray_dcp looks for it.

`Retention`, on rank 0, removes checkpoints where ray_dcp is the side that deletes, by the manager's
`Deletions`: those that have a tag, or are read, stay. Ray Train
refuses to continue a run when a folder is gone that it has registered. So of a reported checkpoint
the delete record stays; of others nothing does.

`run_facts` reads Ray Train's context. Beside the callback this is the one module of the integration
that uses what Ray keeps private: how checkpoints are kept, the run's id, and how often its
controller looks.
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
from ray_dcp.operations import session_for
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.memory_tier import NodeMemory
from ray_dcp.runtime.ray_private import TESTED
from ray_dcp.runtime.ray_session import RaySession
from ray_dcp.runtime.session import Session
from ray_dcp.store.location import Location, split_url
from ray_dcp.store.opening import absolute_target, as_target
from ray_dcp.view.run_listing import list_run

_NAME = re.compile(r"g(\d{4,9})-([0-9a-f]{6})-step-(\d{8,18})")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, order=True)
class StepFolder:
    """The folder of one step, as one worker group saved it; sorted by age.

    Examples:
        >>> folder = StepFolder(120, 3, "7f3c21")
        >>> folder.name, parse(folder.name) == folder
        ('g0003-7f3c21-step-00000120', True)
    """

    step: int
    group: int
    """Number of the worker group in the run, from 1."""
    word: str
    """Tells two groups of one number."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return f"g{self.group:04d}-{self.word}-step-{self.step:08d}"


def parse(name: str) -> StepFolder | None:
    """Returns the step folder of a name; None for any other name.

    Args:
        name: Of a folder; only what follows the last slash counts.
    """
    found = _NAME.fullmatch(name.rstrip("/").rpartition("/")[2])
    return StepFolder(int(found[3]), int(found[1]), found[2]) if found else None


def next_group(names: Iterable[str]) -> int:
    """Returns the number of a new worker group, above all that have left folders.

    Examples:
        >>> next_group(["g0002-7f3c21-step-00000120", "others"]), next_group([])
        (3, 1)
    """
    found = (parse(name) for name in names)
    return max((folder.group for folder in found if folder is not None), default=0) + 1


def check_folder(folder: object) -> str:
    """Returns a folder of the run after checking that it stays inside of it.

    Raises:
        InvalidRequestError: It is no name.

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
    """Returns who deletes old checkpoints.

    Args:
        max_to_keep: Of the checkpointer; 0 for all.
        num_to_keep: Of Ray Train's `CheckpointConfig`.

    Raises:
        InvalidRequestError: Both would, or `max_to_keep` is no number.

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
    """Returns the folders that may go, oldest first.

    What stays in any case: the newest that is committed, the newest that Ray Train was told of, and
    what is newer.

    Args:
        committed: Of the run.
        uncommitted: Of worker groups before this one.
        registered: Names of folders that Ray Train was told of.
        owner: Who deletes.
        max_to_keep: How many ray_dcp keeps.

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
        # Why: Ray Train never hears of these, as a newer one was registered instead.
        gone.update(one for one in committed if one < told[-1] and one not in told)
    gone.update(one for one in uncommitted if one < committed[-1])
    return sorted(gone - stays)


class Retention:
    """Deletes what is superfluous. Its methods are called from one thread.

    Args:
        root: The folder of the run in which the steps lie.
        owner: Who deletes.
        max_to_keep: How many ray_dcp keeps.
        group: Number of this worker group: what later ones left is not looked at.
        registered: Names that Ray Train knows.
        check: Raises when this run has lost the writer lease.
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
        """Notes that Ray Train was told of one, and deletes what is superfluous now."""
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
        """Returns what may go, by a look at the storage; those with a tag stay."""
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
"""How often Ray Train's controller looks unless it is told otherwise, in seconds."""

_ENDPOINTS = {"endpoint_override": "endpoint", "region": "region"}


@dataclass(frozen=True)
class RunFacts:
    """The run of this worker."""

    rank: int
    world_size: int
    name: str
    """`RunConfig.name`."""
    run_id: str
    """Of this `fit()`."""
    num_to_keep: int | None
    """`CheckpointConfig.num_to_keep`."""
    poll_s: float
    """How often the controller looks, in seconds."""
    storage: Any
    """Ray Train's `StorageContext`."""
    storage_path: str
    """`RunConfig.storage_path`."""

    def checkpoint(self, name: str) -> Any:
        """Returns Ray Train's `Checkpoint` of a folder below the run."""
        from ray.train import Checkpoint

        path = self.storage.build_checkpoint_path_from_name(name)
        return Checkpoint(path, filesystem=self.storage.storage_filesystem)


def run_facts() -> RunFacts:
    """Returns the run of this worker.

    Raises:
        InvalidRequestError: This is no worker of Ray Train, or one in local mode.
        InternalError: This Ray keeps these facts elsewhere.
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
    """Returns where the checkpoints of a run go.

    Object stores are reached by ray_dcp's own client where the URL in `RunConfig.storage_path`
    says which, or options are given; else through the filesystem that Ray Train uses.

    Args:
        facts: Of the run.
        folder: Of the run.
        storage_options: For the object store.

    Raises:
        InvalidRequestError: There is no URL that the options would be for.
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
    """Returns the options of our client for those in a URL of pyarrow's."""
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
"""How long to wait for saves of earlier groups that are staged on this node, in seconds."""

REGISTERED_S = 5.0
"""How long Ray Train may take to tell what it has registered, in seconds."""


@dataclass
class Group:
    """This rank's place in a worker group that saves."""

    root: Root
    number: int
    """Of the group in the run, from 1."""
    word: str
    session: Session
    owns_session: bool
    has_steps: bool
    """There are folders of steps: of groups before this one, or of whoever saved there."""
    lease: WriterLease | None = None
    """On rank 0."""
    retention: Retention | None = None
    """On rank 0."""

    def folder_of(self, step: int) -> StepFolder:
        """Returns the folder of a step that this group saves."""
        return StepFolder(step, self.number, self.word)

    def leave(self) -> None:
        """Gives up what this rank holds."""
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
    """Returns this rank's place; every rank calls it.

    Args:
        facts: Of the run.
        folder: In which the steps lie.
        max_to_keep: How many ray_dcp keeps; 0 for all.
        storage_options: For the object store.
        broadcast: Returns, on all ranks, what rank 0 gave.

    Raises:
        InvalidRequestError: An argument is wrong, on all ranks alike.
        CheckpointExistsError: Another run of this name writes here, and lives.
        CheckpointError: The storage can't be listed, or no session can be made.
    """
    root = Root(absolute_target(target_of_run(facts, check_folder(folder), storage_options)))
    owner = owner_of(max_to_keep, facts.num_to_keep)
    error: Exception | None = None
    begun = lease = retention = None
    if facts.rank == 0:
        try:
            lease = take_lease(root, facts.run_id, facts.name)
            # Why: a save that a killed group has staged here may be all there is.
            NodeMemory().await_staged(root.url, STAGED_S, Stop())
            listed = list_run(root.target)
            number = next_group([*(one.name for one in listed.steps), *listed.others])
            retention = Retention(
                root, owner, max_to_keep, number, _registered(), check=lease.check
            )
            begun = number, secrets.token_hex(3), bool(listed.steps)
        except Exception as failed:  # noqa: BLE001 - the other ranks wait in the broadcast
            error = failed
    # Why cut: Ray Train broadcasts 1 kB.
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
        # Why with Ray although alone: its stager keeps what is staged when this worker is killed.
        session = RaySession(f"train-{facts.name}-{word}", 0, 1)
        session.register()
    return Group(root, number, word, session, owns, has_steps, lease, retention)


def take_lease(root: Root, run_id: str, name: str, **how: Any) -> WriterLease:
    """Returns the writer lease of a run, taken: at once from an earlier group of the same run.

    What that group announced to delete stays from now on.

    Args:
        root: Of the run.
        run_id: Of this `fit()`.
        name: Of the run.
        **how: As for `WriterLease`.

    Raises:
        CheckpointExistsError: Another run of this name lives.
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
