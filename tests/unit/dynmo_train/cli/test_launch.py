"""``launch``: its options, and the start of COMMAND."""

from __future__ import annotations

import shlex
import sys

import pytest
from typer.testing import CliRunner

from dynmo_train.cli import app, cluster
from dynmo_train.cli import launch as module

COMMAND = ["pretrain", "gpt", "--num-layers", "2", "--max-restarts", "x", "--dry-run"]


@pytest.fixture
def started(monkeypatch):
    runs = []
    monkeypatch.setattr(module, "run_processes", lambda words, nproc, *_: runs.append((list(words), nproc)) or 0)
    return runs


@pytest.mark.parametrize("dashes", [["--"], []])
@pytest.mark.parametrize("where", ["local", "node"])
def test_launch_command_with_and_without_dashes_is_the_same(started, where, dashes):
    done = CliRunner().invoke(app, ["launch", where, "--nproc", "2", *dashes, *COMMAND])
    assert done.exit_code == 0, done.output
    assert started == [(COMMAND, 2)]


@pytest.mark.parametrize("where", [["slurm"], ["lsf"], ["kubernetes", "--image", "i"]])
def test_cluster_launch_without_dashes_keeps_the_command(where):
    dashed, given = (
        CliRunner().invoke(app, ["launch", *where, "--dry-run", *dashes, *COMMAND]) for dashes in (["--"], [])
    )
    assert (dashed.exit_code, given.exit_code) == (0, 0), given.output
    assert dashed.stdout == given.stdout


def test_launch_node_dry_run_prints_each_process(started):
    launch = ["launch", "node", "--nproc", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--dry-run"]
    done = CliRunner().invoke(app, [*launch, "--", "pretrain", "gpt", "--data-path", "a b"])
    assert (done.exit_code, started) == (0, [])
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    place = [["WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=h", sys.executable, "-m", "dynmo_train"]] * 2
    assert [line[2:8] for line in lines] == place
    assert [line[:2] for line in lines] == [["RANK=2", "LOCAL_RANK=0"], ["RANK=3", "LOCAL_RANK=1"]]
    assert lines[0][8:] == ["pretrain", "gpt", "--data-path", "a b"]


def test_launch_hostfile_without_file_runs_locally(monkeypatch):
    runs = []
    monkeypatch.setattr(cluster, "run_processes", lambda words, nproc, *_: runs.append((list(words), nproc)) or 3)
    here = ["launch", "hostfile", "--num_nodes", "1", "--num_gpus", "2"]
    done = CliRunner().invoke(app, [*here, "pretrain", "gpt", "--seq-length", "3"])
    assert done.exit_code == 3
    assert runs == [(["pretrain", "gpt", "--seq-length", "3"], 2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-nodes", "2", "--num-gpus", "1"], "must be 1 without --hostfile"),
        (["-i", "other", "--num-gpus", "1"], "'other'"),
    ],
)
def test_launch_hostfile_without_file_refuses_other_hosts(options, words):
    done = CliRunner().invoke(app, ["launch", "hostfile", *options, "pretrain", "gpt"])
    assert words in str(done.exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-nodes", "3"], "--num-nodes 3: the hostfile has 2 hosts"),
        (["--num-nodes", "2", "-i", "a"], "--num-nodes 2: the hostfile with --include has 1 host;"),
        (["--num-nodes", "2", "-e", "a"], "--num-nodes 2: the hostfile with --exclude has 1 host;"),
        (["--num-gpus", "5"], "--num-gpus 5: must be at most the slots of a host; a, b has fewer"),
        (["--num-nodes", "1", "--min-nodes", "2"], "--min-nodes 2: must be at most 1"),
    ],
)
def test_launch_hostfile_more_than_available_is_refused(tmp_path, options, words):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    launch = ["launch", "hostfile", "--hostfile", str(tmp_path / "hosts"), "--dry-run"]
    done = CliRunner().invoke(app, [*launch, *options, "pretrain", "gpt"])
    assert words in str(done.exception)


def test_launch_hostfile_more_gpus_than_included_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    launch = ["launch", "hostfile", "--dry-run", "--num-gpus", "3", "-i", "localhost:0,1"]
    done = CliRunner().invoke(app, [*launch, "pretrain", "gpt"])
    assert "--num-gpus 3: must be at most the 2 after --include and --exclude" in str(done.exception)


def test_launch_options_after_dashes_are_refused(started):
    done = CliRunner().invoke(app, ["launch", "local", "--", "--nproc", "2", "pretrain"])
    assert "cannot start with the option --nproc" in str(done.exception)
    assert started == []


def test_launch_slurm_cpus_have_a_default_and_an_option():
    def head(*options):
        done = CliRunner().invoke(app, ["launch", "slurm", "--dry-run", *options, "--", *COMMAND])
        assert done.exit_code == 0, done.output
        return [line for line in done.stdout.splitlines() if "--cpus-per-task" in line]

    assert head("--nproc", "8", "--gpus", "8") == ["#SBATCH --cpus-per-task=32", "  --cpus-per-task=32"]
    assert head("--nproc", "8", "--cpus-per-task", "96") == ["#SBATCH --cpus-per-task=96", "  --cpus-per-task=96"]
    assert head("--nproc", "8", "--cpus-per-task", "0") == []


def test_launch_kubernetes_older_version_refuses_elastic_job():
    launch = ["launch", "kubernetes", "--image", "i", "--kind", "indexed-job", "--nodes", "2:4", "--dry-run"]
    done = CliRunner().invoke(app, [*launch, "--", *COMMAND])
    assert "# Requires Kubernetes 1.31 or newer (Job.spec.successPolicy).\n" in done.stdout
    done = CliRunner().invoke(app, [*launch, "--kubernetes-version", "1.29", "--", *COMMAND])
    assert "--kubernetes-version 1.29: the manifest requires Kubernetes 1.31" in str(done.exception)
