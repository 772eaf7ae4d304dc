"""Small files that ask for much, or for code to run: refused by name, at once, in little memory."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_dcp import DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format.metadata import allowed_global, read_pickle
from ray_dcp.torch_adapter.objects import dump_object, load_object, load_problem
from tests.support import hostile

ROOT = Path(__file__).parents[2]
OTHER_ERRORS = {
    "object: a compressed pickle": "DamagedCheckpointError",
    "safetensors: a dtype that is not read here": "UnsupportedValueError",
    "safetensors: a length of 99 MB": "NeedMoreBytes",
    # A ChainMap may well name one dict often: it is looked at once.
    ".metadata: a chain of one dict": "nothing",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What came of each file, in a process that may take 12 GiB more than it began with."""
    log = tmp_path_factory.mktemp("hostile") / "log"
    with log.open("w") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.hostile"],
            cwd=ROOT,
            stdout=out,
            timeout=900,
            check=False,
        )
    found: dict[str, list] = {}
    for line in log.read_text().splitlines():
        case, *outcome = json.loads(line)
        found[case] = outcome
    assert ended.returncode == 0, f"{list(found)[-1:]} ended the process: {ended.returncode}"
    return found


@pytest.mark.parametrize("case", hostile.cases())
def test_it_is_refused_by_name_in_time_and_in_little_memory(case: str, outcomes):
    num_bytes, error, told, _, peak_bytes = outcomes[case]
    default = "UnsafeCheckpointError" if case.startswith("object: ") else "DamagedCheckpointError"
    assert error == OTHER_ERRORS.get(case, default), told
    assert len(told) < 3000
    assert peak_bytes < hostile.FREE_BYTES + hostile.BYTES_A_BYTE * num_bytes


def test_a_place_in_the_memo_must_be_the_next_one():
    """Every pickler counts them up; a list that grows to any index would fill the memory."""
    assert read_pickle(b"\x80\x02K\x07q\x00h\x00.") == 7
    assert read_pickle(b"\x80\x02K\x07r\x00\x00\x00\x00h\x00.") == 7
    for skipped in (b"q\x01", b"r\x01\x00\x00\x00", b"r\xff\xff\xff\xff"):
        # Without the check the value would land in place 0, and be found there.
        with pytest.raises(DamagedCheckpointError, match="memo indices in order"):
            read_pickle(b"\x80\x02K\x07" + skipped + b"h\x00.")


def test_a_name_that_comes_twice_is_refused():
    """No pickler writes one twice, and readers need not agree on which of them counts."""
    once = hostile.text("w") + b"K\1"
    assert read_pickle(b"\x80\x02}(" + once + b"u.") == {"w": 1}
    for twice in (b"}(" + once * 2 + b"u.", b"}(" + once + b"u" + once + b"s."):
        with pytest.raises(DamagedCheckpointError, match="each name once"):
            read_pickle(b"\x80\x02" + twice)


def test_every_error_can_be_printed_whatever_it_quotes():
    error = DamagedCheckpointError("found '\ud800'", key="a\udc80")
    assert str(error) == r"found '\ud800' [key a\udc80]"
    assert error.message == "found '\ud800'"
    assert str(DamagedCheckpointError("größer")) == "größer"


def test_names_that_look_like_others_are_other_names():
    """Letters of other alphabets, and full-width ones, are neither allowed nor folded."""
    for dotted in ("tоrch.Size", "torch.Ｓize", "torch.Size\u200b", "torch.float32\u0301"):
        assert allowed_global(dotted) is None


# What objects really are must still load


DTYPES = {
    "record": np.dtype([("a", "i4"), ("b", "f8", (2, 3)), ("c", "S5")]),
    "aligned record": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "record with room": np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4],
                                  "itemsize": 16}),
    "record of records": np.dtype([("r", [("a", "<i2"), ("t", "M8[ns]")]), ("u", "U3")]),
    "big-endian": np.dtype(">f4"),
    "objects": np.dtype("O"),
    "text": np.dtype("U7"),
    "bytes": np.dtype("S3"),
    "room": np.dtype("V9"),
    "dates": np.dtype("M8[25us]"),
    "times": np.dtype("m8[D]"),
    "times without unit": np.dtype("m8"),
    "long double": np.dtype("longdouble"),
    "complex": np.dtype("c16"),
    "bool": np.dtype("?"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype_that_numpy_pickles_still_loads(kind: str):
    value = {"dtype": DTYPES[kind], "array": np.zeros((2, 3), DTYPES[kind])}
    data = dump_object(value, fqn="a")
    assert load_problem(value, data, fqn="a") is None
    back, plain = load_object(data, fqn="a"), pickle.loads(pickle.dumps(value, 2))
    assert back["dtype"] == DTYPES[kind]
    assert back["dtype"].flags == DTYPES[kind].flags
    assert back["array"].dtype == plain["array"].dtype
    np.testing.assert_array_equal(back["array"], value["array"])


@pytest.mark.parametrize("change", range(8))
def test_a_dtype_that_says_anything_else_than_numpy_would_is_refused(change: int):
    state = [*hostile.LYING[:7], b"K\x3f"]
    good = hostile.item(hostile.dtype("O8", *state))
    assert load_object(good, fqn="a") == np.dtype("O")
    others = [
        b"K\x09", hostile.text("<"), hostile.dtype("i4") + b"K\x02\x85\x86", hostile.text("a")
        + b"\x85", b"}", b"K\x10", b"K\x10", b"K\x1f",
    ]  # fmt: skip
    state[change] = others[change]
    with pytest.raises(UnsafeCheckpointError):
        load_object(hostile.item(hostile.dtype("O8", *state)), fqn="a")


@pytest.mark.parametrize("place", [0, 623, 624])
def test_a_generator_may_stand_anywhere_in_its_words(place: int):
    words = hostile.words(key=hostile.KEYS, pos=hostile.number(place))
    back = load_object(hostile.item(hostile.generator("MT19937", words)), fqn="a")
    assert back.state["state"]["pos"] == place


def test_a_zip_whose_end_is_not_its_directory_is_refused():
    """Two readers that look for the directory in different ways would see different files."""
    data = dump_object({"a": 1}, fqn="a")
    assert load_object(data, fqn="a") == {"a": 1}
    for wrong in (data + b"\0", data + data, data[:-1], data[:-2] + b"\1\0" + b"x"):
        with pytest.raises(DamagedCheckpointError):
            load_object(wrong, fqn="a")


def test_what_the_user_allowed_is_not_held_against_these_rules():
    class Own:
        def __init__(self, *parts: object) -> None:
            self.parts = parts

    data = hostile.item(hostile.call("tests.own.Own", hostile.call("builtins.range", b"K\5")))
    with torch.serialization.safe_globals([(Own, "tests.own.Own")]):
        assert load_object(data, fqn="a").parts == (range(5),)


NESTED = [
    (b"]", b"a"),
    (b"", b"\x85"),
    (b"}N", b"s"),
    (b"ccollections\nOrderedDict\n)RN", b"s"),
    (b"cbuiltins\nfrozenset\n]", b"a\x85R"),
    (b"ccollections\nCounter\n)RN", b"s"),
    (b"cargparse\nNamespace\n)R}X\1\0\0\0a", b"sb"),
    (b"ctypes\nSimpleNamespace\n)R}X\1\0\0\0a", b"sb"),
]


def test_values_nested_deep_are_made_and_freed():
    """Python frees what is nested by recursion; where that has no bound the process ends."""
    program = (
        "import sys\nfrom tests.support import hostile\n"
        "from ray_dcp.torch_adapter.objects import load_object\n"
        f"for begin, end in {NESTED!r}:\n"
        "    data = hostile.item(hostile.nested(100_000, b'N', begin, end))\n"
        "    value = load_object(data, fqn='a')\n    assert value is not None\n    del value\n"
        "    print(begin, 'freed')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("freed") == len(NESTED)


def test_records_are_checked_under_any_spelling_of_their_name():
    """torch finds a record without regard to case."""
    bomb = hostile.OBJECTS["a list of a range"]()
    with pytest.raises(UnsafeCheckpointError):
        load_object(bomb.replace(b"data.pkl", b"DATA.PKL"), fqn="a")
