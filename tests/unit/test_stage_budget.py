"""The byte budget never lets more through than its limit, and gives everything back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.errors import InvalidRequestError, LimitError
from ray_dcp.stage.budget import ByteBudget

STEPS = st.lists(
    st.tuples(st.booleans(), st.sampled_from("abcd"), st.integers(0, 120)), max_size=40
)


@given(STEPS)
def test_any_sequence_agrees_with_a_dict_and_stays_under_the_limit(steps):
    budget, model = ByteBudget(100), {}
    for take, name, num_bytes in steps:
        if not take:
            budget.release(name)
            model.pop(name, None)
        elif num_bytes > 100:
            with pytest.raises(LimitError):
                budget.reserve(name, num_bytes)
        elif name in model and model[name] != num_bytes:
            with pytest.raises(InvalidRequestError):
                budget.reserve(name, num_bytes)
        else:
            fits = name in model or sum(model.values()) + num_bytes <= 100
            assert budget.reserve(name, num_bytes) == fits
            if fits:
                model[name] = num_bytes
        assert budget.reserved_bytes == sum(model.values()) <= 100


def test_a_negative_number_and_an_empty_limit_are_refused():
    with pytest.raises(InvalidRequestError):
        ByteBudget(0)
    with pytest.raises(InvalidRequestError):
        ByteBudget(1).reserve("a", -1)
