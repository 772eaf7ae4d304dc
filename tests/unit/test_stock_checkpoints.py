"""Stock DCP reads ours, and we read its checkpoints: also newer ones, which are no damage."""

from __future__ import annotations

import collections
import dataclasses
import io
import pathlib
import pickle
import re
import shutil
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor.placement_types import Shard

import ray_dcp
from ray_dcp import (
    CheckpointError,
    DamagedCheckpointError,
    InternalError,
    InvalidRequestError,
    UnsafeCheckpointError,
    saving,
)
from ray_dcp.cli.main import main
from ray_dcp.core import NEWEST_TORCH, OLDEST_TORCH
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import Kind
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from tests.support import checkpoints, damage
from tests.support.format_cases import difference, many_table, mixed_table, table_of

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(4), "step": 0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of stock DCP, of which the later one has a field that only a newer torch knows."""
    for step in (1, 2):
        state = {"w": torch.full((4,), float(step)), "step": step}
        checkpoints.save_stock(tmp_path / f"step-{step}", state)
    metadata = tmp_path / "step-2" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"\x05sizes", b"\x07lengths"))
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda run, state: ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True),
        lambda run, state: ray_dcp.load_newest(state, run, no_dist=True),
        lambda run, _: ray_dcp.read_state_dict(run / "step-2"),
        lambda run, _: ray_dcp.verify(run / "step-2"),
        lambda run, _: ray_dcp.open(run / "step-2"),
    ],
    ids=["load", "load_newest", "read_state_dict", "verify", "open"],
)
def test_it_is_refused_as_newer_and_no_earlier_step_is_taken(
    run: Path, read: Callable[[Path, Any], Any]
):
    state = blank()
    with pytest.raises(CheckpointError, match=r"without sizes: a newer torch wrote") as told:
        read(run, state)
    assert not isinstance(told.value, DamagedCheckpointError)
    assert state["step"] == 0
    assert not state["w"].any()


def test_the_run_is_listed_and_the_other_step_loads(run: Path):
    assert [step.step for step in ray_dcp.open(run).steps] == [1, 2]
    shown = CliRunner().invoke(main, ["verify", str(run / "step-2")])
    assert shown.exit_code != 0
    assert "newer torch" in shown.output
    state = blank()
    assert ray_dcp.load_newest(state, run, at_most=1, no_dist=True).step == 1
    assert state["w"].tolist() == [1.0] * 4


def test_its_files_are_kept_until_a_save_takes_its_place(run: Path):
    before = {path.name for path in (run / "step-2").iterdir()}
    with pytest.raises(InvalidRequestError, match="another program wrote"):
        ray_dcp.collect(run / "step-2")
    assert {path.name for path in (run / "step-2").iterdir()} == before
    ray_dcp.save({"w": torch.full((4,), 7.0), "step": 7}, checkpoint_id=run / "step-2")
    state = blank()
    ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True)
    assert state["step"] == 7


# --- torch itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_new"),
    [("2.9.1", False), (f"{NEWEST_TORCH}.7+cu132", False), ("2.99.0a0+git1", True), ("3.0", True)],
)
def test_a_torch_that_was_not_tried_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    is_new: bool,
):
    monkeypatch.setattr(torch, "__version__", version)
    saving._note_untried.cache_clear()
    for _ in range(2):
        ray_dcp.save(blank(), checkpoint_id=tmp_path, no_dist=True)
        ray_dcp.load(blank(), checkpoint_id=tmp_path, no_dist=True)
    saving._note_untried.cache_clear()
    lines = [one.getMessage() for one in caplog.records if "was not tried" in one.getMessage()]
    assert lines == ([lines[0]] if is_new else [])
    assert all(version in line and NEWEST_TORCH in line for line in lines)


def test_the_pages_and_the_golden_checkpoints_name_the_versions_that_were_tried():
    tried = re.search(
        r"torch (2\.[\d., and]+) were tried", (REPOSITORY / "docs/limits.md").read_text()
    )
    assert tried is not None
    versions = re.findall(r"2\.\d+", tried[1])
    assert versions[0] == OLDEST_TORCH
    assert versions[-1] == NEWEST_TORCH
    assert (
        f'"torch>={OLDEST_TORCH}",  # tried: {tried[1]} ('
        in (REPOSITORY / "pyproject.toml").read_text()
    )
    golden = {path.name for path in (REPOSITORY / "tests" / "golden").glob("stock-*")}
    assert golden == {f"stock-{version}" for version in versions}


@pytest.fixture(scope="module")
def zstd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.save_stock_zstd(tmp_path_factory.mktemp("zstd") / "c")


class Keeping(DefaultLoadPlanner):
    """Takes objects itself, and remembers with which bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[bytes] = []

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.starts.append(value.getvalue()[:2])
        super().load_bytes(read_item, value)


def test_a_planner_with_load_bytes_of_its_own_gets_what_torch_saved(zstd: Path):
    planner, into = Keeping(), damage.blank()
    ray_dcp.load(into, checkpoint_id=zstd, no_dist=True, planner=planner)
    assert planner.starts == [b"PK"] * 3
    assert damage.bits(into) == damage.bits(damage.state())


def test_a_view_reads_compressed_tensors_and_objects(zstd: Path):
    view = ray_dcp.open(zstd)
    assert view["step"] == 10
    large = damage.state()["model"]["large"]
    assert torch.equal(torch.as_tensor(view["model.large"][2:5]), large[2:5])


def test_verify_looks_at_the_crcs_inside(zstd: Path):
    report = ray_dcp.verify(zstd)
    assert report.ok
    assert report.notes == ()
    payload = sum(t.nbytes for t in damage.state()["model"].values())
    assert report.checked_bytes > payload


def test_what_metadata_does_not_call_compressed_is_not_taken_for_it(zstd: Path, tmp_path: Path):
    for key, data in damage.contents_of(zstd).items():
        (tmp_path / key).write_bytes(data)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        ray_dcp.load(damage.blank(), checkpoint_id=tmp_path, no_dist=True)
    assert {p.file for p in ray_dcp.verify(tmp_path).problems} == {"__0_0.distcp"}


def stock(**changes):
    """A Metadata of torch's own objects: one sharded tensor, one object."""
    size, half = torch.Size([4, 2]), torch.Size([2, 2])
    offsets = [torch.Size([0, 0]), torch.Size([2, 0])]
    fields = {
        "state_dict_metadata": {
            "w": md.TensorStorageMetadata(
                md.TensorProperties(torch.bfloat16, requires_grad=True), size,
                [md.ChunkStorageMetadata(offset, half) for offset in offsets],
            ),
            "o.0": md.BytesStorageMetadata(),
        },
        "planner_data": {"w": ("w",), "o.0": ("o", 0)},
        "storage_data": {
            md.MetadataIndex("o.0"): _StorageInfo("__0_0.distcp", 0, 50),
            md.MetadataIndex("w", offsets[1], 5): _StorageInfo("__1_0.distcp", 7, 900),
            md.MetadataIndex("w", offsets[0]): _StorageInfo("__0_0.distcp", 50, 800),
        },
        "storage_meta": md.StorageMeta(pathlib.Path("/data/step-1"), "uuid"),
        "version": "1.0.0",
    }  # fmt: skip
    return md.Metadata(**(fields | changes))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_stock_objects_are_read_whatever_the_protocol(protocol):
    found = decode_metadata(pickle.dumps(stock(), protocol))
    table = found.table
    assert table.names == ("w", "o.0")
    assert table.paths == (("w",), ("o", 0))
    assert table.kind.tolist() == [Kind.TENSOR, Kind.OBJECT]
    assert table.dtypes == ("bfloat16",)
    assert table.requires_grad.tolist() == [True, False]
    assert table.shape.tolist() == [[4, 2], [1, 1]]
    assert table.offset.tolist() == [[0, 0], [2, 0], [0, 0]]
    assert table.size.tolist() == [[2, 2], [2, 2], [1, 1]]
    assert [table.files[file] for file in table.file] == [
        "__0_0.distcp", "__1_0.distcp", "__0_0.distcp",
    ]  # fmt: skip
    assert table.item_offset.tolist() == [50, 7, 0]
    assert table.item_bytes.tolist() == [800, 900, 50]
    assert table.payload_bytes.tolist() == [8, 8, 50]
    assert table.payload_offset.tolist() == [-1, -1, -1]
    assert found.attempt is None


def test_what_torch_left_out_or_added_is_tolerated():
    bare = stock(planner_data=None, storage_meta=None, version=None)
    found = decode_metadata(pickle.dumps(bare))
    assert found.table.paths == (None, None)

    more = stock()
    more.all_local_plans = [SavePlan([WriteItem(md.MetadataIndex("w"), WriteItemType.SHARD)])]
    more.extra = {"deep": [1, 2.5, b"x", {"y"}, frozenset([3]), (None, True)]}
    next(iter(more.storage_data.values())).crc32c = 5
    assert difference(decode_metadata(pickle.dumps(more)).table,
                      decode_metadata(pickle.dumps(stock())).table) == []  # fmt: skip


PATHS = (("w",), ("o", 0))


@pytest.mark.parametrize(
    ("planner_data", "paths"),
    [
        (collections.OrderedDict(stock().planner_data), PATHS),
        (collections.ChainMap({"w": ("w",)}, {"w": ("v",), "o.0": ("o", 0)}), PATHS),
        (collections.defaultdict(tuple, stock().planner_data), PATHS),
        # Of other planners.
        *((other, (None, None)) for other in (5, [1], {"w": 5, "o.0": ("o", 2.5)}, {1: ("w",)})),
    ],
)
def test_paths_are_those_of_a_mapping(planner_data, paths):
    found = decode_metadata(pickle.dumps(stock(planner_data=planner_data)))
    assert found.table.paths == paths


def test_stream_transforms_make_their_tensor_opaque():
    changed = stock()
    for index, info in changed.storage_data.items():
        if index.fqn == "w" and index.offset[0] == 2:
            info.transform_descriptors = ["stream.zstd/1"]
    found = decode_metadata(pickle.dumps(changed))
    assert found.transforms == (None, ("stream.zstd/1",), None)
    assert found.table.kind.tolist() == [Kind.OPAQUE, Kind.OBJECT]
    assert found.table.payload_bytes.tolist() == [800, 900, 50]


def test_a_dtype_without_raw_bytes_is_opaque():
    changed = stock()
    changed.state_dict_metadata["w"].properties.dtype = torch.quint8
    found = decode_metadata(pickle.dumps(changed))
    assert found.table.dtypes == ("quint8",)
    assert found.table.kind.tolist() == [Kind.OPAQUE, Kind.OBJECT]


class PicklerOf3112(pickle.Pickler):
    """Saves members of enumerations by name, as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_of_a_python_that_saves_members_by_name_is_read(protocol):
    saved = io.BytesIO()
    plan = SavePlan([WriteItem(md.MetadataIndex("o.0"), WriteItemType.BYTE_IO)])
    PicklerOf3112(saved, protocol).dump(stock(planner_data=[plan]))
    assert b"getattr" in saved.getvalue()
    assert (
        difference(
            decode_metadata(saved.getvalue()).table,
            decode_metadata(pickle.dumps(stock(planner_data=[plan]))).table,
        )
        == []
    )


@pytest.mark.parametrize(
    "args", [(), (WriteItemType, 1), (md.Metadata, "VERSION"), (WriteItemType, "mro")]
)
def test_an_attribute_of_anything_else_is_unsafe(args):
    with pytest.raises(UnsafeCheckpointError, match="asks for something else"):
        decode_metadata(pickle.dumps(stock(version=Reduced(getattr, args))))


def with_path(path):
    changed = stock()
    for info in changed.storage_data.values():
        info.relative_path = path
    return pickle.dumps(changed)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../../x", "..", ".", "a/..", "", "C:\\x", "C:/x", "a\\..\\x",
     "s3://bucket/x", "file:///x", "a\0b", "x" * 5000],
)  # fmt: skip
def test_a_file_outside_the_checkpoint_is_unsafe(path):
    with pytest.raises(UnsafeCheckpointError):
        decode_metadata(with_path(path))


class Reduced:
    def __init__(self, *reduced):
        self._reduced = reduced

    def __reduce__(self):
        return self._reduced


def touch(path):
    pathlib.Path(path).touch()


@pytest.mark.parametrize("where", ["root", "planner_data", "storage_meta", "version", "extra"])
def test_code_is_named_and_never_run(where, tmp_path):
    import os

    for function, args, name in [
        (os.system, (f"touch {tmp_path}/ran",), "posix.system"),
        (eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",), "builtins.eval"),
        (getattr, (md.Metadata, "version"), "builtins.getattr"),
        (touch, (str(tmp_path / "ran"),), f"{__name__}.touch"),
        (torch.hub.load, ("x", "y"), "torch.hub.load"),
        (torch.load, ("x",), "torch.serialization.load"),
    ]:
        bad = Reduced(function, args)
        changed = stock()
        if where == "root":
            changed = bad
        else:
            setattr(changed, where, [bad])
        for protocol in (2, 4):
            with pytest.raises(UnsafeCheckpointError) as caught:
                decode_metadata(pickle.dumps(changed, protocol))
            old = name.replace("builtins", "__builtin__")
            assert caught.value.key in ({name, old} if protocol == 2 else {name})
    assert list(tmp_path.iterdir()) == []


def nested_tuple_key(depth):
    return b"\x80\x04})" + b"\x85" * depth + b"Ns."


HOSTILE = {
    "memo of 64 GiB": b"\x80\x04Nr\xff\xff\xff\xff.",
    "huge text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "huge bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00x.",
    "huge long": b"\x80\x04\x8b\xff\xff\xff\x7fx.",
    "key nested very deep": nested_tuple_key(200_000),
    "value nested very deep": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "cyclic list": b"\x80\x04]\x94h\x00a.",
    "dict as its own key": b"\x80\x04}\x94h\x00Ns.",
    "build on a text": b"\x80\x04\x8c\x01x}b.",
    "global with dots": b"\x80\x04\x8c\x05torch\x8c\x0bSize.__new__\x93.",
    "persistent id": b"\x80\x04NQ.",
    "instance": b"(ios\nsystem\n.",
    "object": b"\x80\x02(cos\nsystem\no.",
    "extension": b"\x80\x02\x82\x01.",
    "name that is no utf-8": b"\x80\x02c\xff\n\xff\n.",
    "protocol 99": b"\x80\x63N.",
    "size of a cycle": b"\x80\x04]\x94ctorch\nSize\nh\x00\x85R.",
    "path of a bomb": b"\x80\x04" + b"X\x00\x00\x01\x00" + b"x" * 65536 + b"\x94"
    + b"cpathlib\nPosixPath\n(" + b"h\x00" * 1000 + b"tR.",
    "stack below a mark": b"\x80\x04N(00t.",
    "odd items": b"\x80\x04}(NNNu.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_ends_in_an_error_of_ours(name):
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        decode_metadata(HOSTILE[name])
    str(caught.value)
    assert time.process_time() - start < 30


def tensor(**changes):
    entry = stock().state_dict_metadata["w"]
    for name, value in changes.items():
        setattr(entry, name, value)
    return stock(state_dict_metadata={"w": entry})


def first_place(**changes):
    changed = stock()
    for name, value in changes.items():
        setattr(next(iter(changed.storage_data.values())), name, value)
    return changed


def with_attempt(attempt):
    changed = stock()
    changed.ray_dcp_attempt = attempt
    return changed


WRONG = {
    "no tensors": lambda: stock(state_dict_metadata=None),
    "a number as name": lambda: stock(state_dict_metadata={5: md.BytesStorageMetadata()}),
    "a place missing": lambda: stock(storage_data={}),
    "another class": lambda: stock(state_dict_metadata={"w": md.StorageMeta()}),
    "shape too small": lambda: tensor(size=torch.Size([3, 2])),
    "shape of texts": lambda: tensor(size=("4", "2")),
    "negative shape": lambda: tensor(size=(-4, 2)),
    "shape of 2**62 and 2**62": lambda: tensor(size=(2**61, 2**61)),
    "too many dimensions": lambda: tensor(size=(1,) * 100),
    "a number as chunk": lambda: tensor(chunks=[5]),
    "no properties": lambda: tensor(properties=None),
    "a place beyond 2**63": lambda: first_place(length=2**63),
    "true as place": lambda: first_place(offset=True),
    "a number as file": lambda: first_place(relative_path=5),
    "a lone surrogate as file": lambda: first_place(relative_path="\ud800"),
    "numbers as transforms": lambda: first_place(transform_descriptors=[1]),
    "an attempt that climbs": lambda: with_attempt("../x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_makes_no_sense_is_damage(name):
    with pytest.raises(DamagedCheckpointError):
        decode_metadata(pickle.dumps(WRONG[name]()))


# --- forms of a newer torch ----------------------------------------------------------------------


def properties(*state):
    """Returns what pickles as torch's own class, with the state of a torch of another version."""
    made = md.TensorProperties()
    made.__getstate__ = lambda: state[0] if len(state) == 1 else state
    return made


KNOWN = (torch.bfloat16, "layout", True, "memory format", False)


@pytest.mark.parametrize("more", [(), ((2, 1),), (None,), ((2, 1), "new", 7)])
def test_properties_are_read_whatever_a_newer_torch_adds_behind_them(more):
    found = decode_metadata(pickle.dumps(tensor(properties=properties(*KNOWN, *more))))
    assert found.table.dtypes == ("bfloat16",)
    assert found.table.requires_grad.tolist() == [True]


def renamed(data, old, new):
    """A pickle of protocol 4 with another text in the place of one of it."""
    short = (bytes([len(text)]) + text.encode() for text in (old, new))
    spoiled = data.replace(*short)
    assert spoiled != data
    return spoiled


def with_name(old, new):
    return renamed(pickle.dumps(stock(), 4), old, new)


DCP = "torch.distributed.checkpoint"
NEWER = {
    "properties of less": lambda: pickle.dumps(tensor(properties=properties(*KNOWN[:4]))),
    "properties in another order": lambda: pickle.dumps(
        tensor(properties=properties("new", *KNOWN, (2, 1)))
    ),
    "properties as something else": lambda: pickle.dumps(tensor(properties=properties([1]))),
    "properties of other names": lambda: pickle.dumps(tensor(properties=properties({"type": 1}))),
    "a new class": lambda: with_name("TensorStorageMetadata", "ShardedTensorMetadata"),
    "a new module": lambda: with_name(f"{DCP}.filesystem", f"{DCP}.storage_info"),
    "a placement": lambda: pickle.dumps(stock(planner_data=Shard(0))),
    "a field of another name": lambda: with_name("sizes", "lengths"),
    "a place of another name": lambda: with_name("relative_path", "path"),
    "a later version that makes no sense": lambda: pickle.dumps(
        stock(version="1.1.0", storage_data=[])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_a_form_that_is_not_known_yet_is_of_a_newer_torch_and_no_damage(name):
    with pytest.raises(CheckpointError, match=r"a newer torch wrote this.*upgrade ray_dcp") as told:
        decode_metadata(NEWER[name]())
    assert not isinstance(told.value, DamagedCheckpointError)
    assert "earlier step" not in str(told.value)


@pytest.mark.parametrize("dtype", ["float5_e3m1", "bcomplex64", "quint3x9"])
def test_a_dtype_that_is_not_known_yet_is_read_as_its_name(dtype):
    found = decode_metadata(with_name("bfloat16", dtype))
    assert found.table.dtypes == (dtype,)
    assert found.table.kind.tolist() == [Kind.OPAQUE, Kind.OBJECT]


@pytest.mark.parametrize(
    "old", ["TensorStorageMetadata", "TensorProperties", f"{DCP}.filesystem", "sizes", "fqn",
            "relative_path", "state_dict_metadata"],
)  # fmt: skip
def test_a_name_with_one_character_that_is_wrong_is_damage(old):
    with pytest.raises(DamagedCheckpointError):
        decode_metadata(with_name(old, old[:-1] + "j"))


@pytest.mark.parametrize(
    "name", [f"{DCP}.format_utils.dcp_to_torch_save", f"{DCP}.metadata.x", "torch.hub.load",
             "torch.float_power", "torch.nn.Module"],
)  # fmt: skip
def test_what_is_no_class_of_dcp_is_unsafe_as_before(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(UnsafeCheckpointError):
        decode_metadata(f"\x80\x02c{module}\n{attribute}\n.".encode("latin-1"))


def encoded(table):
    return encode_metadata(table, checkpoint_id="/data/step-1", attempt="a1")


def as_torch_builds_it(table):
    """The same Metadata, made of torch's own objects."""
    names, places = {}, {}
    for row, name in enumerate(table.names):
        if table.kind[row] == Kind.OBJECT:
            names[name] = md.BytesStorageMetadata()
            continue
        names[name] = md.TensorStorageMetadata(
            properties=md.TensorProperties(
                dtype=getattr(torch, table.dtypes[table.dtype[row]]),
                requires_grad=bool(table.requires_grad[row]),
            ),
            size=torch.Size(table.shape[row][: table.ndim[row]].tolist()),
            chunks=[],
        )
    for row, tensor in enumerate(table.tensor.tolist()):
        name = table.names[tensor]
        index = md.MetadataIndex(name)
        if table.kind[tensor] != Kind.OBJECT:
            ndim = table.ndim[tensor]
            offset = torch.Size(table.offset[row][:ndim].tolist())
            size = torch.Size(table.size[row][:ndim].tolist())
            chunks = names[name].chunks
            index = md.MetadataIndex(name, offset, len(chunks))
            chunks.append(md.ChunkStorageMetadata(offset, size))
        places[index] = _StorageInfo(
            table.files[table.file[row]], int(table.item_offset[row]), int(table.item_bytes[row])
        )
    return md.Metadata(
        state_dict_metadata=names,
        planner_data={
            name: (name,) if path is None else path
            for name, path in zip(table.names, table.paths, strict=True)
        },
        storage_data=places,
        storage_meta=md.StorageMeta("/data/step-1", "a1", None, []),
        version="1.0.0",
    )


def typed(value):
    """A value with the types of all its parts, so that torch.Size and tuple differ."""
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(part) for part in value]
    if dataclasses.is_dataclass(value):
        return type(value), typed(value.__dict__)
    return type(value), value


def assert_same(found, expected):
    assert found.__dict__.pop("ray_dcp_attempt") == "a1"
    assert found == expected
    found.storage_data = dict(sorted(found.storage_data.items(), key=str))
    expected.storage_data = dict(sorted(expected.storage_data.items(), key=str))
    assert typed(found) == typed(expected)
    for one, other in zip(found.storage_data, expected.storage_data, strict=True):
        assert one.index == other.index


HERE = [dtype for dtype in ITEMSIZE if hasattr(torch, dtype)]


def every_dtype():
    return table_of(
        [
            (dtype, (dtype,), Kind.TENSOR, dtype, (3, 2), bool(grad % 2), [((0, 0), (3, 2), 0)])
            for grad, dtype in enumerate(HERE)
        ]
    )


def large_numbers():
    table = many_table(300)
    rows = np.arange(300) * (1 << 40)
    return dataclasses.replace(table, item_offset=rows, payload_offset=rows + 384)


TABLES = {
    "mixed": mixed_table,
    "empty": lambda: table_of([], files=()),
    "every dtype": every_dtype,
    "many": lambda: many_table(1000),
    "beyond 4 GiB": large_numbers,
    "odd names": lambda: table_of(
        [(name, (name, -3, 0, 1 << 40, "0"), Kind.TENSOR, "int8", (1,), False, [((0,), (1,), 0)])
         for name in ("", "a.b", "ü\u4e2d", "x" * 300, "state_dict_metadata", "size", "\ud800")]
    ),
    "paths of every length": lambda: table_of(
        [(f"t{n}", ("t", 1, "u", "t", 300, "v")[:n], Kind(n % 2), "int8" if n % 2 == 0 else None,
          (2,) * (n % 2 == 0), False, [((0,), (2,), 0)] if n % 2 == 0 else [((), (), 0)])
         for n in (3, 0, 6, 1, 2, 5, 4)]
    ),
    "chunks in mixed order": lambda: table_of(
        [("w", ("w",), Kind.TENSOR, "int8", (4, 1 << 33), False,
          [((i, 0), (1, 1 << 33), 0) for i in (2, 0, 3, 1)])]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_torch_unpickles_what_it_would_have_built_itself(name):
    table = TABLES[name]()
    # Through a pickle: that sets attributes in another order and leaves out those that are None.
    expected = pickle.loads(pickle.dumps(as_torch_builds_it(table)))
    assert_same(pickle.loads(encoded(table)), expected)


def test_a_chunk_without_a_place_is_refused():
    table = mixed_table()
    place = table.item_offset.copy()
    place[3] = -1
    with pytest.raises(InternalError, match="have a place"):
        encoded(dataclasses.replace(table, item_offset=place))


def test_every_torch_since_2_0_reads_the_properties(monkeypatch):
    """Up to 2.14 torch unpacks five values, and from 2.15 on five or six."""
    states = []
    monkeypatch.setattr(md.TensorProperties, "__setstate__", lambda _, state: states.append(state))
    pickle.loads(encoded(every_dtype()))
    assert len(states) == len(HERE)
    assert {len(state) for state in states} == {5}


stock_load = partial(dcp.load, no_dist=True)

WITHOUT = ray_dcp.SaveOptions(stock_metadata=False)


def state_of(step):
    return {"w": torch.arange(6.0) + step, "step": step}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ckpt"
    ray_dcp.save(state_of(1), checkpoint_id=path, options=WITHOUT)
    return path


def loaded(load, path):
    state = state_of(0)
    load(state, checkpoint_id=path)
    return torch.equal(state["w"], state_of(1)["w"]) and state["step"] == 1


def test_made_later_it_is_what_the_save_would_have_written(path, tmp_path):
    assert ray_dcp.write_metadata(path)
    assert loaded(stock_load, path)
    assert loaded(ray_dcp.load, path)
    assert ray_dcp.verify(path).ok
    made = (path / ".metadata").read_bytes()
    assert ray_dcp.write_metadata(path)
    assert (path / ".metadata").read_bytes() == made


def test_it_stays_when_others_look_after_the_checkpoint_and_goes_with_it(path):
    ray_dcp.write_metadata(path)
    ray_dcp.collect(path)
    assert (path / ".metadata").exists()
    ray_dcp.save(state_of(1), checkpoint_id=path, options=WITHOUT)
    assert not (path / ".metadata").exists()
    ray_dcp.write_metadata(path)
    ray_dcp.delete(path)
    assert not (path / ".metadata").exists()


def test_what_has_no_use_for_it_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.write_metadata(tmp_path / "nothing")
    dcp.save(state_of(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    before = (tmp_path / "stock" / ".metadata").read_bytes()
    with pytest.raises(InvalidRequestError, match="another program"):
        ray_dcp.write_metadata(tmp_path / "stock")
    assert (tmp_path / "stock" / ".metadata").read_bytes() == before


def test_a_copy_that_lacks_the_dot_file_gets_one_of_its_own(tmp_path):
    first, copy = tmp_path / "run" / "step-1", tmp_path / "elsewhere" / "step-1"
    ray_dcp.save(state_of(1), checkpoint_id=first)
    copy.mkdir(parents=True)
    for file in first.iterdir():
        if file.name != ".metadata":
            shutil.copy(file, copy)
    done = CliRunner().invoke(main, ["metadata", str(copy)])
    assert (done.exit_code, done.output) == (0, f"stock DCP can read {copy}\n")
    assert loaded(stock_load, copy)
    assert dcp.FileSystemReader(copy).read_metadata().storage_meta.checkpoint_id == str(copy)
    made = (copy / ".metadata").read_bytes()
    assert made != (first / ".metadata").read_bytes()
    assert loaded(ray_dcp.load, copy)
    report = ray_dcp.verify(copy)
    assert report.ok
    assert report.notes == ()
    assert (copy / ".metadata").read_bytes() == made
    ray_dcp.copy(copy, tmp_path / "third")
    assert loaded(stock_load, tmp_path / "third")
    # What is no projection of the checkpoint is still damage, and made anew.
    (copy / ".metadata").write_bytes(made.replace(b"1.0.0", b"1.0.1"))
    assert not ray_dcp.verify(copy).ok
    assert ray_dcp.write_metadata(copy)
    assert (copy / ".metadata").read_bytes() == made
