"""The byte budget of a node: who may have how much in its object store, as named reservations."""

from __future__ import annotations

import threading

from ray_dcp.errors import InvalidRequestError, LimitError

__all__ = ["ByteBudget"]


class ByteBudget:
    """Reservations of bytes under one limit. Calls may come from several threads, and twice.

    Args:
        limit_bytes: The most that may be reserved at a time.

    Example:
        >>> budget = ByteBudget(100)
        >>> budget.reserve("a", 70), budget.reserve("a", 70), budget.reserve("b", 70)
        (True, True, False)
        >>> budget.release("a")
        >>> budget.reserve("b", 70)
        True
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise InvalidRequestError(
                f"Expected a limit of at least 1 byte, but found {limit_bytes!r}",
                key="limit_bytes",
            )
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._reserved: dict[str, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are reserved now."""
        with self._lock:
            return sum(self._reserved.values())

    def reserve(self, reservation: str, num_bytes: int) -> bool:
        """Returns whether the bytes are reserved now.

        Args:
            reservation: Name of the reservation. Again with the same number, it is the same one.
            num_bytes: How many bytes, at least 0.

        Raises:
            InvalidRequestError: The number is negative, or another one than before.
            LimitError: They do not fit into an empty budget either.
        """
        if num_bytes < 0:
            raise InvalidRequestError(f"Expected at least 0 bytes, but found {num_bytes}")
        if num_bytes > self.limit_bytes:
            raise LimitError(
                f"Expected at most {self.limit_bytes} bytes to be staged on a node at a time, but "
                f"{num_bytes} are asked for. Start Ray with a larger object store, or stage in "
                f"smaller buffers",
                key="limit_bytes",
            )
        with self._lock:
            before = self._reserved.get(reservation)
            if before is not None and before != num_bytes:
                raise InvalidRequestError(
                    f"Expected reservation {reservation!r} to be for {before} bytes as before, "
                    f"but found {num_bytes}"
                )
            if before is None:
                if sum(self._reserved.values()) + num_bytes > self.limit_bytes:
                    return False
                self._reserved[reservation] = num_bytes
            return True

    def release(self, reservation: str) -> None:
        """Gives a reservation back; one that is not there is fine."""
        with self._lock:
            self._reserved.pop(reservation, None)
