"""A worker's part in a Ray Train run: what it asks Ray Train and tells it, and how it joins.

`run_facts` reads Ray Train's context. Besides `SaveBeforeResize`, this is the only module of the
integration that uses private APIs of Ray: the checkpoint config, the run's id, and the poll
interval of the controller.

`StepFolder` is the name of a checkpoint's folder. A name is never used twice: Ray Train deletes by
name, and a killed worker group may still have a save in progress. The number of the worker group
comes first, so that of two checkpoints of one step the later one sorts last. The step comes last,
where all of ray_dcp expects it.

    g0003-7f3c21-step-00000120
     |     |          +- step
     |     +------------ random word: distinguishes groups that got the same number
     +------------------ number of the worker group in the run

`join` makes a worker a member of its group: rank 0 scans the storage once, and broadcasts the
result or the error through Ray Train. (Workers that Ray Train replaces one by one are joined by
`replica_groups`.) A manager's `Writer`, on rank 0, holds the lease and deletes.

`NeededSteps` is its retention policy: it adds to the user's policy what Ray Train needs. Ray Train
refuses to continue a run if a registered folder does not exist, so the delete record of a step
always remains, as in every run.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.core.processes import Stop
from ray_dcp.errors import (
    CheckpointExistsError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.format.names import StepNames
from ray_dcp.io.lease_holders import this_process
from ray_dcp.job.part import check_no_part
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.metrics import beyond_floats
from ray_dcp.manager.retention import RetentionPolicy, StepFacts, answers_of
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Settings, retention_of
from ray_dcp.saving import session_for
from ray_dcp.session import ray_calls
from ray_dcp.session.inline_transport import session_alone
from ray_dcp.session.ray_calls import TESTED
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.session.session import Session
from ray_dcp.stage.memory_tier import NodeMemory
from ray_dcp.store.location import Location, split_url
from ray_dcp.store.opening import absolute_target, as_target
from ray_dcp.view.run_listing import folders_in

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
    replicas_of: str = ""
    """Id of the worker group, if each worker is a replica that Ray Train replaces by itself."""

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
            replicas_of=_replicas_of(context),
        )
    except (AttributeError, TypeError) as error:
        raise _other_ray(error) from error


def _replicas_of(context: Any) -> str:
    """Returns the id of a worker group whose workers are replicas; "" for any other group."""
    backend = getattr(context.train_run_context.backend_config, "backend_cls", None)
    if not getattr(backend, "has_replica_groups", False):
        return ""
    # Why this actor: a group that is started anew has another one, a replaced worker the same.
    return ray_calls.id_of(context.get_synchronization_actor())


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


PENDING = "PENDING_VALIDATION"
"""Name of Ray Train's status of a checkpoint whose validation has not ended."""


def broadcast(value: Any) -> Any:
    """Returns the value of rank 0 on all ranks. Collective."""
    from ray.train.collective import broadcast_from_rank_zero

    return broadcast_from_rank_zero(value)


def report(checkpoint: Any, metrics: Mapping[str, Any], validation: Any = False) -> None:
    """Reports a committed checkpoint to Ray Train. Collective.

    Args:
        checkpoint: Ray Train's checkpoint.
        metrics: Its metrics.
        validation: Argument of `ray.train.report`; passed only if it requests a validation, as
            older versions of Ray lack it.
    """
    import ray.train

    ray.train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        **({"validation": validation} if validation else {}),
    )


def has_timed_out(error: RayTaskError) -> bool:
    """Returns whether a report failed as not all workers made it within Ray Train's timeout."""
    kinds = type(error.cause).__mro__
    return any(kind.__name__ == "CollectiveTimeoutError" for kind in kinds)


def registered() -> str | None:
    """Returns the path of the checkpoint that Ray Train registered last, or None."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(checkpoint.path)


@dataclass(frozen=True)
class ReportedStep:
    """What Ray Train knows of a checkpoint that was reported to it."""

    metrics: Mapping[str, float]
    """Its numeric metrics, including those of its validation."""
    is_pending: bool = False
    """Whether its validation has not ended."""


def reported_folders() -> dict[str, ReportedStep]:
    """Returns what Ray Train knows of the reported checkpoints, by folder name, oldest first."""
    from ray.train import CheckpointConsistencyMode, get_all_reported_checkpoints

    found = get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=bounds.REPORTED_S
    )
    return {
        str(one.checkpoint.path).rstrip("/").rpartition("/")[2]: ReportedStep(
            numbers_in(one.metrics), getattr(getattr(one, "status", None), "name", "") == PENDING
        )
        for one in found
    }


_ARRAYS = (torch.Tensor, np.ndarray, np.generic)
"""*Why* scalars of NumPy: `np.float32` is no `float`."""


def check_metrics(metrics: object) -> dict[str, Any]:
    """Returns metrics as Ray Train accepts them: tensors and values of NumPy become numbers.

    Raises:
        InvalidRequestError: `metrics` is not a dict, or a value has several elements or is beyond
            the range of floats.

    Examples:
        >>> check_metrics({"loss": torch.tensor(0.5), "n": np.float32(2), "phase": "warmup"})
        {'loss': 0.5, 'n': 2.0, 'phase': 'warmup'}
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"metrics must be a dict of names to numbers, but is {metrics!r}", key="metrics"
        )
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, _ARRAYS):
            if math.prod(value.shape) != 1:
                raise InvalidRequestError(
                    f"metric {name!r} is a tensor of {tuple(value.shape)}; Ray Train takes "
                    f"numbers: give its mean(), or put it into the state",
                    key=str(name),
                )
            value = value.item()
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise beyond_floats(str(name))
        found[str(name)] = value
    return found


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numeric metrics, those in tensors and arrays of one element included.

    Examples:
        >>> numbers_in({"loss": 1, "acc": np.float32(0.5), "phase": "warmup", "done": True})
        {'loss': 1.0, 'acc': 0.5}
    """
    plain = {
        name: value.item() if isinstance(value, _ARRAYS) and math.prod(value.shape) == 1 else value
        for name, value in metrics.items()
    }
    return {
        name: float(value)
        for name, value in plain.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


# --- the steps of a run, and joining it ----------------------------------------------------------

_NAME = re.compile(r"g(\d{4,9})-([0-9a-f]{6})-step-(\d{8,18})")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class GroupNames(StepNames):
    """The names of step folders that one worker group writes; those of all groups are read.

    Examples:
        >>> names = GroupNames(group=3, word="7f3c21")
        >>> names.name_of(120), names.step_of("g0002-0a1b2c-step-00000110")
        ('g0003-7f3c21-step-00000120', 110)
    """

    group: int = 1
    word: str = ""

    def name_of(self, step: int) -> str:
        """Returns the folder name of a step; see `StepNames`."""
        super().name_of(step)  # It raises for an invalid step.
        return StepFolder(step, self.group, self.word).name

    def step_of(self, name: str) -> int | None:
        """Returns the step of a folder; None if no worker group wrote it."""
        return getattr(parse(name), "step", None)


def check_folder(folder: object) -> str:
    """Returns the name of a folder in the run after checking it.

    Raises:
        InvalidRequestError: `folder` is not a simple name.

    Examples:
        >>> check_folder("checkpoints")
        'checkpoints'
    """
    if not isinstance(folder, str) or _PART.fullmatch(folder) is None:
        check_no_part(
            folder,
            "the name of a folder in the run of Ray Train",
            "give the part to ray_dcp.async_save(state, checkpoint_id=part), or to load, in "
            "train_fn, on all workers",
        )
        raise InvalidRequestError(
            f"folder must be the name of a folder in the run's own storage (1 to 64 letters, "
            f"digits, '.', '_' or '-'), but is {folder!r}. Ray Train registers checkpoints inside "
            f"RunConfig(storage_path, name) only: choose the place there; for any other one use "
            f"ray_dcp.CheckpointManager",
            key="folder",
        )
    return folder


class NeededSteps:
    """The retention policy of a run: keeps what a policy keeps, and what Ray Train needs.

    Ray Train needs the newest step that was reported to it, and each step that it still validates.
    The results of validations are metrics of their steps, by which the policy can rank.

    Args:
        policy: The user's policy. None if Ray Train deletes the steps that were reported to it:
            then only older steps that were never reported are superfluous.

    Examples:
        >>> needed = NeededSteps(None)
        >>> needed.add({1: ReportedStep({}), 3: ReportedStep({})})
        >>> needed.keeps([StepFacts(step=step) for step in (1, 2, 3, 4)])
        [True, False, True, True]
    """

    def __init__(self, policy: RetentionPolicy | None) -> None:
        self._policy = policy
        self._reported: Mapping[int, ReportedStep] = {}
        self._is_unknown = False

    def add(self, reported: Mapping[int, ReportedStep]) -> None:
        """Adds steps that were reported to Ray Train, or what it now knows of them."""
        self._reported = {**self._reported, **reported}

    def refresh(self) -> None:
        """Queries Ray Train for the steps that were reported to it."""
        try:
            found = reported_folders()
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds; the next pass asks again
            logger.info("Ray Train could not be asked for its checkpoints: %s", error)
            self._is_unknown = True
            return
        self._is_unknown = False
        self.add({one.step: found[name] for name in found if (one := parse(name)) is not None})

    def refresh_pending(self) -> None:
        """Queries Ray Train for the results of validations, if there are any to wait for.

        Also if the last query failed.
        """
        # Why only then: the query waits until the controller has registered the last report.
        is_any = self._is_unknown or any(one.is_pending for one in self._reported.values())
        if self._policy is not None and is_any:
            self.refresh()

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        reported, newest = self._reported, max(self._reported, default=-1)
        if self._policy is None:
            return [one.step in reported or one.step > newest for one in steps]
        if self._is_unknown:
            # Why: Ray Train may still validate any of them.
            return [True] * len(steps)
        known = [reported.get(one.step, ReportedStep({})) for one in steps]
        facts = [
            replace(one, metrics={**one.metrics, **told.metrics})
            for one, told in zip(steps, known, strict=True)
        ]
        return [
            is_kept or told.is_pending or one.step == newest
            for is_kept, told, one in zip(
                answers_of(self._policy, facts), known, steps, strict=True
            )
        ]


def needed_steps(
    max_to_keep: int, retention: RetentionPolicy | None, num_to_keep: int | None
) -> NeededSteps | None:
    """Returns the retention policy of a run; None if nothing is deleted.

    Args:
        max_to_keep: Setting of the checkpointer; 0 keeps all.
        retention: A policy instead of that.
        num_to_keep: Setting of Ray Train's `CheckpointConfig`.

    Raises:
        InvalidRequestError: Both sides would delete, or an argument is invalid.
    """
    policy = retention_of(max_to_keep, retention)
    if policy is not None and num_to_keep is not None:
        name = f"max_to_keep={max_to_keep}" if max_to_keep else f"retention={retention!r}"
        raise InvalidRequestError(
            f"{name} and CheckpointConfig(num_to_keep={num_to_keep}) both say what to delete, and "
            f"each would delete what the other counts on. Leave one of them out: Ray Train's keeps "
            f"by score too, ray_dcp's counts saves that Ray Train was not told of as well",
            key="max_to_keep" if max_to_keep else "retention",
        )
    return None if policy is None and num_to_keep is None else NeededSteps(policy)


DueReport = tuple[int, str, Mapping[str, Any], float | None]
"""A report to Ray Train: step, folder, metrics, and the time of the save if reports are now paused
for a while, by the clock of rank 0."""


@dataclass
class JoinedGroup:
    """A worker group that this rank has joined."""

    writer: Writer
    """Holds the lease on rank 0; only scans the storage on other ranks."""
    settings: Settings
    """Settings of the manager by which the group saves."""
    session: Session
    owns_session: bool
    staged_s: float
    """How long a load waits for staged saves on this node, in seconds."""
    has_steps: bool
    """Whether the folder contains steps of earlier groups."""
    needed: NeededSteps | None = None

    def steps(self) -> None:
        """Records that this rank makes a step, whether it is saved or not."""

    def gather(self, step: int | None) -> bool:
        """Finds out with whom this rank saves a step; returns whether it takes part.

        Args:
            step: The step; None before the last report.

        Raises:
            CheckpointError: The coordinator is out of reach.
        """
        return True

    def agreed_reports(
        self, due: list[DueReport], agree: Callable[..., Any]
    ) -> Sequence[DueReport]:
        """Returns what all workers report to Ray Train now.

        Args:
            due: What is due on this rank.
            agree: See `CollectiveActions.agree`.
        """
        return due

    def report(self, checkpoint: Any, metrics: Mapping[str, Any], validation: Any) -> None:
        """Reports a checkpoint to Ray Train; see the function `report`. Collective."""
        report(checkpoint, metrics, validation)

    def failed(self) -> None:
        """Records that a save failed."""

    def leave_others(self) -> None:
        """Makes the next load one of this rank alone, if its group may have lost others."""

    def tidy(self, pending: Collection[int]) -> None:
        """Closes what saves that have ended used; those of the given steps have not."""

    def leave(self, timeout_s: float) -> None:
        """Releases the lease, after waiting for a deletion, and closes a session of its own."""
        self.writer.close(timeout_s)
        if self.owns_session:
            self.session.close()


def join(
    facts: RunFacts,
    folder: str,
    settings: Settings,
    needed: NeededSteps | None,
    storage_options: Mapping[str, object] | None,
) -> JoinedGroup:
    """Joins the worker group, and returns this rank's membership. Collective.

    Args:
        facts: Properties of the run.
        folder: Folder of the steps.
        settings: Settings of the manager by which the group saves, without names.
        needed: Retention policy of the run.
        storage_options: Options of the object store.

    Raises:
        InvalidRequestError: An argument is invalid, on all ranks.
        CheckpointExistsError: Another live run of this name writes here.
        CheckpointError: The storage can't be listed, or the session can't be created.
    """
    root = Root(absolute_target(target_of_run(facts, check_folder(folder), storage_options)))
    settings = replace(settings, kept=needed)
    writer: Writer | None = None

    def begin() -> tuple[Writer, tuple[int, str, bool]]:
        begun = begun_in(root)
        names = GroupNames(group=begun[0], word=begun[1])
        return writer_of(facts, root, replace(settings, names=names)), begun

    error: Exception | None = None
    begun = None
    try:
        if facts.rank == 0:
            try:
                writer, begun = begin()
                with naming_run(writer, facts.name):
                    writer.take_lease()
                if needed is not None:
                    needed.refresh()
            except Exception as failed:  # noqa: BLE001 - the other ranks wait in the broadcast
                error = failed
        # Why truncated: Ray Train broadcasts at most 1 kB.
        why = None if error is None else f"{type(error).__name__}: {error}"[:800]
        begun, why = broadcast((begun, why))
        if error is not None:
            raise error
        if why is not None:
            raise ParticipantError(f"Rank 0 could not begin: {why}", rank=0)
        number, word, has_steps = begun
        settings = replace(settings, names=GroupNames(group=number, word=word))
        session = session_for(None, False)
        owns = session is session_alone()
        if owns:
            # Why with Ray even for one rank: its node agent keeps staged saves if the worker is
            # killed.
            session = RayTransport(f"train-{facts.name}-{word}", 0, 1).join()
        return JoinedGroup(
            writer or Writer(root, settings),
            settings,
            session,
            owns,
            settings.options.plan_timeout_s,
            has_steps,
            needed,
        )
    except BaseException:
        if writer is not None:
            writer.close()
        raise


def begun_in(root: Root, staged_s: float = bounds.GROUP_STAGED_S) -> tuple[int, str, bool]:
    """Returns number and word of a group that begins now, and whether there are older steps.

    Args:
        root: The folder of the steps.
        staged_s: How long to wait for staged saves on this node, in seconds.
    """
    # Why: the only checkpoint may be one that a killed group has staged here.
    NodeMemory().await_staged(root.url, staged_s, Stop())
    earlier = [found.group for found in map(parse, folders_in(root.storage)) if found]
    return max(earlier, default=0) + 1, secrets.token_hex(3), bool(earlier)


def writer_of(facts: RunFacts, root: Root, settings: Settings) -> Writer:
    """Returns the writer of a run, for the rank that leads."""
    # Why with the id of the run: its worker groups replace each other at once.
    holder = replace(this_process(), nonce=facts.run_id)
    needed = settings.kept
    refresh = needed.refresh_pending if isinstance(needed, NeededSteps) else dict
    return Writer(root, settings, holder=holder, before_removal=refresh)


@contextmanager
def naming_run(writer: Writer, name: str) -> Iterator[None]:
    """Names the run in the error that another process writes to its folder."""
    try:
        yield
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"Expected to be the only run named {name!r} that writes to {writer.root.url}. Give "
            f"each run, and each trial of Ray Tune, a RunConfig(name=...) of its own, or end that "
            f"one: its checkpoints can then be resumed under the same name. {error.message}",
            checkpoint_id=writer.root.url,
        ) from error
