"""The tensors of a checkpoint as a tree that opens and closes, with bars for their sizes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ray_dcp.view.pictures.drawing import Picture, div, safe
from ray_dcp.view.wording import size_text

MOST_NODES = 500
"""Lines of a picture, whatever the checkpoint holds."""
MOST_CHILDREN = 40
BAR = 130
"""Width of the bar of everything, in pixels."""

_FILL = "#4c8fd6"


@dataclass(frozen=True)
class Leaf:
    """One tensor or object."""

    name: str
    """FQN."""
    shape: tuple[int, ...] | None
    """None for an object."""
    dtype: str
    num_bytes: int
    num_chunks: int = 1
    path: tuple[str | int, ...] | None = None
    """Where it sits in the nested state dict; its name is cut at dots if that is not known."""


@dataclass
class Node:
    """All that lies below one name."""

    name: str
    num_bytes: int = 0
    num_leaves: int = 0
    num_tensors: int = 0
    children: dict[str, Node] = field(default_factory=dict)
    leaf: Leaf | None = None


def grown(leaves: Iterable[Leaf], *, merged: bool = True) -> Node:
    """Returns the tree of some tensors and objects.

    Args:
        leaves: In any order.
        merged: A name without branches is one node.

    Complexity:
        O(leaves x depth).

    Example:
        >>> root = grown([Leaf("a.b.w", (2,), "float32", 8), Leaf("a.b.v", (1,), "float32", 4)])
        >>> root.num_bytes, list(root.children), list(root.children["a.b"].children)
        (12, ['a.b'], ['w', 'v'])
    """
    root = Node("")
    for leaf in leaves:
        parts = _split(leaf)
        node = root
        for part in (None, *parts):
            if part is not None:
                node = node.children.setdefault(part, Node(part))
            node.num_bytes += leaf.num_bytes
            node.num_leaves += 1
            node.num_tensors += leaf.shape is not None
        node.leaf = leaf
    if merged:
        children = [_merged(child) for child in root.children.values()]
        root.children = {child.name: child for child in children}
    return root


def tensor_tree(leaves: Sequence[Leaf], title: str = "", *, open_levels: int = 1) -> Picture:
    """Returns a tree of names, each with what lies below it; the largest are told where many are.

    Args:
        leaves: All tensors and objects of a checkpoint.
        title: Above the picture.
        open_levels: How many levels are open at first.
    """
    root = grown(leaves)
    budget = [MOST_NODES]
    lines = _children(root, root.num_bytes, 0, open_levels, budget)
    head = f"<div><b>{safe(title)}</b></div>" if title else ""
    told = f"{root.num_leaves} tensors and objects, {size_text(root.num_bytes)}"
    return Picture(div(head, f"<div style='opacity:.75'>{told}</div>", *lines))


def _children(node: Node, total: int, level: int, open_levels: int, budget: list[int]) -> list[str]:
    shown = [*node.children.values()]
    most = min(MOST_CHILDREN, max(budget[0], 1))
    if len(shown) > most:
        largest = sorted(shown, key=lambda child: -child.num_bytes)[:most]
        kept = {id(child) for child in largest}
        shown = [child for child in shown if id(child) in kept]
    shown.sort(key=lambda child: _natural(child.name))
    budget[0] -= len(shown)
    lines = [_line(child, total, level, open_levels, budget) for child in shown]
    hidden = len(node.children) - len(shown)
    if hidden:
        rest = node.num_bytes - sum(child.num_bytes for child in shown)
        lines.append(
            f"<div style='margin-left:1.3em;opacity:.7'>… and {hidden} more, "
            f"{size_text(max(rest, 0))}</div>"
        )
    return lines


def _line(node: Node, total: int, level: int, open_levels: int, budget: list[int]) -> str:
    leaf = node.leaf
    width = max(round(BAR * node.num_bytes / total), 1) if total and node.num_bytes else 0
    bar = (
        f"<span style='flex:none;display:inline-block;width:{BAR}px'><span style='display:block;"
        f"height:9px;border-radius:2px;background:{_FILL};width:{width}px'></span></span>"
    )
    # Why not 0 B: what objects take is not known before they are read.
    length = size_text(node.num_bytes) if node.num_bytes or node.num_tensors else ""
    size = f"<span style='flex:none;width:76px;text-align:right'>{length}</span>"
    if leaf is None:
        told = f"{node.num_leaves} below"
    elif leaf.shape is None:
        told = "object"
    else:
        told = f"{'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}"
        told += f" in {leaf.num_chunks} parts" if leaf.num_chunks > 1 else ""
    weight = "600" if leaf is None else "400"
    room = "calc(100% - 1.3em)" if node.children else "100%"
    row = (
        f"<span style='display:inline-flex;gap:10px;align-items:center;width:{room};"
        f"vertical-align:middle'><code style='flex:1;min-width:6em;overflow-wrap:anywhere;"
        f"font-weight:{weight};background:none'>{safe(node.name)}</code>"
        f"<span style='flex:none;opacity:.75;text-align:right'>{safe(told)}</span>"
        f"{size}{bar}</span>"
    )
    if not node.children:
        return f"<div style='padding-left:1.3em'>{row}</div>"
    if budget[0] <= 0:
        return f"<div style='padding-left:1.3em'>{row}</div>"
    inner = "".join(_children(node, total, level + 1, open_levels, budget))
    opened = " open=''" if level < open_levels else ""
    return (
        f"<details{opened}><summary style='cursor:pointer'>{row}</summary>"
        f"<div style='margin-left:1.1em;border-left:1px solid rgba(128,128,128,.35);"
        f"padding-left:.2em'>{inner}</div></details>"
    )


def _merged(node: Node) -> Node:
    """Returns a node without links in between that have one child and nothing of their own."""
    while len(node.children) == 1 and node.leaf is None:
        (only,) = node.children.values()
        name = f"{node.name}.{only.name}"
        node = replace(only, name=name)
    children = [_merged(child) for child in node.children.values()]
    node.children = {child.name: child for child in children}
    return node


def _split(leaf: Leaf) -> list[str]:
    # Why dots as well: most paths are one flat mapping of names with dots.
    return [part for key in leaf.path or (leaf.name,) for part in str(key).split(".")]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts layer 9 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 18 else (1, 0, part)
        for part in parts
        if part
    ]
