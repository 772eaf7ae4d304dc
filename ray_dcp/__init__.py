"""Ray-native distributed checkpointing for PyTorch, compatible with torch.distributed.checkpoint.

`import ray_dcp as dcp` replaces `import torch.distributed.checkpoint as dcp`. Public names are
imported on first use: importing this package imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import get_data
from types import ModuleType
from typing import Any

from ray_dcp import errors
from ray_dcp.core import __version__ as __version__

_TORCH = "torch.distributed.checkpoint"

# Public names by the module that defines them, as the stub for type checkers lists them.
_HOMES = dict.fromkeys(errors.__all__, "ray_dcp.errors") | {
    name: home
    for home, names in re.findall(
        r"^from (\S+) import ((?:\([^)]*\)|.*))",
        (get_data(__name__, "__init__.pyi") or b"").decode(),
        re.M,
    )
    for name in re.findall(r"(\w+) as \1", names)
    if name != "__version__"
}

__all__ = sorted(_HOMES)


# DCP's submodules, importable as `ray_dcp.X` too, so that only the first line of a script changes.
# Type checkers and editors, which don't run the finder below, read `X.py`:
# from a stub without a source they would warn.
_MODULES = frozenset(
    (
        "_consolidate_hf_safetensors", "_extension", "_fsspec_filesystem", "api",
        "default_planner", "filesystem", "format_utils", "fsspec_filesystem", "hf_storage",
        "logger", "logging_handlers", "metadata", "optimizer", "planner", "planner_helpers",
        "protocol", "quantized_hf_storage", "resharding", "staging", "state_dict",
        "state_dict_loader", "state_dict_saver", "stateful", "storage", "utils",
    )
)  # fmt: skip


# The submodules that have entry points: ray_dcp defines these itself.
_OWN_SUBMODULES = frozenset(("state_dict_loader", "state_dict_saver"))

# Replacements for submodules that some versions of torch lack.
_STAND_INS = {
    "_fsspec_filesystem": f"{_TORCH}.fsspec_filesystem",  # deprecated since torch 2.15
    "fsspec_filesystem": f"{_TORCH}._fsspec_filesystem",  # before torch 2.15
    "protocol": f"{__name__}.dcp._protocol",  # before torch 2.14
}


def _module_of(name: str) -> str:
    """Returns the full name of the module that is imported as `ray_dcp.NAME`."""
    if name in _OWN_SUBMODULES:
        return f"{__name__}.dcp.{name}"
    home = f"{_TORCH}.{name}"
    return home if name not in _STAND_INS or find_spec(home) else _STAND_INS[name]


class _Alias(MetaPathFinder, Loader):
    """Imports `ray_dcp.X` and `ray_dcp.dcp.X` as one module: torch's, or that of `ray_dcp.dcp`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        names = {__name__: _MODULES, f"{__name__}.dcp": _MODULES - _OWN_SUBMODULES}
        is_alias = name in names.get(package, ())
        return ModuleSpec(fullname, self, origin=fullname) if is_alias else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_module_of(spec.name.rpartition(".")[2]))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Why: the import system has just set `__spec__` of torch's module to that of the alias.
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """Returns torch's code, for `python -m ray_dcp.format_utils`."""
        home = _module_of(fullname.rpartition(".")[2])
        loader: Any = importlib.import_module(home).__loader__
        return loader.get_code(home)


if not any(type(finder).__qualname__ == "_Alias" for finder in sys.meta_path):
    sys.meta_path.insert(0, _Alias())


# Public submodules of ray_dcp, imported on first use.
_OWN_MODULES = frozenset(("train", "xla"))


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _OWN_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_dcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(
        {*globals(), *_HOMES, *_OWN_MODULES, *(name for name in _MODULES if name[0] != "_")}
    )
