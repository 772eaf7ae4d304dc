"""Whose the files at a place are, and which of them may go: decided by name and record alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.commit_protocol.attempts import MOST_DECIDED, owner_of, sweep, verdicts, was_committed
from ray_dcp.format.manifest import AbortRecord, FileEntry, Manifest, Verdict, record_key, slot_of

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "0123456789abcdef"
TEMP = ".tmp-0123456789ab-"


def names_of(attempt):
    """Every name that an attempt gives to a file."""
    published = [
        f"__0_0.{attempt}.distcp",
        f"__4095_12.{attempt}.distcp",
        f"chunks.{attempt}.table",
    ]
    return [*published, f"{TEMP}__0_0.{attempt}.distcp", f"{TEMP}chunks.{attempt}.table"]


def manifest_of(attempt, **changed):
    digest = "0" * 32
    record = Manifest(
        attempt=attempt, epoch=1, world_size=1, created_s=0.0,
        files=(FileEntry(f"__0_0.{attempt}.distcp", 1, digest),),
        table=FileEntry(f"chunks.{attempt}.table", 1, digest),
        metadata=None, replaced_metadata=None, plan_digest="00", num_tensors=0, num_chunks=0,
        payload_bytes=0, previous_slot=0,
    )  # fmt: skip
    return dataclasses.replace(record, **changed)


@pytest.mark.parametrize("attempt", [A, C])
def test_every_file_of_an_attempt_is_told_by_its_name(attempt):
    for key in names_of(attempt):
        owned = owner_of(key)
        assert owned is not None, key
        assert owned.attempt == attempt
        expected = "temp" if ".tmp-" in key else "table" if "chunks" in key else "data"
        assert owned.kind == expected


@pytest.mark.parametrize(
    "key",
    [
        "__0_0.distcp", "__0.metadata", f"__0_0.{A}.distcp.bak", f"x__0_0.{A}.distcp",
        f"sub/__0_0.{A}.distcp", f"__0_0.{A}.distcp\n", f"__0_0.{A.upper()}.distcp",
        f"__0_0.{A}0.distcp", f"__0_0.{A[1:]}.distcp", f"__٠_0.{A}.distcp",
        f"chunks.{A}.table/x", f"chunks.{A}.table.tmp", "chunks.table", "chunks.0.table",
        f"{A}/notes.txt", f"{A}/model.safetensors",
        f"{A}/rank-00000-part-00000.safetensors",
        "manifest-1.json", "sub/manifest-00000001.json", "sub/.metadata", ".tmp-", ".tmp-x",
        f".tmp-0123456789aX-__0_0.{A}.distcp", f"{TEMP}{TEMP}__0_0.{A}.distcp", f"{TEMP}notes",
        f"{TEMP}__0_0.distcp", f"a/b/{TEMP}__0_0.{A}.distcp", "", "/", "..", f"../__0_0.{A}.distcp",
        f"{TEMP}probe-first",
    ],
)  # fmt: skip
def test_a_name_that_is_not_exactly_ours_is_somebody_elses(key):
    assert owner_of(key) is None


@pytest.mark.parametrize("attempt", ["a", "run-7", A[:-1], A + "a", A.upper()])
def test_an_attempt_that_was_not_made_up_owns_nothing_whatever_records_say(attempt):
    assert [key for key in names_of(attempt) if owner_of(key) is not None] == []
    found = sweep(names_of(attempt), standing=None, last_slot=9, dead=[attempt], all_dead=True)
    assert found.delete == ()


keys = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda folder, prefix, middle, end: folder + prefix + middle + end,
        st.sampled_from(["", "", f"{A}/", "sub/", "../", f"{A}/{B}/"]),
        st.sampled_from(["", TEMP, ".tmp-", "__0_0.", "chunks.", "manifest-"]),
        st.sampled_from(["", A, B, "00000001", "00000", "٣", "\n", ".."]),
        st.sampled_from(["", ".distcp", ".table", ".json", ".safetensors", ".metadata", "\n"]),
    ),
    st.sampled_from([*names_of(A), *names_of(B), ".metadata", *map(record_key, range(1, 9))]),
)


attempts = st.sampled_from([A, B, C])


@given(
    st.lists(keys, unique=True), st.none() | attempts, st.sets(attempts), st.booleans(),
    st.booleans(), st.integers(0, 9), st.sets(attempts),
)  # fmt: skip
def test_nothing_that_stands_or_may_stand_or_is_named_is_swept(
    found, own, dead, all_dead, anonymous, last_slot, named
):
    standing = None if own is None else manifest_of(own)
    done = sweep(
        found, standing=standing, last_slot=last_slot, dead=dead, all_dead=all_dead,
        anonymous=anonymous, named=dict.fromkeys(named, "named"),
    )  # fmt: skip
    needed = set() if standing is None else {f"__0_0.{own}.distcp", f"chunks.{own}.table"}
    assert not needed & set(done.delete)
    assert ".metadata" not in done.delete
    assert not set(done.delete) & {kept.key for kept in done.kept}
    for key in done.delete:
        owned = owner_of(key)
        assert owned is not None
        if owned.kind == "record":
            assert slot_of(key) <= last_slot
        elif owned.attempt is None:
            assert all_dead or anonymous
        else:
            assert owned.attempt not in named
            assert all_dead or owned.attempt in dead | {own}
    # Every file is accounted for.
    for key in set(found) - set(done.delete) - {kept.key for kept in done.kept}:
        assert key in needed or key == ".metadata" or (slot_of(key) or 0) > last_slot
    assert not set(done.unfinished) & (dead | {own} | named)
    if all_dead:
        assert done.unfinished == ()


# What a record says of earlier attempts


def test_a_record_remembers_what_decided_before_it_and_who_was_overtaken():
    records = {
        5: manifest_of(A, decided=(Verdict("old", True), Verdict("older", False)), previous_slot=4),
        6: AbortRecord(attempt=B, reason="", rank=None),
    }
    found = verdicts(records, [C, B, A])
    assert found == (
        Verdict("old", True), Verdict("older", False), Verdict(A, True), Verdict(B, False),
        Verdict(C, False),
    )  # fmt: skip
    later = manifest_of("x", decided=found)
    assert was_committed(later, A)
    assert not was_committed(later, B)
    assert not was_committed(later, "never heard of")


def test_what_is_remembered_is_bounded_and_the_newest():
    decided = tuple(Verdict(f"a{number}", True) for number in range(MOST_DECIDED))
    found = verdicts({7: manifest_of(A, decided=decided)}, [C])
    assert len(found) == MOST_DECIDED
    assert found[-2:] == (Verdict(A, True), Verdict(C, False))
    assert found[0] == Verdict("a2", True)
