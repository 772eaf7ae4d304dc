"""How a mirror module gets what it does not define: from torch's module of the same name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["names_of", "rest_of"]


def names_of(stock: ModuleType) -> list[str]:
    """Returns what `from module import *` gives of torch's module.

    Args:
        stock: Of torch, whatever its version.
    """
    names = getattr(stock, "__all__", None)
    return list(names) if names is not None else [n for n in vars(stock) if n[0] != "_"]


def rest_of(stock: ModuleType, name: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a mirror module.

    Args:
        stock: Torch's module, which has whatever the mirror does not define: private names that
            scripts import all the same, and names of other versions of torch.
        name: Of the mirror, for messages.
    """

    def rest(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        try:
            return getattr(stock, attribute)
        except AttributeError:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None

    return rest
