"""The faults of the campaign, each with the workloads that it can disturb and what must follow.

A fault disturbs an episode and lets it recover as a user would: the launcher restarts by itself, or the same command is
started again, with the disk or the file put right where that was the fault.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections import Counter as Multiset
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.ports import free_port
from tests.faults import mounts
from tests.faults.campaign_episode import Episode, LostError, folder_bytes
from tests.faults.campaign_workloads import LAUNCH, WORKLOADS, Workload, train_words
from tests.faults.forked_programs import (
    Command,
    Counter,
    Patch,
    count_file_calls,
    end_descendants,
    jumping_clock,
    limit_file_size,
    slow_disk,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: name in the table and of ``--kind``.
        inject: disturbs an episode, lets it recover and checks it.
        applies: which workloads it can disturb.
        reason_to_skip: why it cannot be injected here; None if it can.
        needs_reference: whether it needs an undisturbed run.
    """

    name: str
    inject: Callable[[Episode], None]
    applies: Callable[[Workload], bool] = lambda workload: True
    reason_to_skip: Callable[[], str | None] = lambda: None
    needs_reference: bool = True


# ---------------------------------------------------------------- signals


def _signalled(episode: Episode, number: int) -> None:
    """Up to three times: signal a random process at a random time; then let it finish."""
    episode.prepare()
    for _ in range(episode.random.randint(1, 3)):
        episode.start()
        if living := episode.reach(episode.random.uniform(0.02, 0.95)):
            victim = episode.random.choice(living)
            if episode.send(victim, number):
                episode.disturbed(f"{signal.Signals(number).name} of {victim.role} at {victim.cpu_s:.2f} s")
        codes = episode.wait()
        episode.check_committed()
        if not any(codes):
            break
    episode.finish()


def kill(episode: Episode) -> None:
    """SIGKILL of any process at any time."""
    _signalled(episode, signal.SIGKILL)


def terminate(episode: Episode) -> None:
    """SIGTERM of any process at any time."""
    _signalled(episode, signal.SIGTERM)


def kill_at_file_call(episode: Episode) -> None:
    """SIGKILL of the first process between two of its calls to the file system."""
    episode.prepare()
    for _ in range(episode.random.randint(2, 4)):
        at = episode.random.randrange(1, max(2, episode.reference.file_calls))
        episode.sent.add(signal.SIGKILL)
        pids = episode.start(count_file_calls(Counter(), at))
        episode.sent.add(signal.SIGKILL)
        codes = episode.wait()
        if codes[0] == -signal.SIGKILL:
            episode.disturbed(f"SIGKILL at file call {at} of {pids[0]}")
        episode.check_committed()
        if not any(codes):
            break
    episode.finish()


def pause(episode: Episode) -> None:
    """SIGSTOP of a process for some seconds."""
    episode.prepare()
    episode.start()
    if living := episode.reach(episode.random.uniform(0.02, 0.9)):
        victim = episode.random.choice(living)
        if episode.send(victim, signal.SIGSTOP):
            episode.disturbed(f"SIGSTOP of {victim.role} at {victim.cpu_s:.2f} s")
            time.sleep(episode.random.uniform(0.2, 4.0))
            episode.send(victim, signal.SIGCONT)
    if not any(episode.wait()):
        episode.compare()
    else:
        episode.finish()


def hang(episode: Episode) -> None:
    """SIGSTOP of a process for ever: the launcher must end and restart it; without one, the user ends it."""
    episode.prepare()
    episode.start()
    ranks = []
    if living := episode.reach(episode.random.uniform(0.1, 0.9)):
        ranks = [each for each in living if each.role == "launched rank"]
        victim = episode.random.choice(ranks or living)
        if episode.send(victim, signal.SIGSTOP):
            episode.disturbed(f"endless SIGSTOP of {victim.role} at {victim.cpu_s:.2f} s")
            if not (episode.workload.has_launcher and victim in ranks):
                time.sleep(episode.random.uniform(0.2, 2.0))
                episode.send(victim, signal.SIGKILL)
    codes = episode.wait()
    if not any(codes):
        episode.compare()
        return
    if episode.workload.has_launcher and ranks:
        raise LostError(f"the launcher did not restart a hung rank: exit code {codes[0]}: {episode.message()}")
    episode.check_committed()
    episode.finish()


def slow_process(episode: Episode) -> None:
    """A process that is stopped four fifths of the time, over a part of the run."""
    episode.prepare()
    episode.start()
    if living := episode.reach(episode.random.uniform(0.02, 0.5)):
        victim = episode.random.choice(living)
        episode.disturbed(f"slow {victim.role}")
        for _ in range(episode.random.randint(5, 30)):
            if not episode.send(victim, signal.SIGSTOP):
                break
            time.sleep(0.08)
            episode.send(victim, signal.SIGCONT)
            time.sleep(0.02)
    if any(codes := episode.wait()):
        raise LostError(f"a slow process ends the command with {codes}: {episode.message()}")
    episode.compare()


# ---------------------------------------------------------------- disks


def power_loss(episode: Episode) -> None:
    """All processes end and only what was synced remains."""
    with mounts.power_disk(episode.folder) as disk:
        episode.prepare(disk.path / "work")
        for _ in range(episode.random.randint(1, 3)):
            mounts.sync(disk.path)
            episode.start()
            has_succeeded = False
            if episode.random.random() < 0.3:
                share, has_succeeded = 1.0, not any(episode.wait())
            else:
                share = episode.random.uniform(0.05, 1.0)
                episode.reach(share)
            episode.sent.add(signal.SIGKILL)
            disk.fail()
            end_descendants()
            disk.restart()
            episode.disturbed("power loss after the end" if has_succeeded else f"power loss at {share:.2f} of the run")
            episode.check_committed()
            if has_succeeded:  # not started again: some commands refuse to replace what they have made
                episode.compare(may_lose_lines=True)
                return
        episode.finish(may_lose_lines=True)


def failing_disk(episode: Episode) -> None:
    """From a random time on, the disk refuses everything; then it is mounted again."""
    with mounts.power_disk(episode.folder) as disk:
        episode.prepare(disk.path / "work")
        mounts.sync(disk.path)
        episode.start()
        share = episode.random.uniform(0.05, 0.9)
        episode.reach(share)
        disk.fail()
        episode.disturbed(f"disk fails at {share:.2f} of the run")
        codes = episode.wait()
        episode.notes.append(f"{codes}: {episode.message()}")
        disk.restart()
        episode.check_committed()
        episode.finish(may_lose_lines=True)


def full_disk(episode: Episode) -> None:
    """A disk that is too small; then a larger one."""
    room = int(episode.reference.num_bytes * episode.random.uniform(0.05, 1.1))
    with mounts.small_disk(episode.folder, folder_bytes(episode.inputs) + room + (64 << 10)) as disk:
        episode.prepare(disk / "work")
        episode.disturbed(f"full disk with {room} bytes for {episode.reference.num_bytes}")
        episode.start()
        codes = episode.wait()
        episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
        episode.check_committed()
        mounts.remount(disk, "size=256m")
        episode.finish(may_lose_lines=True)


def read_only_disk(episode: Episode) -> None:
    """A disk that becomes read-only before or during the command, and writable again afterwards."""
    with mounts.small_disk(episode.folder, 256 << 20) as disk:
        episode.prepare(disk / "work")
        is_early = episode.random.random() < 0.3 and mounts.remount(disk, "ro")
        episode.start()
        if not is_early:
            episode.reach(episode.random.uniform(0.02, 0.9))
            end = time.monotonic() + 5.0
            while not mounts.remount(disk, "ro") and time.monotonic() < end:  # refused while a file is being written
                time.sleep(0.01)
        episode.disturbed("read-only from the start" if is_early else "read-only disk")
        codes = episode.wait()
        episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
        episode.check_committed()
        mounts.remount(disk, "rw")
        episode.finish(may_lose_lines=True)


def _patched(episode: Episode, patch: Patch, note: str, *, must_succeed: bool) -> None:
    """The command with a patch; then without it."""
    episode.prepare()
    episode.disturbed(note)
    episode.start(patch)
    codes = episode.wait()
    if any(codes):
        episode.notes.append(f"{codes}: {episode.message()}")
        if must_succeed:
            raise LostError(f"exit codes {codes}: {episode.message()}")
    episode.check_committed()
    episode.finish(may_lose_lines=not must_succeed)


def slowed_disk(episode: Episode) -> None:
    """Every call that writes waits."""
    _patched(episode, slow_disk(episode.random.randrange(1 << 30), 0.01), "slow disk", must_succeed=True)


def file_size_limit(episode: Episode) -> None:
    """Files that cannot grow beyond a limit (RLIMIT_FSIZE)."""
    num_bytes = int(episode.reference.num_bytes * episode.random.uniform(0.02, 0.5)) + 4096
    _patched(episode, limit_file_size(num_bytes), f"files of at most {num_bytes} bytes", must_succeed=False)


def clock_jumps(episode: Episode) -> None:
    """A wall clock that jumps back and forth by hours, days and years."""
    _patched(episode, jumping_clock(episode.random.randrange(1 << 30)), "clock jumps", must_succeed=True)


def vanished_folder(episode: Episode) -> None:
    """A folder that the command writes, or reads, is moved away while it runs."""
    episode.prepare()
    episode.start()
    episode.reach(episode.random.uniform(0.1, 0.9))
    folders = [path for path in (episode.place, *episode.place.rglob("*")) if path.is_dir()]
    folder = episode.random.choice([path for path in folders if path != episode.place] or folders)
    away = episode.folder / "away"
    episode.disturbed(f"{folder.relative_to(episode.place)} vanishes")
    try:
        folder.rename(away)
    except FileNotFoundError:  # renamed by the command itself
        episode.notes.append("was gone")
    codes = episode.wait()
    episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
    is_input = folder.is_relative_to(episode.place / "in")
    if away.exists() and not folder.exists() and (is_input or episode.random.random() < 0.5):
        folder.parent.mkdir(parents=True, exist_ok=True)
        away.rename(folder)
    if folder.name not in ("in",) and not is_input:
        episode.check_committed()
    episode.finish(may_lose_lines=True)


# ---------------------------------------------------------------- damaged files


def _damage(episode: Episode, path: Path) -> str:
    """Damage a file in a random way; which one."""
    content = bytearray(path.read_bytes())
    kind = episode.random.choice(("flipped bit", "flipped bit", "cut", "empty", "zeros", "missing"))
    if not content:
        kind = "missing"
    if kind == "flipped bit":
        at = episode.random.randrange(len(content))
        content[at] ^= 1 << episode.random.randrange(8)
    elif kind == "cut":
        del content[episode.random.randrange(len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        at = episode.random.randrange(len(content))
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(content)
    return kind


def damaged_run(episode: Episode) -> None:
    """A file of a run that is half done is damaged; the run is resumed."""
    episode.prepare()
    shutil.copytree(episode.half_run / "run", episode.place / "run")
    kinds: dict[str, list[Path]] = {}
    for path in (episode.place / "run").rglob("*"):
        if path.is_file():
            kinds.setdefault(path.suffix + path.name[:4] * (path.suffix == ".json"), []).append(path)
    for path in (episode.place / "in").glob("data_text_document*"):
        kinds[path.name] = [path]
    path = episode.random.choice(sorted(kinds[episode.random.choice(sorted(kinds))]))
    whole = path.read_bytes()
    kind = _damage(episode, path)
    name = str(path.relative_to(episode.place))
    episode.disturbed(f"{kind} of {name}")
    episode.start()
    codes = episode.wait()
    episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
    if not any(codes):
        try:
            episode.compare(may_lose_lines=True)
        except LostError:
            # Training does not read all tokens: their checksums are compared by the command for that.
            if not name.startswith("in/") or not _is_reported(episode):
                raise
            episode.notes.append("reported by dynmo-prep verify")
        return
    if path.parent.exists():
        path.write_bytes(whole)
    episode.finish(may_lose_lines=True)


def _is_reported(episode: Episode) -> bool:
    """Whether ``dynmo-prep verify`` reports the damaged data set."""
    episode.start(command=Command(program="dynmo-prep", words=("verify", "in/data_text_document")))
    return any(episode.wait())


def damaged_input(episode: Episode) -> None:
    """An input file is damaged before the command: an error that leaves nothing, or rows that are not touched."""
    episode.prepare()
    paths = sorted(path for pattern in episode.workload.inputs for path in episode.place.glob(pattern))
    path = episode.random.choice([path for path in paths if path.is_file()])
    whole = path.read_bytes()
    kind = _damage(episode, path)
    episode.disturbed(f"{kind} of {path.relative_to(episode.place)}")
    episode.start()
    codes = episode.wait()
    episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
    if any(codes):
        left = sorted(episode.workload.result(episode.place))
        if left and episode.workload.area == "ckpt":
            raise LostError(f"a failed command left {left[0]}")
    elif episode.workload.area == "ckpt":
        episode.compare()
    elif episode.workload.row_output and kind == "flipped bit":
        _check_rows(episode, whole)
    path.write_bytes(whole)
    for name in episode.workload.outputs:
        for left_over in (*episode.place.glob(f"{name}*"), *episode.place.glob(f".{name}*")):
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    episode.finish()


def _check_rows(episode: Episode, whole: bytes) -> None:
    """All rows but the damaged ones are in the output (a flipped line end damages two)."""

    def texts(lines: list[bytes]) -> Multiset[str]:
        return Multiset(json.loads(line)["text"] for line in lines if line)

    output = (episode.place / str(episode.workload.row_output)).read_bytes().split(b"\n")
    missing = (texts(whole.split(b"\n")) - texts(output)).total()
    if missing > 2:
        raise LostError(f"a flipped bit took {missing} rows")


# ---------------------------------------------------------------- network


def _refused(episode: Episode, command: Command, *, may_succeed: bool) -> None:
    """The command must end by itself, with a message."""
    episode.start(command=command)
    codes = episode.wait()
    episode.notes.append(f"{codes}: {episode.message() if any(codes) else ''}")
    if not any(codes) and not may_succeed:
        raise LostError("success, where an error was expected")


def port_in_use(episode: Episode) -> None:
    """Another program listens on the port of the rendezvous."""
    episode.prepare()
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("", port))
        taken.listen()
        episode.disturbed("port in use")
        nodes = ("--nnodes", "2", "--node-rank", "0", "--join-timeout-s", "10", "--master-port", str(port))
        _refused(episode, Command(program="dynmo-train", words=_launch(nodes)), may_succeed=False)


def unresolvable_name(episode: Episode) -> None:
    """The name of node 0 has no address."""
    episode.prepare()
    episode.disturbed("unresolvable name")
    if episode.random.random() < 0.5:
        nodes = ("--nnodes", "2", "--node-rank", str(episode.random.randint(0, 1)), "--join-timeout-s", "10")
        command = Command(program="dynmo-train", words=_launch((*nodes, "--master-addr", "no-such-host.invalid")))
    else:
        pairs = (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        pairs += (("MASTER_ADDR", "no-such-host.invalid"), ("MASTER_PORT", "29511"))
        words = train_words("--distributed-timeout-minutes", "1")
        command = Command(program="dynmo-train", words=words, environment=pairs)
    _refused(episode, command, may_succeed=False)


def _launch(nodes: tuple[str, ...]) -> tuple[str, ...]:
    words = LAUNCH[LAUNCH.index("local") + 1 : -1]
    return ("launch", "node", *words, *nodes, "--", *train_words())


# ---------------------------------------------------------------- the table


def _is_training(workload: Workload) -> bool:
    return workload.area == "train"


def _is_one_process(workload: Workload) -> bool:
    return workload.command.ranks == 1 and not workload.has_launcher


def _only(*names: str) -> Callable[[Workload], bool]:
    return lambda workload: workload.name in names


FAULTS = (
    Fault(name="SIGKILL of any process", inject=kill),
    Fault(
        name="SIGKILL at a file call",
        inject=kill_at_file_call,
        applies=_is_one_process,
    ),
    Fault(name="SIGTERM of any process", inject=terminate),
    Fault(name="SIGSTOP for seconds", inject=pause),
    Fault(name="endless SIGSTOP", inject=hang, applies=lambda each: _is_training(each) or "workers" in each.name),
    Fault(name="slow process", inject=slow_process),
    Fault(name="power loss", inject=power_loss, reason_to_skip=mounts.reason_to_skip),
    Fault(name="failing disk", inject=failing_disk, reason_to_skip=mounts.reason_to_skip),
    Fault(name="full disk", inject=full_disk, reason_to_skip=mounts.reason_to_skip),
    Fault(name="read-only disk", inject=read_only_disk, reason_to_skip=mounts.reason_to_skip),
    Fault(name="slow disk", inject=slowed_disk),
    Fault(name="file size limit", inject=file_size_limit),
    Fault(name="vanished folder", inject=vanished_folder),
    Fault(name="damaged file of a run", inject=damaged_run, applies=_only("train", "train-pipeline")),
    Fault(name="damaged input", inject=damaged_input, applies=lambda each: not _is_training(each)),
    Fault(name="clock jumps", inject=clock_jumps),
    Fault(name="port in use", inject=port_in_use, applies=_only("train-launch"), needs_reference=False),
    Fault(name="unresolvable name", inject=unresolvable_name, applies=_only("train-launch"), needs_reference=False),
)


def pairs(kinds: list[str]) -> list[tuple[Fault, Workload]]:
    """The faults whose name contains one of ``kinds``, with every workload that each can disturb here."""
    chosen = [fault for fault in FAULTS if not kinds or any(kind in fault.name for kind in kinds)]
    return [
        (fault, workload)
        for fault in chosen
        if fault.reason_to_skip() is None
        for workload in WORKLOADS.values()
        if fault.applies(workload)
    ]
