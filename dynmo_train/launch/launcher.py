"""Launch a run on this node and restart it until it finishes: on a single machine, or as one of several nodes.

::

    Rendezvous.next_round ──> run_worker_group ──> failures ──> Rendezvous.report
            ^                                                        │
            └────── Decision.restart <── node 0: _decide <───────────┘
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._common.console import print_message
from .._common.errors import EXIT_FAILURE, EXIT_RELAUNCH, EXIT_USAGE, UsageError
from ..formats.os_errors import reason
from ..formats.run import read_run, take_resize_request
from .exit_status import (
    PERMANENT_CODES,
    Failure,
    failure_message,
    last_lines,
    root_causes,
    shell_exit_code,
    usage_message,
)
from .heartbeat import HEARTBEAT_VARIABLE
from .incident_log import (
    Progress,
    death_incident,
    hang_incident,
    node_of_rank,
    read_progress,
    restart_environment,
    restarts_used,
    write_incident,
)
from .node_agent import PeerFailureError, WorkerGroupConfig, interface_towards, run_worker_group, worker_environment
from .node_watch import NodeWatch, WatchedRound, WatchResult, make_heartbeat_folder, remove_heartbeat_folder
from .options import SINGLE_NODE, ExitOptions, NodeConfig
from .rendezvous import (
    FINISHED,
    RESTART_JOIN_S,
    SIGNALED,
    Decision,
    NodeResult,
    Rendezvous,
    RendezvousLostError,
    Round,
)
from .restart import pack_to_flags, pipeline_size, process_count, resume_flags
from .watchdog import HangSettings

WORKER = (sys.executable, "-m", "dynmo_train")


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """The processes to launch on this node.

    Attributes:
        nproc: number of processes.
        arguments: arguments of ``command``.
        log_dir: folder of process logs.
        exits: what follows a failure or a signal.
        command: program of each process.
        nodes: this node and the rendezvous.
    """

    nproc: int
    arguments: tuple[str, ...]
    log_dir: Path
    exits: ExitOptions = field(default_factory=ExitOptions)
    command: tuple[str, ...] = WORKER
    nodes: NodeConfig = SINGLE_NODE

    @property
    def shutdown_file(self) -> Path:
        """A file that exists once this launcher received a signal; other nodes may share its folder."""
        return self.log_dir / f"shutdown-{socket.gethostname()}-{os.getpid()}"


def report_failures(failures: Sequence[Failure], *, has_rank0: bool) -> None:
    """Print the causes of a failed round, without lines that the log of rank 0 has already shown.

    A usage error of all ranks is printed once. If rank 0 was terminated before it could print the error, the message of
    another rank is printed.

    Args:
        failures: failures of this node.
        has_rank0: whether rank 0 runs on this node, which has printed its log.
    """
    logs = {f.rank: Path(f.log).read_text(encoding="utf-8", errors="replace") for f in failures}
    log_of_first = Path(failures[0].log).parents[1] / "0" / "stderr.log"
    printed = log_of_first.read_text(encoding="utf-8", errors="replace") if has_rank0 and log_of_first.exists() else ""
    shown = {line.rstrip() for line in printed.splitlines()}
    tails = {rank: tail for rank, log in logs.items() if not shown.issuperset(tail := last_lines(log))}
    roots = root_causes(failures)
    if roots[0].code == EXIT_USAGE:
        messages = [usage_message(tails[failure.rank]) for failure in roots if failure.rank in tails]
        if all(messages):
            for message in dict.fromkeys(messages):
                print_message(message)
            return
    print_message(f"dynmo-train: error: {failure_message(failures, tails)}")


def _next_size(run_dir: Path, before: int, workers: int | None, now: int | None) -> tuple[int, tuple[str, ...]]:
    """Number of processes of the next round, and the flags appended to the command.

    Args:
        run_dir: run directory; without ``run.json`` each process is a pipeline rank.
        before: number of processes of the last round.
        workers: number of pipeline ranks that a user requested.
        now: number of remaining processes, if nodes were lost.
    """
    try:
        document = read_run(run_dir / "run.json")
        config, before = document["config"], document["world_size"]
    except UsageError:
        config = {"parallel": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": before}}
    if workers is not None:
        flags = resume_flags(str(run_dir), workers) + pack_to_flags(config, workers)
        return process_count(config, before, workers), flags
    processes = before if now is None else now
    return processes, resume_flags(str(run_dir), pipeline_size(config, before, processes))


@dataclass
class _Launcher:
    """The rounds of a launch, seen from one node; ``restarts`` counts those after failures without progress."""

    launch: LocalLaunch
    rendezvous: Rendezvous
    launch_file: Path
    heartbeats: Path
    restarts: int = 0
    checkpoint_of_restart: int | None = None
    started_at: float = 0.0
    watched: WatchResult = field(default_factory=WatchResult)
    workers: int | None = None

    def _worker_group(self, current: Round) -> WorkerGroupConfig:
        launch, nodes = self.launch, self.launch.nodes
        index = current.members.index(nodes.node_rank)
        log_dir = launch.log_dir if nodes.max_nodes == 1 else launch.log_dir / f"node-{nodes.node_rank}"
        return WorkerGroupConfig(
            name=f"round-{current.number - 1}",
            nproc=current.processes[index],
            command=(*launch.command, *launch.arguments, *current.extra_flags),
            log_dir=log_dir,
            grace_s=launch.exits.grace_s,
            save_s=launch.exits.save_s,
            shutdown_file=launch.shutdown_file,
            index=index,
            count=len(current.members),
            host=nodes.master_addr,
            port=current.port,
            failure_reason=self.rendezvous.failure_reason,
        )

    def _watch(self, current: Round, group: WorkerGroupConfig) -> NodeWatch:
        """The watchdog of a round on this node."""
        watched = WatchedRound(
            name=group.name,
            folder=self.heartbeats,
            log_dir=group.log_dir,
            first_rank=sum(current.processes[: group.index]),
            nproc=group.nproc,
            index=group.index,
            count=group.count,
            store_host=group.host,
            store_port=group.port,
        )
        exits = self.launch.exits
        return NodeWatch(watched, HangSettings(factor=exits.hang_factor, min_s=exits.hang_min_s))

    def _run_dir(self) -> Path | None:
        return Path(self.launch_file.read_text(encoding="utf-8")) if self.launch_file.exists() else None

    def _decide(self, current: Round, own: list[Failure]) -> Decision:
        """On node 0, decide what follows the round from the results of all nodes."""
        results, lost = self.rendezvous.collect_results(self.launch.exits.grace_s + self.launch.nodes.node_timeout_s)
        failures = [
            Failure(rank=rank, code=code, log="") for result in results for rank, code in result.failures
        ] or own
        code = root_causes(failures)[0].code if failures else EXIT_FAILURE
        if lost:
            print_message(f"dynmo-train: lost node {', '.join(map(str, lost))}")
        run_dir = self._run_dir()
        is_relaunch = code == EXIT_RELAUNCH and not lost
        progress = read_progress(run_dir) if run_dir is not None else Progress(step=0, checkpoint=0, saved_at=None)
        if run_dir is not None and not is_relaunch:
            self._write_incident(run_dir, current, failures, lost, progress)
        self.restarts = restarts_used(
            self.restarts, checkpoint=progress.checkpoint, checkpoint_of_restart=self.checkpoint_of_restart
        )
        if run_dir is None or (
            not is_relaunch and (code in PERMANENT_CODES or self.restarts == self.launch.exits.max_restarts)
        ):
            message = "a process requested a restart before it created a run directory" if is_relaunch else ""
            return Decision(restart=False, code=shell_exit_code(code), message=message)
        self.restarts += 0 if is_relaunch else 1
        self.checkpoint_of_restart = progress.checkpoint
        cause = "a process requested it" if is_relaunch else "a node was lost" if lost else "a process failed"
        cause = "a rank hung" if self.watched.hang is not None else cause
        os.environ.update(restart_environment(cause))
        away = self.rendezvous.departed_nodes().union(lost)
        self.workers = take_resize_request(run_dir) or (self.workers if not away else None)
        remaining = [count for node, count in zip(current.members, current.processes, strict=True) if node not in away]
        processes, flags = _next_size(run_dir, sum(current.processes), self.workers, sum(remaining) if away else None)
        return self._restart(processes, remaining, flags)

    def _write_incident(
        self, run_dir: Path, current: Round, failures: Sequence[Failure], lost: Sequence[int], progress: Progress
    ) -> None:
        """On node 0, record why the round failed.

        Args:
            run_dir: run directory.
            current: the round.
            failures: failed processes of all nodes.
            lost: lost nodes.
            progress: progress of the run.
        """
        if not failures and not lost:
            return
        names = [socket.gethostname() if node == 0 else f"node {node}" for node in current.members]
        # Without a heartbeat of the rank its host is known by the number of its node only.
        hosts = {failure.rank: names[node_of_rank(failure.rank, current.processes)] for failure in failures}
        hosts |= self.watched.hosts
        since = max(self.started_at, progress.saved_at or 0.0)
        seconds = max(0.0, time.time() - since)
        lost_hosts = [names[current.members.index(node)] for node in lost if node in current.members]
        watched = self.watched
        if watched.hang is not None:
            incident = hang_incident(watched.hang, watched.collective, watched.stacks, hosts, progress, seconds)
        else:
            incident = death_incident(failures, lost_hosts, hosts, progress, seconds)
        write_incident(run_dir, incident)

    def _flags_of(self, processes: int) -> tuple[str, ...]:
        """Flags of a round with fewer processes than decided."""
        run_dir = self._run_dir()
        return _next_size(run_dir, processes, None, processes)[1] if run_dir else ()

    def _restart(self, processes: int, remaining: list[int], flags: tuple[str, ...]) -> Decision:
        """Decide on another round.

        Args:
            processes: total number of processes.
            remaining: number of processes of each remaining node.
            flags: flags that are appended to the command.
        """
        max_nodes = self.launch.nodes.max_nodes
        if max_nodes == 1:
            return Decision(restart=True, processes=processes, nodes=1, extra_flags=flags)
        if processes == sum(remaining):
            return Decision(restart=True, processes=processes, nodes=len(remaining), extra_flags=flags)
        nodes = processes // remaining[0]
        if len(set(remaining)) > 1 or processes % remaining[0] or nodes > max_nodes:
            message = (
                f"{processes} processes must be a multiple of the {remaining[0]} per node, on at most {max_nodes} nodes"
            )
            return Decision(restart=False, code=EXIT_USAGE, message=message)
        return Decision(restart=True, processes=processes, nodes=nodes, extra_flags=flags)

    def _finish(self) -> int:
        """On node 0, wait for the processes of the other nodes, which may still fail."""
        self.rendezvous.wait_for_others()
        results, lost = self.rendezvous.collect_results(0.0)
        failures = [Failure(rank=rank, code=code, log="") for result in results for rank, code in result.failures]
        code = shell_exit_code(root_causes(failures)[0].code) if failures else (EXIT_FAILURE if lost else 0)
        self.rendezvous.publish_decision(Decision(restart=False, code=code))
        # The store ends with this process; other nodes first read the decision.
        if code:
            time.sleep(RESTART_JOIN_S)
        self.rendezvous.leave(FINISHED)
        return code

    def _run_round(self, current: Round) -> list[Failure] | None:
        """Run a round on this node and return its failures; None if all processes finished."""
        group = self._worker_group(current)
        try:
            with self._watch(current, group).watching() as self.watched:
                failures = run_worker_group(group)
        except PeerFailureError as error:
            print_message(f"dynmo-train: terminated the processes of node {self.launch.nodes.node_rank}: {error}")
            return []
        except SystemExit:
            self.rendezvous.leave(SIGNALED)
            raise
        if not failures:
            return None
        if root_causes(failures)[0].code != EXIT_RELAUNCH:
            report_failures(failures, has_rank0=current.members.index(self.launch.nodes.node_rank) == 0)
        return failures

    def _next_decision(self, current: Round, failures: list[Failure]) -> Decision:
        """Report the failures and return the decision of node 0."""
        nodes = self.launch.nodes
        self.rendezvous.report(NodeResult(node=nodes.node_rank, failures=tuple((f.rank, f.code) for f in failures)))
        if not self.rendezvous.is_leader:
            return self.rendezvous.wait_for_decision(self.launch.exits.grace_s + 2 * nodes.node_timeout_s)
        decision = self._decide(current, failures)
        self.rendezvous.publish_decision(decision)
        if decision.restart:
            print_message(f"dynmo-train: restarting from {self._run_dir()} | processes: {decision.processes}")
        return decision

    def run(self) -> int:
        """Run all rounds and return the exit code."""
        decision: Decision | None = None
        while decision is None or decision.restart:
            is_single = self.launch.nodes.max_nodes == 1 and decision is not None
            current = self.rendezvous.next_round(
                decision.processes if is_single and decision else self.launch.nproc, decision, self._flags_of
            )
            self.started_at = time.time()
            failures = self._run_round(current)
            if failures is None and self.rendezvous.is_leader:
                return self._finish()
            if failures is None:
                self.rendezvous.leave(FINISHED)
                return 0
            decision = self._next_decision(current, failures)
        if decision.message:
            print_message(f"dynmo-train: error: {decision.message}")
        if self.rendezvous.is_leader and self.launch.nodes.max_nodes > 1:
            time.sleep(RESTART_JOIN_S)  # other nodes read the decision
        self.rendezvous.leave(FINISHED)
        return decision.code


def launch_local(launch: LocalLaunch) -> int:
    """Launch a run; restart it when a process exits with 75, and at most ``--max-restarts`` times after failures.

    Returns:
        0, or the exit code of the process that failed; 75 if node 0 is lost.

    Raises:
        UsageError: the log folder cannot be created, or the rendezvous fails.
    """
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the log folder {launch.log_dir}: {reason(error)}") from error
    launch_file = launch.log_dir / "run_dir"
    # Of an earlier launch with the same log folder; a restart would resume its run.
    if launch.nodes.node_rank == 0:
        launch_file.unlink(missing_ok=True)
    heartbeats = make_heartbeat_folder()
    os.environ[HEARTBEAT_VARIABLE] = str(heartbeats)
    os.environ.update(
        worker_environment(
            os.environ,
            launcher=os.getpid(),
            launch_file=launch_file,
            grace_s=launch.exits.grace_s,
            save_s=launch.exits.save_s,
            shutdown_file=launch.shutdown_file.absolute(),
            interface=interface_towards(launch.nodes.master_addr),
        )
    )
    try:
        return _Launcher(launch, Rendezvous(launch.nodes), launch_file, heartbeats).run()
    except RendezvousLostError as error:
        print_message(f"dynmo-train: error: {error}")
        return EXIT_RELAUNCH
    finally:
        remove_heartbeat_folder(heartbeats)
