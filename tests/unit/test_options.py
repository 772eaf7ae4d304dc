"""Options check themselves when they are made, and tell which field is wrong."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from ray_dcp import InvalidRequestError, LoadOptions, SaveOptions

BOTH = [SaveOptions, LoadOptions]
FIELDS = [(cls, name, hint) for cls in BOTH for name, hint in get_type_hints(cls).items()]

# By the type of a field: values that it does not take, and what the error says.
WRONG = {
    bool: ([1, 0, None, "no"], "True or False"),
    int: ([-1, True, None, "3", math.nan, 1.5], "a whole number from"),
    float: ([0, -1, True, None, "3", math.nan, math.inf, 1e12], "a number above 0 .*years"),
}


@pytest.mark.parametrize("cls", BOTH)
def test_options_are_frozen_values_and_keyword_only(cls: type):
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().num_threads = 3
    with pytest.raises(TypeError):
        cls(True)
    changed = dataclasses.replace(cls(), num_threads=7)
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert len({cls(), cls(), changed}) == 2


@pytest.mark.parametrize(("cls", "name", "hint"), [one for one in FIELDS if one[2] in WRONG])
def test_a_flag_and_a_number_are_checked(cls: type, name: str, hint: type):
    wrong, told = WRONG[hint]
    for other in [*wrong, *[0] * (hint is int and name != "keep_in_memory")]:
        with pytest.raises(InvalidRequestError, match=f"{cls.__name__}.{name} must be {told}"):
            cls(**{name: other})
    good = {bool: False, int: 2, float: 1e8}[hint]
    assert getattr(cls(**{name: good}), name) == good


@pytest.mark.parametrize(
    ("cls", "name", "hint"), [one for one in FIELDS if get_origin(one[2]) is Literal]
)
def test_a_choice_is_one_of_those_named(cls: type, name: str, hint: Any):
    for choice in get_args(hint):
        assert getattr(cls(**{name: choice}), name) == choice
    for other in ("", get_args(hint)[0].upper(), None, 1):
        with pytest.raises(InvalidRequestError, match=f"{cls.__name__}.{name} must be") as caught:
            cls(**{name: other})
        assert caught.value.key == name
        assert all(repr(one) in str(caught.value) for one in (*get_args(hint), other))


@pytest.mark.parametrize(
    ("name", "others", "told"),
    [
        ("prefixes", [None, 5, "model", [""], [1]], "a list"),
        ("share_reads", ["", "AUTO", None, 1], "True or False or 'auto'"),
    ],
)
def test_other_choices_of_a_load_are_checked(name: str, others: list[Any], told: str):
    for other in others:
        with pytest.raises(InvalidRequestError, match=f"LoadOptions.{name} must be {told}"):
            LoadOptions(**{name: other})
