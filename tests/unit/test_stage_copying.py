"""Memory is copied whole, whoever takes part."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ray_dcp.stage import copying
from ray_dcp.stage.copying import copy_all
from tests.polling import eventually

MIB = 1 << 20


def pairs(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (np.zeros(length, np.uint8), random.integers(1, 256, length, dtype=np.uint8))
        for length in lengths
    ]


@pytest.mark.parametrize("num_threads", [None, 1, 3, 99])
def test_every_byte_of_every_length_is_copied(num_threads):
    given = pairs(0, 1, 9 * MIB + 5, 4 * MIB, 3, *range(200))
    copy_all(iter(given), num_threads)
    assert all(np.array_equal(into, found) for into, found in given)


def test_nothing_to_copy_is_fine():
    copy_all([])


def test_other_threads_take_part(monkeypatch):
    """The caller's own thread can't go on before another one has copied something."""
    real, seen, helped = np.copyto, set(), threading.Event()

    def copyto(*pair):
        seen.add(threading.get_ident())
        if threading.get_ident() == caller:
            assert helped.wait(180)
        else:
            helped.set()
        real(*pair)

    caller = threading.get_ident()
    monkeypatch.setattr(copying.np, "copyto", copyto)
    given = pairs(20 * MIB)
    copy_all(given, 2)
    assert len(seen) == 2
    assert np.array_equal(*given[0])


def test_it_returns_only_when_the_others_have_ended(monkeypatch):
    real, begun, go = np.copyto, threading.Event(), threading.Event()

    def copyto(*pair):
        if threading.get_ident() != caller:
            begun.set()
            assert go.wait(180)
        elif not begun.wait(180):
            raise AssertionError("nobody helps")
        elif not left:
            go.set()
        else:
            left.pop()
        real(*pair)

    caller, left = threading.get_ident(), [None]
    monkeypatch.setattr(copying.np, "copyto", copyto)
    given = pairs(12 * MIB)
    copy_all(given, 2)
    assert np.array_equal(*given[0])


def test_without_other_threads_the_caller_does_all(monkeypatch):
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(copying, "_helpers", ended)
    given = pairs(20 * MIB)
    copy_all(given, 4)
    assert np.array_equal(*given[0])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_lengths_that_differ_are_an_error(num_threads):
    into, found = np.zeros(9 * MIB, np.uint8), np.ones(9 * MIB - 1, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        copy_all([(into, found)], num_threads)


def test_who_is_interrupted_leaves_nobody_who_goes_on_copying(monkeypatch):
    """The caller may use the memory for something else then."""
    begun, interrupted, copied = threading.Event(), threading.Event(), []

    def copyto(*pair):
        if threading.get_ident() == caller:
            assert begun.wait(180)
            interrupted.set()
            raise KeyboardInterrupt
        copied.append(pair)
        begun.set()
        assert interrupted.wait(180)

    caller = threading.get_ident()
    monkeypatch.setattr(copying.np, "copyto", copyto)
    monkeypatch.setattr(copying, "deque", SlowToEmpty)
    with pytest.raises(KeyboardInterrupt):
        copy_all(pairs(40 * MIB), 2)
    assert len(copied) == 1


class SlowToEmpty(deque):
    """Gives nothing more once it was asked by two threads, until it is empty."""

    def popleft(self):
        if len(self) < 9:
            assert eventually(lambda: not self)
        return super().popleft()
