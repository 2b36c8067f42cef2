"""`launch hostfile` over a real ssh: a server of our own on loopback, with keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ports import free_port
from tests.distributed.whole_runs import arguments, figures, lines, tensors, train, write_data
from tests.waiting import wait_for, wait_for_exit

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """The command that reaches 127.0.0.1 and localhost as two hosts."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs OpenSSH's sshd and ssh-keygen")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root separates its privileges there
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPermitRootLogin yes\nPasswordAuthentication no\n"
    )
    (folder / "config").write_text(
        f"Port {port}\nUser {getpass.getuser()}\nIdentityFile {folder}/user\nIdentitiesOnly yes\nBatchMode yes\n"
        f"UserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\nAddressFamily inet\n"
    )
    with open(folder / "log", "w") as log:
        running = subprocess.Popen([server, "-D", "-e", "-f", folder / "sshd_config"], stdout=log, stderr=log)
        try:
            wait_for(lambda: running.poll() is not None or answers(port), "answer of sshd")
            if running.poll() is not None:
                pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()[-300:]}")
            yield f"ssh -F {folder}/config"
        finally:
            running.terminate()
            running.wait(600)


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ssh-runs")
    data = write_data(folder / "data")
    train(data, folder / "static", 1)
    (folder / "hostfile").write_text("# two names of this machine\n127.0.0.1 slots=4\nlocalhost slots=2\n")
    return folder, data


def start(folder, ssh, *words):
    command = ["launch", "hostfile", "-H", "hostfile", "--ssh", ssh, "--master-port", str(free_port()), *words]
    return subprocess.Popen(
        [sys.executable, "-m", "dynmo_train", *command],
        cwd=folder,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    )


def test_launch_hostfile_selected_slots_train_together(ssh, static):
    folder, data = static
    run = folder / "two hosts"
    launcher = start(folder, ssh, "-i", "127.0.0.1:3@localhost:0", "--", *arguments(data, run))
    out, err = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, err
    assert " iteration       24/" in out
    assert figures(run) == figures(folder / "static")
    assert tensors(run, 24) == tensors(folder / "static", 24)
    (header,) = [record for record in lines(run / "profile.jsonl") if record["record"] == "header"]
    assert len(header["workers"]) == 2


def processes(text):
    """Numbers of the processes whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in words:
                found.append(int(entry.name))
    return found


def test_end_of_the_launcher_ends_the_hosts(ssh, static):
    folder, data = static
    run = folder / "stopped"
    command = arguments(data, run, train_iters="100000", eval_interval="100000")
    launcher = start(folder, ssh, "--exclude", "127.0.0.1:1,2,3@localhost:1", "--", *command)
    wait_for((run / "metrics.jsonl").exists, "step", launcher)
    devices = set()
    for pid in processes(str(run)):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        devices |= {word for word in variables if word.startswith(b"CUDA_VISIBLE_DEVICES=")}
    assert devices == {b"CUDA_VISIBLE_DEVICES=0"}
    launcher.kill()  # without a message to anybody: its connections end
    launcher.communicate()
    while left := processes(str(run)):  # again: a process may have started another one before it ended
        for pid in left:
            wait_for_exit(pid)


def test_launch_hostfile_host_without_a_server_is_named(ssh, static, tmp_path):
    folder, data = static
    (tmp_path / "hosts").write_text("nowhere.invalid slots=1\n")
    launcher = start(folder, ssh, "-H", str(tmp_path / "hosts"), "--", *arguments(data, folder / "none"))
    _, err = launcher.communicate(timeout=600)
    assert launcher.returncode != 0
    assert "connection to nowhere.invalid failed" in err
