"""Pictures of checkpoints and runs as SVG and HTML, for notebooks and web pages.

Pictures need no network, can be read on light and on dark pages, and stay small for any size of
checkpoint. Views, runs, tensors, differences, previews and traces show themselves as pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view import drawing as draw
from ray_dcp.view.charts import line_chart, tensor_tree, timeline
from ray_dcp.view.checkpoint_view import CheckpointView, picture_diff
from ray_dcp.view.drawing import WIDTH, Picture
from ray_dcp.view.resharding import ShardGrid
from ray_dcp.view.run_view import RunView, picture_steps
from ray_dcp.view.shard_map import RankBoxes, reshard_layout, shard_layout, stored_boxes
from ray_dcp.view.tensor_handle import TensorHandle, parts_of

__all__ = [
    "Picture",
    "line_chart",
    "picture_diff",
    "picture_histogram",
    "picture_layout",
    "picture_norms",
    "picture_reshard",
    "picture_steps",
    "tensor_tree",
    "timeline",
]


def picture_norms(run: RunView, include: str = "*") -> Picture:
    """Returns the norms of tensors over the steps of a run as lines. The tensors are read.

    Args:
        run: Result of `ray_dcp.open`.
        include: Shell pattern of FQNs.

    Raises:
        InvalidRequestError: No tensor matches.
        DamagedCheckpointError: Bytes that were read do not match their checksums.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for step in run:
        if step.step is None or not step.is_readable:
            continue
        for name, info in step.view.tensors.items():
            if fnmatchcase(name, include) and info.dtype in READABLE and info.num_bytes:
                norm = _l2_norm(step.view[name])
                found.setdefault(name, []).append((float(step.step), norm))
    if not found:
        raise InvalidRequestError(
            f"expected tensors with numbers whose names match {include!r} in the steps of "
            f"{run.url}, found none",
            key="include",
        )
    return line_chart(found, f"norms of {include} over the steps of {run.url}")


def _l2_norm(handle: TensorHandle) -> float:
    total = 0.0
    for part in parts_of(handle.shape):
        values = np.abs(as_numbers(handle.raw(part), handle.dtype).reshape(-1))
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.dot(values, values))
    return math.sqrt(total) if total >= 0 else total


MOST_TENSORS = 6
_LARGEST = 1e300
"""Larger values count as infinite, as the range of all values must be finite."""

_REAL = READABLE - {"complex32", "complex64", "complex128"}
_LEFT, _TOP, _FLOOR = 58, 12, 192
"""Left edge, top and bottom of a histogram, in pixels."""


def picture_histogram(*tensors: TensorHandle, bins: int = 80) -> Picture:
    """Returns the distribution of the values of tensors: of layers, or of one tensor over steps.

    All tensors have the same bins, from the smallest value to the largest. Values that are not
    finite are counted below the picture. Every tensor is read twice, in parts.

    Args:
        *tensors: Up to six tensors of any shapes, as `ray_dcp.open(...)["name"]` returns them.
        bins: Number of bins, 2 to 400.

    Raises:
        InvalidRequestError: A tensor has no real numbers, or there are too many or too few.
        DamagedCheckpointError: Bytes that were read do not match their checksums.

    Examples:
        >>> import ray_dcp, torch
        >>> saved = ray_dcp.save({"w": torch.randn(64, 64)}, checkpoint_id="memory://histogram")
        >>> picture_histogram(ray_dcp.open("memory://histogram")["w"])
        Picture of 3... characters
    """
    if not 1 <= len(tensors) <= MOST_TENSORS or bins not in range(2, 401):
        raise InvalidRequestError(
            f"expected 1 to {MOST_TENSORS} tensors and 2 to 400 bins, found {len(tensors)} and "
            f"{bins!r}"
        )
    for one in tensors:
        if not isinstance(one, TensorHandle) or one.dtype not in _REAL:
            found = repr(one) if isinstance(one, TensorHandle) else type(one).__qualname__
            raise InvalidRequestError(
                f"expected tensors of real numbers, as ray_dcp.open(...)['name'] returns them, "
                f"found {found}"
            )
    bounds = [(v.min(), v.max()) for one in tensors for v in _finite(one) if len(v)]
    if not bounds:
        return draw.pictured(draw.aside("no finite values"))
    low, high = float(min(b[0] for b in bounds)), float(max(b[1] for b in bounds))
    edges = np.histogram_bin_edges([], bins, (low, high))
    none = np.zeros(bins, dtype=np.int64)
    counts = [sum((np.histogram(v, edges)[0] for v in _finite(one)), none) for one in tensors]
    shares = [found / max(found.sum(), 1) for found in counts]
    top = max(float(share.max()) for share in shares)

    def x(value: float) -> float:
        return float(_LEFT + (value - edges[0]) / (edges[-1] - edges[0]) * (WIDTH - _LEFT - 20))

    def y(share: float) -> float:
        return _FLOOR - share / top * (_FLOOR - _TOP)

    parts = [draw.note(_LEFT - 6, _TOP - 2, "share", "end")]
    for tick in draw.ticks(0, top, 4)[1:]:
        parts.append(draw.line(_LEFT, y(tick), WIDTH - 20, y(tick)))
        parts.append(draw.note(_LEFT - 6, y(tick) + 4, f"{tick * 100:.4g} %", "end"))
    for tick in draw.ticks(float(edges[0]), float(edges[-1])):
        parts.append(draw.note(x(tick), _FLOOR + 16, f"{tick:.6g}", "middle"))
    parts.append(draw.line(_LEFT, _FLOOR, WIDTH - 20, _FLOOR))
    for index, share in enumerate(shares):
        corners = zip(np.repeat(edges, 2)[1:-1].tolist(), np.repeat(share, 2).tolist(), strict=True)
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in corners)
        path = f"{x(low):.1f},{_FLOOR} {points} {x(high):.1f},{_FLOOR}"
        colour = draw.rank_colour(index)
        look: dict[str, Any] = {"stroke": colour, "stroke_width": 1.4, "fill_opacity": 0.15}
        parts.append(draw.tag("polygon", points=path, fill=colour, **look))
    for index, (one, count) in enumerate(zip(tensors, counts, strict=True)):
        meant = (draw.rank_colour(index), _caption(one, int(count.sum())))
        parts.append(draw.legend(_LEFT, _FLOOR + 26 + 16 * index, [meant]))
    label = f"values of {len(tensors)} tensors in {bins} bins"
    return draw.pictured(draw.svg(WIDTH, _FLOOR + 32 + 16 * len(tensors), *parts, label=label))


def _finite(tensor: TensorHandle) -> Iterator[npt.NDArray[np.floating]]:
    for part in parts_of(tensor.shape):
        values = as_numbers(tensor.raw(part), tensor.dtype).reshape(-1)
        yield values[np.abs(values) < _LARGEST]


def _caption(tensor: TensorHandle, finite: int) -> str:
    total = int(np.prod(tensor.shape, dtype=np.int64))
    caption = f"{draw.clip(tensor.name, 400)}: {total:,} values"
    return caption if finite == total else f"{caption}, {total - finite:,} not finite"


def picture_layout(view: CheckpointView, name: str) -> Picture:
    """Returns a picture of the parts of a tensor and the ranks that wrote them.

    Args:
        view: The checkpoint.
        name: FQN of a tensor.

    Raises:
        MissingKeyError: The checkpoint has no such name; the message lists similar ones.
        InvalidRequestError: The name is that of an object.
    """
    boxes, dtype, num_bytes = _boxes_of(view, name)
    return shard_layout(boxes, name, dtype, num_bytes)


def picture_reshard(
    view: CheckpointView, name: str, layout: str | int | ShardGrid | Sequence[int]
) -> Picture:
    """Returns a picture of a tensor as it is stored and as the ranks of a load need it.

    Args:
        view: The checkpoint.
        name: FQN of a tensor.
        layout: Layout of the load: `6` for rows over 6 ranks, `4x2` and others as for
            `CheckpointView.reshard`; or the number of parts of each dimension.

    Raises:
        MissingKeyError: The checkpoint has no such name; the message lists similar ones.
        InvalidRequestError: The name is that of an object, or the layout does not fit the tensor.
    """
    before, dtype, num_bytes = _boxes_of(view, name)
    return reshard_layout(before, layout, name, dtype, num_bytes)


def _boxes_of(view: CheckpointView, name: str) -> tuple[RankBoxes, str, int]:
    info = view.tensors.get(name)
    if info is None:
        view[name]  # raises for an unknown name
        raise InvalidRequestError(
            f"expected the name of a tensor, but {name!r} is an object", key="name"
        )
    boxes = stored_boxes(view.checkpoint.table, view.names.index(name))
    return boxes, info.dtype, info.num_bytes
