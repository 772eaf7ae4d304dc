"""Writers that crash, freeze and are succeeded, beside people who tag, remove and read."""

from __future__ import annotations

from collections import Counter

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.manager_play import play

_reached: Counter[str] = Counter()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def _no_step_is_deleted_that_must_stand(seed):
    model = play(seed)
    assert model.wrong == []
    for what in model.seen:
        event(what)
    _reached.update(model.seen)


def test_no_step_is_deleted_that_must_stand_whatever_happens_at_once():
    """More rounds by hand: `python -m tests.manager_play 200`."""
    _no_step_is_deleted_that_must_stand()
    assert _reached["deleted, by retention"] >= 1
    assert _reached["saved"] >= 10
