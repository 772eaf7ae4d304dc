"""Uploads several files at a time, and prints by how many bytes the process grew at most."""

from __future__ import annotations

import json
import resource
import sys
import threading

from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    url, options, num_files, file_bytes = json.loads(sys.argv[1])
    storage = open_storage(Location(url, options))
    data = memoryview(bytearray(4 << 20))
    with_all_threads = threading.Barrier(num_files)
    # Connections and threads are there before it is measured.
    storage.write("warm", bytes(data))
    before = peak_bytes()

    def upload(number: int) -> None:
        writer = storage.open_writer(f"file-{number}")
        with_all_threads.wait()
        for _ in range(file_bytes // len(data)):
            writer.write(data)
        writer.commit()

    threads = [threading.Thread(target=upload, args=(n,)) for n in range(num_files)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.num_bytes for entry in storage.list("file-")] == num_files * [file_bytes]
    print(peak_bytes() - before)
