"""`average`: a checkpoint whose tensors are the weighted means of those of other checkpoints.

The new checkpoint is a save like any other, but its items are computed when they are written: each
tensor is cut into boxes, and a box is read from every source, added up in float64 and cast. Memory
therefore holds a few boxes, whatever the size of the checkpoints:

    RUN@300   [ box ] --- * w0 ---+
    RUN@400   [ box ] --- * w1 ---+--> float64 --- / sum(w) ---> cast ---> writer
    RUN@500   [ box ] --- * w2 ---+

Where a Ray is named and there is enough to do, the ranks of a `WorkerGroup` share the boxes.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ray_dcp import events
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.dtypes import ITEMSIZE, NUMPY_DTYPES, as_numbers
from ray_dcp.core.quantities import size_text
from ray_dcp.core.values import Columns, Kind
from ray_dcp.errors import (
    InvalidRequestError,
    StateDictError,
)
from ray_dcp.io.checkpoint import CheckpointReplacedError
from ray_dcp.io.reader import read_item
from ray_dcp.options import SaveOptions, check_above_0, check_patterns, matches
from ray_dcp.rank.rank_load import drive
from ray_dcp.rank.rank_save import RankSave
from ray_dcp.session.call import Call
from ray_dcp.session.connection import named_address
from ray_dcp.session.discovery import current_session
from ray_dcp.session.inline_transport import session_alone
from ray_dcp.session.session import Session
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target, open_storage
from ray_dcp.store.storage import read_traits_of
from ray_dcp.transform.float_dtypes import float_dtype
from ray_dcp.transform.new_checkpoint import new_checkpoint
from ray_dcp.transform.source import check_one_state
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.progress import Meter, ShowProgress, uncounted
from ray_dcp.view.run_view import check_no_step
from ray_dcp.view.run_view import open as open_place

BOX_BYTES = 8 << 20
"""Most bytes of the sum of a box. A thread holds about twice as much."""
_BLOCK = 64 << 10
"""Elements that are added up at a time. Why: they stay in the processor's cache."""
RANK_BYTES = 4 << 30
"""Bytes of sources for which another rank pays, where a Ray is named."""
_MOST_RANKS = 16
_NUM_THREADS = 4
_SLOWEST_BYTES_PER_S = 1e6
"""The deadline of an average allows for storages that are as slow as this."""
_AVERAGED = frozenset(
    ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz",
     "float8_e5m2", "float8_e5m2fnuz", "complex64", "complex128")
)  # fmt: skip
_OPTIMIZER = re.compile(r"(.*\.)?optim(izers?|izer_states?)?(\..*)?")

Array = npt.NDArray[Any]


@dataclass(frozen=True, repr=False)
class AverageReport:
    """What `average` wrote."""

    target: str
    """Path or URL of the new checkpoint."""
    sources: tuple[Mapping[str, Any], ...]
    """`checkpoint`, `attempt` and `weight` of each source, as the manifest records them. The
    weights add up to 1."""
    averaged: tuple[str, ...]
    """Names of the tensors that are means."""
    taken: tuple[str, ...]
    """Names of the values that are those of the last source."""
    left_out: tuple[str, ...]
    """Names of the values of any source that were not written: those that `keys` or the rule for
    optimizers leave out, and those that can't be averaged and that the last source lacks."""
    num_bytes: int
    """Approximate size of the new checkpoint, in bytes."""

    def __repr__(self) -> str:
        return (
            f"AverageReport({self.target!r}, {len(self.sources)} sources, {len(self.averaged)} "
            f"averaged, {len(self.taken)} taken, {len(self.left_out)} left out, "
            f"{size_text(self.num_bytes)})"
        )


def average(
    sources: Sequence[AnyPlace | CheckpointView],
    out: AnyPlace,
    *,
    weights: Sequence[float] | None = None,
    dtype: Any = None,
    keys: Sequence[str] | None = None,
    progress: ShowProgress = False,
) -> AverageReport:
    """Writes the weighted mean of checkpoints as a new checkpoint.

    Floating-point and complex tensors become `sum(weight * tensor) / sum(weights)`, accumulated in
    float64 in the order of the sources, and cast once. A source of weight 0 takes no part: its
    tensors are not read, whatever they hold. Values that can't be averaged (integers, booleans,
    objects) and the state of optimizers are those of the last source, whatever its weight. The
    sources may differ in sharding, container and writer.

    Memory does not grow with the checkpoints: a process holds a few parts of a tensor. Where the
    process is connected to a Ray, or `RAY_ADDRESS` names one, several processes share the work.

    Args:
        sources: Paths, URLs, `RUN@STEP` or views of checkpoints, the newest last.
        out: Path or URL of the new checkpoint, where no files of a checkpoint may exist.
        weights: A number for each source, which may be negative, or 0; they are divided by their
            sum. Equal weights if None.
        dtype: The dtype to cast the means to, for example `bfloat16`; unchanged if None. Complex
            tensors are not cast.
        keys: Shell patterns of the FQNs to write; if None, everything but the state of optimizers.
        progress: As for `export`.

    Returns:
        What was averaged, taken from the last source, and left out.

    Raises:
        InvalidRequestError: An argument is wrong, there is no tensor to average, or `out` names a
            step as `RUN@STEP`.
        StateDictError: The sources (but earlier ones of weight 0) differ in names, shapes or dtypes
            of floating-point tensors, or have such tensors that can't be averaged; the message
            lists all of them. Nothing was written.
        CheckpointExistsError: There are files of a checkpoint at `out`.
        StorageError: There is not enough space, or a storage failed.
        CheckpointError: A source can't be read.

    Examples:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     state = {"w": torch.full((2,), float(step)), "step": step}
        ...     _ = ray_dcp.save(state, checkpoint_id=f"memory://doc-mean/step-{step}")
        >>> steps = ["memory://doc-mean@1", "memory://doc-mean@2"]
        >>> report = ray_dcp.average(steps, "memory://doc-mean/mean", weights=[1, 3])
        >>> report.averaged, report.taken, ray_dcp.open("memory://doc-mean/mean")["w"][...]
        (('w',), ('step',), array([1.75, 1.75], dtype=float32))
    """
    choice: dict[str, Any] = {"weights": weights, "dtype": dtype, "keys": keys}
    plan = plan_average(sources, out, **choice)
    text = repr([_records(plan), plan.weights, sorted(plan.dtypes.items()), plan.boxes])
    work = f"average {digest_bytes(text.encode()).hex()}"
    target, num_bytes = absolute_target(out), plan.report.num_bytes
    with new_checkpoint(
        "averaging", target, work, sources=plan.views, num_bytes=num_bytes, progress=progress
    ) as new:
        new.meter.expect(num_bytes)
        if new.lease.is_done:
            return plan.report
        new.check_free()
        num_ranks = _num_ranks(plan, out)
        if num_ranks == 1:
            _save(plan, out, session_alone(), new.lease.attempt, new.meter)
            return plan.report
        from ray_dcp.worker_group import WorkerGroup

        # Why not the plan: a rank opens the sources itself, as open storages can't be sent.
        places = [view.place for view in plan.views]
        with (
            new.meter.following(partial(_look_at, out, num_bytes)),
            WorkerGroup(num_ranks, name="ray_dcp average") as ranks,
        ):
            ranks.run(_average_part, places, _records(plan), target, choice, new.lease.attempt)
    return plan.report


class MeanBox(NamedTuple):
    """What is written as one chunk."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    is_mean: bool
    chunk: int = -1
    """Chunk of the last source that is copied as it is stored; -1 if elements are read."""


@dataclass(frozen=True, eq=False)
class AveragePlan:
    """The contents of an average."""

    views: tuple[CheckpointView, ...]
    """The sources."""
    weights: tuple[float, ...]
    dtypes: Mapping[str, str]
    """Dtype of each tensor in the new checkpoint."""
    boxes: tuple[MeanBox, ...]
    """What is written, in the order of the last source."""
    report: AverageReport

    def bytes_of(self, box: MeanBox) -> int:
        """Returns the size of a box, in bytes; approximate for objects."""
        if box.chunk >= 0:
            return int(self.views[-1].checkpoint.table.item_bytes[box.chunk])
        return prod(box.size) * ITEMSIZE[self.dtypes[box.name]]


def plan_average(
    sources: Sequence[AnyPlace | CheckpointView],
    out: AnyPlace,
    *,
    weights: Sequence[float] | None = None,
    dtype: Any = None,
    keys: Sequence[str] | None = None,
) -> AveragePlan:
    """Checks that an average is possible and returns its plan; see `average`."""
    if isinstance(sources, str | os.PathLike) or not isinstance(sources, Sequence) or not sources:
        raise InvalidRequestError(
            f"sources must be a list of checkpoints, such as ['RUN@300', 'RUN@400'], but is "
            f"{sources!r}",
            key="sources",
        )
    if keys is not None:
        check_patterns(keys, "keys")
    cast = float_dtype(None if dtype is None else str(dtype).removeprefix("torch."))
    numbers = _checked_weights(weights, len(sources))
    target = open_storage(out)
    check_no_step(out, "out")
    views = tuple(map(_open, sources))
    optimizers = set[str]().union(*(_optimizer_names(view.names) for view in views))

    def is_chosen(name: str) -> bool:
        if keys is None:
            return name not in optimizers
        return bool(keys) and matches(name, keys)

    last = views[-1]
    # Why the last one always: names, order and dtypes of the result are its own.
    compared = [view for view, number in zip(views[:-1], numbers, strict=False) if number]
    compared.append(last)
    means = [
        {name for name in view.tensors if name not in optimizers and is_chosen(name)
         and view.tensors[name].dtype.startswith(("float", "bfloat", "complex", "bcomplex"))}
        for view in compared
    ]  # fmt: skip
    if not any(means):
        raise InvalidRequestError(
            f"expected floating-point tensors in {last.url}, found none"
            + ("" if keys is None else f" that match {', '.join(map(repr, keys))}"),
            key="keys",
        )
    _check_alike(compared, means)
    chosen = [name for name in last.names if is_chosen(name)]
    written = set(chosen)
    dtypes = {name: info.dtype for name, info in last.tensors.items() if is_chosen(name)}
    if cast is not None:
        dtypes |= {name: cast for name in means[-1] if "float" in dtypes[name]}
    row_of = {name: row for row, name in enumerate(last.names)}
    boxes = tuple(
        box for name in chosen for box in _boxes_of(last, name, row_of[name], name in means[-1])
    )
    shares = np.array(numbers) / np.sum(numbers)
    report = AverageReport(
        target.url,
        tuple(
            {"checkpoint": view.url, "attempt": view.attempt, "weight": share}
            for view, share in zip(views, shares.tolist(), strict=True)
        ),
        averaged=tuple(name for name in chosen if name in means[-1]),
        taken=tuple(name for name in chosen if name not in means[-1]),
        left_out=tuple(
            dict.fromkeys(
                name for view in (last, *views) for name in view.names if name not in written
            )
        ),
        num_bytes=0,
    )
    plan = AveragePlan(views, numbers, dtypes, boxes, report)
    return replace(plan, report=replace(report, num_bytes=sum(map(plan.bytes_of, boxes))))


def decayed(decay: float, num_sources: int) -> tuple[float, ...]:
    """Returns the weights of an exponential moving average: the newest, last source has 1.

    Args:
        decay: Weight of a source as a fraction of that of the next one; above 0.
        num_sources: Number of sources.

    Raises:
        InvalidRequestError: The decay is not above 0.

    Examples:
        >>> decayed(0.5, 3)
        (0.25, 0.5, 1.0)
    """
    decay = check_above_0(decay, "ema")
    return tuple(decay**age for age in reversed(range(num_sources)))


def _checked_weights(weights: Sequence[float] | None, num_sources: int) -> tuple[float, ...]:
    try:
        found = (1.0,) * num_sources if weights is None else tuple(float(one) for one in weights)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"weights must be numbers, but are {weights!r}", key="weights"
        ) from error
    wrong = "" if len(found) == num_sources else f"have a number for each of {num_sources} sources"
    # Why not 0 exactly: what rounding leaves of a sum is no divisor.
    if not all(map(math.isfinite, found)) or abs(sum(found)) <= 1e-9 * sum(map(abs, found)):
        wrong = wrong or "be finite and have a sum other than 0"
    if wrong:
        raise InvalidRequestError(f"weights must {wrong}, but are {list(found)}", key="weights")
    return found


def _open(source: AnyPlace | CheckpointView) -> CheckpointView:
    view = source if isinstance(source, CheckpointView) else open_place(source)
    if not isinstance(view, CheckpointView):
        last = view.steps[-1]
        raise InvalidRequestError(
            f"expected a checkpoint as source, but {view.url} is a run of {len(view)}: name its "
            f"steps, such as {view.url}@{last.name if last.step is None else last.step}",
            key="sources",
        )
    check_one_state(view, "sources")
    return view


def _optimizer_names(names: Iterable[str]) -> set[str]:
    """Returns the names of the state of optimizers: below `optimizer`, or beside `param_groups`."""
    dotted = [f".{name}." for name in names]
    prefixes = {name.partition(".param_groups.")[0] for name in dotted if ".param_groups." in name}
    parts = ("state", "other_state", "local_state", "inner_optimizers", "param_groups")
    state = tuple(f"{prefix}.{part}." for prefix in prefixes for part in parts)
    return {
        name[1:-1] for name in dotted if name.startswith(state) or _OPTIMIZER.fullmatch(name[1:-1])
    }


def _check_alike(views: Sequence[CheckpointView], means: Sequence[set[str]]) -> None:
    """Checks that the tensors to average are alike in all sources, and can be averaged.

    Raises:
        StateDictError: They are not; the message lists all differences.
    """
    first = views[0]

    def difference(view: CheckpointView, name: str) -> str:
        here, there = view.tensors.get(name), first.tensors.get(name)
        if there is None:
            return f"has {name!r}, which that one lacks"
        if here is None:
            return f"lacks {name!r}" if name not in view else f"has an object as {name!r}"
        same = (here.dtype, here.shape) == (there.dtype, there.shape)
        told = f"{name!r} as {here.dtype} of shape {here.shape} instead of"
        return "" if same else f"has {told} {there.dtype} of shape {there.shape}"

    averaged = set[str]().union(*means)
    everything = dict.fromkeys(name for view in views for name in view.names if name in averaged)
    problems = [
        f"{view.url} {'; '.join(found)}"
        for view in views[1:]
        if (found := [text for name in everything if (text := difference(view, name))])
    ]
    if problems:
        raise StateDictError(
            f"expected the same names, shapes and dtypes of floating-point tensors in all sources, "
            f"but compared with {first.url}, {'. '.join(problems)}. Choose by keys the names that "
            f"they share, or other sources"
        )
    opaque = [
        f"{name!r} of {view.url} is a pickled tensor subclass"
        for view in views
        for name in everything
        if view[name].is_opaque
    ]
    packed = [
        f"{name!r} has the dtype {first.tensors[name].dtype}, of which no mean is computed"
        for name in everything
        if first.tensors[name].dtype not in _AVERAGED
    ]
    if opaque or packed:
        raise StateDictError(
            f"expected plain floating-point tensors, but {'; '.join([*opaque, *packed])}; choose "
            f"by keys the names to average"
        )


def _boxes_of(view: CheckpointView, name: str, row: int, is_mean: bool) -> Iterator[MeanBox]:
    """Yields the boxes of a value: small parts of a tensor, or the chunks of anything else."""
    table, info = view.checkpoint.table, view.tensors.get(name)
    if info is not None and not view[name].is_opaque:
        width = ITEMSIZE[info.dtype]
        if is_mean:
            width = 16 if "complex" in info.dtype else 8
        for offset, size in _split(info.shape, BOX_BYTES // width):
            yield MeanBox(name, offset, size, is_mean)
        return
    ndim = 0 if info is None else len(info.shape)
    for chunk in np.flatnonzero(table.tensor == row).tolist():
        offset, size = table.offset[chunk, :ndim].tolist(), table.size[chunk, :ndim].tolist()
        yield MeanBox(name, tuple(offset), tuple(size), False, chunk)


def _split(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offset and size of parts of at most `most` elements, each contiguous in C order.

    Examples:
        >>> list(_split((3, 4), 8))
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= most)
    inner, length = shape[dim + 1 :], shape[dim]
    num_parts = -(-length * prod(inner) // most)
    step = -(-length // num_parts)
    for outer in np.ndindex(*shape[:dim]):
        for start in range(0, length, step):
            size = (*[1] * dim, min(step, length - start), *inner)
            yield (*outer, start, *[0] * len(inner)), size


class _Items:
    """The part of one rank, as a save captures it.

    Args:
        plan: The average.
        boxes: Boxes of this rank.
        meter: Counts the bytes that are done.
    """

    warnings = ()
    tied = None

    def __init__(self, plan: AveragePlan, boxes: Sequence[MeanBox], meter: Meter) -> None:
        self._plan, self._boxes, self._meter = plan, boxes, meter
        self._total = np.sum(plan.weights)

    @property
    def columns(self) -> Columns:
        """One row for each box."""
        plan, view = self._plan, self._plan.views[-1]
        table, builder = view.checkpoint.table, ColumnsBuilder()
        row_of = {name: row for row, name in enumerate(table.names)}
        for box in self._boxes:
            row, info = row_of[box.name], view.tensors.get(box.name)
            if info is None:
                builder.object(box.name, path=table.paths[row])
                continue
            builder.tensor(
                box.name,
                plan.dtypes[box.name],
                info.shape,
                offset=box.offset,
                size=box.size,
                path=table.paths[row],
                opaque=bool(table.kind[row] == Kind.OPAQUE),
                requires_grad=bool(table.requires_grad[row]),
            )
        return builder.build()

    def source(self, row: int) -> memoryview:
        """Returns the bytes of a box of a tensor."""
        box = self._boxes[row]
        data = self._mean(box) if box.is_mean else self._read(self._plan.views[-1], box)
        self._count(box)
        # Why read-only: the writer copies what somebody else may write to.
        return data.reshape(-1).view(np.uint8).data.toreadonly()

    def deferred(self, row: int) -> bytes:
        """Returns an item of the last source as it is stored."""
        box, view = self._boxes[row], self._plan.views[-1]
        checkpoint = view.checkpoint
        checkpoint.know_checks([box.chunk])
        data = read_item(
            view.storage, checkpoint.table, box.chunk, transforms=checkpoint.transforms
        )
        self._count(box)
        return data

    def _mean(self, box: MeanBox) -> Array:
        plan, dtype = self._plan, self._plan.dtypes[box.name]
        total = np.empty(prod(box.size), np.complex128 if "complex" in dtype else np.float64)
        weighted = zip(plan.views, plan.weights, strict=True)
        # Why left out: 0 times an infinity or NaN is NaN.
        parts = [(view, weight) for view, weight in weighted if weight]
        with np.errstate(all="ignore"):  # infinities are what the arithmetic gives
            for index, (view, weight) in enumerate(parts):
                raw, stored_as = self._read(view, box), view.tensors[box.name].dtype
                for low in range(0, raw.size, _BLOCK):
                    numbers = as_numbers(raw[low : low + _BLOCK], stored_as)
                    numbers *= weight
                    block = total[low : low + _BLOCK]
                    np.copyto(block, numbers) if index == 0 else np.add(block, numbers, out=block)
            total /= self._total
            if dtype in NUMPY_DTYPES:
                return total.astype(dtype, copy=False)
        import torch

        cast = torch.empty(total.size, dtype=getattr(torch, dtype))
        # Why into a tensor of torch's: a view of an empty one of numpy's is refused.
        return np.asarray(cast.copy_(torch.from_numpy(total)).view(torch.uint8))

    def _read(self, view: CheckpointView, box: MeanBox) -> Array:
        parts = zip(box.offset, box.size, strict=True)
        try:
            raw = view[box.name].raw(tuple(slice(low, low + length) for low, length in parts))
        except InvalidRequestError as error:
            # Stock DCP does not record in `.metadata` that a tensor is one.
            raise StateDictError(
                f"expected plain tensors, but {box.name!r} of {view.url} is a pickled tensor "
                f"subclass; choose by keys the names to average",
                key=box.name,
            ) from error
        return np.ascontiguousarray(raw).reshape(-1)

    def _count(self, box: MeanBox) -> None:
        self._meter.add(self._plan.bytes_of(box), box.name)


def _save(plan: AveragePlan, out: AnyPlace, session: Session, attempt: str, meter: Meter) -> None:
    """Writes the part of a rank.

    Args:
        plan: The same on all ranks.
        out: As for `average`.
        session: Session of the rank.
        attempt: Id for the attempt: that in the lease of the target.
        meter: Counts the bytes that are done.
    """
    ends = np.cumsum([plan.bytes_of(box) for box in plan.boxes])
    # Why neighbours: the table keeps the order of the names, and reads go forward.
    ranks = np.minimum(ends * session.world_size // (ends[-1] + 1), session.world_size - 1)
    boxes = [box for box, rank in zip(plan.boxes, ranks, strict=True) if rank == session.rank]
    num_bytes = int(ends[-1]) // session.world_size
    slowest_s = len(plan.views) * num_bytes / _SLOWEST_BYTES_PER_S
    options = SaveOptions(
        overwrite=False,
        num_threads=_NUM_THREADS,
        part_bytes=min(1 << 30, max(16 << 20, -(-num_bytes // _NUM_THREADS))),
        write_timeout_s=SaveOptions.write_timeout_s + slowest_s,
    )
    target = absolute_target(out)
    call = Call(session, options.heartbeat_timeout_s)
    with call.reported("save", target.url), call:
        about = {"average": {"sources": list(plan.report.sources)}}
        save = replace(RankSave.of(call, target, options, attempt=attempt), about=about)
        outcome = drive(save.run(lambda: _Items(plan, boxes, meter)), call.ask)
    for warning in outcome.warnings if session.rank == 0 else ():
        events.warn(warning, stacklevel=3)


def _look_at(out: AnyPlace, total: int) -> tuple[str, str, int, int]:
    """Returns how much of a local checkpoint is written that other processes write."""
    storage, done = open_storage(out), 0
    if isinstance(storage, LocalStorage):
        with suppress(OSError):
            files = Path(storage.url).rglob("*")
            done = sum(file.stat().st_size for file in files if file.is_file())
    return "writing", "", min(done, total), total


def _num_ranks(plan: AveragePlan, out: AnyPlace) -> int:
    """Returns the number of processes that average; 1 where no Ray is named."""
    storages = [open_storage(out), *(view.storage for view in plan.views)]
    is_shared = all(read_traits_of(one).shared for one in storages)
    wanted = len(plan.views) * plan.report.num_bytes // RANK_BYTES
    if wanted < 2 or not is_shared or None in [view.place for view in plan.views]:
        return 1
    if "ray" not in sys.modules and named_address() is None:
        return 1
    from ray_dcp.session.ray_cluster import attach_named, num_free_cpus

    return min(wanted, num_free_cpus(), _MOST_RANKS) if attach_named(None) is not None else 1


def _average_part(
    places: Sequence[AnyPlace],
    records: Sequence[bytes],
    out: AnyPlace,
    choice: Mapping[str, Any],
    attempt: str,
) -> None:
    """Averages on one rank.

    Raises:
        CheckpointReplacedError: A source is no longer the one that was planned with.
    """
    plan = plan_average(places, out, **choice)
    if _records(plan) != records:
        raise CheckpointReplacedError(
            f"expected the sources {', '.join(view.url for view in plan.views)} as they were when "
            f"they were opened, but one was replaced meanwhile; run it again"
        )
    session = current_session()
    _save(plan, out, session if session is not None else session_alone(), attempt, uncounted())


def _records(plan: AveragePlan) -> list[bytes]:
    """Returns digests of the sources' records."""
    return [digest_bytes(view.checkpoint.record) for view in plan.views]
