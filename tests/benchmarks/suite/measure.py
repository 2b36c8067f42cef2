"""Programs of a case, run in turns.

Ours, the peer, ours, the peer: whatever else the machine does falls on both.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class BenchmarkError(Exception):
    """A program of a case failed; the message has the command and the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command whose value is its wall time, or a number that it prints.

    Attributes:
        command: Program and arguments. ``{out}`` stands for a path that does not exist before the command runs and is
            removed after it.
        printed: Key of the number in the JSON object that is the last line of stdout; None for the wall time in s.
        missing: Why the program cannot run here; such a program is reported and not run.
        environment: Variables in addition to those of this process.
    """

    command: list[str]
    printed: str | None = None
    missing: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        name: Unique name; ``area-what``.
        area: prep, train, plan, ckpt or help.
        text: What is measured, in one sentence.
        unit: Unit of the values.
        higher_is_better: True for rates; ratios are always above 1 where ours is better.
        quick: Whether ``--quick`` includes it.
        warm_up: Whether each program runs once more before the repetitions, to fill caches.
        repeatable: Whether the value can differ between repetitions; if not, there is one.
        ours: Name of our program, as the result names it.
        programs: Our program and its peers, by name, made in a working directory; inputs are prepared here, untimed.
    """

    name: str
    area: str
    text: str
    unit: str
    ours: str
    programs: Callable[[Path], dict[str, Program]]
    higher_is_better: bool = False
    quick: bool = True
    warm_up: bool = True
    repeatable: bool = True


def run_once(program: Program, work: Path) -> float:
    """One repetition.

    Args:
        program: What to run.
        work: Existing working directory.

    Returns:
        Seconds of wall time, or the printed number.

    Raises:
        BenchmarkError: the command fails or prints no such number.
    """
    out = work / "out"
    command = [word.replace("{out}", str(out)) for word in program.command]
    environment = {**os.environ, **program.environment}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    elapsed_s = time.perf_counter() - started
    for path in work.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if done.returncode:
        end = (done.stdout + done.stderr)[-4000:]
        raise BenchmarkError(f"{' '.join(command)}\nfailed with exit code {done.returncode}:\n{end}")
    if program.printed is None:
        return elapsed_s
    try:
        return float(json.loads(done.stdout.strip().splitlines()[-1])[program.printed])
    except (IndexError, ValueError, KeyError) as error:
        raise BenchmarkError(f"{' '.join(command)}\nprinted no {program.printed}: {done.stdout[-500:]}") from error


def summary_of(values: list[float]) -> dict[str, Any]:
    """Median, least and greatest of repetitions, and the spread: (greatest - least) / median."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median if median else 0.0
    return {"values": values, "median": median, "min": min(values), "max": max(values), "spread": spread}


def portable(words: list[str], work: Path) -> str:
    """A command line as it would be on another machine: places are named, not spelled out.

    Args:
        words: Program and arguments.
        work: Directory of the case's files, ``DIR`` in the result.
    """
    places = {str(work): "DIR", sys.executable: "python", f"{Path(sys.executable).parent}/": "", f"{ROOT}/": ""}
    peers = {name: os.environ.get(name) for name in ("PEER_PYTHON", "PEER_MEGATRON", "PEER_NANOGPT")}
    # Longest first: one place may lie in another one.
    named = sorted(
        (places | {path: f"${name}" for name, path in peers.items() if path}).items(), key=lambda p: -len(p[0])
    )
    line = shlex.join(words)
    for path, name in named:
        line = line.replace(path, name)
    return line


def run_case(case: Case, work: Path, *, repeats: int, with_peers: bool, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure a case.

    Args:
        case: What to measure.
        work: Empty directory for its files.
        repeats: Repetitions of each program.
        with_peers: Whether peers run too.
        log: Takes a line of progress.

    Returns:
        The case's entry of the result document.

    Raises:
        BenchmarkError: our program fails. A peer that fails is reported in the result.
    """
    programs = case.programs(work)
    if not with_peers:
        programs = {case.ours: programs[case.ours]}
    missing = {name: program.missing for name, program in programs.items() if program.missing}
    values: dict[str, list[float]] = {name: [] for name in programs if name not in missing}
    repeats = repeats if case.repeatable else 1
    for turn in range(0 if case.warm_up else 1, repeats + 1):
        for name in list(values):
            try:
                value = run_once(programs[name], work)
            except BenchmarkError as error:
                if name == case.ours:
                    raise
                missing[name] = f"failed: {str(error).splitlines()[-1][:200]}"
                del values[name]
                continue
            if turn:
                values[name].append(value)
        log(f"{case.name}: {'warm-up' if turn == 0 else f'repetition {turn} of {repeats}'}")
    results = {name: summary_of(found) for name, found in values.items()}
    ours = results[case.ours]["median"]
    for name, result in results.items():
        if name != case.ours:
            result["ratio"] = ours / result["median"] if case.higher_is_better else result["median"] / ours
    return {
        "name": case.name,
        "area": case.area,
        "text": case.text,
        "unit": case.unit,
        "higher_is_better": case.higher_is_better,
        "ours": case.ours,
        "programs": results,
        "missing": missing,
        "commands": {name: portable(programs[name].command, work) for name in results},
    }
