"""What is in memory is asked for early, and again where nothing was found."""

from __future__ import annotations

import threading

import pytest

from ray_dcp.runtime.rank_load import MemorySource
from ray_dcp.store.memory import MemoryStorage

STORAGE = MemoryStorage("rank-memory")


def test_it_is_asked_before_the_answer_is_needed_and_once_where_there_is_one():
    asked = threading.Event()
    calls = []

    def kept(storage, attempt):
        calls.append((storage, attempt, threading.current_thread() is threading.main_thread()))
        asked.set()
        return storage

    source = MemorySource(kept)
    source.ask(STORAGE, "a1")
    assert asked.wait(180)
    assert source.found() is STORAGE
    assert calls == [(STORAGE, "a1", False)]


def test_nothing_found_early_is_asked_again():
    answers = [None, STORAGE]
    source = MemorySource(lambda storage, attempt: answers.pop(0))
    source.ask(STORAGE, "a1")
    assert source.found() is STORAGE
    assert answers == []


def test_an_error_is_raised_where_it_is_heard():
    def kept(storage, attempt):
        raise ValueError("no memory")

    source = MemorySource(kept)
    source.ask(STORAGE, "a1")
    with pytest.raises(ValueError, match="no memory"):
        source.found()


@pytest.mark.parametrize(("has_kept", "attempt"), [(False, "a1"), (True, None)])
def test_nobody_is_asked_without_memory_or_an_attempt(has_kept, attempt):
    calls = []
    source = MemorySource((lambda *given: calls.append(given)) if has_kept else None)
    source.ask(STORAGE, attempt)
    assert source.found() is None
    assert calls == []
