"""Worker processes end with their launcher and after a signal, also inside a blocking collective."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from .signal_files import record_dropped
from .watch.heartbeat import HEARTBEAT_VARIABLE

LAUNCHER_PID_VARIABLE = "DYNMO_LAUNCHER_PID"
GRACE_VARIABLE = "DYNMO_GRACE_S"
# Seconds to save a checkpoint after the launcher received a signal, and the file that exists from then on.
SAVE_VARIABLE = "DYNMO_SAVE_S"
SHUTDOWN_FILE_VARIABLE = "DYNMO_SHUTDOWN_FILE"
# The file in which rank 0 records the run directory, from which the launcher restarts the workers.
LAUNCH_FILE_VARIABLE = "DYNMO_LAUNCH_FILE"
# The file by which node 0 asks rank 0 to save and exit with 75, because nodes wait to join.
JOIN_FILE_VARIABLE = "DYNMO_JOIN_FILE"
# Number of the generation of ranks that this process is in, once others have died and it continues without them.
GENERATION_VARIABLE = "DYNMO_GENERATION"
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.5


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is a worker of a launcher."""
    return LAUNCHER_PID_VARIABLE in environment


def watch_launcher(environment: Mapping[str, str]) -> None:
    """Start a thread that ends this process after a signal or the end of the launcher; no effect without a launcher.

    Python runs signal handlers in the main thread, which may block in a collective for minutes. The thread therefore
    ends the process ``DYNMO_GRACE_S`` seconds after SIGTERM or SIGINT, or once the launcher is gone. If the launcher
    itself received the signal, which a file indicates, the process has ``DYNMO_SAVE_S`` seconds to save.
    """
    if not is_launched(environment):
        return
    grace_s = float(environment.get(GRACE_VARIABLE, "5"))
    save_s = float(environment.get(SAVE_VARIABLE, "0"))
    shutdown_file = Path(path) if (path := environment.get(SHUTDOWN_FILE_VARIABLE)) else None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Written by Python's C handler as soon as a signal arrives, also while the main thread is in a collective.
    signal.set_wakeup_fd(writer)
    launcher = int(environment[LAUNCHER_PID_VARIABLE])
    threading.Thread(target=_watch, args=(reader, launcher, grace_s, save_s, shutdown_file), daemon=True).start()


def _watch(reader: int, launcher: int, grace_s: float, save_s: float, shutdown_file: Path | None) -> None:
    received, since = 0, 0.0
    while True:
        ready, _, _ = select.select([reader], [], [], min(_POLL_S, grace_s or _POLL_S))
        numbers = [number for number in os.read(reader, 64) if number in _ENDING_SIGNALS] if ready else []
        if numbers and not received:
            received, since = numbers[0], time.monotonic()
        # A process whose parent has ended gets another parent. SIGKILL of the launcher sends no signal to this process.
        if os.getppid() != launcher:
            time.sleep(grace_s)
            os._exit(128 + (received or signal.SIGHUP))
        if received:
            may_save = shutdown_file is not None and shutdown_file.exists()
            if time.monotonic() - since >= (max(grace_s, save_s) if may_save else grace_s):
                # Not sys.exit: the main thread, which would have to handle it, is blocked.
                os._exit(128 + received)


def exit_process(code: object, environment: Mapping[str, str]) -> None:
    """Exit without finalizing the interpreter; returns if ``code`` is a message.

    Threads of process groups may release tensors at any time. If one does so during finalization, the process aborts
    ("terminate called without an active exception") after all its work is done. This function therefore joins threads,
    runs exit handlers and flushes streams itself.

    Args:
        code: argument of ``SystemExit``: an exit code, None or a message.
        environment: environment of the process.
    """
    if is_launched(environment):
        # A scheduler or terminal signals both launcher and workers, and the launcher forwards the signal.
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if code is not None and not isinstance(code, int):
        return
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_launched(environment) and (folder := environment.get(HEARTBEAT_VARIABLE)):
        record_dropped(Path(folder), int(environment.get("RANK", "0")))
    os._exit(code or 0)


def is_orphan(environment: Mapping[str, str]) -> bool:
    """Whether the launcher of this process has ended before it, as after SIGKILL."""
    return is_launched(environment) and os.getppid() != int(environment[LAUNCHER_PID_VARIABLE])
