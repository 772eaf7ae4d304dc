"""How the values of tensors are spread, as one curve of steps for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.pictures import drawing as draw
from ray_dcp.view.pictures.drawing import WIDTH, Picture
from ray_dcp.view.tensor_handle import TensorHandle, parts_of

MOST_TENSORS = 6
_LARGEST = 1e300
"""Larger values count as infinite here: a range must be a number as well."""

_REAL = READABLE - {"complex32", "complex64", "complex128"}
_LEFT, _TOP, _BOTTOM = 58, 12, 192


def picture_histogram(*tensors: TensorHandle, bins: int = 80) -> Picture:
    """Returns how the values of tensors are spread: of layers, or of one tensor at several steps.

    All have the same bins, from the least value to the largest. Values that are not finite are
    counted below the picture. Every tensor is read twice, part by part.

    Args:
        *tensors: Of any shapes, as `ray_dcp.open(...)["name"]` gives them; six at most.
        bins: How many, 2 to 400.

    Raises:
        InvalidRequestError: A tensor has no real numbers, or too many or too few are given.
        DamagedCheckpointError: What is read does not match its checksums.

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
                f"expected tensors of real numbers, as ray_dcp.open(...)['name'] gives them, found "
                f"{found}"
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
        return _BOTTOM - share / top * (_BOTTOM - _TOP)

    parts = [draw.note(_LEFT - 6, _TOP - 2, "share", "end")]
    for tick in draw.ticks(0, top, 4)[1:]:
        parts += [draw.line(_LEFT, y(tick), WIDTH - 20, y(tick))]
        parts += [draw.note(_LEFT - 6, y(tick) + 4, f"{tick * 100:.4g} %", "end")]
    for tick in draw.ticks(float(edges[0]), float(edges[-1])):
        parts.append(draw.note(x(tick), _BOTTOM + 16, f"{tick:.6g}", "middle"))
    parts.append(draw.line(_LEFT, _BOTTOM, WIDTH - 20, _BOTTOM))
    for index, share in enumerate(shares):
        corners = zip(np.repeat(edges, 2)[1:-1].tolist(), np.repeat(share, 2).tolist(), strict=True)
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in corners)
        first, last = f"{x(low):.1f},{_BOTTOM}", f"{x(high):.1f},{_BOTTOM}"
        colour = draw.rank_colour(index)
        look: dict[str, Any] = {
            "stroke": colour,
            "fill": colour,
            "fill_opacity": 0.15,
            "stroke_width": 1.4,
        }
        parts.append(draw.tag("polygon", points=f"{first} {points} {last}", **look))
    names = [_caption(one, int(found.sum())) for one, found in zip(tensors, counts, strict=True)]
    key = [(draw.rank_colour(index), name) for index, name in enumerate(names)]
    rows = [draw.legend(_LEFT, _BOTTOM + 26 + 16 * i, [one]) for i, one in enumerate(key)]
    height = _BOTTOM + 32 + 16 * len(rows)
    label = f"values of {len(tensors)} tensors in {bins} bins"
    return draw.pictured(draw.svg(WIDTH, height, *parts, *rows, label=label))


def _finite(tensor: TensorHandle) -> Iterator[npt.NDArray[np.floating]]:
    for part in parts_of(tensor.shape):
        values = as_numbers(tensor.raw(part), tensor.dtype).reshape(-1)
        yield values[np.abs(values) < _LARGEST]


def _caption(tensor: TensorHandle, finite: int) -> str:
    total = int(np.prod(tensor.shape, dtype=np.int64))
    caption = f"{draw.clip(tensor.name, 400)}: {total:,} values"
    return caption if finite == total else f"{caption}, {total - finite:,} not finite"
