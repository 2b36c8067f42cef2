"""Processes that a server forks, and those that are executed one by one: the same to the launcher and to themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynmo_train.launch.process_view import set_subreaper
from dynmo_train.launch.worker_start import WorkerServer, forked_by
from tests.distributed.test_launch import STUBBORN
from tests.waiting import wait_for

pytestmark = pytest.mark.distributed

LAUNCH = """
import sys
from pathlib import Path
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.options import ExitOptions
from dynmo_train.launch.elastic import restart
from dynmo_train.launch.worker_start import WorkerStart
restart.FIRST_PAUSE_S = 0.1
way, nproc, restarts = sys.argv[1:]
launch = LocalLaunch(nproc=int(nproc), arguments=("first", "second word"), log_dir=Path("logs"),
                     exits=ExitOptions(grace_s=1.0, save_s=1.0, max_restarts=int(restarts)),
                     command=(sys.executable, "-m", "probe"), worker_start=WorkerStart(way))
sys.exit(launch_local(launch))
"""

DESCRIBE = """
import ctypes, json, os, resource, signal, stat, sys, threading
from pathlib import Path
def variables(block):
    return dict(each.split("=", 1) for each in block.decode().split(chr(0)) if "=" in each)
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
view = Path("/proc/self")
status = (view / "status").read_text().splitlines()
blocked = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
found = {
    "argv": sys.argv[1:], "program": sys.argv[0], "orig_argv": sys.orig_argv, "path": sys.path,
    "name": __name__, "spec": __spec__.name, "main": sys.modules["__main__"].__file__,
    "environ": dict(os.environ), "getenv": libc.getenv(b"RANK").decode(),
    "cmdline": (view / "cmdline").read_bytes().decode(), "proc_environ": variables((view / "environ").read_bytes()),
    "comm": (view / "comm").read_text(), "cwd": os.getcwd(), "umask": os.umask(0o22),
    "is_leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "is_child": os.getppid() == int(os.environ["DYNMO_LAUNCHER_PID"]),
    "streams": [[stat.S_IFMT(os.fstat(n).st_mode), os.readlink(f"/proc/self/fd/{n}")] for n in (0, 1, 2)],
    "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "encoding": [sys.stdout.encoding, sys.stdin.closed], "signals": blocked,
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
    "affinity": sorted(os.sched_getaffinity(0)), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": [threading.active_count(), threading.current_thread().name],
}
Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
print("stdout", os.environ["RANK"])
print("stderr", os.environ["RANK"], file=sys.stderr)
os.write(1, b"raw\\n")
"""


def start(folder, way, program, *, nproc=2, restarts=0, **variables):
    (folder / "probe.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, way, str(nproc), str(restarts)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, way, program, **options):
    process = start(folder, way, program, **options)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def python_path(folder):
    """The path of modules with a folder before those of this process."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def children(pid):
    """Process id to command line of the children of a process that live."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        except FileNotFoundError:
            continue
    return found


def server_of(launcher):
    return next((pid for pid, words in children(launcher).items() if "worker_server" in words), None)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def described(folder, way):
    place = folder / way
    place.mkdir()
    code, out, err = run(place, way, DESCRIBE, PYTHONUNBUFFERED="")
    assert (code, out, err) == (0, "raw\nstdout 0\n", "stderr 0\n")
    logs = {path.parent.name + "/" + path.name: path.read_text() for path in (place / "logs").rglob("std*.log")}
    ranks = [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert found["proc_environ"] == found["environ"]
    return logs, ranks


def without_places(value, folder, way, launcher):
    """A description without what differs between any two launches: folder, process id, port, random names."""
    text = json.dumps(value).replace(str(folder / way), "FOLDER").replace(f"-{launcher}", "-PID")
    text = text.replace(value["environ"]["DYNMO_HEARTBEATS"], "MEMORY")
    found = json.loads(text)
    for name in ("environ", "proc_environ"):
        for key in ("MASTER_PORT", "DYNMO_LAUNCHER_PID", "DYNMO_HEARTBEATS", "TORCHELASTIC_ERROR_FILE"):
            found[name].pop(key)
    for stream in found["streams"]:
        stream[1] = Path(stream[1]).name
    return found


def test_forked_processes_are_the_same_to_themselves_and_to_ps(tmp_path):
    (fork_logs, forked), (spawn_logs, spawned) = (described(tmp_path, way) for way in ("fork", "spawn"))
    assert fork_logs == spawn_logs
    for rank, (found, expected) in enumerate(zip(forked, spawned, strict=True)):
        launchers = [each["environ"]["DYNMO_LAUNCHER_PID"] for each in (found, expected)]
        assert found["getenv"] == str(rank)
        assert found["is_child"]
        assert all(found["is_leader"])
        given = without_places(found, tmp_path, "fork", launchers[0])
        assert given == without_places(expected, tmp_path, "spawn", launchers[1])


@pytest.mark.complete
@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("sys.exit('no such thing')", 1, "no such thing"),
        ("raise ValueError('wrong value')", 1, "ValueError: wrong value"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.abort()", 134, "was killed by SIGABRT"),
        ("os._exit(9)", 9, "exited with code 9"),
    ],
)
def test_the_end_of_a_process_is_reported_alike(tmp_path, way, ending, code, text):
    program = f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {ending}\n" + STUBBORN
    returned, out, err = run(tmp_path, way, program)
    assert (returned, out) == (code, "")
    assert "rank 1" in err
    assert text in err
    assert len(err.splitlines()) == 1, err


@pytest.mark.complete
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_launcher_ends_forked_processes_and_the_server(tmp_path, number, code):
    process = start(tmp_path, "fork", STUBBORN)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two workers", process)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")] + [server_of(process.pid)]
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert all(map(has_ended, pids))


@pytest.mark.complete
def test_sigkill_of_the_launcher_leaves_neither_processes_nor_server(tmp_path):
    process = start(tmp_path, "fork", STUBBORN)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "two workers", process)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    server = server_of(process.pid)
    assert server is not None
    assert sorted([*pids, server]) == sorted(children(process.pid))
    process.kill()
    process.communicate(timeout=600)
    wait_for(lambda: all(map(has_ended, [*pids, server])), "the end of all processes")


def test_server_that_was_killed_is_replaced_at_the_next_fork(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []

    class Recorded(subprocess.Popen):
        """Servers of earlier tests may become children of this process, too: only these were started here."""

        def __init__(self, arguments, **options):
            super().__init__(arguments, **options)
            started.append((self.pid, arguments))

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    before = set_subreaper(is_subreaper=True)
    try:
        with WorkerServer() as server, open(os.devnull, "w") as nothing:
            assert server.is_usable()
            [(killed, words)] = started
            assert "dynmo_train.launch.worker_server" in words
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: has_ended(killed), "the end of the server")
            command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", "pass"]
            rank = server.fork(command, dict(os.environ), [nothing, nothing])
            assert [arguments[:3] for _, arguments in started] == [words[:3]] * 2
            assert not has_ended(started[1][0])
            assert rank.wait(60) == 0
    finally:
        set_subreaper(is_subreaper=bool(before))


RESTARTED = """
import os
from pathlib import Path
Path("run/requests").mkdir(parents=True, exist_ok=True)
launcher = os.getppid()
for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
    if b"worker_server" in Path(f"/proc/{child}/cmdline").read_bytes():
        Path(f"server-{os.environ['TORCHELASTIC_RUN_ID']}").write_text(child)
if KILLED and os.environ["TORCHELASTIC_RUN_ID"] == "round-0":
    os.kill(int(Path("server-round-0").read_text()), 9)
place = os.environ["DYNMO_LAUNCH_FILE"]
Path(f"{place}.part").write_text(os.path.abspath("run"))
os.replace(f"{place}.part", place)
raise SystemExit(75 if os.environ["TORCHELASTIC_RUN_ID"] == "round-0" else 0)
"""


@pytest.mark.complete
@pytest.mark.parametrize("killed", [False, True])
def test_restart_uses_the_same_server_and_another_one_if_it_was_killed(tmp_path, killed):
    code, _, err = run(tmp_path, "fork", f"KILLED = {killed}\n" + RESTARTED, nproc=1)
    assert code == 0, err
    servers = [(tmp_path / f"server-round-{number}").read_text() for number in range(2)]
    assert (servers[0] == servers[1]) is not killed


def test_thread_after_the_imports_is_reported_and_processes_are_executed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'dynmo_train.launch.worker_server' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    code, out, err = run(tmp_path, "fork", DESCRIBE, PYTHONPATH=python_path(tmp_path), PYTHONUNBUFFERED="")
    assert (code, out) == (0, "raw\nstdout 0\n")
    first, second = err.splitlines()
    assert first.startswith("dynmo-train: starting the processes without fork: 2 threads run after the imports")
    assert second == "stderr 0"


@pytest.mark.complete
def test_output_of_the_imports_is_in_the_log_of_every_process(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('imported', file=sys.stderr)\n")
    for way in ("fork", "spawn"):
        place = tmp_path / way
        place.mkdir()
        assert run(place, way, "", PYTHONPATH=python_path(tmp_path))[0] == 0
        logs = [path.read_text() for path in (place / "logs").rglob("stderr.log")]
        assert logs == ["imported\n"] * 2


def test_rank_whose_answer_a_signal_precedes_is_ended(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []
    command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", "import time; time.sleep(300)"]
    with WorkerServer() as server, open(os.devnull, "w") as nothing:
        assert server.is_usable()
        fork = server.fork

        def interrupted(*arguments):
            started.append(fork(*arguments).pid)
            raise KeyboardInterrupt

        monkeypatch.setattr(server, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt), forked_by(server):
            server.fork(command, dict(os.environ), [nothing, nothing])
    try:
        assert has_ended(started[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[0], signal.SIGKILL)
