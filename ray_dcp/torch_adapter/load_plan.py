"""Plans what a rank loads: the wanted values, with the places that they go to.

The state dict does not change before the first byte arrives: planning makes all checks, the last of
which is `Targets.check_coverage`. Each value of the state dict becomes the boxes that it wants of a
chunk table, or the place of an object; `sink` decides which memory the bytes are written to.

If a target has another shape than the stored tensor, and `LoadOptions.resize` allows that,
`stored_part` selects the common part, and the rest is left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ray_dcp.core.processes import collector_paused
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import (
    InvalidRequestError,
    MissingKeyError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.options import LoadOptions, dims_of
from ray_dcp.planning.reads import Wanted
from ray_dcp.torch_adapter.content_digests import content_digest
from ray_dcp.torch_adapter.flatten import (
    Flat,
    below,
    flatten,
    flatten_top,
    listed,
    stored_names,
)
from ray_dcp.torch_adapter.objects import load_object
from ray_dcp.torch_adapter.optimizer_state import Cast, Stored, check_all_taken, lost_state
from ray_dcp.torch_adapter.shards import Layouts, Sharded, is_sharded, sharded
from ray_dcp.torch_adapter.sink import (
    AsStored,
    Boxes,
    Fresh,
    TensorSink,
    fresh_taker,
    fresh_value,
    geometry,
    target_problem,
)
from ray_dcp.torch_adapter.state import (
    OwnValues,
    asked_names,
    must_be_taken,
    owner_names,
    stateful_to_load_targets,
)
from ray_dcp.torch_adapter.targets import ObjectTaker, Targets, first_chunks
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    dtype_of,
    find_dtype,
    is_checkpointable,
    loses_nothing,
    lost_memory,
    no_target_reason,
    parts_with_memory,
)


def stored_part(
    tensor: torch.Tensor,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    stored: tuple[int, ...],
) -> torch.Tensor | None:
    """Returns the part of a target's box that is stored, or None if no part is.

        stored (3, 2)    # # .      target (2, 3): the part `#` is loaded, `.` is
                         # # .      left unchanged; the stored row `o` is not read
                         o o

    Args:
        tensor: The tensor that holds the box.
        offset: Where the box starts in the whole target.
        size: Its lengths.
        stored: The stored shape.
    """
    if 0 in size:
        return None
    if len(stored) != len(size):
        return tensor  # A mismatch, reported with all others.
    end = tuple(max(0, min(n, s - o)) for o, n, s in zip(offset, size, stored, strict=True))
    if end == tuple(size):
        return tensor
    part = tensor.detach()
    for dim, length in enumerate(end):
        if length < size[dim]:
            part = part.narrow(dim, 0, length)
    return None if 0 in end else part


Place = tuple[Any, Any]
"""A container of the state dict and a key in it."""

_TENSOR, _OBJECT = int(Kind.TENSOR), int(Kind.OBJECT)


class Placing:
    """Collects the place of every value to load; call `check` before using it.

    Attributes:
        table: The chunk table; its chunks are not used before `take_chunks`.
        options: Options of the load.
        decisive: FQNs of what is loaded before any target changes.
        early: Boxes like `raw` and `opaque`, of the tensors in `decisive`.
        raw: Boxes of raw tensor bytes.
        opaque: Boxes of tensors whose chunks only `torch.load` understands.
        objects: `(number in the table, FQN, place)` of Python objects.
        loaded: FQNs that are loaded.
        cast: `(FQN, stored dtype, target dtype)` of targets whose dtypes differ.
        resized: `(FQN, stored shape, target shape)` of targets that `options.resize` lets differ.
    """

    def __init__(
        self, table: ChunkTable, options: LoadOptions, decisive: Collection[str] = ()
    ) -> None:
        self.table = table
        self.options = options
        self.decisive = decisive
        self.early, self.raw, self.opaque = (Boxes(), Boxes()), Boxes(), Boxes()
        self.objects: list[tuple[int, str, Place]] = []
        self.loaded: list[str] = []
        self.cast: list[tuple[str, str, str]] = []
        self._layouts: Layouts = {}
        self.resized: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._free = {pattern: dims_of(dims) for pattern, dims in options.resize.items()}
        self._fresh: list[tuple[Place, torch.Tensor, Fresh]] = []
        self._tied: list[tuple[Place, torch.Tensor]] = []
        self._placed: dict[int, Any] = {}
        self._mismatches: list[str] = []
        self._differ_in_size: list[str] = []
        self._unsupported: list[str] = []
        self._not_tensors: list[str] = []
        self._kinds = table.kind.tolist()
        self._shapes = _shapes(table)
        self._dtype_codes = table.dtype.tolist()
        self._dtypes: dict[int, torch.dtype] = {}
        self._first_chunk = np.zeros(0, np.int64)

    def take_tied(self, flat: Flat) -> None:
        """Adds targets whose memory other targets fill; see `_without_tied`."""
        places = zip(flat.parents, flat.keys, strict=True)
        self._tied.extend(zip(places, flat.values, strict=True))

    def take_chunks(self, table: ChunkTable) -> None:
        """Sets the table with the chunks.

        Args:
            table: The same table, with all chunks of the values that have a place.
        """
        self.table = table
        self._first_chunk = first_chunks(table)

    def fill(self, flat: Flat, index: Mapping[str, int]) -> None:
        """Finds a place for every value that the checkpoint has.

        Args:
            flat: The state dict.
            index: Number of each FQN's tensor in the table.
        """
        # The None at the end is the dtype of objects: index -1.
        known: list[torch.dtype | None] = [*map(find_dtype, self.table.dtypes), None]
        # None for complex dtypes: only such tensors may be conjugate views, which others need not
        # check.
        usual = [dtype if dtype and not dtype.is_complex else None for dtype in known]
        direct = [
            usual[code] if kind == _TENSOR else None
            for code, kind in zip(self._dtype_codes, self._kinds, strict=True)
        ]
        loaded, strided = self.loaded.append, torch.strided
        shapes = self._shapes
        numbers: list[int] = []
        targets: list[torch.Tensor] = []
        for fqn, value, parent, key in zip(
            flat.names, flat.values, flat.parents, flat.keys, strict=True
        ):
            number = index.get(fqn)
            if number is None:
                continue
            loaded(fqn)
            cls = type(value)
            try:
                # Why first, and inline: nearly all values of a large state dict are of this kind.
                is_direct = (
                    (cls is torch.Tensor or cls is torch.nn.Parameter)
                    and value.dtype is direct[number]
                    and value.shape == shapes[number]
                    and value.is_cpu
                    and value.is_contiguous()
                    and not value.is_neg()
                    and value.layout is strided
                    and not hasattr(value, "global_shape")
                    and fqn not in self.decisive
                )
            except RuntimeError:  # layouts without strides or shape
                is_direct = False
            if is_direct:
                numbers.append(number)
                targets.append(value)
                continue
            try:
                if self._kinds[number] == _OBJECT:
                    self._object(fqn, (parent, key), number)
                elif isinstance(value, torch.Tensor) or is_sharded(value):
                    self._tensor(fqn, value, (parent, key), number)
                else:
                    self._not_tensors.append(f"{fqn!r} ({cls.__qualname__})")
            except UnsupportedValueError as error:
                self._unsupported.append(error.message)
        # Why not `unsupported_reason` for each: the other reasons were checked above.
        for target in [
            target
            for target in targets
            if target.untyped_storage().nbytes() < target.nbytes
            or target.storage_offset()
            or not target.data_ptr()
        ]:
            if (reason := no_target_reason(target) or lost_memory(target)) is not None:
                fqn = next(n for n, v in zip(flat.names, flat.values, strict=True) if v is target)
                self._unsupported.append(f"{fqn!r} {reason}")
        rows = np.array(numbers, np.int64)
        sizes = np.array([dtype.itemsize if dtype else 0 for dtype in known], np.int64)
        itemsize = sizes[self.table.dtype[rows]]
        self.raw.add_direct(rows, targets, self.table.shape[rows], itemsize)

    def check(self) -> None:
        """Raises the errors that prevent this load.

        Raises:
            UnsupportedValueError: Targets can't be written to.
            ShapeMismatchError: Shapes or dtypes don't match.
            StateDictError: A tensor is stored under a name whose value in the state dict is no
                tensor.
        """
        if self._unsupported:
            raise UnsupportedValueError(
                f"{len(self._unsupported)} value(s) of the state dict can't be loaded into: "
                + listed(self._unsupported, "; ")
            )
        if self._mismatches:
            what, way_out = "Dtype", ""
            if self._differ_in_size:
                what, way_out = "Size", self._way_out(self._differ_in_size)
            raise ShapeMismatchError(
                f"{what} mismatch between saved and current for {len(self._mismatches)} value(s): "
                + "; ".join(self._mismatches)
                + way_out
            )
        if self._not_tensors:
            raise StateDictError(
                "the checkpoint holds tensors where the state dict holds none, expected tensors of "
                f"the saved shapes as targets: {', '.join(self._not_tensors)}"
            )

    def _way_out(self, names: Sequence[str]) -> str:
        """Returns what to do about values of the checkpoint that differ in size from targets."""
        # All of a layer, or of the state of a parameter, as a part of it is of no use.
        layers = [name.rpartition(".")[0] for name in names]
        left_out = dict.fromkeys(
            f"{layer}." if "." in layer else name for layer, name in zip(layers, names, strict=True)
        )
        shown = tuple(left_out) if len(left_out) > 1 else repr(*left_out)
        return (
            f". Use targets of the saved shapes; or leave these out, as for a layer that is new, "
            f"with LoadOptions(strict=False, key_map=lambda name: None if name.startswith("
            f"{shown}) else name), or by naming all others in LoadOptions(prefixes=[...])"
            f"; or load the part that both have with LoadOptions(resize={{name: dim}})"
        )

    def object_takers(self, own: OwnValues) -> Iterator[tuple[int, ObjectTaker]]:
        """Yields the chunk of each object and `PerRank` value, and the taker of its bytes."""
        for place, (number, fqn, _) in enumerate(self.objects):
            if fqn not in self.decisive:
                yield int(self._first_chunk[number]), self._setter(fqn, partial(self._put, place))
        for number, fqn in own.numbers:
            yield int(self._first_chunk[number]), self._setter(fqn, partial(own.take, number))

    def decisive_takers(self) -> Iterator[tuple[int, ObjectTaker]]:
        """Yields the chunk of each object that is in `decisive`, and the taker of its bytes."""
        for place, (number, fqn, _) in enumerate(self.objects):
            if fqn in self.decisive:
                yield int(self._first_chunk[number]), self._setter(fqn, partial(self._put, place))

    def finish_decisive(self) -> None:
        """Stores what is in `decisive` in its containers."""
        for boxes in self.early:
            boxes.sink.finish()
        for number, (_, fqn, (parent, key)) in enumerate(self.objects):
            if fqn in self.decisive:
                parent[key] = self._placed[number]

    def without_chunk(self, own: OwnValues) -> list[str]:
        """Returns the FQNs of objects that have no stored chunk."""
        wanted = [(number, fqn) for number, fqn, _ in self.objects] + own.numbers
        return [fqn for number, fqn in wanted if self._first_chunk[number] < 0]

    def finish(self) -> None:
        """Stores new tensors and the objects in their containers."""
        with collector_paused():
            self._store_fresh()
        for number, (_, _, (parent, key)) in enumerate(self.objects):
            parent[key] = self._placed[number]
        self.raw.sink.finish()

    def _store_fresh(self) -> None:
        """Stores new tensors in their containers.

        Those whose targets were of one memory, as those of tied weights, are of one memory too, if
        their values agree.
        """
        first: dict[tuple[Any, ...], tuple[torch.Tensor, Any]] = {}
        for (parent, key), target, fresh in self._fresh:
            value = fresh.value
            tied, before = first.setdefault(_place(target), (target, value))
            if before is not value and _digests(before) == _digests(value):
                value = _alias(before, target, is_one=tied is target)
            parent[key] = value
        for (parent, key), target in self._tied:
            if (place := _place(target)) in first:
                tied, value = first[place]
                parent[key] = _alias(value, target, is_one=tied is target)

    def _put(self, place: int, value: Any) -> None:
        self._placed[place] = value

    def _setter(self, fqn: str, put: Callable[[Any], None]) -> ObjectTaker:
        weights_only = self.options.weights_only
        return lambda data: put(load_object(data, fqn=fqn, weights_only=weights_only))

    def _object(self, fqn: str, place: Place, number: int) -> None:
        _check_replaceable(fqn, place)
        self.objects.append((number, fqn, place))

    def _tensor(self, fqn: str, value: Any, place: Place, number: int) -> None:
        is_whole = not is_sharded(value)
        if is_whole:
            if (reason := no_target_reason(value)) is not None:
                raise UnsupportedValueError(f"{fqn!r} {reason}")
            box = ((0,) * value.dim(), tuple(value.shape))
            held = Sharded(box[1], value.dtype, value.requires_grad, (box,), (value,))
        else:
            held = sharded(value, fqn, self._layouts, saving=False)
        stored = self._check_fit(fqn, held.shape, held.dtype, number)
        # Why not raw for a tensor without elements either: only its item contains its class.
        is_raw = self._kinds[number] == _TENSOR and not (
            0 in held.shape and type(value) is AsStored
        )
        raw, opaque = self.early if fqn in self.decisive else (self.raw, self.opaque)
        boxes = raw if is_raw else opaque
        keeps = self.options.dtype == "keep" and held.dtype != stored
        if keeps or any(tensor.is_meta for tensor in held.tensors):
            kept = stored if keeps else held.dtype
            fresh = self._add_fresh(fqn, value, place, kept, may_be_cast=keeps)
            taker = fresh_taker(value, kept != stored, kept, fqn, fresh) if is_whole else None
            for index, (offset, size) in enumerate(held.boxes):
                if 0 not in size or (is_whole and not is_raw):
                    boxes.add(number, offset, size, stored)
                    boxes.sink.add_late(partial(fresh.tensor, index), stored, taker)
            return
        for (offset, size), tensor in zip(held.boxes, held.tensors, strict=True):
            part = stored_part(tensor, offset, size, self._shapes[number])
            if part is not None:
                boxes.add(number, offset, tuple(part.shape), stored)
                self._add_target(fqn, part, stored, boxes.sink)

    def _add_target(
        self, fqn: str, tensor: torch.Tensor, stored: torch.dtype, sink: TensorSink
    ) -> None:
        reason = no_target_reason(tensor)
        if reason is None:
            sink.add(tensor, stored)
            reason = target_problem(tensor)
        if reason is not None:
            self._unsupported.append(f"{fqn!r} {reason}")

    def _add_fresh(
        self, fqn: str, value: Any, place: Place, dtype: torch.dtype, *, may_be_cast: bool
    ) -> Fresh:
        """Returns the new tensor that replaces a target, made when its first byte arrives."""
        if self.resized and self.resized[-1][0] == fqn:
            raise UnsupportedValueError(
                f"{fqn!r} is of another shape than is saved, and has no memory (meta device) or "
                f"another dtype: give it memory of the saved dtype before loading"
            )
        can_be_made = isinstance(value, DTensor) or is_checkpointable(value)
        if is_sharded(value) and not can_be_made:
            why = "is on the meta device: give it memory before loading"
            if may_be_cast:
                why = "can't be made with another dtype, as LoadOptions(dtype='keep') asks"
            raise UnsupportedValueError(f"{fqn!r}, a {type(value).__qualname__}, {why}")
        _check_replaceable(fqn, place)

        def made() -> Any:
            try:
                return fresh_value(value, dtype)
            except NotImplementedError as error:  # raised by a user class
                raise UnsupportedValueError(
                    f"{fqn!r} is on the meta device, and its class can't make one with memory "
                    f"({error}): give it memory before loading",
                    key=fqn,
                ) from error

        fresh = Fresh(made, fqn)
        self._fresh.append((place, value, fresh))
        return fresh

    def _may_differ(self, fqn: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Returns whether `options.resize` lets two shapes differ."""
        ndim = len(stored)
        free = {
            dim % ndim
            for pattern, dims in self._free.items()
            if fnmatchcase(fqn, pattern)
            for dim in dims
            if -ndim <= dim < ndim
        }
        return ndim == len(shape) and all(
            a == b or dim in free for dim, (a, b) in enumerate(zip(stored, shape, strict=True))
        )

    def _check_fit(
        self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, number: int
    ) -> torch.dtype:
        """Records what does not match; returns the stored dtype."""
        code = self._dtype_codes[number]
        stored = self._dtypes.get(code)
        if stored is None:
            stored = self._dtypes[code] = dtype_of(self.table.dtypes[code], fqn=fqn)
        if shape != self._shapes[number]:
            is_lost = 0 in shape and 0 not in self._shapes[number]
            if is_lost or not self._may_differ(fqn, self._shapes[number], shape):
                self._differ_in_size.append(self.table.names[number])
                why = ", which takes nothing of it" if is_lost else ""
                self._mismatches.append(
                    f"{fqn!r} is saved as {self._shapes[number]} and wanted as {shape}{why}"
                )
                return stored
            self.resized.append((fqn, self._shapes[number], shape))
        if stored != dtype and self.options.dtype != "keep":
            problem = cast_problem(stored, dtype, self.options)
            if problem is None:
                self.cast.append((fqn, dtype_name(stored), dtype_name(dtype)))
            else:
                self._mismatches.append(f"{fqn!r} is {problem}")
        return stored


def cast_problem(stored: torch.dtype, dtype: torch.dtype, options: LoadOptions) -> str | None:
    """Returns why values may not be cast, and the way out, as half a sentence; None if they may."""
    policy = options.dtype
    if policy == "cast" or (policy == "widen" and loses_nothing(stored, dtype)):
        return None
    why = "may lose values" if policy == "widen" else "LoadOptions(dtype='error') forbids"
    return (
        f"saved as {dtype_name(stored)} and wanted as {dtype_name(dtype)}, a cast that {why}: use "
        f"a target of the saved dtype, or LoadOptions(dtype='cast')"
    )


def _check_replaceable(fqn: str, place: Place) -> None:
    if not hasattr(type(place[0]), "__setitem__"):
        raise UnsupportedValueError(
            f"{fqn!r} sits in a {type(place[0]).__qualname__}, in which a loaded value can't be "
            "put: use a dict or a list",
            key=fqn,
        )


def _shapes(table: ChunkTable) -> list[tuple[int, ...]]:
    if (table.ndim == table.shape.shape[1]).all():
        return list(map(tuple, table.shape.tolist()))
    return [
        tuple(shape[:ndim])
        for shape, ndim in zip(table.shape.tolist(), table.ndim.tolist(), strict=True)
    ]


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
    """Plans where the bytes of a checkpoint go in a state dict.

    Args:
        state_dict: The state dict to load into, in place; tensors keep their identity.
            `state_dict()` of top-level `Stateful` values is called now, and `finish` passes the
            loaded state back to them. Nothing else changes before the first byte arrives.
        table: The chunk table; with `narrow`, its chunks are not used.
        narrow: Returns the same table with all chunks of the given boxes, and of the tensors and
            objects with the given numbers; see `Checkpoint.narrow`.
        options: `strict`, `dtype`, `weights_only`, `key_map`, `prefixes` and
            `resize` are used.
        flatten_state_dict: See DCP's `DefaultLoadPlanner`.
        flatten_sharded_tensors: See DCP's `DefaultLoadPlanner`.
        stateful: Load into the state of top-level `Stateful` values; DCP's `load_state_dict` passes
            False.
        rank: This rank, for `PerRank` values.
        world_size: Number of ranks that load.

    Raises:
        MissingKeyError: The checkpoint lacks keys; the message names five, with similar keys that
            it has.
        ShapeMismatchError: Global shapes differ, or dtypes differ in a way that `options.dtype`
            forbids; the message names all of them.
        StateDictError: There are unexpected keys and `options.strict` is True, or there are
            unexpected keys of a module or optimizer and `options.strict` is not False; or the value
            for a stored tensor is no tensor.
        UnsupportedValueError: A target can't be written to.
        InvalidRequestError: `options.key_map` or `options.prefixes` does not fit the checkpoint.

    Complexity: linear; about 2.5 us for a plain CPU tensor.

    Source: `torch/distributed/checkpoint/default_planner.py`, `DefaultLoadPlanner`.
    """
    options = options or LoadOptions()
    prefixes = tuple(options.prefixes)
    index: Mapping[str, int] = stored_names(table.names, options.key_map)
    loaded = None
    if stateful:
        index = asked_names(state_dict, index)
        stored = Stored.of_table(table, index)
        loaded = stateful_to_load_targets(state_dict, stored, prefixes, strict=options.strict)
    decisive = set() if loaded is None else set().union(*loaded.decisive.values())
    placing = Placing(table, options, decisive)
    with collector_paused():
        values = state_dict if loaded is None else loaded.values
        if flatten_state_dict:
            flat = _matching_flat(values, index)
        else:
            flat = flatten_top(values, flatten_sharded_tensors=flatten_sharded_tensors)
            # A stored mapping is loaded as one object.
            flat = replace(flat, empty=flat.empty - index.keys())
        flat, tied = _without_tied(_select_wanted(flat, prefixes), index)
        own = OwnValues(flat, index, rank, world_size)
        missing, unexpected = _compare_keys(own, index, table.names, options)
        lost = plain_state_lost(state_dict, values, unexpected, table.names, index)
        refused = [*must_be_taken(state_dict, unexpected, strict=options.strict), *lost]
        if world_size == 1 and refused:
            likely = () if loaded is None else loaded.left
            told = dict.fromkeys([*refused, *(name for name in index if name in likely)])
            check_all_taken([*told], strict=options.strict, lost_state=lost)
        placing.fill(own.rest, index)
        placing.take_tied(tied)
        placing.check()
    whole = [number for number, _, _ in placing.objects]
    whole += [number for number, _ in own.numbers]
    wanted = [boxes.wanted() for boxes in (placing.raw, placing.opaque, *placing.early)]
    placing.take_chunks(table if narrow is None else narrow(wanted, whole))
    late: list[Cast] = []

    def finish() -> None:
        placing.finish()
        own.finish()
        if loaded is not None:
            loaded.put_back(state_dict)
            late.extend(loaded.casts)

    def check_groups() -> None:
        placing.finish_decisive()
        left = set() if loaded is None else loaded.check_groups()
        if left:
            names = [table.names[number] for name, number in index.items() if name in left]
            needed = must_be_taken(state_dict, names, strict=options.strict)
            if world_size == 1:
                check_all_taken(needed, strict=options.strict)
            targets.leave(left, names, needed)

    with collector_paused():
        first = None
        if decisive:
            takers = placing.decisive_takers()
            first = Targets(
                placing.table, options, *placing.early, objects=takers, finish=check_groups
            )
        targets = Targets(
            placing.table,
            options,
            placing.raw,
            placing.opaque,
            objects=placing.object_takers(own),
            decisive=first,
            without_chunk=placing.without_chunk(own),
            finish=finish,
            loaded=(*placing.loaded, *own.loaded, *tied.names),
            missing=missing,
            unexpected=unexpected,
            refused=None if world_size == 1 else refused,
            lost_state=lost,
            cast=tuple(placing.cast),
            late_cast=late,
            resized=tuple(placing.resized),
            whole=() if loaded is None else loaded.whole,
        )
    return targets


def plain_state_lost(
    state_dict: Mapping[str, Any],
    values: Mapping[str, Any],
    unexpected: Collection[str],
    stored: Sequence[str],
    index: Mapping[str, int],
) -> list[str]:
    """Returns names of stored state that plain state dicts of optimizers have no place for.

    Args:
        state_dict: The user's argument of `load`.
        values: The state to load into, by the same keys.
        unexpected: Names of the checkpoint that are not requested.
        stored: Names of the checkpoint.
        index: Names that can be requested, with their numbers in the checkpoint.
    """
    left, owned = {*unexpected}, owner_names(state_dict)
    asked = {
        name: stored[number]
        for name, number in index.items()
        if stored[number] in left and not below(name, owned)
    }
    return [asked[name] for name in lost_state(values, asked)]


def _select_wanted(flat: Flat, prefixes: tuple[str, ...]) -> Flat:
    """Returns the values of the state dict that are loaded."""
    if prefixes:
        rows = [row for row, name in enumerate(flat.names) if below(name, prefixes)]
        if not rows:
            raise InvalidRequestError(
                f"LoadOptions.prefixes are {', '.join(map(repr, prefixes))}, but the state dict "
                f"has no key at or below one of them",
                key="prefixes",
            )
        flat = flat.only(rows)
    # Why: an empty mapping has nothing to load into, and DCP ignores it.
    if flat.empty:
        flat = flat.only([row for row, name in enumerate(flat.names) if name not in flat.empty])
    return flat


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for targets of the same memory, or of one storage on `meta`."""
    parts = parts_with_memory(tensor, or_meta=True)
    # Why: tensors on meta have no address, and all empty ones have the same.
    owners = [
        (part.dtype, part.stride(), part.storage_offset(), part.untyped_storage()._cdata)
        for part in parts
        if part.is_meta or not part.numel()
    ]
    return (*tensor.shape, *geometry(tensor), *owners) if parts else (id(tensor),)


def _digests(value: torch.Tensor) -> list[tuple[Any, int]]:
    """Returns the dtypes of the parts of a tensor, and digests of their values."""
    parts = parts_with_memory(value)
    return [(part.dtype, content_digest(part)) for part in parts] or [(None, id(value))]


def _alias(value: torch.Tensor, target: torch.Tensor, *, is_one: bool) -> torch.Tensor:
    """Returns a loaded value for a second name.

    Args:
        value: The value of the first name.
        target: The target of the second name.
        is_one: Whether both names had one tensor, and not two of the same memory.
    """
    if is_one:
        return value
    if isinstance(target, torch.nn.Parameter):
        may_learn = value.is_floating_point() or value.is_complex()
        return torch.nn.Parameter(value.detach(), requires_grad=target.requires_grad and may_learn)
    return value.detach()


def _without_tied(flat: Flat, index: Mapping[str, int]) -> tuple[Flat, Flat]:
    """Leaves out targets that the checkpoint lacks, but whose memory other targets fill.

    Models of the Hugging Face hub have one name for weights that are tied.

    Args:
        flat: The state dict.
        index: Names that can be requested, with their numbers in the checkpoint.

    Returns:
        The other values, and those that were left out.
    """
    rows = [
        row
        for row, (name, value) in enumerate(zip(flat.names, flat.values, strict=True))
        if name not in index and isinstance(value, torch.Tensor)
    ]
    if not rows:
        return flat, Flat()
    filled = {
        _place(value)
        for name, value in zip(flat.names, flat.values, strict=True)
        if name in index and isinstance(value, torch.Tensor)
    }
    tied = [row for row in rows if _place(flat.values[row]) in filled]
    left_out = set(tied)
    kept = [row for row in range(len(flat.names)) if row not in left_out]
    return flat.only(kept), flat.only(tied)


def _compare_keys(
    own: OwnValues,
    index: Mapping[str, int],
    stored: Sequence[str],
    options: LoadOptions,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the keys that the checkpoint lacks, and its keys that are not requested.

    Args:
        own: The state dict, with its per-rank values.
        index: Names that can be requested, with their numbers in the checkpoint.
        stored: Names of the checkpoint.
        options: Only `strict`, `key_map` and `prefixes` are used.

    Raises:
        MissingKeyError: The checkpoint lacks keys, and `options` make this an error.
    """
    rest = own.rest
    missing = (*(name for name in rest.names if name not in index), *own.missing)
    unexpected: tuple[str, ...] = ()
    num_asked = len(rest.names) + len(own.asked) + len(rest.empty & index.keys())
    # Why first: usually no key is missing or unexpected, and sets of all names take time.
    if missing or num_asked != len(stored):
        asked, prefixes = {*rest.names, *own.asked, *rest.empty}, options.prefixes
        unexpected = tuple(
            stored[number]
            for name, number in index.items()
            if name not in asked and (not prefixes or below(name, prefixes))
        )
        if not prefixes:
            mapped = set(index.values())
            unexpected += tuple(name for i, name in enumerate(stored) if i not in mapped)
    if missing and options.strict is not False:
        raise _missing_error(missing, unexpected)
    return (*missing, *own.kept), unexpected


def _matching_flat(loaded: Mapping[str, Any], index: Mapping[str, int]) -> Flat:
    """Flattens the state dict; by the rules before torch 2.4 if the checkpoint follows those."""
    flat = flatten(loaded)
    lacking = [name for name in flat.names if name not in index]
    if not lacking or flat.empty.issuperset(lacking):
        return flat
    old = flatten(loaded, before_2_4=True)
    new_names = set(flat.names)
    return old if any(name in index and name not in new_names for name in old.names) else flat


_MOST_SHOWN = 5


def _missing_error(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> MissingKeyError:
    lines = []
    for name in missing[:_MOST_SHOWN]:
        close = get_close_matches(name, _candidates(name, unexpected), n=2)
        hint = f" (the checkpoint has {' and '.join(map(repr, close))})" if close else ""
        lines.append(f"  {name!r}{hint}")
    if len(missing) > _MOST_SHOWN:
        lines.append(f"  … and {len(missing) - _MOST_SHOWN} more")
    count = f"{len(missing)} key{'' if len(missing) == 1 else 's'}"
    return MissingKeyError(
        "\n".join(
            [
                f"Missing key in checkpoint state_dict: {count} of the state dict",
                *lines,
                "Load a checkpoint that has them, or leave their values as they are with "
                "LoadOptions(strict=False)",
            ]
        ),
        key=missing[0],
    )


def _candidates(name: str, unexpected: tuple[str, ...]) -> list[str]:
    # Why: comparing a name takes 10 us or more, and checkpoints hold many names.
    last = name.rpartition(".")[2]
    same = [other for other in unexpected if other.rpartition(".")[2] == last]
    return (same or list(unexpected))[:1000]
