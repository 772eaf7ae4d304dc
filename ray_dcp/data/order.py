"""In which order samples come: one endless stream, epoch after epoch, the same on every machine.

Pure. A place in the stream is one number: how many samples come before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ray_dcp.errors import InvalidRequestError

__all__ = ["ORDER_VERSION", "SampleOrder", "check_epoch", "share_of"]

ORDER_VERSION = 1
"""Goes up when `SampleOrder` orders differently: places of two versions do not compare."""

MAX_SEED = 2**64


@dataclass
class SampleOrder:
    """The order of the samples of every epoch.

    Place p of the stream is a sample of epoch p // num_samples.

    Args:
        num_samples: Of the data set.
        seed: From 0, below 2 ** 64.
        shuffle: Whether every epoch has an order of its own; if not, all are 0, 1, 2, ….

    Raises:
        InvalidRequestError: There are no samples, or the seed is out of range.

    Example:
        >>> order = SampleOrder(5, seed=3)
        >>> sorted(order.samples(0, 5).tolist()), sorted(order.samples(5, 10).tolist())
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        >>> order.samples(3, 7).tolist() == order.samples(0, 10).tolist()[3:7]
        True

    Complexity: 4 bytes a sample, 8 from 2 ** 32 samples on, for each of the last two epochs asked.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    _epochs: dict[int, NDArray[np.unsignedinteger]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not _is_whole(self.num_samples) or self.num_samples < 1:
            raise InvalidRequestError(
                f"num_samples must be a whole number from 1, but is {self.num_samples!r}",
                key="num_samples",
            )
        if not _is_whole(self.seed) or not 0 <= self.seed < MAX_SEED:
            raise InvalidRequestError(
                f"seed must be a whole number from 0 and below 2**64, but is {self.seed!r}",
                key="seed",
            )

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
            # Why this generator: numpy promises its stream for ever, and torch promises none.
            key = [self.seed & 0xFFFFFFFF, self.seed >> 32, epoch & 0xFFFFFFFF, epoch >> 32]
            np.random.RandomState(key).shuffle(order)
            # Why two: a batch may cross from one epoch into the next.
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = order
        return order


def share_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns which of `count` things are a rank's: [start, stop).

    All are somebody's, in order of ranks; two ranks' numbers differ by at most one.

    Example:
        >>> [share_of(7, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    return count * rank // world_size, count * (rank + 1) // world_size


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_epoch(epoch: object) -> None:
    """Checks the number of an epoch.

    Raises:
        InvalidRequestError: It is no whole number from 0.
    """
    if type(epoch) is not int or epoch < 0:
        raise InvalidRequestError(
            f"an epoch must be a whole number from 0, but is {epoch!r}", key="epoch"
        )
