"""Each error that DCP documents arises where DCP raises it, as that class and as ours."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

import ray_dcp
from ray_dcp import InvalidRequestError, MissingKeyError, ShapeMismatchError
from ray_dcp.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


CASES: dict[str, tuple[Callable[[Any, Path], Any], type[Exception]]] = {
    "a key that is missing": (
        lambda dcp, path: dcp.load({"lost": torch.zeros(1)}, checkpoint_id=path),
        RuntimeError,
    ),
    "another shape": (
        lambda dcp, path: dcp.load({"w": torch.zeros(3)}, checkpoint_id=path),
        ValueError,
    ),
    "a checkpoint that must stay": (
        lambda dcp, path: dcp.save(
            {"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(path, overwrite=False)
        ),
        RuntimeError,
    ),
    "a checkpoint that must stay, through fsspec": (
        lambda dcp, path: dcp.save(
            {"w": torch.ones(2)},
            storage_writer=ray_dcp.FsspecWriter(str(path), overwrite=False),
        ),
        RuntimeError,
    ),
    "nowhere to save to": (lambda dcp, path: dcp.save({"w": torch.ones(2)}), RuntimeError),
    "nothing to load from": (lambda dcp, path: dcp.load({"w": torch.ones(2)}), RuntimeError),
    "a protocol that nobody knows": (
        lambda dcp, path: dcp.save({"w": torch.ones(2)}, checkpoint_id="nosuch://bucket/step-1"),
        RuntimeError,
    ),
    "nothing to load by a protocol that nobody knows": (
        lambda dcp, path: dcp.load({"w": torch.ones(2)}, checkpoint_id="nosuch://bucket/step-1"),
        RuntimeError,
    ),
    "two values of one name": (
        lambda dcp, path: dcp.save({"a": {"b": 1}, "a.b": 2}, checkpoint_id=path),
        ValueError,
    ),
}


WORDS = {
    "a checkpoint that must stay": "Checkpoint already exists",
    "a checkpoint that must stay, through fsspec": "Checkpoint already exists",
    "a protocol that nobody knows": "Cannot detect which StorageReader or StorageWriter to use",
}
"""What DCP's message has, and so has ours."""


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_dcps_and_ours(tmp_path: Path, case: str):
    act, expected = CASES[case]
    for number, dcp in enumerate((stock, ray_dcp)):
        path = tmp_path / str(number)
        stock.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
        with pytest.raises((stock.CheckpointException, Exception)) as caught:
            act(dcp, path)
        errors = [caught.value]
        if isinstance(caught.value, stock.CheckpointException):
            errors += [each for each, _ in caught.value.failures.values()]
        assert any(isinstance(each, expected) for each in errors), errors
        assert WORDS.get(case, "") in str(caught.value)
    assert isinstance(caught.value, expected)
    assert isinstance(caught.value, ray_dcp.CheckpointError)
    assert isinstance(caught.value, stock.CheckpointException)


@pytest.mark.parametrize("kind", ["save", "async_save", "planner"])
def test_a_save_is_named_by_writer_and_checkpoint_alike(tmp_path: Path, kind: str):
    told: list[Any] = []

    class Planner(stock.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, *rest: Any, **kw: Any):
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, *rest, **kw)

    writer = ray_dcp.FileSystemWriter(tmp_path / "c")
    if kind == "async_save":
        metadata = ray_dcp.async_save({"w": torch.ones(2)}, storage_writer=writer).result()
    else:
        planner = Planner() if kind == "planner" else None
        metadata = ray_dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
    for reader in (
        ray_dcp.FileSystemReader(tmp_path / "c"),
        stock.FileSystemReader(tmp_path / "c"),
    ):
        about = reader.read_metadata().storage_meta
        assert str(about.checkpoint_id) == str(tmp_path / "c")
        assert about.save_id == writer.save_id == metadata.storage_meta.save_id
        assert about.load_id == reader.load_id
    assert writer.save_id is not None
    if kind == "planner":
        assert [str(each.checkpoint_id) for each in told] == [str(tmp_path / "c")]


class OwnError(ray_dcp.CheckpointError):
    """Made of other arguments than ray_dcp's, which a copy or a pickle of it lacks."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class TurnsIntoADict(Exception):
    """Pickles as something that can't be raised."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, ())


class Raises:
    """A stateful value whose state can't be had."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise self.error


class OwnPlanner(stock.DefaultSavePlanner):
    """A planner whose hooks are called."""


@pytest.mark.parametrize("error", [OwnError(3), TurnsIntoADict("code 3")])
@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "planner hooks"])
def test_an_error_that_no_message_can_hold_is_reported_by_name(tmp_path: Path, error, planner):
    place, kind = tmp_path / "c", type(error).__name__
    with pytest.raises(ray_dcp.CheckpointError, match=f"{kind}: code 3") as caught:
        ray_dcp.save(
            {"x": Raises(error)}, checkpoint_id=place, planner=planner() if planner else None
        )
    stand_in, _ = caught.value.failures[0]
    assert type(stand_in) is ray_dcp.CheckpointError
    assert f"{kind} (which can't be pickled): code 3" in stand_in.message
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


STATE = {"m": {"w": torch.ones(2, 3).bfloat16(), "s": torch.tensor(1)}, "x": [1, 2]}


@pytest.mark.parametrize("flatten", [True, False])
def test_a_save_returns_what_torch_reads(tmp_path: Path, flatten: bool) -> None:
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    made = ray_dcp.save(STATE, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert made == pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    if not flatten:
        assert made.planner_data is None
        return
    tensor = made.state_dict_metadata["m.w"]
    assert tensor.properties.dtype == torch.bfloat16
    assert tensor.chunks == [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))]
    assert made.state_dict_metadata["x"] == BytesStorageMetadata()
    assert made.planner_data == {"m.w": ("m", "w"), "m.s": ("m", "s"), "x": ("x",)}


def test_nothing_is_read_before_a_field_is_looked_at_and_then_once(tmp_path: Path) -> None:
    place, away = tmp_path / "c", tmp_path / "away"
    metadata = ray_dcp.save(STATE, checkpoint_id=place, no_dist=True)
    shutil.move(place, away)
    assert isinstance(metadata, Metadata)
    with pytest.raises(ray_dcp.CheckpointError):
        _ = metadata.storage_data
    shutil.move(away, place)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(metadata.storage_data)) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(place)
    assert all(one is metadata.storage_data for one in found)
    assert metadata.planner_data is not None


def test_it_equals_torchs_metadata_from_both_sides_and_pickles_as_one(tmp_path: Path) -> None:
    lazy = ray_dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    plain = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert lazy == plain
    assert plain == lazy
    assert lazy != dataclasses.replace(plain, version="2")
    assert lazy != 5
    data = pickle.dumps(ray_dcp.save(STATE, checkpoint_id=tmp_path / "b", no_dist=True))
    assert type(pickle.loads(data)) is Metadata
    assert b"ray_dcp" not in data


def test_the_report_is_frozen_in_one_line_with_the_names_of_load_state_dict_too() -> None:
    names = tuple(f"model.layers.{number}.weight" for number in range(500))
    report = ray_dcp.LoadReport(loaded=names, missing=("a",), unexpected=names, cast=(), step=7)
    assert (report.missing_keys, report.unexpected_keys) == (["a"], list(names))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loaded = ()  # type: ignore[misc]
    assert "500 loaded, 1 missing (a), 500 unexpected (model.layers.0.weight, " in repr(report)
    assert len(repr(report)) < 200


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
