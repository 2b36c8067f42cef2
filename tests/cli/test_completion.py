"""Completion in bash, zsh and fish: the scripts run in the shells themselves, where these are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynmo_balance._common.completion import current_shell, install, script
from dynmo_balance._common.errors import UsageError
from tests.cli.test_root_options import COMMANDS

BIN = Path(sys.executable).parent
# A line, and what completes its last word.
LINES = {
    "dynmo-prep": (["binarize", "--split-s"], "--split-sentences"),
    "dynmo-train": (["pretrain", "gpt", "--schedule", "zero"], "zero-bubble"),
    "dynmo-plan": (["simulate", "--transf"], "--transfers"),
    "dynmo-ckpt": (["convert", "--to", "leg"], "legacy"),
}


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def environment(**more):
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def run(*words, **more):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(**more))
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs("bash")
@pytest.mark.parametrize("prog", COMMANDS)
def test_bash_completes_a_line(prog):
    words, expected = LINES[prog]
    function = f"_{prog.replace('-', '_')}_completion"
    line = " ".join([prog, *words])
    program = (
        f"source <({prog} --show-completion bash); complete -p {prog} >/dev/null || exit 3; "
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; {function} {prog}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    assert run("bash", "--norc", "-c", program).splitlines() == [expected]


@needs("bash")
def test_bash_completes_a_value_after_an_equals_sign():
    program = (
        "source <(dynmo-train --show-completion bash); "
        "COMP_WORDS=(dynmo-train pretrain gpt --schedule = z); COMP_CWORD=5; "
        '_dynmo_train_completion dynmo-train; echo "${COMPREPLY[*]}"'
    )
    assert run("bash", "--norc", "-c", program).split() == ["zero-bubble", "zb-v"]


def test_completion_after_two_dashes_is_that_of_the_command():
    words = ["launch", "local", "--nproc", "4", "--", "pretrain", "gpt", "--schedule", "zb"]
    assert run(str(BIN / "dynmo-train"), *words, _DYNMO_TRAIN_COMPLETE="zsh").split() == ["zb-v"]


def test_completion_of_a_broken_line_is_empty():
    assert run(str(BIN / "dynmo-train"), "no-command", "--x", _DYNMO_TRAIN_COMPLETE="bash") == ""


@needs("fish")
@pytest.mark.parametrize("prog", COMMANDS)
def test_fish_completes_a_line(prog, tmp_path):
    words, expected = LINES[prog]
    program = f'{prog} --show-completion fish | source; complete -C "{" ".join([prog, *words])}"'
    found = run("fish", "--no-config", "-c", program, HOME=str(tmp_path))
    assert [line.split("\t")[0] for line in found.splitlines()] == [expected]


@needs("fish")
def test_fish_completes_files_where_no_words_are_known(tmp_path):
    (tmp_path / "corpus_text.bin").touch()
    source = "dynmo-train --show-completion fish | source"
    program = f"cd {tmp_path}; {source}; complete -C 'dynmo-train pretrain gpt --plan corp'"
    assert run("fish", "--no-config", "-c", program, HOME=str(tmp_path)).split() == ["corpus_text.bin"]


@needs("zsh")
@pytest.mark.parametrize("prog", COMMANDS)
def test_zsh_completes_a_line(prog, tmp_path):
    words, expected = LINES[prog]
    parent, child = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=child, stdout=child, stderr=child, env=environment(HOME=str(tmp_path), TERM="dumb")
    )
    os.close(child)
    try:
        setup = f"PS1=; autoload -Uz compinit; compinit -u -D; source <({prog} --show-completion zsh); echo re''ady\n"
        os.write(parent, setup.encode())
        read_until(parent, "ready")
        os.write(parent, f"{prog} {' '.join(words)}\t".encode())
        assert expected in read_until(parent, expected)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def read_until(terminal, text, seconds=60):
    """The output of a terminal up to a text."""
    output, end = "", time.monotonic() + seconds
    while text not in output and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 65536).decode(errors="replace")
    return output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_completion_is_read_at_start_and_written_once(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    startup = tmp_path / {"bash": ".bashrc", "zsh": ".zshrc", "fish": "none"}[shell]
    if shell != "fish":
        startup.write_text("alias ll='ls -l'")
    first = install("dynmo-plan", shell)
    assert first[0].read_text() == script("dynmo-plan", shell)
    text = startup.read_text() if startup.is_file() else ""
    assert install("dynmo-plan", shell) == first[:1]
    assert (startup.read_text() if startup.is_file() else "") == text
    assert shell == "fish" or text.startswith("alias ll='ls -l'\n")


@needs("bash")
def test_installed_completion_works_in_a_new_bash(tmp_path):
    run(str(BIN / "dynmo-plan"), "--install-completion", "bash", HOME=str(tmp_path))
    found = run("bash", "-c", "source ~/.bashrc; complete -p dynmo-plan", HOME=str(tmp_path))
    assert "_dynmo_plan_completion" in found


def test_show_completion_without_a_shell_is_that_of_the_parent(monkeypatch):
    assert run("bash", "--norc", "-c", "dynmo-plan --show-completion; true").startswith(
        "# Completion of dynmo-plan for bash"
    )
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    monkeypatch.setattr(os, "getppid", os.getpid)
    with pytest.raises(UsageError, match="give one of bash, zsh, fish"):
        current_shell()


@pytest.mark.parametrize(("prog", "package"), COMMANDS.items())
def test_completion_loads_no_heavy_module(prog, package):
    words, expected = LINES[prog]
    variable = f"_{prog.replace('-', '_').upper()}_COMPLETE"
    program = (
        f"import sys, {package}.cli as cli\nsys.argv = {[prog, *words]!r}\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'pydantic') if name in sys.modules])"
    )
    assert run(sys.executable, "-c", program, **{variable: "bash"}).splitlines() == [expected, "[]"]
