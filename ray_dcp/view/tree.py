"""The names of a checkpoint as a tree: by their paths in the state dict, else by their dots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_dcp.view.wording import size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView

__all__ = ["Node", "tree_lines", "tree_of"]


@dataclass
class Node:
    """A branch of the tree, or a tensor or object."""

    label: str
    name: str | None = None
    """FQN of what sits here; None for a branch."""
    num_bytes: int = 0
    """Of all tensors at and below it."""
    num_tensors: int = 0
    num_objects: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def tree_of(view: CheckpointView, names: Sequence[str] | None = None) -> Node:
    """Returns the root of the tree of a checkpoint.

    Args:
        view: The checkpoint.
        names: Which names; all by default.
    """
    root = Node(view.url)
    paths = dict(zip(view.checkpoint.table.names, view.checkpoint.table.paths, strict=True))
    for name in view.names if names is None else names:
        path = paths[name]
        parts = name.split(".") if path is None else [str(part) for part in path] or [name]
        info = view.tensors.get(name)
        # Why dots as well: most paths are one flat mapping of names with dots.
        steps = [step for part in parts for step in part.split(".")]
        node = root
        for part in [None, *steps]:
            if part is not None:
                node = node.children.setdefault(part, Node(part))
            node.num_bytes += 0 if info is None else info.num_bytes
            node.num_tensors += info is not None
            node.num_objects += info is None
        node.name = name
    return root


def tree_lines(
    view: CheckpointView, names: Sequence[str] | None = None, depth: int | None = None
) -> Iterator[str]:
    """Yields the tree of a checkpoint as lines of text.

    Args:
        view: The checkpoint.
        names: Which names; all by default.
        depth: Levels; all by default.
    """
    yield from _lines(view, tree_of(view, names), "", depth)


def _lines(view: CheckpointView, node: Node, indent: str, depth: int | None) -> Iterator[str]:
    if depth is not None and depth <= 0:
        return
    for number, child in enumerate(node.children.values()):
        last = number == len(node.children) - 1
        yield f"{indent}{'└── ' if last else '├── '}{_told(view, child)}"
        deeper = None if depth is None else depth - 1
        yield from _lines(view, child, f"{indent}{'    ' if last else '│   '}", deeper)


def _told(view: CheckpointView, node: Node) -> str:
    if node.name is None or node.children:
        counts = f"{node.num_tensors} tensors" + (
            f", {node.num_objects} objects" if node.num_objects else ""
        )
        return f"{node.label}: {counts}, {size_text(node.num_bytes)}"
    info = view.tensors.get(node.name)
    if info is None:
        return f"{node.label}: object"
    return f"{node.label}: {info.dtype}{list(info.shape)} {size_text(info.num_bytes)}"
