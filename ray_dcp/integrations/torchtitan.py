"""`RayDcpCheckpointManager`: torchtitan's checkpoint manager interface on `CheckpointManager`.

Requires `ray-dcp[torchtitan]` (0.3 or newer). Steps have the same keys as torchtitan's own DCP
checkpoints, so that a run that torchtitan started can be resumed.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)

from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.loading import load
from ray_dcp.manager.manager import CheckpointManager
from ray_dcp.manager.settings import Item
from ray_dcp.options import LoadOptions, SaveOptions

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class RayDcpCheckpointManager(BaseCheckpointManager):
    """Checkpoints of torchtitan's trainer: `config.checkpoint = RayDcpCheckpointManager.Config()`.

    It loads the newest step that can be loaded, saves steps atomically, and deletes old steps only
    after a newer one is committed, so that `keep_latest_k` never deletes the last valid step.

    Args:
        config: Options of torchtitan's base class, `async_mode` and `unchanged`.
        dataloader: Data loader of the trainer.
        model_parts: Modules of the trainer.
        optimizers: Optimizers of the trainer; a `Stateful`.
        lr_schedulers: Learning rate schedulers of the trainer; a `Stateful`.
        states: Further states, such as the trainer's own.
        sd_adapter: Ignored. For Hugging Face formats, use torchtitan's own manager.
        base_folder: Parent folder of `config.folder`.

    Raises:
        InvalidRequestError: The config requests a Hugging Face format.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Policies of torchtitan's base class, and the save mode."""

        async_mode: Literal["disabled", "async"] = "async"
        """`"async"`: training continues while a step is written."""
        unchanged: Literal["write", "link"] = "write"
        """See `SaveOptions.unchanged`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        if not self.enable:
            return
        if config.initial_load_in_hf or config.last_save_in_hf:
            raise InvalidRequestError(
                "initial_load_in_hf and last_save_in_hf are not served; use torchtitan's own "
                "CheckpointManager for them, or convert the checkpoint",
                key="last_save_in_hf",
            )
        self._config = config
        self._states = states
        self._states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        folder = f"{base_folder.rstrip('/')}/{config.folder}" if base_folder else config.folder
        self._manager = CheckpointManager(
            folder,
            config.interval,
            config.keep_latest_k,
            chkpt_on_preemption=False,
            also_read=("step-{step}",),
            item=Item(save_options=SaveOptions(unchanged=config.unchanged)),
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only or not self._is_due(curr_step, last_step):
            return False
        if last_step and self._config.last_save_model_only:
            state = {name: self._exported(v) for name, v in self._model().state_dict().items()}
        else:
            state = self._whole_state()
        if self._config.async_mode == "async" and not last_step:
            self._manager.save_async(curr_step, state, force=True)
        else:
            self._manager.join()
            self._manager.save(curr_step, state, force=True)
        return True

    def _load(self, step: int = -1) -> bool:
        state = self._whole_state(loading=True)
        if step == -1 and not self._manager.all_steps():
            return self._load_initial(state)
        try:
            self._manager.restore("auto" if step == -1 else step, state)
        except CheckpointNotFoundError:
            if step != -1:
                raise
            return False
        self._model().load_state_dict(state)
        return True

    def _load_initial(self, state: dict[str, Any]) -> bool:
        path = self._config.initial_load_path
        if path is None:
            return False
        if self._config.initial_load_model_only:
            state = dict(self._model().state_dict())
        load(state, checkpoint_id=path, options=LoadOptions())
        self._model().load_state_dict(state)
        return True

    def _wait_for_saving(self) -> None:
        self._manager.join()

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: the bytes are copied before a save returns."""

    def _close(self) -> None:
        self._manager.close()

    def _is_due(self, step: int, last_step: bool) -> bool:
        if last_step or (step == 1 and self._config.enable_first_step_checkpoint):
            return True
        return self._manager.should_save(step)

    def _model(self) -> Any:
        return self._states[MODEL]

    def _whole_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Returns the state as torchtitan saves it, with the model's keys at the top level."""
        left_out = self._config.exclude_from_loading if loading else ()
        others = {
            name: state
            for name, state in self._states.items()
            if name != MODEL and state is not None and name not in left_out
        }
        return {**self._model().state_dict(), **others}

    def _exported(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.to(_DTYPES[self._config.export_dtype])
