"""A checkpoint can't run code, or make its reader leave its folder, wait, or fill the memory."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

import ray_dcp
from ray_dcp import DamagedCheckpointError, LoadOptions, UnsafeCheckpointError, errors
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.values import ChunkTable
from ray_dcp.format import manifest as records
from ray_dcp.format.metadata import allowed_global, read_pickle
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.torch_adapter.objects import dump_object, load_object, load_problem
from tests.support import checkpoints, hostile
from tests.support.programs.forks import Programs

DAMAGED = "DamagedCheckpointError"
ERRORS = {"object": "UnsafeCheckpointError", "nested": "nothing"}
OTHER_ERRORS = {
    "object: a compressed pickle": "DamagedCheckpointError",
    "safetensors: a dtype that is not read here": "UnsupportedValueError",
    "safetensors: a length of 99 MB": "NeedMoreBytes",
    # A ChainMap may well name one dict often: it is looked at once.
    ".metadata: a chain of one dict": "nothing",
}


@pytest.fixture(scope="module")
def outcomes(programs: Programs) -> dict[str, list]:
    """What came of each file, in a process that may take 12 GiB more than it began with."""
    (ended,) = programs.run("-m", "tests.support.hostile")
    found: dict[str, list] = {}
    for line in ended.stdout.splitlines():
        case, *outcome = json.loads(line)
        found[case] = outcome
    assert ended.returncode == 0, f"{list(found)[-1:]} ended the process: {ended.returncode}"
    return found


@pytest.mark.parametrize("case", hostile.cases())
def test_it_is_refused_by_name_in_time_and_in_little_memory(case: str, outcomes):
    num_bytes, error, told, _, peak_bytes = outcomes[case]
    assert error == OTHER_ERRORS.get(case, ERRORS.get(case.partition(":")[0], DAMAGED)), told
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


def test_records_are_checked_under_any_spelling_of_their_name():
    """torch finds a record without regard to case."""
    bomb = hostile.OBJECTS["a list of a range"]()
    with pytest.raises(UnsafeCheckpointError):
        load_object(bomb.replace(b"data.pkl", b"DATA.PKL"), fqn="a")


ESCAPES = (
    "../outside/secret", "/etc/passwd", "a/../../outside/secret", "..", "\\\\host\\x", "C:\\x",
    "file:///etc/passwd", "a//b", "./a", "a\0b", "\u202eatad", "\ud800",
)  # fmt: skip


def the_manifest(path: Path) -> tuple[Path, Any]:
    (file,) = path.glob("manifest-*.json")
    return file, records.decode_record(file.read_bytes())


def file_of(path: Path, name: str) -> Path:
    """Returns the file that a checkpoint has for something."""
    if "." in name:
        return path / name
    file, manifest = the_manifest(path)
    keys = {"manifest": file.name, "table": manifest.table.key}
    return path / keys[name] if name in keys else checkpoints.data_file(path)


def signed(path: Path, **changes: Any) -> None:
    """Writes the manifest again, with other fields and a digest that fits."""
    file, _ = the_manifest(path)
    fields = json.loads(file.read_bytes())["record"] | changes
    file.write_bytes(records.sealed("record", records.canonical(fields)))


def with_table(path: Path, change: Callable[[ChunkTable], ChunkTable]) -> None:
    """Changes the chunk table, and the manifest so that it fits."""
    file, manifest = the_manifest(path)
    table = path / manifest.table.key
    data = encode_table(change(decode_table(table.read_bytes())))
    table.write_bytes(data)
    entry = records.FileEntry(manifest.table.key, len(data), digest_bytes(data).hex())
    file.write_bytes(records.encode_record(replace(manifest, table=entry)))


@pytest.fixture
def ours(saved_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_checkpoint, tmp_path / "c")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    file = folder / "secret"
    file.write_bytes(os.urandom(4096))
    return file


def load(path: Path, names: tuple[str, ...] = ("weight",)) -> dict[str, torch.Tensor]:
    into = {"model": {n: torch.zeros_like(checkpoints.state()["model"][n]) for n in names}}
    ray_dcp.load(into, checkpoint_id=path, no_dist=True)
    return into["model"]


def test_a_manifest_of_a_made_up_attempt_has_a_save_delete_nobody_elses_files(ours: Path):
    """The names that an attempt gives to its files have exactly its id in them."""
    signed(ours, attempt="a")
    theirs = [
        "trace.a.json", "chunks.a.table", "__0_7.a.distcp",
        "a/rank-00000-part-00000.safetensors", ".tmp-0123456789ab-chunks.a.table",
    ]  # fmt: skip
    (ours / "a").mkdir()
    for name in theirs:
        (ours / name).write_bytes(b"mine")
    for _ in range(2):
        checkpoints.save(ours)
    assert [name for name in theirs if not (ours / name).exists()] == []
    ray_dcp.delete(ours)
    assert [name for name in theirs if not (ours / name).exists()] == []


# Names that lead outside


@pytest.mark.parametrize("key", ESCAPES)
@pytest.mark.parametrize("where", ["files", "table", "metadata"])
def test_a_manifest_names_no_file_outside(ours: Path, secret: Path, key: str, where: str):
    fields = json.loads(the_manifest(ours)[0].read_bytes())["record"]
    entry = {"key": key, "num_bytes": 4096, "digest": "0" * 32}
    files = fields["files"]
    more = {
        "keys": f"{files['keys']}\n{key}",
        "num_bytes": [*files["num_bytes"], 4096],
        "digests": files["digests"] + "0" * 32,
    }
    signed(ours, **{where: more if where == "files" else entry})
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        load(ours)
    assert isinstance(caught.value, errors.UnsafeCheckpointError) or key == "\ud800"
    assert not ray_dcp.verify(ours).ok


def test_a_chunk_table_names_only_files_that_the_manifest_names(ours: Path):
    with_table(ours, lambda table: replace(table, files=("other.distcp", *table.files[1:])))
    with pytest.raises(errors.DamagedCheckpointError, match=r"does not name: other\.distcp"):
        load(ours)


@pytest.mark.parametrize("key", ESCAPES[:4])
def test_stock_metadata_names_no_file_outside(tmp_path: Path, secret: Path, key: str):
    path = checkpoints.save_stock(tmp_path / "stock")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = key
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(errors.UnsafeCheckpointError, match="own directory"):
        load(path)
    (problem,) = ray_dcp.verify(path).problems
    assert problem.file == ".metadata"


# Links: reading follows them, as of a folder of the hub's cache. Writing and deleting do not.


def test_a_save_replaces_links_and_writes_nothing_through_them(ours: Path, secret: Path):
    before = secret.read_bytes()
    for name in (".metadata", "__0_0.distcp"):
        (ours / name).unlink(missing_ok=True)
        (ours / name).symlink_to(secret)
    (ours / ".metadata").unlink()
    (ours / ".metadata").symlink_to(secret.parent / "not there")
    checkpoints.save(ours)
    assert secret.read_bytes() == before
    assert not (ours / ".metadata").is_symlink()
    assert list(secret.parent.iterdir()) == [secret]
    assert torch.equal(load(ours)["weight"], checkpoints.state()["model"]["weight"])


# Files that are not what they seem


@pytest.mark.parametrize("name", ["manifest", ".metadata", "table", "data"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_what_is_no_file_is_an_error_and_nobody_waits(ours: Path, name: str, kind: str):
    victim = file_of(ours, name)
    victim.unlink()
    if kind == "pipe":
        os.mkfifo(victim)
    elif kind == "directory":
        victim.mkdir()
    else:
        victim.symlink_to("/dev/zero")
    if name == ".metadata":
        with pytest.raises(errors.CheckpointError) if kind != "directory" else nullcontext():
            load(ours)
        return
    with pytest.raises(errors.CheckpointError):
        load(ours)


@pytest.fixture
def little_memory():
    """Nobody gets more than 6 GiB above what this process has."""
    size = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["manifest", "table", "data", "model.safetensors"])
def test_a_file_of_64_gigabytes_of_nothing_is_not_taken_into_memory(
    ours: Path, tmp_path: Path, name: str, little_memory: None
):
    if name == "model.safetensors":
        ours = tmp_path / "hub"
        ours.mkdir()
        (ours / name).write_bytes(hostile.header({"w": hostile.tensor([1 << 34], 0, 1 << 36)}))
    victim = file_of(ours, name)
    os.truncate(victim, (64 << 30) + (victim.stat().st_size if name.startswith("model") else 0))
    if name == "data":
        # Zeros behind a data file change nothing that is loaded.
        load(ours)
        return
    with pytest.raises(errors.CheckpointError) as caught:
        load(ours)
    expected = (
        errors.MissingKeyError if name == "model.safetensors" else errors.DamagedCheckpointError
    )
    assert isinstance(caught.value, expected), "not one that says that there is no memory"


def test_chunks_that_share_their_bytes_are_each_held_against_their_own_checksums(ours: Path):
    """Entries that overlap ask for no more than their tensors hold, and lie to nobody."""

    def overlap(table: ChunkTable) -> ChunkTable:
        names = [table.names[tensor] for tensor in table.tensor.tolist()]
        large = names.index("model.large")
        places = {
            name: np.where(np.arange(len(names)) == names.index("model.weight"),
                           column[large], column)
            for name, column in (("item_offset", table.item_offset),
                                 ("payload_offset", table.payload_offset))
        }  # fmt: skip
        return replace(table, **places)

    with_table(ours, overlap)
    with pytest.raises(errors.DamagedCheckpointError, match=r"model\.weight"):
        load(ours)
    assert torch.equal(load(ours, ("large",))["large"], checkpoints.state()["model"]["large"])
    assert {problem.fqn for problem in ray_dcp.verify(ours).problems} >= {"model.weight"}


# Safetensors of others


def hub(path: Path, fields: dict[str, Any], payload: bytes = b"") -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(hostile.header(fields) + payload)
    return path


def test_a_dtype_that_is_not_read_is_no_damage_and_is_named(tmp_path: Path):
    path = hub(tmp_path / "c", {"w": hostile.tensor([8], 0, 4, dtype="F4")}, bytes(4))
    for look in (ray_dcp.open, ray_dcp.verify):
        with pytest.raises(errors.UnsupportedValueError, match=r"model\.safetensors.*'w'.*F4"):
            look(path)


@pytest.mark.parametrize(
    ("offset", "ndim", "told"),
    [
        # A tensor of 2**61 elements of which one is there is legal, and lacks the rest.
        ([1 << 61], 1, r"\(2305843009213693953,\)"),
        ([1 << 40, 1 << 40], 2, r"less than 2\*\*62 elements"),
        *((offset, 1, None) for offset in ([(1 << 62) - 1], [5, 5], [-1], ["0"], [None])),
    ],
)
def test_a_place_in_a_tensor_beyond_all_bounds_is_refused(tmp_path, offset, ndim, told):
    """Of a tensor's shape such a folder says only where its chunks end."""
    info = json.dumps({"w": {"saved_offsets": offset}, "v": {"saved_offsets": [0]}})
    fields = {
        "__metadata__": {"DCP_SHARDING_INFO": info},
        "w": hostile.tensor([1] * ndim, 0, 4),
        "v": hostile.tensor([1], 4, 8),
    }
    path = hub(tmp_path / "c", fields, bytes(8))
    with pytest.raises(errors.CheckpointError, match=told):
        ray_dcp.load({"w": torch.zeros(1)}, checkpoint_id=path, no_dist=True)
    if offset != [1 << 61]:
        with pytest.raises(errors.CheckpointError, match=told):
            _ = ray_dcp.open(path)["w"][0]


# What a `.metadata` claims takes no memory before the bytes are seen: loads on every path


HUGE = 1 << 50
MOST_BYTES = 64 << 20


class OwnPlanner(DefaultLoadPlanner):
    """Takes the path on which a planner's hooks run."""


def stock_with(path, change):
    """Saves with stock DCP, and rewrites what `.metadata` says of every item."""
    checkpoints.save_stock(path, {"w": torch.arange(3000.0), "o": {1, 2, 3}})
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def of_items(name, **fields):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                metadata.storage_data[index] = replace(info, **fields)

    return change


def of_shape(size, *chunks):
    def change(metadata):
        old = metadata.state_dict_metadata["w"]
        boxes = [ChunkStorageMetadata(torch.Size([a]), torch.Size([n])) for a, n in chunks]
        metadata.state_dict_metadata["w"] = TensorStorageMetadata(
            old.properties, torch.Size(size), boxes or old.chunks
        )

    return change


LIES = {
    "an object of a petabyte": (of_items("o", length=HUGE), errors.DamagedCheckpointError),
    "an object behind the end": (of_items("o", offset=HUGE), errors.DamagedCheckpointError),
    "a tensor item behind the end": (of_items("w", offset=HUGE), errors.DamagedCheckpointError),
    "a negative length": (of_items("o", length=-1), errors.DamagedCheckpointError),
    "a file elsewhere": (of_items("o", relative_path="../../o"), errors.UnsafeCheckpointError),
    "a larger tensor": (of_shape([HUGE]), errors.ShapeMismatchError),
    "a larger chunk": (of_shape([3000], (0, HUGE)), errors.CheckpointError),
    "a chunk elsewhere": (of_shape([3000], (HUGE, 3000)), errors.CheckpointError),
    # Its head says all that is needed.
    "a longer tensor item": (of_items("w", length=HUGE), None),
}


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "hooks"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_sizes_is_refused_before_memory_is_taken(tmp_path, lie, planner):
    change, expected = LIES[lie]
    stock_with(tmp_path / "step-1", change)
    state = {"w": torch.zeros(3000), "o": None}
    tracemalloc.start()
    try:
        with pytest.raises(expected) if expected else nullcontext() as told:
            ray_dcp.load(
                state, checkpoint_id=tmp_path / "step-1", no_dist=True,
                planner=planner() if planner else None,
            )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert expected is None or "MemoryError" not in str(told.value)
    assert expected or torch.equal(state["w"], torch.arange(3000.0))
    assert state["w"].shape == (3000,)


class Unknown:
    """A class that is on nobody's list."""

    def __init__(self):
        self.x = 1


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "hooks"])
@pytest.mark.parametrize("stock", [False, True])
def test_objects_run_code_only_where_the_caller_asks_for_it(tmp_path, stock, planner):
    path = tmp_path / "step-1"
    if stock:
        checkpoints.save_stock(path, {"o": Unknown()})
    else:
        with pytest.warns(UserWarning, match="Unknown"):
            ray_dcp.save({"o": Unknown()}, checkpoint_id=path, no_dist=True)
    how = {"checkpoint_id": path, "no_dist": True}
    state = {"o": None}
    with pytest.raises(errors.UnsafeCheckpointError, match="weights_only=False"):
        ray_dcp.load(state, planner=planner() if planner else None, **how)
    assert state == {"o": None}
    options = LoadOptions(weights_only=False)
    ray_dcp.load(state, planner=planner() if planner else None, options=options, **how)
    assert state["o"].x == 1
