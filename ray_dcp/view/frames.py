"""The steps of a run as a table of Arrow or pandas, for notebooks and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_dcp.store.opening import open_storage
from ray_dcp.view.run_listing import look_into

if TYPE_CHECKING:
    from ray_dcp.view.run_view import RunView, StepView


def arrow_of(run: RunView, *, details: bool) -> Any:
    """Returns the steps of a run as a `pyarrow.Table`; see `RunView.to_arrow`."""
    import pyarrow

    # Why Any: pyarrow has no type information.
    pa: Any = pyarrow
    steps = run.present
    types = {
        "name": pa.string(), "step": pa.int64(), "state": pa.string(),
        "created": pa.timestamp("us", tz="UTC"), "num_bytes": pa.int64(), "num_ranks": pa.int64(),
        "tags": pa.list_(pa.string()), "note": pa.string(), "url": pa.string(),
    }  # fmt: skip
    if details:
        look_into(open_storage(run.place), steps, _read_details)
        sizes = dict.fromkeys(("new_bytes", "linked_bytes", "copied_bytes"), pa.int64())
        types |= {**sizes, "stall_s": pa.float64(), "durable_s": pa.float64()}
    rows = []
    for step in steps:
        created_us = None if step.created_s is None else round(step.created_s * 1e6)
        own = {"created": created_us, "url": open_storage(step.path).url}
        rows.append(vars(step) | own | (_details(step) if details else {}))
    columns = {name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()}
    for name in sorted({name for step in steps for name in step.metrics}):
        values = [step.metrics.get(name) for step in steps]
        columns[f"metrics.{name}"] = pa.array(values, pa.float64())
    return pa.table(columns)


def _details(step: StepView) -> dict[str, object]:
    """Reads the cells of details, which the step keeps."""
    reused = None if step.trace is None else step.reused_bytes
    return {
        "new_bytes": step.new_bytes if step.is_readable else None,
        "linked_bytes": None if reused is None else reused.get("linked", 0),
        "copied_bytes": None if reused is None else reused.get("copied", 0),
        "stall_s": step.stall_s,
        "durable_s": step.durable_s,
    }


def _read_details(step: StepView) -> None:
    _details(step)
