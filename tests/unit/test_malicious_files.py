"""A checkpoint can't make its reader leave its directory, wait, or fill the memory."""

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
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

import ray_dcp
from ray_dcp import LoadOptions, errors
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.values import ChunkTable
from ray_dcp.format import manifest as records
from ray_dcp.format.table import decode_table, encode_table
from tests.support import checkpoints, hostile

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


def test_the_index_of_a_hub_folder_leads_nowhere(tmp_path: Path, secret: Path):
    path = tmp_path / "hub"
    path.mkdir()
    save_file({"w": torch.ones(3)}, path / "model.safetensors")
    save_file({"v": torch.ones(3)}, secret.parent / "other.safetensors")
    index = {"weight_map": {"w": "model.safetensors", "v": "../outside/other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ray_dcp.open(path).names == ("w",)
    with pytest.raises(errors.MissingKeyError):
        ray_dcp.load({"v": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    (problem,) = ray_dcp.verify(path).problems
    assert problem.file == "model.safetensors.index.json"
    assert "for v" in problem.what


# Links: reading follows them, as of a folder of the hub's cache. Writing and deleting do not.


def test_a_link_to_a_data_file_is_read_as_what_it_points_to(ours: Path, tmp_path: Path):
    """Who links data elsewhere owns the filesystem. What it holds must match its checksums."""
    file = checkpoints.data_file(ours)
    moved = tmp_path / "elsewhere"
    shutil.move(file, moved)
    file.symlink_to(moved)
    assert torch.equal(load(ours)["weight"], checkpoints.state()["model"]["weight"])
    assert ray_dcp.verify(ours).ok


def test_a_link_to_other_bytes_is_damage_and_shows_none_of_them(ours: Path, secret: Path):
    file = checkpoints.data_file(ours)
    length = file.stat().st_size
    secret.write_bytes((b"secret " * length)[:length])
    file.unlink()
    file.symlink_to(secret)
    into = {"model": {"weight": torch.zeros(37, 11)}}
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        ray_dcp.load(into, checkpoint_id=ours, no_dist=True)
    assert "secret " not in str(caught.value)
    assert not ray_dcp.verify(ours).ok


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
