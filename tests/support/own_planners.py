"""Planners and storages of a user's: of other types than DCP's, so that their own are called."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)


class OwnSave(DefaultSavePlanner):
    """Finds objects by a hook of its own."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)


class OwnLoad(DefaultLoadPlanner):
    """Leaves all hooks to DCP's."""


class OwnLookup(DefaultLoadPlanner):
    """Finds tensors by a hook of its own, so that each is asked for when its bytes are there."""

    def lookup_tensor(self, index: Any) -> Any:
        return super().lookup_tensor(index)


class OwnResolve(DefaultLoadPlanner):
    """Resolves tensors itself, so that each is resolved when its bytes are there."""

    def resolve_tensor(self, read_item: Any) -> Any:
        return super().resolve_tensor(read_item)


class OwnWriter(FileSystemWriter):
    """A storage that is not torch's own."""


class OwnReader(FileSystemReader):
    """A storage that is not torch's own."""
