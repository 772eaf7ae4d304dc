"""How much each holder of the same bytes is to write, so that nodes and their ranks end level.

The ranks of a node write by way of one disk or network card, so nodes are brought to a common
level first, and then the ranks of each. What is cut where is decided in `sharing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ray_dcp.plan.values import BoolArray, Int64Array

__all__ = ["Loads", "level_shares", "node_numbers"]

Ranks = npt.NDArray[np.integer]


def node_numbers(nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns which ranks share a node, as numbers in order of first appearance.

    So the same partition has the same numbers, whatever its nodes are called.

    Args:
        nodes: Of each rank; one without a name is a node of its own.

    Example:
        >>> node_numbers(["b", "b", "a", "", "", "b"])
        (0, 0, 1, 2, 3, 0)
    """
    known: dict[object, int] = {}
    return tuple(
        [known.setdefault(name or rank, len(known)) for rank, name in enumerate(nodes)]
    )  # fmt: skip


class Loads:
    """What each rank writes so far, as far as that is decided.

    Args:
        rank_bytes: int64[w], what each rank writes anyway; taken over, and grows.
        nodes: Number of each rank's node; by default each rank is on a node of its own.
    """

    def __init__(self, rank_bytes: Int64Array, nodes: Sequence[int] | None = None) -> None:
        self._bytes = rank_bytes
        if not nodes:
            nodes = range(len(rank_bytes))
        self._node = np.array(nodes, dtype=np.int64)
        self._node_bytes = np.zeros(int(self._node.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(self._node_bytes, self._node, rank_bytes)

    def add(self, ranks: Ranks, num_bytes: Int64Array) -> None:
        """Takes that ranks write more; a rank may come several times."""
        np.add.at(self._bytes, ranks, num_bytes)
        np.add.at(self._node_bytes, self._node[ranks], num_bytes)

    def bytes_of(self, ranks: Ranks) -> Int64Array:
        """Returns what each of some ranks writes so far."""
        return np.asarray(self._bytes[ranks])

    def by_node(self, ranks: Ranks) -> npt.NDArray[np.intp]:
        """Returns the positions of ranks in an order in which those of a node are adjacent.

        Example:
            >>> Loads(np.zeros(4, dtype=np.int64), (0, 1, 0, 1)).by_node(np.arange(4)).tolist()
            [0, 2, 1, 3]
        """
        return np.argsort(self._node[ranks], kind="stable")

    def of(self, ranks: Ranks) -> bytes:
        """Returns what names all that decides how some ranks share what they hold.

        Example:
            >>> loads = Loads(np.array([0, 3, 0, 3, 1, 3]), (0, 0, 1, 1, 2, 3))
            >>> loads.of(np.arange(2)) == loads.of(np.arange(2, 4))
            True
            >>> loads.of(np.arange(2)) == loads.of(np.arange(4, 6))
            False
        """
        names, node = np.unique(self._node[ranks], return_inverse=True)
        return b"".join(x.tobytes() for x in (self._bytes[ranks], self._node_bytes[names], node))

    def writers(self, holders: Ranks, total: int, min_bytes: int) -> Int64Array:
        """Returns which holders are to write: their positions, ascending.

        Nodes first, then ranks of each: as many as leave every one of them with `min_bytes` at
        least, among them what it writes anyway. Where that is not all, those come first who have
        as much at the lowest level, then those who have a file, and of equal ones those at equal
        distances.

        Args:
            holders: int[k], ranks, ascending.
            total: What they have to share, in bytes.
            min_bytes: What a writer should have at least; all write where it is 0.

        Example:
            Four ranks on two nodes share 40 bytes: two of them, as each is to have 20.

            >>> loads = Loads(np.zeros(4, dtype=np.int64), (0, 0, 1, 1))
            >>> loads.writers(np.arange(4), 40, 20).tolist()
            [0, 2]
        """
        if min_bytes <= 0:
            return np.arange(len(holders))
        load = self._bytes[holders]
        names, node = np.unique(self._node[holders], return_inverse=True)
        node_load, most = self._node_bytes[names], np.zeros(len(names), dtype=np.int64)
        np.maximum.at(most, node, load)
        # Why not node_load alone: what others on the node write is in files of theirs.
        chosen = _chosen(node_load, most, total, min_bytes)
        share = np.zeros(len(names), dtype=np.int64)
        share[chosen] = level_shares(node_load[chosen], total)
        low = load + _within(node, load, share)
        lowest = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(lowest, node, low)
        writes = (share > 0)[node]
        for index in np.flatnonzero((share > 0) & (lowest < min_bytes)).tolist():
            own = np.flatnonzero(node == index)
            writes[own] = _chosen(load[own], load[own], int(share[index]), min_bytes)
        return np.flatnonzero(writes)

    def shares(self, ranks: Ranks, total: int) -> Int64Array:
        """Returns how much each of some ranks is to get of `total` bytes.

        Example:
            The second node writes 6 bytes anyway.

            >>> loads = Loads(np.array([0, 0, 6, 0]), (0, 0, 1, 1))
            >>> loads.shares(np.arange(4), 10).tolist()
            [4, 4, 0, 2]
        """
        names, node = np.unique(self._node[ranks], return_inverse=True)
        share = level_shares(self._node_bytes[names], total)
        return _within(node, self._bytes[ranks], share)


def level_shares(load: Int64Array, total: int) -> Int64Array:
    """Returns how much each gets so that all come to one level, as far as `total` reaches.

    Example:
        >>> level_shares(np.array([5, 0, 9]), 9).tolist()
        [2, 7, 0]
    """
    return _within(np.zeros(len(load), dtype=np.int64), load, np.array([total]))


def _within(group: Int64Array, load: Int64Array, share: Int64Array) -> Int64Array:
    """Returns the same for several groups at once, of which each has its own total.

    Args:
        group: int64[k], from 0; none without members.
        load: int64[k].
        share: int64[groups], what each has to share.
    """
    order = np.lexsort((load, group))
    of, ordered = group[order], load[order]
    first = np.flatnonzero(np.diff(of, prepend=-1))
    line = np.cumsum(ordered)
    below = line - np.repeat(line[first] - ordered[first], np.diff(np.append(first, len(of))))
    number = np.arange(len(of)) - first[of] + 1
    levels = (share[of] + below) // number
    # Who is above the level of those below him is above all levels that follow.
    reached = np.bincount(of, weights=levels >= ordered).astype(np.int64)
    level = levels[first + reached - 1]
    return np.asarray(np.maximum(level[group] - load, 0))


def _chosen(load: Int64Array, most: Int64Array, total: int, min_bytes: int) -> BoolArray:
    """Returns which of several nodes (or ranks) share `total`; at least one.

    Args:
        load: int64[k], what each writes anyway.
        most: int64[k], how much of that is in one file of a holder; 0 where there is none.
        total: What they share.
        min_bytes: What one file of each should have at least.
    """
    # The level at which a file of each has enough, and more than it had.
    enough = load + np.maximum(min_bytes - most, 1)
    has_file = most > 0
    rank = np.where(has_file, np.maximum(load + 1, min_bytes), enough)
    order = np.lexsort((-load, enough, ~has_file, rank))
    count = _most(load, enough, order[:0], order, total)
    if count == 0:
        # Too little for the first: one takes it, whose file lacks least.
        order, count = np.lexsort((load, enough - load)), 1
    keys = np.stack([rank, has_file, enough, load])
    alike = (keys == keys[:, order[count - 1, None]]).all(axis=0)
    taken, equal = order[:count][~alike[order[:count]]], np.flatnonzero(alike)
    num_equal = count - len(taken)
    taken = np.append(taken, equal[np.arange(num_equal) * len(equal) // num_equal])
    chosen = np.zeros(len(load), dtype=bool)
    chosen[taken] = True
    # To those who have files already, no further file is made.
    more = order[has_file[order] & ~chosen[order]]
    chosen[more[: _most(load, enough, taken, more, total)]] = True
    return chosen


def _most(
    load: Int64Array, enough: Int64Array, taken: Int64Array, more: Int64Array, total: int
) -> int:
    """Returns how many more, the first ones, may share so that each comes to its `enough`."""
    low, high = 0, len(more)
    while low < high:
        middle = (low + high + 1) // 2
        those = np.append(taken, more[:middle])
        level = int((load[those] + level_shares(load[those], total)).min())
        if level >= enough[those].max():
            low = middle
        else:
            high = middle - 1
    return low
