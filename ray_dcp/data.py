"""Saves the position in the training data per sample, not per rank, so that it survives a resize.

- `ElasticBatchSampler`: map-style datasets, with any torch `DataLoader`. All epochs form one
  endless stream of samples, whose order is the same on every machine. A place in the stream is the
  number of samples before it:

        place    0            N            2N
        stream   |- epoch 0 --|- epoch 1 --|- epoch 2 -- ...
        batches  [0 1|2 3][0 1|2 3] ...        global batches, each divided among ranks (here 4)

- `ElasticStream`: an iterable dataset over files or shards, with a position in each of them. Each
  worker of each rank's loader reads whole sources. When the number of ranks or workers changes, the
  unfinished sources are redistributed, and each continues after its last consumed sample.
- `LoaderPosition`: the position of torchdata's `StatefulDataLoader`, merged on a resize. Nothing
  else interprets the loader's state; `tests/unit/test_data_position.py` compares it with the state
  that the installed torchdata writes.
- `RowsSeen`: the rows of a Ray Data dataset that an epoch has consumed, by their ids. Ray Data does
  not guarantee the order in which ranks get blocks, so that a number of rows does not identify
  them. Ids do, for any order, shuffling and number of ranks.
- `Frontier`: ordinals (of prompts, of shards) that workers process and finish in any order, as in
  reinforcement learning. What was handed out and not done is handed out again after a restore.

Put such an object at the top level of the state dict; it is saved and loaded with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ray_dcp.errors import InvalidRequestError, LimitError, StateDictError
from ray_dcp.options import check_above_0, check_whole, plain_integer, set_checked
from ray_dcp.torch_adapter.state import PerRank

__all__ = [
    "ElasticBatchSampler",
    "ElasticStream",
    "Frontier",
    "FrontierStatus",
    "LoaderPosition",
    "RowsSeen",
]

ORDER_VERSION = 1
"""Incremented when the order of `SampleOrder` changes: places are valid within one version only."""

MAX_SEED = 2**64


@dataclass
class SampleOrder:
    """The order of the samples in every epoch. Deterministic.

    Place p of the stream belongs to epoch `p // num_samples`.

    Args:
        num_samples: Number of samples in the dataset.
        seed: Seed of the order, from 0 to 2 ** 64 - 1.
        shuffle: Shuffle every epoch; otherwise the order is always 0, 1, 2, ….

    Raises:
        InvalidRequestError: There are no samples, or the seed is out of range.

    Examples:
        >>> order = SampleOrder(5, seed=3)
        >>> sorted(order.samples(0, 5).tolist()), sorted(order.samples(5, 10).tolist())
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        >>> order.samples(3, 7).tolist() == order.samples(0, 10).tolist()[3:7]
        True

    Complexity: 4 bytes per sample (8 above 2 ** 32 samples) for each of the last two epochs used.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    _epochs: dict[int, NDArray[np.unsignedinteger]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        set_checked(
            self,
            num_samples=check_whole(self.num_samples, "num_samples", 1),
            seed=check_whole(self.seed, "seed"),
        )
        if self.seed >= MAX_SEED:
            raise InvalidRequestError(f"seed must be below 2**64, but is {self.seed!r}", key="seed")

    def samples(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the samples at places [start, stop) of the stream, which may cross epochs."""
        found = [np.empty(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.num_samples)
            last = min(first + stop - start, self.num_samples)
            if self.shuffle:
                found.append(self._order_of(epoch)[first:last].astype(np.int64))
            else:
                found.append(np.arange(first, last, dtype=np.int64))
            start += last - first
        return np.concatenate(found)

    def _order_of(self, epoch: int) -> NDArray[np.unsignedinteger]:
        order = self._epochs.get(epoch)
        if order is None:
            narrow = self.num_samples <= 2**32
            order = np.arange(self.num_samples, dtype=np.uint32 if narrow else np.uint64)
            # Why this generator: numpy guarantees that its stream never changes; torch does not.
            key = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch & 0xFFFFFFFF, epoch >> 32]
            np.random.RandomState(key).shuffle(order)
            # Why two: a batch may extend from one epoch into the next.
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = order
        return order


def share_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the range [start, stop) of `count` elements that belongs to a rank.

    The ranges are consecutive, cover all elements, and differ in length by at most one.

    Examples:
        >>> [share_of(7, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    return count * rank // world_size, count * (rank + 1) // world_size


T = TypeVar("T")
Last = Literal["wrap", "short", "drop"]


class ElasticBatchSampler:
    """Distributes the samples of a dataset to ranks, and resumes on any number of ranks.

    Use it as `torch.utils.data.DataLoader(dataset, batch_sampler=...)`, with any number of workers.
    In each step, all ranks together take one global batch from one shuffled stream, and each rank
    gets its share. The position is therefore a single number, the same on all ranks and valid for
    any number of ranks. Put the sampler into the state dict: no sample of an epoch is lost or
    repeated after a resume.

    A batch counts as consumed when `follow` yields it, not when a worker of the loader fetches it.
    Save at the end of a step, at the same step on all ranks.

    With `global_batch_size`, the batches are the same on any number of ranks, and so is training,
    up to the order of floating-point sums. If the number of ranks does not divide it, shares differ
    by one sample; weight the losses by the share.

    Args:
        num_samples: Number of samples in the dataset.
        rank: This rank.
        world_size: Number of ranks.
        global_batch_size: Number of samples per step on all ranks together. Give either this or
            `batch_size`.
        batch_size: Number of samples per step on each rank; the global batch grows with the number
            of ranks.
        seed: Seed of the order, from 0 to 2 ** 64 - 1. A loaded state replaces it.
        shuffle: Shuffle every epoch. A loaded state replaces it.
        last: How to treat the samples at the end of an epoch that do not fill a global batch.
            `"wrap"` fills the batch with samples of the next epoch, which then starts after them.
            `"short"` makes a smaller batch, of which a rank may get no sample; the loader's
            `collate_fn` must accept an empty list. `"drop"` drops the samples.

    Raises:
        InvalidRequestError: An argument has an invalid value.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> def loader_of(rank, world_size):
        ...     sampler = ElasticBatchSampler(
        ...         24, rank=rank, world_size=world_size, global_batch_size=12
        ...     )
        ...     return sampler, DataLoader(range(24), batch_sampler=sampler)
        >>> seen = []
        >>> for rank in range(4):
        ...     sampler, loader = loader_of(rank, 4)
        ...     seen += next(sampler.follow(loader)).tolist()
        >>> state = sampler.state_dict()
        >>> for rank in range(3):
        ...     sampler, loader = loader_of(rank, 3)
        ...     sampler.load_state_dict(state)
        ...     for batch in sampler.follow(loader):
        ...         seen += batch.tolist()
        >>> sorted(seen) == list(range(24)), sampler.epoch
        (True, 1)
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rank: int,
        world_size: int,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "wrap",
    ) -> None:
        self._order = SampleOrder(num_samples, seed, shuffle)
        self._rank, self._world_size = check_rank(rank, world_size)
        self._step = _step(global_batch_size, batch_size, self._world_size)
        if last not in get_args(Last):
            raise InvalidRequestError(
                f"last must be one of {', '.join(map(repr, get_args(Last)))}, but is {last!r}",
                key="last",
            )
        if last == "drop" and self._step > num_samples:
            raise InvalidRequestError(
                f"last='drop' leaves nothing: a global batch of {self._step} is more than the "
                f"{num_samples} samples; make it smaller, or take last='wrap' or 'short'",
                key="last",
            )
        self._last = last
        self._place = 0
        self._followed = False
        self._unfollowed = False

    def __repr__(self) -> str:
        return (
            f"ElasticBatchSampler(rank {self._rank} of {self._world_size}, epoch {self.epoch}, "
            f"{self.consumed} of {self.num_samples} samples)"
        )

    @property
    def num_samples(self) -> int:
        """Number of samples in the dataset."""
        return self._order.num_samples

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._place // self.num_samples

    @property
    def consumed(self) -> int:
        """Number of samples of this epoch that all ranks together have consumed."""
        return self._place % self.num_samples

    @property
    def global_batch_size(self) -> int:
        """Number of samples per step on all ranks together."""
        return self._step

    def __len__(self) -> int:
        """Returns the number of batches left in this epoch, the same on all ranks."""
        left = self.num_samples - self.consumed
        return left // self._step if self._last == "drop" else -(-left // self._step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's samples of each remaining batch of this epoch."""
        return self._batches(self._place)

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of a loader up to the end of the epoch, and counts them as consumed.

        Args:
            loader: Loader with this sampler as its `batch_sampler`. It is iterated once.

        Raises:
            InvalidRequestError: The loader returned more or fewer batches than this sampler.
        """
        if not isinstance(loader, Iterable):
            raise InvalidRequestError(
                f"follow needs a loader to iterate, but got {type(loader).__name__}", key="loader"
            )
        return self._follow(loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the same on all ranks, as integers and a bool.

        Raises:
            StateDictError: The loader was iterated without `follow`, so the position is unknown.
        """
        if self._unfollowed:
            raise StateDictError(
                "batches were taken from this sampler without follow(), so it does not know what "
                "was consumed; iterate with `for batch in sampler.follow(loader)`"
            )
        return {
            "place": self._place,
            "num_samples": self.num_samples,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "order_version": ORDER_VERSION,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position of `state_dict`, saved by any number of ranks.

        Args:
            state: The state. Its seed and `shuffle` replace those of this sampler.

        Raises:
            StateDictError: `state` is of another dataset or version, or not such a state; nothing
                is changed.
        """
        expected = {"place": int, "num_samples": int, "seed": int, "shuffle": bool,
                    "order_version": int}  # fmt: skip
        if not isinstance(state, Mapping) or any(
            type(state.get(name)) is not kind for name, kind in expected.items()
        ):
            shown = repr(dict(state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateDictError(
                f"expected the state of an ElasticBatchSampler, with {', '.join(expected)}, found "
                f"{shown[:200]}"
            )
        for name, own in (("order_version", ORDER_VERSION), ("num_samples", self.num_samples)):
            if state[name] != own:
                raise StateDictError(
                    f"expected a position with {name}={own}, found {state[name]}; leave the "
                    f"sampler out of the state dict to begin an epoch anew"
                )
        if state["place"] < 0:
            raise StateDictError(f"a position can't be {state['place']}")
        self._order = SampleOrder(self.num_samples, state["seed"], state["shuffle"])
        self._place = state["place"]
        # Why: a global batch larger than the saved one may not fit into the rest of the epoch.
        if not len(self):
            self._place = (self.epoch + 1) * self.num_samples
        self._unfollowed = False

    def _follow(self, loader: Iterable[T]) -> Iterator[T]:
        places = self._places(self._place)
        wrong = f"than the epoch has left: does it have this sampler as its batch_sampler? {self!r}"
        self._followed = True
        try:
            for batch in loader:
                step = next(places, None)
                if step is None:
                    raise InvalidRequestError(f"the loader gave more batches {wrong}", key="loader")
                self._place = step[2]
                yield batch
        finally:
            self._followed = False
        if next(places, None) is not None:
            raise InvalidRequestError(f"the loader gave fewer batches {wrong}", key="loader")

    def _batches(self, place: int) -> Iterator[list[int]]:
        for start, stop, _ in self._places(place):
            if not self._followed:
                self._unfollowed = True
            low, high = share_of(stop - start, self._rank, self._world_size)
            yield self._order.samples(start + low, start + high).tolist()

    def _places(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Yields start and stop of each remaining global batch, and the place of the next one."""
        end = (place // self.num_samples + 1) * self.num_samples
        while place < end:
            stop = place + self._step
            if self._last == "short":
                stop = min(stop, end)
            if self._last == "drop" and stop > end:
                return
            # Why: the rest of the epoch is dropped, so the next batch belongs to the next epoch.
            after = end if self._last == "drop" and stop + self._step > end else stop
            yield place, stop, after
            place = after


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Returns both numbers as Python's after checking that `0 <= rank < world_size`.

    Raises:
        InvalidRequestError: They are not such numbers.
    """
    rank, world_size = plain_integer(rank), plain_integer(world_size)
    if type(world_size) is not int or type(rank) is not int or not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"rank must be a whole number from 0 and below world_size, but they are {rank!r} and "
            f"{world_size!r}",
            key="rank",
        )
    return rank, world_size


def _step(together: Any, each: Any, world_size: int) -> int:
    if (together is None) == (each is None):
        raise InvalidRequestError(
            "give one of global_batch_size (of all ranks together) and batch_size (of each rank)",
            key="global_batch_size",
        )
    name, value = ("batch_size", each) if together is None else ("global_batch_size", together)
    value = check_whole(value, name, 1)
    if together is not None and together < world_size:
        raise InvalidRequestError(
            f"global_batch_size={together} leaves some of the {world_size} ranks without a sample; "
            f"make it {world_size} or more, or use fewer ranks",
            key="global_batch_size",
        )
    return value if each is None else value * world_size


# --- sources and rows ---------------------------------------------------------------------------

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
        # Why: a text would be a source per letter.
        self._sources = [] if isinstance(sources, str) else list(sources)
        is_text = all(isinstance(name, str) for name in self._sources)
        if isinstance(sources, str) or not is_text or len({*self._sources}) != len(self._sources):
            raise InvalidRequestError(
                f"sources must be a list of names, each of them once, but is "
                f"{str(sources)[:200]!r}",
                key="sources",
            )
        if not callable(read):
            raise InvalidRequestError(
                f"read must be a function of a source and a number, but is {read!r}", key="read"
            )
        self._rank, self._world_size = check_rank(rank, world_size)
        self._order = SampleOrder(len(self._sources), seed, shuffle)
        self._read = read
        self.epoch = 0
        self._before: dict[str, int] = {}
        self._own: dict[str, int] = {}
        self._ended = False

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; does nothing if it is the current one.

        Raises:
            InvalidRequestError: `epoch` is not a valid number.
        """
        epoch = check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._before, self._own, self._ended = epoch, {}, {}, False

    def __iter__(self) -> Iterator[Any]:
        """Yields the remaining samples of the epoch for this rank and worker."""
        if self._ended:
            return
        for source in self._own_sources():
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
        checked = _checked(state)
        strange = sorted({*checked["before"], *checked["own"]} - set(self._sources))
        if strange:
            raise StateDictError(
                f"this place in the data is of sources that the stream has not: "
                f"{', '.join(map(repr, strange[:5]))}, {len(strange)} in all"
            )
        self.epoch, self._ended = checked["epoch"], checked["ended"]
        self._before, self._own = checked["before"], checked["own"]

    def end(self) -> None:
        """Ends the epoch: no more samples are yielded in it."""
        self._ended = True

    def _own_sources(self) -> list[str]:
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
    checked = [_checked(state) for state in states]
    epochs = sorted({state["epoch"] for state in checked})
    if len(epochs) != 1:
        raise StateDictError(
            f"expected positions in one epoch, found epochs {epochs}; save when all ranks have "
            f"called set_epoch with the same epoch"
        )
    before: dict[str, int] = {}
    for state in checked:
        for part in (state["before"], state["own"]):
            for name, consumed in part.items():
                ends = AT_END in (before.get(name), consumed)
                before[name] = AT_END if ends else max(before.get(name, 0), consumed)
    return {"epoch": epochs[0], "before": before, "own": {}, "ended": False}


def _checked(state: Any) -> State:
    """Returns a state of `ElasticStream` after checking it.

    Raises:
        StateDictError: `state` is not such a state.
    """
    with suppress(TypeError, ValueError, KeyError):
        epoch, ended = state["epoch"], state["ended"]
        before, own = dict(state["before"]), dict(state["own"])
        counts = [*before.values(), *own.values()]
        are_counts = all(type(count) is int and count >= AT_END for count in counts)
        if are_counts and type(epoch) is int and epoch >= 0 and type(ended) is bool:
            return {"epoch": epoch, "before": before, "own": own, "ended": ended}
    raise StateDictError(
        f"expected the state of an ElasticStream, with epoch, before, own and ended, found "
        f"{str(state)[:200]}"
    )


Resized = Callable[[Sequence[Any], int, int], Any]


class LoaderPosition:
    """Saves the position of each rank's `StatefulDataLoader`.

    On the same number of ranks, each loader continues exactly where it was. On another number, the
    rest of the epoch is redistributed, by an `ElasticStream` or by `resized`. For a map-style
    dataset, save an `ElasticBatchSampler` instead, which needs no merging.

    Args:
        loader: Loader of this rank. Prefetched samples do not count as consumed.
        resized: Called with the states of all loaders by rank, this rank and the number of ranks;
            returns the state for this rank's loader. An `ElasticStream` does not need it; for
            any other dataset without it, another number of ranks is refused.

    Raises:
        InvalidRequestError: The loader has no state or uses an `ElasticBatchSampler`; its settings
            do not allow to determine the position of an `ElasticStream`; or `resized` is not
            callable.

    Examples:
        >>> from torchdata.stateful_dataloader import StatefulDataLoader
        >>> from ray_dcp.data import ElasticStream
        >>> def read(source, start):
        ...     return [f"{source}{number}" for number in range(start, 3)]
        >>> def loader_of_one_rank():
        ...     stream = ElasticStream(["a", "b"], read, rank=0, world_size=1, shuffle=False)
        ...     return StatefulDataLoader(stream, batch_size=2)
        >>> loader = loader_of_one_rank()
        >>> next(iter(loader))
        ['a0', 'a1']
        >>> state = {"data": LoaderPosition(loader).state_dict()}
        >>> loader = loader_of_one_rank()
        >>> LoaderPosition(loader).load_state_dict(state["data"])
        >>> list(loader)
        [['a2', 'b0'], ['b1', 'b2']]
    """

    def __init__(self, loader: Any, *, resized: Resized | None = None) -> None:
        if not all(hasattr(loader, n) for n in ("state_dict", "load_state_dict", "dataset")):
            raise InvalidRequestError(
                f"expected a loader with state_dict, load_state_dict and dataset, such as "
                f"torchdata's StatefulDataLoader, found {type(loader).__name__}",
                key="loader",
            )
        if isinstance(getattr(loader, "batch_sampler", None), ElasticBatchSampler):
            raise InvalidRequestError(
                "the loader has an ElasticBatchSampler, whose position is valid for any number of "
                "ranks; put the sampler into the state dict instead",
                key="loader",
            )
        if resized is not None and not callable(resized):
            raise InvalidRequestError(
                f"resized must be a function of (states, rank, world_size), but is {resized!r}",
                key="resized",
            )
        self._loader = loader
        self._stream = loader.dataset if isinstance(loader.dataset, ElasticStream) else None
        self._resized = resized
        for name, (value, why) in _NEEDED.items() if self._stream is not None else ():
            if (found := getattr(loader, name, value)) != value:
                raise InvalidRequestError(
                    f"a loader of an ElasticStream needs {name}={value!r}, found {found!r}: {why}",
                    key=name,
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state as a per-rank value."""
        rule: str | Resized = self._resized or ("error" if self._stream is None else _dealt_anew)
        return {"loader": PerRank(self._loader.state_dict(), resized=rule)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position of the loader's next iteration.

        Raises:
            StateDictError: `state` is not the state of a `LoaderPosition`, or was saved by a loader
                with another number of workers.
        """
        own = state.get("loader") if isinstance(state, Mapping) else None
        found = own.value if isinstance(own, PerRank) else None
        if not isinstance(found, dict):
            raise StateDictError("expected the state of a LoaderPosition, found something else")
        if self._stream is None or self._resized is not None:
            self._loader.load_state_dict(found)
        elif _MERGED in found:
            self._stream.load_state_dict(found[_MERGED])
            self._loader.load_state_dict({})
        else:
            self._go_on(self._stream, found)

    def _go_on(self, stream: ElasticStream, found: dict[str, Any]) -> None:
        places = _places_in(found)
        workers = getattr(self._loader, "num_workers", 0)
        if (_SNAPSHOT in found) != (workers > 0) or len(places) != max(workers, 1):
            raise StateDictError(
                f"this rank's place in the data was saved by a loader with "
                f"{len(places) if _SNAPSHOT in found else 0} workers, but this one has {workers}; "
                f"give it as many, or resume on another number of ranks"
            )
        whole = merged(places)
        # Why not the merged position: it would assign samples of other ranks to this one.
        stream.load_state_dict({**places[0], "epoch": whole["epoch"], "own": {}, "ended": False})
        if found.get("_iterator_finished"):
            stream.end()
            self._loader.load_state_dict({})
        else:
            self._loader.load_state_dict(found)


_NEEDED = {
    "persistent_workers": (False, "its workers would not hear of a new epoch"),
    "snapshot_every_n_steps": (1, "what was consumed is not known between snapshots"),
    "in_order": (True, "what was consumed would not be what comes first"),
}
"""Settings that a loader of an `ElasticStream` must have, and why."""
_MERGED = "ray_dcp.merged"
_SNAPSHOT = "_snapshot"


def _dealt_anew(states: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
    return {_MERGED: merged([place for state in states for place in _places_in(state)])}


def _places_in(state: Any) -> list[Any]:
    """Returns the stream's states in a loader's state, one for each worker."""
    if isinstance(state, Mapping) and _MERGED in state:
        return [state[_MERGED]]
    try:
        if _SNAPSHOT in state:
            workers = state[_SNAPSHOT]["_worker_snapshots"]
            return [workers[f"worker_{number}"]["dataset_state"] for number in range(len(workers))]
        return [state["dataset_state"]]
    except (KeyError, TypeError) as error:
        raise StateDictError(
            f"the state of a loader was not written by a version of torchdata that is known here: "
            f"{type(error).__name__} {error}"
        ) from error


Runs = NDArray[np.int64]
"""A set of integers: runs [start, stop) in increasing order, of shape (number, 2)."""

MOST_PARTS = 4096
"""Most batches whose rows are kept apart. Why: merging each at once would sort all earlier runs."""


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
        self._restart(0)

    def _restart(self, epoch: int, seen: Runs | None = None) -> None:
        self.epoch = epoch
        self._parts = [_runs_of(()) if seen is None else seen]

    @property
    def _all_seen(self) -> Runs:
        """The ids of the consumed rows, merged."""
        if len(self._parts) > 1:
            self._parts = [_union(self._parts)]
        return self._parts[0]

    @property
    def num_seen(self) -> int:
        """Number of known rows of this epoch: of this rank, and of all before the last load."""
        return int((self._all_seen[:, 1] - self._all_seen[:, 0]).sum())

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; does nothing if it is the current one.

        Raises:
            InvalidRequestError: `epoch` is not a valid number.
        """
        epoch = check_whole(epoch, "epoch")
        if epoch != self.epoch:
            self._restart(epoch)

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields batches, and marks their rows as consumed.

        Args:
            batches: Batches with columns by name: NumPy arrays, tensors, pandas or Arrow tables.

        Raises:
            InvalidRequestError: A batch lacks the column, or its ids are not integers.
        """
        for batch in batches:
            self._parts.append(_runs_of(self._ids(batch)))
            if len(self._parts) > MOST_PARTS:
                self._parts = [self._all_seen]
            yield batch

    def unseen(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of a batch of arrays that were not consumed.

        Raises:
            InvalidRequestError: As for `follow`.
        """
        ids, runs = self._ids(batch), self._all_seen
        row = np.searchsorted(runs[:, 0], ids, side="right") - 1
        stops = np.append(runs[:, 1], np.iinfo(np.int64).min)
        left = ids >= stops[row]
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
        return {"epoch": self.epoch, "seen": PerRank(self._all_seen, resized=_on_first_rank)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`. On another number of ranks, rank 0 gets all rows.

        Raises:
            StateDictError: `state` is not such a state; nothing is changed.
        """
        own = state.get("seen") if isinstance(state, Mapping) else None
        if not isinstance(own, PerRank) or type(state.get("epoch")) is not int:
            raise StateDictError("expected the state of a RowsSeen, found something else")
        self._restart(state["epoch"], _checked_runs(own.value))

    def _ids(self, batch: Any) -> NDArray[np.int64]:
        try:
            column = batch[self._column]
        except (KeyError, IndexError, TypeError) as error:
            names = (
                list(batch) if isinstance(batch, Mapping) else getattr(batch, "column_names", [])
            )
            raise InvalidRequestError(
                f"expected batches with a column {self._column!r}, found {type(batch).__name__}"
                f"{f' with {names}' if names else ''}",
                key=self._column,
            ) from error
        ids = np.asarray(column.detach().cpu() if hasattr(column, "detach") else column)
        if ids.size and (ids.dtype.kind not in "iu" or ids.ndim != 1):
            raise InvalidRequestError(
                f"ids of rows must be whole numbers in one dimension, but are {ids.dtype} in "
                f"{ids.ndim}"
            )
        return ids.reshape(-1).astype(np.int64)


def _on_first_rank(values: Sequence[Any], rank: int, world_size: int) -> Runs:
    # Why only rank 0: what counts is the union over all ranks.
    return _union([_checked_runs(value) for value in values]) if rank == 0 else _runs_of(())


def _checked_runs(value: Any) -> Runs:
    found = np.asarray(value)
    if (
        found.ndim != 2
        or found.shape[1] != 2
        or found.dtype.kind not in "iu"
        or bool((np.diff(found.ravel().astype(np.int64)) <= 0).any())
    ):
        raise StateDictError(
            "expected runs [start, stop) of ids in increasing order, found something else"
        )
    return found.astype(np.int64)


def _runs_of(ids: ArrayLike) -> Runs:
    """Returns the runs of a set of ids, given in any order.

    Examples:
        >>> _runs_of([5, 3, 4, 9]).tolist()
        [[3, 6], [9, 10]]
    """
    numbers = np.unique(np.asarray(ids, np.int64))
    first = np.diff(numbers, prepend=numbers[:1] - 2) != 1
    last = np.diff(numbers, append=numbers[-1:] + 2) != 1
    return np.stack((numbers[first], numbers[last] + 1), axis=1)


def _union(parts: Sequence[Runs]) -> Runs:
    """Returns the union of sets.

    Examples:
        >>> _union([_runs_of([1, 2, 7]), _runs_of([3, 7, 8])]).tolist()
        [[1, 4], [7, 9]]
    """
    every = np.concatenate(parts)
    every = every[np.argsort(every[:, 0], kind="stable")]
    reach = np.maximum.accumulate(every[:, 1])
    first = np.r_[True, every[1:, 0] > reach[:-1]][: len(every)]
    last = np.r_[first[1:], True][: len(every)]
    return np.stack((every[first, 0], reach[last]), axis=1)


MAX_ORDINAL = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class FrontierStatus:
    """Where a `Frontier` is."""

    next: int
    """The lowest ordinal that was never handed out."""
    num_open: int
    """Number of ordinals below `next` that are not done."""
    num_out: int
    """Number of open ordinals that are handed out; the other open ones are handed out next."""
    finished: bool
    """Whether all ordinals up to the frontier's `stop` are done."""


class Frontier:
    """Hands out the ordinals 0, 1, 2, … and takes them back as done in any order.

    An ordinal is open from the moment it is handed out until it is done. The state is the next
    ordinal and the open ones. After a restore, exactly the open ordinals are handed out again, in
    ascending order and before any new one.

    Each ordinal is done once: of several reports, such as those of a slow worker and of the one
    that replaced it, `done` accepts the first and refuses the others. A program that uses a result
    only after `done` accepted it, and saves the frontier together with what the result changed,
    uses each ordinal exactly once in the history that survives, whoever is killed when.

    One process owns a frontier. Other processes use it through an actor,
    `ray.remote(Frontier).remote(64)`, or are given ordinals by the owner. All methods may be called
    by several threads at a time.

    Args:
        max_open: Largest number of ordinals that are handed out at a time. `take` raises
            `LimitError` beyond it.
        stop: The ordinals end below this one; None if they have no end.

    Raises:
        InvalidRequestError: An argument is not a positive integer.

    Examples:
        >>> frontier = Frontier(max_open=4)
        >>> frontier.take(3)
        [0, 1, 2]
        >>> frontier.done(1)
        >>> state = frontier.state_dict()
        >>> state
        {'next': 3, 'open': '0,2'}
        >>> resumed = Frontier(max_open=4)
        >>> resumed.load_state_dict(state)
        >>> resumed.take(4)
        [0, 2, 3, 4]

    Complexity: memory for the ordinals that are handed out, and for the runs of the open ones.
    """

    def __init__(self, max_open: int, *, stop: int | None = None) -> None:
        self._max_open = check_whole(max_open, "max_open", 1)
        self._stop = MAX_ORDINAL if stop is None else check_whole(stop, "stop", 1)
        if self._stop > MAX_ORDINAL:
            raise InvalidRequestError(f"stop must be below 2**63, but is {stop!r}", key="stop")
        self._changed = threading.Condition()
        self._next = 0
        self._out: set[int] = set()
        self._again = _runs_of(())
        """Open ordinals that are not handed out."""

    def __repr__(self) -> str:
        status = self.status()
        return (
            f"Frontier(next {status.next}, {status.num_open} open, {status.num_out} of at most "
            f"{self._max_open} handed out)"
        )

    def __reduce__(self) -> Any:
        raise InvalidRequestError(
            "a Frontier can't be pickled, as two of them would hand out the same ordinals; send "
            "ordinals, an actor made of it, or its state_dict()"
        )

    def take(self, num: int = 1, *, timeout_s: float = 0.0) -> list[int]:
        """Hands out ordinals: first the open ones that were given back or restored, then new ones.

        Args:
            num: Number of ordinals.
            timeout_s: How long to wait while there are too many handed out, in seconds. In an actor
                without `max_concurrency`, leave it at 0: a call that waits keeps `done` waiting.

        Returns:
            `num` ordinals in ascending order. Fewer at the end, and none where all are handed out.

        Raises:
            LimitError: With these, more than `max_open` would be handed out. Nothing is changed.
            InvalidRequestError: `num` is not from 1 to `max_open`, or the timeout is not a number.
        """
        num = check_whole(num, "num", 1)
        timeout_s = check_above_0(timeout_s, "timeout_s", or_0=True)
        if num > self._max_open:
            raise InvalidRequestError(
                f"num must be at most max_open, {self._max_open}, but is {num}", key="num"
            )

        def found() -> int:
            return min(num, self._stop - self._next + _size(self._again))

        with self._changed:
            fits = self._changed.wait_for(
                lambda: len(self._out) + found() <= self._max_open, timeout_s
            )
            if not fits:
                raise LimitError(
                    f"expected to hand out {num} ordinals, found {len(self._out)} handed out of at "
                    f"most {self._max_open}: report some as done, give back those of workers that "
                    f"ended, or raise max_open",
                    key="max_open",
                )
            return self._handed_out(found())

    def _handed_out(self, num: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < num and len(self._again):
            start, stop = map(int, self._again[0])
            taken += range(start, min(stop, start + num - len(taken)))
            if taken[-1] + 1 < stop:
                self._again[0, 0] = taken[-1] + 1
            else:
                self._again = self._again[1:]
        new = num - len(taken)
        taken += range(self._next, self._next + new)
        self._next += new
        self._out.update(taken)
        return taken

    def done(self, ordinals: int | Iterable[int]) -> None:
        """Takes back ordinals as done: they are never handed out again.

        Args:
            ordinals: One ordinal or several, in any order.

        Raises:
            InvalidRequestError: One of them is not handed out: it was done or given back, or not
                handed out since the last restore. Nothing is changed.
        """
        with self._changed:
            self._out.difference_update(self._checked(ordinals))
            self._changed.notify_all()

    def give_back(self, ordinals: int | Iterable[int]) -> None:
        """Takes back ordinals that are not done, as of a worker that died.

        They are handed out next.

        Args:
            ordinals: As for `done`.

        Raises:
            InvalidRequestError: As `done`.
        """
        with self._changed:
            found = self._checked(ordinals)
            self._out.difference_update(found)
            self._again = _union([self._again, _runs_of([*found])])
            self._changed.notify_all()

    def _checked(self, ordinals: int | Iterable[int]) -> set[int]:
        several = ordinals if isinstance(ordinals, Iterable) else [ordinals]
        found = [check_whole(one, "ordinals") for one in several]
        # Why also these: a worker that names one twice has lost count of its work.
        wrong = {one for one, times in Counter(found).items() if times > 1 or one not in self._out}
        if wrong:
            shown = sorted(wrong)[:8]
            raise InvalidRequestError(
                f"expected ordinals that are handed out, each once, found "
                f"{', '.join(map(str, shown))}{', …' if len(wrong) > len(shown) else ''} (next is "
                f"{self._next}): done or given back already, or not handed out since the last "
                f"restore; drop what was made of them",
                key="ordinals",
            )
        return {*found}

    def status(self) -> FrontierStatus:
        """Returns where this frontier is."""
        with self._changed:
            num_open = len(self._out) + _size(self._again)
            return FrontierStatus(
                next=self._next,
                num_open=num_open,
                num_out=len(self._out),
                finished=self._next == self._stop and not num_open,
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the next ordinal, and the open ones as a text of runs such as `"3,7-9"`."""
        with self._changed:
            runs = _union([self._again, _runs_of([*self._out])]).tolist()
            texts = (
                f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in runs
            )
            return {"next": self._next, "open": ",".join(texts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`. What was handed out before is not handed out any more.

        Raises:
            StateDictError: `state` is not such a state, or is beyond `stop`; nothing is changed.
        """
        found, runs = _checked_frontier(state)
        if found > self._stop:
            raise StateDictError(
                f"expected a state below stop={self._stop}, found one whose next ordinal is {found}"
            )
        with self._changed:
            self._next, self._again, self._out = found, runs, set()
            self._changed.notify_all()


def _size(runs: Runs) -> int:
    return int((runs[:, 1] - runs[:, 0]).sum())


def _checked_frontier(state: Any) -> tuple[int, Runs]:
    """Returns the next ordinal and the runs of the open ones of a frontier's state."""
    found = state.get("next") if isinstance(state, Mapping) else None
    text = state.get("open") if isinstance(state, Mapping) else None
    wrong = StateDictError(
        f"expected the state of a Frontier, with a whole number next and ascending runs below it "
        f"in open, found {(dict(state) if isinstance(state, Mapping) else state)!r:.200}"
    )
    if type(found) is not int or not 0 <= found <= MAX_ORDINAL or not isinstance(text, str):
        raise wrong
    runs: list[tuple[int, int]] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        last = last if dash else first
        # Why the length: no number of that many digits is one of ours, and int() is slow on them.
        if not all(one.isascii() and one.isdigit() and len(one) < 20 for one in (first, last)):
            raise wrong
        run = (int(first), int(last) + 1)
        least = runs[-1][1] if runs else 0
        if not least <= run[0] < run[1] <= found:
            raise wrong
        runs.append(run)
    return found, np.array(runs, np.int64).reshape(-1, 2)
