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

from ..errors import EXIT_RELAUNCH

LAUNCHER_PID_VARIABLE = "DYNMO_LAUNCHER_PID"
GRACE_VARIABLE = "DYNMO_GRACE_S"
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.5


def watch_launcher(environment: Mapping[str, str]) -> None:
    """Start a thread that ends this process where Python cannot; nothing happens outside a launcher.

    The main thread may stand in a collective for minutes, and Python's signal handlers wait for it. So the thread ends
    the process a few seconds after SIGTERM or SIGINT, or once the launcher is gone.
    """
    launcher = environment.get(LAUNCHER_PID_VARIABLE)
    if launcher is None:
        return
    grace_s = float(environment.get(GRACE_VARIABLE, "5"))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_watch, args=(reader, int(launcher), grace_s), daemon=True).start()


def _watch(reader: int, launcher: int, grace_s: float) -> None:
    while True:
        ready, _, _ = select.select([reader], [], [], _POLL_S)
        received = [number for number in os.read(reader, 64) if number in _ENDING_SIGNALS] if ready else []
        if received:
            time.sleep(grace_s)
            os._exit(128 + received[0])
        if os.getppid() != launcher:
            time.sleep(grace_s)
            os._exit(128 + signal.SIGHUP)


def end(code: object, environment: Mapping[str, str]) -> None:
    """End a launcher's worker that has done its work; one that failed, and a process of no launcher, go on from here.

    Threads of process groups let go of tensors when they like. Where one does so while the interpreter is being torn
    down, the process ends by SIGABRT ("terminate called without an active exception") after all its work is done, so
    the interpreter is not torn down: what Python does at an exit is done here.
    """
    if LAUNCHER_PID_VARIABLE not in environment or code not in (None, 0, EXIT_RELAUNCH):
        return
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_RELAUNCH if code else 0)
