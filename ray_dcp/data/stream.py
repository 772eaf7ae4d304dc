"""`ElasticStream`: an iterable dataset over files or shards, with a position in each of them.

Each worker of each rank's loader reads whole sources. When the number of ranks or workers changes,
the unfinished sources are redistributed, and each continues after its last consumed sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ray_dcp.core.checks import check_whole
from ray_dcp.data.sampler import SampleOrder, check_rank
from ray_dcp.errors import InvalidRequestError, StateDictError

AT_END = -1
"""Stands for the number of consumed samples of a source that is finished."""

State = dict[str, Any]


class ElasticStream(IterableDataset[Any]):
    """An iterable dataset over many sources (files, shards), each read by one rank at a time.

    Use it with torchdata's `StatefulDataLoader`. `LoaderPosition` then preserves the position for
    any number of ranks and workers: every sample occurs exactly once per epoch.

    Ranks may have different numbers of samples. Finish an epoch on all of them, then call
    `set_epoch` with the next one.

    Args:
        sources: Unique names of the sources, the same on all ranks.
        read: Called with the name of a source and a number n; returns an iterable over the samples
            of the source without the first n, always in the same order.
        rank: This rank.
        world_size: Number of ranks.
        seed: Seed of the order of sources.
        shuffle: Shuffle the sources in every epoch.

    Attributes:
        epoch: The current epoch, from 0.

    Raises:
        InvalidRequestError: An argument has an invalid value.

    Examples:
        >>> lines = {"a.txt": ["a0", "a1", "a2"], "b.txt": ["b0"]}
        >>> def read(source, start):
        ...     return lines[source][start:]
        >>> stream = ElasticStream(list(lines), read, rank=0, world_size=1, shuffle=False)
        >>> samples = iter(stream)
        >>> next(samples), next(samples)
        ('a0', 'a1')
        >>> rest = []
        >>> for rank in range(2):
        ...     other = ElasticStream(list(lines), read, rank=rank, world_size=2)
        ...     other.load_state_dict(merged([stream.state_dict()]))
        ...     rest += other
        >>> sorted(rest)
        ['a2', 'b0']
    """

    def __init__(
        self,
        sources: Sequence[str],
        read: Callable[[str, int], Iterable[Any]],
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._sources = list(sources)
        if any(not isinstance(name, str) for name in self._sources) or len(
            set(self._sources)
        ) != len(self._sources):
            raise InvalidRequestError("sources must be names, each of them once", key="sources")
        if not callable(read):
            raise InvalidRequestError(
                f"read must be a function of a source and a number, but is {read!r}", key="read"
            )
        check_rank(rank, world_size)
        self._order = SampleOrder(len(self._sources), seed, shuffle)
        self._read, self._rank, self._world_size = read, rank, world_size
        self.epoch = 0
        self._before: dict[str, int] = {}
        self._own: dict[str, int] = {}
        self._ended = False

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; does nothing if it is the current one.

        Raises:
            InvalidRequestError: `epoch` is not a valid number.
        """
        check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._before, self._own, self._ended = epoch, {}, {}, False

    def __iter__(self) -> Iterator[Any]:
        """Yields the remaining samples of the epoch for this rank and worker."""
        if self._ended:
            return
        for source in self._mine():
            consumed = self._own.get(source, self._before.get(source, 0))
            if consumed == AT_END:
                continue
            for sample in self._read(source, consumed):
                consumed += 1
                # Why before the yield: the consumer may call `state_dict` right after it.
                self._own[source] = consumed
                yield sample
            self._own[source] = AT_END

    def state_dict(self) -> State:
        """Returns the samples consumed of each source, before and since the last distribution."""
        return {
            "epoch": self.epoch,
            "before": dict(self._before),
            "own": dict(self._own),
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of this rank and worker, or a state that `merged` returned.

        Raises:
            StateDictError: `state` is not such a state, or has sources that this stream lacks;
                nothing is changed.
        """
        checked = checked_state(state)
        strange = sorted({*checked["before"], *checked["own"]} - set(self._sources))
        if strange:
            raise StateDictError(
                f"this place in the data is of sources that the stream has not: "
                f"{', '.join(map(repr, strange[:5]))}, {len(strange)} in all"
            )
        self.epoch, self._ended = checked["epoch"], checked["ended"]
        self._before, self._own = dict(checked["before"]), dict(checked["own"])

    def end(self) -> None:
        """Ends the epoch: no more samples are yielded in it."""
        self._ended = True

    def _mine(self) -> list[str]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        slot = self._rank * num_workers + worker
        count = len(self._sources)
        order = self._order.samples(self.epoch * count, (self.epoch + 1) * count)
        # Careful: distributed by the state before, so that a restart gives each slot the same.
        left = [
            name
            for name in (self._sources[number] for number in order)
            if self._before.get(name) != AT_END
        ]
        return left[slot :: self._world_size * num_workers]


def merged(states: Sequence[Any]) -> State:
    """Merges the states of all ranks and workers into one that is valid for any number of them.

    Args:
        states: Results of `ElasticStream.state_dict`.

    Raises:
        StateDictError: The states are of different epochs, there are none, or they are invalid.
    """
    checked = [checked_state(state) for state in states]
    epochs = sorted({state["epoch"] for state in checked})
    if len(epochs) != 1:
        raise StateDictError(
            f"expected the places of ranks and workers in one epoch, found epochs {epochs}; save "
            f"when all ranks have called set_epoch with the same epoch"
        )
    before: dict[str, int] = {}
    for state in checked:
        for part in (state["before"], state["own"]):
            for name, consumed in part.items():
                ends = AT_END in (before.get(name), consumed)
                before[name] = AT_END if ends else max(before.get(name, 0), consumed)
    return {"epoch": epochs[0], "before": before, "own": {}, "ended": False}


def checked_state(state: Any) -> State:
    """Returns a state of `ElasticStream` after checking it.

    Raises:
        StateDictError: `state` is not such a state.
    """
    ok = (
        isinstance(state, Mapping)
        and set(state) == {"epoch", "before", "own", "ended"}
        and type(state["epoch"]) is int
        and state["epoch"] >= 0
        and type(state["ended"]) is bool
        and all(_are_numbers(state[part]) for part in ("before", "own"))
    )
    if not ok:
        raise StateDictError(
            f"expected a state of an ElasticStream, with epoch, before, own and ended, found "
            f"{str(state)[:200]}"
        )
    return dict(state)


def _are_numbers(part: Any) -> bool:
    return isinstance(part, Mapping) and all(
        isinstance(name, str) and type(consumed) is int and consumed >= AT_END
        for name, consumed in part.items()
    )
