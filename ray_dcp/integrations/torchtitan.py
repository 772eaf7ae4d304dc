"""`RayDcpCheckpointManager`: torchtitan's checkpoint manager interface on `CheckpointManager`.

Requires `ray-dcp[torchtitan]` (0.3 or newer). Steps have the same keys as torchtitan's own DCP
checkpoints, so that a run that torchtitan started can be resumed.

With the trainer's state dict adapter, a run can begin with the weights of a Hugging Face model
(`initial_load_in_hf`) and end with one (`last_save_in_hf`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
from ray_dcp.manager.agreement import agree
from ray_dcp.manager.manager import CheckpointManager
from ray_dcp.manager.settings import Item
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.rank.rank_save import result_or_error
from ray_dcp.saving import save, session_for
from ray_dcp.transform.conversion import HubFiles

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class RayDcpCheckpointManager(BaseCheckpointManager):
    """Checkpoints of torchtitan's trainer: `config.checkpoint = RayDcpCheckpointManager.Config()`.

    It loads the newest step that can be loaded, saves steps atomically, and deletes old steps only
    after a newer one is committed, so that `keep_latest_k` never deletes the last valid step.

    Args:
        config: Options of torchtitan's base class, `async_mode`, `unchanged`, `trust` and `hold_s`.
        dataloader: Data loader of the trainer.
        model_parts: Modules of the trainer.
        optimizers: Optimizers of the trainer; a `Stateful`.
        lr_schedulers: Learning rate schedulers of the trainer; a `Stateful`.
        states: Further states, such as the trainer's own.
        sd_adapter: torchtitan's `BaseStateDictAdapter` of the model, which renames and rearranges
            tensors for Hugging Face formats.
        base_folder: Parent folder of `config.folder`.

    Raises:
        InvalidRequestError: The config requests a Hugging Face format, and there is no adapter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Policies of torchtitan's base class, and the save mode."""

        async_mode: Literal["disabled", "async"] = "async"
        """`"async"`: training continues while a step is written."""
        unchanged: Literal["write", "link"] = "write"
        """See `SaveOptions.unchanged`."""
        trust: str | None = None
        """Name of the metric or tag by which a step is trusted: the newest such step is kept, and
        is the one that is loaded. Newer steps stay, and are replaced as training goes on."""
        hold_s: float | None = None
        """How long a step without a verdict by `trust` is kept, in seconds."""

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
        for name in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(config, name) and sd_adapter is None:
                raise InvalidRequestError(
                    f"{name} needs an sd_adapter, which maps the model's state dict to that of "
                    "Hugging Face, but sd_adapter is None: give the model spec of the trainer a "
                    "state_dict_adapter",
                    key=name,
                )
        self._config = config
        self._adapter = sd_adapter
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
        self._folder = folder
        self._manager = CheckpointManager(
            folder,
            config.interval,
            config.keep_latest_k,
            chkpt_on_preemption=False,
            also_read=("step-{step}",),
            item=Item(save_options=SaveOptions(unchanged=config.unchanged)),
            # Why: after a trusted step, those that come next have numbers that exist already.
            order="any" if config.trust else "increasing",
            trust=config.trust,
            hold_s=config.hold_s,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only or not self._is_due(curr_step, last_step):
            return False
        if last_step and self._config.last_save_in_hf:
            self._manager.join()
            self._save_in_hf(curr_step)
            return True
        if last_step and self._config.last_save_model_only:
            state = self._exported_model()
        else:
            state = self._whole_state()
        if self._config.async_mode == "async" and not last_step:
            self._manager.save_async(curr_step, state, force=True)
        else:
            self._manager.join()
            self._manager.save(curr_step, state, force=True)
        return True

    @torch.no_grad()
    def _save_in_hf(self, step: int) -> None:
        """Saves the model as a Hugging Face model, in the folder that torchtitan gives the step.

        The ranks save their shards first, as a checkpoint in the folder `sharded`. Then they write
        the files of the model, each rank some of them.
        """
        folder = f"{self._folder}/step-{step}"
        sharded, numbers = f"{folder}/sharded", self._adapter.fqn_to_index_mapping
        save(self._adapter.to_hf(self._exported_model()), checkpoint_id=sharded)
        session = session_for(None, False)

        def write() -> HubFiles:
            files = HubFiles.of(sharded, folder, numbers=numbers)
            for number in range(session.rank, len(files.entries), session.world_size):
                files.write(number)
            return files

        def finish(_: Sequence[Any]) -> None:
            if files is not None:
                files.finish()
            shutil.rmtree(sharded)

        what = f"the Hugging Face model of step {step}"
        files, error = result_or_error(write, f"writing {what}", session.rank)
        options = SaveOptions()
        agree(
            session,
            f"{what} in {folder}",
            finish,
            options,
            timeout_s=options.write_timeout_s,
            error=error,
        )

    def _load(self, step: int = -1) -> bool:
        # Why agreed: a rank whose storage shows a step later than others would load alone.
        steps = agree(
            session_for(None, False),
            f"which steps are in {self._folder}",
            lambda _: self._manager.all_steps(),
            SaveOptions(),
        )
        if step == -1 and not steps:
            return self._load_initial()
        # Why: step 0 is a seed checkpoint, of which torchtitan loads the model alone.
        is_seed = max(steps, default=0) == 0 if step == -1 else step == 0
        state = dict(self._model().state_dict()) if is_seed else self._whole_state(loading=True)
        # Why not of a seed: it is there before anything is evaluated.
        trust = None if is_seed or step != -1 else self._config.trust
        try:
            self._manager.restore("auto" if step == -1 else step, state, trust=trust)
        except CheckpointNotFoundError as error:
            # Why not anew without a verdict: what was trained would be lost without a word.
            if step != -1 or error.key == "trust":
                raise
            return False
        self._model().load_state_dict(state)
        return True

    def _load_initial(self) -> bool:
        config = self._config
        if config.initial_load_in_hf:
            self._load_from_hf(config.initial_load_path or self._adapter.hf_assets_path)
            return True
        if config.initial_load_path is None:
            return False
        model_only = config.initial_load_model_only
        state = dict(self._model().state_dict()) if model_only else self._whole_state(loading=True)
        load(state, checkpoint_id=config.initial_load_path, options=LoadOptions())
        self._model().load_state_dict(state)
        return True

    @torch.no_grad()
    def _load_from_hf(self, path: str | None) -> None:
        if path is None:
            raise InvalidRequestError(
                "initial_load_in_hf needs the folder of a Hugging Face model, but neither "
                "checkpoint.initial_load_path nor the trainer's hf_assets_path is set",
                key="initial_load_path",
            )
        state = self._adapter.to_hf(self._model().state_dict())
        reader = self._adapter.get_hf_storage_reader(
            path, self._config.initial_load_in_hf_quantized
        )
        # Why "cast": models of the hub are often stored in another dtype than they are trained in.
        load(state, storage_reader=reader, options=LoadOptions(dtype="cast"))
        self._model().load_state_dict(self._adapter.from_hf(state))

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

    def _exported_model(self) -> dict[str, Any]:
        dtype = _DTYPES[self._config.export_dtype]
        return {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in self._model().state_dict().items()
        }
