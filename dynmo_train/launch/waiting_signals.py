"""Signals to a launcher while it waits for other nodes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end this process by ``SystemExit`` while it waits, so that it can leave.

    While its processes run, the elastic agent handles signals.
    """

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {
        number: signal.signal(number, end) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
