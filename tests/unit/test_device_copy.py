"""Tensors on devices reach staging memory whole, at the moment of the save; digests of replicas.

`Played` does nothing before it is waited for, and lets training go ahead; the same with a real GPU
in `tests.gpu`.
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ray_dcp
from ray_dcp.errors import CheckpointError, InternalError, PlanConflictError
from ray_dcp.options import SaveOptions
from ray_dcp.stage import private_memory, staging_backend
from ray_dcp.stage.private_memory import PrivateMemory
from ray_dcp.stage.window_filler import HostFiller, drain, fill_window
from ray_dcp.stage.windows import StagingLayout
from ray_dcp.torch_adapter import devices, sink
from ray_dcp.torch_adapter.capture import Capture, TensorBytes, capture
from ray_dcp.torch_adapter.content_digests import (
    SEGMENT_BYTES,
    content_digest,
    content_digests,
    content_digests_on_device,
)
from ray_dcp.torch_adapter.devices import DeviceFiller, Moment, device_part
from ray_dcp.torch_adapter.tensors import device_bytes, host_bytes
from tests.gpu.__main__ import run
from tests.gpu.cases import CASES, no_leaks
from tests.gpu.machine import Gpu, PlayedGpu
from tests.gpu.played import Played, tensors_of
from tests.gpu.rates import RATES
from tests.support.adapter import as_rank
from tests.support.world import Warm

KIB = 1 << 10


def filler_of(tensors: list[torch.Tensor], driver: Played) -> DeviceFiller:
    filler = Moment(tensors, driver).filler(tensors, HostFiller(TensorBytes(tensors)))
    assert filler is not None
    return filler


def filled(tensors: list[torch.Tensor], driver: Played) -> np.ndarray:
    lengths = [tensor.nbytes for tensor in tensors]
    target = np.full(sum(lengths), 0xAA, np.uint8)
    fill(filler_of(tensors, driver), lengths, target)
    return target


def fill(filler: DeviceFiller, lengths: list[int], target: np.ndarray) -> None:
    row = np.flatnonzero(lengths).astype(np.int32)
    num_bytes = np.array(lengths, np.int64)[row]
    end, zeros, ends = np.cumsum(num_bytes), np.zeros_like(row), np.array([0, len(row)])
    layout = StagingLayout(
        zeros, row, row, zeros.astype(bool), zeros, zeros, num_bytes, zeros, end - num_bytes, end,
        ends, ends, end[-1:],
    )  # fmt: skip
    fill_window(layout, 0, target, filler, bytes)


def expected(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(host_bytes(tensor) for tensor in tensors)


def many_tensors() -> list[torch.Tensor]:
    torch.manual_seed(3)
    small = [torch.randn(number % 7, 3) for number in range(40)]
    return [
        *small[:20], torch.randn(200, 300), torch.randn(90, 300).T, *small[20:],
        torch.tensor(5), torch.randn(4).to(torch.bfloat16),
        torch.randn(3, 2, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.randn(64 * KIB, requires_grad=True),
    ]  # fmt: skip


@pytest.fixture
def play(monkeypatch):
    """Makes the process's driver one that is played; it has everything back in the end."""
    drivers: list[Played] = []

    def begin(driver: Played) -> Played:
        monkeypatch.setattr(devices, "CUDA", driver)
        drivers.append(driver)
        return driver

    yield begin
    staging_backend._memory.clear()
    gc.collect()
    assert not [driver for driver in drivers if driver.registered]


# --- what is copied -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", ["all", "every other one", "the first"])
def test_what_is_here_and_what_is_there_comes_together(on_device):
    tensors = many_tensors()
    own = {"all": tensors, "every other one": tensors[::2], "the first": tensors[:1]}[on_device]
    assert filled(tensors, Played(*own)).tobytes() == expected(tensors)


def test_parts_of_a_large_one_are_taken_where_they_are():
    tensor = torch.arange(60_000, dtype=torch.int32).reshape(200, 300).T
    filler = filler_of([tensor], Played(tensor))
    target = np.zeros(tensor.nbytes, np.uint8)
    for start, end in ((0, 100_001), (100_001, 240_000)):
        filler.fill(0, start, target[start:end])
    filler.finish()
    assert target.tobytes() == expected([tensor])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24, dtype=torch.int16).reshape(1, 4, 6).transpose(1, 2),
        torch.arange(40, dtype=torch.int16)[::2],
        torch.arange(24, dtype=torch.int16).reshape(4, 6),
        torch.randn(3, 5, dtype=torch.complex64).conj(),
        torch.randn(2, 3, dtype=torch.complex64).conj().imag,
        torch.tensor(7, dtype=torch.int16).expand(3, 2),
    ],
    ids=["permuted", "one row", "strided", "contiguous", "conj", "neg", "expanded"],
)
def test_any_range_of_any_tensor_is_what_its_bytes_have_there(tensor):
    whole = bytes(host_bytes(tensor))
    for start in range(len(whole) + 1):
        for end in range(start, len(whole) + 1):
            found = device_part(tensor, start, end - start)
            assert bytes(found.numpy()) == whole[start:end]


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_bytes_on_a_device_are_those_on_the_host(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    for one in (tensor, tensor.T, tensor[1:3], tensor[0, 0], tensor[:0]):
        assert bytes(device_bytes(one).numpy()) == bytes(host_bytes(one))


def test_the_device_s_memory_is_taken_a_little_at_a_time(monkeypatch):
    monkeypatch.setattr(devices, "_STRIDED_BYTES", 10_000)
    monkeypatch.setattr(devices, "_MOST_TEMPORARY_BYTES", 30_000)
    tensors = [torch.randn(300, 200).T, torch.randn(100, 100), torch.randn(300, 200).T]
    driver = Played(*tensors)
    assert filled(tensors, driver).tobytes() == expected(tensors)
    assert 10_000 <= driver.most_temporary_bytes < 32_000


def test_a_device_without_memory_is_waited_for_and_asked_again(monkeypatch):
    monkeypatch.setattr(devices, "_LEAST_BYTES", 1000)
    tensors = [torch.randn(300, 200).T, *(torch.randn(50) for _ in range(20))]
    driver = Played(*tensors, memory_bytes=3000)
    assert filled(tensors, driver).tobytes() == expected(tensors)
    assert driver.told.count("wait") > 1
    assert driver.told.count("copy 200") == 20
    with pytest.raises(torch.OutOfMemoryError):
        filled(tensors, driver := Played(*tensors, memory_bytes=500))
    assert not driver.num_under_way


def test_a_part_that_is_not_there_is_told():
    tensor = torch.randn(10)
    filler = filler_of([tensor], Played(tensor))
    with pytest.raises(InternalError, match="row 0"):
        filler.fill(0, 1, np.zeros(40, np.uint8))
    with pytest.raises(InternalError, match="row 0"):
        filler.fill_many([0, 0], [0, 38], [4, 4], np.zeros(8, np.uint8))


def test_nothing_is_made_where_no_device_is_used():
    tensors = [torch.randn(3), "deferred"]
    assert Moment(tensors, Played()).filler(tensors, None) is None
    assert Moment(tensors, Played(torch.randn(1))).filler(tensors, None) is None


# --- in which order -----------------------------------------------------------------------------


def test_work_that_the_caller_s_stream_was_given_before_is_in_the_copy():
    tensor = torch.zeros(100_000)
    driver = Played(tensor)
    driver.launch(lambda: tensor.fill_(7))
    assert (filled([tensor], driver).view(np.float32) == 7).all()


def test_a_copy_is_not_there_before_it_is_waited_for():
    tensor = torch.ones(100_000)
    driver = Played(tensor)
    target = np.zeros(tensor.nbytes, np.uint8)
    filler = filler_of([tensor], driver)
    filler.fill(0, 0, target)
    assert not target.any()
    assert driver.num_under_way == 1
    filler.finish()
    assert target.tobytes() == expected([tensor])


def test_the_copies_go_by_the_moment_of_the_capture_and_not_by_later_work():
    """A stream that waited for what training was given later would not overlap with it."""
    tensor, later = torch.ones(100_000), []
    driver = Played(tensor)
    captured = TensorBytes.__new__(TensorBytes)
    captured._values, captured._moment = [tensor], Moment([tensor], driver)
    driver.launch(lambda: later.append("training"))
    filler = captured.filler(None)
    filler._host = HostFiller(captured)
    filler.fill(0, 0, np.zeros(tensor.nbytes, np.uint8))
    (stream,) = driver.lines.values()
    stream.run(1)  # the copy's turn comes; what it has to wait for is done
    assert not later


def test_nothing_is_under_way_any_more_when_a_copy_has_failed():
    tensors = [torch.randn(100, 300), torch.randn(100, 300)]
    driver = Played(*tensors)
    lengths = [tensors[0].nbytes, tensors[1].nbytes + 4]  # not what was planned
    with pytest.raises(InternalError, match="row 1"):
        fill(filler_of(tensors, driver), lengths, np.zeros(sum(lengths), np.uint8))
    assert not driver.num_under_way


def test_a_stream_that_fails_is_told():
    tensors = [torch.randn(100, 300), torch.randn(100, 300), torch.randn(100, 300)]
    driver = Played(*tensors, fails_at=2)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        filled(tensors, driver)
    assert not driver.num_under_way


def test_a_copy_that_can_not_begin_lets_those_before_it_end():
    tensors = [torch.randn(100, 300), torch.randn(100, 300)]
    driver = Played(*tensors)
    begin = driver.copy

    def second_fails(stream, target, read):
        if driver.num_under_way:
            raise RuntimeError("no more")
        return begin(stream, target, read)

    driver.copy = second_fails
    target = np.zeros(240_000, np.uint8)
    with pytest.raises(RuntimeError, match="no more"):
        fill(filler_of(tensors, driver), [120_000, 120_000], target)
    assert not driver.num_under_way
    assert target[:120_000].tobytes() == expected(tensors[:1])


def test_all_devices_are_waited_for_where_one_fails():
    tensors = [torch.zeros(70_000), torch.zeros(70_000, device="meta")]

    class Failing(Played):
        def has(self, tensor):
            return True

        def drain(self, device, stream):
            self.told.append(stream.name)
            raise RuntimeError(f"{stream.name} is lost")

        def copy(self, stream, target, read):
            return target

    driver = Failing(*tensors[:1])
    filler = filler_of(tensors, driver)
    for row in range(2):
        filler.fill(row, 0, np.zeros(280_000, np.uint8))
    with pytest.raises(RuntimeError, match="is lost"):
        filler.finish()
    assert {"cpu", "meta"} <= set(driver.told)
    drain(filler)


# --- pinned memory ------------------------------------------------------------------------------


def pin(driver: Played):
    return lambda memory: driver.pin(torch.device("cpu"), memory)


def test_private_memory_is_pinned_piece_by_piece_and_once(monkeypatch):
    monkeypatch.setattr(private_memory, "PIECE_BYTES", 1 << 20)
    driver, private = Played(torch.zeros(1)), PrivateMemory()
    for _ in range(2):
        lease = private.lease(3 << 20)
        lease.pin(pin(driver), 1)
        lease.pin(pin(driver), 0)
        assert sorted(driver.registered.values()) == [1 << 20] * 2
        lease.release()
    private.clear()
    gc.collect()
    assert not driver.registered


def test_no_more_than_half_of_the_machine_is_registered(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {1: np.zeros(3000, np.uint8)})
    monkeypatch.setattr(devices, "_most_pinned_bytes", lambda: 4000)
    driver = devices.Cuda()
    assert driver.pin(torch.device("cuda", 0), np.zeros(1001, np.uint8)) is None


# --- loads --------------------------------------------------------------------------------------


def saved(path) -> dict[str, torch.Tensor]:
    state = {"w": torch.randn(300, 500), "b": torch.randn(4, 3)}
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def strided(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns targets that can't be read in place, as those on a device."""
    return {name: torch.zeros(one.T.shape).T for name, one in state.items()}


def test_loads_begin_their_copies_behind_the_caller_s_stream_and_wait_once(play, tmp_path):
    state = saved(tmp_path / "c")
    found = strided(state)
    driver = play(Played(*found.values()))
    driver.launch(lambda: [one.fill_(-1) for one in found.values()])
    report = ray_dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert sorted(report.loaded) == ["b", "w"]
    assert driver.told.count("work") == 2
    assert driver.told.count("wait") == 1
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_little_waits_for_a_device_that_is_slow(play, monkeypatch, tmp_path):
    monkeypatch.setattr(sink, "_MOST_UNDER_WAY_BYTES", 10)
    state = saved(tmp_path / "c")
    found = strided(state)
    driver = play(Played(*found.values()))
    ray_dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert driver.told.count("wait") == 2
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_no_copy_comes_after_a_load_that_has_failed(play, tmp_path):
    state = saved(tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = data.find(bytes(host_bytes(state["w"]))[-400:])
    assert place > 0
    data[place + 200] ^= 1
    file.write_bytes(data)
    found = strided(state)
    driver = play(Played(*found.values()))
    options = ray_dcp.LoadOptions(num_threads=1)
    with pytest.raises(ray_dcp.DamagedCheckpointError, match="'w' is damaged"):
        ray_dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True, options=options)
    before = {name: one.clone() for name, one in found.items()}
    driver.synchronize()
    assert all(torch.equal(found[name], before[name]) for name in found)


# --- whole saves --------------------------------------------------------------------------------


def state_of_many() -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(many_tensors())}


def assert_loads_as(path, whole: dict[str, torch.Tensor]) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    ray_dcp.load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("staging", ["call", "background"])
def test_a_process_that_is_alone_stages_what_is_on_a_device(staging, play, tmp_path):
    state = state_of_many()
    driver = play(Played(*tensors_of(state)))
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True, options=options)
    handle.staged(180)
    whole = {name: tensor.detach().clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.detach().zero_()
    handle.committed(180)
    assert driver.told[-1] == "wait"
    assert driver.registered
    assert_loads_as(tmp_path / "c", whole)


@pytest.mark.parametrize("staging", ["call", "background"])
def test_a_device_that_fails_fails_the_save_and_leaves_nothing_under_way(staging, play, tmp_path):
    state = state_of_many()
    driver = play(Played(*tensors_of(state), fails_at=2))
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True, options=options)
    with pytest.raises(CheckpointError, match="illegal memory access"):
        handle.staged(180)
    with pytest.raises(CheckpointError, match="illegal memory access"):
        handle.committed(180)
    assert not driver.num_under_way
    play(Played(*tensors_of(state)))
    ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True).committed(180)
    assert_loads_as(tmp_path / "c", state)


# --- digests of replicas --------------------------------------------------------------------------


MIB = 1 << 20


def of_rank(state, rank: int, world_size: int) -> Capture:
    """What a rank captures; a state that is a function is made in a process group."""
    if not callable(state):
        return capture(state, rank=rank, world_size=world_size)
    with as_rank(rank, world_size):
        return capture(state(rank), rank=rank, world_size=world_size)


def save(warm: Warm, states, replicas="warn"):
    """Saves; returns the outcomes of the ranks."""
    options = SaveOptions(num_threads=1, replicas=replicas)
    return warm.save(states, options=options, capture=of_rank)


def placed(local: torch.Tensor, mesh, placements, shape) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(length: int):
    """Each rank holds another number everywhere."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((length,), float(rank))
        return {"w": placed(local, mesh, [Replicate()], (length,))}

    return state


def hsdp(rows: int, differs: bool):
    """Two replicas of two shards; the second replica of the second shard is another."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2, 2))
        value = float(rank % 2) + (10 if differs and rank == 3 else 0)
        local = torch.full((rows // 2, 1024), value)
        return {"w": placed(local, mesh, [Replicate(), Shard(0)], (rows, 1024))}

    return state


def test_dtensor_replicas_that_differ_are_the_lowest_ranks(tmp_path):
    warm = Warm(2, str(tmp_path / "ckpt"))
    results = save(warm, replicated(40 * MIB // 4))
    assert "'w' on rank 1" in results[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert saved.unique().tolist() == [0]


def test_replicas_that_differ_later_are_never_mixed(tmp_path):
    warm = Warm(4, str(tmp_path / "ckpt"))
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert warm.was_warm
    assert "'w' on rank 3" in save(warm, hsdp(4096, differs=True))[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert [half.unique().tolist() for half in saved.chunk(2)] == [[0], [1]]
    results = save(warm, hsdp(4096, differs=True), "check")
    assert [type(result.error) for result in results] == [PlanConflictError] * 4


@pytest.mark.parametrize("at", [3 * MIB + 17, 20 * MIB + 5, 40 * MIB - 1])
def test_one_byte_of_a_large_plain_tensor_that_differs_is_found(tmp_path, at):
    states = [{"w": torch.zeros(40 * MIB // 4)} for _ in range(2)]
    states[1]["w"].view(torch.uint8)[at] = 1
    warm = Warm(2, str(tmp_path / "ckpt"))
    assert "'w' on rank 1" in save(warm, states)[0].get().warnings[0]
    assert not ray_dcp.read_state_dict(warm.url)["w"].any()
    assert isinstance(save(warm, states, "check")[0].error, PlanConflictError)


def test_the_digest_tells_contents_apart_and_ignores_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert content_digest(tensor.T.contiguous().T) == content_digest(tensor)
    other = tensor.clone()
    other[2, 3] = 0
    assert content_digest(other) != content_digest(tensor)
    assert content_digest(torch.zeros(0)) != 0


def test_the_digest_of_a_large_tensor_sees_every_byte_and_its_length():
    large = torch.zeros((3 << 20) // 4 + 5)
    digest = content_digest(large)
    for at in (0, SEGMENT_BYTES - 1, SEGMENT_BYTES, (1 << 20) + 3, large.nbytes - 1):
        changed = large.clone()
        changed.view(torch.uint8)[at] = 1
        assert content_digest(changed) != digest
    assert content_digest(torch.zeros((3 << 20) // 4 + 6)) != digest


LENGTHS = [0, 1, 63, 1024, *(SEGMENT_BYTES * n + more for n in (1, 2, 700) for more in (-1, 0, 1))]


def test_a_device_digests_as_the_host_does():
    values = torch.Generator().manual_seed(5)
    tensors = [
        torch.randint(0, 256, (length,), dtype=torch.uint8, generator=values) for length in LENGTHS
    ]
    numbers = torch.randn(300, 400, generator=values)
    tensors += [
        numbers, numbers.T, numbers.bfloat16()[1:, 1:], numbers.bfloat16().view(-1)[1:],
        numbers > 0, torch.complex(numbers, -numbers).conj(), numbers.to(torch.float8_e4m3fn),
        torch.full((1 << 15,), -1), torch.zeros(1 << 15), torch.tensor(3.0, requires_grad=True),
    ]  # fmt: skip
    assert content_digests_on_device(tensors) == content_digests(tensors)


# --- the cases of `python -m tests.gpu` -----------------------------------------------------------


QUICK = {**CASES, "no leaks": partial(no_leaks, num_saves=8)}
IN_A_PROCESS_OF_ITS_OWN = ("FSDP2 through Ray",)


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_A_PROCESS_OF_ITS_OWN])
def test_with_a_played_driver(name, tmp_path):
    ((_, where, _, verdict, seen),) = run(name, QUICK[name], PlayedGpu(), str(tmp_path))
    assert where == "played"
    assert verdict in ("held", "not run"), seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*CASES, *RATES])
def test_on_a_gpu(name, tmp_path):
    rows = run(name, {**QUICK, **RATES}[name], Gpu(1 << 30), str(tmp_path))
    assert not [row for row in rows if row[3] == "FAILED"]
