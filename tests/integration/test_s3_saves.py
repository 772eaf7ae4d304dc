"""Saves to a real S3 server: crashes, races, credentials, and what stock DCP makes of it."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as stock
from pyarrow import fs as arrow

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, StorageError
from ray_dcp.format.names import StepNames
from ray_dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from ray_dcp.job.step_files import create_record, folders_of
from ray_dcp.manager.catalogue import Root, look
from ray_dcp.store.location import Location
from ray_dcp.store.object_storage import ObjectStorage, ObjectWriter
from ray_dcp.store.opening import as_target, open_storage, target_of
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import one_call_at_a_time
from tests.support.job_runs import JobRun, buffer, policy
from tests.support.manager_places import in_this_thread
from tests.support.servers.s3 import server_without_conditions
from tests.support.storages import race_for_a_slot

SECRET = "hush-hush-this-is-secret"


def s3fs_options(server) -> dict[str, object]:
    return {
        "key": server.access_key_id,
        "secret": server.secret_access_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
    }


def arrow_s3(server) -> arrow.S3FileSystem:
    return arrow.S3FileSystem(
        access_key=server.access_key_id, secret_key=server.secret_access_key,
        endpoint_override=server.endpoint, region="us-east-1",
    )  # fmt: skip


def state_of(number: float) -> dict[str, object]:
    return {"w": torch.full((300, 70), number), "b": torch.arange(9.0) + number, "step": number}


def loaded(**arguments) -> dict[str, object]:
    state = {"w": torch.zeros(300, 70), "b": torch.zeros(9), "step": None}
    ray_dcp.load(state, no_dist=True, **arguments)
    return state


def is_same(one: dict, other: dict) -> bool:
    return one["step"] == other["step"] and all(torch.equal(one[k], other[k]) for k in "wb")


# crashes and faults


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("save.overwrite", "before"),
        ("save.overwrite", "lost"),
        ("save.overwrite", "broken"),
        ("delete", "before"),
    ],
)
def test_an_interrupted_operation_leaves_the_previous_or_the_new_checkpoint(place, name, variant):
    numbers = itertools.count()
    reached = check_crashes(
        name,
        storage=lambda: open_storage(place / str(next(numbers))),
        variants=[variant],
        every=5,
    )
    assert reached.points[variant] >= 2


@contextmanager
def at_request(number: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Has something happen before the n-th call of the client, whose caller waits for it."""
    called: list[str] = []

    def held(kind: type, name: str) -> Callable[..., Any]:
        real = getattr(kind, name)

        def call(self: Any, *arguments: Any, **how: Any) -> Any:
            # What happens meanwhile makes calls of its own, which are not counted.
            if not busy:
                called.append(name)
                if len(called) == number + 1:
                    busy.append(act)
                    act()
                    busy.clear()
            return real(self, *arguments, **how)

        return call

    busy: list[object] = []
    with pytest.MonkeyPatch.context() as patched, one_call_at_a_time():
        for name in ("read", "read_into", "write", "delete", "list"):
            patched.setattr(ObjectStorage, name, held(ObjectStorage, name))
        patched.setattr(ObjectWriter, "_publish", held(ObjectWriter, "_publish"))
        yield called


def test_a_coordinator_that_is_replaced_at_a_request_of_its_commit_changes_no_history(place):
    root, seen = Root(target_of(place, None)), Counter[str]()
    every = 1 if os.environ.get("RAY_DCP_THOROUGH") else 4
    # The first ones read what is there, on which all that follows depends.
    numbers = (number for number in itertools.count() if number < 4 or number % every == 0)

    def history() -> dict[int, str]:
        steps = look(root, StepNames()).steps
        newest = [folder for one in [*steps.values()][-1:] for folder in folders_of(one).values()]
        assert all(ray_dcp.verify(place / folder).ok for folder in newest)
        return {number: one.attempt for number, one in steps.items()}

    def replace() -> None:
        others.append(JobRun(place, takeover=True))
        others[-1].writer.remove_leftovers()
        seen_by_it.append(history())

    with in_this_thread():
        others, seen_by_it = [JobRun(place, takeover=True)], list[dict[int, str]]()
        for step, number in enumerate(numbers, 1):
            run = others[-1]
            value = float(step)
            given = run.begin(step, {"policy": policy(value), "buffer": buffer(value)})
            with at_request(number, replace) as called:
                error = create_record(run.writer, *given)
                run.writer.finish(given[0], error is None)
            if run is others[-1]:
                break  # There were not so many.
            # What the new one saw is what there is, whatever the one that was held is told.
            assert history() == seen_by_it[-1]
            assert (error is None) == (step in seen_by_it[-1])
            seen["committed" if error is None else type(error).__name__] += 1
    assert {*called} >= {"read", "write", "list", "_publish"}
    assert seen["committed"] >= 1
    assert seen["CheckpointExistsError"] >= 1


@pytest.mark.parametrize("variant", ["before", "lost"])
def test_an_interrupted_copy_leaves_the_previous_or_the_new_checkpoint(place, variant):
    numbers = itertools.count()
    reached = check_crashes(
        "save.linked",
        storage=lambda: open_storage(place / str(next(numbers))),
        variants=[variant],
    )
    assert reached.calls["reuse"] == 2


def test_a_race_of_committers_has_one_winner(place):
    # Why so few: this server has most of them wait for seconds.
    for number in range(2):
        assert len(race_for_a_slot(open_storage(place / str(number)), 6)) == 1


def test_a_server_that_ignores_conditions_is_found_out_and_said_so(tmp_path):
    with server_without_conditions(tmp_path) as there:
        storage = open_storage(there / "step-1")
        assert not storage.traits.create_if_absent
        assert storage.list() == []
        # This one can't serve ranges to our client either, and is reached as we are told.
        with pytest.raises(StorageError, match=r"can't serve ranges.*filesystem=s3fs"):
            ray_dcp.save(state_of(0.0), checkpoint_id=there / "step-0", no_dist=True)
        options = there.storage_options
        filesystem = s3fs.S3FileSystem(
            key=options["access_key_id"], secret=options["secret_access_key"],
            endpoint_url=options["endpoint"],
            # Why: with a range it sends the checksum of the whole.
            config_kwargs={"response_checksum_validation": "when_required"},
        )  # fmt: skip
        place = Location("ckpt/step-1", filesystem=filesystem)
        for number in (1.0, 2.0):
            with pytest.warns(UserWarning, match="only if there is none"):
                ray_dcp.save(state_of(number), checkpoint_id=place, no_dist=True)
        assert is_same(loaded(checkpoint_id=place), state_of(2.0))


# credentials


def all_bytes(place: Location) -> bytes:
    storage = open_storage(place)
    return b"".join(storage.read(entry.key) for entry in storage.list())


def test_credentials_are_in_no_checkpoint_log_or_error(server, place, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    secret = server.secret_access_key
    ray_dcp.save(state_of(1.0), checkpoint_id=place, no_dist=True)
    handle = ray_dcp.async_save(state_of(2.0), checkpoint_id=place, no_dist=True)
    metadata = handle.result()
    assert is_same(loaded(checkpoint_id=place), state_of(2.0))
    wrong = Location(place.url, {**place.storage_options, "secret_access_key": SECRET})
    with pytest.raises(CheckpointError) as raised:
        ray_dcp.save(state_of(3.0), checkpoint_id=wrong, no_dist=True)
    told = [*map(repr, (place, as_target(place), wrong, handle, open_storage(place)))]
    told += [str(raised.value), repr(raised.value), *getattr(raised.value, "__notes__", ())]
    told += [caplog.text, *capfd.readouterr(), repr(ray_dcp.open(place))]
    for hidden in (secret, SECRET):
        assert not [text for text in told if hidden in text]
        assert hidden.encode() not in pickle.dumps(raised.value)
        assert hidden.encode() not in all_bytes(place)
    assert secret.encode() not in pickle.dumps(metadata)


def test_a_profile_is_all_that_a_save_and_a_load_need(place, tmp_path, monkeypatch):
    options = place.storage_options
    names = ("access_key_id", "secret_access_key")
    lines = [f"aws_{name} = {options[name]}" for name in names]
    more = [f"endpoint_url = {options['endpoint']}", f"region = {options['region']}"]
    config = tmp_path / "config"
    config.write_text("\n".join(["[profile train]", *lines, *more]))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "train")
    place = Location(place.url, {"retry_timeout_s": 9})
    ray_dcp.save({"w": torch.arange(9.0)}, checkpoint_id=place, no_dist=True)
    found = {"w": torch.zeros(9)}
    ray_dcp.load(found, checkpoint_id=place, no_dist=True)
    assert found["w"].tolist() == list(range(9))


# stock DCP


def test_stock_dcp_loads_from_s3_what_we_wrote(server, place):
    options = s3fs_options(server)
    ray_dcp.save(state_of(4.0), checkpoint_id=place, no_dist=True)
    found = {"w": torch.zeros(300, 70), "b": torch.zeros(9), "step": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = FsspecReader(place.url, **options)
        stock.load(found, storage_reader=reader, no_dist=True)
    assert is_same(found, state_of(4.0))


def test_we_load_from_s3_what_stock_dcp_wrote(server, place):
    options = s3fs_options(server)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FsspecWriter(place.url, **options)
        stock.save(state_of(5.0), storage_writer=writer, no_dist=True)
    assert is_same(loaded(checkpoint_id=place), state_of(5.0))
    # and by the reader that stock DCP would use, whose options stay with it
    reader = FsspecReader(place.url, **options)
    assert is_same(loaded(storage_reader=reader), state_of(5.0))
    # by ready filesystems
    path = place.url.removeprefix("s3://")
    s3fs = fsspec.filesystem("s3", **options)
    assert is_same(loaded(checkpoint_id=Location(path, filesystem=s3fs)), state_of(5.0))
    s3 = arrow_s3(server)
    assert is_same(loaded(checkpoint_id=Location(path, filesystem=s3)), state_of(5.0))


def test_a_save_through_pyarrow_warns_and_loads_natively(server, place):
    s3 = arrow_s3(server)
    there = Location(place.url.removeprefix("s3://"), filesystem=s3)
    big = {"w": torch.arange(3_000_000.0)}  # longer than what is put at once
    with pytest.warns(UserWarning, match="only if there is none"):
        ray_dcp.save(big, checkpoint_id=there, no_dist=True)
    found = {"w": torch.zeros(3_000_000)}
    ray_dcp.load(found, checkpoint_id=place, no_dist=True)
    assert torch.equal(found["w"], big["w"])
    assert not open_storage(there).unpublished()


def test_saves_through_s3fs_commit_by_condition_and_load_natively(server, place):
    options = s3fs_options(server)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FsspecWriter(place.url, **options)
    ray_dcp.save(state_of(6.0), storage_writer=writer, no_dist=True)
    ray_dcp.save(state_of(7.0), storage_writer=writer, no_dist=True)
    assert is_same(loaded(checkpoint_id=place), state_of(7.0))
    target = Target(place.url, filesystem=writer.fs.fs)
    assert open_storage(target).traits.create_if_absent
    # Data, chunk table, manifest and .metadata of the second save alone; its trace may come later.
    keys = {entry.key for entry in open_storage(place).list()}
    assert len({key for key in keys if not key.startswith("trace.")}) == 4
