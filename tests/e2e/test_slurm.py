"""`launch slurm` on a real Slurm: a controller and three virtual nodes on this machine.

Skipped where slurmctld, slurmd and munged are missing (Debian: slurmctld slurmd slurm-client munge), or without root.
Two tests take minutes: time limits are in minutes, and Slurm delays a requeued job.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ports import free_port
from tests.distributed.whole_runs import arguments, events, figures, lines, train, write_data
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

# Slurm delays a requeued job: until then its nodes refuse the id of a terminated job.
REQUEUE_DELAY_S = 125
ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
CONFIGURATION = """
ClusterName=dynmo
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=60
KillWait=10
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""


def ask(*words, code=0):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def idle():
    """Whether all three nodes are idle."""
    words = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() == "3"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables of a Slurm cluster that the fixture starts and stops."""
    if os.geteuid() or any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in PROGRAMS):
        pytest.skip("needs root and slurmctld, slurmd, munged")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(256))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=[free_port() for _ in range(4)]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("PATH", path)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    log = open(folder / "log", "w")  # noqa: SIM115 - closed below
    running = [subprocess.Popen(munge, stdout=log, stderr=log)]
    try:
        wait_for((folder / "munge.socket").exists, "munged", seconds=30)
        daemons = (["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{number}"] for number in (1, 2, 3)))
        running.extend(subprocess.Popen(words, stdout=log, stderr=log) for words in daemons)
        wait_for(idle, "three idle nodes", seconds=60)
        yield folder
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True, check=False)
        if len(running) == 5:
            wait_for(lambda: not ask("squeue", "--noheader").strip(), "an empty queue", seconds=60)
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(600)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.close()
        patch.undo()


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """Data, and the same run in one process."""
    folder = tmp_path_factory.mktemp("slurm-runs")
    data = write_data(folder / "data")
    train(data, folder / "static", 1)
    return folder, data


def submit(folder, name, nodes, *words):
    """Submit by `launch slurm` in the folder once all nodes are idle, and return the job id."""
    wait_for(idle, "three idle nodes")
    launch = ["launch", "slurm", "--nodes", nodes, "--job-name", name, "--export", "MASTER_ADDR=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "dynmo_train", *launch, "--script", f"{name}.sbatch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stderr.split("submitted ")[1].split()[0]


def job_state(job, field="JobState"):
    return ask("scontrol", "show", "job", job).split(f"{field}=")[1].split()[0]


def minutes_run(job):
    return int(job_state(job, "RunTime").split(":")[-2])


def steps_done(run):
    return len(lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def log_of(folder, name, job):
    return (folder / f"slurm-{name}-{job}.out").read_text()


def test_slurm_released_node_leaves_the_running_job(cluster, static):
    folder, data = static
    run = folder / "packed"
    more = ("--balance", "online", "--balance-lockstep", "--pack-to", "2")
    # Enough steps after the release to observe the smaller job.
    long = {"train_iters": "400", "lr_decay_iters": "24", "eval_interval": "1000", "save_interval": "1000"}
    command = arguments(data, run, *more, "--save", str(run), "--load", str(run), **long)
    job = submit(folder, "packed", "3", "--max-restarts", "0", "--", *command)
    wait_for(lambda: steps_done(run), "a start", seconds=200)
    assert job_state(job, "NumNodes") == "3" or events(run, "released")
    wait_for(lambda: job_state(job, "NumNodes") == "2", "a smaller job", seconds=200)
    assert job_state(job) == "RUNNING"
    ask("scancel", "--signal=TERM", job)  # saves and exits
    wait_for(lambda: job_state(job) not in ("RUNNING", "COMPLETING"), "its end", seconds=120)
    assert "Released node" in log_of(folder, "packed", job)
    (released,) = events(run, "released")
    assert len(released["ranks"]) == 1
    saved = (run / "checkpoints" / "LATEST").read_text().strip()
    assert saved == f"step-{steps_done(run):08d}"  # the last step is saved after SIGTERM
    static_figures = figures(folder / "static")
    both = range(1, min(steps_done(run), 23) + 1)
    assert both[-1] > released["step"]
    assert {step: figures(run)[step] for step in both} == {step: static_figures[step] for step in both}


def test_slurm_aws_script_reads_sizes_from_the_environment(cluster, tmp_path, monkeypatch):
    """`NUM_LAYERS=2 HIDDEN_SIZE=32 ... sbatch bin/2.distributed-training.sbatch`, on two nodes."""
    data = tmp_path / "gpt2"
    data.mkdir()
    write_data(data / "my-gpt2_text_document")
    words = [f"t{number}" for number in range(96)] + ["<|endoftext|>"]
    (data / "gpt2-vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (data / "gpt2-merges.txt").write_text("#version: 0.2\n")
    sizes = {"NUM_LAYERS": "2", "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "4", "SEQ_LENGTH": "32"}
    sizes |= {"MAX_POSITION_EMBEDDINGS": "32", "MICRO_BATCH_SIZE": "2", "GLOBAL_BATCH_SIZE": "8"}
    sizes |= {"TENSOR_PARALLEL": "1", "PIPELINE_PARALLEL": "2", "GPU_PER_NODE": "1", "DATA_PATH": str(tmp_path)}
    sizes |= {"MORE": "--train-samples 40 --lr-decay-samples 40 --lr-warmup-samples 8 --eval-iters 0 --split 100,0,0"}
    for name, value in {**sizes, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    wait_for(idle, "three idle nodes")
    here = ("--gpus-per-node=0", f"--output={tmp_path}/%j.out", f"--chdir={tmp_path}")  # this cluster has none
    job = ask("sbatch", "--parsable", *here, str(ROOT / "bin" / "2.distributed-training.sbatch")).strip()
    run = tmp_path / "checkpoints" / "gpt3"
    wait_for(lambda: job_state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "its end", seconds=200)
    log = (tmp_path / f"{job}.out").read_text()
    assert job_state(job) == "COMPLETED", log
    assert job_state(job, "NumNodes") == "2"
    assert figures(run).keys() == {1, 2, 3, 4, 5}
    assert (run / "checkpoints" / "LATEST").read_text().strip() == "step-00000005"


def test_slurm_lost_node_requeues_the_job_without_it(cluster, static):
    folder, data = static
    run = folder / "lost"
    long = {"train_iters": "3000", "lr_decay_iters": "24", "eval_interval": "9999", "save_interval": "50"}
    job = submit(folder, "lost", "2:3", "--", *arguments(data, run, "--save", str(run), "--load", str(run), **long))
    wait_for((run / "checkpoints" / "LATEST").exists, "a checkpoint", seconds=300)
    assert job_state(job, "NumNodes") == "3"
    ask("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    wait_for(lambda: job_state(job, "Restarts") == "1", "the queue")

    def segments():
        return [record for record in lines(run / "profile.jsonl") if record["record"] == "header"]

    wait_for(lambda: len(segments()) == 2, "another start", seconds=REQUEUE_DELAY_S + 200)
    ask("scancel", job)
    assert [header["segment"] for header in segments()] == [0, 1]


def test_slurm_arrays_of_binarize_write_the_bytes_of_a_local_run(cluster, tmp_path):
    words = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "train.txt").write_text("a b a\nb c\n" * 300)
    common = ["--plain-text", "--tokenizer-type", "WhitespaceVocab", "--vocab-file", tmp_path / "vocab.json"]
    common += ["--append-eod", "--input", tmp_path / "train.txt", "--task-bytes", "1000"]
    ask("dynmo-prep", "binarize", *common, "--output-prefix", tmp_path / "here")
    ask(
        *("dynmo-prep", "binarize", *common, "--output-prefix", tmp_path / "there", "--executor", "slurm"),
        *("--task-count", "2"),
    )
    wait_for((tmp_path / "there_text_document.idx").exists, "the data set", seconds=200)
    for ending in ("bin", "idx"):
        there, here = (tmp_path / f"{name}_text_document.{ending}" for name in ("there", "here"))
        assert there.read_bytes() == here.read_bytes()


def test_slurm_failed_array_leaves_no_queued_job(cluster, tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    wait_for(idle, "three idle nodes")
    words = ("merge", tmp_path / "cut.jsonl.gz", "-o", tmp_path / "out.jsonl", "--executor", "slurm")
    last = ask("dynmo-prep", *words, "--task-count", "2").split("job is ")[1].split()[0].partition(";")[0]
    wait_for(lambda: job_state(last) not in ("PENDING", "RUNNING", "COMPLETING"), "the end of the chain")
    assert job_state(last) == "CANCELLED"
    wait_for(lambda: not ask("squeue", "--noheader").strip(), "an empty queue")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.timeout(900)
def test_slurm_time_limit_saves_and_requeues(cluster, static):
    folder, data = static
    run = folder / "long"
    long = {"train_iters": "3000", "lr_decay_iters": "24", "eval_interval": "9999", "save_interval": "9999"}
    command = arguments(data, run, "--save", str(run), "--load", str(run), **long)
    job = submit(folder, "long", "2", "--time", "30", "--save-before-s", "40", "--", *command)
    wait_for(lambda: steps_done(run), "a start", seconds=200)
    # Slurm counts in minutes and may send the signal one minute early: set the limit once there is something to save.
    ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes_run(job) + 2}")
    wait_for((run / "checkpoints" / "LATEST").exists, "a checkpoint", seconds=200)
    wait_for(lambda: job_state(job, "Restarts") == "1", "the queue", seconds=120)
    before = steps_done(run)
    assert (run / "checkpoints" / "LATEST").read_text().strip() == f"step-{before:08d}"  # no step is repeated
    ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    wait_for(lambda: steps_done(run) > before + 10, "more steps", seconds=REQUEUE_DELAY_S + 200)
    ask("scancel", job)
    assert [record["segment"] for record in lines(run / "profile.jsonl") if record["record"] == "header"] == [0, 1]
    assert [line["step"] for line in lines(run / "metrics.jsonl")][: before + 10] == [*range(1, before + 11)]
