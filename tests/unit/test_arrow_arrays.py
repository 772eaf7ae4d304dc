"""Arrow arrays are made and read without pandas, and are what Arrow itself makes and reads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from ray_dcp.core import columns
from ray_dcp.core.columns import from_bytes, from_numpy, from_texts, is_missing, texts, to_numpy

NULL = np.array([i % 3 == 1 for i in range(21)])


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint64", "float32", "bool"])
@pytest.mark.parametrize("null", [None, NULL])
def test_numbers_are_those_that_arrow_makes_and_come_back(
    dtype: str, null: np.ndarray | None
) -> None:
    values = (np.arange(21) % 7 > 2 if dtype == "bool" else np.arange(21) * 3).astype(dtype)
    array = from_numpy(values, null=null)
    array.validate(full=True)
    assert array.equals(pa.array(values, mask=null))
    part = array[5:17]  # neither the begin nor the end of a byte of truth values
    if null is not None:
        assert is_missing(part).tolist() == NULL[5:17].tolist()
        with pytest.raises(ValueError, match="4 missing"):
            to_numpy(part)
    expected = values if null is None else np.where(null, values.dtype.type(1), values)
    found = to_numpy(part, blank=1)
    assert found.dtype == values.dtype
    assert found.tolist() == expected[5:17].tolist()
    assert to_numpy(pa.chunked_array([part, array]), blank=1).tolist() == [
        *expected[5:17].tolist(),
        *expected.tolist(),
    ]


def test_an_empty_column_and_a_strided_one() -> None:
    assert to_numpy(from_numpy(np.zeros(0, np.int32))).dtype == np.int32
    assert to_numpy(pa.array([], pa.bool_())).dtype == np.bool_
    assert from_numpy(np.arange(10)[::3]).to_pylist() == [0, 3, 6, 9]
    assert texts(from_texts([])) == []
    assert from_texts([]).to_pylist() == []


@pytest.mark.parametrize(
    "words",
    [["a", "", "bcd", ""], ["ä", "日本", "x"], ["with\0zero", "b", ""], ["", ""], ["only"]],
)
def test_texts_come_back(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    array = from_texts(words)
    array.validate(full=True)
    assert array.equals(pa.array(words, pa.string()))
    assert texts(array) == words
    assert texts(array[1:]) == words[1:]
    assert texts(pa.chunked_array([array, array])) == words * 2
    monkeypatch.setattr(columns, "_MOST_JOINED_BYTES", 0)
    assert texts(array) == words
    assert texts(array[1:]) == words[1:]


def test_texts_that_are_missing_or_none_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    some = from_texts(["a", "", "c"], null=np.array([False, True, False]))
    assert some.to_pylist() == ["a", None, "c"]
    with pytest.raises(ValueError, match="1 missing"):
        texts(some)
    with pytest.raises(ValueError, match="surrogates"):
        from_texts(["a", "\ud800"])
    with pytest.raises(ValueError, match="numbers, found string"):
        to_numpy(from_texts(["1"]))
    monkeypatch.setattr(columns, "_MOST_TEXT_BYTES", 3)
    with pytest.raises(ValueError, match="found 4 bytes"):
        from_texts(["ab", "cd"])


def test_byte_strings() -> None:
    assert from_bytes([b"ab", None, b"cd"], 2).to_pylist() == [b"ab", None, b"cd"]
    assert from_bytes([b"ab"], 2).type == pa.binary(2)
    with pytest.raises(ValueError, match="2 bytes each"):
        from_bytes([b"abc"], 2)


def test_nothing_of_it_asks_for_pandas() -> None:
    """Nor what stands on it: chunk tables, and the columns that ranks send."""
    program = (
        "import sys\n"
        "class Asked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pandas': print('asked for pandas')\n"
        "sys.meta_path.insert(0, Asked())\n"
        "from ray_dcp.format.table import decode_table, encode_table\n"
        "from ray_dcp.core.columns import ColumnsBuilder, decode, encode\n"
        "from tests.big_views import table\n"
        "found = table(4, 2, '0' * 16)\n"
        "assert decode_table(encode_table(found)).names == found.names\n"
        "columns = ColumnsBuilder()\n"
        "columns.tensor('w', 'float32', (4,))\n"
        "columns.object('o', path=('o', 1), value=7)\n"
        "assert decode(encode(columns.build())).names == ('w', 'o')\n"
        "print('done')\n"
        "import pyarrow; pyarrow.array([1])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "done\nasked for pandas\n", told.stderr
