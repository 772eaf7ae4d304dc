"""The garbage collector is as it was found after a pause, however the pause ended."""

import gc
import threading
from contextlib import suppress

from ray_dcp.core.processes import collector_paused


def test_a_pause_lasts_until_the_last_thread_has_left_also_by_an_error():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with suppress(KeyError), collector_paused():
            entered.set()
            leave.wait(180)
            raise KeyError

    was = gc.isenabled()
    gc.enable()
    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(180)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
    (gc.enable if was else gc.disable)()
