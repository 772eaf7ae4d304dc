"""The fixed part of a file plan, piece by piece: frames, gaps, and which pieces are joined.

Pure: a plan in, lists out. Lists, because a piece is looked at in Python, where an element of a
numpy array costs ten times more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.frames import Frame, torch_save_frame
from ray_dcp.plan.grouping import group_rows
from ray_dcp.plan.values import FilePlan, Int64Array

__all__ = ["Pieces", "Run", "contradiction", "pieces_of"]

_NO_FRAME = Frame(b"", b"")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces; a large one is alone."""

    first: int
    stop: int
    is_large: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is written before the deferred items, in file order; all lists are aligned.

    Attributes:
        row: Row of the rank's `Columns`.
        start: First byte of the piece in that item's bytes.
        num_bytes: Length of the raw bytes.
        block_bytes: Length of a checksum block.
        gap: Zeros before the frame's header.
        header: Frame before the raw bytes.
        footer: Frame after them.
        runs: All pieces, cut into runs.
        last_gap: Zeros after the last piece.
    """

    row: list[int]
    start: list[int]
    num_bytes: list[int]
    block_bytes: list[int]
    gap: list[int]
    header: list[bytes]
    footer: list[bytes]
    runs: list[Run]
    last_gap: int


def pieces_of(plan: FilePlan, key: str, *, small_bytes: int, pack_bytes: int) -> Pieces:
    """Returns the pieces of a file plan.

    Args:
        plan: What to write.
        key: Of the file, for messages.
        small_bytes: Longer pieces are large.
        pack_bytes: About how many bytes of small pieces make a run.

    Raises:
        InternalError: The plan leaves another room than the frames need.
    """
    frames, frame = _frames(plan)
    header_bytes = np.array([len(one.header) for one in frames], dtype=np.int64)[frame]
    footer_bytes = np.array([len(one.footer) for one in frames], dtype=np.int64)[frame]
    item_bytes = header_bytes + plan.payload_bytes + footer_bytes
    planned_header = plan.payload_offset - plan.item_offset
    wrong = np.flatnonzero((header_bytes != planned_header) | (item_bytes != plan.item_bytes))
    if len(wrong):
        at = int(wrong[0])
        raise contradiction(
            f"an item of {plan.item_bytes[at]} bytes for row {plan.row[at]}",
            f"{header_bytes[at]} + {plan.payload_bytes[at]} + {footer_bytes[at]}",
            key,
        )
    ends = np.concatenate([[len(plan.header)], plan.item_offset + plan.item_bytes])
    gaps = np.concatenate([plan.item_offset, [plan.num_bytes]]) - ends
    if int(gaps.min()) < 0:
        at = int(np.argmin(gaps))
        raise contradiction(
            f"room up to byte {ends[at] + gaps[at]}", f"bytes up to {ends[at]}", key
        )
    headers, footers = [one.header for one in frames], [one.footer for one in frames]
    chosen = frame.tolist()
    return Pieces(
        row=plan.row.tolist(),
        start=plan.source_start.tolist(),
        num_bytes=plan.payload_bytes.tolist(),
        block_bytes=plan.block_bytes.tolist(),
        gap=gaps[:-1].tolist(),
        header=[headers[one] for one in chosen],
        footer=[footers[one] for one in chosen],
        runs=_runs(plan, small_bytes, pack_bytes),
        last_gap=int(gaps[-1]),
    )


def contradiction(expected: str, found: str, key: str) -> InternalError:
    """Returns the error for a plan that does not fit what is to be written."""
    return InternalError(
        f"the plan of this file expected {expected}, found {found}; please report this", key=key
    )


def _frames(plan: FilePlan) -> tuple[list[Frame], Int64Array]:
    """Returns the distinct frames, and which of them each piece has."""
    if not len(plan.row):
        return [], np.zeros(0, dtype=np.int64)
    framed = plan.item_bytes != plan.payload_bytes
    columns = [framed.astype(np.int8), plan.dtype, plan.ndim, *plan.size.T]
    first, frame = group_rows(columns)
    frames = [
        torch_save_frame(plan.dtypes[dtype], tuple(size[:ndim])) if has_frame else _NO_FRAME
        for has_frame, dtype, ndim, size in zip(
            framed[first].tolist(),
            plan.dtype[first].tolist(),
            plan.ndim[first].tolist(),
            plan.size[first].tolist(),
            strict=True,
        )
    ]
    return frames, frame


def _runs(plan: FilePlan, small_bytes: int, pack_bytes: int) -> list[Run]:
    if not len(plan.row):
        return []
    large = plan.payload_bytes > small_bytes
    bucket = plan.item_offset // pack_bytes
    cut = large[1:] | large[:-1] | (bucket[1:] != bucket[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    stops = [*firsts[1:].tolist(), len(large)]
    return [
        Run(first, stop, is_large)
        for first, stop, is_large in zip(
            firsts.tolist(), stops, large[firsts].tolist(), strict=True
        )
    ]
