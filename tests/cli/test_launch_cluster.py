"""Cluster launchers from the command line, with stubs for the commands of schedulers.

The generated scripts run in bash; only the scheduler commands and ssh are stubs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import table
from tests.waiting import wait_for

# Each stub records its arguments in a file; that of the launcher exits as another file determines.
STUBS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "blaunch": 'shift 2\nexec "$@"\n',
    "scontrol": ('if [[ $1 == show ]]; then printf "n%s\\n" 0 1 2; else echo "$@" >> "$PLACE/requests"; fi\n'),
    "scancel": 'echo "scancel $*" >> "$PLACE/requests"\npkill -TERM -f "$PLACE/dynmo-train" || true\n',
    "sbatch": 'echo "$PWD $*" >> "$PLACE/requests"\necho "41;cluster"\n',
    "bsub": 'cat > "$PLACE/bsub.txt"\necho "Job <7> is submitted"\n',
    "brequeue": 'echo "brequeue $*" >> "$PLACE/requests"\n',
    "kubectl": 'cat > "$PLACE/kubectl.txt"\necho "pytorchjob.kubeflow.org/dynmo created"\n',
    "dynmo-train": (
        "trap 'exit 143' TERM\n"
        'printf "%s\\n" "$NODE_RANK" "$MASTER_ADDR:$MASTER_PORT" "$@" > "$PLACE/node-$NODE_RANK"\n'
        'read -r seconds code < "$PLACE/ends-$NODE_RANK"\n'
        "if [[ $seconds == requested ]]; then until [[ -s $PLACE/requests ]]; do sleep 0.05; done\n"
        'else sleep "$seconds" & wait $!; fi\nexit "$code"\n'
    ),
}
TRAIN = ["--", "pretrain", "gpt", "--num-layers", "24", "--data-path", "my data", "--save", "run", "--load", "run"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in STUBS.items():
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
        ends: seconds and exit code of each node; "requested" instead of seconds waits until a command was called.
    """
    for node, (seconds, code) in enumerate(ends):
        (place / f"ends-{node}").write_text(f"{seconds} {code}\n")
    given = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[0-2]", "LSB_JOBID": "42"}
    return subprocess.Popen(["bash", "-c", text], cwd=place, env={**os.environ, **given, **environment})


def requests(place):
    file = place / "requests"
    return file.read_text().splitlines() if file.exists() else []


def test_slurm_script_starts_a_launcher_per_node(place):
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
    assert requests(place) == []


@pytest.mark.complete
def test_slurm_script_finished_node_is_released(place):
    text = dynmo("launch", "slurm", "--nodes", 3, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [("requested", 0), ("requested", 0), (0, 0)]).wait(600) == 0
    assert requests(place) == ["update JobId=42 NodeList=n0,n1"]


@pytest.mark.complete
@pytest.mark.parametrize(("code", "expected"), [(75, ["requeue 42"]), (1, [])])
def test_slurm_script_exit_code_75_requeues_the_job(place, code, expected):
    text = dynmo("launch", "slurm", "--nodes", 3, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [(0, code)] * 3).wait(600) == code
    assert requests(place) == expected


@pytest.mark.complete
def test_slurm_script_time_limit_saves_and_requeues(place):
    text = dynmo("launch", "slurm", "--nodes", 3, "--time", 10, "--dry-run", *TRAIN).stdout
    # The stubs report that they run; by then the script must handle the signal.
    assert text.index("' USR1") < text.index('srun "${step[@]}"')
    job = run_script(place, text, [(3600, 0)] * 3)
    wait_for(lambda: len(list(place.glob("node-?"))) == 3, "three nodes", job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(600) == 143
    assert requests(place) == ["scancel --signal=TERM 42", "requeue 42"]


@pytest.mark.complete
def test_lsf_script_starts_a_launcher_per_host(place):
    (place / "hosts").write_text("n0\nn0\nn1\n")
    text = dynmo("launch", "lsf", "--nodes", 2, "--nproc", 4, "--dry-run", *TRAIN).stdout
    assert run_script(place, text, [(0, 0), (0, 75)], LSB_DJOB_HOSTFILE=str(place / "hosts")).wait(600) == 75
    assert (place / "node-1").read_text().splitlines()[:2] == ["1", "n0:20042"]
    assert "--nnodes\n2\n" in (place / "node-0").read_text()
    assert requests(place) == ["brequeue -e 42"]


HANG = ("--hang-factor", "5", "--hang-min-s", "300")


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.complete), HANG])
def test_batch_scripts_pass_options_of_the_watchdog_to_launchers(place, options):
    (place / "hosts").write_text("n0\n")
    for scheduler in ("slurm", "lsf"):
        text = dynmo("launch", scheduler, *options, "--dry-run", *TRAIN).stdout
        variables = {"LSB_DJOB_HOSTFILE": str(place / "hosts"), "SLURM_JOB_NODELIST": "n0"}
        assert run_script(place, text, [(0, 0)] * 3, **variables).wait(600) == 0
        words = (place / "node-0").read_text().splitlines()
        launcher = words[: words.index("--")]
        # Without the options the launchers have their own defaults.
        assert [word for word in launcher if word in HANG] == list(options)


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "indexed-job"])
def test_kubernetes_manifests_pass_options_of_the_watchdog_to_launchers(place, kind):
    words = dynmo("launch", "kubernetes", "--image", "i", "--kind", kind, *HANG, "--dry-run", *TRAIN).stdout.split()
    words = [word.strip("'\"") for word in words if word != "-"]
    at = words.index("--hang-factor")
    assert words[at : at + 4] == list(HANG)
    assert at < words.index("pretrain")


@pytest.mark.complete
def test_launch_hostfile_passes_options_of_the_watchdog_to_launchers(place):
    (place / "hostfile").write_text("10.10.10.102 slots=1\n10.10.10.105 slots=1\n")
    for file in (("--hostfile", "hostfile"), ("--num-gpus", "2")):
        shown = dynmo("launch", "hostfile", *file, *HANG, "--dry-run", *TRAIN).stdout.splitlines()
        assert shown
        assert all(" ".join(HANG) in line.partition(" -- ")[0] for line in shown)


def test_launch_hostfile_with_this_machine_alone_needs_no_ssh(place):
    for host, has_ssh in (("localhost", False), (socket.gethostname(), False), ("192.0.2.1", True)):
        (place / "one").write_text(f"{host} slots=2\n")
        shown = dynmo("launch", "hostfile", "--hostfile", "one", "--dry-run", *TRAIN).stdout
        assert shown.startswith("ssh " if has_ssh else "dynmo-train launch local --nproc 2 "), shown
    (place / "one").write_text("localhost slots=2\n")
    words = ("launch", "hostfile", "--hostfile", "one", "--ssh", "rsh", "--dry-run", *TRAIN)
    assert dynmo(*words).stdout.startswith("rsh localhost ")


@pytest.mark.complete
def test_launch_scripts_are_written_and_submitted(place):
    errors = dynmo("launch", "slurm", "--script", "big.sbatch", *TRAIN).stderr
    assert "submitted 41;cluster (big.sbatch)" in errors
    assert requests(place) == [f"{place} --parsable big.sbatch"]
    dynmo("launch", "lsf", *TRAIN)
    assert (place / "bsub.txt").read_text() == (place / "dynmo.lsf").read_text()
    errors = dynmo("launch", "kubernetes", "--image", "i", *TRAIN).stderr
    assert "created" in errors
    assert "kind: PyTorchJob" in (place / "kubectl.txt").read_text()


def test_launch_missing_scheduler_names_the_remedy(place, monkeypatch):
    for name in ("sbatch", "bsub", "kubectl"):
        (place / name).unlink()
    monkeypatch.setenv("PATH", str(place))
    assert (
        "sbatch: not found on PATH; print the script with --dry-run" in dynmo("launch", "slurm", *TRAIN, code=2).stderr
    )
    assert "kubectl: not found on PATH" in dynmo("launch", "kubernetes", "--image", "i", *TRAIN, code=2).stderr


@table(
    ("words", "message"),
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
def test_launch_invalid_option_is_refused(train, place, words, message):
    code, _, err = train("launch", *words, *TRAIN)
    assert code == 2
    assert message in err


@pytest.mark.complete
@table("kind", [("slurm",), ("lsf",), ("node",), ("kubernetes", "--image", "i")])
def test_cluster_launch_nested_launch_is_refused(train, place, kind):
    code, _, err = train("launch", *kind, "--", "launch", "local")
    assert (code, "cannot start another launch" in err) == (2, True)


@pytest.mark.complete
def test_kubernetes_data_step_is_a_job(place):
    shown = dynmo(
        *("launch", "kubernetes", "--kind", "job", "--job-name", "prepdata", "--image", "i", "--dry-run", "--claim"),
        *("fsx:/fsx", "--", "dynmo-prep", "binarize", "--input", "/fsx/oscar-1GB.jsonl"),
    ).stdout
    assert "kind: Job\n" in shown
    assert "- dynmo-prep\n" in shown
    assert "claimName: fsx" in shown


@pytest.mark.complete
@pytest.mark.parametrize(("version", "seconds"), [("2.2", 15), ("2.3", 300)])
def test_trainjob_unsupported_grace_period_warns(place, version, seconds):
    job = ("--kind", "trainjob", "--image", "i", "--trainer-version", version, "--save-s", "300", "--dry-run")
    done = dynmo("launch", "kubernetes", *job, *TRAIN)
    words = done.stdout.split()
    assert words[words.index("--save-s") + 2].strip("'\"") == str(seconds)
    assert ("warning: --save-s 300: Kubeflow Trainer 2.2 cannot change" in done.stderr) == (seconds == 15)


@pytest.mark.complete
def test_launch_hostfile_prints_a_command_per_host(place):
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


@pytest.mark.complete
def test_launch_hostfile_unreachable_host_ends_the_others(place):
    (place / "hostfile").write_text("good slots=1\nbad slots=1\n")
    reach = place / "reach"
    reach.write_text('#!/bin/bash\n[[ $1 == bad ]] && exit 255\necho $$ > "$PLACE/pid"\ncat > /dev/null\nexit 143\n')
    reach.chmod(0o755)
    errors = dynmo("launch", "hostfile", "--hostfile", "hostfile", "--ssh", str(reach), *TRAIN, code=143).stderr
    assert "connection to bad failed" in errors
    assert json.loads((place / "pid").read_text()) > 0
    assert not Path(f"/proc/{(place / 'pid').read_text().strip()}").exists()
