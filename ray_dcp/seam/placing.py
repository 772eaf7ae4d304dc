"""Each value of a state dict to the boxes that it wants of a chunk table, or to an object's place.

Which keys take part is decided in `targets`, what memory the bytes go into in `sink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ray_dcp.errors import (
    InternalError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.options import LoadOptions
from ray_dcp.plan.values import ChunkTable, Kind
from ray_dcp.seam.flatten import Flat
from ray_dcp.seam.fresh import fresh_dtensor, fresh_plain
from ray_dcp.seam.objects import load_object
from ray_dcp.seam.per_rank import OwnValues
from ray_dcp.seam.resizing import Resizing
from ray_dcp.seam.shards import Layouts, is_sharded, sharded
from ray_dcp.seam.sink import Fresh, TensorSink, is_writable
from ray_dcp.seam.tensors import dtype_name, dtype_of, find_dtype, loses_nothing, refusal
from ray_dcp.seam.wanted_boxes import Boxes

__all__ = ["ObjectTaker", "Placing"]

ObjectTaker = Callable[[bytes], None]
"""Takes the verified bytes of one item (`torch.save` output)."""

Place = tuple[Any, Any]
"""A container of the state dict and a key in it."""

_TENSOR, _OBJECT = int(Kind.TENSOR), int(Kind.OBJECT)


class Placing:
    """Where everything goes, in the making; `check` before it is used.

    Attributes:
        table: What the checkpoint holds; its chunks are not looked at before `take_chunks`.
        options: How to load.
        raw: Boxes of raw tensor bytes.
        opaque: Boxes of tensors whose chunks only `torch.load` understands.
        objects: `(number in the table, FQN, place)` of Python objects.
        loaded: FQNs that take part.
        cast: `(FQN, stored dtype, target dtype)` where they differ.
        resizing: Targets of other shapes than what is saved.
    """

    def __init__(
        self, table: ChunkTable, options: LoadOptions, *, flatten_sharded_tensors: bool
    ) -> None:
        self.table = table
        self.options = options
        self._itemsizes: dict[int, int] = {}
        self.raw = Boxes(self._itemsizes)
        self.opaque = Boxes(self._itemsizes)
        self.objects: list[tuple[int, str, Place]] = []
        self.loaded: list[str] = []
        self.cast: list[tuple[str, str, str]] = []
        self._flatten_sharded_tensors = flatten_sharded_tensors
        self._layouts = Layouts()
        self.resizing = Resizing(options)
        self._fresh: list[tuple[Place, Fresh]] = []
        self._placed: dict[int, Any] = {}
        self._mismatches: list[str] = []
        self._unsupported: list[str] = []
        self._not_tensors: list[str] = []
        self._kinds = table.kind.tolist()
        self._shapes = _shapes(table)
        self._dtype_codes = table.dtype.tolist()
        self._dtypes: dict[int, torch.dtype] = {}
        self._first_chunk = np.zeros(0, np.int64)

    def take_chunks(self, table: ChunkTable) -> None:
        """Takes where the chunks are.

        Args:
            table: As before, with all chunks of what found a place.
        """
        self.table = table
        self._first_chunk = _first_chunks(table)

    def fill(self, flat: Flat, index: Mapping[str, int]) -> None:
        """Finds a place for every value that the checkpoint has.

        Args:
            flat: The state dict.
            index: FQN to number of the tensor in the table.
        """
        direct, loaded = self._direct_dtypes(), self.loaded.append
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
            # Why first, and inline: nearly all values of a large state dict are of this kind.
            if (
                (cls is torch.Tensor or cls is torch.nn.Parameter)
                and value.dtype is direct[number]
                and value.shape == shapes[number]
                and value.is_cpu
                and value.is_contiguous()
                and not value.is_neg()
                and not value.is_conj()
            ):
                numbers.append(number)
                targets.append(value)
                continue
            try:
                if self._kinds[number] == _OBJECT:
                    self._object(fqn, (parent, key), number)
                elif cls is torch.Tensor or cls is torch.nn.Parameter:
                    self._plain(fqn, value, (parent, key), number)
                elif is_sharded(value):
                    self._sharded(fqn, value, (parent, key), number)
                elif isinstance(value, torch.Tensor):
                    self._plain(fqn, value, (parent, key), number)
                else:
                    self._not_tensors.append(f"{fqn!r} ({cls.__qualname__})")
            except UnsupportedValueError as error:
                self._unsupported.append(error.message)
        rows = np.array(numbers, np.int64)
        # 0: what -1 finds, the dtype of objects.
        sizes = [0 if (dtype := find_dtype(name)) is None else dtype.itemsize
                 for name in self.table.dtypes]  # fmt: skip
        itemsize = np.array([*sizes, 0], np.int64)[self.table.dtype[rows]]
        self.raw.add_direct(rows, targets, self.table.shape[rows], itemsize)

    def _direct_dtypes(self) -> list[torch.dtype | None]:
        """Returns for each tensor the dtype of targets that its raw bytes can be read into."""
        known: list[torch.dtype | None] = [find_dtype(name) for name in self.table.dtypes]
        known.append(None)  # What -1 finds, the dtype of objects.
        return [
            known[code] if kind == _TENSOR else None
            for code, kind in zip(self._dtype_codes, self._kinds, strict=True)
        ]

    def check(self) -> None:
        """Raises whatever speaks against this load.

        Raises:
            UnsupportedValueError: Targets can't be written to.
            ShapeMismatchError: Shapes or dtypes do not fit.
            StateDictError: A tensor is stored where the state dict has another value.
        """
        if self._unsupported:
            raise UnsupportedValueError(
                f"{len(self._unsupported)} value(s) of the state dict can't be loaded into: "
                + "; ".join(self._unsupported)
            )
        if self._mismatches:
            raise ShapeMismatchError(
                f"Size mismatch between saved and current for {len(self._mismatches)} value(s): "
                + "; ".join(self._mismatches)
            )
        if self._not_tensors:
            raise StateDictError(
                "the checkpoint holds tensors where the state dict holds none, expected tensors of "
                f"the saved shapes as targets: {', '.join(self._not_tensors)}"
            )

    def object_takers(self) -> Iterator[tuple[int, ObjectTaker]]:
        """Yields the chunk of each object and what takes its bytes."""
        for place, (number, fqn, _) in enumerate(self.objects):
            yield int(self._first_chunk[number]), self._object_taker(place, fqn)

    def finish(self) -> None:
        """Puts new tensors and the objects into their containers.

        Raises:
            InternalError: The bytes of an object were never handed over.
        """
        unread = [fqn for i, (_, fqn, _) in enumerate(self.objects) if i not in self._placed]
        if unread:
            raise InternalError(f"objects were planned but not read: {', '.join(unread)}")
        for (parent, key), fresh in self._fresh:
            parent[key] = fresh.value
        for number, (_, _, (parent, key)) in enumerate(self.objects):
            parent[key] = self._placed[number]
        self.raw.sink.finish()

    def own_takers(self, own: OwnValues) -> Iterator[tuple[int, ObjectTaker]]:
        """Yields the chunk of each `PerRank` value and what takes its bytes."""
        for number, fqn in own.numbers:
            yield int(self._first_chunk[number]), self._own_taker(own, number, fqn)

    def has_chunk(self, number: int) -> bool:
        """Whether anything is stored of a tensor or object."""
        return bool(self._first_chunk[number] >= 0)

    def _own_taker(self, own: OwnValues, number: int, fqn: str) -> ObjectTaker:
        def take(data: bytes) -> None:
            weights_only = self.options.weights_only
            own.take(number, load_object(data, fqn=fqn, weights_only=weights_only))

        return take

    def _object_taker(self, number: int, fqn: str) -> ObjectTaker:
        def take(data: bytes) -> None:
            weights_only = self.options.weights_only
            self._placed[number] = load_object(data, fqn=fqn, weights_only=weights_only)

        return take

    def _object(self, fqn: str, place: Place, number: int) -> None:
        _check_replaceable(fqn, place)
        self.objects.append((number, fqn, place))

    def _plain(self, fqn: str, tensor: torch.Tensor, place: Place, number: int) -> None:
        shape = tuple(tensor.shape)
        stored = self._check_fit(fqn, shape, tensor.dtype, number)
        boxes = self.raw if self._kinds[number] == _TENSOR else self.opaque
        if tensor.is_meta or self._keeps(tensor.dtype, stored):
            self.resizing.refuse_new(fqn)
            kept = stored if self.options.dtype == "keep" else tensor.dtype
            fresh = self._add_fresh(fqn, place, lambda: fresh_plain(tensor, kept))
            if 0 not in shape:
                boxes.add(number, (0,) * len(shape), shape)
                boxes.sink.add_fresh(fresh, 0, stored)
            return
        part = self.resizing.part(tensor, (0,) * len(shape), shape, self._shapes[number])
        if part is not None:
            boxes.add(number, (0,) * len(shape), tuple(part.shape))
            self._add_target(fqn, part, stored, boxes.sink)

    def _sharded(self, fqn: str, value: Any, place: Place, number: int) -> None:
        held = sharded(
            value, fqn, self._layouts, saving=False,
            flatten_sharded_tensors=self._flatten_sharded_tensors,
        )  # fmt: skip
        stored = self._check_fit(fqn, held.shape, held.dtype, number)
        boxes = self.raw if self._kinds[number] == _TENSOR else self.opaque
        fresh = None
        keeps = self._keeps(held.dtype, stored)
        if keeps or any(tensor.is_meta for tensor in held.tensors):
            self.resizing.refuse_new(fqn)
            if not isinstance(value, DTensor):
                raise UnsupportedValueError(
                    f"{fqn!r} is a {type(value).__qualname__} on the meta device: give it memory "
                    "before loading"
                    if not keeps
                    else f"{fqn!r} is a {type(value).__qualname__}, of which "
                    "LoadOptions(dtype='keep') can't make one of another dtype"
                )
            kept = stored if self.options.dtype == "keep" else held.dtype
            fresh = self._add_fresh(fqn, place, lambda: fresh_dtensor(value, fqn, kept))
        for number_of_box, ((offset, size), tensor) in enumerate(
            zip(held.boxes, held.tensors, strict=True)
        ):
            if fresh is not None:
                if 0 not in size:
                    boxes.add(number, offset, size)
                    boxes.sink.add_fresh(fresh, number_of_box, stored)
                continue
            part = self.resizing.part(tensor, offset, size, self._shapes[number])
            if part is not None:
                boxes.add(number, offset, tuple(part.shape))
                self._add_target(fqn, part, stored, boxes.sink)

    def _add_target(
        self, fqn: str, tensor: torch.Tensor, stored: torch.dtype, sink: TensorSink
    ) -> None:
        if sink.add(tensor, stored):
            return
        reason = refusal(tensor)
        if reason is None and not is_writable(tensor):
            reason = "is expanded: several of its elements share one place in memory"
        if reason is not None:
            self._unsupported.append(f"{fqn!r} {reason}")

    def _add_fresh(self, fqn: str, place: Place, make: Callable[[], Any]) -> Fresh:
        _check_replaceable(fqn, place)
        fresh = Fresh(make)
        self._fresh.append((place, fresh))
        return fresh

    def _check_fit(
        self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, number: int
    ) -> torch.dtype:
        """Notes what does not fit; returns the stored dtype."""
        code = self._dtype_codes[number]
        stored = self._dtypes.get(code)
        if stored is None:
            stored = self._dtypes[code] = dtype_of(self.table.dtypes[code], fqn=fqn)
        self._itemsizes[number] = stored.itemsize
        if shape != self._shapes[number]:
            if self.resizing.allows(fqn, self._shapes[number], shape) and stored == dtype:
                return stored
            self._mismatches.append(
                f"{fqn!r} is saved as {self._shapes[number]} and wanted as {shape}"
            )
        elif stored != dtype:
            self._check_cast(fqn, stored, dtype)
        return stored

    def _check_cast(self, fqn: str, stored: torch.dtype, dtype: torch.dtype) -> None:
        policy = self.options.dtype
        if policy == "keep":
            return
        if policy == "cast" or (policy == "widen" and loses_nothing(stored, dtype)):
            self.cast.append((fqn, dtype_name(stored), dtype_name(dtype)))
            return
        why = "may lose values" if policy == "widen" else "LoadOptions(dtype='error') forbids"
        self._mismatches.append(
            f"{fqn!r} is saved as {dtype_name(stored)} and wanted as {dtype_name(dtype)}, a cast "
            f"that {why}: use a target of the saved dtype, or LoadOptions(dtype='cast')"
        )

    def _keeps(self, dtype: torch.dtype, stored: torch.dtype) -> bool:
        """Whether the target must give way to one of the saved dtype."""
        return self.options.dtype == "keep" and dtype != stored


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


def _first_chunks(table: ChunkTable) -> Any:
    first = np.full(table.num_tensors, -1, np.int64)
    first[table.tensor[::-1]] = np.arange(table.num_chunks)[::-1]
    return first
