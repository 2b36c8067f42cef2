"""The launchers of clusters from the command line, with stand-ins for the commands of schedulers: what they run, when.

The scripts themselves run for real, in bash; only the commands of the schedulers, and ssh, are small programs made
here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Each stand-in writes what it was asked into a file; the launcher's says its number, and ends as a file tells it to.
STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "blaunch": 'shift 2\nexec "$@"\n',
    "scontrol": ('if [[ $1 == show ]]; then printf "n%s\\n" 0 1 2; else echo "$@" >> "$PLACE/asked"; fi\n'),
    "scancel": 'echo "scancel $*" >> "$PLACE/asked"\npkill -TERM -f "$PLACE/dynmo-train" || true\n',
    "sbatch": 'echo "$PWD $*" >> "$PLACE/asked"\necho "41;cluster"\n',
    "bsub": 'cat > "$PLACE/bsub.txt"\necho "Job <7> is submitted"\n',
    "brequeue": 'echo "brequeue $*" >> "$PLACE/asked"\n',
    "kubectl": 'cat > "$PLACE/kubectl.txt"\necho "pytorchjob.kubeflow.org/dynmo created"\n',
    "dynmo-train": (
        "trap 'exit 143' TERM\n"
        'printf "%s\\n" "$NODE_RANK" "$MASTER_ADDR:$MASTER_PORT" "$@" > "$PLACE/node-$NODE_RANK"\n'
        'read -r seconds code < "$PLACE/ends-$NODE_RANK"\n'
        "if [[ $seconds == asked ]]; then until [[ -s $PLACE/asked ]]; do sleep 0.05; done\n"
        'else sleep "$seconds" & wait $!; fi\nexit "$code"\n'
    ),
}
TRAIN = ["--", "pretrain", "gpt", "--num-layers", "24", "--data-path", "my data", "--save", "run", "--load", "run"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in STAND_INS.items():
        program = tmp_path / name
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dynmo(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "dynmo_train", *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stderr
    return done


def run_script(place, text, ends, **environment):
    """Run a batch script as the scheduler would.

    Args:
        ends: seconds and exit code of each node; "asked" in place of seconds waits until a command was asked.
    """
    for node, (seconds, code) in enumerate(ends):
        (place / f"ends-{node}").write_text(f"{seconds} {code}\n")
    given = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[0-2]", "LSB_JOBID": "42"}
    return subprocess.Popen(["bash", "-c", text], cwd=place, env={**os.environ, **given, **environment})


def asked(place):
    file = place / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_a_slurm_script_starts_a_launcher_on_every_node(place):
    text = dynmo("launch", "slurm", "--nodes", 3, "--nproc", 8, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [(0, 0)] * 3, NUM_LAYERS="64").wait(600) == 0
    words = [(place / f"node-{node}").read_text().splitlines() for node in range(3)]
    assert [line[0] for line in words] == ["0", "1", "2"]
    assert {line[1] for line in words} == {"n0:20042"}
    assert words[1][2:] == [
        *("launch", "node", "--nproc", "8", "--nnodes", "3:3", "--job", "slurm-42", "--max-restarts", "3"),
        *(
            "--save-s",
            "120",
            "--log-dir",
            "logs/42",
            "--",
            "pretrain",
            "gpt",
            "--num-layers",
            "64",
            "--data-path",
            "my data",
        ),
        *("--save", "run", "--load", "run"),
    ]
    assert asked(place) == []


def test_a_node_that_is_done_early_is_given_back(place):
    text = dynmo("launch", "slurm", "--nodes", 3, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [("asked", 0), ("asked", 0), (0, 0)]).wait(600) == 0
    assert asked(place) == ["update JobId=42 NodeList=n0,n1"]


@pytest.mark.parametrize(("code", "requests"), [(75, ["requeue 42"]), (1, [])])
def test_a_launch_that_asks_for_another_goes_back_into_the_queue(place, code, requests):
    text = dynmo("launch", "slurm", "--nodes", 3, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [(0, code)] * 3).wait(600) == code
    assert asked(place) == requests


def test_before_the_time_is_over_it_saves_and_goes_back_into_the_queue(place):
    text = dynmo("launch", "slurm", "--nodes", 3, "--time", 10, "--dry-run", *TRAIN).stdout
    # The stand-ins announce that they run; by then the script must be ready for the signal.
    assert text.index("' USR1") < text.index('srun "${step[@]}"')
    job = run_script(place, text, [(3600, 0)] * 3)
    while len(list(place.glob("node-?"))) < 3:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(600) == 143
    assert asked(place) == ["scancel --signal=TERM 42", "requeue 42"]


def test_an_lsf_script_starts_a_launcher_on_every_host(place):
    (place / "hosts").write_text("n0\nn0\nn1\n")
    text = dynmo("launch", "lsf", "--nodes", 2, "--nproc", 4, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [(0, 0), (0, 75)], LSB_DJOB_HOSTFILE=str(place / "hosts")).wait(600) == 75
    assert (place / "node-1").read_text().splitlines()[:2] == ["1", "n0:20042"]
    assert "--nnodes\n2\n" in (place / "node-0").read_text()
    assert asked(place) == ["brequeue -e 42"]


def test_scripts_are_written_and_submitted(place):
    said = dynmo("launch", "slurm", "--script", "big.sbatch", *TRAIN).stderr
    assert "submitted 41;cluster (big.sbatch)" in said
    assert asked(place) == [f"{place} --parsable big.sbatch"]
    dynmo("launch", "lsf", *TRAIN)
    assert (place / "bsub.txt").read_text() == (place / "dynmo.lsf").read_text()
    said = dynmo("launch", "kubernetes", "--image", "i", *TRAIN).stderr
    assert "created" in said
    assert "kind: PyTorchJob" in (place / "kubectl.txt").read_text()


def test_without_the_scheduler_the_error_says_what_to_do(place, monkeypatch):
    for name in ("sbatch", "bsub", "kubectl"):
        (place / name).unlink()
    monkeypatch.setenv("PATH", str(place))
    assert (
        "sbatch: not found on PATH; print the script with --dry-run" in dynmo("launch", "slurm", *TRAIN, code=2).stderr
    )
    assert "kubectl: not found on PATH" in dynmo("launch", "kubernetes", "--image", "i", *TRAIN, code=2).stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("slurm", "--nodes", "4:2"), "--nodes 4:2: must have 1 <= MIN <= MAX"),
        (("node", "--nnodes", "x"), "--nnodes 'x': must be N or MIN:MAX"),
        (("slurm", "--in-job"), "SLURM_JOB_ID must be set"),
        (("slurm", "--nodes", "x"), "--nodes 'x': must be N or MIN:MAX"),
        (("slurm", "--partition", "a b"), "must not have blanks"),
        (("kubernetes", "--image", "i", "--kind", "trainjob", "--nodes", "1:2"), "must be a fixed number"),
        (("lsf", "--container", "docker"), "singularity or apptainer"),
        (("hostfile", "--hostfile", "none"), "none: no such file or directory"),
        (("hostfile", "--min-nodes", "3", "--num-gpus", "1"), "--min-nodes 3: must be 1 without --hostfile"),
        (("node", "--node-rank", "3", "--nnodes", "2"), "--node-rank 3: must be 0 to 1"),
    ],
)
def test_wrong_options_end_with_one_line(place, words, told):
    assert told in dynmo("launch", *words, *TRAIN, code=2).stderr


def test_a_launch_in_a_launch_is_refused(place):
    for kind in (("slurm",), ("lsf",), ("node",), ("kubernetes", "--image", "i")):
        assert "cannot start another launch" in dynmo("launch", *kind, "--", "launch", "local", code=2).stderr


def test_data_steps_run_as_jobs_of_kubernetes(place):
    shown = dynmo(
        *("launch", "kubernetes", "--kind", "job", "--job-name", "prepdata", "--image", "i", "--dry-run", "--claim"),
        *("fsx:/fsx", "--", "dynmo-prep", "binarize", "--input", "/fsx/oscar-1GB.jsonl"),
    ).stdout
    assert "kind: Job\n" in shown
    assert "- dynmo-prep\n" in shown
    assert "claimName: fsx" in shown


@pytest.mark.parametrize(("version", "seconds"), [("2.2", 15), ("2.3", 300)])
def test_trainjob_with_a_time_to_save_warns_where_it_cannot_have_it(place, version, seconds):
    job = ("--kind", "trainjob", "--image", "i", "--trainer-version", version, "--save-s", "300", "--dry-run")
    done = dynmo("launch", "kubernetes", *job, *TRAIN)
    words = done.stdout.split()
    assert words[words.index("--save-s") + 2].strip("'\"") == str(seconds)
    assert ("warning: --save-s 300: Kubeflow Trainer 2.2 cannot change" in done.stderr) == (seconds == 15)


def test_hosts_are_reached_as_the_file_says(place):
    (place / "hostfile").write_text("10.10.10.102 slots=8\n10.10.10.105 slots=8\n")
    shown = dynmo(
        *("launch", "hostfile", "--hostfile", "hostfile", "--master_port", "6000", "--dry-run"),
        *("-i", "10.10.10.102:4,5@10.10.10.105:4,5", *TRAIN),
    ).stdout.splitlines()
    assert [line.split()[:4] for line in shown] == [
        ["ssh", "-o", "BatchMode=yes", "10.10.10.102"],
        ["ssh", "-o", "BatchMode=yes", "10.10.10.105"],
    ]
    assert all("CUDA_VISIBLE_DEVICES=4,5" in line and "--nproc 2 --nnodes 2:2" in line for line in shown)
    assert "--node-rank 1 --master-addr 10.10.10.102 --master-port 6000" in shown[1]


def test_a_host_that_cannot_be_reached_ends_the_others(place):
    (place / "hostfile").write_text("good slots=1\nbad slots=1\n")
    reach = place / "reach"
    reach.write_text('#!/bin/bash\n[[ $1 == bad ]] && exit 255\necho $$ > "$PLACE/pid"\ncat > /dev/null\nexit 143\n')
    reach.chmod(0o755)
    said = dynmo("launch", "hostfile", "--hostfile", "hostfile", "--ssh", str(reach), *TRAIN, code=143).stderr
    assert "connection to bad failed" in said
    assert json.loads((place / "pid").read_text()) > 0
    assert not Path(f"/proc/{(place / 'pid').read_text().strip()}").exists()
