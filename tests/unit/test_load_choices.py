"""What a load lets people choose: strictness, names, prefixes, dtypes, lengths, values per rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from ray_dcp import LoadOptions, PerRank, errors
from tests.support.adapter import load_on_ranks, save_on_ranks
from tests.support.comparing import differences
from tests.support.threads import run_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "model": {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(4, dtype=torch.float64)},
        "optimizer": {"lr": 0.5, "state": {0: {"m": torch.ones(3)}}},
    }
    ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def target() -> dict[str, Any]:
    return {
        "model": {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.float64)},
        "optimizer": {"lr": 0.0, "state": {0: {"m": torch.zeros(3)}}},
    }


class Mine(stock.DefaultLoadPlanner):
    """A planner of the user's."""


class MySave(stock.DefaultSavePlanner):
    """A planner of the user's."""


def load(path: Path, state: dict[str, Any], **options: Any) -> ray_dcp.LoadReport:
    return ray_dcp.load(state, checkpoint_id=path, options=LoadOptions(**options))


class Unknown:
    """Of no class that a safe load builds."""


@pytest.mark.parametrize("fault", ["refused", "refused in stock", "damaged"])
def test_an_object_that_can_not_be_loaded_changes_no_target(tmp_path: Path, fault: str):
    state = {"a": torch.ones(3), "o": "much text " * 99, "z": torch.ones(3)}
    if fault == "damaged":
        ray_dcp.save(state, checkpoint_id=tmp_path)
        (file,) = tmp_path.glob("*.distcp")
        file.write_bytes(file.read_bytes().replace(b"much text", b"such text"))
    elif fault == "refused":
        with pytest.warns(UserWarning, match="'o' holds"):
            ray_dcp.save({**state, "o": Unknown()}, checkpoint_id=tmp_path)
    else:
        stock.save({**state, "o": Unknown()}, checkpoint_id=tmp_path)
    target = {"a": torch.zeros(3), "o": 5, "z": torch.zeros(3)}
    with pytest.raises(errors.DamagedCheckpointError, match="o"):
        load(tmp_path, target)
    assert not target["a"].any()
    assert not target["z"].any()


# --- strictness ---------------------------------------------------------------------------------


def test_missing_and_unexpected_keys_follow_strict(saved: Path):
    state = {"model": {"a": torch.zeros(3, 2), "new": torch.zeros(1)}}
    for strict in (None, True):
        with pytest.raises(errors.MissingKeyError, match=r"model\.new"):
            load(saved, state, strict=strict)
    assert not state["model"]["a"].any()
    report = load(saved, state, strict=False)
    assert report.missing == ("model.new",)
    assert "optimizer.lr" in report.unexpected
    assert state["model"]["a"][2, 1] == 5
    with pytest.raises(errors.StateDictError, match="does not ask for"):
        load(saved, {"model": {"a": torch.zeros(3, 2)}}, strict=True)
    assert load(saved, target(), strict=True).unexpected == ()


# --- names --------------------------------------------------------------------------------------


def renamed(name: str) -> str | None:
    return None if name.startswith("optimizer") else name.replace("model.", "net.")


@pytest.mark.parametrize(
    "key_map",
    [
        {"model.a": "net.a", "model.b": "net.b"},
        [(r"^model\.", "net.")],
        [(r"^mo", "xx"), (r"^xxdel\.(\w)$", r"net.\1")],
        renamed,
    ],
)
def test_keys_are_renamed(saved: Path, key_map: Any):
    state = {"net": {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.float64)}}
    report = load(saved, state, key_map=key_map)
    assert state["net"]["a"][2, 1] == 5
    assert report.loaded == ("net.a", "net.b")
    assert set(report.unexpected) == {"optimizer.lr", "optimizer.state.0.m"}


@pytest.mark.parametrize(
    ("key_map", "message"),
    [
        ({"model.a": "model.b"}, r"'model\.a' and 'model\.b' both to 'model\.b'"),
        ([("[", "")], "no regular expression"),
        ([("a", r"\9")], "can't replace"),
        (lambda name: 3, "must give a name or None"),
    ],
)
def test_a_key_map_that_can_not_be_is_refused(saved: Path, key_map: Any, message: str):
    state = target()
    with pytest.raises(errors.InvalidRequestError, match=message):
        load(saved, state, key_map=key_map)
    assert not state["model"]["a"].any()


@pytest.mark.parametrize(
    "bad",
    [
        {"key_map": "model"}, {"key_map": [("a",)]}, {"key_map": {"a": 1}}, {"prefixes": "model"},
        {"prefixes": [""]}, {"resize": {"a": "x"}}, {"resize": ["a"]}, {"strict": "yes"},
        {"dtype": "float32"},
    ],
)  # fmt: skip
def test_choices_are_checked_when_they_are_made(bad: dict[str, Any]):
    with pytest.raises(errors.InvalidRequestError):
        LoadOptions(**bad)


# --- parts --------------------------------------------------------------------------------------


class Asked:
    """A `Stateful` that counts."""

    def __init__(self) -> None:
        self.asked = self.given = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"x": torch.zeros(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given += 1


def test_only_what_lies_below_a_prefix_is_loaded(saved: Path):
    other = Asked()
    state = {**target(), "model2": torch.zeros(1), "other": other}
    report = load(saved, state, prefixes=["model"], strict=True)
    assert report.loaded == ("model.a", "model.b")
    assert (report.missing, report.unexpected) == ((), ())
    assert state["model"]["a"].any()
    assert state["optimizer"]["lr"] == 0.0
    assert (other.asked, other.given) == (0, 0)
    report = load(saved, state, prefixes=["optimizer.state", "model.b"])
    assert set(report.loaded) == {"model.b", "optimizer.state.0.m"}
    assert state["optimizer"]["state"][0]["m"].all()
    assert state["optimizer"]["lr"] == 0.0


# --- dtypes -------------------------------------------------------------------------------------


def test_dtypes_follow_the_policy(saved: Path):
    def state() -> dict[str, Any]:
        return {"model": {"b": torch.zeros(4)}}

    wider = {"model": {"a": torch.zeros(3, 2, dtype=torch.float64)}}
    assert load(saved, wider).cast == (("model.a", "float32", "float64"),)
    assert wider["model"]["a"][2, 1] == 5
    with pytest.raises(errors.ShapeMismatchError, match="may lose values"):
        load(saved, state())
    with pytest.raises(errors.ShapeMismatchError, match="forbids"):
        load(saved, wider, dtype="error")
    cast = state()
    assert load(saved, cast, dtype="cast").cast == (("model.b", "float64", "float32"),)
    assert cast["model"]["b"].all()
    kept = state()
    before = kept["model"]["b"]
    report = load(saved, kept, dtype="keep")
    assert kept["model"]["b"].dtype == torch.float64
    assert kept["model"]["b"].all()
    assert not before.any()
    assert report.cast == ()


class Late(stock.DefaultLoadPlanner):
    """Resolves its targets when their bytes have arrived in memory of ray_dcp's."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


def tensors_of_all_kinds(fill: float) -> dict[str, Any]:
    base = torch.full((8,), fill)
    return {
        "base": base, "part": base[2:6], "turned": torch.full((2, 3), fill).t(),
        "wrapped": TwoTensor(torch.full((2,), fill), torch.full((2,), fill)),
        "conjugate": torch.full((2,), fill, dtype=torch.complex64).conj(),
    }  # fmt: skip


@pytest.mark.parametrize("planner", [None, Late])
def test_loads_take_the_hosts_memory_whatever_the_default_device(planner: Any, tmp_path: Path):
    expected, found = tensors_of_all_kinds(3.0), tensors_of_all_kinds(0.0)
    with torch.serialization.safe_globals([TwoTensor]):
        ray_dcp.save(expected, checkpoint_id=tmp_path / "c")
        stock.save(expected, checkpoint_id=tmp_path / "stock", no_dist=True)
        with torch.device("meta"):  # as torch.set_default_device("cuda") does
            ray_dcp.load(found, checkpoint_id=tmp_path / "c", planner=planner and planner())
            ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
            whole = ray_dcp.read_state_dict(tmp_path / "stock")
        written = torch.load(tmp_path / "c.pt", weights_only=False)
    for one in (found, whole, written):
        assert differences({name: one[name] for name in expected}, expected) == []


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_objects_are_built_where_their_parts_lie(tmp_path: Path):
    sparse = torch.eye(2).to_sparse()
    saved = {"coo": (sparse,), "csr": (sparse.to_sparse_csr(),)}
    ray_dcp.save(saved, checkpoint_id=tmp_path / "c")
    with torch.device("meta"):
        found = ray_dcp.read_state_dict(tmp_path / "c")
    for (one,) in found.values():
        assert torch.equal(one.to_dense(), torch.eye(2))


def test_a_kept_dtype_stays_a_parameter_or_gets_memory(saved: Path):
    state = {
        "model": {"a": nn.Parameter(torch.zeros(3, 2).half()), "b": torch.zeros(4, device="meta")}
    }
    load(saved, state, dtype="keep")
    assert isinstance(state["model"]["a"], nn.Parameter)
    assert state["model"]["a"].requires_grad
    assert state["model"]["a"].dtype == torch.float32
    assert state["model"]["b"].dtype == torch.float64
    assert state["model"]["b"].device.type == "cpu"
    assert state["model"]["b"].all()


# --- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("columns", [1, 4])
def test_a_dimension_is_padded_or_cut(saved: Path, rows: int, columns: int):
    state = {"model": {"a": torch.full((rows, columns), 9.0)}}
    report = load(saved, state, resize={"*.a": (0, -1)})
    expected = torch.full((rows, columns), 9.0)
    whole = torch.arange(6.0).view(3, 2)
    expected[: min(3, rows), : min(2, columns)] = whole[:rows, :columns]
    assert torch.equal(state["model"]["a"], expected)
    assert report.resized == (("model.a", (3, 2), (rows, columns)),)


def test_what_is_resized_may_be_cast_as_any_other(saved: Path):
    resize = {"model.a": 0}
    for dtype, policy in ((torch.float64, "widen"), (torch.bfloat16, "cast")):
        state = {"model": {"a": torch.full((4, 2), 9.0, dtype=dtype)}}
        report = load(saved, state, resize=resize, dtype=policy)
        assert state["model"]["a"].tolist() == [[0, 1], [2, 3], [4, 5], [9, 9]]
        assert (len(report.resized), len(report.cast)) == (1, 1)
    with pytest.raises(errors.ShapeMismatchError, match=r"Dtype mismatch.*wanted as bfloat16"):
        load(saved, state, resize=resize)


def test_only_the_named_tensors_and_dimensions_may_differ(saved: Path):
    for resize in ({"*.b": 0}, {"*.a": 1}, {"*.a": 7}):
        state = {"model": {"a": torch.full((5, 2), 9.0)}}
        with pytest.raises(errors.ShapeMismatchError, match=r"model\.a"):
            load(saved, state, resize=resize)
        assert (state["model"]["a"] == 9).all()
    with pytest.raises(errors.ShapeMismatchError):
        load(saved, {"model": {"a": torch.zeros(5, 2, 1)}}, resize={"*": 0})
    with pytest.raises(errors.UnsupportedValueError, match="meta"):
        load(saved, {"model": {"a": torch.zeros(5, 2, device="meta")}}, resize={"*": 0})


# --- structure ----------------------------------------------------------------------------------


def test_stock_dcp_reads_the_structure_as_its_own(tmp_path: Path):
    state = {"s": {0: torch.ones(2), "e": {}}}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    metadata = stock.FileSystemReader(tmp_path / "c").read_metadata()
    assert metadata.planner_data == {"s.0": ("s", "0")}
    assert {type(part) for path in metadata.planner_data.values() for part in path} == {str}
    found = {"s": {"0": torch.zeros(2), "e": {}}}
    stock.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["s"]["0"].all()


EMPTY = [
    {"extra": {"deep": {}, "deeper": {"still": {}}}, "optimizer": {"state": {}, "groups": [{}]}},
    {"extra": [{}, {"deep": {}}], "list": [], "lists": [[], []]},
]
FLAGS = [
    {},
    {"flatten_state_dict": False},
    {"flatten_state_dict": False, "flatten_sharded_tensors": False},
]


def with_values(empty: Any, value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((2,), value), **empty, "config": {"lr": value}, "n": value}


@pytest.mark.parametrize("saved_by", ["native", "hooks", "stock"])
@pytest.mark.parametrize("flags", FLAGS, ids=["flat", "top", "objects"])
@pytest.mark.parametrize("empty", EMPTY)
def test_mappings_without_values_are_in_nobodys_way(
    tmp_path: Path, empty: Any, flags: dict[str, bool], saved_by: str
):
    """What stock DCP loads of its own files it loads of ours, and we of both, by every path."""
    planner = (MySave if saved_by == "hooks" else stock.DefaultSavePlanner)(**flags)
    state = with_values(empty, 3.0)
    for library, path in ((stock, "stock"), (stock if saved_by == "stock" else ray_dcp, "c")):
        library.save(state, checkpoint_id=tmp_path / path, planner=planner, no_dist=True)
    metadata, its = (
        stock.FileSystemReader(tmp_path / name).read_metadata() for name in ("c", "stock")
    )
    assert metadata.state_dict_metadata.keys() == its.state_dict_metadata.keys()
    assert metadata.planner_data == its.planner_data
    for library, kind in (
        (stock, stock.DefaultLoadPlanner),
        (ray_dcp, stock.DefaultLoadPlanner),
        (ray_dcp, Mine),
    ):
        found = with_values(empty)
        library.load(found, checkpoint_id=tmp_path / "c", planner=kind(**flags), no_dist=True)
        if flags == FLAGS[1] and (library is stock or kind is Mine):
            # DCP loads objects into a copy of the state dict then, and leaves them there.
            assert torch.equal(found["w"], state["w"])
        else:
            assert repr(found) == repr(state), (library.__name__, kind)


@pytest.mark.parametrize("flags", FLAGS, ids=["flat", "top", "objects"])
def test_mappings_without_values_come_back_where_a_checkpoint_is_read_whole(
    tmp_path: Path, flags: dict[str, bool]
):
    def same(found: dict[str, Any]) -> bool:
        return found.keys() == state.keys() and all(repr(found[k]) == repr(state[k]) for k in state)

    state = with_values({"extra": {}, "deep": {"er": {}}}, 3.0)
    planner = stock.DefaultSavePlanner(**flags)
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert same(ray_dcp.read_state_dict(tmp_path / "c"))
    made: dict[str, Any] = {}
    reader, whole = (
        stock.FileSystemReader(tmp_path / "c"),
        stock.default_planner._EmptyStateDictLoadPlanner(),
    )
    with pytest.warns(FutureWarning):
        ray_dcp.load_state_dict(made, reader, no_dist=True, planner=whole)
    assert same(made)
    (tmp_path / "c" / ".metadata").unlink()
    ray_dcp.write_metadata(tmp_path / "c")
    assert ("extra" in reader.read_metadata().state_dict_metadata) == (flags == FLAGS[2])
    assert ray_dcp.verify(tmp_path / "c").ok


def test_what_ranks_lose_is_named_with_the_ways_out_whenever_other_names_differ(tmp_path: Path):
    """In the warning of rank 0, and for all ranks in what a save returns."""

    def work(rank: int) -> list[tuple[str, ...]]:
        differing = []
        for step in range(5):
            state = {"seed": rank + step, "w": torch.ones(2), "place": rank if step > 2 else 0}
            if step % 2:
                handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / str(step))
                handle.result(60)
                differing.append(handle.report().differing)
            else:
                saved = ray_dcp.save(state, checkpoint_id=tmp_path / str(step))
                differing.append(saved.differing)
        return differing

    with catch_warnings(record=True) as told:
        simplefilter("default")
        found = run_as_ranks(work, 2)
    assert found == [[("seed",)] * 3 + [("seed", "place")] * 2] * 2
    first, second = dict.fromkeys(str(one.message) for one in told)
    assert "'seed' on rank 1. The lowest rank's are saved" in first
    assert "'seed' on rank 1, 'place' on rank 1" in second
    for way in ("is lost", "ray_dcp.PerRank", "by their global number"):
        assert way in first
    check = ray_dcp.SaveOptions(replicas="check")
    for error in run_as_ranks(
        lambda rank: ray_dcp.save({"seed": rank}, checkpoint_id=tmp_path / "c", options=check), 2
    ):
        assert isinstance(error, errors.PlanConflictError)
        assert "ray_dcp.PerRank" in str(error)


@pytest.mark.parametrize("gatherer", [0, 1])
def test_mappings_that_are_empty_on_some_ranks_have_the_values_of_the_others(
    gatherer: int, tmp_path: Path
):
    """As with `StateDictOptions(full_state_dict=True)`, which gives the state to one rank."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state_dict = dict(model.state_dict())
    whole = {"model": state_dict, "deep": {"er": {"log": [1], "left": {}}}, "empty": {}}
    bare = {"model": {}, "deep": {"er": {}}, "empty": {}}

    def work(rank: int) -> None:
        state = whole if rank == gatherer else bare
        for step in (1, 2):
            common = {"same": [step], "step": [rank] if step == 2 else [0], "z": ["last"]}
            ray_dcp.save({**state, **common}, checkpoint_id=tmp_path / str(step))

    with pytest.warns(UserWarning, match=r"lowest rank's: 'step' on rank 1\. The"):
        assert run_as_ranks(work, 2) == [None, None]
    for step in (1, 2):
        found = ray_dcp.read_state_dict(tmp_path / str(step))
        expected = {**whole, "same": [step], "step": [0], "z": ["last"]}
        assert differences(dict(sorted(found.items())), dict(sorted(expected.items()))) == []
        ray_dcp.load({"model": other}, checkpoint_id=tmp_path / str(step), no_dist=True)
        assert torch.equal(other.weight, model.weight)
        assert ray_dcp.verify(tmp_path / str(step)).ok


@pytest.mark.parametrize("gatherer", [0, 1])
@pytest.mark.parametrize("other", [None, [], 5])
def test_values_within_a_value_of_another_rank_are_not_lost(
    other: Any, gatherer: int, tmp_path: Path
):
    """As where one rank gathers the state, and the others give None."""
    whole = [torch.ones(1), {"w": torch.ones(2)}] if other == [] else {"w": torch.ones(2)}

    def work(rank: int) -> None:
        ray_dcp.save({"x": whole if rank == gatherer else other}, checkpoint_id=tmp_path / "c")

    assert run_as_ranks(work, 2) == [None, None]
    if other == []:
        assert differences(ray_dcp.read_state_dict(tmp_path / "c"), {"x": whole}) == []
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
        assert differences(torch.load(tmp_path / "c.pt"), {"x": whole}) == []
        return
    for read in (ray_dcp.read_state_dict, partial(_as_file, file=tmp_path / "c.pt")):
        with pytest.raises(errors.StateDictError, match=r"both 'x', a \w+, and values within it"):
            read(tmp_path / "c")
        assert differences(read(tmp_path / "c", include=["x.*"]), {"x": whole}) == []
        assert read(tmp_path / "c", include=["x"]) == {"x": other}


def _as_file(place: Path, file: Path, include: Sequence[str] = ()) -> Any:
    ray_dcp.dcp_to_torch_save(place, file, include=include)
    return torch.load(file)


# --- values per rank ----------------------------------------------------------------------------


def own(rank: int, resized: Any = "error") -> dict[str, Any]:
    value = {"seed": rank, "state": torch.full((2,), rank)}
    return {"w": torch.ones(3), "rng": PerRank(value, resized=resized)}


def test_every_rank_gets_its_own_back(tmp_path: Path):
    save_on_ranks([own(rank) for rank in range(3)], tmp_path / "c")
    found = [own(99) for _ in range(3)]
    reports = load_on_ranks(found, tmp_path / "c", LoadOptions(strict=True))
    assert [state["rng"].value["seed"] for state in found] == [0, 1, 2]
    assert [state["rng"].value["state"].tolist() for state in found] == [[0, 0], [1, 1], [2, 2]]
    assert reports[1].loaded == ("w", "rng")


def test_a_change_of_world_size_follows_the_rule(tmp_path: Path):
    save_on_ranks([own(rank) for rank in range(3)], tmp_path / "c")
    with pytest.raises(errors.StateDictError, match=r"saved by 3 ranks, but 2 load it"):
        load_on_ranks([own(99), own(99)], tmp_path / "c")

    kept = [own(99, "keep") for _ in range(4)]
    reports = load_on_ranks(kept, tmp_path / "c")
    assert [state["rng"].value["seed"] for state in kept] == [99] * 4
    assert reports[0].missing == ("rng",)

    wrapped = [own(99, "wrap") for _ in range(5)]
    load_on_ranks(wrapped, tmp_path / "c")
    assert [state["rng"].value["seed"] for state in wrapped] == [0, 1, 2, 0, 1]

    def total(values: Any, rank: int, world_size: int) -> Any:
        return (sum(value["seed"] for value in values), rank, world_size)

    merged = [own(99, total) for _ in range(2)]
    load_on_ranks(merged, tmp_path / "c")
    assert [state["rng"].value for state in merged] == [(3, 0, 2), (3, 1, 2)]


def test_a_value_that_has_the_name_of_a_value_per_rank_is_named(tmp_path: Path):
    state = {"a": PerRank(1), "a.rank-0-of-1": 5}
    with pytest.raises(errors.StateDictError, match=r"'a\.rank-0-of-1' would name two values"):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_own_value_that_is_missing_is_told(saved: Path):
    with pytest.raises(errors.MissingKeyError, match="'rng'"):
        load(saved, {"rng": PerRank(1)})
    state = {"rng": PerRank(1)}
    assert load(saved, state, strict=False).missing == ("rng",)
    assert state["rng"].value == 1


# --- other ways ---------------------------------------------------------------------------------


class Reader(stock.FileSystemReader):
    """A storage of the user's."""


class Writer(stock.FileSystemWriter):
    """A storage of the user's."""


@pytest.mark.parametrize(
    "options", [{"key_map": {}}, {"prefixes": ["model"]}, {"resize": {"a": 0}}, {"dtype": "keep"}]
)
def test_choices_need_the_native_way(saved: Path, options: dict[str, Any]):
    for how in ({"planner": Mine()}, {"storage_reader": Reader(saved)}):
        with pytest.raises(errors.InvalidRequestError, match="need the default planner"):
            ray_dcp.load(target(), checkpoint_id=saved, options=LoadOptions(**options), **how)


class Holding(Asked):
    """A `Stateful` with an own value in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"0": {"rng": PerRank(1)}}


def test_own_values_need_the_native_way(tmp_path: Path, saved: Path):
    state: dict[str, Any] = {"model": [{"rng": PerRank(1)}]}
    for how in ({"planner": MySave()}, {"storage_writer": Writer(tmp_path / "d")}):
        for values in (state, {"model": Holding()}):
            with pytest.raises(errors.InvalidRequestError, match=r"model\.0\.rng"):
                ray_dcp.save(values, checkpoint_id=tmp_path / "d", **how)
    with pytest.raises(errors.InvalidRequestError, match=r"model\.0\.rng"):
        ray_dcp.load(state, checkpoint_id=saved, planner=Mine())
