"""Asynchronous saves where something is in the way: clear errors, nothing lost, nothing left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import ray_dcp
from ray_dcp.errors import (
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.options import SaveOptions
from tests.support.processes import eventually, lives, marked
from tests.support.programs.held_writes import hang_writes, hold_writes

STORE_BYTES = 80 << 20
LARGE = 30_000_000
"""Numbers of a state that is larger than the store."""
FITTING = 4_000_000
"""Numbers of a state that is staged before any of it is written."""


@contextmanager
def small_ray():
    """A Ray with the smallest object store that there may be."""
    directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
    ray.init(
        num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
        configure_logging=False, _temp_dir=directory,
    )  # fmt: skip
    try:
        yield directory
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_directory():
    with small_ray() as directory:
        yield directory


@pytest.fixture(scope="module")
def namespace(ray_directory):
    """A namespace of its own, whose actors end with the module; one stager serves all tests."""
    name = f"b{secrets.token_hex(4)}"
    yield name
    if ray.is_initialized():
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == name:
                # Suppressed: it has just ended by itself.
                with suppress(ValueError):
                    ray.kill(ray.get_actor(actor["name"], name))
    # And with them their memory, which has no name.
    assert eventually(lambda: not any(map(lives, STAGERS)))


STAGERS: set[int] = set()
"""Processes of the stagers that these tests used."""


@pytest.fixture
def session(namespace):
    """A session that must have given all staging memory back at the end."""
    session = ray_dcp.connect(name="bad", namespace=namespace)
    STAGERS.add(session.ray.staging().info()["pid"])
    try:
        yield session
        if ray.is_initialized() and not session.closed:
            assert eventually(lambda: session.ray.staging().info()["used_bytes"] == 0)
    finally:
        # Whatever happened: an open session is the one that all later tests would save through.
        session.close()


def state(step: float, length: int = LARGE) -> dict[str, Any]:
    tied = torch.full((3,), step)
    return {
        "large": torch.full((length,), step),
        "zero_d": torch.tensor(step),
        "tied": tied,
        "tied_too": tied,
        "view": tied[1:],
        "numpy": np.full(4, step),
        "log": {"lines": [step], "raw": bytearray(b"x" * int(step))},
    }


def spoil(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["numpy"][:] = -1
    state["log"]["lines"].clear()
    state["log"]["raw"].clear()


def stands(path: Path, step: float, length: int = LARGE) -> bool:
    """Returns whether the whole state of a step loads, and nothing else is there."""
    found, expected = state(step + 1, length), state(step, length)
    ray_dcp.load(found, checkpoint_id=path)
    names = [entry.name for entry in path.iterdir()]
    kinds = sorted(name.partition(".")[0].partition("-")[0] for name in names)
    # A trace may come a moment later.
    assert [kind for kind in kinds if kind != "trace"] == ["", "__0_0", "chunks", "manifest"], names
    return all(
        np.array_equal(np.asarray(found[name]), np.asarray(value))
        for name, value in expected.items()
        if name != "log"
    ) and (found["log"] == expected["log"])


def save_and_spoil(path: Path, step: float, length: int = LARGE, **options: Any) -> Any:
    given = state(step, length)
    handle = ray_dcp.async_save(given, checkpoint_id=path, options=SaveOptions(**options))
    handle.staged(180)
    spoil(given)
    return handle


def spilled(directory: str) -> list[Path]:
    return [file for file in Path(directory).glob("session_*/ray_spilled*/**/*") if file.is_file()]


def test_a_store_that_is_full_and_smaller_than_the_state_is_enough(
    session, ray_directory, tmp_path, caplog
):
    assert save_and_spoil(tmp_path / "c", 5.0).committed(180) is not None
    assert stands(tmp_path / "c", 5.0)
    assert spilled(ray_directory) == []
    others = [np.full(8 << 20, number, dtype=np.uint8) for number in range(9)]
    refs = [ray.put(array) for array in others]
    assert save_and_spoil(tmp_path / "c", 6.0).committed(180) is not None
    assert stands(tmp_path / "c", 6.0)
    assert all(np.array_equal(ray.get(ref), array) for ref, array in zip(refs, others, strict=True))
    (said,) = [text for text in caplog.messages if "--object-store-memory" in text]
    assert f"{tmp_path / 'c'} is 74.4 MiB larger than" in said
    del refs
    for file in spilled(ray_directory):
        # Ray's own doing: what others hold has to go somewhere.
        file.unlink(missing_ok=True)


def test_a_save_that_waits_in_the_queue_for_longer_than_its_ranks_wait_elsewhere_is_made(
    session, tmp_path, monkeypatch
):
    monkeypatch.setattr("ray_dcp.core.bounds.MARGIN_S", 1.0)
    options = SaveOptions(plan_timeout_s=1.0, heartbeat_timeout_s=3.0)
    hold_writes(session, tmp_path / "gate")
    first = save_and_spoil(tmp_path / "a", 7.0, FITTING)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(
            ray_dcp.async_save, state(8.0, 10), checkpoint_id=tmp_path / "b", options=options
        )
        # Its plan may take 5 s, and the answer to its join 1 s more.
        assert not eventually(second.done, 7)
        (tmp_path / "gate").touch()
        first.committed(180)
        second.result(180).committed(180)
    assert stands(tmp_path / "a", 7.0, FITTING)


def test_a_storage_that_hangs_fails_its_save_and_holds_up_neither_training_nor_other_saves(
    session, tmp_path
):
    hang_writes(session.ray.staging().link().handle)
    options = SaveOptions(part_bytes=1 << 20, max_pending=2)
    state_of = partial(state, length=2_000_000)
    hanging = ray_dcp.async_save(
        state_of(1.0), checkpoint_id=tmp_path / "hangs/c",
        options=replace(options, write_timeout_s=6.0),
    )  # fmt: skip
    for step in range(3):  # each copies and goes on, and is committed beside it
        path = tmp_path / f"step-{step}"
        handle = ray_dcp.async_save(state_of(2.0 + step), checkpoint_id=path, options=options)
        assert not hanging.done() or step
        handle.committed(180)
        assert ray_dcp.open(path)["large"][0] == 2.0 + step
    with pytest.raises(DeadlineError, match=r"Look whether the storage answers from there"):
        hanging.committed(180)
    # The writers that hang end with their process; the next save finds another one.
    for step in (3, 4):
        path = tmp_path / f"step-{step}"
        ray_dcp.async_save(state_of(2.0 + step), checkpoint_id=path).committed(180)
        assert stands(path, 2.0 + step, 2_000_000)


def test_a_session_that_is_closed_meanwhile_does_not_lose_the_save(session, tmp_path):
    handle = save_and_spoil(tmp_path / "c", 4.0)
    session.close()
    with pytest.raises(InvalidRequestError, match="was closed"):
        session.ray.staging()
    assert eventually(
        lambda: ray_dcp.outcome(tmp_path / "c", handle.report().attempt) == "committed"
    )
    assert handle.exception(60) is None
    # From here on the process is alone.
    alone = ray_dcp.async_save(state(2.0, 10), checkpoint_id=tmp_path / "alone")
    alone.committed(180)
    assert alone.report().staging == "object_store"
    assert stands(tmp_path / "c", 4.0)
    assert stands(tmp_path / "alone", 2.0, 10)


SCRIPT = """
import os, shutil, sys, tempfile
import ray, torch, ray_dcp

directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
ray.init(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False,
         configure_logging=False, _temp_dir=directory)
ray_dcp.connect(name="script")
keep = {"w": torch.full((1_000_000,), 7.0)}
ray_dcp.save({"w": torch.zeros(3)}, checkpoint_id=sys.argv[2])
ray_dcp.async_save(keep, checkpoint_id=sys.argv[1])
ray_dcp.async_save(keep, checkpoint_id=sys.argv[2], options=ray_dcp.SaveOptions(overwrite=False))
END
print(directory)
"""

ALONE = SCRIPT.replace('ray_dcp.connect(name="script")', "").replace("END", "ray.shutdown()")


@pytest.mark.parametrize("script", [SCRIPT.replace("END", ""), ALONE], ids=["connects", "alone"])
def test_a_script_that_awaits_no_handle_has_saved_and_is_warned_of_what_failed(
    script, programs, tmp_path
):
    mark = f"LEFT_BY={secrets.token_hex(8)}"
    env = {**os.environ, **dict([mark.split("=")])}
    words = (str(tmp_path / "good"), str(tmp_path / "taken"))
    (ended,) = programs.run("-c", script, *words, env=env)
    assert ended.returncode == 0, ended.stderr
    shutil.rmtree(ended.stdout.strip().splitlines()[-1], ignore_errors=True)
    found = {"w": torch.zeros(1_000_000)}
    ray_dcp.load(found, checkpoint_id=tmp_path / "good", no_dist=True)
    assert bool((found["w"] == 7).all())
    assert ended.stderr.count("nobody asked its handle") == 1
    assert "CheckpointExistsError" in ended.stderr
    assert str(tmp_path / "taken") in ended.stderr
    # And with them their memory, which has no name.
    assert eventually(lambda: marked(mark) == {}), marked(mark)


# Last: it ends the Ray of this process.


def test_a_ray_that_is_shut_down_is_told_and_not_started_anew(session, tmp_path):
    stager = session.ray.staging().info()["pid"]
    hold_writes(session, tmp_path / "gate")
    handle = save_and_spoil(tmp_path / "c", 3.0, FITTING)
    os.kill(stager, signal.SIGSTOP)
    assert not handle.done()
    ray.shutdown()
    try:
        with pytest.raises(CommitUnknownError, match=r"Wait for the handle before ray\.shutdown"):
            handle.committed(180)
        assert handle.exception().attempt == handle.report().attempt
        assert handle.progress.phase == "failed"
        for call in (ray_dcp.save, ray_dcp.load):
            with pytest.raises(ParticipantError, match="has shut it down"):
                call(state(1.0, 10), checkpoint_id=tmp_path / "later")
        later = ray_dcp.async_save(state(1.0, 10), checkpoint_id=tmp_path / "later")
        with pytest.raises(ParticipantError, match="has shut it down"):
            later.staged(180)
        with pytest.raises(ParticipantError, match="has shut it down"):
            later.committed(180)
        assert not (tmp_path / "later").exists()
        assert not ray.is_initialized()
    finally:
        with suppress(ProcessLookupError):
            os.kill(stager, signal.SIGKILL)
    assert eventually(lambda: not lives(stager))
    with small_ray():
        # The session is of another Ray than this one.
        with pytest.raises(ParticipantError, match="close the session and connect again"):
            ray_dcp.save(state(1.0, 10), checkpoint_id=tmp_path / "later")
        assert not session.closed
        session.close()
        again = ray_dcp.connect(name="gone")
        save_and_spoil(tmp_path / "c", 9.0).committed(180)
        assert stands(tmp_path / "c", 9.0)
        again.close()
