"""What a rank wants of a checkpoint, and the tensors and places that the bytes go into.

Nothing of the state dict changes before the first byte arrives: all checks are made while
planning, and `Targets.check_coverage` is the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CoverageError, MissingKeyError, StateDictError
from ray_dcp.options import LoadOptions
from ray_dcp.plan.reading import ReadPlan, Wanted, plan_reads
from ray_dcp.plan.values import ChunkTable
from ray_dcp.seam.flatten import Flat, flatten, flatten_top
from ray_dcp.seam.placing import ItemPlacer, ObjectTaker, Placing
from ray_dcp.seam.state import put_back, stateful_to_load_targets
from ray_dcp.transfer.reader import TargetSink

__all__ = ["ObjectTaker", "TargetSink", "Targets", "plan_targets"]


@dataclass(frozen=True, eq=False)
class Targets:
    """The wanted boxes and objects of one rank, planned for one load.

    The order of calls: `check_coverage(plan_reads(table, wanted))`; then, when every rank is
    ready, `read_chunks` fills `sink`, and `place_item` takes the items of its `opaque` chunks; then
    every `(chunk, taker)` of `objects` is called with `read_item(chunk)`; then `finish()` once,
    after which the state dict is loaded.

    Attributes:
        wanted: The boxes of raw tensor bytes.
        sink: Where they go.
        objects: `(index of a chunk of the table, what takes its verified bytes)`: Python objects,
            and chunks of tensors that only `torch.load` understands.
        place_item: `(chunk, item bytes)`: puts a whole `torch.save` item of a *tensor* chunk into
            every wanted box that it meets. For items of foreign checkpoints that have no raw
            bytes (tensor subclasses, stream transforms once undone).
        finish: Puts objects and new tensors into the state dict and calls `load_state_dict` of
            every top-level `Stateful`.
        check_coverage: Raises `CoverageError` for every box that the read plan leaves uncovered.
        names: FQN of each wanted row.
        loaded: FQNs that are loaded, in order of the state dict.
        missing: FQNs that the checkpoint lacks (only with `allow_partial_load`).
        unexpected: FQNs of the checkpoint that the state dict does not ask for.
        cast: `(FQN, stored dtype, target dtype)` where they differ.
    """

    wanted: Wanted
    sink: TargetSink
    objects: tuple[tuple[int, ObjectTaker], ...]
    place_item: Callable[[int, bytes], None]
    finish: Callable[[], None]
    check_coverage: Callable[[ReadPlan], None]
    names: tuple[str, ...]
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[tuple[str, str, str], ...]


def plan_targets(
    state_dict: MutableMapping[str, Any],
    table: ChunkTable,
    *,
    options: LoadOptions | None = None,
    flatten_state_dict: bool = True,
    flatten_sharded_tensors: bool = True,
    stateful: bool = True,
) -> Targets:
    """Returns where the bytes of a checkpoint go in a state dict.

    Args:
        state_dict: What to load into, in place; tensors keep their identity. Top-level `Stateful`
            values are asked for their `state_dict()` now and given it back by `finish`. Otherwise
            not changed before the first byte arrives.
        table: What the checkpoint holds.
        options: `allow_partial_load`, `strict`, `dtype` and `weights_only` are used.
        flatten_state_dict: As in DCP's `DefaultLoadPlanner`.
        flatten_sharded_tensors: As there.
        stateful: Load into the state of top-level `Stateful` values; False as in DCP's
            `load_state_dict`.

    Raises:
        MissingKeyError: The checkpoint lacks keys; all are named, with similar ones it has.
        ShapeMismatchError: Global shapes differ, or dtypes do in a way that `options.dtype`
            forbids; all are named.
        StateDictError: `options.strict` and there are unexpected keys; or a tensor of the
            checkpoint is asked for by a value that is none.
        UnsupportedValueError: A target can't be written to.

    Complexity: linear; about 2.5 us for a plain CPU tensor.

    Source: `torch/distributed/checkpoint/default_planner.py`, `DefaultLoadPlanner`.
    """
    options = options or LoadOptions()
    loaded = stateful_to_load_targets(state_dict) if stateful else state_dict
    with collector_paused():
        return _planned(
            state_dict, loaded, table, options, flatten_state_dict, flatten_sharded_tensors
        )


def _planned(
    state_dict: MutableMapping[str, Any],
    loaded: MutableMapping[str, Any],
    table: ChunkTable,
    options: LoadOptions,
    nested: bool,
    flatten_sharded_tensors: bool,
) -> Targets:
    index = {name: i for i, name in enumerate(table.names)}
    flat = _matching_flat(loaded, index, nested)
    asked = set(flat.names)
    # Why the comparison first: it is done in C, and nothing is missing or unexpected as a rule.
    all_there = index.keys() >= asked
    missing = () if all_there else tuple(name for name in flat.names if name not in index)
    same = all_there and len(asked) == len(index)
    unexpected = () if same else tuple(name for name in table.names if name not in asked)
    if missing and not options.allow_partial_load:
        raise _missing_error(missing, unexpected)
    if unexpected and options.strict:
        raise StateDictError(
            f"LoadOptions(strict=True), but the checkpoint holds {len(unexpected)} key(s) that "
            f"the state dict does not ask for: {', '.join(map(repr, unexpected))}",
            key=unexpected[0],
        )
    placing = Placing(table, options, flatten_sharded_tensors=flatten_sharded_tensors)
    placing.fill(flat, index)
    placing.check()
    return _targets(placing, state_dict, loaded, missing, unexpected)


def _targets(
    placing: Placing,
    state_dict: MutableMapping[str, Any],
    loaded: MutableMapping[str, Any],
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
) -> Targets:
    raw, opaque = placing.raw.wanted(), placing.opaque.wanted()
    names = tuple(map(placing.table.names.__getitem__, raw.tensor.tolist()))
    opaque_plan = plan_reads(placing.table, opaque)
    items = ItemPlacer(placing, raw)

    def check_coverage(plan: ReadPlan) -> None:
        holes = [(names[row], missing_bytes) for row, missing_bytes in plan.uncovered]
        holes += [
            (placing.table.names[opaque.tensor[row]], missing_bytes)
            for row, missing_bytes in opaque_plan.uncovered
        ]
        holes += [(fqn, 0) for chunk, fqn, _ in placing.objects if chunk < 0]
        if holes:
            raise _coverage_error(holes)

    def finish() -> None:
        placing.finish()
        if loaded is not state_dict:
            put_back(state_dict, loaded)

    return Targets(
        wanted=raw,
        sink=placing.raw.sink,
        objects=(*placing.object_takers(), *items.opaque_takers(opaque_plan)),
        place_item=items.place_item,
        finish=finish,
        check_coverage=check_coverage,
        names=names,
        loaded=tuple(placing.loaded),
        missing=missing,
        unexpected=unexpected,
        cast=tuple(placing.cast),
    )


def _coverage_error(holes: list[tuple[str, int]]) -> CoverageError:
    bytes_of: dict[str, int] = {}
    for name, missing_bytes in holes:
        bytes_of[name] = bytes_of.get(name, 0) + missing_bytes
    told = ", ".join(f"{name!r} ({count} bytes)" for name, count in bytes_of.items())
    return CoverageError(
        f"the checkpoint has no bytes for parts of {len(bytes_of)} value(s) that are to be "
        f"loaded: {told}; nothing was changed: load another checkpoint",
        key=holes[0][0],
    )


def _matching_flat(loaded: Mapping[str, Any], index: Mapping[str, int], nested: bool) -> Flat:
    """The flat state dict, by the rules before torch 2.4 when the checkpoint follows those."""
    if not nested:
        return flatten_top(loaded)
    flat = flatten(loaded)
    if index.keys() >= set(flat.names):
        return flat
    old = flatten(loaded, before_2_4=True)
    new_names = set(flat.names)
    return old if any(name in index and name not in new_names for name in old.names) else flat


def _missing_error(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> MissingKeyError:
    similar = {
        name: get_close_matches(name, _candidates(name, unexpected), n=2) for name in missing[:5]
    }
    hints = [
        f"{name!r} is like {' and '.join(map(repr, it))}" for name, it in similar.items() if it
    ]
    return MissingKeyError(
        f"Missing key in checkpoint state_dict: {', '.join(map(repr, missing))}"
        + (f" (of those in the checkpoint {', '.join(hints)})" if hints else "")
        + "; load a checkpoint that has them, or leave their values as they are with "
        "LoadOptions(allow_partial_load=True)",
        key=missing[0],
    )


def _candidates(name: str, unexpected: tuple[str, ...]) -> list[str]:
    # Why: comparing a name costs 10 us or more, and checkpoints hold many of them.
    last = name.rpartition(".")[2]
    same = [other for other in unexpected if other.rpartition(".")[2] == last]
    return (same or list(unexpected))[:1000]
