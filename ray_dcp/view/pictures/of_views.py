"""From views to pictures: takes from a checkpoint what a picture needs. Reads no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.view.pictures.drawing import Picture
from ray_dcp.view.pictures.layout import Boxes, even_boxes, reshard, shard_layout, stored_boxes
from ray_dcp.view.pictures.timeline import timeline
from ray_dcp.view.pictures.tree import Leaf, tensor_tree
from ray_dcp.view.resharding import Layout, parse_layout

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView


def picture_tree(view: CheckpointView, *, open_levels: int = 1) -> Picture:
    """Returns the tensors and objects of a checkpoint as a tree with bars for their sizes.

    Args:
        view: Of the checkpoint.
        open_levels: How many levels are open at first.

    Example:
        >>> import ray_dcp, torch
        >>> _ = ray_dcp.save({"a": {"w": torch.ones(2)}}, checkpoint_id="memory://doc/tree")
        >>> "1 tensors and objects, 8 B" in picture_tree(ray_dcp.open("memory://doc/tree")).html
        True
    """
    return tensor_tree(leaves_of(view), view.url, open_levels=open_levels)


def picture_layout(view: CheckpointView, name: str) -> Picture:
    """Returns which rank wrote which part of a tensor.

    Args:
        view: Of the checkpoint.
        name: FQN of a tensor.

    Raises:
        MissingKeyError: There is no such name; the message tells similar ones.
        InvalidRequestError: It is an object.
    """
    boxes, dtype = boxes_of(view, name)
    return shard_layout(boxes, name, itemsize=ITEMSIZE.get(dtype, 0), dtype=dtype)


def picture_reshard(
    view: CheckpointView, name: str, layout: str | int | Layout | Sequence[int] | Boxes
) -> Picture:
    """Returns a tensor as it is stored, and as the ranks of a load want it.

    Args:
        view: Of the checkpoint.
        name: FQN of a tensor.
        layout: Of the load: `6` for rows over 6 ranks, `4x2` and others as for
            `CheckpointView.reshard`; into how many parts each dimension is cut; or the parts.

    Raises:
        MissingKeyError: There is no such name; the message tells similar ones.
        InvalidRequestError: It is an object, or the layout does not fit it.
    """
    boxes, dtype = boxes_of(view, name)
    if isinstance(layout, Boxes):
        after = layout
    elif isinstance(layout, str | int | Layout):
        parsed = parse_layout(layout)
        after = even_boxes(boxes.shape, (parsed.rows, parsed.columns)[: len(boxes.shape)])
    else:
        after = even_boxes(boxes.shape, layout)
    return reshard(boxes, after, name, itemsize=ITEMSIZE.get(dtype, 1))


def picture_timeline(view: CheckpointView) -> Picture:
    """Returns the course of the save that made a checkpoint.

    Args:
        view: Of the checkpoint.

    Raises:
        CheckpointNotFoundError: The save left no trace.
        DamagedCheckpointError: The trace can't be read.
    """
    trace = view.trace
    if trace is None:
        raise CheckpointNotFoundError(
            "expected the trace of a save beside the checkpoint, but there is none: it was not "
            "saved by ray_dcp, or the trace could not be written or was deleted",
            checkpoint_id=view.url,
        )
    return timeline(trace, view.url)


def boxes_of(view: CheckpointView, name: str) -> tuple[Boxes, str]:
    """Returns the parts in which a tensor is stored, and its dtype.

    Args:
        view: Of the checkpoint.
        name: FQN.

    Raises:
        MissingKeyError: There is no such name; the message tells similar ones.
        InvalidRequestError: It is an object.
    """
    info = view.tensors.get(name)
    if info is None:
        view[name]  # raises for a name that is not there
        raise InvalidRequestError(
            f"expected the name of a tensor, but {name!r} is an object", key="name"
        )
    return stored_boxes(view.table, view.table.names.index(name)), info.dtype


def leaves_of(view: CheckpointView, names: Iterable[str] | None = None) -> list[Leaf]:
    """Returns the tensors and objects of a checkpoint; what objects take is not known.

    Args:
        view: Of the checkpoint.
        names: Which; all by default.
    """
    paths = dict(zip(view.names, view.checkpoint.table.paths, strict=True))
    return [
        Leaf(name, None, "", 0, path=paths[name])
        if (info := view.tensors.get(name)) is None
        else Leaf(name, info.shape, info.dtype, info.num_bytes, info.num_chunks, info.path)
        for name in (view.names if names is None else names)
    ]
