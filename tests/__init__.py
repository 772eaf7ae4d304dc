"""Tests of ray_dcp. Old names of modules of `tests.support` lead there, until nobody uses them."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "tests.inline_ranks": ("world",), "tests.rank_saves": ("world",),
    "tests.warm_ranks": ("world",),
    "tests.crash.ranks": ("world",), "tests.crash.array_states": ("arrays",),
    "tests.thread_ranks": ("threads",), "tests.thread_peers": ("threads",),
    "tests.fault_injection": ("storages",), "tests.gated_storage": ("storages",),
    "tests.counting_storage": ("storages",), "tests.scripted_storage": ("storages",),
    "tests.crash.unconditional_storage": ("storages",),
    "tests.protocol_play": ("protocol",), "tests.staged_world": ("protocol",),
    "tests.polling": ("processes",), "tests.leftovers": ("processes",),
    "tests.descriptors": ("processes",), "tests.races": ("storages",),
    "tests.interleaving": ("turns",),
    "tests.gathered_ranks": ("world", "Gathered=World"),
    "tests.numpy_ranks": (
        "world", "arrays", "NumpyCapture=ArrayCapture", "NumpyWork=ArrayWork",
    ),
}  # fmt: skip


class Old(MetaPathFinder, Loader):
    """Imports what has moved from where it is now."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        words = MOVED[spec.name]
        modules = [import_module(f"tests.support.{word}") for word in words if "=" not in word]
        if len(words) == 1:
            return modules[0]
        made = ModuleType(spec.name)
        for module in modules:
            vars(made).update({k: v for k, v in vars(module).items() if not k.startswith("__")})
        for word in words[len(modules) :]:
            old, new = word.split("=")
            setattr(made, old, vars(made)[new])
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Old())
