"""Captures a rank's state dict: items as columns, with the sources of their bytes.

`tensors` returns the bytes of a single tensor, `shards` the boxes of a sharded one, `objects` the
bytes of an object.

If `SaveOptions.nonfinite` asks for it, `checked_finite` searches the bytes to be saved for NaN and
infinities before the ranks join the save, so that a refused save has neither plan nor file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, cast
from warnings import warn

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ray_dcp.core.columns import without_identity
from ray_dcp.core.dtypes import READABLE
from ray_dcp.core.processes import collector_paused
from ray_dcp.core.values import BoolArray, Columns, Int64Array, Kind, NamePath, Settled, padded
from ray_dcp.errors import InvalidRequestError, NonFiniteError, UnsupportedValueError
from ray_dcp.options import SaveOptions
from ray_dcp.torch_adapter import devices
from ray_dcp.torch_adapter.content_digests import bytes_digest, content_digests
from ray_dcp.torch_adapter.devices import Moment
from ray_dcp.torch_adapter.flatten import Flat, flatten, flatten_top, listed
from ray_dcp.torch_adapter.objects import (
    Reason,
    dump_object,
    is_simple,
    load_problem,
    simple_digest,
)
from ray_dcp.torch_adapter.optimizer_state import with_group_identities
from ray_dcp.torch_adapter.shards import Box, Layouts, is_sharded, sharded, why_part
from ray_dcp.torch_adapter.sink import geometry, has_place
from ray_dcp.torch_adapter.state import (
    PerRank,
    frozen_names,
    group_identities_of,
    named_for_rank,
    stateful_to_state_dict,
)
from ray_dcp.torch_adapter.subclass_copy import with_attributes
from ray_dcp.torch_adapter.tensors import (
    PLAIN_TYPES,
    dtype_name,
    dtype_of,
    host_bytes,
    is_checkpointable,
    is_plain,
    unsupported_reason,
)

NonFinite = tuple[int, int]
"""Number of NaN, and number of infinities."""

SPLIT_BYTES = 4 << 20
"""Plain floating tensors of at least this size are split among the ranks that hold them."""


@dataclass(frozen=True, eq=False)
class Capture:
    """The items of one rank, captured for one save.

    The tensors are not copied: they must not change until the save has read them.

    Attributes:
        columns: One row per item.
        source: Returns the whole C-order bytes of the `Kind.TENSOR` item in a row: readable, one
            dimension of uint8. Thread-safe; may be called repeatedly.
        deferred: Returns the `torch.save` bytes of the `Kind.OBJECT` or `Kind.OPAQUE` item in a
            row. Thread-safe; may be called repeatedly, and returns the same bytes.
        warnings: Warnings for the user, one sentence each.
        tied: Groups of names whose tensors are one memory, in the order of the state dict; None if
            the rank holds no tensors.
    """

    columns: Columns
    source: Callable[[int], memoryview]
    deferred: Callable[[int], bytes]
    warnings: tuple[str, ...] = ()
    tied: Sequence[Sequence[str]] | None = None


def capture(
    state_dict: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    options: SaveOptions | None = None,
    flatten_state_dict: bool = True,
    flatten_sharded_tensors: bool = True,
    stateful: bool = True,
) -> Capture:
    """Returns what this rank has to save.

    Every rank returns an item for every value that it has, like torch's
    `create_default_local_save_plan`; the plan decides which rank writes a value that several have.
    With several ranks, objects, plain tensors and replicas of a DTensor's boxes carry a digest of
    all their bytes, which reveals differing values.

    Args:
        state_dict: Values, nested as DCP allows; `state_dict()` of top-level `Stateful` values is
            called. Not changed.
        rank: Rank of this process, for messages and for `PerRank` values.
        world_size: Number of ranks that save together.
        options: `objects="refuse"` makes an object that a safe load refuses an error.
        flatten_state_dict: See DCP's `DefaultSavePlanner`. False flattens only the top level, and
            saves nested containers as objects.
        flatten_sharded_tensors: See DCP's `DefaultSavePlanner`.
        stateful: Replace top-level `Stateful` values; DCP's `save_state_dict` passes False.

    Returns:
        The capture, which keeps the tensors alive.

    Raises:
        UnsupportedValueError: Values can't be saved (meta, sparse, quantised or `Partial` tensors,
            objects that do not pickle, or that hold a part of a sharded tensor); the message names
            all of them.
        StateDictError: Names collide, or the state dict contains itself.

    Complexity: linear; about 1 us for a plain CPU tensor, 10 us for a DTensor, 30 us for an object
    that is pickled (bench: 20,000 tensors on one core of an AMD EPYC).

    Source: `torch/distributed/checkpoint/default_planner.py`, `create_default_local_save_plan`.
    """
    options = options or SaveOptions()
    plain = stateful_to_state_dict(state_dict) if stateful else state_dict
    rows = Rows(
        digests=world_size > 1,
        with_paths=flatten_state_dict,
        frozen=frozen_names(state_dict) if options.unchanged == "link" else None,
    )
    with collector_paused():
        flat = (
            flatten(plain)
            if flatten_state_dict
            else flatten_top(plain, flatten_sharded_tensors=flatten_sharded_tensors)
        )
        rows.fill(named_for_rank(flat, rank, world_size))
        _check(rows, options, rank)
        columns = rows.columns()
        sent = columns
        if stateful and flatten_state_dict and world_size > 1:
            sent = with_group_identities(columns, group_identities_of(state_dict, plain))
    values = rows.values

    def deferred(row: int) -> bytes:
        held = values[row]
        if isinstance(held, _Unpickled):
            fqn = columns.names[columns.name[row]]
            held = values[row] = dump_object(held.value, fqn=fqn)
        return held  # type: ignore[no-any-return]

    source = TensorBytes(values, columns)
    return Capture(sent, source, deferred, tuple(rows.warnings), rows.tied())


def _check(rows: Rows, options: SaveOptions, rank: int) -> None:
    if rows.problems:
        raise UnsupportedValueError(
            f"{len(rows.problems)} value(s) of the state dict can't be saved: "
            f"{listed(rows.problems, '; ')}",
            rank=rank,
        )
    if rows.warnings and options.objects == "refuse":
        raise UnsupportedValueError(
            "SaveOptions(objects='refuse') forbids objects that a safe load would refuse: "
            + "; ".join(rows.warnings),
            rank=rank,
        )


class TensorBytes:
    """The `Capture.source` of tensors, for one or many rows at once.

    It is created in the thread of the save's caller, whose device streams define the moment of
    capture.

    Args:
        values: The tensor of each row; rows that are deferred may have other values.
        columns: The columns, for messages.
    """

    def __init__(self, values: Sequence[Any], columns: Columns | None = None) -> None:
        self._values = values
        self._columns = columns
        self._moment = Moment(values, devices.CUDA)

    def __call__(self, row: int) -> memoryview:
        """Returns the bytes of a row.

        Raises:
            UnsupportedValueError: The tensor's memory was freed after the capture.
        """
        try:
            return host_bytes(self._values[row])
        except UnsupportedValueError as error:
            name = None
            if self._columns is not None:
                name = self._columns.names[self._columns.name[row]]
            raise UnsupportedValueError(
                f"{name!r} was changed while it was being saved: {error.message}", key=name
            ) from None

    def tensor(self, row: int) -> torch.Tensor:
        """Returns the tensor in a row."""
        found: torch.Tensor = self._values[row]
        return found

    def filler(self, host: Any) -> Any:
        """Returns a filler that copies tensors from their GPUs as of the moment of the capture.

        Returns None if no tensor is on a GPU.

        Args:
            host: Filler for tensors in host memory; see `stage.window_filler.DeviceSource`.
        """
        return self._moment.filler(self._values, host)


class _Unpickled(NamedTuple):
    """An object that is pickled when its bytes are asked for first."""

    value: Any


class Rows:
    """Collects columns: lists with one entry per item, and the value of each item.

    Attributes:
        name: Number of each item's name.
        boxes: By row, items that are a part of a tensor, which must not be cut further.
        replicated: Rows of such parts that other ranks hold too, so that they may be cut.
        values: The source of each item's bytes.
        problems: Reasons why values can't be saved.
        warnings: Warnings for the user.

    Args:
        digests: Compute digests of what other ranks may hold as well.
        with_paths: Keep the places in the nested state dict.
        frozen: Names of tensors that are known not to be trained, beside parameters that are in the
            state dict themselves; None if nobody asks which.
    """

    def __init__(
        self,
        *,
        digests: bool,
        with_paths: bool = True,
        frozen: Collection[str] | None = None,
    ) -> None:
        self._digests = digests
        self._with_paths = with_paths
        self._layouts: Layouts = {}
        self._names: list[str] = []
        self._paths: list[NamePath | None] = []
        self.name: list[int] = []
        self._kind: list[int] = []
        self._dtype: list[torch.dtype | None] = []
        self._shape: list[tuple[int, ...]] = []
        self._requires_grad: list[bool] = []
        self._frozen = frozen
        self._settled: set[int] = set()
        self.boxes: dict[int, Box] = {}
        self.replicated: set[int] = set()
        self._value: list[int] = []
        self._compared: list[int] = []
        self.values: list[Any] = []
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def fill(self, flat: Flat) -> None:
        """Adds the items of every value; adds values that can't be saved to `problems`."""
        stop = 0
        # Why the last check is inline: a call for each of many tensors would take a tenth longer.
        is_plain_one = [
            type(value) in PLAIN_TYPES
            and not (hasattr(value, "global_shape") and is_checkpointable(value))
            for value in flat.values
        ]
        for plain, run in groupby(is_plain_one):
            start, stop = stop, stop + len(list(run))
            if plain:
                self._add_plain(flat, slice(start, stop))
                continue
            for row in range(start, stop):
                fqn, rows_before = flat.names[row], len(self.values)
                try:
                    self._add_other(fqn, flat.values[row], is_empty=fqn in flat.empty)
                except UnsupportedValueError as error:
                    self.problems.append(error.message)
                if len(self.values) > rows_before:
                    self.add_name(fqn, flat.paths[row] if self._with_paths else None)

    def _add_plain(self, flat: Flat, rows: slice) -> None:
        """Adds many plain tensors column by column, in a third of the time of one by one."""
        names, paths, tensors = flat.names[rows], flat.paths[rows], flat.values[rows]
        refused = [
            f"{name!r} {why}"
            for name, one in zip(names, tensors, strict=True)
            if (why := unsupported_reason(one))
        ]
        if refused:
            self.problems += refused
            return
        count, named = len(tensors), len(self._names)
        self._names += names
        self._paths += paths if self._with_paths else [None] * count
        self.name += range(named, named + count)
        self._kind += [_TENSOR] * count
        self._dtype += [tensor.dtype for tensor in tensors]
        self._shape += [tensor.shape for tensor in tensors]
        self._requires_grad += [tensor.requires_grad for tensor in tensors]
        if self._frozen is not None:
            some = zip(
                names, tensors, range(len(self.values), len(self.values) + count), strict=True
            )
            self._settled.update(row for fqn, one, row in some if self._is_frozen(fqn, one))
        self._compared += range(len(self.values), len(self.values) + count)
        self._value += [0] * count
        self.values += tensors

    def _add_other(self, fqn: str, value: Any, *, is_empty: bool) -> None:
        if is_sharded(value):
            self._sharded(fqn, value)
        elif isinstance(value, torch.Tensor):
            data = self._dump(fqn, alone(value, fqn))
            shape, requires_grad = tuple(value.shape), value.requires_grad
            digest = bytes_digest(data) if self._digests else 0
            self.add(_OPAQUE, data, value.dtype, shape, requires_grad, digest)
        elif is_simple(value):
            digest = simple_digest(value) if self._digests else 0
            self.add(_OBJECT, _Unpickled(value), None, (), is_empty, digest)
        else:
            is_own = type(value) is PerRank
            is_common = self._digests and not is_own
            held = value.value if is_own else value
            data = self._dump(fqn, held, refused=why_part if is_common else None)
            digest = bytes_digest(data) if is_common else 0
            self.add(_OBJECT, data, None, (), is_empty, digest)

    def _sharded(self, fqn: str, value: Any) -> None:
        held = sharded(value, fqn, self._layouts, saving=True)
        for box, tensor in zip(held.boxes, held.tensors, strict=True):
            row, digest = len(self.values), 0
            kind, source = _TENSOR, tensor  # type: tuple[int, Any]
            if not is_plain(tensor):
                data = self._dump(fqn, alone(tensor, fqn))
                kind, source = _OPAQUE, data
                digest = bytes_digest(data) if self._digests and held.replicated else 0
            elif (reason := unsupported_reason(tensor)) is not None:
                raise UnsupportedValueError(f"the local part of {fqn!r} {reason}")
            elif tensor.dtype != held.dtype:
                raise UnsupportedValueError(
                    f"{fqn!r} is declared as {held.dtype}, but its local part on this rank is "
                    f"{tensor.dtype}: convert the whole {type(value).__name__}, as by .to()"
                )
            self.add(kind, source, held.dtype, held.shape, held.requires_grad, digest)
            self.boxes[row] = box
            if self._is_frozen(fqn, value):
                self._settled.add(row)
            if held.replicated:
                self.replicated.add(row)
                if kind == _TENSOR:
                    self._compared.append(row)

    def _is_frozen(self, fqn: str, value: Any) -> bool:
        """Returns whether a value is a parameter that is not trained."""
        if self._frozen is None:
            return False
        is_parameter = isinstance(value, torch.nn.Parameter)
        return fqn in self._frozen or (is_parameter and not value.requires_grad)

    def _dump(self, fqn: str, value: Any, refused: Reason | None = None) -> bytes:
        data = dump_object(value, fqn=fqn, refused=refused)
        problem = load_problem(value, data, fqn=fqn)
        if problem is not None:
            self.warnings.append(problem)
        return data

    def add(
        self,
        kind: int,
        value: Any,
        dtype: torch.dtype | None,
        shape: tuple[int, ...],
        requires_grad: bool,
        digest: int,
    ) -> None:
        """Adds an item whose name the next `add_name` adds; see `Columns`."""
        self.name.append(len(self._names))
        self._kind.append(kind)
        self._dtype.append(dtype)
        self._shape.append(shape)
        self._requires_grad.append(requires_grad)
        self._value.append(digest)
        self.values.append(value)

    def add_name(self, fqn: str, path: NamePath | None) -> int:
        """Adds the name of the items added before it, and returns its number."""
        self._names.append(fqn)
        self._paths.append(path)
        return len(self._names) - 1

    def tied(self) -> list[list[str]] | None:
        """See `Capture.tied`."""
        parts: dict[int, list[int]] = defaultdict(list)
        for row, kind in enumerate(self._kind):
            if kind == _TENSOR and has_place(self.values[row]):
                parts[self.name[row]].append(row)
        groups = [list(parts)]
        # Why in two steps: an address takes a small part of the time of a whole place.
        for place in (self._address, self._place):
            alike: dict[Any, list[int]] = defaultdict(list)
            for at, name in [(at, name) for at, group in enumerate(groups) for name in group]:
                alike[(at, *[place(row) for row in parts[name]])].append(name)
            groups = [group for group in alike.values() if len(group) > 1]
        return [[self._names[name] for name in group] for group in groups] if parts else None

    def _address(self, row: int) -> int:
        return self.values[row].data_ptr()  # type: ignore[no-any-return]

    def _place(self, row: int) -> tuple[Any, ...]:
        return (self._shape[row], self.boxes.get(row), geometry(self.values[row]))

    def columns(self) -> Columns:
        """Returns the rows as columns."""
        if self._digests:
            # Why here: tensors on a GPU are digested together.
            tensors = [self.values[row] for row in self._compared]
            for row, value in zip(self._compared, content_digests(tensors), strict=True):
                self._value[row] = value
        num = len(self.values)
        ndim = np.fromiter(map(len, self._shape), np.int8, num)
        shape = padded(self._shape, max(1, int(ndim.max(initial=0))), 1)
        offset, size = np.zeros_like(shape), shape.copy()
        for row, (start, lengths) in self.boxes.items():
            offset[row, : len(start)] = start
            size[row, : len(start)] = lengths
        dtypes = [dtype for dtype in dict.fromkeys(self._dtype) if dtype is not None]
        codes: dict[torch.dtype | None, int] = {None: -1}
        codes.update((dtype, code) for code, dtype in enumerate(dtypes))
        settled = np.zeros(num, np.int8)
        settled[list(self._settled)] = Settled.SETTLED
        return Columns(
            names=tuple(self._names),
            paths=tuple(self._paths),
            dtypes=tuple(map(dtype_name, dtypes)),
            name=np.array(self.name, np.int32),
            kind=np.array(self._kind, np.int8),
            dtype=np.fromiter(map(codes.__getitem__, self._dtype), np.int8, num),
            ndim=ndim,
            shape=shape,
            offset=offset,
            size=size,
            requires_grad=np.array(self._requires_grad, np.bool_),
            splittable=self._splittable(size),
            value=np.array(self._value, np.uint64),
            settled=settled,
        )

    def _splittable(self, size: Int64Array) -> BoolArray:
        widths = {d: d.itemsize if d and d.is_floating_point else 0 for d in set(self._dtype)}
        width = np.fromiter(map(widths.__getitem__, self._dtype), np.int64, len(size))
        splittable: BoolArray = (size.prod(axis=1) * width >= SPLIT_BYTES) & (
            np.array(self._kind) == _TENSOR
        )
        # A shard that is not a declared replica must not be cut: a second holder is an error.
        splittable[list(self.boxes)] = False
        splittable[list(self.replicated)] = True
        return splittable


_TENSOR, _OBJECT, _OPAQUE = int(Kind.TENSOR), int(Kind.OBJECT), int(Kind.OPAQUE)


def alone(tensor: torch.Tensor, fqn: str) -> torch.Tensor:
    """Returns a tensor subclass in the form that is pickled: detached, on the CPU, own storage.

    Raises:
        UnsupportedValueError: The tensor has no values that could be pickled.
    """
    if tensor.is_meta or tensor.is_nested or is_lazy(tensor):
        raise UnsupportedValueError(
            f"{fqn!r} ({type(tensor).__qualname__}) {unsupported_reason(tensor)}"
        )
    made = tensor.detach()
    if made.device.type != "cpu":
        made = made.cpu()
    else:
        try:
            whole = made.untyped_storage().nbytes() == made.nbytes
        except (NotImplementedError, RuntimeError):  # a wrapper without its own storage
            whole = True
        made = made if whole else made.clone()
    return with_attributes(made, tensor)


def check_nonfinite(options: SaveOptions, path: str) -> None:
    """Refuses a check for NaN and infinities where a third-party storage writer saves.

    Raises:
        InvalidRequestError: The options ask for the check.
    """
    if options.nonfinite != "ignore":
        raise InvalidRequestError(
            f"SaveOptions(nonfinite={options.nonfinite!r}) needs a storage of ray_dcp, but this "
            f"save goes through {path} storage; leave it out, or save to a path or URL",
            key="nonfinite",
        )


def checked_finite(captured: Capture, options: SaveOptions, rank: int) -> Capture:
    """Returns a capture after a search for NaN and infinities, if the options ask for one.

    Args:
        captured: The capture.
        options: Only `nonfinite` is used.
        rank: Rank of this process, for messages.

    Raises:
        NonFiniteError: There are NaN or infinities, and the options refuse them.
    """
    if options.nonfinite == "ignore" or not (bad := _nonfinite_items(captured)):
        return captured
    told = _describe_nonfinite(bad, rank)
    if options.nonfinite == "refuse":
        raise NonFiniteError(
            f"{told}. Nothing was saved, as SaveOptions(nonfinite='refuse') asks",
            rank=rank,
            key=bad[0][0],
        )
    if rank:
        # Why here: of a save's warnings only the first rank's are shown, as most of them are the
        # same on all ranks. This one is known to this rank alone.
        warn(told, UserWarning, stacklevel=2)
    return replace(captured, warnings=(*captured.warnings, told))


_PIECE_ELEMENTS = 4 << 20
"""Most values that are converted at once."""


def nonfinite_of(
    tensor: Callable[[int], torch.Tensor], rows: Iterable[int]
) -> dict[int, NonFinite]:
    """Returns the number of NaN and of infinities of each tensor that has any.

    Args:
        tensor: Returns the plain tensor of a row; called once more for a tensor that is counted.
        rows: The rows to search.

    Complexity: one sum of each tensor on its device, and one copy to the host for each device; more
    only where a sum is not finite. Memory for a few pieces of `_PIECE_ELEMENTS`.

    Examples:
        >>> nonfinite_of([torch.ones(2), torch.tensor([3.0, -4.0, torch.nan])].__getitem__, (0, 1))
        {1: (1, 0)}
    """
    sums: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
    for row in rows:
        one = tensor(row)
        if one.numel():
            sums[one.device][row] = torch.stack([*map(_sum, _pieces(one.detach()))]).sum()
    found = {}
    for of_device in sums.values():
        finite = torch.stack([*of_device.values()]).isfinite().tolist()
        # Why counted only here: a sum of finite values may overflow too.
        for row in (row for row, is_finite in zip(of_device, finite, strict=True) if not is_finite):
            counts = torch.stack([*map(_counts, _pieces(tensor(row).detach()))]).sum(0).tolist()
            if any(counts):
                found[row] = (counts[0], counts[1])
    return found


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Splits a tensor of any strides into parts of at most `_PIECE_ELEMENTS`."""
    if tensor.numel() <= _PIECE_ELEMENTS:
        return [tensor]
    halves = tensor.tensor_split(2) if len(tensor) > 1 else (tensor[0],)
    return [piece for half in halves for piece in _pieces(half)]


def _sum(piece: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor, which is finite only if all values are."""
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    # Why: sums of short floats overflow early, and some dtypes have none.
    return (piece if piece.itemsize > 2 else piece.float()).sum().double()


def _counts(piece: torch.Tensor) -> torch.Tensor:
    size = piece.to(torch.complex128 if piece.is_complex() else torch.float64).abs()
    return torch.stack([size.isnan().sum(), size.isinf().sum()])


def _nonfinite_items(captured: Capture) -> list[tuple[str, NonFinite, int]]:
    """Returns name, counts and number of values of each item with NaN or infinities."""
    columns, source = captured.columns, cast("TensorBytes", captured.source)
    searched = np.array([*map(_may_be_nonfinite, columns.dtypes), False])
    rows = np.flatnonzero((columns.kind == Kind.TENSOR) & searched[columns.dtype]).tolist()
    found = nonfinite_of(source.tensor, rows)
    return [
        (without_identity(columns.names[columns.name[row]]), found[row], source.tensor(row).numel())
        for row in rows
        if row in found
    ]


def _may_be_nonfinite(dtype: str) -> bool:
    found = dtype_of(dtype)
    return found.is_complex or (found.is_floating_point and dtype in READABLE)


def _describe_nonfinite(bad: list[tuple[str, NonFinite, int]], rank: int) -> str:
    some = [
        f"{name!r} ({num_nan} NaN and {num_inf} infinite of {num_elements})"
        for name, (num_nan, num_inf), num_elements in bad
    ]
    return f"expected finite values on rank {rank}, found {listed(some)}"
