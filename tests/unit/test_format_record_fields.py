"""Fields of records: what JSON can spell, and no terminal or log takes."""

from __future__ import annotations

import pytest

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.manifest import text


@pytest.mark.parametrize("value", ["a\ud800", "\udfff", "é\udc00"])
def test_half_of_a_surrogate_pair_is_no_text(value):
    with pytest.raises(DamagedCheckpointError, match="a text in Unicode as reason"):
        text(value, "reason")


@pytest.mark.parametrize("value", ["", "plain", "é", "\U0001f600", "\ud7ff\ue000"])
def test_any_other_text_is_one(value):
    assert text(value, "reason") == value
