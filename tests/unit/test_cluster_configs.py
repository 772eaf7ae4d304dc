"""The cluster files: valid by Ray's own schema or ours, and their commands run the entry script."""

from __future__ import annotations

import copy
import importlib.util
import re
import shlex
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
LAUNCHER = ("local.yaml", "aws-spot.yaml", "gcp-preemptible.yaml")
KUBERAY = ("rayjob-s3.yaml", "rayjob-rwx.yaml", "rayjob-elastic.yaml")


def script(name):
    """Imports a script of the directory under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"cluster_configs_{name}", CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def entry():
    return script("train")


@pytest.fixture(scope="module")
def notice():
    return script("drain_on_notice")


def header_of(name):
    lines = []
    for line in (CONFIGS / name).read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:])
    return "\n".join(lines)


def documents(name):
    return list(yaml.safe_load_all((CONFIGS / name).read_text()))


def rayjob(name):
    (job,) = (one for one in documents(name) if one["kind"] == "RayJob")
    return job


def words_after(command, script_name):
    """Returns the arguments of each call of a script in a command line."""
    words = shlex.split(command)
    found = []
    for number, word in enumerate(words):
        if " " in word and script_name in word:
            found += words_after(word, script_name)
        elif word.endswith(f"cluster_configs/{script_name}"):
            found.append(words[number + 1 :])
    return found


def commands_of(name):
    """Returns all command lines that a file has: of its header, and those that it runs."""
    told = re.findall(r"^  (?: )?(\S.*)$", header_of(name).split("Run", 1)[1], re.M)
    if name in KUBERAY:
        return [*told, rayjob(name)["spec"]["entrypoint"]]
    (config,) = documents(name)
    return [*told, *config.get("worker_start_ray_commands", [])]


def test_every_file_of_the_directory_is_known_here():
    assert {path.name for path in CONFIGS.glob("*.yaml")} == {*LAUNCHER, *KUBERAY}
    readme = (CONFIGS / "README.md").read_text()
    assert [name for name in (*LAUNCHER, *KUBERAY) if f"]({name})" not in readme] == []


@pytest.mark.parametrize("name", [*LAUNCHER, *KUBERAY])
def test_what_a_file_runs_is_the_entry_script_with_arguments_that_it_takes(name, entry):
    calls = [words for line in commands_of(name) for words in words_after(line, "train.py")]
    assert calls
    for words in calls:
        chosen = entry.make_parser().parse_args(words)
        assert chosen.storage
        assert chosen.name != "demo"
    if name not in KUBERAY:
        assert (CONFIGS.parent / "cluster_configs" / "train.py").exists()


@pytest.mark.parametrize("name", ["aws-spot.yaml", "gcp-preemptible.yaml", "rayjob-elastic.yaml"])
def test_machines_that_may_be_taken_away_drain_their_node(name, notice):
    if name in KUBERAY:
        (group,) = rayjob(name)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        spec = group["template"]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        (words,) = words_after(shlex.join(command), "drain_on_notice.py")
        chosen = notice.make_parser().parse_args(words)
        assert chosen.deadline < spec["terminationGracePeriodSeconds"]
        assert chosen.wait
    else:
        (call,) = [
            words for line in commands_of(name) for words in words_after(line, "drain_on_notice.py")
        ]
        words = call[: call.index(">")]
        assert notice.make_parser().parse_args(words).source == name.partition("-")[0]


@pytest.mark.parametrize("name", LAUNCHER)
def test_ray_takes_the_file_for_its_cluster_launcher(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    (config,) = documents(name)
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert any("ray start" in line for line in prepared[commands])
    for remote, local in config.get("file_mounts", {}).items():
        # All that the nodes run lies in what is copied to them.
        assert local == "."
        for line in commands_of(name):
            for path in re.findall(r"(/\S+)/cluster_configs/", line):
                assert path == remote


@pytest.mark.parametrize("name", ["aws-spot.yaml", "gcp-preemptible.yaml"])
def test_only_workers_are_on_machines_that_may_be_taken_away(name):
    (config,) = documents(name)
    head = config["available_node_types"][config["head_node_type"]]
    worker = config["available_node_types"]["worker"]
    spot = ("InstanceMarketOptions", "scheduling")
    assert not any(field in head["node_config"] for field in spot)
    assert any(field in worker["node_config"] for field in spot)
    assert head["resources"] == {"CPU": 0}
    assert worker["max_workers"] <= config["max_workers"]


@pytest.mark.parametrize("name", KUBERAY)
def test_what_only_one_node_can_mount_is_no_storage_for_a_run_of_several(name):
    claims = [one for one in documents(name) if one["kind"] == "PersistentVolumeClaim"]
    assert all(one["spec"]["accessModes"] == ["ReadWriteMany"] for one in claims)


@pytest.mark.parametrize("name", KUBERAY)
def test_a_ray_job_is_of_the_ray_that_is_tested_and_asks_for_workers_that_it_has(name, entry):
    import ray

    spec = rayjob(name)["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    (words,) = words_after(spec["entrypoint"], "train.py")
    chosen = entry.make_parser().parse_args(words)
    (group,) = cluster["workerGroupSpecs"]
    workers = chosen.workers if isinstance(chosen.workers, tuple) else (chosen.workers,) * 2
    assert workers == (group["minReplicas"], group["maxReplicas"])
    assert bool(cluster.get("enableInTreeAutoscaling")) == (workers[0] < workers[1])
    (worker,) = group["template"]["spec"]["containers"]
    assert chosen.cpus_per_worker < int(worker["resources"]["limits"]["cpu"])
    if chosen.storage.startswith("/"):
        mounts = [mount["mountPath"] for mount in worker["volumeMounts"]]
        head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
        assert chosen.storage in mounts
        assert chosen.storage in [mount["mountPath"] for mount in head["volumeMounts"]]


@pytest.mark.parametrize("name", [*LAUNCHER[1:]])
def test_a_launcher_file_uses_the_image_of_the_ray_that_is_tested(name):
    import ray

    (config,) = documents(name)
    assert config["docker"]["image"].startswith(f"rayproject/ray:{ray.__version__}-")
    assert f"rayproject/ray:{ray.__version__}-" in (CONFIGS / "Dockerfile").read_text()


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("2:8", (2, 8)), ("2:2", (2, 2))])
def test_workers_are_a_number_or_a_range(text, number, entry):
    chosen = entry.make_parser().parse_args(["--storage", "/s", "--workers", text])
    assert chosen.workers == number


@pytest.mark.parametrize("text", ["0", "3:2", "2:", ":4", "two", "-1", "1:2:3"])
def test_workers_that_are_neither_are_refused(text, entry, capsys):
    with pytest.raises(SystemExit):
        entry.make_parser().parse_args(["--storage", "/s", f"--workers={text}"])
    assert "expected a number or MIN:MAX" in capsys.readouterr().err


# The notice of a cloud


class Metadata(BaseHTTPRequestHandler):
    """Answers as the clouds' metadata servers do; the notice comes with the third question."""

    asked: list[str]

    def do_PUT(self):
        self.answer(200 if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else 400, "secret")

    def do_GET(self):
        self.asked.append(self.path)
        known = len(self.asked) > 2
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "secret":
                self.answer(401, "")
            elif known:
                self.answer(200, '{"action": "terminate", "time": "2100-01-01T00:00:00Z"}')
            else:
                self.answer(404, "")
        elif self.headers["Metadata-Flavor"] == "Google":
            self.answer(200, "TRUE" if known else "FALSE")
        else:
            self.answer(403, "")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    asked: list[str] = []
    handler = type("Handler", (Metadata,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("source", "path", "least"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", 10**9),
        ("gcp", "/computeMetadata/v1/instance/preempted", 30),
    ],
)
def test_the_notice_of_a_cloud_drains_the_node(source, path, least, metadata, notice, monkeypatch):
    host, asked = metadata
    drained = []
    monkeypatch.setattr(notice, "drain", lambda *how: drained.append(how) or 7)
    arguments = ["--source", source, "--metadata-host", host, "--interval", "0", "--node-id", "ab"]
    assert notice.main(arguments) == 7
    ((left, address, node_id),) = drained
    assert left >= least
    assert (address, node_id) == ("auto", "ab")
    assert asked == [path] * 3


def test_a_notice_that_is_late_leaves_no_time(notice):
    now = datetime(2100, 1, 1, 0, 1, tzinfo=timezone.utc)
    answer = '{"action": "terminate", "time": "2100-01-01T00:00:00Z"}'
    assert notice.aws_seconds_left(answer, now) == 0


def test_a_metadata_server_that_is_away_is_asked_again(notice, capsys):
    assert notice.ask("127.0.0.1:1", "GET", "/", {}, 1) is None
    assert "did not answer" in capsys.readouterr().err
