"""The share of one stager in the memory of its node's store, which several jobs divide. Pure."""

from __future__ import annotations

from collections.abc import Collection


class NodeShare:
    """What one stager may take of its node's store, beside those of other jobs. Pure.

    Each of n stagers has an n-th of what all may take together, and nobody else gets it. One that
    had more, as it was alone, gives the rest back when its windows are written: until then the
    others take only what is left. So together they never take more.

    *Invariant*: a stager takes at most what it answers to the others (`bound_bytes`), or less.

    Args:
        node_bytes: What all stagers of the node may take together.
        most_bytes: What this one may take at most.

    Examples:
        >>> one, other = NodeShare(100, 100), NodeShare(100, 100)
        >>> other.only(["one"])
        >>> one.limit_bytes, other.limit_bytes  # not asked yet
        (100, 0)
        >>> one.meet(["other"], "one")
        >>> one.heard("other", other.bound_bytes(0))
        >>> other.heard("one", one.bound_bytes(70))  # it had been alone, and had 70 by then
        >>> one.limit_bytes, other.limit_bytes
        (50, 30)
        >>> other.heard("one", one.bound_bytes(20))
        >>> one.limit_bytes, other.limit_bytes
        (50, 50)
    """

    def __init__(self, node_bytes: int, most_bytes: int) -> None:
        self._node_bytes = node_bytes
        self._most_bytes = most_bytes
        self._bounds: dict[str, int] = {}
        """What each other stager takes at most; all there is before it has answered."""

    def meet(self, keys: Collection[str], own_key: str) -> None:
        """Records that other stagers exist."""
        for key in keys:
            if key != own_key:
                self._bounds.setdefault(key, self._node_bytes)

    def only(self, keys: Collection[str]) -> None:
        """Records that no stagers exist but these."""
        self._bounds = {key: self._bounds.get(key, self._node_bytes) for key in keys}

    def heard(self, key: str, bound_bytes: int) -> None:
        """Records the most bytes that another stager stages."""
        if key in self._bounds:
            self._bounds[key] = bound_bytes

    def bound_bytes(self, used_bytes: int) -> int:
        """Returns the most bytes that this stager stages until it asks the others again."""
        return max(used_bytes, self.fair_bytes)

    @property
    def limit_bytes(self) -> int:
        """The most bytes that this stager may stage now."""
        left_bytes = self._node_bytes - sum(self._bounds.values())
        return max(min(self.fair_bytes, left_bytes), 0)

    @property
    def fair_bytes(self) -> int:
        """The bytes that no other stager can get."""
        return min(self._most_bytes, self._node_bytes // (1 + len(self._bounds)))
