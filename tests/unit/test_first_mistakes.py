"""What a newcomer gets wrong first is said by name, in a few lines, with the way out."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp import InvalidRequestError, MissingKeyError, ShapeMismatchError
from ray_dcp.cli.main import main


@pytest.mark.parametrize("call", [ray_dcp.save, ray_dcp.load])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_as_second_argument_is_told_its_name(
    call: Callable[..., Any], kind: type, tmp_path: Path
):
    with pytest.raises(InvalidRequestError, match=rf"given as checkpoint_id='{tmp_path}/a'"):
        call({"w": torch.ones(1)}, kind(f"{tmp_path}/a"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (ray_dcp.save, "SaveOptions"),
        (ray_dcp.async_save, "SaveOptions"),
        (ray_dcp.load, "LoadOptions"),
    ],
)
def test_options_in_a_dict_are_refused_by_name(call: Callable[..., Any], name: str, tmp_path: Path):
    with pytest.raises(InvalidRequestError, match=rf"options=ray_dcp\.{name}.* found a dict"):
        call({"w": torch.ones(1)}, checkpoint_id=tmp_path / "a", options={"strict": False})
    with pytest.raises(InvalidRequestError, match=r"LoadOptions.* found a dict"):
        ray_dcp.load_newest({"w": torch.ones(1)}, tmp_path, options={"strict": False})
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_does_not_fit_is_called_one(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(ShapeMismatchError, match=r"^Dtype mismatch .*float32 and wanted as"):
        ray_dcp.load({"w": torch.ones(2).half()}, checkpoint_id=tmp_path / "a")
    with pytest.raises(ShapeMismatchError, match=r"^Size mismatch "):
        ray_dcp.load({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")


def test_missing_keys_are_lines_the_first_five_and_a_count(tmp_path: Path):
    ray_dcp.save({"model.w0": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(MissingKeyError) as caught:
        ray_dcp.load({f"w{i}": torch.ones(2) for i in range(7)}, checkpoint_id=tmp_path / "a")
    first, *names, more, way_out = caught.value.message.splitlines()
    assert first == "Missing key in checkpoint state_dict: 7 keys of the state dict"
    assert [name.split()[0] for name in names] == [f"'w{i}'" for i in range(5)]
    assert more == "  … and 2 more"
    assert "LoadOptions(strict=False)" in way_out


PAGE = Path(__file__).parents[2] / "docs" / "first-mistakes.md"
_CALL = re.compile(r"^```(py|console)\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.M | re.S)


def printed(language: str, call: str, names: dict[str, Any]) -> str:
    """Returns what a user reads last after a call."""
    if language == "console":
        words = shlex.split(call)[1:]
        found = CliRunner().invoke(main, words, prog_name="ray-dcp", env={"COLUMNS": "100"})
        return found.output.strip()
    try:
        exec(call, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def test_the_page_of_first_mistakes_has_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page, names = PAGE.read_text(), {}
    (setup,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(setup, names)
    outputs = []

    def with_output(call: re.Match[str]) -> str:
        output = printed(call[1], call[2], names)
        output = re.sub(r"\b[0-9a-f]{16}\b", "0" * 16, output.replace(str(tmp_path), "/work"))
        outputs.append(output)
        return f"```{call[1]}\n{call[2]}```\n\n```text\n{outputs[-1]}\n```\n"

    found = _CALL.sub(with_output, page)
    if "RENEW_GOLDEN" in os.environ:
        PAGE.write_text(found)
    assert found == page
    assert len(outputs) >= 25
    assert [output for output in outputs if not 1 <= len(output.splitlines()) < 15] == []
