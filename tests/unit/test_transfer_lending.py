"""Bytes are lent to a writer that can take them so, by sources that keep them, and counted."""

from __future__ import annotations

import numpy as np
import obstore
import obstore.store
import pytest
from obstore.exceptions import GenericError

from ray_dcp.errors import StorageError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.vitals import Vitals, WatchedStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.transfer.writer import write_file, write_pieces
from tests.unit.transfer_cases import Piece, file_plan

MIB = 1 << 20


class Lending:
    """A storage whose writers note what they are lent."""

    def __init__(self, name: str) -> None:
        self.inner = MemoryStorage(name)
        self.lent: list[memoryview] = []
        self.written: list[int] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open_writer(self, key, **options):
        writer, outer = self.inner.open_writer(key, **options), self

        class Writer:
            commit, abort = writer.commit, writer.abort

            def write(self, data):
                outer.written.append(len(data))
                writer.write(data)

            def lend(self, data):
                outer.lent.append(memoryview(data))
                writer.write(data)

        return Writer()


@pytest.fixture
def storage(request):
    storage = Lending(request.node.name)
    yield storage
    storage.delete(entry.key for entry in storage.list())


def plan_and_array():
    array = np.arange(3 * MIB, dtype=np.float32)
    return file_plan([Piece(0, "float32", array.shape)]), array


def test_a_tensor_is_lent_from_where_it_lies(storage):
    plan, array = plan_and_array()
    vitals = Vitals()
    watched = WatchedStorage(storage, vitals)
    write_file(watched, plan, "a", source=lambda row: array.view(np.uint8).data, deferred=None)
    assert storage.written == []
    assert sum(map(len, storage.lent)) == storage.list()[0].num_bytes == vitals.doing.done_bytes
    inside = [view for view in storage.lent if np.shares_memory(np.asarray(view), array)]
    assert sum(map(len, inside)) == array.nbytes


class Staged:
    """A `PieceSource` whose memory is somebody else's as soon as it is written."""

    keeps = False

    def __init__(self, data):
        self.data = data

    def small(self, first, stop):
        return []

    def parts(self, piece):
        return [self.data]

    def num_bytes(self, piece):
        return len(self.data)

    def written(self, end):
        pass


def test_what_was_staged_is_not_lent(storage):
    plan, array = plan_and_array()
    write_pieces(storage, plan, "a", Staged(array.view(np.uint8).data), options=SaveOptions())
    assert storage.lent == []
    assert sum(storage.written) == storage.list()[0].num_bytes


def test_an_upload_is_never_begun_again_with_what_is_left(monkeypatch):
    store = obstore.store.S3Store("b", access_key_id="k", secret_access_key="s")
    storage = ObjectStorage(store, options=ObjectOptions(request_bytes=5 * MIB))
    calls = []

    def put(store, path, pieces, **_):
        calls.append(len(next(pieces)))
        raise GenericError("HTTP error: error sending request")

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(obstore, "head", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    writer = storage.open_writer("part")
    with pytest.raises(StorageError, match="could not publish s3://b/part"):
        fill_and_commit(writer)
    assert len(calls) == 1


def fill_and_commit(writer) -> None:
    writer.lend(bytes(9 * MIB))
    writer.commit()
