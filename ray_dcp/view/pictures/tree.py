"""The tensors of a checkpoint as a tree that opens and closes, with bars for their sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ray_dcp.view.pictures.drawing import Picture, aside, div, heading, rank_colour, safe
from ray_dcp.view.tensor_handle import TensorInfo
from ray_dcp.view.wording import count_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView

MOST_NODES = 500
"""Lines of a picture, whatever the checkpoint holds."""
MOST_CHILDREN = 40
BAR = 130
"""Width of the bar of everything, in pixels."""


class Leaf(NamedTuple):
    """One tensor or object."""

    name: str
    """FQN."""
    info: TensorInfo | None
    """None for an object: what it takes is not known."""
    path: tuple[str | int, ...] | None = None
    """Where it sits in the nested state dict; its name is cut at dots if that is not known."""
    value: str = ""
    """Of an object, in words, where that is known."""


@dataclass
class Node:
    """All that lies below one name."""

    name: str
    num_bytes: int = 0
    num_tensors: int = 0
    num_objects: int = 0
    children: dict[str, Node] = field(default_factory=dict)
    leaf: Leaf | None = None

    @property
    def told(self) -> str:
        """Its shape and dtype, or the numbers of tensors and objects below it."""
        if self.leaf is None or self.children:
            counts = ((self.num_tensors, "tensor"), (self.num_objects, "object"))
            return " and ".join(count_text(n, noun) for n, noun in counts if n)
        info = self.leaf.info
        if info is None:
            return self.leaf.value or "object"
        parts = f" in {info.num_chunks} parts" if info.num_chunks > 1 else ""
        return f"{shape_text(info.shape)} {info.dtype}{parts}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as tables have it.

    Examples:
        >>> shape_text((64, 8)), shape_text(())
        ('64x8', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def leaves_of(view: CheckpointView, names: Iterable[str] | None = None) -> list[Leaf]:
    """Returns the tensors and objects of a checkpoint.

    Args:
        view: Of the checkpoint.
        names: Which; all by default.
    """
    paths = dict(zip(view.names, view.checkpoint.table.paths, strict=True))
    chosen = view.names if names is None else names
    return [Leaf(n, view.tensors.get(n), paths[n], view.small_values.get(n, "")) for n in chosen]


def grown(leaves: Iterable[Leaf], *, merged: bool = True) -> Node:
    """Returns the tree of some tensors and objects.

    Args:
        leaves: In any order.
        merged: A name without branches is one node.

    Complexity:
        O(leaves x depth).

    Examples:
        >>> info = TensorInfo((2,), "float32", 8, 1, None)
        >>> root = grown([Leaf("a.b.w", info), Leaf("a.b.v", None)])
        >>> root.num_bytes, list(root.children), list(root.children["a.b"].children)
        (8, ['a.b'], ['w', 'v'])
    """
    root = Node("")
    for leaf in leaves:
        node = root
        # Why dots as well: most paths are one flat mapping of names with dots.
        parts = [part for key in leaf.path or (leaf.name,) for part in str(key).split(".")]
        for part in (None, *parts):
            if part is not None:
                node = node.children.setdefault(part, Node(part))
            node.num_bytes += 0 if leaf.info is None else leaf.info.num_bytes
            node.num_objects += leaf.info is None
            node.num_tensors += leaf.info is not None
        node.leaf = leaf
    if merged:
        children = [_merged(child) for child in root.children.values()]
        root.children = {child.name: child for child in children}
    return root


def tensor_tree(leaves: Iterable[Leaf], title: str = "") -> Picture:
    """Returns a tree of names, each with what lies below it; only the largest where there are many.

    Args:
        leaves: All tensors and objects of a checkpoint.
        title: Above the picture.
    """
    root = grown(leaves)
    lines = _children(root, root.num_bytes, 0, [MOST_NODES])
    told = f"{root.told or 'nothing'}, {size_text(root.num_bytes)}"
    return Picture(div(heading(title, told), *lines))


def _children(node: Node, total: int, level: int, budget: list[int]) -> list[str]:
    most = min(MOST_CHILDREN, max(budget[0], 1))
    shown = sorted(node.children.values(), key=lambda child: -child.num_bytes)[:most]
    shown.sort(key=lambda child: _natural(child.name))
    budget[0] -= len(shown)
    lines = [_line(child, total, level, budget) for child in shown]
    hidden = len(node.children) - len(shown)
    rest = size_text(node.num_bytes - sum(child.num_bytes for child in shown))
    return [*lines, aside(f"… and {hidden} more, {rest}" if hidden else "")]


def _line(node: Node, total: int, level: int, budget: list[int]) -> str:
    width = max(round(BAR * node.num_bytes / total), 1) if total and node.num_bytes else 0
    look = f"height:9px;border-radius:2px;background:{rank_colour(0)};width:{width}px"
    # Why not 0 B: what objects take is not known before they are read.
    length = size_text(node.num_bytes) if node.num_bytes or node.num_tensors else ""
    room, weight = ("calc(100% - 1.3em)", 600) if node.children else ("100%", 400)
    row = (
        f"<span style='display:inline-flex;gap:10px;align-items:center;width:{room};"
        f"vertical-align:middle'><code style='flex:1;min-width:6em;overflow-wrap:anywhere;"
        f"font-weight:{weight};background:none'>{safe(node.name)}</code>"
        f"<span style='flex:none;opacity:.75;text-align:right'>{safe(node.told)}</span>"
        f"<span style='flex:none;width:76px;text-align:right'>{length}</span>"
        f"<span style='flex:none;display:inline-block;width:{BAR}px'>"
        f"<span style='display:block;{look}'></span></span></span>"
    )
    if not node.children or budget[0] <= 0:
        return f"<div style='padding-left:1.3em'>{row}</div>"
    inner = "".join(_children(node, total, level + 1, budget))
    opened = "" if level else " open=''"
    return (
        f"<details{opened}><summary style='cursor:pointer'>{row}</summary>"
        f"<div style='margin-left:1.1em;border-left:1px solid rgba(128,128,128,.35);"
        f"padding-left:.2em'>{inner}</div></details>"
    )


def _merged(node: Node) -> Node:
    """Returns a node without links in between that have one child and nothing of their own."""
    while len(node.children) == 1 and node.leaf is None:
        (only,) = node.children.values()
        node = replace(only, name=f"{node.name}.{only.name}")
    children = [_merged(child) for child in node.children.values()]
    node.children = {child.name: child for child in children}
    return node


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts layer 9 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() and len(p) < 18 else (1, 0, p) for p in parts if p]
