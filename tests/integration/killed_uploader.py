"""Begins an upload in parts and says so; whoever started it kills it then."""

from __future__ import annotations

import json
import sys
import time

from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage

if __name__ == "__main__":
    url, options, key = json.loads(sys.argv[1])
    storage = open_storage(Location(url, options))
    writer = storage.open_writer(key)
    writer.write(bytes(3 * (5 << 20)))
    while not storage.unpublished():
        time.sleep(0.02)
    print("begun", flush=True)
    sys.stdin.read()
