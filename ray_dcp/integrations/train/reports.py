"""Calls of a worker to Ray Train: reports, registered checkpoints, metrics and preemptions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.step_info import StepInfo, decode_info, encode_info, info_key
from ray_dcp.integrations.train.joining import parse
from ray_dcp.integrations.train.save_requests import REQUESTS, Asked, save_fits
from ray_dcp.store.storage import Storage


def broadcast(value: Any) -> Any:
    """Returns the value of rank 0 on all ranks. Collective."""
    from ray.train.collective import broadcast_from_rank_zero

    return broadcast_from_rank_zero(value)


def report(checkpoint: Any, metrics: Mapping[str, Any]) -> None:
    """Reports a committed checkpoint to Ray Train. Collective."""
    import ray.train

    ray.train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def registered() -> str | None:
    """Returns the path of the checkpoint that Ray Train registered last, or None."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(checkpoint.path)


def refuse_fresh_start(path: str | None, url: str, error: CheckpointNotFoundError) -> None:
    """Raises if Ray Train has registered a checkpoint of a run in which none was found.

    Args:
        path: Path of the checkpoint that Ray Train has registered, or None.
        url: URL of the folder that was searched.
        error: Error of the search.

    Raises:
        CheckpointNotFoundError: Ray Train has registered a checkpoint.
    """
    if path is None:
        return
    if parse(path) is None:
        way_out = (
            f"It was not saved by a ray_dcp.train.checkpointer: load it by ray_dcp.load(state, "
            f"checkpoint_id={path!r}) or as it was saved, and do not call restore(); or give the "
            f"run another RunConfig(name=...)"
        )
    else:
        way_out = (
            "Its files were deleted, moved or are out of reach here. Bring them back, or give the "
            "run another RunConfig(name=...) to begin anew on purpose"
        )
    raise CheckpointNotFoundError(
        f"Expected the checkpoint that Ray Train has registered for this run, {path}, but in {url} "
        f"none is committed. {way_out}",
        checkpoint_id=path,
    ) from error


def check_metrics(metrics: object) -> dict[str, Any]:
    """Returns metrics as Ray Train accepts them: tensors of one element become numbers.

    Raises:
        InvalidRequestError: `metrics` is not a dict, or a tensor has several elements.

    Examples:
        >>> check_metrics({"loss": torch.tensor(0.5), "phase": "warmup"})
        {'loss': 0.5, 'phase': 'warmup'}
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"metrics must be a dict of names to numbers, but is {metrics!r}", key="metrics"
        )
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise InvalidRequestError(
                    f"metric {name!r} is a tensor of {tuple(value.shape)}; Ray Train takes "
                    f"numbers: give its mean(), or put it into the state",
                    key=str(name),
                )
            value = value.item()
        found[str(name)] = value
    return found


def encoded_metrics(step: int, metrics: Mapping[str, Any]) -> bytes:
    """Returns the numeric metrics, encoded as they are stored beside the checkpoint."""
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return encode_info(StepInfo(step=step, created_s=time.time(), metrics=numbers))


def read_metrics(storage: Storage) -> dict[str, Any]:
    """Returns the metrics stored beside a checkpoint; empty if they can't be read.

    Args:
        storage: Storage of the checkpoint.
    """
    try:
        return dict(decode_info(storage.read(info_key(0))).metrics)
    except (CheckpointError, KeyError, OSError):
        return {}


class Preemption:
    """Checks for preempted nodes through Ray Train, in the same calls on all ranks.

    Args:
        every: Number of calls per check; 0 to never check.
        rank: This rank.
    """

    def __init__(self, every: int, rank: int) -> None:
        self._every = every
        self._rank = rank
        self._num_calls = 0
        self._known: Any = None

    def asks(self, step: int) -> Asked | None:
        """Returns a request for a save at this step, or None. Collective."""
        if not self._every:
            return None
        self._num_calls += 1
        if self._num_calls % self._every:
            return None
        from ray.train import get_preemption_info

        info = get_preemption_info()
        if info is None or info == self._known:
            return None
        self._known = info
        # Why rank 0 decides: clocks and measured times differ between ranks.
        fits = broadcast(self._fits(info) if self._rank == 0 else None)
        return Asked(f"preemption-{step}", "preemption", step - 1) if fits else None

    def _fits(self, info: Any) -> bool:
        left_s = None if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
        return save_fits(left_s, REQUESTS.seconds()[0])
