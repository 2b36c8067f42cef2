"""Where the options of ``launch`` end and its command begins."""

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
def test_command_is_taken_with_and_without_dashes(started, where, dashes):
    done = CliRunner().invoke(app, ["launch", where, "--nproc", "2", *dashes, *COMMAND])
    assert done.exit_code == 0, done.output
    assert started == [(COMMAND, 2)]


@pytest.mark.parametrize("where", [["slurm"], ["lsf"], ["kubernetes", "--image", "i"]])
def test_cluster_launch_without_dashes_carries_the_command(where):
    dashed, given = (
        CliRunner().invoke(app, ["launch", *where, "--dry-run", *dashes, *COMMAND]) for dashes in (["--"], [])
    )
    assert (dashed.exit_code, given.exit_code) == (0, 0), given.output
    assert dashed.stdout == given.stdout


def test_dry_run_of_a_node_prints_each_process(started):
    launch = ["launch", "node", "--nproc", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--dry-run"]
    done = CliRunner().invoke(app, [*launch, "--", "pretrain", "gpt", "--data-path", "a b"])
    assert (done.exit_code, started) == (0, [])
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    place = [["WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=h", sys.executable, "-m", "dynmo_train"]] * 2
    assert [line[2:8] for line in lines] == place
    assert [line[:2] for line in lines] == [["RANK=2", "LOCAL_RANK=0"], ["RANK=3", "LOCAL_RANK=1"]]
    assert lines[0][8:] == ["pretrain", "gpt", "--data-path", "a b"]


def test_hostfile_launch_without_file_runs_here(monkeypatch):
    runs = []
    monkeypatch.setattr(cluster, "run_processes", lambda words, nproc, *_: runs.append((list(words), nproc)) or 3)
    here = ["launch", "hostfile", "--num_nodes", "1", "--num_gpus", "2"]
    done = CliRunner().invoke(app, [*here, "pretrain", "gpt", "--seq-length", "3"])
    assert done.exit_code == 3
    assert runs == [(["pretrain", "gpt", "--seq-length", "3"], 2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--num-nodes", "2", "--num-gpus", "1"], "this machine alone"), (["-i", "other", "--num-gpus", "1"], "'other'")],
)
def test_hostfile_launch_without_file_is_one_machine(options, words):
    done = CliRunner().invoke(app, ["launch", "hostfile", *options, "pretrain", "gpt"])
    assert words in str(done.exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-nodes", "3"], "--num-nodes 3: the hostfile has 2 hosts"),
        (["--num-nodes", "2", "-i", "a"], "--num-nodes 2: the hostfile with --include has 1 host;"),
        (["--num-nodes", "2", "-e", "a"], "--num-nodes 2: the hostfile with --exclude has 1 host;"),
        (["--num-gpus", "5"], "--num-gpus 5: a, b has fewer slots"),
        (["--num-nodes", "1", "--least", "2"], "--least 2 is more than the 1 host"),
    ],
)
def test_hostfile_launch_with_more_than_the_hostfile_has_is_refused(tmp_path, options, words):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    launch = ["launch", "hostfile", "--hostfile", str(tmp_path / "hosts"), "--dry-run"]
    done = CliRunner().invoke(app, [*launch, *options, "pretrain", "gpt"])
    assert words in str(done.exception)


def test_hostfile_launch_here_with_more_than_the_chosen_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    launch = ["launch", "hostfile", "--dry-run", "--num-gpus", "3", "-i", "localhost:0,1"]
    done = CliRunner().invoke(app, [*launch, "pretrain", "gpt"])
    assert "--num-gpus 3: the filters leave 2" in str(done.exception)


def test_options_behind_dashes_are_refused_with_the_remedy(started):
    done = CliRunner().invoke(app, ["launch", "local", "--", "--nproc", "2", "pretrain"])
    assert "cannot begin with the option --nproc" in str(done.exception)
    assert started == []


def test_slurm_asks_for_cpus_by_default_and_as_told():
    def head(*options):
        done = CliRunner().invoke(app, ["launch", "slurm", "--dry-run", *options, "--", *COMMAND])
        assert done.exit_code == 0, done.output
        return [line for line in done.stdout.splitlines() if "--cpus-per-task" in line]

    assert head("--nproc", "8", "--gpus", "8") == ["#SBATCH --cpus-per-task=32", "  --cpus-per-task=32"]
    assert head("--nproc", "8", "--cpus-per-task", "96") == ["#SBATCH --cpus-per-task=96", "  --cpus-per-task=96"]
    assert head("--nproc", "8", "--cpus-per-task", "0") == []


def test_elastic_indexed_job_is_refused_by_an_older_kubernetes():
    launch = ["launch", "kubernetes", "--image", "i", "--kind", "indexed-job", "--nodes", "2:4", "--dry-run"]
    done = CliRunner().invoke(app, [*launch, "--", *COMMAND])
    assert "# Needs Kubernetes 1.31 or newer (Job.spec.successPolicy).\n" in done.stdout
    done = CliRunner().invoke(app, [*launch, "--kubernetes-version", "1.29", "--", *COMMAND])
    assert "--kubernetes-version 1.29: the manifest needs Kubernetes 1.31" in str(done.exception)
