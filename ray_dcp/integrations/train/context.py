"""What Ray Train's context says of the run that this worker belongs to.

The one module of the integration, beside the callback, that touches what Ray keeps private: how
checkpoints are kept, the run's id, and how often its controller looks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import ray

from ray_dcp.errors import InternalError, InvalidRequestError
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.hooks import TESTED
from ray_dcp.store.location import split_url
from ray_dcp.store.opening import absolute_target, as_target

__all__ = ["RunFacts", "run_facts", "target_of_run"]

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
    target = as_target_of(facts.storage.storage_filesystem, path)
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
    if storage_options is None and (not is_known or not _has_client()):
        return target
    if not is_known:
        raise InvalidRequestError(
            f"storage_options are for a RunConfig(storage_path) of s3://, gs:// or az:// without "
            f"storage_filesystem, but it is {facts.storage_path!r}; leave them out",
            key="storage_options",
        )
    options = dict(storage_options) if storage_options else _options_in(rest.partition("?")[2])
    return absolute_target(Target(f"{scheme}://{path}", options))


def as_target_of(filesystem: Any, path: str) -> Target:
    """Returns the target of a path in one of Ray Train's filesystems."""
    from ray_dcp.store.location import Location

    return as_target(Location(path, filesystem=filesystem))


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


def _has_client() -> bool:
    import importlib.util

    return importlib.util.find_spec("obstore") is not None


def _other_ray(error: Exception) -> InternalError:
    return InternalError(
        f"Expected a Ray whose Train (V2) works as in {', '.join(TESTED)}.x, but Ray "
        f"{ray.__version__} says {type(error).__name__}: {error}. Install a tested Ray, or leave "
        f"RAY_TRAIN_V2_ENABLED at 1"
    )
