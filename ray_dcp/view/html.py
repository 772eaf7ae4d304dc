"""A checkpoint as a static HTML table for notebooks: no script, no style sheet, works offline."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ray_dcp.view.wording import size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView

__all__ = ["checkpoint_html"]

MOST_ROWS = 50
"""Rows shown; the largest tensors first."""


def checkpoint_html(view: CheckpointView) -> str:
    """Returns a summary and the largest tensors of a checkpoint; every name is escaped.

    Args:
        view: The checkpoint.
    """
    facts = {
        "kind": view.kind,
        "ranks": view.world_size,
        "size": f"{size_text(view.num_bytes)} in {len(view.files)} files",
        "tensors": len(view.tensors),
        "objects": len(view.objects),
        "attempt": view.attempt,
    }
    told = " · ".join(f"{k} <b>{escape(str(v))}</b>" for k, v in facts.items() if v is not None)
    largest = sorted(view.tensors.items(), key=lambda item: -item[1].num_bytes)
    top = largest[0][1].num_bytes if largest else 0
    rows = [
        f"<tr><td style='text-align:left'><code>{escape(name)}</code></td>"
        f"<td>{escape('×'.join(map(str, info.shape)) or 'scalar')}</td>"
        f"<td>{escape(info.dtype)}</td><td>{info.num_chunks}</td>"
        f"<td>{size_text(info.num_bytes)}</td><td>{_bar(info.num_bytes, top)}</td></tr>"
        for name, info in largest[:MOST_ROWS]
    ]
    more = len(largest) - len(rows)
    note = f"<div>… and {more} smaller tensors</div>" if more > 0 else ""
    head = "".join(f"<th>{t}</th>" for t in ("tensor", "shape", "dtype", "chunks", "size", ""))
    return (
        f"<div><b>{escape(view.url)}</b><br>{told}</div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{note}"
    )


def _bar(num_bytes: int, top: int) -> str:
    width = round(100 * num_bytes / top) if top else 0
    return f"<div style='background:#4c78a8;height:0.7em;width:{width}px'></div>"
