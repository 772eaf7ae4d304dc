import io
import math
import os
import zipfile

import numpy as np
import pytest
import torch

from ray_dcp.errors import InvalidRequestError, UnsupportedValueError
from ray_dcp.format import torch_items

SIZES = [(), (0,), (3,), (2, 3), (0, 4), (4, 0), (2, 0, 3), (1, 2, 3, 4, 5), (300, 233)]


def quiet_empty(size, dtype):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 and quantised dtypes warn when made.
        return torch.empty(size, dtype=dtype)


def savable_dtypes():
    found = set()
    for dtype in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}:
        try:
            tensor = quiet_empty((2,), dtype)
            torch.save(tensor, io.BytesIO())
        except (KeyError, RuntimeError, NotImplementedError):
            continue
        found.add(str(dtype).removeprefix("torch."))
    return found


def framed(dtype, size):
    num_bytes = math.prod(size) * torch_items.ITEMSIZE[dtype]
    payload = np.random.default_rng(0).integers(0, 2, num_bytes, dtype=np.uint8).tobytes()
    frame = torch_items.torch_save_frame(dtype, size)
    return frame.header + payload + frame.footer, payload


def test_every_dtype_that_torch_saves_raw_has_a_frame_and_torch_s_itemsize():
    assert savable_dtypes() == set(torch_items.ITEMSIZE)
    for name, itemsize in torch_items.ITEMSIZE.items():
        assert getattr(torch, name).itemsize == itemsize


@pytest.mark.parametrize("dtype", torch_items.ITEMSIZE)
def test_torch_loads_a_framed_tensor_as_if_it_had_saved_it(dtype):
    for size in SIZES:
        item, payload = framed(dtype, size)
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        like = quiet_empty(size, getattr(torch, dtype))
        assert (loaded.dtype, loaded.shape) == (like.dtype, like.shape)
        assert loaded.stride() == like.stride()
        assert not loaded.requires_grad
        raw = torch.empty(0, dtype=torch.uint8).set_(loaded.untyped_storage())
        assert raw.numpy().tobytes() == payload


@pytest.mark.parametrize("calculates", [False, True])
def test_torch_maps_a_framed_tensor_into_memory(calculates, tmp_path):
    from torch.utils.serialization import config

    item, payload = framed("float16", (300, 233))
    (tmp_path / "item.pt").write_bytes(item)
    with config.patch("load.calculate_storage_offsets", calculates):
        loaded = torch.load(tmp_path / "item.pt", weights_only=True, mmap=True)
    assert loaded.numpy().tobytes() == payload


def test_the_header_keeps_the_payload_aligned_and_the_small_records_carry_their_crc():
    for dtype, size in [("float32", (3,)), ("uint16", (1, 2, 3, 4, 5)), ("bool", ())]:
        item, _ = framed(dtype, size)
        frame = torch_items.torch_save_frame(dtype, size)
        assert len(frame.header) % torch_items.FRAME_ALIGNMENT == 0
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            names = [info.filename for info in archive.infolist()]
            assert names[-1] == "archive/data/0"
            assert archive.read("archive/byteorder") == b"little"
            assert archive.read("archive/version") == b"3\n"
            assert archive.read("archive/data.pkl").endswith(b".")
            assert archive.getinfo("archive/data/0").CRC == 0


FOUR_GIB = 1 << 32
LARGE = [
    (FOUR_GIB - 1024,), (FOUR_GIB - 2,), (FOUR_GIB - 1,), (FOUR_GIB,), (FOUR_GIB + 1,),
    (3, FOUR_GIB), (1 << 40,),
]  # fmt: skip


@pytest.mark.parametrize("size", LARGE)
def test_frames_beyond_4_gib_are_valid_zips(size, tmp_path):
    frame = torch_items.torch_save_frame("uint8", size)
    payload_bytes = math.prod(size)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(frame.header)
        file.seek(len(frame.header) + payload_bytes)
        file.write(frame.footer)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert info.file_size == info.compress_size == payload_bytes
        with archive.open(info) as record:
            # Careful: the position after opening is where the raw bytes begin.
            assert record._orig_compress_size == payload_bytes
            assert archive.fp is not None
        assert archive.read("archive/version") == b"3\n"
    found = torch_items.parse_torch_save(frame.header, path.stat().st_size)
    assert (found.size, found.payload_offset) == (size, len(frame.header))
    assert found.payload_bytes == payload_bytes
    os.unlink(path)


@pytest.mark.parametrize("size", [(FOUR_GIB + 3,), (2, FOUR_GIB // 2), (FOUR_GIB - 200,)])
def test_torch_maps_a_sparse_item_beyond_4_gib(size, tmp_path):
    frame = torch_items.torch_save_frame("uint8", size)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(frame.header)
        file.seek(math.prod(size), os.SEEK_CUR)
        file.write(frame.footer)
        file.seek(len(frame.header) + math.prod(size) - 1)
        file.write(b"\x07")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == size
    assert loaded.flatten()[-1].item() == 7
    assert loaded.flatten()[0].item() == 0


def test_lengths_of_many_frames_equal_those_of_each():
    sizes = [*SIZES, *LARGE, (255, 256), (65535, 65536), (1 << 31, 1), (1, 1 << 31), (1 << 39,),
             ((1 << 39) - 1,), (7, 1 << 47), (128, 128, 128, 128), ((1 << 31) - 1,), (1 << 55,),
             ((1 << 55) - 1, 3), (0, 1 << 50), (1 << 61,)]  # fmt: skip
    names = ["uint8", "float8_e5m2", "bool"]
    rows = [(dtype, size) for dtype in range(3) for size in sizes]
    padded = np.ones((len(rows), 5), dtype=np.int64)
    for row, (_, size) in enumerate(rows):
        padded[row, : len(size)] = size
    headers, footers = torch_items.frame_bytes_many(
        names,
        np.array([dtype for dtype, _ in rows], dtype=np.int8),
        np.array([len(size) for _, size in rows], dtype=np.int8),
        padded,
    )
    frames = [torch_items.torch_save_frame(names[dtype], size) for dtype, size in rows]
    assert headers.tolist() == [len(frame.header) for frame in frames]
    assert footers.tolist() == [len(frame.footer) for frame in frames]


def test_tensors_that_can_t_be_framed_are_refused():
    with pytest.raises(UnsupportedValueError, match="found 'qint8'"):
        torch_items.torch_save_frame("qint8", (3,))
    for size in [(-1,), (1 << 40, 1 << 40), (0, 1 << 60, 1 << 60)]:
        with pytest.raises(InvalidRequestError):
            torch_items.torch_save_frame("float32", size)
        rows = np.array([[*size, 1, 1][:3]], dtype=np.int64)
        with pytest.raises(InvalidRequestError):
            torch_items.frame_bytes_many(["float32"], np.zeros(1, int), np.full(1, len(size)), rows)
