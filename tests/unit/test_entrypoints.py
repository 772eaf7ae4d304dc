"""`save` and `load` as users call them: arguments, options, warnings, reports, errors."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from click.testing import CliRunner
from ray import cloudpickle
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

import ray_dcp
import ray_dcp.torch_adapter  # makes the errors torch's
from ray_dcp import (
    CheckpointError,
    CommitUnknownError,
    InvalidRequestError,
    LoadOptions,
    MissingKeyError,
    SaveOptions,
    errors,
)
from ray_dcp.cli.main import main
from tests.support import checkpoints


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((3, 2), float(value)), "step": int(value)}


def test_every_public_name_is_there():
    assert [name for name in ray_dcp.__all__ if not hasattr(ray_dcp, name)] == []


def test_a_load_reports_what_it_did(tmp_path: Path):
    ray_dcp.save({**state(), "extra": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    report = ray_dcp.load(
        {"w": torch.zeros(3, 2, dtype=torch.float64), "step": 0, "lost": torch.zeros(1)},
        checkpoint_id=tmp_path / "c",
        options=ray_dcp.LoadOptions(strict=False),
    )
    assert (report.loaded, report.missing, report.unexpected) == (
        ("step", "w"), ("lost",), ("extra",),
    )  # fmt: skip
    assert report.cast == (("w", "float32", "float64"),)
    assert report.path == "native"
    assert report.bytes_read >= report.bytes_needed > 0


def test_the_storage_as_second_argument_works_and_warns(tmp_path: Path):
    with pytest.warns(FutureWarning, match="pass storage_writer by name"):
        ray_dcp.save(state(), ray_dcp.FileSystemWriter(tmp_path / "c"))
    found = state(0)
    with pytest.warns(FutureWarning, match="pass storage_reader by name"):
        ray_dcp.load(found, ray_dcp.FileSystemReader(tmp_path / "c"))
    assert found["step"] == 1
    with pytest.raises(ray_dcp.InvalidRequestError, match="more positional arguments"):
        ray_dcp.load(found, ray_dcp.FileSystemReader(tmp_path), ray_dcp.FileSystemReader(tmp_path))


def test_the_older_functions_work_and_do_not_ask_stateful_values(tmp_path: Path):
    saved, found = state(), state(0)
    with pytest.warns(FutureWarning, match="use ray_dcp.save"):
        ray_dcp.save_state_dict(saved, ray_dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.warns(FutureWarning, match="use ray_dcp.load"):
        report = ray_dcp.load_state_dict(found, ray_dcp.FileSystemReader(tmp_path / "c"))
    assert torch.equal(found["w"], saved["w"])
    assert sorted(report.loaded) == ["step", "w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_use_collectives_false_is_a_checkpoint_like_any_other(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c", use_collectives=False)
    found = state(0)
    stock.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["step"] == 1


def test_the_outcome_of_a_save_is_told_by_its_attempt(tmp_path: Path):
    metadata = ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    # One line, for notebooks; torch's has all tensors and chunks.
    assert len(repr(metadata)) < 120, repr(metadata)
    assert "tensor" in repr(metadata)
    assert metadata.attempt in repr(metadata)
    assert ray_dcp.outcome(tmp_path / "c", metadata.attempt) == "committed"
    assert ray_dcp.outcome(tmp_path / "c", "0123456789abcdef") == "open"
    with pytest.raises(ray_dcp.InvalidRequestError, match="attempt"):
        ray_dcp.outcome(tmp_path / "c", "")


def test_keys_of_several_types_are_saved_and_loaded(tmp_path: Path):
    def state(value: float) -> dict[Any, Any]:
        return {7: torch.full((3,), value), "w": torch.full((2,), value), None: {"at": value}}

    ray_dcp.save(state(1.0), checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.warns(UserWarning, match="single process"):
        stock.save(state(1.0), checkpoint_id=tmp_path / "stock", no_dist=True)
    for place in (tmp_path / "ours", tmp_path / "stock"):
        found = state(0.0)
        ray_dcp.load(found, checkpoint_id=place, no_dist=True)
        assert (found[7].tolist(), found["w"].tolist()) == ([1.0] * 3, [1.0] * 2)
        assert found[None] == {"at": 1.0}


# --- What is printed ------------------------------------------------------------------------------


MIB = 1 << 20


def large() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3 * MIB // 8)}  # 1.5 MiB


def path_of(text: str) -> str:
    return text.partition("'")[2].partition("'")[0] or "no path"


def test_the_reports_of_a_run_are_rounded_and_have_units(tmp_path: Path):
    handle = ray_dcp.async_save(large(), checkpoint_id=tmp_path / "run" / "step-1")
    handle.committed()
    path = str(tmp_path / "run" / "step-1")
    told = {
        "SaveReport": handle.report(),
        "SaveProgress": handle.progress,
        "LoadReport": ray_dcp.load(large(), checkpoint_id=path),
        "VerifyReport": ray_dcp.verify(path),
        "CheckpointView": ray_dcp.open(path),
        "ReshardPreview": ray_dcp.open_checkpoint(path).reshard(2),
        "AverageReport": ray_dcp.average([path, path], tmp_path / "mean"),
        "CollectReport": ray_dcp.collect(path, dry_run=True),
    }
    with ray_dcp.CheckpointManager(tmp_path / "managed", 1) as manager:
        manager.save(7, large())
        manager.join()
        told["RestoreReport"] = manager.restore("auto", large())
    for kind, report in told.items():
        text = repr(report)
        assert text.startswith(f"{kind}(")
        assert str(report) == text
        assert not re.search(r"\d{4,}|\d\.\d{3,}", text.replace(path_of(text), ""))
        assert ("1.5 MiB" in text) == (kind != "CollectReport")
    assert re.fullmatch(
        r"SaveReport\(rank 0, native, process, cold plan, 1\.5 MiB staged, 1\.5 MiB written, stall "
        r"\S+ m?s; capture \S+ m?s, plan \S+ m?s, stage \S+ m?s, write \S+ m?s, commit \S+ m?s\)",
        repr(told["SaveReport"]),
    )
    assert repr(told["SaveProgress"]) == "SaveProgress(committed, 1.5 MiB of 1.5 MiB)"
    assert repr(told["VerifyReport"]) == "VerifyReport(ok, 1.5 MiB checked)"
    assert "step 7, " in repr(told["RestoreReport"])


def test_a_report_of_damage_names_the_damage(tmp_path: Path):
    ray_dcp.save(large(), checkpoint_id=tmp_path)
    file = checkpoints.data_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    text = repr(ray_dcp.verify(tmp_path))
    assert text.startswith(f"VerifyReport(damaged: {file.name} bytes [")
    assert "ok" not in text


@pytest.mark.parametrize("fails", [False, True])
def test_a_handle_names_its_checkpoint_and_how_far_it_is(fails: bool, tmp_path: Path):
    place = tmp_path / "step-1"
    if fails:
        place.write_text("a file where the checkpoint should be")
    handle = ray_dcp.async_save(large(), checkpoint_id=place)
    assert repr(handle).startswith(f"<SaveHandle {str(place)!r}: ")
    error = handle.exception()
    ended = "committed" if error is None else f"failed: {type(error).__name__}"
    assert repr(handle) == f"<SaveHandle {str(place)!r}: {ended}>"
    assert (error is not None) == fails


# --- options --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("cls", "name", "hint"), [one for one in FIELDS if one[2] in (int, float)])
@pytest.mark.parametrize("given", [np.int64(3), np.uint8(3), np.float32(3)])
def test_a_number_of_numpy_becomes_pythons(cls: type, name: str, hint: type, given: Any):
    if hint is int and isinstance(given, np.floating):
        with pytest.raises(InvalidRequestError, match="a whole number from"):
            cls(**{name: given})
        return
    found = getattr(cls(**{name: given}), name)
    assert (type(found), found) == (hint, 3)


def test_a_dimension_of_numpy_may_be_resized(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(3)}
    options = LoadOptions(resize={"w": [np.int64(0)]})
    ray_dcp.load(state, checkpoint_id=tmp_path, no_dist=True, options=options)
    assert state["w"].tolist() == [1, 1, 0]


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


# --- errors that DCP documents, and its metadata --------------------------------------------------


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
    assert f"{kind} (which can't be pickled or shown): code 3" in stand_in.message
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class Unshown(Exception):
    """An error without a message."""

    def __str__(self) -> str:
        raise KeyError("code")


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "planner hooks"])
def test_an_error_that_shows_no_message_is_reported_by_name(tmp_path: Path, planner):
    state = {"x": Raises(Unshown())}
    with pytest.raises(ray_dcp.CheckpointError, match=r"Unshown: <exception str\(\) failed>"):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner() if planner else None)
    ray_dcp.save({"x": 1}, checkpoint_id=tmp_path / "c")
    with pytest.raises(ray_dcp.CheckpointError, match=r"Unshown: <exception str\(\) failed>"):
        ray_dcp.load(state, checkpoint_id=tmp_path / "c")


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


# --- what errors hold -----------------------------------------------------------------------------


REPOSITORY = Path(__file__).parents[2]
CLASSES = [getattr(errors, name) for name in errors.__all__]

WHERE: dict[str, Any] = {"checkpoint_id": "/run/step-7", "step": 7, "rank": 3, "key": "a.b"}


def filled(cls: type[CheckpointError]) -> CheckpointError:
    """Makes an error with every field of its class set to something."""
    extra = {
        name: f"the {name}"
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in WHERE
    }
    return cls("expected 1, found 2; do 3", **WHERE, **extra)


def state_of(error: CheckpointError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "_failures"}


def test_the_tree_lists_every_class_of_the_module():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_every_error_is_torchs_and_survives_pickling_with_all_its_fields(module: Any):
    for cls in CLASSES:
        error = filled(cls)
        assert isinstance(error, CheckpointException)
        # Why not add_note: it is new in Python 3.11.
        error.__notes__ = ["caused by OSError: no space left", "second note"]
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            found = module.loads(module.dumps(error, protocol))
            assert type(found) is cls
            assert (state_of(found), str(found)) == (state_of(error), str(error))
            assert found.__notes__ == ["caused by OSError: no space left", "second note"]
            assert list(found.failures) == [3]


def test_the_failures_of_other_ranks_survive_pickling():
    frames = traceback.StackSummary.from_list([("train.py", 12, "step", "save()")])
    error = CheckpointError("two ranks failed").with_failures(
        {1: (ValueError("one"), frames), 5: (filled(errors.StorageError), frames)}
    )
    for module in (pickle, cloudpickle):
        found = module.loads(module.dumps(error)).failures
        assert sorted(found) == [1, 5]
        assert repr(found[1][0]) == "ValueError('one')"
        assert found[5][0].key == "a.b"
        assert found[1][1][0].lineno == 12


def test_the_text_of_an_error_is_its_message_and_where():
    found = CheckpointError("m", key="k", rank=0, step=0, checkpoint_id="/c")
    assert str(found) == "m [checkpoint /c, step 0, rank 0, key k]"
    assert str(CheckpointError("m")) == "m"


def test_an_error_is_caught_as_the_builtin_that_it_resembles():
    for cls, builtin in (
        (errors.InvalidRequestError, ValueError), (errors.MissingKeyError, RuntimeError),
        (errors.CheckpointNotFoundError, FileNotFoundError), (errors.StorageError, OSError),
        (errors.CheckpointExistsError, FileExistsError), (errors.DeadlineError, TimeoutError),
    ):  # fmt: skip
        assert issubclass(cls, builtin)


PROGRAM = """
import pickle, sys
error = pickle.loads(sys.stdin.buffer.read())
assert "torch" not in sys.modules, "reading the error imported torch"
print(error, file=sys.stderr)
sys.stdout.buffer.write(pickle.dumps(error))
import importlib, torch, ray_dcp.torch_adapter as adapter
importlib.reload(adapter)
from ray_dcp.errors import CheckpointError, MissingKeyError
from torch.distributed.checkpoint.api import CheckpointException
try: raise error
except CheckpointException as kept: assert sorted(kept.failures) == [3]
for cls in (Exception, CheckpointException, CheckpointError, RuntimeError):
    try: raise MissingKeyError("gone", key="w", rank=3)
    except cls as kept: found = kept
    assert str(found) == "gone [rank 3, key w]" and list(found.failures) == [3]
assert CheckpointError.__bases__ == (Exception, CheckpointException)
"""


def test_an_error_is_read_without_torch_and_is_torchs_too_once_that_is_imported():
    error = filled(CommitUnknownError)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=pickle.dumps(error), capture_output=True,
        check=False, timeout=400, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    back = pickle.loads(done.stdout)
    assert type(back) is CommitUnknownError
    assert state_of(back) == state_of(error)
