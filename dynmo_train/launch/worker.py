"""What a worker process does so that it never outlives its launcher or a signal."""

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

LAUNCHER_PID_VARIABLE = "DYNMO_LAUNCHER_PID"
GRACE_VARIABLE = "DYNMO_GRACE_S"
# Seconds to save in where the whole launch was told to end, and the file that is there once it was.
SAVE_VARIABLE = "DYNMO_SAVE_S"
TOLD_FILE_VARIABLE = "DYNMO_TOLD_FILE"
# The file in which rank 0 records the run directory; the launcher restarts workers from what is there.
LAUNCH_FILE_VARIABLE = "DYNMO_LAUNCH_FILE"
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.5


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is a worker of a launcher."""
    return LAUNCHER_PID_VARIABLE in environment


def watch_launcher(environment: Mapping[str, str]) -> None:
    """Start a thread that ends this process where Python cannot; nothing happens outside a launcher.

    The main thread may stand in a collective for minutes, and Python's signal handlers wait for it. So the thread ends
    the process a few seconds after SIGTERM or SIGINT, or once the launcher is gone. Where the launcher itself was told
    to end it says so in a file, and there is more time: for the step, and to save.
    """
    if not is_launched(environment):
        return
    grace_s = float(environment.get(GRACE_VARIABLE, "5"))
    save_s = float(environment.get(SAVE_VARIABLE, "0"))
    told_file = Path(told) if (told := environment.get(TOLD_FILE_VARIABLE)) else None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    launcher = int(environment[LAUNCHER_PID_VARIABLE])
    threading.Thread(target=_watch, args=(reader, launcher, grace_s, save_s, told_file), daemon=True).start()


def _watch(reader: int, launcher: int, grace_s: float, save_s: float, told_file: Path | None) -> None:
    received, since = 0, 0.0
    while True:
        ready, _, _ = select.select([reader], [], [], min(_POLL_S, grace_s or _POLL_S))
        numbers = [number for number in os.read(reader, 64) if number in _ENDING_SIGNALS] if ready else []
        if numbers and not received:
            received, since = numbers[0], time.monotonic()
        if os.getppid() != launcher:
            time.sleep(grace_s)
            os._exit(128 + (received or signal.SIGHUP))
        if received:
            told = told_file is not None and told_file.exists()
            if time.monotonic() - since >= (max(grace_s, save_s) if told else grace_s):
                os._exit(128 + received)


def end(code: object, environment: Mapping[str, str]) -> None:
    """End this process with the exit code that its work gave; an exit with a message goes on from here.

    Threads of process groups, which a run in one process has as well, let go of tensors when they like. Where one does
    so while the interpreter is being torn down, the process ends by SIGABRT ("terminate called without an active
    exception") after all its work is done, so the interpreter is not torn down: what Python does at an exit is done
    here.
    """
    if is_launched(environment):
        # A scheduler or a terminal signals the launcher and its workers, and the launcher signals them again.
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
    os._exit(code or 0)
