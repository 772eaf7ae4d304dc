"""`ElasticBatchSampler`: a batch sampler whose position is valid for any number of ranks.

All epochs form one endless stream of samples, whose order is the same on every machine. A place in
the stream is the number of samples before it:

    place    0            N            2N
    stream   |- epoch 0 --|- epoch 1 --|- epoch 2 -- ...
    batches  [0 1|2 3][0 1|2 3] ...            global batches, each divided among ranks (here 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ray_dcp.core.checks import check_whole
from ray_dcp.errors import InvalidRequestError, StateDictError

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
        check_whole(self.num_samples, "num_samples", 1)
        if check_whole(self.seed, "seed") >= MAX_SEED:
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
        check_rank(rank, world_size)
        self._rank, self._world_size = rank, world_size
        self._step = _step(global_batch_size, batch_size, world_size)
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


def check_rank(rank: Any, world_size: Any) -> None:
    """Raises `InvalidRequestError` unless `0 <= rank < world_size`."""
    if type(world_size) is not int or type(rank) is not int or not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"rank must be a whole number from 0 and below world_size, but they are {rank!r} and "
            f"{world_size!r}",
            key="rank",
        )


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
