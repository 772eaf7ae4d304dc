"""What one rank loads: the wanted boxes, with the memory that they go to.

A box is *raw* if the read path fills it with bytes, and *opaque* if its chunks are `torch.save`
items that only torch can read (tensor subclasses). Items of foreign checkpoints may lack raw bytes
too (stream transforms, subclasses); these are copied into the raw boxes that they meet.

Names that share memory, such as tied weights or views of one tensor, are valid targets if their
stored values agree. If these differed, one name would be verified where the bytes of the other were
just written, and an intact checkpoint would be reported as damaged. So they are compared before the
first target changes: by the checksums of the chunk table if these are conclusive, else by a load
into separate memory (`Targets.trials`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ray_dcp.commit_protocol.messages import Untaken
from ray_dcp.core.values import ChunkTable, Int64Array, volume
from ray_dcp.errors import (
    CoverageError,
    DamagedCheckpointError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import ReadPlan, Wanted, plan_reads
from ray_dcp.torch_adapter.content_digests import bytes_digest
from ray_dcp.torch_adapter.flatten import listed
from ray_dcp.torch_adapter.objects import load_object
from ray_dcp.torch_adapter.optimizer_state import Cast, check_all_taken
from ray_dcp.torch_adapter.sink import (
    Boxes,
    TensorSink,
    geometry,
    rows_that_overlap,
    rows_that_share,
)
from ray_dcp.torch_adapter.subclass_copy import copy_into
from ray_dcp.torch_adapter.tensors import dtype_of, extent, host_bytes, is_plain, parts_with_memory

ObjectTaker = Callable[[bytes], None]
"""Processes the verified bytes of one item (`torch.save` output)."""


def _do_nothing() -> None:
    """The `finish` of loads that have nothing to store."""


class Targets:
    """The wanted boxes and objects of one rank in one load.

    The order of calls: `check_coverage(plan_reads(table, wanted))`; then every load of `trials`;
    then, when every rank is ready, every `(chunk, taker)` of `objects` is called with
    `read_item(chunk)`, which changes no target; then `read_chunks` fills `sink`, and `place_item`
    receives the items of tensor chunks that have no raw bytes; then the takers of `whole_items` are
    called; then `finish()` once, after which the state dict is loaded.

    Args:
        table: The chunk table.
        options: Options of the load.
        raw: Boxes of raw tensor bytes, and their sink.
        opaque: Boxes of tensors whose chunks only `torch.load` understands, and their sink.
        objects: `(chunk, taker)` of Python objects.
        without_chunk: FQNs of objects that have no stored chunk.
        finish: Stores objects and new tensors in the state dict, and calls `load_state_dict` of
            every top-level `Stateful`.
        late_cast: Like `cast`, filled by `finish`: state that objects cast when they received it.
        loaded: See the attribute; so are the other arguments.

    Attributes:
        wanted: The boxes of raw tensor bytes.
        sink: The memory that they are written to.
        objects: `(chunk, taker of its verified bytes)` for Python objects.
        whole_items: The same for opaque boxes.
        decisive: What has to be loaded before all else, the first of `trials`; None if nothing has.
            Its `finish` raises if the rest can't be loaded.
        loaded: FQNs that are loaded, in order of the state dict.
        missing: FQNs that the checkpoint lacks (only with `strict=False`).
        unexpected: FQNs of the checkpoint that the state dict does not request.
        cast: `(FQN, stored dtype, target dtype)` of targets whose dtypes differ.
        resized: `(FQN, stored shape, target shape)` of targets whose shapes differ.
        refused: The part of `unexpected` that some rank has to load; None if no other rank may.
        lost_state: The part of `refused` that is state without a place in a plain state dict of an
            optimizer.
        whole: Top-level keys whose state the load replaces completely.
    """

    def __init__(
        self,
        table: ChunkTable,
        options: LoadOptions,
        raw: Boxes,
        opaque: Boxes,
        *,
        objects: Iterable[tuple[int, ObjectTaker]] = (),
        decisive: Targets | None = None,
        without_chunk: Sequence[str] = (),
        finish: Callable[[], None] = _do_nothing,
        late_cast: Sequence[Cast] = (),
        loaded: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        cast: tuple[Cast, ...] = (),
        resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (),
        refused: Sequence[str] | None = None,
        lost_state: Collection[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        self._table = table
        self._options = options
        self.wanted, self.sink = raw.wanted(), raw.sink
        self._opaque, self._opaque_sink = opaque.wanted(), opaque.sink
        self._opaque_plan = plan_reads(table, self._opaque)
        for wanted, sink in ((self.wanted, self.sink), (self._opaque, self._opaque_sink)):
            sink.names = tuple(map(table.names.__getitem__, wanted.tensor.tolist()))
            sink.policy = options.dtype
        self._subclassed: set[int] = set()
        self._without_chunk = without_chunk
        self.objects = tuple(objects)
        self.whole_items = self._opaque_takers()
        self.decisive = decisive
        self.finish = finish
        self._late_cast = late_cast
        self.loaded, self.missing, self.unexpected = loaded, missing, unexpected
        self.cast, self.resized = cast, resized
        self._refused, self._lost_state, self.whole = refused, lost_state, whole

    def all_casts(self) -> tuple[Cast, ...]:
        """Returns all casts, once the state is loaded."""
        rounded = chain(self.sink.casts, self._opaque_sink.casts)
        return tuple(dict.fromkeys((*self.cast, *rounded, *self._late_cast)))

    def check_coverage(self, plan: ReadPlan) -> None:
        """Checks that every wanted byte and object is stored.

        Args:
            plan: The result of `plan_reads` for `wanted`.

        Raises:
            CoverageError: Some are stored nowhere.
        """
        missing: dict[str, int] = dict.fromkeys(self._without_chunk, 0)
        for sink, uncovered in (
            (self.sink, plan.uncovered), (self._opaque_sink, self._opaque_plan.uncovered)
        ):  # fmt: skip
            for row, num_bytes in uncovered:
                missing[sink.names[row]] = missing.get(sink.names[row], 0) + num_bytes
        if missing:
            shown = ", ".join(f"{name!r} ({count} bytes)" for name, count in missing.items())
            raise CoverageError(
                f"the checkpoint has no bytes for parts of {len(missing)} value(s) that are to be "
                f"loaded: {shown}; nothing was changed: load another checkpoint",
                key=next(iter(missing)),
            )
        if self.decisive is not None:
            self.decisive.check_coverage(plan_reads(self._table, self.decisive.wanted))

    def refuse(self, lost_state: Collection[str]) -> None:
        """Registers state without a place in an optimizer's state dict, if no rank has one."""
        self._refused = self._lost_state = tuple(lost_state)

    def leave(self, names: Collection[str], stored: Sequence[str], refused: Sequence[str]) -> None:
        """Registers what turned out to belong to nothing in the state dict.

        Args:
            names: Names that were to be loaded.
            stored: Their names in the checkpoint.
            refused: The part of `stored` that some rank has to load.
        """
        self.loaded = tuple(name for name in self.loaded if name not in names)
        self.unexpected += tuple(stored)
        self._refused = None if self._refused is None else (*self._refused, *refused)

    @property
    def untaken(self) -> Untaken | None:
        """Parts of the checkpoint that this rank does not load, but other ranks may."""
        if not self.unexpected or self._refused is None:
            return None
        return Untaken.of(self._table.names, self.unexpected, self._refused)

    def check_taken(self, untaken: Untaken) -> None:
        """Raises if no rank loads a part of the checkpoint that must be loaded.

        Args:
            untaken: The combined result of all ranks.

        Raises:
            StateDictError: There is such a part.
        """
        check_all_taken(
            untaken.refused_of(self._table.names),
            strict=self._options.strict,
            lost_state=self._lost_state,
        )

    # --- items of torch.save ---------------------------------------------------------------------

    def place_item(self, chunk: int, data: bytes) -> None:
        """Copies a whole `torch.save` item of a tensor chunk into every raw box that it meets.

        Raises:
            UnsafeCheckpointError: The item names a class that is not on the allow-list.
            DamagedCheckpointError: The item is no tensor of the chunk's shape.
        """
        rows = np.flatnonzero(self.wanted.tensor == self._table.tensor[chunk]).tolist()
        self._place(chunk, data, rows, self.wanted, self.sink)

    def _opaque_takers(self) -> list[tuple[int, ObjectTaker]]:
        """Returns every wanted chunk of the opaque boxes, with the taker of its item."""
        rows: dict[int, list[int]] = {}
        plan = self._opaque_plan
        for chunk, row in zip(plan.chunk.tolist(), plan.wanted.tolist(), strict=True):
            rows.setdefault(chunk, []).append(row)
        # A tensor without elements needs no byte, but its item contains its class and context.
        first = first_chunks(self._table)
        for row in np.flatnonzero(volume(self._opaque.size) == 0).tolist():
            if (chunk := int(first[self._opaque.tensor[row]])) >= 0:
                rows.setdefault(chunk, []).append(row)
        return [(chunk, self._opaque_taker(chunk, some)) for chunk, some in rows.items()]

    def _opaque_taker(self, chunk: int, rows: list[int]) -> ObjectTaker:
        return lambda data: self._place(chunk, data, rows, self._opaque, self._opaque_sink)

    def _place(
        self, chunk: int, data: bytes, rows: Sequence[int], wanted: Wanted, sink: TensorSink
    ) -> None:
        stored = self._load(chunk, data)
        ndim = stored.dim()
        origin, size = self._table.offset[chunk, :ndim], self._table.size[chunk, :ndim]
        for row in rows:
            start, length = wanted.offset[row, :ndim], wanted.size[row, :ndim]
            low = np.maximum(start, origin)
            common = np.minimum(start + length, origin + size) - low
            # Careful: a row that the chunk does not meet may be done, and has no buffer any more.
            is_empty = 0 in size and bool((start == origin).all() and (length == size).all())
            if is_empty or (common > 0).all():
                self._copy_part(row, sink, stored, low - start, low - origin, common)

    def _copy_part(
        self,
        row: int,
        sink: TensorSink,
        stored: torch.Tensor,
        start: Int64Array,
        origin: Int64Array,
        size: Int64Array,
    ) -> None:
        """Copies a part of a stored tensor into a part of a target."""
        is_raw = sink is self.sink
        if is_plain(stored):
            if is_raw and row not in self._subclassed:
                into = _narrow(sink.region(row), start, size)
                copy_into(into, _narrow(stored, origin, size))
                return
        elif sink.takes(row, stored):
            return
        target = sink.target(row)
        if is_plain(target) and is_plain(stored):
            copy_into(_narrow(target, start, size), _narrow(stored, origin, size))
            return
        if is_plain(target) and is_raw:
            target = sink.region(row)
        elif is_raw and sink.is_begun(row):
            raise UnsupportedValueError(
                f"{sink.names[row]!r} is saved in parts, of which some are a "
                f"{type(stored).__qualname__} and some plain tensors; load it into plain tensors",
                key=sink.names[row],
            )
        elif is_raw:
            self._subclassed.add(row)
        # Why both: a class need not support narrowing, but may support more.
        dims = [
            dim
            for dim, length in enumerate(size.tolist())
            if not length == target.size(dim) == stored.size(dim)
        ]
        narrow = partial(_narrow, size=size, dims=dims)
        sink.place(
            row,
            target,
            stored,
            look=None if is_plain(target) else partial(sink.afresh, row),
            cut=(partial(narrow, start=start), partial(narrow, start=origin)) if dims else None,
        )

    def _load(self, chunk: int, data: bytes) -> torch.Tensor:
        table = self._table
        number = int(table.tensor[chunk])
        fqn, ndim = table.names[number], int(table.ndim[number])
        loaded = load_object(data, fqn=fqn, weights_only=self._options.weights_only)
        size = tuple(table.size[chunk, :ndim].tolist())
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != size:
            found = tuple(loaded.shape) if isinstance(loaded, torch.Tensor) else type(loaded)
            raise DamagedCheckpointError(
                f"a chunk of {fqn!r} should be a tensor of shape {size}, but is {found}; load an "
                "earlier checkpoint",
                key=fqn,
            )
        return loaded

    # --- names of one memory ---------------------------------------------------------------------

    def trials(self) -> Iterator[Targets]:
        """Yields loads whose values show whether the rest can be loaded.

        These are those of `decisive`, and the values of names that share memory. Each load must
        be finished before the next one is requested; none of them changes a target.

        Raises:
            StateDictError: Names get different values for one place of memory.
        """
        if self.decisive is not None:
            yield self.decisive
        # Rows of opaque boxes are numbered after those of raw boxes here.
        differ: dict[tuple[str, str], None] = {}
        names = [*self.sink.names, *self._opaque_sink.names]
        sinks = (self.sink, self._opaque_sink)
        num_bytes = np.concatenate(
            [volume(each.size) * each.itemsize for each in (self.wanted, self._opaque)]
        )
        shared = rows_that_share(sinks, num_bytes)
        for rows in [*shared, *([row] for row in rows_that_overlap(sinks))]:
            for pair in (yield from self._differing(rows)):
                one, two = sorted(names[row] for row in pair)
                differ[one, two] = None
        if differ:
            pairs = [
                f"{one!r} and {two!r}" if one != two else f"elements of {one!r}"
                for one, two in differ
            ]
            shown = listed(pairs, "; ")
            raise StateDictError(
                f"{len(differ)} pair(s) of the state dict share memory, but the checkpoint has "
                f"different values for them: {shown}. Nothing was changed. Give each a tensor of "
                f"its own, as by .clone(), or load one of them alone",
                key=next(iter(differ))[1],
            )

    def _differing(self, rows: Sequence[int]) -> Generator[Targets, None, list[tuple[int, int]]]:
        """Returns pairs of rows whose values differ where they share memory.

        A row whose own elements differ is a pair with itself. Yields trial loads.
        """
        targets = [sink.target(row) for _, sink, row in map(self._find, rows)]
        is_same = len(rows) > 1 and len(set(map(geometry, targets))) == 1
        # Why not with verify="never": the checksums were not read then.
        if is_same and self._options.verify != "never":
            checks = [self._checksums(row) for row in rows]
            if checks[0] and checks.count(checks[0]) == len(checks):
                return []
        overlay = None if is_same else _Overlay([parts_with_memory(target) for target in targets])
        contents, found = [], list[tuple[int, int]]()
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            values = yield from self._values(row)
            if overlay is None:
                contents.append([_content(value, target) for value in values])
                other = 0 if contents[-1] != contents[0] else None
            else:
                other = overlay.put(number, values, target)
            if other is not None:
                found.append((rows[other], row))
        return found

    def _checksums(self, row: int) -> dict[tuple[Any, ...], bytes]:
        """Returns the checksums of each chunk that meets a box, by kind and place in the box.

        Rows with equal checksums have equal values. Empty if a chunk has no checksums.
        """
        wanted, _, row = self._find(row)
        table, number = self._table, wanted.tensor[row]
        ndim = int(table.ndim[number])
        start, size = wanted.offset[row, :ndim], wanted.size[row, :ndim]
        found = {}
        for chunk in np.flatnonzero(table.tensor == number).tolist():
            low, length = table.offset[chunk, :ndim] - start, table.size[chunk, :ndim]
            if ((low < size) & (low + length > 0)).all():
                if not table.block_bytes[chunk]:
                    return {}
                numbers = (table.kind[number], table.dtype[number], table.payload_bytes[chunk])
                key = (*numbers, table.block_bytes[chunk], tuple(low), tuple(length))
                found[key] = table.checks[slice(*table.check_start[chunk : chunk + 2])].tobytes()
        return found

    def _find(self, row: int) -> tuple[Wanted, TensorSink, int]:
        """Returns the boxes, raw or opaque, of a combined row number, and the row in them."""
        num_raw = len(self.wanted)
        if row < num_raw:
            return self.wanted, self.sink, row
        return self._opaque, self._opaque_sink, row - num_raw

    def _values(self, row: int) -> Generator[Targets, None, list[torch.Tensor]]:
        """Returns the stored values of a row, after yielding a load into separate memory."""
        wanted, sink, row = self._find(row)
        found: list[torch.Tensor] = []

        def keep(chunk: int, data: bytes) -> None:
            found.append(self._load(chunk, data))

        if wanted is self._opaque:
            chunks = self._opaque_plan.chunk[self._opaque_plan.wanted == row].tolist()
            takers = [(chunk, partial(keep, chunk)) for chunk in chunks]
            yield Targets(self._table, self._options, Boxes(), Boxes(), objects=takers)
            return found
        number = int(wanted.tensor[row])
        ndim = int(self._table.ndim[number])
        offset, size = (tuple(each[row, :ndim].tolist()) for each in (wanted.offset, wanted.size))
        dtype = dtype_of(self._table.dtypes[self._table.dtype[number]])
        boxes, value = Boxes(), torch.empty(size, dtype=dtype, device="cpu")
        boxes.add(number, offset, size, dtype)
        boxes.sink.add(value, dtype)
        trial = Targets(self._table, self._options, boxes, Boxes())
        place, target = trial.place_item, sink.target(row)

        def keep_or_place(chunk: int, data: bytes) -> None:
            keep(chunk, data)
            if is_plain(target) or is_plain(found[-1]):
                found.pop()
                place(chunk, data)

        trial.place_item = keep_or_place  # type: ignore[method-assign]
        yield trial
        return found or [value]


class _Overlay:
    """Memory into which the values of targets are laid, to find places that get different ones.

    Args:
        parts: For each target the strided tensors that hold it. Those whose extents meet lie in
            one piece of memory.
    """

    def __init__(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        self._parts = parts
        every = [
            (str(one.device), one.data_ptr(), one.data_ptr() + extent(one))
            for some in parts
            for one in some
        ]
        runs: list[tuple[str, int, int]] = []
        for device, low, high in sorted(every):
            if runs and runs[-1][0] == device and low < runs[-1][2]:
                _, low, before = runs.pop()
                high = max(high, before)
            runs.append((device, low, high))
        owner = np.min_scalar_type(len(parts))
        self._runs = [
            (device, low, np.zeros(high - low, np.uint8), np.zeros(high - low, owner))
            for device, low, high in runs
        ]

    def put(self, number: int, values: Sequence[torch.Tensor], target: torch.Tensor) -> int | None:
        """Lays the value of a target over those before it.

        Args:
            number: Index of the target.
            values: Its stored value, in chunks.
            target: The target.

        Returns:
            A target before it, or itself, with another value at a common place; or one whose
            values can't be compared with this one as it is stored in parts; None if there is none.
        """
        parts = self._parts[number]
        inner = parts_with_memory(values[0]) if len(values) == 1 else []
        if is_plain(target) and len(inner) == 1:
            inner = [inner[0].to(target.dtype)]
        if [(one.dtype, one.shape) for one in inner] != [(one.dtype, one.shape) for one in parts]:
            return 0 if number else len(self._parts) - 1
        found = None
        for part, value in zip(parts, inner, strict=True):
            value = value.conj() if part.is_conj() else value
            data = host_bytes(-value if part.is_neg() else value)
            mine, owner = self._views(part)
            new = np.frombuffer(data, np.uint8).reshape(mine.shape)
            bad = owner[(owner != 0) & (mine != new)]
            mine[...], owner[...] = new, number + 1
            # Elements of this target that share a place.
            bad = bad if len(bad) else owner[mine != new]
            found = int(bad[0]) - 1 if len(bad) else found
        return found

    def _views(self, part: torch.Tensor) -> Iterator[np.ndarray]:
        """Yields the bytes of a part, and who they are of."""
        place = part.data_ptr()
        low, *memories = next(
            run[1:]
            for run in self._runs
            if run[0] == str(part.device) and 0 <= place - run[1] <= len(run[2])
        )
        for memory in memories:
            width = memory.itemsize
            yield np.ndarray(
                (*part.shape, part.itemsize),
                memory.dtype,
                buffer=memory,
                offset=(place - low) * width,
                strides=(*(step * part.itemsize * width for step in part.stride()), width),
            )


def _content(value: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """Returns what a value would be in a target: dtype, shape and digest of each inner tensor."""
    if is_plain(value) and is_plain(target):
        value = value.to(target.dtype)
    return [
        (part.dtype, tuple(part.shape), bytes_digest(host_bytes(part)))
        for part in parts_with_memory(value)
    ]


def _narrow(
    tensor: torch.Tensor,
    start: Int64Array,
    size: Int64Array,
    dims: Sequence[int] | None = None,
) -> torch.Tensor:
    for dim, (low, length) in enumerate(zip(start.tolist(), size.tolist(), strict=True)):
        # Why not always: tensor subclasses need not support narrowing.
        if length != tensor.size(dim) if dims is None else dim in dims:
            tensor = tensor.detach().narrow(dim, low, length)
    return tensor


# What the chunk table says


def first_chunks(table: ChunkTable) -> Int64Array:
    """Returns the first chunk of each tensor, -1 if it has none."""
    first = np.full(table.num_tensors, -1, np.int64)
    first[table.tensor[::-1]] = np.arange(table.num_chunks)[::-1]
    return first
