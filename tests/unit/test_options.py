"""Options check themselves when they are made, and tell which field is wrong."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import LoadOptions, SaveOptions

BOTH = [SaveOptions, LoadOptions]

CHOICES = [
    (SaveOptions, "replicas", ["warn", "check"]),
    (SaveOptions, "objects", ["warn", "refuse"]),
    (SaveOptions, "nonfinite", ["ignore", "warn", "refuse"]),
    (SaveOptions, "when_full", ["wait", "skip"]),
    (SaveOptions, "staging", ["call", "background"]),
    (LoadOptions, "dtype", ["widen", "error", "cast"]),
    (LoadOptions, "verify", ["always", "sample", "never"]),
    (LoadOptions, "share_reads", ["auto"]),
]

FLAGS = [
    (cls, field.name)
    for cls in BOTH
    for field in dataclasses.fields(cls)
    if isinstance(field.default, bool)
]

NUMBERS = [
    (cls, field.name)
    for cls in BOTH
    for field in dataclasses.fields(cls)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
    if field.name != "keep_in_memory"
]


@pytest.mark.parametrize("cls", BOTH)
def test_options_are_frozen_and_keyword_only(cls: type):
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().num_threads = 3
    with pytest.raises(TypeError):
        cls(True)


@pytest.mark.parametrize("cls", BOTH)
def test_options_are_values(cls: type):
    changed = dataclasses.replace(cls(), num_threads=7)
    assert changed != cls()
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert len({cls(), cls(), changed}) == 2


@pytest.mark.parametrize(("cls", "name", "choices"), CHOICES)
def test_a_choice_is_one_of_those_named(cls: type, name: str, choices: list[str]):
    for choice in choices:
        assert getattr(cls(**{name: choice}), name) == choice
    for other in ("", choices[0].upper(), None, 1):
        with pytest.raises(InvalidRequestError, match=f"{cls.__name__}.{name} must be") as caught:
            cls(**{name: other})
        assert caught.value.key == name
        assert all(repr(choice) in str(caught.value) for choice in choices)
        assert repr(other) in str(caught.value)


@pytest.mark.parametrize(("cls", "name"), FLAGS)
@pytest.mark.parametrize("other", [1, 0, None, "no"])
def test_a_flag_is_true_or_false(cls: type, name: str, other: Any):
    with pytest.raises(InvalidRequestError, match=f"{cls.__name__}.{name} must be True or False"):
        cls(**{name: other})


@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("other", [0, -1, True, None, "3", float("nan")])
def test_a_number_is_above_zero(cls: type, name: str, other: Any):
    expected = rf"{cls.__name__}.{name} must be a (number above 0|whole number from 1)"
    with pytest.raises(InvalidRequestError, match=expected):
        cls(**{name: other})


@pytest.mark.parametrize(("cls", "name"), [one for one in NUMBERS if not one[1].endswith("_s")])
def test_a_count_is_whole(cls: type, name: str):
    with pytest.raises(InvalidRequestError, match=f"{name} must be a whole number from 1, .* 1.5"):
        cls(**{name: 1.5})


@pytest.mark.parametrize(("cls", "name"), [one for one in NUMBERS if one[1].endswith("_s")])
def test_a_timeout_is_one_that_can_be_waited_for(cls: type, name: str):
    """Python's waits would raise OverflowError, for a commit when it is under way already."""
    for other in (float("inf"), 1e12):
        with pytest.raises(InvalidRequestError, match=f"{cls.__name__}.{name} must be .* years"):
            cls(**{name: other})
    assert getattr(cls(**{name: 1e8}), name) == 1e8


@pytest.mark.parametrize("other", [None, 5, "model", [""], [1]])
def test_prefixes_are_names(other: Any):
    with pytest.raises(InvalidRequestError, match=r"LoadOptions.prefixes must be a list"):
        LoadOptions(prefixes=other)


@pytest.mark.parametrize("other", [-1, 0.5, True, None, "3"])
def test_how_many_stay_in_memory_is_a_number_and_may_be_none(other: Any):
    with pytest.raises(InvalidRequestError, match="keep_in_memory must be a whole number from 0"):
        SaveOptions(keep_in_memory=other)
    assert SaveOptions(keep_in_memory=2).keep_in_memory == 2
