"""Calls of a worker to Ray Train: reports, reported checkpoints, metrics and preemptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ray_dcp.errors import InvalidRequestError

REPORTED_S = 5.0
"""Timeout of the query for reported checkpoints, in seconds."""
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
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=REPORTED_S
    )
    return {
        str(one.checkpoint.path).rstrip("/").rpartition("/")[2]: ReportedStep(
            numbers_in(one.metrics), getattr(getattr(one, "status", None), "name", "") == PENDING
        )
        for one in found
    }


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


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numeric metrics.

    Examples:
        >>> numbers_in({"loss": 1, "phase": "warmup", "done": True})
        {'loss': 1.0}
    """
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
