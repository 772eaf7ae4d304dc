"""`RowsSeen`: the rows of a Ray Data dataset that an epoch has consumed, by their ids.

Ray Data does not guarantee the order in which ranks get blocks, so that a number of rows does not
identify them. Ids do, for any order, shuffling and number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_dcp.core.checks import check_whole
from ray_dcp.errors import InvalidRequestError, StateDictError
from ray_dcp.torch_adapter.per_rank import PerRank

MOST_LATER = 4096
"""Added runs are merged when there are more than this, and more than merged runs."""

T = TypeVar("T")
Runs = NDArray[np.int64]


class IdRuns:
    """A set of integers, stored as runs [start, stop) in increasing order.

    Args:
        runs: Runs as returned by the property `runs`, of shape (number, 2).

    Raises:
        StateDictError: `runs` has another shape or order.

    Examples:
        >>> ids = IdRuns()
        >>> ids.add([3, 4, 5, 9])
        >>> ids.runs.tolist(), len(ids), ids.has([4, 6]).tolist()
        ([[3, 6], [9, 10]], 4, [True, False])

    Complexity: 16 bytes per run. `add` sorts its argument and, rarely, all runs: n additions cost
    O(n log n) in total.
    """

    def __init__(self, runs: ArrayLike = ()) -> None:
        found = np.asarray(runs)
        if not found.size:
            found = np.empty((0, 2), np.int64)
        ends = found.ravel()
        if (
            found.ndim != 2
            or found.shape[1] != 2
            or found.dtype.kind not in "iu"
            or bool((np.diff(ends.astype(np.int64)) <= 0).any())
        ):
            raise StateDictError(
                "expected runs [start, stop) of ids in increasing order, found something else"
            )
        self._runs: Runs = found.astype(np.int64)
        self._later: list[Runs] = []
        self._num_later = 0

    @property
    def runs(self) -> Runs:
        """The smallest number of runs, in increasing order, of shape (number, 2)."""
        if self._later:
            every = np.concatenate((self._runs, *self._later))
            every = every[np.argsort(every[:, 0], kind="stable")]
            reach = np.maximum.accumulate(every[:, 1])
            begins = np.concatenate(([True], every[1:, 0] > reach[:-1]))
            ends = np.concatenate((begins[1:], [True]))
            self._runs = np.stack((every[begins, 0], reach[ends]), axis=1)
            self._later, self._num_later = [], 0
        return self._runs

    def __len__(self) -> int:
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())

    def add(self, ids: ArrayLike) -> None:
        """Adds ids to the set.

        Raises:
            InvalidRequestError: `ids` are not integers.
        """
        numbers = np.unique(_whole(ids))
        if numbers.size:
            begins = np.concatenate(([True], np.diff(numbers) != 1))
            ends = np.concatenate((begins[1:], [True]))
            self._join(np.stack((numbers[begins], numbers[ends] + 1), axis=1))

    def union(self, other: IdRuns) -> None:
        """Adds all ids of another set."""
        if len(other.runs):
            self._join(other.runs)

    def has(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Returns for each id whether it is in the set.

        Raises:
            InvalidRequestError: `ids` are not integers.
        """
        numbers, runs = _whole(ids), self.runs
        if not len(runs):
            return np.zeros(numbers.shape, np.bool_)
        row = np.searchsorted(runs[:, 0], numbers, side="right") - 1
        return np.asarray((row >= 0) & (numbers < runs[np.maximum(row, 0), 1]))

    def _join(self, more: Runs) -> None:
        self._later.append(more)
        self._num_later += len(more)
        # Why not at once: every batch would sort all earlier runs.
        if self._num_later > max(MOST_LATER, len(self._runs)):
            _ = self.runs


class RowsSeen:
    """Records which rows of a Ray Data dataset the epoch has consumed, by a column of integer ids.

    After a resume, pass the remaining rows to Ray Train as a dataset of their own, and iterate over
    it first. Two limits come from Ray: to split a dataset equally, it drops up to `ranks - 1` rows
    per epoch; and the order of rows differs from that of an uninterrupted run.

    Args:
        column: Column of the ids, which must be unique in the dataset.

    Attributes:
        epoch: The current epoch, from 0.

    Raises:
        InvalidRequestError: `column` is not a name.

    Examples:
        >>> import numpy as np
        >>> rows = RowsSeen("id")
        >>> batches = [{"id": np.array([0, 1])}, {"id": np.array([2, 3])}]
        >>> for batch in rows.follow(batches):
        ...     break
        >>> rows.num_seen, rows.unseen({"id": np.arange(4)})["id"].tolist()
        (2, [2, 3])

        In a job, on the driver and then in `train_fn`::

            rows = RowsSeen("id")
            ray_dcp.load_newest({"rows": rows}, root, no_dist=True)
            datasets = {"all": dataset, "left": rows.left(dataset)}

            for batch in rows.follow(ray.train.get_dataset_shard("left").iter_torch_batches()):
                ...
            rows.set_epoch(rows.epoch + 1)  # and go on with "all"
    """

    def __init__(self, column: str) -> None:
        if not isinstance(column, str) or not column:
            raise InvalidRequestError(f"column must be a name, but is {column!r}", key="column")
        self._column = column
        self.epoch = 0
        self._seen = IdRuns()

    @property
    def num_seen(self) -> int:
        """Number of known rows of this epoch: of this rank, and of all before the last load."""
        return len(self._seen)

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; does nothing if it is the current one.

        Raises:
            InvalidRequestError: `epoch` is not a valid number.
        """
        check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._seen = epoch, IdRuns()

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields batches, and marks their rows as consumed.

        Args:
            batches: Batches with columns by name: NumPy arrays, tensors, pandas or Arrow tables.

        Raises:
            InvalidRequestError: A batch lacks the column, or its ids are not integers.
        """
        for batch in batches:
            self._seen.add(self._ids(batch))
            yield batch

    def unseen(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of a batch of arrays that were not consumed.

        Raises:
            InvalidRequestError: As for `follow`.
        """
        left = ~self._seen.has(self._ids(batch))
        return {name: np.asarray(values)[left] for name, values in batch.items()}

    def left(self, dataset: Any) -> Any:
        """Returns a dataset without the consumed rows.

        Args:
            dataset: A `ray.data.Dataset`. Its rows are filtered when they are read.

        Raises:
            InvalidRequestError: `dataset` is not a `ray.data.Dataset`.
        """
        if not callable(getattr(dataset, "map_batches", None)):
            raise InvalidRequestError(
                f"expected a ray.data.Dataset, but got {type(dataset).__name__}", key="dataset"
            )
        return dataset.map_batches(self.unseen, batch_format="numpy")

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and the rows of this rank as a per-rank value."""
        return {"epoch": self.epoch, "seen": PerRank(self._seen.runs, resized=_on_first_rank)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`. On another number of ranks, rank 0 gets all rows.

        Raises:
            StateDictError: `state` is not such a state; nothing is changed.
        """
        own = state.get("seen") if isinstance(state, Mapping) else None
        if not isinstance(own, PerRank) or type(state.get("epoch")) is not int:
            raise StateDictError("expected the state of a RowsSeen, found something else")
        seen = IdRuns(own.value)
        self.epoch, self._seen = state["epoch"], seen

    def _ids(self, batch: Any) -> NDArray[np.int64]:
        try:
            column = batch[self._column]
        except (KeyError, IndexError, TypeError) as error:
            raise InvalidRequestError(
                f"expected batches with a column {self._column!r}, found "
                f"{type(batch).__name__}{_names(batch)}",
                key=self._column,
            ) from error
        if hasattr(column, "detach"):
            column = column.detach().cpu()
        return _whole(column)


def _on_first_rank(values: Sequence[Any], rank: int, world_size: int) -> Runs:
    # Why only rank 0: what counts is the union over all ranks.
    every = IdRuns()
    for value in values if rank == 0 else ():
        every.union(IdRuns(value))
    return every.runs


def _whole(ids: Any) -> NDArray[np.int64]:
    numbers = np.asarray(ids)
    if not numbers.size:
        return np.empty(0, np.int64)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise InvalidRequestError(
            f"ids of rows must be whole numbers in one dimension, but are {numbers.dtype} in "
            f"{numbers.ndim}"
        )
    return numbers.astype(np.int64)


def _names(batch: Any) -> str:
    names = list(batch) if isinstance(batch, Mapping) else getattr(batch, "column_names", [])
    return f" with {', '.join(map(str, names))}" if names else ""
