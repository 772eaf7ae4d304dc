"""`RowsSeen`: which rows of a Ray Data set an epoch has had, by their ids.

Ray Data gives blocks to ranks in no promised order, so the number of rows that a rank had does not
tell which. Ids do, whatever the order, the shuffling and the number of ranks.
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
"""Runs that wait to be joined with the others, or as many as those are."""

T = TypeVar("T")
Runs = NDArray[np.int64]


class IdRuns:
    """A set of whole numbers, kept as runs [start, stop) in increasing order.

    Args:
        runs: As `.runs` gives them, shape (number, 2).

    Raises:
        StateDictError: They are not that.

    Examples:
        >>> ids = IdRuns()
        >>> ids.add([3, 4, 5, 9])
        >>> ids.runs.tolist(), len(ids), ids.has([4, 6]).tolist()
        ([[3, 6], [9, 10]], 4, [True, False])

    Complexity: 16 bytes a run. `add` sorts what it is given, and now and then all runs: n additions
    cost as much as sorting them a few times, O(n log n).
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
        """As few runs as there can be, in increasing order, of shape (number, 2)."""
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
        """Adds ids; those that are there already stay.

        Raises:
            InvalidRequestError: They are no whole numbers.
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
        """Returns which of some ids are in the set.

        Raises:
            InvalidRequestError: They are no whole numbers.
        """
        numbers, runs = _whole(ids), self.runs
        if not len(runs):
            return np.zeros(numbers.shape, np.bool_)
        row = np.searchsorted(runs[:, 0], numbers, side="right") - 1
        return np.asarray((row >= 0) & (numbers < runs[np.maximum(row, 0), 1]))

    def _join(self, more: Runs) -> None:
        self._later.append(more)
        self._num_later += len(more)
        # Why not at once: every batch would sort all that came before it.
        if self._num_later > max(MOST_LATER, len(self._runs)):
            _ = self.runs


class RowsSeen:
    """Keeps which rows of a Ray Data set were consumed in the epoch, by a column of whole numbers.

    On resume give Ray Train the rows that are left as a data set of their own, and go over that
    first. Two limits are Ray's: a split among ranks is made equal by leaving out up to as many rows
    an epoch as there are ranks less one, and their order is not the one of a run without a break.

    Args:
        column: With the ids, each once in the data set.

    Attributes:
        epoch: That is read, from 0.

    Raises:
        InvalidRequestError: `column` is no name.

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
        """Rows of this epoch that are known here: of this rank, and of all before the last load."""
        return len(self._seen)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; nothing happens when it is the one that is read.

        Raises:
            InvalidRequestError: It is no epoch.
        """
        check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._seen = epoch, IdRuns()

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields batches, and counts their rows as consumed.

        Args:
            batches: Of columns by name: NumPy arrays, tensors, a pandas or Arrow table.

        Raises:
            InvalidRequestError: A batch has no such column, or no whole numbers in it.
        """
        for batch in batches:
            self._seen.add(self._ids(batch))
            yield batch

    def unseen(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of a batch of arrays that were not consumed.

        Raises:
            InvalidRequestError: As `follow`.
        """
        left = ~self._seen.has(self._ids(batch))
        return {name: np.asarray(values)[left] for name, values in batch.items()}

    def left(self, dataset: Any) -> Any:
        """Returns a Ray Data set without the rows that were consumed.

        Args:
            dataset: A `ray.data.Dataset`. Its rows are dropped where they are read.

        Raises:
            InvalidRequestError: It is no such thing.
        """
        if not callable(getattr(dataset, "map_batches", None)):
            raise InvalidRequestError(
                f"expected a ray.data.Dataset, but got {type(dataset).__name__}", key="dataset"
            )
        return dataset.map_batches(self.unseen, batch_format="numpy")

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and what this rank has seen as its own."""
        return {"epoch": self.epoch, "seen": PerRank(self._seen.runs, resized=_on_first_rank)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave; on another number of ranks the first has all of it.

        Raises:
            StateDictError: It is no such state; nothing is changed.
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
    # Why one: all that counts is what the ranks have seen together.
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
