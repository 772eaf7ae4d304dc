"""The steps of a run as a table of Arrow or pandas, for notebooks and plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_dcp.store.opening import open_storage
from ray_dcp.view.run_listing import look_into

if TYPE_CHECKING:
    from ray_dcp.view.run_view import RunView, StepView

_FACTS = ("name", "step", "state", "created", "num_bytes", "num_ranks", "tags", "note", "url")
_DETAILS = ("new_bytes", "linked_bytes", "copied_bytes", "stall_s", "durable_s")


def arrow_of(run: RunView, *, details: bool) -> Any:
    """Returns the steps of a run as a `pyarrow.Table`; see `RunView.to_arrow`."""
    import pyarrow

    # Why Any: pyarrow has no type information.
    pa: Any = pyarrow
    steps = run.present
    if details:
        look_into(open_storage(run.place), steps, _read)
    types = {
        "step": pa.int64(), "created": pa.timestamp("us", tz="UTC"), "num_bytes": pa.int64(),
        "num_ranks": pa.int64(), "tags": pa.list_(pa.string()), "new_bytes": pa.int64(),
        "linked_bytes": pa.int64(), "copied_bytes": pa.int64(), "stall_s": pa.float64(),
        "durable_s": pa.float64(),
    }  # fmt: skip
    names = (*_FACTS, *(_DETAILS if details else ()))
    columns = {
        name: pa.array([_CELLS[name](step) for step in steps], types.get(name, pa.string()))
        for name in names
    }
    for name in sorted({name for step in steps for name in step.metrics}):
        values = [step.metrics.get(name) for step in steps]
        columns[f"metrics.{name}"] = pa.array(values, pa.float64())
    return pa.table(columns)


def _read(step: StepView) -> None:
    """Reads what the cells of details need."""
    for name in _DETAILS:
        _CELLS[name](step)


def _new_bytes(step: StepView) -> int | None:
    return step.new_bytes if step.is_readable else None


def _reused(how: str) -> Callable[[StepView], int | None]:
    return lambda step: None if step.trace is None else step.reused_bytes.get(how, 0)


_CELLS: dict[str, Callable[[StepView], object]] = {
    "name": lambda step: step.name,
    "step": lambda step: step.step,
    "state": lambda step: step.state,
    "created": lambda step: None if step.created_s is None else round(step.created_s * 1e6),
    "num_bytes": lambda step: step.num_bytes,
    "num_ranks": lambda step: step.num_ranks,
    "tags": lambda step: list(step.tags),
    "note": lambda step: step.note,
    "url": lambda step: open_storage(step.path).url,
    "new_bytes": _new_bytes,
    "linked_bytes": _reused("linked"),
    "copied_bytes": _reused("copied"),
    "stall_s": lambda step: step.stall_s,
    "durable_s": lambda step: step.durable_s,
}
