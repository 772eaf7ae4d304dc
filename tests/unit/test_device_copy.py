"""Tensors on devices reach staging memory whole, at the moment of the save, and pinned.

A driver of the tests' own holds copies back until it is waited for, as a stream may; the same with
a real GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ray_dcp.errors import InternalError
from ray_dcp.runtime import staging_backend
from ray_dcp.stage.copying import HostFiller, fill_rows
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.torch_adapter import device_copy
from ray_dcp.torch_adapter.capture import TensorBytes
from ray_dcp.torch_adapter.device_copy import Cuda, DeviceFiller, filler_for
from ray_dcp.torch_adapter.tensors import host_bytes

KIB = 1 << 10
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Late(Cuda):
    """Copies nothing before it is waited for; some tensors of host memory are its device's."""

    def __init__(self, *own: torch.Tensor) -> None:
        self._own = {id(tensor) for tensor in own}
        self.used = bool(own)
        self.told: list[str] = []
        self.begun: list[Callable[[], None]] = []
        self.pinned: set[int] = set()
        self.most_read = 0

    def in_use(self) -> bool:
        return self.used

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._own

    def stream(self, device: torch.device) -> str:
        self.told.append("behind the caller's stream")
        return "stream"

    def copy(self, stream, target, read):
        self.told.append(f"copy {len(target)}")

        def run() -> None:
            source = read()
            self.most_read = max(self.most_read, len(source))
            np.copyto(target, source.numpy())

        self.begun.append(run)
        return run

    def wait(self, stream) -> None:
        self.told.append("wait")
        for run in self.begun:
            run()
        self.begun.clear()

    def pin(self, memory):
        place = int(memory.__array_interface__["data"][0])
        if place in self.pinned:
            raise AssertionError("pinned twice")
        self.pinned.add(place)
        return lambda: self.pinned.remove(place)


def filled(tensors: list[torch.Tensor], driver: Late) -> np.ndarray:
    lengths = [tensor.nbytes for tensor in tensors]
    target = np.full(sum(lengths), 0xAA, np.uint8)
    filler = DeviceFiller(tensors, HostFiller(TensorBytes(tensors)), driver)
    fill_rows(filler, range(len(tensors)), lengths, target)
    return target


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


@pytest.mark.parametrize("on_device", ["all", "every other one", "the first"])
def test_what_is_here_and_what_is_there_comes_together(on_device):
    tensors = many_tensors()
    own = {"all": tensors, "every other one": tensors[::2], "the first": tensors[:1]}[on_device]
    assert filled(tensors, Late(*own)).tobytes() == expected(tensors)


def test_a_part_that_is_not_there_is_told():
    tensor = torch.randn(10)
    filler = DeviceFiller([tensor], None, Late(tensor))
    with pytest.raises(InternalError, match="row 0"):
        filler.fill(0, 1, np.zeros(40, np.uint8))
    with pytest.raises(InternalError, match="row 0"):
        filler.fill_many([0, 0], [0, 38], [4, 4], np.zeros(8, np.uint8))


def test_a_process_that_is_alone_stages_what_is_on_a_device(monkeypatch, tmp_path):
    import ray_dcp

    state = {str(number): tensor for number, tensor in enumerate(many_tensors())}
    driver = Late(*state.values())
    monkeypatch.setattr(
        TensorBytes, "filler", lambda own, host: filler_for(own._values, host, driver)
    )
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    handle.staged()
    whole = {name: tensor.detach().clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.detach().zero_()
    handle.committed(180)
    assert driver.told[-1] == "wait"
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert staging_backend.device_filler_of(lambda row: memoryview(b"")) is None


@NEEDS_GPU
def test_a_real_gpu_fills_pinned_memory():
    tensors = [tensor.cuda() for tensor in many_tensors()]
    arena = StagingMemory.create(1, 4 << 20)
    filler = filler_for(tensors, HostFiller(TensorBytes(tensors)))
    assert isinstance(filler, DeviceFiller)
    arena.pin_with(filler.pin)
    lengths = [tensor.nbytes for tensor in tensors]
    target = arena.slot_array(0)[: sum(lengths)]
    fill_rows(filler, range(len(tensors)), lengths, target)
    assert target.tobytes() == expected([tensor.cpu() for tensor in tensors])
    assert Cuda().pin(arena.slot_array(0)) is None  # it is registered already
    torch.zeros(1, device="cuda").add_(1)  # and the next kernel hears nothing of it
    arena.close()


@NEEDS_GPU
def test_work_that_a_gpu_was_given_before_is_in_the_copy():
    tensor = torch.zeros(1 << 20, device="cuda")
    for _ in range(200):
        tensor.add_(1)
    target = np.zeros(tensor.nbytes, np.uint8)
    filler = filler_for([tensor], None)
    filler.fill(0, 0, target)
    filler.finish()
    tensor.zero_()
    assert (target.view(np.float32) == 200).all()


def test_nothing_is_under_way_any_more_when_a_copy_has_failed():
    tensors = [torch.randn(100, 300), torch.randn(100, 300)]
    driver = Late(*tensors)
    filler = DeviceFiller(tensors, HostFiller(TensorBytes(tensors)), driver)
    lengths = [tensors[0].nbytes, tensors[1].nbytes + 4]  # not what was planned
    with pytest.raises(InternalError, match="row 1"):
        fill_rows(filler, [0, 1], lengths, np.zeros(sum(lengths), np.uint8))
    assert not driver.begun


def test_all_devices_are_waited_for_where_one_fails():
    tensors = [torch.zeros(70_000), torch.zeros(70_000, device="meta")]

    class Failing(Late):
        def stream(self, device):
            return str(device)

        def wait(self, stream):
            self.told.append(stream)
            raise RuntimeError(f"{stream} is lost")

    driver = Failing(*tensors)
    filler = DeviceFiller(tensors, HostFiller(TensorBytes(tensors)), driver)
    for row in range(2):
        filler.fill(row, 0, np.zeros(280_000, np.uint8))
    with pytest.raises(RuntimeError, match="is lost"):
        filler.finish()
    assert {"cpu", "meta"} <= set(driver.told)


def test_small_ones_are_joined_without_taking_much_memory(monkeypatch):
    monkeypatch.setattr(device_copy, "_JOINED_BYTES", 1000)
    tensors = [torch.randn(60) for _ in range(20)]
    driver = Late(*tensors)
    assert filled(tensors, driver).tobytes() == expected(tensors)
    assert driver.most_read == 960


def test_a_slot_is_pinned_once_when_it_is_used_and_given_back():
    driver = Late(torch.randn(1))
    arena = StagingMemory.create(3, 4 * KIB)
    arena.slot_array(0)
    assert not driver.pinned
    arena.pin_with(driver.pin)
    for _ in range(2):
        arena.slot_array(0)
        arena.touch(2)
    assert len(driver.pinned) == 2
    arena.close()
    assert not driver.pinned
