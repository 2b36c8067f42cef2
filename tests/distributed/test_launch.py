"""The launcher with real processes: what it shows, its exit codes, and that nothing is left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for, wait_for_exit

pytestmark = pytest.mark.distributed

LAUNCH = """
import sys
from pathlib import Path
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.elastic import restart
from dynmo_train.launch.options import ExitOptions
restart.FIRST_PAUSE_S = 0.1
nproc, log_dir, grace_s, save_s, restarts, program = sys.argv[1:7]
exits = ExitOptions(grace_s=float(grace_s), save_s=float(save_s), max_restarts=int(restarts))
launch = LocalLaunch(nproc=int(nproc), arguments=("first",), log_dir=Path(log_dir), exits=exits,
                     command=(sys.executable, "-c", program))
sys.exit(launch_local(launch))
"""

STUBBORN = """
import os, signal
from pathlib import Path
from dynmo_train.launch.worker import watch_launcher
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
watch_launcher(os.environ)
Path(f"part-{os.environ['RANK']}").write_text(str(os.getpid()))
os.replace(f"part-{os.environ['RANK']}", f"pid-{os.environ['RANK']}")
while True:
    signal.pause()
"""

BEGIN_RUN = """
import json, os, sys
from pathlib import Path
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"]
Path(f"seen-{start}-{rank}").write_text(json.dumps([os.environ["WORLD_SIZE"], *sys.argv[1:]]))
Path("run/requests").mkdir(parents=True, exist_ok=True)
def put(path, text):  # whole: a rank may be ended while it writes
    Path(f"{path}-{rank}").write_text(text)
    os.replace(f"{path}-{rank}", path)
put(os.environ["DYNMO_LAUNCH_FILE"], os.path.abspath("run"))
"""


def start(folder, program, *, nproc=2, grace_s=1.0, save_s=1.0, restarts=0):
    times = [str(grace_s), str(save_s), str(restarts)]
    command = [sys.executable, "-c", LAUNCH, str(nproc), str(folder / "logs"), *times, program]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def run(folder, program, **options):
    return finish(start(folder, program, **options))


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that has ended but was not waited for is a zombie; where the parent is gone it may stay one for a while.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_launcher_forms_a_group_and_prints_rank_0(tmp_path):
    program = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("sum", int(total), os.environ["OMP_NUM_THREADS"], os.environ["LOCAL_RANK"], flush=True)
print("talk", dist.get_rank(), sys.argv[1], file=sys.stderr)
dist.destroy_process_group()
"""
    code, out, err = run(tmp_path, program)
    assert (code, out, err) == (0, "sum 3 1 0\n", "talk 0 first\n")
    logs = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert logs == {"0": "sum 3 1 0\n", "1": "sum 3 1 1\n"}


def test_failure_ends_all_with_its_exit_code_and_message(tmp_path):
    program = (
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    while not os.path.exists('pid-0'):\n"
        "        time.sleep(0.01)  # a file of another process has no event\n    sys.exit('no such thing')\n" + STUBBORN
    )
    code, out, err = run(tmp_path, program, save_s=300.0)  # not the time that is for others' failures
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    place = f"rank 1 exited with code 1 on {socket.gethostname()}"
    assert err.startswith(f"dynmo-train: error: {place}: no such thing; its log is ")
    assert not lives(int((tmp_path / "pid-0").read_text()))


@pytest.mark.complete
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_launcher_ends_all_workers(tmp_path, number, code):
    process = start(tmp_path, STUBBORN)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two workers", process)
    process.send_signal(number)
    returned, _, err = finish(process)
    assert returned == code
    assert f"{number.name}: terminated | processes: 2" in err
    assert not any(lives(int(path.read_text())) for path in tmp_path.glob("pid-*"))


SAVES = """
import os, signal, sys, time
from pathlib import Path
from dynmo_train.trainer.signals import DistributedSignalHandler
from dynmo_train.launch.worker import watch_launcher
rank = os.environ["RANK"]
watch_launcher(os.environ)
with DistributedSignalHandler(None) as signal_handler:
    Path(f"part-{rank}").write_text(str(os.getpid()))
    os.replace(f"part-{rank}", f"pid-{rank}")
    while not signal_handler.received["terminate"]:
        time.sleep(0.05)  # signal.pause() would miss a signal that came before it
    time.sleep(1.5)  # longer than the grace
    Path(f"saved-{rank}").touch()
sys.exit(143)
"""


@pytest.mark.complete
def test_terminated_launch_waits_for_the_save(tmp_path):
    process = start(tmp_path, SAVES, grace_s=0.5, save_s=300.0)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two workers", process)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    for pid in [*pids, process.pid]:  # as Slurm does: the launcher and its workers
        os.kill(pid, signal.SIGTERM)
    returned, _, err = finish(process)
    assert (returned, err) == (143, "dynmo-train: SIGTERM: terminated | processes: 2\n")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert not any(map(lives, pids))


def test_workers_end_with_a_killed_launcher(tmp_path):
    process = start(tmp_path, STUBBORN)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two workers", process)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    process.kill()
    process.communicate()
    for pid in pids:
        wait_for_exit(pid)


@pytest.mark.complete
def test_restart_request_grows_the_run(tmp_path):
    program = BEGIN_RUN + (
        "if start == 'round-0':\n"
        "    put('run/requests/resize.json', '{\"workers\": 3}')\n"
        "    sys.exit(75)\n"
        "sys.exit(4 if start == 'round-1' else 0)\n"
    )
    code, _, err = run(tmp_path, program, restarts=1)
    assert code == 0, err
    place = str((tmp_path / "run").resolve())
    more = ["--run-dir", place, "--save", place, "--load", place, "--pipeline-model-parallel-size", "3"]
    grown, after_failure = (
        [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"seen-round-{start}-*"))] for start in (1, 2)
    )
    assert grown[0] == ["3", "first", *more]
    assert after_failure == [["3", "first", *more]] * 3
    assert err.count("processes: 3") == 2
    assert [path.name for path in (tmp_path / "run" / "requests").iterdir()] == ["resize.taken.json"]


def test_failed_run_is_restarted_up_to_the_limit(tmp_path):
    program = BEGIN_RUN + "sys.exit(4 if start != 'round-2' else 0)\n"
    code, _, err = run(tmp_path, program, nproc=1, restarts=2)
    assert code == 0, err
    assert "--load" in (tmp_path / "seen-round-2-0").read_text()
    assert "restart 2 of 2 in 0.1 s: the run saved nothing since the last restart" in err
    other = tmp_path / "other"
    other.mkdir()
    code, _, _ = run(other, program.replace("round-2", "round-9"), nproc=1, restarts=1)
    assert code == 4
    assert sorted(path.name for path in other.glob("seen-round-*")) == ["seen-round-0-0", "seen-round-1-0"]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (75, "a process requested a restart before it created a run directory"),
        (3, "rank 0 exited with code 3"),
        (2, ""),
    ],
)
def test_launcher_restarts_only_a_run(tmp_path, code, message):
    returned, _, err = run(tmp_path, f"import sys; sys.exit({code})", nproc=1, restarts=3)
    assert returned == code
    assert err.startswith(f"dynmo-train: error: {message}" if message else "")
    assert bool(err) == bool(message)
    assert "restarting from" not in err


@pytest.mark.complete
@pytest.mark.parametrize("restarts", [0, 3])
def test_log_folder_that_is_lost_during_the_launch_hides_no_error(tmp_path, restarts):
    lose = "if start == 'round-0':\n    os.rename('logs', 'old')\n    Path('logs').write_text('a file')\n"
    code, out, err = run(tmp_path, BEGIN_RUN + lose + "print(start)\nsys.exit(7)\n", nproc=1, restarts=restarts)
    assert "Traceback" not in err
    assert code == 7
    assert err.count("rank 0 exited with code 7") == 1 + restarts
    assert {f"round-{number}" for number in range(1, 1 + restarts)} <= set(out.split())
    assert ("the logs of this round are in memory: /dev/shm/" in err) == bool(restarts)
    for folder in re.findall(r"in memory: (\S+)", err)[:1]:
        shutil.rmtree(folder)
