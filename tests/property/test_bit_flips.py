"""What happens to a stored byte is found, or changes nothing; and it is told where.

For every kind of checkpoint and every file in it: flipped bits, cut and longer files, pages that
were lost or changed places, files that changed places. Of our checkpoints a load with
`verify="always"` gives an error that names the file, or the same bits. Of others it can only be
pinned what is found: by the structure, and by the CRC32s that only `verify` looks at.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from tests.fuzz.__main__ import run
from tests.fuzz.targets import TARGETS
from tests.support import damage
from tests.support.damage import Damage
from tests.support.programs.unchanged import holds, inodes, path_of, save_steps

FLIPS = {"ours": 12, "stock": 20, "zstd": 16, "hub": 12}
"""Flipped bits a file."""
CHECKSUMS_BYTES = 256
"""No data file here has longer checksums, and the digest of all, at its end."""
KNOWN_FLIPS = {"zstd": ((1038, 6), (403, 4), (11861, 2))}
"""Byte and bit of the data file, tried besides. In packed zips these give both names of a record as
`dati.pkl`; ask a password for one; and clear the length and the CRC32 of a `data.pkl`."""


@dataclass
class Kind:
    """One saved checkpoint, and what its files hold."""

    name: str
    path: Path
    files: dict[str, bytes]
    expected: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.name == "ours"

    def damages(self) -> Iterator[Damage]:
        for number, (file, data) in enumerate(self.files.items()):
            yield from damage.flips(file, data, FLIPS[self.name], number)
            yield from damage.lengths(file, data, 6, number)
            yield from damage.pages(file, data, number)
        for place, bit in KNOWN_FLIPS.get(self.name, ()):
            yield damage.flip("__0_0.distcp", self.files["__0_0.distcp"], place, bit)
        yield from damage.exchanges(self.files)

    def spoil(self, one: Damage) -> None:
        (self.path / one.file).write_bytes(one.data)
        if one.also is not None:
            (self.path / one.also[0]).write_bytes(one.also[1])

    def repair(self, one: Damage) -> None:
        for file in (one.file, *([] if one.also is None else [one.also[0]])):
            (self.path / file).write_bytes(self.files[file])

    def load(self) -> CheckpointError | bool:
        return damage.outcome(self.path, self.expected, hub=self.name == "hub")


@dataclass
class Verdict:
    """What a load and `verify` made of one damage."""

    damage: Damage
    loaded: CheckpointError | bool
    problems: list[Any]
    notes: str

    @property
    def is_named(self) -> bool:
        """`verify` names a file that was spoiled."""
        return any(damage.names_file(problem.file, self.damage) for problem in self.problems)

    @property
    def is_placed(self) -> bool:
        """A problem's bytes take in the first one that was spoiled, or end where a file does."""
        one = self.damage
        files = {one.file, one.also[0]} if one.also is not None else {one.file}
        is_flip = one.stop == one.start + 1 and one.stop <= len(one.data)
        # Checksums at the end of a file that is cut off can't be read, and so place nothing.
        in_checksums = not is_flip and one.start + CHECKSUMS_BYTES >= len(one.data)
        return any(
            p.file in files
            and (p.start <= one.start or in_checksums)
            and one.start < p.stop + (not is_flip)
            for p in self.problems
        )

    def __str__(self) -> str:
        return f"{self.damage.file}, {self.damage.what}: {self.loaded}, {self.problems}"


@pytest.fixture(scope="module", params=list(damage.SAVES))
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kind, list[Verdict]]:
    path = damage.SAVES[request.param](tmp_path_factory.mktemp(request.param) / "c")
    state = damage.tensors() if request.param == "hub" else damage.state()
    kind = Kind(request.param, path, damage.contents_of(path), damage.bits(state))
    assert kind.load() is True
    assert ray_dcp.verify(path).ok
    found = []
    for one in kind.damages():
        kind.spoil(one)
        try:
            report = ray_dcp.verify(path)
        except CheckpointError as error:
            # One name of a field in the place of another: that looks as if a newer torch wrote it.
            is_theirs = one.file == ".metadata" and not kind.is_ours
            if not is_theirs or "a newer torch wrote this checkpoint" not in error.message:
                raise
            problems, notes = [], error.message
        else:
            problems, notes = list(report.problems), " ".join(report.notes)
        # Careful: a load may publish `.metadata` again.
        loaded = kind.load()
        kind.repair(one)
        found.append(Verdict(one, loaded, problems, notes))
    return kind, found


def test_enough_was_tried(verdicts):
    kind, found = verdicts
    flipped = collections.Counter(v.damage.file for v in found if "flipped" in v.damage.what)
    assert set(flipped) == set(kind.files)
    assert min(flipped.values()) >= FLIPS[kind.name]
    assert len(found) >= {"ours": 150}.get(kind.name, 30)


def test_of_our_checkpoints_a_load_or_verify_finds_all_and_says_where(verdicts):
    """Any exception but an error of ours has failed the fixture."""
    kind, found = verdicts
    for verdict in found if kind.is_ours else ():
        one = verdict.damage
        assert verdict.loaded is not False, str(verdict)
        if verdict.loaded is not True:
            assert isinstance(verdict.loaded, DamagedCheckpointError), str(verdict)
            assert damage.names_file(str(verdict.loaded), one), str(verdict)
        if one.also is not None and all(
            name.startswith("manifest-") for name in (one.file, one.also[0])
        ):
            # The same records in another order say the same: the commit, and that another
            # attempt is off.
            assert verdict.loaded is True
        elif one.file.startswith("trace.") and one.also is None:
            assert verdict.loaded is True, "no load reads it"
            assert one.file in verdict.notes, str(verdict)
        else:
            assert verdict.is_named, str(verdict)
            assert verdict.is_placed or one.stop > len(kind.files[one.file]), str(verdict)


def test_of_stock_checkpoints_verify_finds_all_that_changes_what_is_loaded(verdicts):
    kind, found = verdicts
    if kind.name not in ("stock", "zstd"):
        return
    # A `.metadata` has no checksum: a flipped bit is an error, or lies where nothing is read.
    # Behind `end` lie the path, random ids and a version, as long as the path is.
    end = kind.files[".metadata"].index(b"StorageMeta")
    needed = [v for v in found if v.damage.file == ".metadata" and v.damage.start < end]
    assert sum(v.loaded is True for v in needed) < len(needed) / 6
    silent = [v for v in found if v.loaded is False]
    assert {v.damage.file for v in silent} == {"__0_0.distcp"}, "a payload that nobody checks"
    for verdict in found:
        if verdict.damage.file == "__0_0.distcp" and verdict.loaded is not True:
            assert verdict.is_named, str(verdict)
            if verdict.loaded is False:
                assert verdict.is_placed, str(verdict)
            else:
                assert damage.names_file(str(verdict.loaded), verdict.damage), str(verdict)


INDEX = "model.safetensors.index.json"


def test_of_a_hub_folder_only_what_tensors_hold_changes_unseen(verdicts):
    kind, found = verdicts
    if kind.name != "hub":
        return
    start = kind.files[INDEX].index(b'"weight_map"')
    for verdict in found:
        one = verdict.damage
        if one.file == INDEX:
            assert verdict.loaded is True, "the index is for other readers"
            if start <= one.start and one.stop <= len(kind.files[INDEX]):
                same_json = one.data.split() == kind.files[INDEX].split()
                assert verdict.is_named or same_json, str(verdict)
            continue
        assert "no checksums" in verdict.notes or verdict.problems, str(verdict)
        header_bytes = 8 + int.from_bytes(kind.files[one.file][:8], "little")
        if verdict.loaded is False:
            assert one.stop > header_bytes, str(verdict)
            assert len(one.data) == len(kind.files[one.file]), str(verdict)
        elif isinstance(verdict.loaded, CheckpointError):
            assert verdict.is_named or INDEX in {p.file for p in verdict.problems}, str(verdict)


# Two commits, of which the older was not collected yet


@pytest.fixture
def twice(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint that was saved twice with all files of both; its two manifests."""
    path = tmp_path / "c"
    ray_dcp.save({"w": torch.zeros(9)}, checkpoint_id=path, no_dist=True)
    older = damage.contents_of(path)
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=path, no_dist=True)
    for key, data in older.items():
        if not (path / key).exists():
            (path / key).write_bytes(data)
    one, two = sorted(path.glob("manifest-*"))
    into = {"w": torch.full((9,), 7.0)}
    ray_dcp.load(into, checkpoint_id=path, no_dist=True)
    assert into["w"].tolist() == [1.0] * 9
    return path, one, two


def test_manifests_that_changed_places_do_not_bring_the_older_checkpoint_back(twice):
    path, one, two = twice
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(DamagedCheckpointError, match=r"files changed places.*manifest-0000000"):
        ray_dcp.load({"w": torch.zeros(9)}, checkpoint_id=path, no_dist=True)
    assert not ray_dcp.verify(path).ok


def test_a_manifest_that_was_cut_off_does_not_bring_the_older_checkpoint_back(twice):
    path, _, two = twice
    two.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=rf"move {two.name} away"):
        ray_dcp.load({"w": torch.zeros(9)}, checkpoint_id=path, no_dist=True)
    assert not ray_dcp.verify(path).ok
    two.unlink()
    (path / ".metadata").unlink()
    into = {"w": torch.full((9,), 7.0)}
    ray_dcp.load(into, checkpoint_id=path, no_dist=True)
    assert into["w"].tolist() == [0.0] * 9, "what the error says to do helps"


def test_a_flipped_bit_is_found_in_all_steps_that_share_it(tmp_path):
    save_steps(tmp_path, 3)
    paths = [path_of(tmp_path, step) for step in range(3)]
    (inode,) = set.intersection(*map(inodes, paths))
    files = [next(f for f in path.glob("*.distcp") if f.stat().st_ino == inode) for path in paths]
    data = files[0].read_bytes()
    found = collections.Counter[str]()
    for one in damage.flips(files[0].name, data, 40, 0):
        with open(files[0], "r+b") as opened:
            opened.seek(one.start)
            opened.write(one.data[one.start : one.stop])
        reports = [ray_dcp.verify(path) for path in paths]
        assert len({report.ok for report in reports}) == 1, str(one.what)
        for file, report in zip(files, reports, strict=True):
            assert all(problem.file == file.name for problem in report.problems)
        if reports[0].ok:
            assert holds(paths[one.start % 3], one.start % 3)
        found["found" if not reports[0].ok else "harmless"] += 1
        with open(files[0], "r+b") as opened:
            opened.seek(one.start)
            opened.write(data[one.start : one.stop])
    assert found["found"] > 36


# --- fuzzed files ---------------------------------------------------------------------------------


CASES = {"checkpoint": 40, "chunk table": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_of_ours_comes_of_spoiled_files(name: str):
    found = run(name, 500, seed=1, cases=CASES.get(name, 300))
    assert found.wrong == {}
    refused = found.cases - found.refused["nothing"]
    assert refused > found.cases / 5, "hardly anything is refused: is the reader asleep?"
    assert len(found.refused) >= (2 if name == "zstd" else 4), (
        "all are refused alike: is the file recognised at all?"
    )
