"""Random faults during training, data preparation and conversions of checkpoints, and the bits that follow.

    bin/fault-campaign --minutes 30 --seed 1
    bin/fault-campaign --minutes 30 --seed 1 --kind "power loss" --kind SIGKILL --output DIR

Each episode draws a fault, a workload and a time from the seed and its number, and runs in a folder of its own::

    start -> fault at a random time -> end of all processes -> checks -> same command again -> same bits

``campaign_faults.py`` is the table of faults, ``campaign_workloads.py`` that of workloads, ``campaign_episode.py`` has
the checks. With ``--output`` the lines of episodes are in ``DIR/episodes.jsonl``, folders of lost episodes are kept,
and a later campaign of the same seed continues with the next episode. Exit code 0: nothing was lost; 1: something was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from random import Random

from tests.faults.campaign_episode import Episode, LostError, Reference, measure
from tests.faults.campaign_faults import FAULTS, Fault, pairs
from tests.faults.campaign_workloads import HALF_RUN, WORKLOADS, Workload, write_campaign_inputs
from tests.faults.forked_programs import (
    Command,
    Counter,
    become_subreaper,
    count_file_calls,
    end_descendants,
    preload,
)
from tests.faults.network_hosts import end_fork, exit_code

LINES = "episodes.jsonl"


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Campaign:
    """Inputs, references and lines of a campaign in its folder."""

    def __init__(self, folder: Path, seed: int, limit_s: float) -> None:
        self.folder, self.seed, self.limit_s = folder.resolve(), seed, limit_s
        self.inputs, self.half_run = self.folder / "inputs", self.folder / "half"
        self.references: dict[str, Reference] = {}

    def episode(self, workload: Workload, folder: Path, random: Random) -> Episode:
        """A new episode in an empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Episode(
            workload=workload,
            folder=folder,
            place=folder / "work",
            inputs=self.inputs / "in",
            half_run=self.half_run / "work",
            random=random,
            references=self.references,
            limit_s=self.limit_s,
        )

    def prepare(self, workloads: Iterable[Workload]) -> None:
        """Make the inputs, and run each workload undisturbed where that is not done yet."""
        if not (self.inputs / "done").exists():
            shutil.rmtree(self.inputs, ignore_errors=True)
            write_campaign_inputs(self.inputs, self._run)
            (self.inputs / "done").touch()
        named = {
            name: WORKLOADS[name] for workload in workloads for name in (workload.reference, workload.name) if name
        }
        for name, workload in named.items():
            self.references[name] = self._reference(workload)
        if "train" in named and not (self.half_run / "done").exists():
            self._in_fork(lambda: self._half())
            (self.half_run / "done").touch()

    def _half(self) -> None:
        episode = self.episode(WORKLOADS["train"], self.half_run, Random(0))
        episode.prepare()
        episode.start(command=HALF_RUN)
        if any(codes := episode.wait()):
            raise LostError(f"the half run exits with {codes}: {episode.message()}")

    def _run(self, command: Command, folder: Path) -> None:
        """Run a command for the inputs."""

        def run() -> None:
            episode = self.episode(WORKLOADS["train"], self.folder / "making", Random(0))
            episode.place = folder
            episode.start(command=command)
            if any(codes := episode.wait()):
                raise LostError(f"{command.words} exits with {codes}: {episode.message()}")

        self._in_fork(run)

    def _reference(self, workload: Workload) -> Reference:
        path = self.folder / "references" / f"{workload.name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)

            def run() -> None:
                counter, is_counted = Counter(), workload.command.ranks == 1 and not workload.has_launcher
                episode = self.episode(workload, self.folder / "reference", Random(0))
                patch = count_file_calls(counter, 0) if is_counted else None
                found = measure(episode, patch, lambda: counter.value)
                path.with_suffix(".new").write_text(json.dumps(asdict(found)))
                path.with_suffix(".new").rename(path)

            self._in_fork(run)
        return Reference(**json.loads(path.read_text()))

    def _in_fork(self, action: Callable[[], None]) -> None:
        """Run an action in a process of its own, whose descendants end with it."""
        pid = fork(action)
        while (code := exit_code(pid)) is None:
            time.sleep(0.01)
        if code:
            raise SystemExit(f"fault-campaign: error: the undisturbed runs fail; see {self.folder}")

    def play(self, number: int, fault: Fault, workload: Workload) -> None:
        """Play an episode and append its line."""
        random = Random(self.seed * 100_003 + number)
        episode = self.episode(workload, self.folder / f"episode-{number}", random)
        begin, problem = time.monotonic(), ""
        try:
            fault.inject(episode)
        except LostError as error:
            problem = str(error)
        except (OSError, ValueError, KeyError, IndexError) as error:
            problem = f"the campaign itself fails: {type(error).__name__}: {error}"
            (episode.folder / "campaign.txt").write_text(traceback.format_exc())
        end_descendants()
        record = {
            "episode": number,
            "seed": self.seed,
            "fault": fault.name,
            "workload": workload.name,
            "tries": episode.tries,
            "problem": problem,
            "seconds": round(time.monotonic() - begin, 1),
            "notes": episode.notes,
        }
        with open(self.folder / LINES, "a") as lines:
            lines.write(json.dumps(record) + "\n")
        result = f"LOST: {problem} | {episode.folder}" if problem else "survived"
        report(
            f"{number} | {fault.name} | {workload.name} | {'; '.join(episode.notes)} | {record['seconds']} s | {result}"
        )
        if not problem:
            shutil.rmtree(episode.folder, ignore_errors=True)

    def records(self) -> list[dict]:
        """The lines of all episodes."""
        path = self.folder / LINES
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fork(action: Callable[[], None]) -> int:
    """Run an action in a forked process that ends its descendants; the process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become_subreaper()
        action()
        code = 0
    except LostError as error:
        report(f"error: {error}")
    finally:
        with contextlib.suppress(OSError):
            end_descendants()
        end_fork(code)
    return 0


def table(records: list[dict]) -> str:
    """The faults with their tries, as a Markdown table."""
    rows = ["| fault | workloads | episodes | tries | survived | lost |", "|---|---|--:|--:|--:|--:|"]
    total = [0, 0, 0]
    for fault in FAULTS:
        own = [record for record in records if record["fault"] == fault.name]
        areas = ", ".join(sorted({record["workload"].partition("-")[0] for record in own}))
        tries, lost = sum(record["tries"] for record in own), sum(bool(record["problem"]) for record in own)
        if own:
            rows.append(f"| {fault.name} | {areas} | {len(own)} | {tries} | {tries - lost} | {lost} |")
            total = [total[0] + len(own), total[1] + tries, total[2] + lost]
    rows.append(f"| all | | {total[0]} | {total[1]} | {total[1] - total[2]} | {total[2]} |")
    return "\n".join(rows)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="fault-campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="Minutes after which no episode starts.")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="Number of the last episode, excluded.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first episode, to repeat one.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of faults, workloads and times.")
    parser.add_argument("--kind", action="append", default=[], help="Part of a fault's name; repeatable.")
    parser.add_argument("--workload", action="append", default=[], help="Start of a workload's name; repeatable.")
    parser.add_argument("--parallel", type=int, default=1, help="Episodes at the same time.")
    parser.add_argument("--limit-s", type=float, default=600.0, help="Seconds after which a command hangs.")
    parser.add_argument("--output", type=Path, help="Folder of results; a campaign in it is continued.")
    parser.add_argument("--table", action="store_true", help="Print the table of a finished campaign only.")
    given = parser.parse_args(words)
    if given.table and given.output is None:
        parser.error("--table prints the table of --output; give --output")
    return given


def main() -> int:
    """Run the campaign; 0 if nothing was lost."""
    given = parse()
    if given.table:
        report(table(Campaign(given.output, given.seed, given.limit_s).records()))
        return 0
    names = tuple(given.workload)
    choices = [pair for pair in pairs(given.kind) if not names or pair[1].name.startswith(names)]
    if not choices:
        faults, workloads = (", ".join(each.name for each in found) for found in (FAULTS, WORKLOADS.values()))
        report(
            f"fault-campaign: error: no fault of --kind applies to a workload of --workload; faults: {faults};"
            f" workloads: {workloads}"
        )
        return 2
    for fault in FAULTS:
        if (reason := fault.reason_to_skip()) is not None:
            report(f"skipped: {fault.name}: {reason}")
    folder = given.output or Path(tempfile.mkdtemp(prefix="dynmo-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(folder, given.seed, given.limit_s)
    os.environ.update(OMP_NUM_THREADS="1", TZ="UTC")
    preload({"dynmo-prep", *(workload.command.program for _, workload in choices)})
    campaign.prepare(workload for fault, workload in choices if fault.needs_reference)
    first = max((record["episode"] + 1 for record in campaign.records()), default=given.first)
    run_episodes(campaign, choices, range(first, given.episodes), given.parallel, given.minutes)
    records = campaign.records()
    lost = sum(bool(record["problem"]) for record in records)
    report(table(records))
    if not lost and given.output is None:
        shutil.rmtree(folder)
    return min(1, lost)


def draw(choices: list[tuple[Fault, Workload]], seed: int, number: int) -> tuple[Fault, Workload]:
    """The fault and workload of an episode: each fault equally often, then one of its workloads."""
    faults = list({fault.name: fault for fault, _ in choices}.values())
    order = Random(seed * 7919 + number // len(faults)).sample(faults, len(faults))
    fault = order[number % len(faults)]
    areas = sorted({workload.area for each, workload in choices if each is fault})
    random = Random(seed * 104_729 + number)
    area = random.choice(areas)
    return random.choice([pair for pair in choices if pair[0] is fault and pair[1].area == area])


def run_episodes(
    campaign: Campaign, choices: list[tuple[Fault, Workload]], numbers: range, parallel: int, minutes: float
) -> None:
    """Play episodes, some at the same time, until the numbers or the time are used up."""
    end, running, waiting = time.monotonic() + minutes * 60, set[int](), iter(numbers)
    while True:
        while len(running) < parallel and time.monotonic() < end and (number := next(waiting, None)) is not None:
            fault, workload = draw(choices, campaign.seed, number)
            running.add(fork(lambda n=number, f=fault, w=workload: campaign.play(n, f, w)))  # type: ignore[misc]
        if not running:
            return
        running -= {pid for pid in running if exit_code(pid) is not None}
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
