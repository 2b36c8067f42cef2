"""Launch a run on this node and restart it until it finishes: on a single machine, or as one of several nodes.

::

    Rendezvous.wait_for_round ──> run_worker_group ──> failures ──> Rendezvous.report
            ^                                                            │
            └── node 0: open_round <── restart <── node 0: _decide <─────┘

Node 0 decides, the others follow. A node that waits to join a running round joins in place if the round makes copies in
memory (``growth.py``). Otherwise node 0 writes a join request, a file that the trainer reads at the next step boundary:
it saves and exits with 75, and the next round has the node.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._common.console import print_message
from .._common.errors import EXIT_FAILURE, EXIT_RELAUNCH, EXIT_USAGE, DynmoError, UsageError
from .._common.streams import keep_running
from ..formats.os_errors import reason
from ..formats.run import take_resize_request
from .elastic.continuation import CONTINUATION_VARIABLE, Continuation
from .elastic.coordinator import Round, heartbeat_period_s
from .elastic.growth import JOINING_VARIABLE, Joining
from .elastic.joining_node import JoiningNode
from .elastic.membership import Incarnation, Membership, NodeState, join_ranks
from .elastic.node_agent import (
    PeerFailureError,
    WorkerGroupConfig,
    interface_towards,
    run_worker_group,
    worker_environment,
)
from .elastic.node_continuation import FollowingNode, LeadingNode, NodeContinuation, connect_store
from .elastic.node_growth import LeadingGrowth
from .elastic.rendezvous import ExcludedError, LaunchEnd, Rendezvous, RendezvousLostError
from .elastic.restart import (
    fitting_nodes,
    layout_flags,
    pack_to_flags,
    process_count,
    restart_pause_s,
    resume_flags,
)
from .elastic.run_layout import RunLayout
from .exit_status import (
    PERMANENT_CODES,
    Failure,
    root_causes,
    shell_exit_code,
)
from .failure_report import report_failures
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
from .launch_folder import LogFolders, launch_folder
from .options import SINGLE_NODE, ExitOptions, NodeConfig
from .run_lock import holding_when_known
from .signal_files import remove_file, take_dropped
from .waiting_signals import exit_on_signals
from .watch.heartbeat import HEARTBEAT_VARIABLE
from .watch.node_watch import NodeWatch, WatchedRound, WatchResult
from .watch.watchdog import HangSettings
from .worker_start import WorkerServer, WorkerStart, can_fork

# Seconds from a death that a launcher has found until the ranks of all nodes know it.
NOTICE_S = 10.0
# torch reads it when it is imported.
_CPP_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
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
        worker_start: how processes start; only ``python -m MODULE`` can be forked.
    """

    nproc: int
    arguments: tuple[str, ...]
    log_dir: Path
    exits: ExitOptions = field(default_factory=ExitOptions)
    command: tuple[str, ...] = WORKER
    nodes: NodeConfig = SINGLE_NODE
    worker_start: WorkerStart = WorkerStart.FORK


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """What follows a round: another one after ``pause_s``, or the end of the launch with ``code`` and ``message``."""

    is_restart: bool
    code: int = 0
    message: str = ""
    pause_s: float = 0.0


@dataclass
class _Launcher:
    """The rounds of a launch, seen from one node.

    Attributes:
        launch: the processes of this node.
        folder: folder in memory of the heartbeats of this node's processes, and of messages to them.
        server: forks the processes of all rounds; None where each is executed by itself.
        restarts: number of restarts after failures without progress.
        checkpoint_of_restart: newest checkpoint at the last restart.
        started_at: Unix time at which the current round began.
        watched: what the watchdog found in the current round.
        workers: number of pipeline ranks that a user requested.
        processes: number of processes with these.
        run: parallel sizes of the run.
        leading: on node 0, the generations of the current round; None between two rounds.
        logs: folders of the logs of the rounds.
    """

    launch: LocalLaunch
    folder: Path
    server: WorkerServer | None = None
    restarts: int = 0
    checkpoint_of_restart: int | None = None
    started_at: float = 0.0
    watched: WatchResult = field(default_factory=WatchResult)
    workers: int | None = None
    processes: int | None = None
    leading: LeadingNode | None = None
    logs: LogFolders = field(default_factory=LogFolders)
    run: RunLayout = field(init=False)
    rendezvous: Rendezvous = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunLayout(self.launch_file, self.join_file)

    @property
    def launch_file(self) -> Path:
        """The file in which rank 0 records the run directory."""
        return self.folder / "run_dir"

    @property
    def shutdown_file(self) -> Path:
        """A file that exists once this launcher received a signal."""
        return self.folder / "shutdown"

    @property
    def join_file(self) -> Path:
        """The join request of this launcher to rank 0."""
        return self.folder / "join.json"

    def join(self, connect_s: float | None = None) -> None:
        """Join the launch as another incarnation of this node; ``connect_s`` bounds the time to reach node 0.

        Raises:
            UsageError: the store cannot be created, or node 0 is unreachable.
        """
        launch = self.launch
        remove_file(self.join_file)
        self.rendezvous = Rendezvous(
            launch.nodes,
            launch.nproc,
            is_draining=self.shutdown_file.exists,
            on_joining=self._on_joining,
            connect_s=connect_s,
        )

    def _worker_group(self, current: Round) -> WorkerGroupConfig:
        launch, nodes = self.launch, self.launch.nodes
        index = current.index_of(self.rendezvous.name)
        log_dir = launch.log_dir if nodes.max_nodes == 1 else launch.log_dir / f"node-{nodes.node_rank}"
        log_dir = self.logs.of_round(log_dir, is_first=current.number == 1)
        return WorkerGroupConfig(
            name=f"round-{current.number - 1}",
            processes=current.processes,
            world_size=current.world_size or sum(current.processes),
            command=(*launch.command, *launch.arguments, *current.extra_flags),
            log_dir=log_dir,
            grace_s=launch.exits.grace_s,
            save_s=launch.exits.save_s,
            shutdown_file=self.shutdown_file,
            is_verbose=launch.exits.verbose,
            index=index,
            host=nodes.master_addr,
            port=current.port,
            failure_reason=self.rendezvous.failure_reason,
            continuation=self._continuation(current),
            server=self.server,
        )

    def _continuation(self, current: Round) -> NodeContinuation:
        """Decides, with the other nodes, whether the processes of the round continue after a death."""
        if not self.rendezvous.is_leader:
            place = self.launch.nodes.master_addr, current.port
            if current.attempt:
                return JoiningNode(lambda: connect_store(*place), current.attempt)
            return FollowingNode(lambda: connect_store(*place))
        generations, coordinator = self._generations(current), self.rendezvous.coordinator
        growth = LeadingGrowth(generations, coordinator, current, self.run)
        self.leading = LeadingNode(generations, coordinator, growth)
        return self.leading

    def _generations(self, current: Round) -> Continuation:
        return Continuation(self.rendezvous.process_store, current.processes, self._take_hang)

    def _take_hang(self, ranks: Sequence[int]) -> str | None:
        """The cause if the watchdog has ended one of these ranks, which is then reported by those that continue."""
        hang = self.watched.hang
        if hang is None or hang.state.rank not in ranks:
            return None
        self.watched.hang = None
        return f"killed after a hang: {hang.cause}"

    def _watch(self, current: Round, group: WorkerGroupConfig) -> NodeWatch:
        """The watchdog of a round on this node."""
        watched = WatchedRound(
            name=group.name,
            folder=self.folder,
            log_dir=group.log_dir,
            first_rank=sum(current.processes[: group.index]),
            nproc=group.nproc,
            index=group.index,
            count=len(group.processes),
            store_host=group.host,
            store_port=group.port,
        )
        exits, continuation = self.launch.exits, group.continuation
        settings = HangSettings(factor=exits.hang_factor, min_s=exits.hang_min_s)
        return NodeWatch(
            watched,
            settings,
            members=lambda: None if continuation is None else continuation.ranks,
            nodes=lambda: range(watched.count) if continuation is None else continuation.nodes(watched.count),
        )

    def _on_joining(self, nodes: Sequence[Incarnation]) -> None:
        """On node 0, take waiting nodes into the running round, in place where it makes copies in memory."""
        leading = self.leading
        if leading is None or leading.growth.takes(nodes):
            return
        self.run.request_join(self.rendezvous.coordinator.membership.members_in(NodeState.ALIVE), nodes)

    def _decide(self, current: Round, own: list[Failure]) -> _Decision:
        """On node 0, decide what follows the round from the results of all nodes."""
        exits, nodes = self.launch.exits, self.launch.nodes
        membership = self.rendezvous.coordinator.end_round(max(exits.grace_s, exits.save_s) + nodes.node_timeout_s)
        self.run.read(current.world_size or sum(current.processes))
        members = [membership.incarnations[name] for name in dict.fromkeys(current.names)]
        failures = [Failure(rank=r, code=code, log="") for node in members for r, code in node.failures] or own
        code = root_causes(failures)[0].code if failures else EXIT_FAILURE
        lost = _report_departures(membership)
        is_drain = not lost and bool(membership.members_in(NodeState.DRAINED)) and code not in PERMANENT_CODES
        is_free = (code == EXIT_RELAUNCH and not lost) or is_drain
        has_run, has_left = self.run.run_dir is not None, bool(lost) or is_drain
        is_permanent = code in PERMANENT_CODES and not lost
        progress = self._record_failure(current, failures, lost, is_free=is_free)
        if not is_free and (is_permanent or self.restarts == exits.max_restarts):
            return _Decision(is_restart=False, code=shell_exit_code(code))
        # A run that a lost or drained node interrupted before it created its directory starts from scratch.
        if not has_run and not has_left:
            message = "a process requested a restart before it created a run directory" if is_free else ""
            return _Decision(is_restart=False, code=shell_exit_code(code), message=message)
        self.restarts += 0 if is_free else 1
        self.checkpoint_of_restart = progress.checkpoint
        os.environ.update(restart_environment(self._restart_cause(lost, is_drain=is_drain, is_free=is_free)))
        pause_s = 0.0 if is_free or lost else restart_pause_s(self.restarts)
        if pause_s:
            print_message(
                f"dynmo-train: restart {self.restarts} of {exits.max_restarts} in {pause_s:g} s: the run saved nothing"
                " since the last restart"
            )
        return replace(self._apply_resize_request(members), pause_s=pause_s)

    def _record_failure(
        self, current: Round, failures: Sequence[Failure], lost: Sequence[Incarnation], *, is_free: bool
    ) -> Progress:
        """Record why a round failed, and count the restarts since the last progress; returns the progress."""
        run_dir = self.run.run_dir
        progress = read_progress(run_dir) if run_dir is not None else Progress(step=0, checkpoint=0, saved_at=None)
        if run_dir is not None and not is_free:
            self._write_incident(run_dir, current, failures, [node.rank for node in lost], progress)
        self.restarts = restarts_used(
            self.restarts, checkpoint=progress.checkpoint, checkpoint_of_restart=self.checkpoint_of_restart
        )
        return progress

    def _restart_cause(self, lost: Sequence[Incarnation], *, is_drain: bool, is_free: bool) -> str:
        """Why the next round begins, for its incident."""
        if self.watched.hang is not None:
            return "a rank hung"
        if lost:
            return "a node was lost"
        if is_drain:
            return "a node was drained"
        return "a process requested it" if is_free else "a process failed"

    def _apply_resize_request(self, members: Sequence[Incarnation]) -> _Decision:
        """Restart, with the number of workers that a user requested."""
        run_dir = self.run.run_dir
        workers = take_resize_request(run_dir) if run_dir is not None else None
        if workers is None or self.run.layout is None:
            return _Decision(is_restart=True)
        processes = process_count(self.run.layout.config, self.run.layout.processes, workers)
        max_nodes, sizes = self.launch.nodes.max_nodes, {node.processes for node in members}
        if max_nodes > 1:
            if len(sizes) > 1 or processes % min(sizes) or processes // min(sizes) > max_nodes:
                message = (
                    f"{processes} processes must be a multiple of the {min(sizes)} per node, on at most"
                    f" {max_nodes} nodes"
                )
                return _Decision(is_restart=False, code=EXIT_USAGE, message=message)
            self.rendezvous.coordinator.resize(processes // min(sizes))
        self.workers, self.processes = workers, processes
        return _Decision(is_restart=True)

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
        """Flags of a round after the first one."""
        run_dir, layout = self.run.run_dir, self.run.layout
        if run_dir is None or layout is None:
            return ()
        if self.workers is not None and processes == self.processes:
            return resume_flags(str(run_dir), self.workers) + pack_to_flags(layout.config, self.workers)
        return layout_flags(str(run_dir), layout, processes)

    def _open_round(self, *, is_first: bool) -> Round:
        """On node 0, wait for the members of the next round and begin it."""
        self.run.read_refusal()
        members = self.rendezvous.wait_for_members()
        min_nodes = self.rendezvous.coordinator.membership.min_nodes
        members = members[: fitting_nodes(self.run.layout, [n.processes for n in members], min_nodes, self.run.refused)]
        if self.launch.nodes.max_nodes == 1 and self.processes is not None:
            members = (replace(members[0], processes=self.processes),)
        remove_file(self.join_file)
        processes = sum(node.processes for node in members)
        current = self.rendezvous.open_round(members, self._flags_of(processes))
        if not is_first:
            place = f" | nodes: {join_ranks(current.members)}" if self.launch.nodes.max_nodes > 1 else ""
            print_message(f"dynmo-train: restarting from {self.run.run_dir} | processes: {processes}{place}")
        return current

    def _finish(self) -> _Decision:
        """On node 0, wait for the processes of the other nodes, which may still fail."""
        membership = self.rendezvous.coordinator.wait_for_finish()
        members = [membership.incarnations[name] for name in membership.members]
        failures = [Failure(rank=rank, code=code, log="") for node in members for rank, code in node.failures]
        if failures:
            return _Decision(is_restart=False, code=shell_exit_code(root_causes(failures)[0].code))
        # The ranks of node 0 end with code 0 only after their last collective with all others: the run is complete,
        # also if the launcher of another node was stopped or lost since.
        if lost := membership.members_in(NodeState.LOST, NodeState.REPLACED):
            nodes = join_ranks(node.rank for node in lost)
            print_message(f"dynmo-train: warning: lost node {nodes} after the processes of node 0 had finished")
        return _Decision(is_restart=False)

    def _run_round(self, current: Round) -> list[Failure] | None:
        """Run a round on this node and return its failures; None if all processes finished."""
        group = self._worker_group(current)
        os.environ.pop(JOINING_VARIABLE, None)
        if current.attempt:
            os.environ[JOINING_VARIABLE] = Joining(attempt=current.attempt, run_dir=current.run_dir or "").encode()
        try:
            with self._watch(current, group).watching() as self.watched:
                failures = run_worker_group(group)
        except PeerFailureError as error:
            print_message(f"dynmo-train: terminated the processes of node {self.launch.nodes.node_rank}: {error}")
            return []
        finally:
            if group.continuation is not None:
                group.continuation.close()
            for rank, lines, problem in take_dropped(self.folder):
                print_message(f"dynmo-train: warning: log of rank {rank}: {problem} | dropped lines: {lines:,}")
        if not failures:
            return None
        if root_causes(failures)[0].code != EXIT_RELAUNCH:
            has_rank0 = group.index == 0
            report_failures(failures, has_rank0=has_rank0, is_verbose=self.launch.exits.verbose)
        return failures

    def lead(self) -> LaunchEnd:
        """On node 0, run all rounds and return the end of the launch."""
        is_first, nodes = True, self.launch.nodes
        try:
            while True:
                current = self._open_round(is_first=is_first)
                self.started_at = time.time()
                is_first, failures = False, self._run_round(current)
                if self.leading is not None:
                    current, self.leading = self.leading.growth.round, None
                if failures is None:
                    decision = self._finish()
                else:
                    self.rendezvous.report(tuple((f.rank, f.code) for f in failures))
                    decision = self._decide(current, failures)
                if not decision.is_restart:
                    break
                time.sleep(decision.pause_s)
        except DynmoError as error:
            decision = _Decision(is_restart=False, code=error.exit_code, message=str(error))
        end = LaunchEnd(code=decision.code, message=decision.message)
        if nodes.max_nodes > 1:
            self.rendezvous.coordinator.publish_end(end.code, end.message, nodes.node_timeout_s)
        return end

    def follow(self) -> LaunchEnd:
        """On another node, take part in rounds until the launch ends or the processes of this node finish.

        Raises:
            ExcludedError: node 0 lost this node; it may join again.
            RendezvousLostError: node 0 is unreachable.
        """
        while not isinstance(current := self.rendezvous.wait_for_round(), LaunchEnd):
            self.started_at = time.time()
            failures = self._run_round(current)
            if failures is None:
                return LaunchEnd(code=0)
            self.rendezvous.report(tuple((f.rank, f.code) for f in failures))
        return current

    def rejoin(self, error: DynmoError) -> None:
        """Join again after node 0 lost this node, or after this node lost node 0.

        Raises:
            RendezvousLostError: node 0 is unreachable for ``--reconnect-s``.
        """
        nodes = self.launch.nodes
        self.rendezvous.close()
        print_message(f"dynmo-train: {error}; joining again, for at most {nodes.reconnect_s:g} s")
        end = time.monotonic() + nodes.reconnect_s
        while (left := end - time.monotonic()) > 0:
            try:
                return self.join(max(1.0, left))
            except (UsageError, RendezvousLostError):
                time.sleep(1.0)
        raise RendezvousLostError(str(error)) from error


def _report_departures(membership: Membership) -> list[Incarnation]:
    """Print which members left the round, and return those that were lost or replaced."""
    lost = membership.members_in(NodeState.LOST, NodeState.REPLACED)
    states = {"lost": lost, "drained": membership.members_in(NodeState.DRAINED)}
    for state, nodes in states.items():
        if nodes:
            print_message(f"dynmo-train: {state} node {join_ranks(node.rank for node in nodes)}")
    return lost


def _run(launcher: _Launcher) -> int:
    """Run all rounds on this node and return the exit code.

    Raises:
        SystemExit: this process received a signal, while its processes ran or while it waited.
    """
    is_leader, leaves = launcher.launch.nodes.node_rank == 0, NodeState.FINISHED
    launcher.join()
    try:
        while True:
            try:
                end = launcher.lead() if is_leader else launcher.follow()
                break
            except (ExcludedError, RendezvousLostError) as error:
                launcher.rejoin(error)
    except SystemExit:
        leaves = NodeState.DRAINED
        raise
    finally:
        launcher.rendezvous.leave(leaves)
    if end.message:
        print_message(f"dynmo-train: error: {end.message}")
    return end.code


def notice_limit_s(nodes: NodeConfig) -> float:
    """Seconds from a death until the other ranks learn of it, at most: that of a node is found by its heartbeats."""
    found_s = nodes.node_timeout_s + heartbeat_period_s(nodes.max_nodes) if nodes.max_nodes > 1 else 0.0
    return found_s + NOTICE_S


def launch_local(launch: LocalLaunch) -> int:
    """Launch a run; restart it when a process exits with 75, and at most ``--max-restarts`` times after failures.

    Returns:
        0, or the exit code of the process that failed; 75 if node 0 is lost and does not return.

    Raises:
        UsageError: the log folder cannot be written to, or the rendezvous fails.
    """
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to the log folder {launch.log_dir}: {reason(error)}") from error
    output = keep_running("stdout")
    with launch_folder() as folder:
        code = _launch_in(folder, launch)
    # The log of a training is messages. What other commands print is their result.
    if output is not None and output.total_dropped_bytes and launch.arguments[:1] not in (("pretrain",), ("finetune",)):
        print_message(f"dynmo-train: error: standard output is incomplete: {output.problem}")
        return code or EXIT_FAILURE
    return code


def _import_torch_quietly() -> None:
    """Import torch such that its C++ code logs no warnings in this process, which has messages of its own.

    When node 0 is lost, each lost connection to its store would be a stack of C++ frames. The processes keep their log.
    """
    before = os.environ.get(_CPP_LOG_VARIABLE)
    os.environ[_CPP_LOG_VARIABLE] = before or "FATAL"
    try:
        importlib.import_module("torch")
    finally:
        if before is None:
            del os.environ[_CPP_LOG_VARIABLE]


def _launch_in(folder: Path, launch: LocalLaunch) -> int:
    """Launch a run with a folder in memory; see :func:`launch_local`."""
    launcher = _Launcher(launch, folder)
    os.environ[HEARTBEAT_VARIABLE] = str(folder)
    os.environ[CONTINUATION_VARIABLE] = str(notice_limit_s(launch.nodes))
    os.environ.update(
        worker_environment(
            os.environ,
            launcher=os.getpid(),
            launch_file=launcher.launch_file,
            grace_s=launch.exits.grace_s,
            save_s=launch.exits.save_s,
            shutdown_file=launcher.shutdown_file,
            join_file=launcher.join_file,
            interface=interface_towards(launch.nodes.master_addr),
        )
    )
    is_forked = launch.worker_start is WorkerStart.FORK and can_fork(launch.command)
    try:
        with exit_on_signals(), WorkerServer() if is_forked else contextlib.nullcontext() as launcher.server:
            if not launch.exits.verbose:
                _import_torch_quietly()
            with holding_when_known(launcher.launch_file):
                code = _run(launcher)
    except RendezvousLostError as error:
        print_message(f"dynmo-train: error: {error}")
        return EXIT_RELAUNCH
    except OSError as error:  # the log folder cannot be written to
        print_message(f"dynmo-train: error: {error.filename or launch.log_dir}: {reason(error)}")
        return EXIT_FAILURE
    if code == 0:
        launcher.logs.remove_memory()
    return code
