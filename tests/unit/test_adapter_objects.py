"""Objects go through `torch.save`, come back under the allow-list, and nothing else runs."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import random
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_dcp.errors import DamagedCheckpointError, UnsafeCheckpointError, UnsupportedValueError
from ray_dcp.torch_adapter.objects import (
    dump_object,
    is_simple,
    load_object,
    load_problem,
    simple_digest,
)
from tests.support import hostile


class Settings:
    """A class of the user, on no allow-list."""

    def __init__(self, value: int = 3) -> None:
        self.value = value


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


class Precision(enum.Enum):
    """Of the user."""

    BF16 = "bf16"


class ByName:
    """Saved as Python 3.11.0 to 3.11.3 saves a member of an enumeration."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, self.args)


class NamedDict(dict):  # type: ignore[type-arg]
    """What torch's safe unpickler can't fill even when it is allowed."""


VALUES: dict[str, Any] = {
    "array": np.arange(6.0).reshape(2, 3),
    "fortran order": np.asfortranarray(np.ones((2, 3))),
    "object array": np.array([1, "a"], dtype=object),
    "text array": np.array(["a", "bb"]),
    "record array": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "scalar": np.float32(1.5),
    "bool scalar": np.bool_(True),
    "text scalar": np.str_("x"),
    "dtype": np.dtype("<f4"),
    "numpy state": np.random.RandomState(0).get_state(legacy=False),
    "generator state": np.random.default_rng(0).bit_generator.state,
    "python state": random.Random(0).getstate(),
    "datetime": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2020, 1, 1),
    "timedelta": datetime.timedelta(1),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "path": pathlib.Path("/a"),
    "windows path": pathlib.PureWindowsPath("a"),
    "uuid": uuid.UUID(int=5),
    "deque": collections.deque([1, 2], maxlen=3),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(a=1),
    "frozenset": frozenset({1, "a"}),
    "long key": {tuple(range(10_000)): 1},
    "range": range(3),
    "slice": slice(1, 2),
    "bytes": (b"abc", bytearray(b"x")),
    "complex": 1j,
    "namespace": types.SimpleNamespace(a=1),
    "arguments": argparse.Namespace(lr=0.1),
    "ellipsis": (..., NotImplemented, int, float),
    "torch": (torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_state_dicts_come_back_equal_whatever_way_torch_saves_them(name: str) -> None:
    value = VALUES[name]
    data = dump_object(value, fqn="a")
    assert load_problem(value, data, fqn="a") is None
    saved = [data]
    for protocol in (2, 3, 4, 5):
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_protocol=protocol)
        saved.append(buffer.getvalue())
    for data in saved:
        back, trusted = (load_object(data, fqn="a", weights_only=safe) for safe in (True, False))
        assert type(back) is type(trusted) is type(value)
        assert str(back) == str(trusted)
        assert (isinstance(value, dict) and "state" in value) or np.all(back == value)


@pytest.mark.parametrize(
    "value",
    [collections.deque(), collections.deque([1]), collections.deque(maxlen=3), set()],
    ids=repr,
)
def test_many_containers_that_take_more_memory_than_their_pickle_come_back(value: Any) -> None:
    many = [copy.copy(value) for _ in range(20_000)]
    data = dump_object(many, fqn="a")
    assert load_problem(many, data, fqn="a") is None
    assert load_object(data, fqn="a") == many


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.RandomState(3), lambda rng: rng.random(4).tolist()),
        *(
            (np.random.Generator(bits(3)), lambda rng: rng.random(4).tolist())
            for bits in (
                np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64,
                np.random.PCG64DXSM,
            )
        ),
        (torch.Generator().manual_seed(3), lambda rng: torch.rand(3, generator=rng).tolist()),
        (random.Random(3), lambda rng: rng.random()),
    ],
    ids=lambda value: type(getattr(value, "bit_generator", value)).__name__,
)  # fmt: skip
def test_random_generators_go_on_where_they_were(generator: Any, draw: Any) -> None:
    draw(generator)
    back = load_object(dump_object(generator, fqn="rng"), fqn="rng")
    assert draw(back) == draw(generator)


def test_a_class_of_the_user_is_told_with_the_line_that_allows_it_and_loads_after_that() -> None:
    data = dump_object(Settings(5), fqn="cfg")
    line = f"torch.serialization.add_safe_globals([{Settings.__module__}.Settings])"
    problem = load_problem(Settings(5), data, fqn="cfg")
    assert problem is not None
    assert line in problem
    assert "'cfg'" in problem
    assert f"{Settings.__module__}.Settings" in problem
    with pytest.raises(UnsafeCheckpointError) as caught:
        load_object(data, fqn="cfg")
    assert line in str(caught.value)
    assert caught.value.key == "cfg"
    with torch.serialization.safe_globals([Settings]):
        assert load_problem(Settings(5), data, fqn="cfg") is None
        assert load_object(data, fqn="cfg").value == 5
    assert load_object(data, fqn="cfg", weights_only=False).value == 5


def test_a_member_of_an_enumeration_that_the_user_allowed_is_loaded_however_it_was_saved():
    saved = [dump_object(Precision.BF16, fqn="a"), dump_object(ByName(Precision, "BF16"), fqn="a")]
    for data in saved:
        with pytest.raises(UnsafeCheckpointError, match="Precision"):
            load_object(data, fqn="a")
    with torch.serialization.safe_globals([Precision, Settings]):
        assert [load_object(data, fqn="a") for data in saved] == [Precision.BF16] * 2
        for wrong in [(Precision, "mro"), (Settings, "__init__"), (Precision, 1), (Precision,)]:
            with pytest.raises(UnsafeCheckpointError, match="other arguments"):
                load_object(dump_object(ByName(*wrong), fqn="a"), fqn="a")


def test_an_object_that_no_line_can_allow_says_so() -> None:
    for value in (NamedDict(a=1), 1 << 5000):
        with torch.serialization.safe_globals([NamedDict]):
            problem = load_problem(value, dump_object(value, fqn="a"), fqn="a")
        assert problem is not None
        assert "store what it is made of" in problem
        assert "add_safe_globals" not in problem


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    data = dump_object((1, Bomb(mark)), fqn="a")
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        load_object(data, fqn="a")
    assert not mark.exists()
    load_object(data, fqn="a", weights_only=False)
    assert mark.exists(), "the bomb is none"


@pytest.mark.parametrize("damage", [b"", b"not a zip", "half", "flip"])
def test_damaged_bytes_are_called_damaged(damage: Any) -> None:
    data = dump_object({"a": [1.5] * 50}, fqn="a")
    if damage == "half":
        damage = data[: len(data) // 2]
    elif damage == "flip":
        damage = data[:30] + b"\xff" * 200 + data[230:]
    with pytest.raises(DamagedCheckpointError):
        load_object(damage, fqn="a")


def test_what_does_not_pickle_is_refused_by_name_and_class() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'hook' holds a builtins\.function"):
        dump_object(lambda: 1, fqn="hook")


def test_the_digest_of_a_simple_value_is_one_of_its_value_not_of_its_objects() -> None:
    long, one, other = "".join(["long", "er"]), {0, 8}, {8, 0}
    assert simple_digest([long, long]) == simple_digest(["longer", "".join(["longe", "r"])])
    assert list(one) != list(other)
    assert simple_digest({"k": [one]}) == simple_digest({"k": [other]})
    different = [1, 1.0, True, "1", None, [1], (1,), {1}, frozenset({1}), {1: 1}, [[1]], b"1", []]
    assert len({simple_digest(value) for value in different}) == len(different)


def test_tensors_and_streams_inside_objects_come_back() -> None:
    value = (1, torch.arange(3), torch.nn.Parameter(torch.ones(2)), io.BytesIO(b"abc"))
    back = load_object(dump_object(value, fqn="a"), fqn="a")
    assert back[1].equal(value[1])
    assert isinstance(back[2], torch.nn.Parameter)
    assert back[3].read() == b"abc"


def test_simple_values_are_told_from_others() -> None:
    for simple in (1, 1.5, "a", None, True, b"x", [1, [2, (3, "b")]], {"a": {1: {2, 3}}}, ()):
        assert is_simple(simple)
        assert load_problem(simple, dump_object(simple, fqn="a"), fqn="a") is None
    loop: list[Any] = []
    loop.append(loop)
    for other in (np.float32(1), collections.OrderedDict(), 1 << 5000, loop, [torch.ones(1)]):
        assert not is_simple(other)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        (b"K\2\x85", b"K\1\x85", b"K\0"),
        (b"K\1\x85", b"K\1\x85", b"K\1"),
        (b"K\1K\2\x86",) * 2 + (b"K\0",),
    ],
    ids=["longer", "behind", "with a step"],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused_and_not_filled_up(
    size: bytes, stride: bytes, offset: bytes
) -> None:
    """Torch would lengthen the storage, with whatever lay in that memory."""
    data = hostile.on_storage(hostile.view(size, stride, offset))
    with pytest.raises(DamagedCheckpointError, match="outside its storage"):
        load_object(data, fqn="a")
