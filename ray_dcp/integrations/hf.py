"""`RayDcpCallback`: checkpoints of a Hugging Face `Trainer`. Needs `ray-dcp[transformers]`.

In place of the Trainer's own: give `TrainingArguments(save_strategy="no")`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from transformers import TrainerCallback, TrainerState

from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.manager.manager import CheckpointManager
from ray_dcp.manager.restoring import RestoreReport

logger = logging.getLogger(__name__)

TRAINER = ("global_step", "epoch", "total_flos", "num_input_tokens_seen")
"""What is saved of the Trainer's own state."""


class RayDcpCallback(TrainerCallback):
    """Saves steps that are due by a manager, and begins at the newest that can be loaded.

    Model, optimizer, scheduler and the Trainer's counters are saved, in the background. The metrics
    of the last evaluation go with the step, so that a retention may rank by `eval_loss`.

    The callback can't tell the Trainer to skip data: after a restore it goes on up to `max_steps`,
    with a new pass over the data.

    Args:
        manager: Says when to save and what to keep; closed by its maker.
        resume: Restore before the first step: "auto", the newest that can be loaded; "latest",
            or an error; or not.

    Raises:
        InvalidRequestError: It is no manager.
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
        """Restores a step, if there is one."""
        if self._resume == "never" or (self._resume == "auto" and not self._manager.all_steps()):
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
        logger.info("Goes on at step %d of %s", self.restored.step, self._manager.path)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Saves the step if it is due; stops the training after a preemption was saved."""
        step = state.global_step
        if self._manager.should_save(step):
            self._manager.save_async(
                step, _state_of(state, kwargs), force=True, metrics=self._metrics
            )

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        """Takes the metrics for the next step that is saved."""
        told = kwargs.get("metrics") or {}
        self._metrics = {name: float(v) for name, v in told.items() if isinstance(v, (int, float))}

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Waits for the saves that are under way.

        Raises:
            CheckpointError: One failed.
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
    """Returns the optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
