"""A run's processes from first start to end: on this machine alone, or on this one of several nodes."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._common.console import say
from .._common.errors import EXIT_FAILURE, EXIT_RELAUNCH, EXIT_USAGE, UsageError
from ..formats.os_errors import reason
from ..formats.run import read_run, take_grow_request
from .exit_status import LASTING, Failure, causes, failure_message, last_lines, shell_code, usage_words
from .node_agent import PeerTroubleError, Work, interface_towards, run_once, worker_environment
from .rendezvous import CALLED, DONE, LAST_CALL_S, Ending, Meeting, MeetingLostError, Nodes, Start, Verdict
from .restart import packing_flags, pipeline_size, place_flags, processes_of

WORKER = (sys.executable, "-m", "dynmo_train")


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """What to start on each node: ``nproc`` processes of ``command`` with ``arguments``; logs under ``log_dir``.

    ``grace_s`` is how long a process may take to end because of others, ``save_s`` how long it may take to end and to
    save where the launcher is told to end.
    """

    nproc: int
    arguments: tuple[str, ...]
    log_dir: Path
    grace_s: float = 5.0
    save_s: float = 60.0
    command: tuple[str, ...] = WORKER
    nodes: Nodes = field(default_factory=Nodes)

    @property
    def told_file(self) -> Path:
        """There once this launcher was told to end; the folder may be one of several machines."""
        return self.log_dir / f"told-{socket.gethostname()}-{os.getpid()}"


def _tell(failures: Sequence[Failure], *, shown_first: bool) -> None:
    """Say what failed. Rank 0's log has been shown already, and so has what others say in the same words.

    A usage error that rank 0 has told in full needs no more words. Rank 0 may be none of those that failed, another
    one was seen to end first; where rank 0 was ended before it could speak, the words of that one stand for it.

    Args:
        shown_first: whether rank 0 runs here.
    """
    logs = {f.rank: Path(f.log).read_text(encoding="utf-8", errors="replace") for f in failures}
    log_of_first = Path(failures[0].log).parents[1] / "0" / "stderr.log"
    said = log_of_first.read_text(encoding="utf-8", errors="replace") if shown_first and log_of_first.exists() else ""
    shown = {line.rstrip() for line in said.splitlines()}
    tails = {rank: tail for rank, log in logs.items() if not shown.issuperset(tail := last_lines(log))}
    roots = causes(failures)
    if roots[0].code == EXIT_USAGE:
        told = [usage_words(tails[failure.rank]) for failure in roots if failure.rank in tails]
        if all(told):
            for words in dict.fromkeys(told):
                say(words)
            return
    say(f"dynmo-train: error: {failure_message(failures, tails)}")


def _next_start(run_dir: Path, before: int, workers: int | None, now: int | None) -> tuple[int, tuple[str, ...]]:
    """Processes of the next start, and the flags that it gets behind those of the first.

    Args:
        run_dir: of the run; without a ``run.json`` a process is a worker.
        before: processes of the start that ended.
        workers: pipeline positions that somebody asked for.
        now: processes that are left where nodes were lost.
    """
    try:
        document = read_run(run_dir / "run.json")
        config, before = document["config"], document["world_size"]
    except UsageError:
        config = {"parallel": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": before}}
    if workers is not None:
        more = place_flags(str(run_dir), workers) + packing_flags(config, workers)
        return processes_of(config, before, workers), more
    processes = before if now is None else now
    return processes, place_flags(str(run_dir), pipeline_size(config, before, processes))


@dataclass
class _Launcher:
    """The starts of one launch, seen from one node. ``restarts`` counts those that followed a failure."""

    launch: LocalLaunch
    meeting: Meeting
    launch_file: Path
    max_restarts: int
    restarts: int = 0
    workers: int | None = None

    def _work(self, start: Start) -> Work:
        launch, nodes = self.launch, self.launch.nodes
        index = start.members.index(nodes.rank)
        log_dir = launch.log_dir if nodes.most == 1 else launch.log_dir / f"node-{nodes.rank}"
        return Work(
            name=f"start-{start.number - 1}",
            nproc=start.processes[index],
            command=(*launch.command, *launch.arguments, *start.more),
            log_dir=log_dir,
            grace_s=launch.grace_s,
            save_s=launch.save_s,
            told_file=launch.told_file,
            index=index,
            count=len(start.members),
            host=nodes.host,
            port=start.port,
            trouble=self.meeting.trouble,
        )

    def _run_dir(self) -> Path | None:
        return Path(self.launch_file.read_text(encoding="utf-8")) if self.launch_file.exists() else None

    def _decide(self, start: Start, own: list[Failure]) -> Verdict:
        """Node 0: what follows the start, from how it ended on all nodes."""
        endings, lost = self.meeting.endings(self.launch.grace_s + self.launch.nodes.node_timeout_s)
        failures = [Failure(rank=rank, code=code, log="") for e in endings for rank, code in e.failures] or own
        code = causes(failures)[0].code if failures else EXIT_FAILURE
        if lost:
            say(f"dynmo-train: node {', '.join(map(str, lost))} was lost")
        run_dir = self._run_dir()
        asks = code == EXIT_RELAUNCH and not lost
        if run_dir is None or (not asks and (code in LASTING or self.restarts == self.max_restarts)):
            why = "a worker asks to be started again, but had not begun a run" if asks else ""
            return Verdict(again=False, code=shell_code(code), why=why)
        self.restarts += 0 if asks else 1
        away = self.meeting.departed().union(lost)
        self.workers = take_grow_request(run_dir) or (self.workers if not away else None)
        left = [count for node, count in zip(start.members, start.processes, strict=True) if node not in away]
        processes, more = _next_start(run_dir, sum(start.processes), self.workers, sum(left) if away else None)
        return self._again(processes, left, more)

    def _flags_of(self, processes: int) -> tuple[str, ...]:
        """Flags of a start with so many processes, fewer than the verdict on the one before counts on."""
        run_dir = self._run_dir()
        return _next_start(run_dir, processes, None, processes)[1] if run_dir else ()

    def _again(self, processes: int, left: list[int], more: tuple[str, ...]) -> Verdict:
        """Another start with ``processes``; ``left`` are those of the nodes that live."""
        most = self.launch.nodes.most
        if most == 1:
            return Verdict(again=True, processes=processes, nodes=1, more=more)
        if processes == sum(left):
            return Verdict(again=True, processes=processes, nodes=len(left), more=more)
        nodes = processes // left[0]
        if len(set(left)) > 1 or processes % left[0] or nodes > most:
            why = f"{processes} processes do not fill any of {most} nodes with {left[0]} each"
            return Verdict(again=False, code=EXIT_USAGE, why=why)
        return Verdict(again=True, processes=processes, nodes=nodes, more=more)

    def _finish(self) -> int:
        """Node 0: its processes are done; those of the others may not be, and may fail yet."""
        self.meeting.wait_for_others()
        endings, lost = self.meeting.endings(0.0)
        failures = [Failure(rank=rank, code=code, log="") for e in endings for rank, code in e.failures]
        code = shell_code(causes(failures)[0].code) if failures else (EXIT_FAILURE if lost else 0)
        self.meeting.decide(Verdict(again=False, code=code))
        if code:
            time.sleep(LAST_CALL_S)
        self.meeting.leave(DONE)
        return code

    def _once(self, start: Start) -> list[Failure] | None:
        """One start on this node: what failed here; None where all is done here."""
        try:
            failures = run_once(self._work(start))
        except PeerTroubleError as trouble:
            say(f"dynmo-train: node {self.launch.nodes.rank} ends its processes: {trouble}")
            return []
        except SystemExit:
            self.meeting.leave(CALLED)
            raise
        if not failures:
            return None
        if causes(failures)[0].code != EXIT_RELAUNCH:
            _tell(failures, shown_first=start.members.index(self.launch.nodes.rank) == 0)
        return failures

    def _follow(self, start: Start, failures: list[Failure]) -> Verdict:
        """What follows a start that failed somewhere: node 0 decides, the others hear of it."""
        nodes = self.launch.nodes
        self.meeting.report(Ending(node=nodes.rank, failures=tuple((f.rank, f.code) for f in failures)))
        if not self.meeting.leads:
            return self.meeting.verdict(self.launch.grace_s + 2 * nodes.node_timeout_s)
        verdict = self._decide(start, failures)
        self.meeting.decide(verdict)
        if verdict.again:
            say(f"dynmo-train: starting again with {verdict.processes} processes from {self._run_dir()}")
        return verdict

    def run(self) -> int:
        """All starts; returns the exit code."""
        verdict: Verdict | None = None
        while verdict is None or verdict.again:
            alone = self.launch.nodes.most == 1 and verdict is not None
            start = self.meeting.gather(
                verdict.processes if alone and verdict else self.launch.nproc, verdict, self._flags_of
            )
            failures = self._once(start)
            if failures is None and self.meeting.leads:
                return self._finish()
            if failures is None:
                self.meeting.leave(DONE)
                return 0
            verdict = self._follow(start, failures)
        if verdict.why:
            say(f"dynmo-train: error: {verdict.why}")
        if self.meeting.leads and self.launch.nodes.most > 1:
            time.sleep(LAST_CALL_S)  # for the others to read the verdict
        self.meeting.leave(DONE)
        return verdict.code


def launch_local(launch: LocalLaunch, *, max_restarts: int) -> int:
    """Run to the end, starting again where a worker asks for it (75) or, ``max_restarts`` times, after a failure.

    Returns:
        0, or the exit code of the process that failed; 75 where node 0 of several is gone.

    Raises:
        UsageError: the log directory cannot be made, or the nodes cannot meet.
    """
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the log directory {launch.log_dir}: {reason(error)}") from error
    launch_file = launch.log_dir / "run_dir"
    if launch.nodes.rank == 0:
        launch_file.unlink(missing_ok=True)
    os.environ.update(
        worker_environment(
            os.environ,
            launcher=os.getpid(),
            launch_file=launch_file,
            grace_s=launch.grace_s,
            save_s=launch.save_s,
            told_file=launch.told_file.absolute(),
            interface=interface_towards(launch.nodes.host),
        )
    )
    try:
        return _Launcher(launch, Meeting(launch.nodes), launch_file, max_restarts).run()
    except MeetingLostError as error:
        say(f"dynmo-train: error: {error}")
        return EXIT_RELAUNCH
