"""The plug-in of verl, which puts `RayDcpCheckpointManager` in the place of verl's own manager.

verl imports it, in the driver and in each worker:

    VERL_USE_EXTERNAL_MODULES=ray_dcp.integrations.verl

A trainer with one driver then saves each step by one commit (`integrations.verl_trainer`). Tried
with verl 0.9.1. Importing this module imports nothing of verl: verl's classes are replaced when
verl imports their modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ray_dcp.integrations.verl_manager import RayDcpCheckpointManager, export_pretrained

__all__ = ["RayDcpCheckpointManager", "export_pretrained"]


def _replace_manager(module: ModuleType) -> None:
    """Puts the class in the place of verl's, also where a module has imported that one already."""
    own: Any = vars(module)["FSDPCheckpointManager"]
    if own is RayDcpCheckpointManager:
        return
    RayDcpCheckpointManager.verls = own
    class_name: str = own.__name__
    for name, one in [*sys.modules.items()]:
        if name.startswith("verl.") and getattr(one, class_name, None) is own:
            setattr(one, class_name, RayDcpCheckpointManager)


def _replace_steps(module: ModuleType) -> None:
    """Gives a trainer with one driver the methods of `integrations.verl_trainer`."""
    from ray_dcp.integrations import verl_trainer

    # Why: the older trainer iterates over what is left of an epoch, which may be nothing.
    for name, skips in (("RayPPOTrainer", True), ("PPOTrainer", False)):
        if name in vars(module):
            verl_trainer.put_in_place(vars(module)[name], skips_whole_epochs=skips)


_REPLACED: Mapping[str, Callable[[ModuleType], None]] = {
    "verl.utils.checkpoint.fsdp_checkpoint_manager": _replace_manager,
    "verl.trainer.ppo.ray_trainer": _replace_steps,
    "verl.trainer.ppo.v1.trainer_base": _replace_steps,
}
"""What is done with modules of verl once they are imported."""


class _Finder(MetaPathFinder):
    """Finds modules of verl as ever, with what `_REPLACED` says to be done after their import.

    Why not at once: verl imports its plug-ins while it is imported itself.
    """

    def __init__(self) -> None:
        self._going: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REPLACED or fullname in self._going:
            return None
        self._going.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._going.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Replacing(spec.loader)
        return spec


class _Replacing(Loader):
    """Loads one module as its own loader does, and then replaces what `_REPLACED` says."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _REPLACED[module.__name__](module)


def _put_in_place() -> None:
    sys.meta_path.insert(0, _Finder())
    for name, replaced in _REPLACED.items():
        if name in sys.modules:
            replaced(sys.modules[name])


_put_in_place()
