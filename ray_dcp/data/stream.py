"""`ElasticStream`: an iterable data set over files or shards, with a place in each of them.

Each rank and worker of a loader reads whole sources. When their number changes, the sources that
are not at their end are distributed anew, and each continues behind the last sample that was
consumed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ray_dcp.core.checks import check_whole
from ray_dcp.data.sampler import SampleOrder, check_rank
from ray_dcp.errors import InvalidRequestError, StateDictError

AT_END = -1
"""Stands for the number of samples consumed of a source that has no more."""

State = dict[str, Any]


class ElasticStream(IterableDataset[Any]):
    """The samples of many sources (files, shards), each read by one rank at a time.

    For torchdata's `StatefulDataLoader`, whose place `LoaderPosition` then keeps across another
    number of ranks and of workers: every sample comes once an epoch.

    The ranks need not have the same number of samples. End an epoch on all of them, then call
    `set_epoch` with the next one.

    Args:
        sources: Their names, each once; the same on all ranks.
        read: Called with the name of a source and a number of samples; gives its samples from that
            one on, always in the same order.
        rank: This rank.
        world_size: Number of ranks.
        seed: Of the order of sources.
        shuffle: Whether every epoch has an order of sources of its own.

    Attributes:
        epoch: That is read, from 0.

    Raises:
        InvalidRequestError: An argument has a value that it can't have.

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
        """Begins an epoch; nothing happens when it is the one that is read.

        Raises:
            InvalidRequestError: It is no epoch.
        """
        check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._before, self._own, self._ended = epoch, {}, {}, False

    def __iter__(self) -> Iterator[Any]:
        """Yields what is left of the epoch for this rank and this worker of its loader."""
        if self._ended:
            return
        for source in self._mine():
            consumed = self._own.get(source, self._before.get(source, 0))
            if consumed == AT_END:
                continue
            for sample in self._read(source, consumed):
                consumed += 1
                # Why before: whoever has the sample may ask for the state at once.
                self._own[source] = consumed
                yield sample
            self._own[source] = AT_END

    def state_dict(self) -> State:
        """Returns what was consumed of each source: before the ranks were last dealt, and since."""
        return {
            "epoch": self.epoch,
            "before": dict(self._before),
            "own": dict(self._own),
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a place of this rank and worker, or one that `merged` made of all of theirs.

        Raises:
            StateDictError: It is no such state, or of sources that this stream has not; nothing is
                changed.
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
        """Yields nothing more in this epoch."""
        self._ended = True

    def _mine(self) -> list[str]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        slot = self._rank * num_workers + worker
        count = len(self._sources)
        order = self._order.samples(self.epoch * count, (self.epoch + 1) * count)
        # Careful: dealt by what stood before, so that a restart deals the same to the same slots.
        left = [
            name
            for name in (self._sources[number] for number in order)
            if self._before.get(name) != AT_END
        ]
        return left[slot :: self._world_size * num_workers]


def merged(states: Sequence[Any]) -> State:
    """Returns one place of those of all ranks and workers, for any number of them.

    Args:
        states: As `ElasticStream.state_dict` gave them.

    Raises:
        StateDictError: They are of different epochs, or none, or no such states.
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
    """Returns a state of `ElasticStream`.

    Raises:
        StateDictError: It is none.
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
