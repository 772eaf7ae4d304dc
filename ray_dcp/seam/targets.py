"""What a rank wants of a checkpoint, and the tensors and places that the bytes go into.

Nothing of the state dict changes before the first byte arrives: all checks are made while
planning, and `Targets.check_coverage` is the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CoverageError, InvalidRequestError, MissingKeyError, StateDictError
from ray_dcp.options import LoadOptions
from ray_dcp.plan.reading import ReadPlan, Wanted, plan_reads
from ray_dcp.plan.values import ChunkTable, Kind
from ray_dcp.seam.flatten import Flat, flatten, flatten_top
from ray_dcp.seam.item_placer import ItemPlacer
from ray_dcp.seam.key_maps import below, stored_names
from ray_dcp.seam.per_rank import OwnValues
from ray_dcp.seam.placing import ObjectTaker, Placing
from ray_dcp.seam.state import LoadTargets, Stored, check_all_taken, stateful_to_load_targets
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
        missing: FQNs that the checkpoint lacks (only with `strict=False`).
        unexpected: FQNs of the checkpoint that the state dict does not ask for.
        cast: `(FQN, stored dtype, target dtype)` where they differ.
        resized: `(FQN, stored shape, target shape)` where they differ.
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
    resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


def plan_targets(
    state_dict: MutableMapping[str, Any],
    table: ChunkTable,
    *,
    narrow: Callable[[Sequence[Wanted], Sequence[int]], ChunkTable] | None = None,
    options: LoadOptions | None = None,
    flatten_state_dict: bool = True,
    flatten_sharded_tensors: bool = True,
    stateful: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> Targets:
    """Returns where the bytes of a checkpoint go in a state dict.

    Args:
        state_dict: What to load into, in place; tensors keep their identity. Top-level `Stateful`
            values are asked for their `state_dict()` now and given it back by `finish`. Otherwise
            not changed before the first byte arrives.
        table: What the checkpoint holds; with `narrow`, its chunks are not looked at.
        narrow: Returns the same table with all chunks of boxes and of whole tensors or objects,
            by their numbers; see `Checkpoint.narrow`.
        options: `strict`, `dtype`, `weights_only`, `key_map`, `prefixes` and
            `resize` are used.
        flatten_state_dict: As in DCP's `DefaultLoadPlanner`.
        flatten_sharded_tensors: As there.
        stateful: Load into the state of top-level `Stateful` values; False as in DCP's
            `load_state_dict`.
        rank: This rank, for `PerRank` values.
        world_size: Number of ranks that load.

    Raises:
        MissingKeyError: The checkpoint lacks keys; all are named, with similar ones it has.
        ShapeMismatchError: Global shapes differ, or dtypes do in a way that `options.dtype`
            forbids; all are named.
        StateDictError: `options.strict` and there are unexpected keys, or some are of a module
            or optimizer of the state dict and `options.strict` is not False; or a tensor of the
            checkpoint is asked for by a value that is none.
        UnsupportedValueError: A target can't be written to.
        InvalidRequestError: `options.key_map` or `options.prefixes` does not fit.

    Complexity: linear; about 2.5 us for a plain CPU tensor.

    Source: `torch/distributed/checkpoint/default_planner.py`, `DefaultLoadPlanner`.
    """
    options = options or LoadOptions()
    prefixes = tuple(options.prefixes)
    index = stored_names(table.names, options.key_map)
    loaded = None
    if stateful:
        stored = Stored(index, lambda name: bool(table.kind[index[name]] == Kind.OBJECT))
        loaded = stateful_to_load_targets(state_dict, stored, prefixes)
    placing = Placing(table, options, flatten_sharded_tensors=flatten_sharded_tensors)
    with collector_paused():
        values = state_dict if loaded is None else loaded.values
        flat = _wanted(_matching_flat(values, index, flatten_state_dict), prefixes)
        own = OwnValues(flat, index, rank, world_size)
        missing, unexpected = _compared(own, index, table.names, options)
        if loaded is not None:
            check_all_taken(state_dict, unexpected, strict=options.strict)
        placing.fill(own.rest, index)
        placing.check()
    whole = [number for number, _, _ in placing.objects]
    whole += [number for number, _ in own.numbers]
    boxes = (placing.raw.wanted(), placing.opaque.wanted())
    placing.take_chunks(table if narrow is None else narrow(boxes, whole))
    with collector_paused():
        return _targets(placing, own, state_dict, loaded, missing, unexpected)


def _wanted(flat: Flat, prefixes: tuple[str, ...]) -> Flat:
    """Returns what of the state dict takes part."""
    if prefixes:
        rows = [row for row, name in enumerate(flat.names) if below(name, prefixes)]
        if not rows:
            raise InvalidRequestError(
                f"LoadOptions.prefixes are {', '.join(map(repr, prefixes))}, but the state dict "
                f"has no key at or below one of them",
                key="prefixes",
            )
        flat = flat.only(rows)
    # Why: there is nothing to load into a mapping without entries; for DCP it is not there.
    if flat.empty:
        flat = flat.only([row for row, name in enumerate(flat.names) if name not in flat.empty])
    return flat


def _compared(
    own: OwnValues, index: Mapping[str, int], stored: Sequence[str], options: LoadOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns keys that the checkpoint lacks, and its own keys that nobody asks for.

    Raises:
        MissingKeyError: There are some of the first kind, and it matters.
        StateDictError: There are some of the second kind, and it matters.
    """
    rest = own.rest
    plain = not (own.asked or own.missing or rest.empty)
    # Why first: nothing is missing or unexpected as a rule, and sets of all names take time.
    if plain and len(rest.names) == len(index) == len(stored):
        plain = all(map(index.__contains__, rest.names))
        if plain:
            return tuple(own.kept), ()
    asked = {*own.rest.names, *own.asked, *(own.rest.empty & index.keys())}
    # Why the comparison first: it is done in C, and nothing is missing or unexpected as a rule.
    all_there = index.keys() >= asked and not own.missing
    same = all_there and len(asked) == len(index) == len(stored)
    missing = () if all_there else (*(n for n in own.rest.names if n not in index), *own.missing)
    unexpected: tuple[str, ...] = ()
    if not same:
        prefixes = options.prefixes
        named = dict.fromkeys(index.values()) if options.key_map is not None else None
        unexpected = tuple(
            stored[number]
            for name, number in index.items()
            if name not in asked and (not prefixes or below(name, prefixes))
        )
        if named is not None and not prefixes:
            unexpected += tuple(n for i, n in enumerate(stored) if i not in named)
    if missing and options.strict is not False:
        raise _missing_error(missing, unexpected)
    if unexpected and options.strict:
        raise StateDictError(
            f"LoadOptions(strict=True), but the checkpoint holds {len(unexpected)} key(s) that "
            f"the state dict does not ask for: {', '.join(map(repr, unexpected))}",
            key=unexpected[0],
        )
    return (*missing, *own.kept), unexpected


def _targets(
    placing: Placing,
    own: OwnValues,
    state_dict: MutableMapping[str, Any],
    loaded: LoadTargets | None,
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
        holes += [(fqn, 0) for number, fqn, _ in placing.objects if not placing.has_chunk(number)]
        holes += [(fqn, 0) for number, fqn in own.numbers if not placing.has_chunk(number)]
        if holes:
            raise _coverage_error(holes)

    def finish() -> None:
        placing.finish()
        own.finish()
        if loaded is not None:
            loaded.put_back(state_dict)

    return Targets(
        wanted=raw,
        sink=placing.raw.sink,
        objects=(
            *placing.object_takers(),
            *placing.own_takers(own),
            *items.opaque_takers(opaque_plan),
        ),
        place_item=items.place_item,
        finish=finish,
        check_coverage=check_coverage,
        names=names,
        loaded=(*placing.loaded, *own.loaded),
        missing=missing,
        unexpected=unexpected,
        cast=tuple(placing.cast),
        resized=tuple(placing.resizing.done),
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
    lacking = [name for name in flat.names if name not in index]
    if not lacking or flat.empty.issuperset(lacking):
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
        "LoadOptions(strict=False)",
        key=missing[0],
    )


def _candidates(name: str, unexpected: tuple[str, ...]) -> list[str]:
    # Why: comparing a name costs 10 us or more, and checkpoints hold many of them.
    last = name.rpartition(".")[2]
    same = [other for other in unexpected if other.rpartition(".")[2] == last]
    return (same or list(unexpected))[:1000]
