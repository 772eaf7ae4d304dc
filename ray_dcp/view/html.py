"""A checkpoint as notebooks show it: what it is, its tensors, and the course of its save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_dcp.errors import CheckpointError
from ray_dcp.view.pictures.drawing import div, safe
from ray_dcp.view.pictures.of_views import leaves_of
from ray_dcp.view.pictures.timeline import timeline
from ray_dcp.view.pictures.tree import tensor_tree
from ray_dcp.view.wording import count_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView

__all__ = ["checkpoint_html"]


def checkpoint_html(view: CheckpointView) -> str:
    """Returns a summary of a checkpoint, the tree of its tensors, and its timeline if it has one.

    Static, complete in itself and of bounded size; every name is escaped.

    Args:
        view: The checkpoint.
    """
    facts = {
        "kind": view.kind,
        "ranks": view.world_size,
        "size": f"{size_text(view.num_bytes)} in {count_text(len(view.files), 'file')}",
        "tensors": len(view.tensors),
        "objects": len(view.objects),
        "attempt": view.attempt,
    }
    told = " · ".join(f"{k} <b>{safe(v)}</b>" for k, v in facts.items() if v is not None)
    return div(
        f"<div><b>{safe(view.url)}</b><br/>{told}</div>",
        tensor_tree(leaves_of(view)).html,
        _course(view),
    )


def _course(view: CheckpointView) -> str:
    try:
        trace = view.trace
    except CheckpointError as error:
        return f"<div style='opacity:.75'>{safe(error.message)}</div>"
    if trace is None:
        return ""
    drawn = timeline(trace).html
    summary = "<summary style='cursor:pointer'><b>how it was saved</b></summary>"
    return f"<details>{summary}{drawn}</details>"
