"""The garbage collector is as it was found after a pause, however the pause ended."""

import gc
import threading

import pytest

from ray_dcp.core.processes import collector_paused


@pytest.fixture(autouse=True)
def enabled():
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_a_pause_lasts_until_the_last_thread_has_left():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with collector_paused():
            entered.set()
            leave.wait(180)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(180)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_pause_ends_with_its_block_also_after_an_error():
    def fail() -> None:
        with collector_paused():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
