"""What `average` takes, computes, refuses and records."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import ray_dcp
from ray_dcp import errors
from ray_dcp.cli.main import main
from ray_dcp.format.manifest import decode_record, encode_record
from ray_dcp.transform import averaging
from tests.support import checkpoints


class Odd:
    """What a safe load refuses."""


def save(path: Path, value: float, **more: object) -> str:
    state = {"w": torch.full((4, 3), float(value)), "step": int(value), **more}
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 5):
        save(tmp_path / "run" / f"step-{step}", float(step))
    return tmp_path / "run"


def test_the_sources_their_attempts_and_weights_are_in_the_manifest(run: Path, tmp_path: Path):
    stock = checkpoints.save_stock(tmp_path / "stock", {"w": torch.zeros(4, 3), "step": 7})
    sources = [f"{run}@1", ray_dcp.open(run)["latest"], stock]
    report = ray_dcp.average(sources, tmp_path / "mean", weights=[1, 2, 1])
    assert [one["checkpoint"] for one in report.sources] == [
        str(run / "step-1"), str(run / "step-5"), str(stock)]  # fmt: skip
    assert [one["weight"] for one in report.sources] == [0.25, 0.5, 0.25]
    assert report.sources[1]["attempt"] == ray_dcp.open(f"{run}@5").attempt
    assert report.sources[2]["attempt"] is None
    made = ray_dcp.open(tmp_path / "mean")
    assert made.sources == report.sources
    assert ray_dcp.open(f"{run}@1").sources == ()
    # A copy has the same values, and so the same sources.
    assert ray_dcp.copy(made, tmp_path / "copy").sources == report.sources
    assert ray_dcp.read_state_dict(tmp_path / "copy")["w"].eq(2.75).all()
    assert ray_dcp.read_state_dict(tmp_path / "copy")["step"] == 7


def test_state_of_optimizers_is_left_out_or_that_of_the_last(tmp_path: Path):
    paths = []
    for step in (1, 2):
        torch.manual_seed(step)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        # Lightning's form, one that is flat, and one that is called neither.
        state = {
            "model": model.state_dict(), "optimizer": optimizer,
            "opt": {"state": {"w": {"exp_avg": torch.full((2,), float(step))}},
                    "other_state": {"all": torch.ones(2)}, "param_groups": [{"lr": 0.1}]},
        }  # fmt: skip
        paths.append(tmp_path / f"{step}")
        ray_dcp.save(state, checkpoint_id=paths[-1], no_dist=True)
    report = ray_dcp.average(paths, tmp_path / "mean")
    assert report.averaged == ("model.weight", "model.bias")
    assert report.taken == ()
    assert report.left_out
    assert all(name.startswith(("opt.", "optimizer.")) for name in report.left_out)
    whole = ray_dcp.average(paths, tmp_path / "whole", keys=["*"], dtype="bf16")
    assert whole.averaged == report.averaged
    assert whole.left_out == ()
    made, last = ray_dcp.open(tmp_path / "whole"), ray_dcp.open(paths[-1])
    assert {made.tensors[name].dtype for name in whole.averaged} == {"bfloat16"}
    assert made.diff(last).counts["unchanged"] == len(whole.taken)
    kept = ray_dcp.read_state_dict(tmp_path / "whole")["opt"]
    assert kept["state"]["w"]["exp_avg"].eq(2).all()
    assert kept["param_groups"] == [{"lr": 0.1}]


def test_all_differences_are_told_at_once_and_nothing_is_written(tmp_path: Path):
    first = save(tmp_path / "a", 1, only_here=torch.ones(2), v=torch.ones(2), n=torch.ones(2))
    second = save(
        tmp_path / "b", 2, only_there=torch.ones(2), v=torch.ones(3), n=torch.ones(2).bfloat16(),
    )  # fmt: skip
    third = save(tmp_path / "c", 2, v="text", n=torch.ones(2, dtype=torch.int64))
    with pytest.raises(errors.StateDictError) as caught:
        ray_dcp.average([first, second, third], tmp_path / "mean")
    told = caught.value.message
    for part in (
        "lacks 'only_here'",
        "has 'only_there', which that one lacks",
        "has 'v' as float32 of shape (3,) instead of float32 of shape (2,)",
        "has 'n' as bfloat16 of shape (2,) instead of float32 of shape (2,)",
        "has an object as 'v'",
        "has 'n' as int64 of shape (2,) instead of float32 of shape (2,)",
    ):
        assert part in told
    assert told.count("lacks 'only_here'") == 2
    assert not (tmp_path / "mean").exists()
    report = ray_dcp.average([first, second, third], tmp_path / "mean", keys=["w", "step"])
    assert report.averaged == ("w",)
    assert ray_dcp.open(tmp_path / "mean")["w"][0, 0] == pytest.approx(5 / 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "complex64"])
def test_tensors_without_elements_and_without_dimensions_are_averaged(tmp_path: Path, dtype: str):
    kind = getattr(torch, dtype)
    sources = [
        save(tmp_path / f"{n}", n, none=torch.zeros(0, 3).to(kind), one=torch.tensor(n).to(kind))
        for n in (1, 3)
    ]
    report = ray_dcp.average(sources, tmp_path / "mean", dtype="bf16")
    assert report.averaged == ("w", "none", "one")
    made = ray_dcp.read_state_dict(tmp_path / "mean")
    assert made["none"].shape == (0, 3)
    assert made["one"].to(torch.complex64) == 2
    assert ray_dcp.average(sources, tmp_path / "same").averaged == report.averaged
    assert ray_dcp.read_state_dict(tmp_path / "same")["none"].dtype == kind


def test_a_source_of_weight_0_takes_no_part(tmp_path: Path):
    bad = save(tmp_path / "bad", 1, v=torch.tensor([float("nan"), float("inf")]), own=torch.ones(1))
    good = [save(tmp_path / f"{n}", n, v=torch.tensor([n, -n])) for n in (2.0, 4.0)]
    # Its tensors are not read: damage in them is nothing to the mean.
    place = int(ray_dcp.open(bad).table.payload_offset[0])
    checkpoints.flip(checkpoints.data_file(tmp_path / "bad"), place)
    report = ray_dcp.average([bad, *good], tmp_path / "mean", weights=[0, 3, 1])
    assert (report.averaged, report.left_out) == (("w", "v"), ("own",))
    assert [one["weight"] for one in report.sources] == [0, 0.75, 0.25]
    assert ray_dcp.read_state_dict(tmp_path / "mean")["v"].tolist() == [2.5, -2.5]
    # As the last source it gives what can't be averaged, and so has to have the same names.
    with pytest.raises(errors.StateDictError, match="has 'own', which that one lacks"):
        ray_dcp.average([*good, bad], tmp_path / "b", weights=[1, 1, 0])
    last = save(tmp_path / "last", 9, v=torch.tensor([float("nan"), float("nan")]))
    ray_dcp.average([*good, good[0], last], tmp_path / "c", weights=[-1, 2, 1, 0])
    made = ray_dcp.read_state_dict(tmp_path / "c")
    assert (made["v"].tolist(), made["step"]) == ([4, -4], 9)


def test_each_name_of_any_source_is_in_one_list(tmp_path: Path):
    first = save(
        tmp_path / "a", 1, seen=torch.arange(2), note="old", both=torch.tensor(True),
        optimizer={"state": {"w": torch.ones(2)}, "param_groups": [{"lr": 1.0}]},
    )  # fmt: skip
    second = save(tmp_path / "b", 2, both=torch.tensor(False), new=3, mask=torch.tensor([True]))
    for weights in (None, [0, 1]):
        out = tmp_path / f"mean-{weights}"
        report = ray_dcp.average([first, second], out, weights=weights)
        assert report.averaged == ("w",)
        assert report.taken == ("step", "both", "new", "mask")
        names = {"seen", "note", "optimizer.state.w", "optimizer.param_groups.0.lr"}
        assert set(report.left_out) == names
        assert len(report.left_out) == len(names)
        assert not ray_dcp.read_state_dict(out)["both"]
    found = average(first, second, "-o", tmp_path / "told", "--json")
    assert json.loads(found.stdout)["left_out"] == list(report.left_out)


def test_what_has_no_mean_is_told_by_name(tmp_path: Path):
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(2), torch.ones(2))
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.warns(UserWarning, match="TwoTensor"):
        own = save(tmp_path / "a", 1, pair=pair, packed=packed)
    with pytest.raises(errors.StateDictError) as caught:
        ray_dcp.average([own], tmp_path / "mean")
    assert f"'pair' of {own} is a pickled tensor subclass" in caught.value.message
    assert "'packed' has the dtype float8_e8m0fnu, of which no mean" in caught.value.message
    # Stock DCP's `.metadata` does not tell: it is found while it is read, and nothing stays.
    stock = checkpoints.save_stock(tmp_path / "stock", {"pair": pair})
    with pytest.raises(errors.StateDictError, match=r"'pair' of .* is a pickled tensor subclass"):
        ray_dcp.average([stock], tmp_path / "mean")
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.open(tmp_path / "mean")
    assert not [file for file in (tmp_path / "mean").iterdir() if file.suffix == ".distcp"]


def test_objects_are_copied_without_being_loaded(tmp_path: Path):
    with pytest.warns(UserWarning, match="safe load"):
        own = save(tmp_path / "a", 1, odd=Odd(), empty={}, nested={"a": [1, {}]})
    report = ray_dcp.average([own, own], tmp_path / "mean")
    assert "odd" in report.taken
    made, last = ray_dcp.open(tmp_path / "mean"), ray_dcp.open(own)
    assert [made.read_object(name) for name in made.objects] == [
        last.read_object(name) for name in made.objects
    ]
    assert made.diff(last).counts == {"unchanged": len(last)}
    assert made.names == last.names


WRONG = [
    ({"sources": "RUN@1"}, "sources must be a list"),
    ({"sources": []}, "sources must be a list"),
    ({"sources": ["{run}"]}, "is a run of 3: name its steps"),
    ({"weights": [1]}, "a number for each of 2 sources"),
    ({"weights": [1, "a"]}, "weights must be numbers"),
    ({"weights": [1, float("nan")]}, "weights must be finite"),
    ({"weights": [0.1, 0.2], "sources": ["{run}@1"] * 3}, "a number for each of 3"),
    ({"weights": [0.1, 0.2, -0.3], "sources": ["{run}@1"] * 3}, "a sum other than 0"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"keys": "w"}, "keys must be a list"),
    ({"keys": ["step"]}, "expected floating-point tensors .* that match 'step'"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_a_wrong_call_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, arguments: dict[str, object], said: str
):
    sources = arguments.get("sources", ["{run}@1", "{run}@2"])
    if isinstance(sources, list):
        sources = [one.format(run=run) for one in sources]
    with pytest.raises(errors.InvalidRequestError, match=said):
        ray_dcp.average(**{**arguments, "sources": sources, "out": tmp_path / "mean"})
    assert not (tmp_path / "mean").exists()


def test_an_average_takes_no_place_that_is_taken(run: Path):
    with pytest.raises(errors.CheckpointExistsError):
        ray_dcp.average([f"{run}@1"], run / "step-2")
    assert ray_dcp.read_state_dict(f"{run}/step-2")["step"] == 2


def test_steps_of_several_items_are_refused_with_their_folders(tmp_path: Path):
    from ray_dcp.manager import Item

    items = {"model": Item(), "data": Item()}
    with ray_dcp.CheckpointManager(tmp_path / "run", items=items, no_dist=True) as manager:
        for step in (1, 2):
            state = {"model": {"w": torch.full((2,), float(step))}, "data": {"at": step}}
            manager.save(step, state)
        folders = [Path(manager.step_info(step).checkpoint_id, "model") for step in (1, 2)]
    with pytest.raises(errors.InvalidRequestError, match="has the items"):
        ray_dcp.average([f"{tmp_path}/run@1", f"{tmp_path}/run@2"], tmp_path / "mean")
    folders = [next(one.parent.glob("model*")) for one in folders]
    ray_dcp.average(folders, tmp_path / "mean")
    assert ray_dcp.read_state_dict(tmp_path / "mean")["w"].tolist() == [1.5, 1.5]


def test_a_damaged_source_fails_the_average_and_leaves_no_data(run: Path, tmp_path: Path):
    place = int(ray_dcp.open(run / "step-2").table.payload_offset[0])
    checkpoints.flip(checkpoints.data_file(run / "step-2"), place)
    with pytest.raises(errors.DamagedCheckpointError):
        ray_dcp.average([f"{run}@1", run / "step-2"], tmp_path / "mean")
    assert not list((tmp_path / "mean").glob("*.distcp"))


def test_large_tensors_are_cut_and_progress_grows_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(averaging, "BOX_BYTES", 4096)
    big = torch.arange(40_000.0).reshape(2, 100, 200)
    own = save(tmp_path / "a", 1, big=big, none=torch.zeros(0, 3))
    seen: list[ray_dcp.Progress] = []
    report = ray_dcp.average([own, own], tmp_path / "mean", progress=seen.append)
    done = [one.done_bytes for one in seen]
    assert done == sorted(done)
    assert {one.total_bytes for one in seen} == {done[-1]} == {report.num_bytes}
    made = ray_dcp.open(tmp_path / "mean")
    assert made.tensors["big"].num_chunks == 68
    assert torch.equal(ray_dcp.read_state_dict(tmp_path / "mean")["big"], big)
    blank = {"big": np.zeros(big.shape, np.float32), "none": np.ones((0, 3), np.float32)}
    found = checkpoints.stock_load(tmp_path / "mean", blank)
    assert np.array_equal(found["big"], big.numpy())


def average(*words: object) -> Result:
    return CliRunner().invoke(main, ["average", *map(str, words)])


def test_the_command_averages_the_newest_steps_of_a_run(run: Path, tmp_path: Path):
    found = average(run, "--last", 2, "--ema", 0.5, "-o", tmp_path / "mean")
    assert found.exit_code == 0, found.output
    assert f"0.3333 x {run}/step-2" in found.output
    assert ray_dcp.read_state_dict(tmp_path / "mean")["w"].eq(4).all()
    found = average(f"{run}@1", f"{run}@2", "--weights", "3,1", "-o", tmp_path / "b", "--dry-run")
    assert "would write the mean of 2 checkpoints, 1 tensor" in found.output
    assert not (tmp_path / "b").exists()


WRONG_COMMANDS = [
    (("{run}@1", "--weights", "1", "--ema", "0.5"), "not both"),
    (("{run}@1", "--weights", "1;2"), "expected numbers such as 1,1,2"),
    (("{run}@1", "--ema", "0"), "ema must be"),
    (("{run}@1", "{run}@2", "--last", "1"), "--last takes one run"),
    (("{run}", "--last", "4"), "expected 4 steps"),
    (("{run}",), "name one of its 3 steps"),
    (("{run}@1", "{run}@7"), "nearest: 1, 2, 5"),
    (("{run}@1", "--dtype", "int8"), "dtype must be one of"),
]


@pytest.mark.parametrize(("words", "said"), WRONG_COMMANDS)
def test_a_wrong_command_is_refused(run: Path, words: tuple[str, ...], said: str):
    found = average(*(one.format(run=run) for one in words), "-o", run.parent / "mean")
    assert found.exit_code == 2
    assert said in found.stderr
    assert not (run.parent / "mean").exists()


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(averaging, "BOX_BYTES", 1 << 18)
    large = torch.zeros(2048, 2048)
    ray_dcp.save({"w": large}, checkpoint_id=tmp_path / "a", no_dist=True)
    sources = [ray_dcp.open(tmp_path / "a")] * 2
    tracemalloc.start()
    try:
        ray_dcp.average(sources, tmp_path / "mean")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < large.nbytes / 2


def test_readers_ignore_topics_of_a_manifest_that_they_do_not_know(run: Path, tmp_path: Path):
    """What a later ray_dcp tells of a checkpoint makes it no other one for this one."""
    ray_dcp.average([f"{run}@1"], tmp_path / "mean")
    (record,) = (tmp_path / "mean").glob("manifest-*.json")
    manifest = decode_record(record.read_bytes())
    own = manifest.about["average"]["sources"][0]
    for about, sources in (
        ({"later": [1]}, ()),
        (
            {"average": {"sources": [{**own, "more": 1}, "odd", {"weight": 1.0}], "more": {}}},
            (own,),
        ),
        ({"average": "odd"}, ()),
    ):
        record.write_bytes(encode_record(replace(manifest, about=about)))
        view = ray_dcp.open(tmp_path / "mean")
        assert view.sources == sources
        assert view.verify().ok
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "mean")])
    assert shown.exit_code == 0


FLOATS = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "complex128",
)  # fmt: skip
WRITERS = ("native", "rows", "columns", "stock", "safetensors")


def cut(tensor: torch.Tensor, dim: int, at: int) -> torch.Tensor:
    """Returns a tensor that is saved in two parts, as ranks that shard it would save it."""
    shards = tensor.clone()
    sizes = [list(tensor.shape), list(tensor.shape)]
    sizes[0][dim], sizes[1][dim] = at, tensor.shape[dim] - at
    offsets = [[0] * tensor.ndim, [at * (d == dim) for d in range(tensor.ndim)]]
    shards.global_shape = torch.Size(tensor.shape)
    shards.global_offsets = shards.local_offsets = tuple(map(torch.Size, offsets))
    shards.local_sizes = tuple(map(torch.Size, sizes))
    return shards


def write(path: Path, tensor: torch.Tensor, writer: str, at: float) -> Path:
    if writer in ("rows", "columns") and tensor.ndim:
        dim = 0 if writer == "rows" else tensor.ndim - 1
        tensor = cut(tensor, dim, round(at * tensor.shape[dim]))
    state = {"w": tensor}
    if writer == "stock":
        return checkpoints.save_stock(path, state)
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)
    if writer == "safetensors":
        ray_dcp.export(path, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    return path


@st.composite
def averages(draw):
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9))
    number = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if "complex" in dtype else torch.float64
    scale = 10.0 ** torch.randint(-3, 3, (number, *shape), generator=generator)
    values = torch.randn((number, *shape), generator=generator, dtype=wide) * scale
    weights = draw(
        st.none() | st.lists(st.floats(0.01, 10) | st.just(0.0), min_size=number, max_size=number)
    )
    if weights is not None and not any(weights):
        weights[0] = 1.0
    writers = draw(st.lists(st.sampled_from(WRITERS), min_size=number, max_size=number))
    if "complex" in dtype:
        writers = ["native" if one == "safetensors" else one for one in writers]
    return values.to(getattr(torch, dtype)), weights, writers, draw(st.floats(0, 1))


def expected(values: torch.Tensor, weights: list[float] | None) -> np.ndarray:
    """What numpy adds up, in the order of the sources."""
    numbers = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in values]
    factors = np.array([1.0] * len(values) if weights is None else weights)
    first, *others = [one.numpy() * by for one, by in zip(numbers, factors, strict=True) if by]
    return sum(others, start=first) / np.sum(factors)


@settings(max_examples=8)
@given(averages(), st.sampled_from((16, 72, 8 << 20)))
def test_an_average_is_that_of_numpy_to_the_last_bit(case, box_bytes):
    values, weights, writers, at = case
    event(f"{len(values)} sources of {values.dtype}")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "BOX_BYTES", box_bytes)
        sources = [
            write(Path(folder, f"source-{number}"), value, writer, at)
            for number, (value, writer) in enumerate(zip(values, writers, strict=True))
        ]
        means = {}
        for dtype in (None, "float64"):
            out = f"{folder}/{dtype}"
            report = ray_dcp.average(sources, out, weights=weights, dtype=dtype)
            assert report.averaged == ("w",)
            means[dtype] = ray_dcp.read_state_dict(out)["w"]
            assert ray_dcp.verify(out).ok
    wanted = expected(values, weights)
    if not values.is_complex():
        assert means["float64"].numpy().tobytes() == wanted.tobytes()
    if values.dtype in (torch.float16, torch.float32, torch.complex64):
        # torch rounds by way of float32; numpy rounds once.
        wanted = wanted.astype(str(values.dtype).removeprefix("torch."))
    kept = torch.from_numpy(np.asarray(wanted)).to(values.dtype)
    assert means[None].dtype == values.dtype
    assert means[None].flatten().view(torch.uint8).equal(kept.flatten().view(torch.uint8))
    if len(values) < 8 and values.dtype == torch.float64 and values[0].numel() > 1:
        own = np.average(np.stack([one.numpy() for one in values]), axis=0, weights=weights)
        assert means["float64"].numpy().tobytes() == own.tobytes()
