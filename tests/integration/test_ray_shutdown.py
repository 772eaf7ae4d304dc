"""Ray is shut down in a process whose threads use it: they are told, and the process lives."""

from __future__ import annotations

ROUNDS = 5

SCRIPT = """
import sys, threading
import ray, ray_dcp
from ray_dcp.errors import ParticipantError


def ask(session, asked, ended):
    try:
        while True:
            session.coordinator_info()
            asked.release()
    except ParticipantError as error:
        ended.append(error)


for _ in range(int(sys.argv[2])):
    ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
    session = ray_dcp.connect(name="asked", namespace="shut")
    asked, ended = threading.Semaphore(0), []
    threads = [threading.Thread(target=ask, args=(session, asked, ended)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        asked.acquire()
    ray.shutdown()
    for thread in threads:
        thread.join()
    assert len(ended) == len(threads), ended
    assert not ray.is_initialized()
    session.close()
print("lives")
"""


def test_a_process_outlives_that_ray_is_shut_down_under_threads_that_use_it(ray_session, programs):
    # A process of its own: when it fails, Ray ends it. Most of such rounds did.
    (ended,) = programs.run("-c", SCRIPT, ray_session, str(ROUNDS))
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
