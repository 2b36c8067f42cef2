"""Random kills, drains, cuts and returns of hosts under real launchers, agents, stores and sockets.

    python -m tests.faults.membership_campaign --episodes 200 --seed 1 --parallel 3

Each episode is a launch over 3 to 5 hosts (network namespaces; root), with ``--nnodes MIN:MAX``. After its events all
hosts are connected, and those without a launcher may get one. Then the episode must show within 60 s and the time of a
restart:

* the members are all hosts with a launcher that is not drained, at no time fewer than the minimum;
* no host is a member twice;
* after the end of the run every launcher exits with 0;
* the bits are those of an undisturbed computation over the same sequence of layouts.

Workers are ``stand_in_worker.py``; every ``--trainer-every``-th episode runs the trainer, and its losses and gradient
norms at every step must be those of a run in one process. The same seed gives the same events.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.network_hosts import Network, end_fork, exit_code, fork_into, network, reason_to_skip, wait_until
from tests.faults.stand_in_worker import undisturbed
from tests.paths import ROOT

BOUND_S = 90.0
EVENTS = ("kill launcher", "lose power", "drain", "rolling restart", "cut", "cut briefly", "return", "restart node 0")
TRAIN_ITERS = 120


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class EpisodeError(Exception):
    """An episode that ended otherwise than it must."""


@dataclass
class Host:
    """A host of an episode.

    Attributes:
        pid: its launcher; None without one.
        is_cut: whether it is cut off.
    """

    pid: int | None = None
    is_cut: bool = False


@dataclass
class Episode:
    """A launch and what happens to it."""

    seed: int
    folder: Path
    hosts: Network
    nodes: list[Host]
    min_nodes: int
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    random: random.Random
    events: list[str] = field(default_factory=list)
    drained: int = 0

    def log(self, number: int) -> Path:
        """Output of the launchers of a host."""
        return self.folder / f"host-{number}.log"

    def start(self, number: int) -> None:
        """Start the launcher of a host."""
        self.nodes[number].pid = fork_into(self.hosts.names[number], self.log(number), lambda: self.launch(number))

    def launch(self, number: int) -> int:
        """The launcher of a host, in its process."""
        from dynmo_train.launch.elastic import membership, rendezvous, restart
        from dynmo_train.launch.launcher import LocalLaunch, launch_local
        from dynmo_train.launch.options import ExitOptions, NodeConfig

        os.environ["DYNMO_TEST_HOST"] = str(number)
        for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        rendezvous.FIRST_JOIN_S, restart.FIRST_PAUSE_S = 8.0, 0.0
        rendezvous.Limits = functools.partial(membership.Limits, quiet_s=1.0, max_wait_s=5.0)  # type: ignore[misc]
        launch = LocalLaunch(
            nproc=1,
            arguments=self.arguments,
            log_dir=self.folder / "logs",
            command=self.command,
            exits=ExitOptions(grace_s=1.0, save_s=20.0, max_restarts=10_000),
            nodes=NodeConfig(
                nnodes=f"{self.min_nodes}:{len(self.nodes)}",
                node_rank=number,
                master_addr="10.213.0.1",
                join_timeout_s=120.0,
                node_timeout_s=5.0,
                rejoin_s=5.0,
                reconnect_s=90.0,
            ),
        )
        return launch_local(launch)

    def living(self) -> list[int]:
        """Hosts with a launcher."""
        return [number for number, node in enumerate(self.nodes) if node.pid is not None]

    def end(self, number: int, *, signal_number: int) -> int:
        """Signal the launcher of a host and wait for its end; its exit code."""
        node = self.nodes[number]
        assert node.pid is not None
        os.kill(node.pid, signal_number)
        codes: list[int] = []

        def has_ended() -> bool:
            assert node.pid is not None
            code = exit_code(node.pid)
            if code is not None:
                codes.append(code)
            return code is not None

        if not wait_until(has_ended, BOUND_S):
            raise EpisodeError(f"the launcher of host {number} does not end after signal {signal_number}")
        node.pid = None
        return codes[0]

    def apply(self, event: str) -> None:
        """Let one event happen to a random host for which it is possible."""
        others = range(1, len(self.nodes))
        running = [n for n in others if self.nodes[n].pid is not None]
        reachable = [n for n in running if not self.nodes[n].is_cut]
        absent = [n for n in others if self.nodes[n].pid is None and not self.nodes[n].is_cut]
        choices = {
            "kill launcher": running,
            "lose power": running,
            "drain": reachable,
            "rolling restart": reachable,
            "cut": reachable,
            "cut briefly": reachable,
            "return": absent or [n for n in others if self.nodes[n].is_cut],
            "restart node 0": [0],
        }[event]
        if not choices:
            return
        number = self.random.choice(choices)
        self.events.append(f"{event} {number}")
        if event == "kill launcher":
            self.end(number, signal_number=signal.SIGKILL)
        elif event == "lose power":
            self.hosts.kill_all(number)
            self.end(number, signal_number=0)
        elif event in ("drain", "rolling restart"):
            self.drain(number)
            if event == "rolling restart":
                self.start(number)
        elif event in ("cut", "cut briefly"):
            self.hosts.connect(number, is_up=False)
            self.nodes[number].is_cut = True
            if event == "cut briefly":
                time.sleep(self.random.uniform(1.0, 9.0))  # shorter and longer than the node timeout
                self.connect(number)
        elif event == "return":
            if self.nodes[number].is_cut:
                self.connect(number)
            if self.nodes[number].pid is None:
                self.start(number)
        else:
            self.end(0, signal_number=self.random.choice([signal.SIGKILL, signal.SIGTERM]))
            self.start(0)

    def drain(self, number: int) -> None:
        """End a launcher by SIGTERM; it saves and exits with 143, or 1 where a failure came first."""
        code = self.end(number, signal_number=signal.SIGTERM)
        self.drained += 1
        if code != 143:
            raise EpisodeError(f"the drained launcher of host {number} exited with {code}")

    def connect(self, number: int) -> None:
        """End a cut."""
        self.hosts.connect(number, is_up=True)
        self.nodes[number].is_cut = False

    def recover(self) -> None:
        """End all cuts; start launchers, until there are enough of them and for some of the others."""
        for number in range(len(self.nodes)):
            if self.nodes[number].is_cut:
                self.connect(number)
        for number in range(len(self.nodes)):
            is_needed = len(self.living()) < self.min_nodes or self.random.random() < 0.5
            if self.nodes[number].pid is None and is_needed:
                self.events.append(f"return {number}")
                self.start(number)

    def check_alive(self) -> None:
        """No launcher ends before the run does."""
        for number in self.living():
            pid = self.nodes[number].pid
            if pid is not None and (code := exit_code(pid)) is not None:
                self.nodes[number].pid = None
                raise EpisodeError(f"the launcher of host {number} exited with {code}")

    def check_exits(self) -> None:
        """After the end of the run all launchers exit with 0."""
        codes: dict[int, int] = {}

        def have_ended() -> bool:
            for number in self.living():
                pid = self.nodes[number].pid
                if pid is not None and (code := exit_code(pid)) is not None:
                    codes[number], self.nodes[number].pid = code, None
            return not self.living()

        if not wait_until(have_ended, BOUND_S):
            raise EpisodeError(f"hosts {self.living()} still run after the end of the run")
        if any(codes.values()):
            raise EpisodeError(f"exit codes by host: {codes}")


def history(folder: Path) -> list[dict]:
    """Starts of the stand-in workers: step, state and hosts."""
    path = folder / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_history(episode: Episode) -> None:
    """Members of every round and the bits of every segment."""
    rounds = history(episode.folder)
    for entry in rounds:
        if len(set(entry["hosts"])) < max(episode.min_nodes, len(entry["hosts"])):
            raise EpisodeError(f"a round with the hosts {entry['hosts']}, minimum {episode.min_nodes}")
    step, state = json.loads((episode.folder / "checkpoint.json").read_text())
    ends = [*((entry["step"], entry["state"]) for entry in rounds[1:]), (step, state)]
    for entry, (last, expected) in zip(rounds, ends, strict=True):
        found = undisturbed(entry["state"], entry["step"], last, len(entry["hosts"]))
        if last < entry["step"] or found != expected:
            raise EpisodeError(f"the bits differ between step {entry['step']} and step {last}")


def run_stand_in(episode: Episode) -> None:
    """Events, recovery, end and checks of an episode with stand-in workers."""
    for number in range(len(episode.nodes)):
        episode.start(number)
    wait_until(lambda: bool(history(episode.folder)), BOUND_S)
    for _ in range(episode.random.randint(2, 5)):
        time.sleep(episode.random.uniform(0.0, 2.5))
        episode.apply(episode.random.choice(EVENTS))
    time.sleep(episode.random.uniform(0.0, 2.5))
    episode.recover()
    expected = [str(number) for number in episode.living()]

    def has_members() -> bool:
        episode.check_alive()
        return sorted(history(episode.folder)[-1]["hosts"]) == expected

    # A round with these hosts may still be of before the last event: it must be there for longer than a timeout.
    end = time.monotonic() + BOUND_S
    since = None
    while since is None or time.monotonic() - since < 7.0:
        since = (since or time.monotonic()) if has_members() else None
        if time.monotonic() > end:
            found = history(episode.folder)[-1]["hosts"]
            raise EpisodeError(f"members are {found} and should be {expected}")
        time.sleep(0.2)
    (episode.folder / "finish").touch()
    episode.check_exits()
    check_history(episode)


def figures(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm)."""
    found = {}
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        if "lm_loss" in entry:
            found[entry["step"]] = (entry["lm_loss"], entry["grad_norm"])
    return found


def run_trainer(episode: Episode, reference: Path) -> None:
    """Events during a run of the trainer, which must end with the bits of a run in one process."""
    metrics = episode.folder / "run" / "metrics.jsonl"
    for number in range(len(episode.nodes)):
        episode.start(number)
    wait_until(lambda: metrics.exists() and bool(metrics.stat().st_size), BOUND_S)
    for _ in range(2):
        time.sleep(episode.random.uniform(1.0, 5.0))
        # Not node 0: its own restart while no checkpoint exists would find a run directory without one.
        episode.apply(episode.random.choice(EVENTS[:-1]))
    episode.recover()
    if not wait_until(lambda: len(figures(episode.folder / "run")) == TRAIN_ITERS, 10 * BOUND_S):
        raise EpisodeError("the run does not end")
    episode.check_exits()
    if figures(episode.folder / "run") != figures(reference):
        raise EpisodeError("losses or gradient norms differ from a run in one process")


def trainer_words(data: Path, run: Path) -> tuple[str, ...]:
    """The smallest run of the trainer."""
    from tests.distributed.whole_runs import arguments

    options = {"train_iters": str(TRAIN_ITERS), "lr_decay_iters": str(TRAIN_ITERS), "eval_interval": "100000"}
    options |= {"global_batch_size": "4", "num_layers": "3", "save_interval": "20"}
    words = arguments(data, run, "--save", str(run), "--load", str(run), **options, rebalance_interval=None)
    return tuple(words)


def make_reference(folder: Path) -> None:
    """Data, and a run of the trainer in one process."""
    from tests.distributed.whole_runs import write_data

    data = write_data(folder / "data")
    words = [sys.executable, "-m", "dynmo_train", *trainer_words(data, folder / "run")]
    with open(folder / "log", "w") as log:
        code = os.spawnve(os.P_WAIT, words[0], words, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        log.write(f"exit code {code}\n")


def run_episode(number: int, seed: int, folder: Path, reference: Path | None) -> str:
    """Run an episode; a line about it.

    Raises:
        EpisodeError: it ended otherwise than it must.
    """
    chance = random.Random(seed * 100_003 + number)
    count = chance.randint(3, 5) if reference is None else 3
    min_nodes = chance.randint(1, count - 1)
    folder.mkdir(parents=True)
    with network(count, f"{os.getpid()}-{number}") as hosts:
        if reference is None:
            command = (sys.executable, "-S", str(Path(__file__).with_name("stand_in_worker.py")), str(ROOT))
            arguments: tuple[str, ...] = (str(folder),)
        else:
            command = (sys.executable, "-m", "dynmo_train")
            arguments = trainer_words(reference.parent / "data", folder / "run")
        episode = Episode(
            seed=seed,
            folder=folder,
            hosts=hosts,
            nodes=[Host() for _ in range(count)],
            min_nodes=min_nodes,
            command=command,
            arguments=arguments,
            random=chance,
        )
        start_s = time.monotonic()
        problem = ""
        try:
            run_stand_in(episode) if reference is None else run_trainer(episode, reference)
        except EpisodeError as error:
            problem = str(error)
        events, seconds = ", ".join(episode.events), time.monotonic() - start_s
        rounds = len(history(folder))
        line = f"episode {number}: {count} hosts, minimum {min_nodes} | {events} | rounds {rounds} | {seconds:.0f} s"
        if problem:
            raise EpisodeError(f"{line} | FAILED: {problem} | {folder}")
        return line


def main() -> int:
    """Run the campaign; 0 if every episode ended as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="Number of episodes.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first episode.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the events.")
    parser.add_argument("--parallel", type=int, default=1, help="Episodes at the same time.")
    parser.add_argument("--trainer-every", type=int, default=50, help="Every N-th episode runs the trainer; 0: none.")
    parser.add_argument("--minutes", type=float, default=600.0, help="Minutes after which no episode starts.")
    given = parser.parse_args()
    if (reason := reason_to_skip()) is not None:
        report(f"skipped: {reason}")
        return 0
    # Loaded once: launchers are forked from this process.
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401

    import dynmo_train.launch.launcher  # noqa: F401

    base = Path(tempfile.mkdtemp(prefix="dynmo-membership-"))
    last = given.first + given.episodes
    trains = [n for n in range(given.first, last) if given.trainer_every and n % given.trainer_every == 0]
    reference = base / "reference" / "run"
    if trains:
        reference.parent.mkdir()
        make_reference(reference.parent)
    waiting, running, results = list(range(given.first, last)), dict[int, int](), Counter[str]()
    end = time.monotonic() + given.minutes * 60
    while waiting or running:
        while waiting and len(running) < given.parallel and time.monotonic() < end:
            number = waiting.pop(0)
            running[_fork_episode(number, given.seed, base, reference if number in trains else None)] = number
        if time.monotonic() >= end:
            waiting = []
        for pid, number in list(running.items()):
            if (code := exit_code(pid)) is not None:
                del running[pid]
                results["passed" if code == 0 else "failed"] += 1
                if code == 0:
                    shutil.rmtree(base / f"episode-{number}")
        time.sleep(0.1)
    report(f"seed {given.seed} | passed {results['passed']} | failed {results['failed']}")
    return min(1, results["failed"] + (results["passed"] == 0))


def _fork_episode(number: int, seed: int, base: Path, reference: Path | None) -> int:
    """Run an episode in a forked process, which prints its line; its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        report(run_episode(number, seed, base / f"episode-{number}", reference))
        code = 0
    except EpisodeError as error:
        report(str(error))
    finally:
        end_fork(code)


if __name__ == "__main__":
    sys.exit(main())
