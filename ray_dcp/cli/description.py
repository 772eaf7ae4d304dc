"""What `show` says of a directory whose content is unknown: what, whose, whole or not, how to load.

The lines of Python run as they are, given the objects that they name. Needs neither torch nor Ray.
"""

from __future__ import annotations

import ast
import json
import keyword
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ray_dcp.cli.output import styled, table
from ray_dcp.errors import CheckpointError
from ray_dcp.store.opening import place_below
from ray_dcp.store.storage import read_if_there
from ray_dcp.view.checkpoint_view import CheckpointView, read_view
from ray_dcp.view.run_view import RunView, StepView
from ray_dcp.view.tables import folder_of
from ray_dcp.view.verify import items_of
from ray_dcp.view.wording import age_text, count_text, few, size_text

_MOST_KEYS, _MOST_CODE, _MOST_RUNS = 8, 90, 20
_MOST_VALUE = 12
_CONFIG_BYTES = 1 << 20
_WRITERS = {"native": "ray_dcp", "stock": "torch.distributed.checkpoint"}


def writer_text(view: CheckpointView) -> str:
    """Returns what a checkpoint is and who wrote it, as text."""
    ranks = "" if view.world_size is None else f", saved by {count_text(view.world_size, 'rank')}"
    age = "" if view.created_s is None else f" {age_text(time.time() - view.created_s)} ago"
    if view.kind != "safetensors":
        return f"a checkpoint of {_WRITERS[view.kind]}{ranks}{age}"
    config: Any = None
    with suppress(CheckpointError, ValueError):
        config = json.loads(read_if_there(view.storage, "config.json", _CONFIG_BYTES) or b"null")
    if not isinstance(config, dict):
        return f"safetensors{ranks}"
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    version = config.get("transformers_version")
    by = f", written by transformers {version}" if isinstance(version, str) else ""
    return f"a Hugging Face model{f' {name}' if isinstance(name, str) else ''} in safetensors{by}"


def loading_code(view: CheckpointView, path: str) -> list[str]:
    """Returns three lines of Python that load a checkpoint, for its own names.

    Args:
        view: The checkpoint.
        path: Its path or URL.
    """
    where = json.dumps(path)
    state = _state_code(view)
    if state is None:
        read = [f"state = dcp.read_state_dict({where})", "model.load_state_dict(state)"]
        return ["import ray_dcp as dcp", *read]
    imports = "import torch, ray_dcp as dcp" if "torch." in state else "import ray_dcp as dcp"
    return [imports, f"state = {state}", f"dcp.load(state, checkpoint_id={where})"]


def _state_code(view: CheckpointView) -> str | None:
    """Returns a state dict with the keys of a checkpoint as code; None if it is a flat one."""
    found: dict[str, str] = {}
    is_flat = True
    for name, path in zip(view.names, view.checkpoint.table.paths, strict=True):
        key = (path or (name,))[0]
        if not isinstance(key, str) or len(found) > _MOST_KEYS:
            return None
        info = view.tensors.get(name)
        if path is not None and len(path) > 1:
            is_flat = False
            found[key] = key if key.isidentifier() and not keyword.iskeyword(key) else "model"
        elif info is None:
            is_flat = False
            found[key] = _literal(view.small_values.get(name, "None"))
        else:
            found[key] = f"torch.empty({info.shape}, dtype=torch.{info.dtype})"
    text = ", ".join(f"{json.dumps(key)}: {value}" for key, value in found.items())
    return None if is_flat or len(text) > _MOST_CODE else f"{{{text}}}"


def _literal(value: str) -> str:
    """Returns the `repr` of a value if that is short and is Python, else `None`."""
    with suppress(ValueError, SyntaxError):
        ast.literal_eval(value)
        return value if len(value) <= _MOST_VALUE else "None"
    return "None"


def checkpoint_lines(view: CheckpointView, path: str) -> list[str]:
    """Returns the lines of text how to load a checkpoint, or a step of items.

    Args:
        view: The checkpoint.
        path: Its path or URL.
    """
    items: Sequence[str] = ()
    if view.place is not None:
        with suppress(CheckpointError):
            items = items_of(view.storage, view.checkpoint)
    lines = []
    if items and view.place is not None:
        lines.append(f"a step of the items {few(list(items))}, each a checkpoint below it")
        view, path = read_view(place_below(view.place, items[0])), f"{path}/{items[0]}"
    return [*lines, *_code("to load it", loading_code(view, path))]


def run_lines(run: RunView, path: str) -> Iterator[str]:
    """Yields the description of a run, or of a directory of runs, as lines of text.

    Args:
        run: The run.
        path: Its path or URL.
    """
    runs, size = run.runs, size_text(sum(step.num_bytes for step in run))
    if len(runs) == 1:
        folder = folder_of(runs[0], run)
        path = path if folder == "." else f"{path.rstrip('/')}/{folder}"
        yield f"{path}: a run of {count_text(len(run.present), 'checkpoint')}, {size}"
        yield from _of_run(runs[0], path)
        return
    yield f"{path}: {len(runs)} runs of {count_text(len(run.present), 'checkpoint')}, {size}"
    rows = [{"run": folder_of(one, run), **_row(one)} for one in runs[:_MOST_RUNS]]
    yield from table(rows, left=("run", "newest", "states"), least=("size", "states"))
    if len(runs) > _MOST_RUNS:
        yield f"… and {len(runs) - _MOST_RUNS} more"
    yield f"each step: ray-dcp ls {path}"
    newest = max(runs, key=lambda one: max((s.created_s or 0.0 for s in one), default=0.0))
    folder = folder_of(newest, run)
    yield f"the run that was saved to last: {folder}"
    yield from _to_load(newest, path if folder == "." else f"{path.rstrip('/')}/{folder}")


def _of_run(run: RunView, path: str) -> Iterator[str]:
    newest = newest_of(run)
    if newest is not None:
        ranks = "" if newest.num_ranks is None else f", {count_text(newest.num_ranks, 'rank')}"
        since = newest.created_s
        age = "" if since is None else f", {age_text(time.time() - since)} ago"
        yield f"newest that is whole: {newest.name}{age}{ranks}, {size_text(newest.num_bytes)}"
        with suppress(CheckpointError):
            yield f"written by: {_WRITERS.get(newest.view.kind, newest.view.kind)}"
    yield f"states, by names and lengths of files: {_states(run)}"
    for step in run:
        if step.state in ("damaged", "unreadable"):
            yield f"{step.name}: {step.state}: {step.detail}"
    yield f"each step: ray-dcp ls {path}; what is in one: ray-dcp show {path}@latest"
    yield from _to_load(run, path)


def _to_load(run: RunView, path: str) -> Iterator[str]:
    newest = newest_of(run)
    if newest is None:
        yield "nothing in it can be loaded"
        return
    try:
        code = loading_code(newest.view, f"{path.rstrip('/')}/{newest.name}")
    except CheckpointError as error:
        yield f"{newest.name}: {error.message}"
        return
    if code[-1].startswith("dcp.load(") and newest.step is not None and not newest.items:
        code[-1] = f"dcp.load_newest(state, {json.dumps(path)})"
    yield from _code("to load the newest that is whole", code)


def newest_of(run: RunView) -> StepView | None:
    """Returns the newest step of a run that can be loaded; None if there is none."""
    try:
        return run.step("latest")
    except CheckpointError:
        return None


def _row(run: RunView) -> dict[str, str]:
    newest = newest_of(run)
    since = None if newest is None else newest.created_s
    return {
        "newest": "" if newest is None else newest.name,
        "age": "" if since is None else age_text(time.time() - since),
        "size": size_text(sum(step.num_bytes for step in run)),
        "states": _states(run),
    }


def _states(run: RunView) -> str:
    counts = Counter(step.state for step in run)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _code(what: str, lines: Sequence[str]) -> list[str]:
    where = "on any number of ranks" if lines[-1].startswith("dcp.load") else "in one process"
    return ["", styled(f"{what}, {where}:", "bold"), *(f"    {line}" for line in lines)]
