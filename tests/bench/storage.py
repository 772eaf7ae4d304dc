"""An S3 server on this machine: ours, stock DCP through s3fs, and raw requests of our own client.

The raw requests move the same bytes by the same client: parallel puts of objects of the length of a
part, one put in parts, and parallel ranged gets of that into the targets' memory. No checksum, no
framing, no commit.
"""

from __future__ import annotations

import itertools
import shutil
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import obstore
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from ray_dcp.store.object_clients import make_store
from ray_dcp.store.object_options import ObjectOptions
from tests.bench.measure import interleaved, show
from tests.support.servers.s3 import DevStore

State = dict[str, torch.Tensor]

PUT_BYTES, GET_BYTES = ObjectOptions().request_bytes, 8 << 20
PUT_THREADS, GET_THREADS = ObjectOptions().num_requests, ray_dcp.LoadOptions().num_threads


def storage(rounds: int, directory: str | None, megabytes: int = 512) -> None:
    """Saves and loads 64 tensors."""
    warnings.simplefilter("ignore")
    place = directory or f"/dev/shm/ray_dcp-bench-{uuid.uuid4().hex}"
    try:
        with DevStore(place, volume_mb=1024) as server:
            _compare(server, rounds, megabytes)
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def _compare(server: DevStore, rounds: int, megabytes: int) -> None:
    state = {f"layers.{i}.weight": torch.randn(megabytes << 12) for i in range(64)}
    num_bytes = sum(t.nbytes for t in state.values())
    store, _ = make_store("s3", "ckpt", server.options)
    run, numbers = server.location / "run", itertools.count()
    options = {
        "key": server.access_key_id,
        "secret": server.secret_access_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
    }

    def empty(_: str) -> None:
        # Why: the server gives the space of what was replaced back much later.
        for chunk in obstore.list(store):
            obstore.delete(store, [item["path"] for item in chunk])

    def save_stock() -> None:
        writer = FsspecWriter(f"{run.url}/stock", **options)
        stock.save(state, storage_writer=writer, no_dist=True)

    def load_stock() -> None:
        reader = FsspecReader(f"{run.url}/stock", **options)
        stock.load(dict(targets), storage_reader=reader, no_dist=True)

    saves: dict[str, Callable[[], object]] = {
        "raw parallel PUT, same client": lambda: _put(store, state, next(numbers)),
        "raw PUT in parts, same client": lambda: _put_parts(store, state),
        "ray_dcp.save": lambda: ray_dcp.save(state, checkpoint_id=run / "ours", no_dist=True),
        "ray_dcp.async_save": lambda: ray_dcp.async_save(
            state, checkpoint_id=run / "async", no_dist=True
        ).result(),
        "torch DCP, s3fs": save_stock,
    }
    base = "raw parallel PUT, same client"
    show(f"save to S3, {megabytes} MiB", interleaved(saves, rounds, empty), num_bytes, base)

    ray_dcp.save(state, checkpoint_id=run / "ours", no_dist=True)
    save_stock()
    _put_parts(store, state)
    targets = {name: torch.zeros_like(t) for name, t in state.items()}
    never = ray_dcp.LoadOptions(verify="never")
    loads: dict[str, Callable[[], object]] = {
        "raw ranged GET into targets": lambda: _get(store, targets),
        "ray_dcp.load": lambda: ray_dcp.load(
            dict(targets), checkpoint_id=run / "ours", no_dist=True
        ),
        "ray_dcp.load, verify=never": lambda: ray_dcp.load(
            dict(targets), checkpoint_id=run / "ours", no_dist=True, options=never
        ),
        "torch DCP, s3fs": load_stock,
    }
    base = "raw ranged GET into targets"
    show(f"load from S3, {megabytes} MiB", interleaved(loads, rounds), num_bytes, base)
    for target in targets.values():
        target.zero_()
    ray_dcp.load(dict(targets), checkpoint_id=run / "ours", no_dist=True)
    wrong = [name for name, t in state.items() if not torch.equal(t, targets[name])]
    print(f"\nvalues that differ after loading: {len(wrong)}")


def _pieces(state: State, step: int) -> list[tuple[int, memoryview]]:
    found, offset = [], 0
    for tensor in state.values():
        view = memoryview(tensor.view(torch.uint8).numpy())
        for start in range(0, len(view), step):
            piece = view[start : start + step]
            found.append((offset + start, piece))
        offset += len(view)
    return found


def _put(store: obstore.store.S3Store, state: State, number: int) -> None:
    def put(piece: tuple[int, memoryview]) -> None:
        obstore.put(store, f"raw-{number}/{piece[0]}", piece[1], use_multipart=False)

    with ThreadPoolExecutor(PUT_THREADS) as threads:
        list(threads.map(put, _pieces(state, PUT_BYTES)))


def _put_parts(store: obstore.store.S3Store, state: State) -> None:
    pieces = (view for _, view in _pieces(state, PUT_BYTES))
    obstore.put(
        store, "raw-parts", pieces, use_multipart=True, chunk_size=PUT_BYTES,
        max_concurrency=PUT_THREADS,
    )  # fmt: skip


def _get(store: obstore.store.S3Store, targets: State) -> None:
    def get(piece: tuple[int, memoryview]) -> None:
        offset, view = piece
        found = obstore.get(store, "raw-parts", options={"range": (offset, offset + len(view))})
        done = 0
        for chunk in found.stream(min_chunk_size=1 << 20):
            view[done : done + len(chunk)] = memoryview(chunk)
            done += len(chunk)

    with ThreadPoolExecutor(GET_THREADS) as threads:
        list(threads.map(get, _pieces(targets, GET_BYTES)))
