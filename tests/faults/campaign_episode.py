"""One episode of the fault campaign: a workload that is started, disturbed, started again, and compared.

The checks hold after each disturbance, whatever it was:

* every process ends within a limit, and leaves no process behind;
* no traceback is printed, a failure prints a message, and no process ends by a signal that nobody sent;
* what has its final name is whole: files of data preparation, converted checkpoints, and saved steps;
* after at most a few starts of the same command, the bits are those of the undisturbed run.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dynmo_ckpt.operations.verify import full_findings
from tests.distributed.ports import free_port
from tests.faults.campaign_workloads import Result, Workload
from tests.faults.forked_programs import Command, Patch, Process, descendants, end_descendants, start
from tests.faults.network_hosts import exit_code

MAX_STARTS = 6
TRACEBACK = "Traceback (most recent call last)"


class LostError(Exception):
    """An episode that ended otherwise than it must."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An undisturbed run.

    Attributes:
        result: its bits.
        cpu_s: processor seconds of its processes.
        file_calls: calls to the file system of its first process; 0 where they were not counted.
        num_bytes: size of what it wrote.
    """

    result: Result
    cpu_s: float
    file_calls: int
    num_bytes: int


def folder_bytes(folder: Path) -> int:
    """Size of all files in blocks of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def _readable_text(path: Path) -> str:
    """The text of a file; empty where the disk, which fails, does not give it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(kw_only=True)
class Episode:
    """A workload in a folder of its own, and what has happened to it.

    Attributes:
        workload: what runs.
        folder: logs and mounts.
        place: where the command runs.
        inputs: the inputs of all workloads, to copy.
        half_run: a run of half the steps, to damage.
        random: the draws of this episode.
        references: undisturbed runs by workload.
        limit_s: seconds after which a process hangs.
        tries: disturbances that happened.
        notes: what they were.
        sent: signals that processes got from the campaign.
    """

    workload: Workload
    folder: Path
    place: Path
    inputs: Path
    half_run: Path
    random: Random
    references: dict[str, Reference]
    limit_s: float
    tries: int = 0
    notes: list[str] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    starts: int = 0
    logs: dict[int, Path] = field(default_factory=dict)

    @property
    def reference(self) -> Reference:
        """The undisturbed run of this workload."""
        return self.references[self.workload.name]

    @property
    def expected(self) -> Result:
        """The bits that the workload must have at its end."""
        return self.references[self.workload.reference or self.workload.name].result

    def prepare(self, place: Path | None = None) -> None:
        """Copy the inputs to where the command runs."""
        self.place = place or self.place
        self.place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.inputs, self.place / "in")

    def disturbed(self, note: str) -> None:
        """Count a disturbance."""
        self.tries += 1
        self.notes.append(note)

    # ------------------------------------------------------------ processes

    def start(self, patch: Patch | None = None, command: Command | None = None) -> list[int]:
        """Start the command of the workload, or another one; the ids of its first processes."""
        command = command or self.workload.command
        self.starts += 1
        self.sent.clear()
        logs = [self.folder / f"log-{self.starts}-{rank}" for rank in range(command.ranks)]
        pids = start(command, self.place, logs, free_port() if command.ranks > 1 else 0, patch)
        self.logs = dict(zip(pids, logs, strict=True))
        return pids

    def _polls(self, what: str) -> Iterator[None]:
        end = time.monotonic() + self.limit_s
        while time.monotonic() < end:
            yield
            time.sleep(0.02)
        shown = ", ".join(f"{each.role} {each.state}" for each in descendants())
        raise LostError(f"hang: {what} within {self.limit_s:.0f} s; processes: {shown}")

    def reach(self, share: float) -> list[Process]:
        """Wait until the processes have used a share of the processor time of an undisturbed run.

        Returns:
            The living processes; none if the command ended before.
        """
        for _ in self._polls("no progress"):
            # Not reaped here: ``wait`` reads their exit codes.
            living = [each for each in descendants() if each.role != "tracker"]
            if not {each.pid for each in living} & set(self.logs):
                return []
            if sum(each.cpu_s for each in living) >= share * self.reference.cpu_s:
                return living
        return []

    def send(self, process: Process, number: int) -> bool:
        """Send a signal; whether the process was still there."""
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return False
        self.sent.add(number)
        return True

    def wait(self) -> list[int]:
        """Wait for the end of the command and of all its processes; exit codes of its first processes.

        Raises:
            LostError: a check of the module's docstring fails.
        """
        codes: dict[int, int] = {}
        for _ in self._polls("the command does not end"):
            for pid in set(self.logs) - set(codes):
                if (code := exit_code(pid)) is not None:
                    codes[pid] = code
            if len(codes) == len(self.logs):
                break
        for _ in self._polls("processes outlive the command"):
            if not [each for each in descendants() if each.role != "tracker"]:
                break
        end_descendants()
        self._check_messages(codes)
        return [codes[pid] for pid in self.logs]

    def _check_messages(self, codes: dict[int, int]) -> None:
        texts = {pid: log.read_text(errors="replace") if log.exists() else "" for pid, log in self.logs.items()}
        others = [path for name in ("logs", "run") for path in (self.place / name).rglob("*log*") if path.is_file()]
        for text in (*texts.values(), *map(_readable_text, others)):
            if TRACEBACK in text:
                raise LostError(f"traceback: {text.strip().splitlines()[-1]}")
            if "No such option" in text:  # no fault has disturbed anything
                raise LostError(f"wrong command line: {text.strip().splitlines()[-1]}")
        for pid, code in codes.items():
            if code < 0 and -code not in self.sent:
                raise LostError(f"a process ended by signal {-code}, which nobody sent")
            is_terminated = code == 128 + signal.SIGTERM and signal.SIGTERM in self.sent
            if code > 0 and not is_terminated and not any(text.strip() for text in texts.values()):
                raise LostError(f"exit code {code} without a message ({pid})")

    def message(self) -> str:
        """The last lines that name an error, of the last start."""
        lines = [line for log in self.logs.values() for line in log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "cannot" in line]
        return " | ".join(dict.fromkeys(errors[-2:] or lines[-1:]))[:300]

    # ------------------------------------------------------------ checks

    def check_committed(self) -> None:
        """What has its final name is whole."""
        if self.workload.area == "train":
            for step in sorted((self.place / "run" / "checkpoints").glob("step-*")):
                findings = list(full_findings(step, lambda *_: None))
                if findings:
                    raise LostError(f"{step.name} has its final name and is damaged: {str(findings[0])[:300]}")
            return
        found, expected = self.workload.result(self.place), self.expected
        hidden = {name for name in found if any(part.startswith(".") for part in Path(name).parts)}
        wrong = [name for name in found.keys() - hidden if found[name] != expected.get(name)]
        if wrong:
            raise LostError(f"{sorted(wrong)[0]} has its final name and differs from that of an undisturbed run")

    def finish(self, *, may_lose_lines: bool = False) -> None:
        """Start the command until it succeeds, and compare the bits.

        Raises:
            LostError: it does not succeed after a few starts, or its bits differ.
        """
        for _ in range(MAX_STARTS):
            self.start()
            codes = self.wait()
            # A command that refuses to replace its output was disturbed after its end: the output must be complete.
            if not any(codes) or "already exists" in self.message():
                self.compare(may_lose_lines=may_lose_lines)
                return
        raise LostError(f"no success after {MAX_STARTS} starts; exit codes {codes}: {self.message()}")

    def compare(self, *, may_lose_lines: bool = False) -> None:
        """Compare the bits with those of the undisturbed run; lines of steps may be missing if the fault took them."""
        try:
            found = self.workload.result(self.place)
        except (OSError, ValueError, KeyError) as error:
            raise LostError(f"success without a result: {type(error).__name__}: {error}") from error
        expected = self.expected
        if may_lose_lines:
            # Nor is what a killed command left under hidden names removed before the next start of that command.
            found = {key: value for key, value in found.items() if not key.startswith(".")}
            expected = {key: value for key, value in expected.items() if key in found or not key.startswith("step ")}
        wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        if wrong:
            raise LostError(f"{len(wrong)} of {len(expected)} bits differ, the first is {wrong[0]}")


def measure(episode: Episode, patch: Patch | None, calls: Callable[[], int]) -> Reference:
    """Run the workload of an episode undisturbed."""
    before = os.times()
    episode.prepare()
    inputs = folder_bytes(episode.place)
    episode.start(patch)
    if any(codes := episode.wait()):
        raise LostError(f"the undisturbed run of {episode.workload.name} exits with {codes}: {episode.message()}")
    after = os.times()
    return Reference(
        result=episode.workload.result(episode.place),
        cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
        file_calls=calls(),
        num_bytes=folder_bytes(episode.place) - inputs,
    )


SIGNAL_NAMES = {number: signal.Signals(number).name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)}
