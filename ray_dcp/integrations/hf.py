"""`RayDcpCallback`: checkpoints of a Hugging Face `Trainer`. Requires `ray-dcp[transformers]`.

It replaces the Trainer's own checkpoints: pass `TrainingArguments(save_strategy="no")`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from transformers import TrainerCallback, TrainerState

from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.manager.collective_actions import RestoreReport
from ray_dcp.manager.manager import CheckpointManager

logger = logging.getLogger(__name__)

TRAINER = ("global_step", "epoch", "total_flos", "num_input_tokens_seen")
"""Fields of the Trainer's own state that are saved."""


class RayDcpCallback(TrainerCallback):
    """Saves due steps through a manager, and resumes from the newest step that can be loaded.

    It saves model, optimizer, scheduler and the Trainer's counters in the background. The metrics
    of the last evaluation are stored with the step, so that a retention policy can rank by
    `eval_loss`. A restore brings them back.

    The callback can't make the Trainer skip data: after a restore, training continues up to
    `max_steps` with a new pass over the data.

    Args:
        manager: Decides when to save and what to keep. The caller closes it.
        resume: Restore before the first step: `"auto"`, the newest step that can be loaded, if any;
            `"latest"`, the newest step, or raise; `"never"`, do not restore.

    Raises:
        InvalidRequestError: `manager` is not a `CheckpointManager`, or `resume` is invalid.
    """

    def __init__(
        self, manager: CheckpointManager, *, resume: Literal["auto", "latest", "never"] = "auto"
    ) -> None:
        if not isinstance(manager, CheckpointManager):
            raise InvalidRequestError(
                f"expected a ray_dcp.CheckpointManager, found {manager!r}", key="manager"
            )
        if resume not in ("auto", "latest", "never"):
            raise InvalidRequestError(
                f"resume must be 'auto', 'latest' or 'never', but is {resume!r}", key="resume"
            )
        self._manager = manager
        self._resume = resume
        self._metrics: dict[str, float] = {}
        self.restored: RestoreReport | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restores a step, as configured by `resume`."""
        if self._resume == "never":
            return
        found = _state_of(state, kwargs)
        try:
            self.restored = self._manager.restore(self._resume, found)
        except CheckpointNotFoundError:
            if self._resume == "latest":
                raise
            return
        kwargs["model"].load_state_dict(found["model"])
        if kwargs.get("lr_scheduler") is not None:
            kwargs["lr_scheduler"].load_state_dict(found["scheduler"])
        for name in TRAINER:
            if name in found["trainer"]:
                setattr(state, name, found["trainer"][name])
        # Why: a step may be due before the next evaluation, and `BestN` requires its metric. If
        # the Trainer does not evaluate, another process does, and its metrics are of that step.
        if args.eval_strategy != "no" and state.is_world_process_zero:
            self._metrics = dict(self._manager.step_info(self.restored.step).metrics)
        logger.info("Goes on at step %d of %s", self.restored.step, self._manager.path)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Saves the step if it is due."""
        step = state.global_step
        if self._manager.should_save(step):
            self._manager.save_async(
                step, _state_of(state, kwargs), force=True, metrics=self._metrics
            )

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        """Stores the metrics for the next save."""
        told = kwargs.get("metrics") or {}
        self._metrics = {name: float(v) for name, v in told.items() if isinstance(v, (int, float))}

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Waits for the saves in progress.

        Raises:
            CheckpointError: A save failed.
        """
        self._manager.join()


def _state_of(state: TrainerState, told: dict[str, Any]) -> dict[str, Any]:
    scheduler = told.get("lr_scheduler")
    return {
        "model": told["model"].state_dict(),
        "optimizer": _unwrapped(told["optimizer"]),
        "scheduler": {} if scheduler is None else scheduler.state_dict(),
        "trainer": {n: getattr(state, n) for n in TRAINER if getattr(state, n, None) is not None},
    }


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside of Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
