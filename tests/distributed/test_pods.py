"""A ``PyTorchJob`` as its operator and the nodes' agents run it: each replica's own command line from the manifest.

Every pod is a process with the variables that Kubeflow's training operator sets (its ``pkg/controller.v1/pytorch``,
release 1.9), in a network namespace of its own, where the names of the pods lead to loopback. No cluster, no image.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.whole_runs import arguments, events, figures, lines, train, write_data
from tests.waiting import wait_for

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

JOB = "packed"
# The container's own hosts file; nothing of this machine's is changed.
IN_POD = 'mount --bind "$PODS" /etc/hosts && unset PODS && exec "$@"'


@dataclass(frozen=True)
class Pod:
    """A replica: its name, what the operator sets, and the command of its container."""

    name: str
    variables: dict[str, str]
    command: list[str]


def pods_of(job):
    """The pods that the training operator makes of a job with a master."""
    spec = job["spec"]
    found: list[Pod] = []
    total = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    policy = spec["elasticPolicy"]
    for role, replica in spec["pytorchReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        for index in range(replica["replicas"]):
            rank = index + (role == "Worker")
            name = f"{JOB}-{role.lower()}-{index}"
            own = {entry["name"]: entry["value"] for entry in container["env"]}
            environment = {
                **{"PYTHONUNBUFFERED": "1", "MASTER_ADDR": f"{JOB}-master-0", "MASTER_PORT": "29500"},
                **{"PET_MASTER_ADDR": f"{JOB}-master-0", "PET_MASTER_PORT": "29500"},
                **{"WORLD_SIZE": str(total), "RANK": str(rank), "PET_NODE_RANK": str(rank), "HOSTNAME": name},
                **{"PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}", "PET_RDZV_BACKEND": "c10d"},
                **{"PET_RDZV_ENDPOINT": f"{JOB}-worker-0:29500", "PET_MAX_RESTARTS": str(policy["maxRestarts"])},
            }
            found.append(Pod(name=name, variables=own | environment, command=container["command"]))
    return found


def succeeded(job, codes):
    """Whether the training operator calls the job succeeded, by the exit codes of its pods so far (UpdateJobStatus).

    Args:
        codes: name of a pod to its exit code, of those that have ended.
    """
    if "Master" in job["spec"]["pytorchReplicaSpecs"]:
        return codes.get(f"{JOB}-master-0") == 0
    return "elasticPolicy" in job["spec"] and 0 in codes.values()


@pytest.fixture
def cluster():
    """The name of a network namespace with nothing but loopback."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, iproute2 and util-linux")
    name = f"dynmo-pods-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, listed.split()):
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(cluster, folder, pod):
    """A pod's container, in a folder of its own."""
    (folder / pod.name).mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["ip", "netns", "exec", cluster, "unshare", "--mount", "sh", "-c", IN_POD, "sh", *pod.command],
        cwd=folder / pod.name,
        env={
            **os.environ,
            **pod.variables,
            "PATH": path,
            "TMPDIR": str(folder / pod.name),
            "PODS": str(folder / "hosts"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_done(run):
    return len(lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def test_released_pod_completes_and_a_drained_one_is_replaced(cluster, tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    train(data, tmp_path / "static", 1)
    long = {"train_iters": "120", "lr_decay_iters": "24", "eval_interval": "1000", "save_interval": "1000"}
    options = (*SCRIPTED_PLANNER_OPTIONS, "--save", str(run), "--load", str(run))
    launch = ["launch", "kubernetes", "--image", "dynmo:1", "--nodes", "1:3", "--job-name", JOB, "--dry-run", "--"]
    manifest = subprocess.run(
        [sys.executable, "-m", "dynmo_train", *launch, *arguments(data, run, *options, **long)],
        capture_output=True,
        text=True,
        check=True,
    )
    job = yaml.safe_load(manifest.stdout)
    pods = pods_of(job)
    assert [pod.name for pod in pods] == [f"{JOB}-master-0", f"{JOB}-worker-0", f"{JOB}-worker-1"]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {pod.name}\n" for pod in pods))
    first, second, third = (start(cluster, tmp_path, pod) for pod in pods)

    planner = ScriptedPlanner(run)
    planner.wait_for_ask(3, first, second, third)
    items = planner.items()
    planner.answer([items[:5], items[5:]], released=[2])
    planner.wait_for_ask(6, first, second)
    third.communicate(timeout=600)
    assert (first.poll(), second.poll(), third.returncode) == (None, None, 0)
    assert not succeeded(job, {pods[2].name: 0})  # the job continues
    assert [event["workers"] for event in events(run, "released")] == [[2]]

    second.send_signal(signal.SIGTERM)  # its node is drained: it has time to save
    # The launcher's note is there once it has passed the signal on to its worker, which waits for rank 0 in this step.
    wait_for(lambda: list(Path("/dev/shm").glob("dynmo-heartbeats-*/shutdown")), "note of the signal", first)
    planner.keep_until_end(second)
    _, words = second.communicate(timeout=600)
    assert second.returncode == 143, words
    left = steps_done(run)
    _, words = first.communicate(timeout=600)
    assert first.returncode == 0, words
    assert "processes: 1" in words
    assert succeeded(job, {pods[0].name: 0, pods[1].name: 143, pods[2].name: 0})
    # Nothing was done twice, and no bit differs from one process.
    assert [line["step"] for line in lines(run / "metrics.jsonl") if "lm_loss" in line] == [*range(1, 121)]
    assert left < 120
    static = figures(tmp_path / "static")
    assert {step: figures(run)[step] for step in range(1, 24)} == {step: static[step] for step in range(1, 24)}
