"""Marks by which a repeated command knows that its work is done: leases, scratch directories.

They are removed by the last calls of a command, so that one that is killed before its end finds
them when it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_later: ContextVar[list[Callable[[], object]] | None] = ContextVar("_later", default=None)


@contextmanager
def marks_removed_last() -> Iterator[None]:
    """Removes at the end of the block the marks by which repeated commands know what is done.

    If the block fails, the marks of work that is done stay: the repeated command finds them. Blocks
    may be nested; the outermost one removes them.
    """
    outer, own = _later.get(), list[Callable[[], object]]()
    token = _later.set(own)
    try:
        yield
    finally:
        _later.reset(token)
    if outer is not None:
        outer += own
        return
    for remove in own:
        remove()


def remove_mark(remove: Callable[[], object]) -> None:
    """Removes a mark of work that is done: at once, or at the end of `marks_removed_last`."""
    later = _later.get()
    if later is None:
        remove()
    else:
        later.append(remove)
