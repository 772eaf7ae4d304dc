"""Drop-in replacement for `torch_xla.experimental.distributed_checkpoint`.

`from torch_xla.experimental.distributed_checkpoint import X` becomes `from ray_dcp.xla import X`.
This module does not import torch_xla; only code that uses XLA tensors does.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ray_dcp.core import bounds
from ray_dcp.events import contained
from ray_dcp.manager import manager
from ray_dcp.manager.settings import Item
from ray_dcp.torch_adapter.priming import prime_optimizer
from ray_dcp.torch_adapter.spmd import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
    is_sync_point,
    xla_modules,
)

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]


class CheckpointManager(manager.CheckpointManager):
    """A `ray_dcp.CheckpointManager` for state dicts of XLA tensors under SPMD, like torch_xla's.

    Saves and loads use the SPMD planners. Steps may be saved in any order, and again: a step is
    then replaced atomically. As in torch_xla, the oldest step is the one that was saved first,
    whatever its number, also over processes. `save` returns when what it made superfluous is
    deleted. Steps that torch_xla's manager wrote are read (`also_read=("{step}",)`), count as older
    than all others, and are never deleted.

    Args:
        path: As for `ray_dcp.CheckpointManager`, like the other arguments.
        save_interval: Number of steps between saves.
        max_to_keep: Number of steps to keep, those that were saved last; 0 keeps all.
        max_pending_async: Maximum number of asynchronous saves in progress.
        num_of_threads: Number of threads with which a rank writes.
        process_group: The ranks.
        chkpt_on_preemption: Whether a preemption makes a step due: SIGTERM, on every device, or a
            sync point of torch_xla, if the program has activated its preemption sync manager.
        **more: Further arguments of `ray_dcp.CheckpointManager`.

    Raises:
        InvalidRequestError: An argument is invalid.

    Examples:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with CheckpointManager(root, 10) as manager:
        ...         manager.save(10, {"w": torch.ones(2)}), manager.all_steps()
        (True, [10])
    """

    # Source: `torch_xla/experimental/distributed_checkpoint/manager.py`.

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int | None = None,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        **more: Any,
    ) -> None:
        if more.get("items") is None:
            more.setdefault(
                "item", Item(save_planner=SPMDSavePlanner, load_planner=SPMDLoadPlanner)
            )
        more.setdefault("order", "any")
        more.setdefault("also_read", ("{step}",))
        super().__init__(
            path,
            save_interval,
            max_to_keep,
            max_pending_async,
            num_of_threads,
            process_group,
            chkpt_on_preemption,
            **more,
        )

    def save(self, step: int, state_dict: Any, force: bool = False, **more: Any) -> bool:
        """Waits for the devices, then saves; see `save` of the base class.

        It also waits for the deletion of the steps that are not kept any more.
        """
        self._ask_torch_xla(step)
        _sync()
        is_saved = super().save(step, state_dict, force, **more)
        if is_saved and self._settings.kept is not None:
            self._wait_for_deletions(step)
        return is_saved

    def save_async(self, step: int, state_dict: Any, force: bool = False, **more: Any) -> bool:
        """Waits for the devices, then saves; see `save_async` of the base class."""
        self._ask_torch_xla(step)
        _sync()
        return super().save_async(step, state_dict, force, **more)

    def should_save(self, step: int) -> bool:
        """Returns whether a step is due; see `should_save` of the base class."""
        self._ask_torch_xla(step)
        return super().should_save(step)

    def reached_preemption(self, step: int) -> bool:
        """Returns whether a rank is preempted; see `reached_preemption` of the base class."""
        self._ask_torch_xla(step)
        return super().reached_preemption(step)

    def _ask_torch_xla(self, step: int) -> None:
        if self._listens and is_sync_point(step):
            self.notice_preemption()

    def _wait_for_deletions(self, step: int) -> None:
        # Why all ranks: the next `all_steps` of each has to list the same.
        with contained(f"Waiting for deletions after step {step}"):
            self._actions.agree(
                f"the deletions after step {step}",
                lambda _: self._writer.remover.drain(bounds.DRAIN_S),
                timeout_s=2 * bounds.DRAIN_S,
            )


def _sync() -> None:
    modules = xla_modules()
    if modules is not None:
        modules.root.sync()
        modules.model.wait_device_ops()
