"""Shows the status of a run: once as plain text, or as a view on a terminal that follows the run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..._common.errors import UsageError
from .live_view import (
    LiveView,
    bar,
    event_line,
    fit,
    incident_line,
    loss_parts,
    migration_line,
    rate_parts,
    sparkline,
    state,
    time_left,
    worker_parts,
)
from .run_status import RunFollower, RunStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_QUIT = b"qQ\x04"


def format_status(status: RunStatus, *, ascii_only: bool = False) -> str:
    """The status as plain text; ``ascii_only`` where the output has no block characters."""
    of = f" of {status.train_iters:,}" if status.train_iters is not None else ""
    left = time_left(status)
    is_stopped = status.exit_code is not None or status.has_processes is False
    stopped = f", {state(status)}" if is_stopped else ""
    end = ", done" if status.is_done else stopped
    lines = [
        f"{status.run}: step {status.step:,}{of}{end}{left}",
        "  ".join(loss_parts(status)),
        "  ".join(rate_parts(status)),
    ]
    if status.losses:
        lines.append(f"{sparkline(status.losses, ascii_only=ascii_only)}  last {len(status.losses)} losses")
    for worker in status.workers:
        load, memory = worker.load or 0.0, worker.peak_memory_bytes
        used = f"{memory / 1e9:.2f} GB" if memory is not None else "-"
        filled = bar(load, 40, ascii_only=True).replace("-", " ")
        lines.append(f"worker {worker.worker:3d} {filled} {load:6.1%}  {used}  {worker.layers}".rstrip())
    if parts := worker_parts(status)[1:]:
        lines.append("  ".join(parts))
    lines += [line for line in (migration_line(status), event_line(status)) if line is not None]
    for plan in status.plans[-6:]:
        reason = f": {plan.reason}" if plan.reason else ""
        lines.append(f"plan {plan.plan_id} {plan.result} at step {plan.step}{reason}")
    lines += [f"  {event}" for event in status.events]
    lines += [line for line in (incident_line(status),) if line is not None]
    if status.invalid_lines:
        lines.append(f"{status.invalid_lines:,} lines of the run's files could not be read")
    return "\n".join(lines)


@contextlib.contextmanager
def _keys_and_resizes() -> Iterator[list[int]]:
    """Descriptors that become readable on a key or when the terminal is resized; restores the terminal at the end."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def on_resize(_signum: int, _frame: FrameType | None) -> None:
        # A full pipe already wakes the loop.
        with contextlib.suppress(BlockingIOError):
            os.write(write_end, b"r")

    # ``select`` is resumed after a signal, so that the handler has to make a descriptor readable.
    resize_handler = signal.signal(signal.SIGWINCH, on_resize)
    descriptors, terminal_settings = [read_end], None
    if sys.stdin is not None and sys.stdin.isatty():
        import termios
        import tty

        terminal_settings = termios.tcgetattr(sys.stdin.fileno())
        # Keys without Enter and without echo; Ctrl-C still sends SIGINT.
        tty.setcbreak(sys.stdin.fileno(), termios.TCSANOW)
        descriptors.append(sys.stdin.fileno())
    try:
        yield descriptors
    finally:
        if terminal_settings is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, terminal_settings)
        signal.signal(signal.SIGWINCH, resize_handler)
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def _resizes_wait() -> Iterator[None]:
    """Deliver SIGWINCH afterwards: it would end a write to a terminal that is full in the middle of a sequence."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(descriptors: list[int], timeout_s: float) -> bool:
    """Wait for the next update, a key or a resize; whether to quit."""
    ready, _, _ = select.select(descriptors, [], [], timeout_s)
    for descriptor in ready:
        keys = os.read(descriptor, 1024)
        if descriptor != descriptors[0]:
            if not keys:
                # The end of the input: it stays readable and must not be polled again.
                descriptors.remove(descriptor)
            if any(key in _QUIT for key in keys):
                return True
    return False


def is_ascii_output() -> bool:
    """Whether standard output cannot encode block characters."""
    return not (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def is_live_terminal() -> bool:
    """Whether standard output is a terminal that can redraw a screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class _Screen:
    """Draws lines on the terminal: only those that changed since the last time, for slow connections.

    Args:
        console: console of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size: tuple[int, int] | None = None
        self._lines: list[Text] = []

    def draw(self, lines: list[Text], size: tuple[int, int]) -> None:
        """Draw ``lines`` on a terminal of ``size``, width and height in characters."""
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text

        # One write for all lines, since the console is buffered within its context.
        with _resizes_wait(), self._console:
            if size != self._size:
                self._console.control(Control.clear())
                self._size, self._lines = size, []
            old_lines = self._lines + [Text()] * (len(lines) - len(self._lines))
            new_lines = lines + [Text()] * (len(old_lines) - len(lines))
            for row, (old, new) in enumerate(zip(old_lines, new_lines, strict=True)):
                if (old.plain, old.spans, old.style) == (new.plain, new.spans, new.style):
                    continue
                # Erased first: after a character in the last column some terminals would erase that one.
                self._console.control(Control.move_to(0, row), Control((ControlType.ERASE_IN_LINE, 2)))
                self._console.print(new, end="", no_wrap=True, overflow="crop", soft_wrap=True)
            self._lines = lines


def watch(run: Path, interval_s: float, peak_flops_per_s: float | None = None) -> None:
    """Show the run on the terminal, updated every ``interval_s`` seconds, until its last step, ``q`` or Ctrl-C.

    The view waits for a run that has not started. At the end the last view stays on the terminal.

    Args:
        run: run directory; it need not exist yet.
        interval_s: seconds between updates.
        peak_flops_per_s: peak FLOP/s of a device; None: known for some devices.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    ascii_only = console.options.ascii_only
    follower = RunFollower(run, peak_flops_per_s=peak_flops_per_s)
    status: RunStatus | None = None
    problem, is_over = "", False
    with _keys_and_resizes() as descriptors, console.screen():
        screen, polled = _Screen(console), 0.0
        while not is_over:
            # A key or a resize draws the view again, without another look at the files.
            if time.monotonic() - polled >= interval_s or status is None:
                status, problem = _poll(follower)
                polled = time.monotonic()
            width, height = console.size
            if status is None:
                waiting = (f"waiting for run.json (q quits): {run}", problem)
                lines = [fit(Text(line), width, ascii_only=ascii_only) for line in waiting]
            else:
                lines = LiveView(status, ascii_only=ascii_only).lines(width, height)
            screen.draw(lines, (width, height))
            is_over = status is not None and status.is_over
            timeout_s = max(0.0, polled + interval_s - time.monotonic())
            is_over = is_over or _wait(descriptors, timeout_s)
    if status is not None:
        console.print(LiveView(status, ascii_only=ascii_only).render(console.width, console.height - 1))


def _poll(follower: RunFollower) -> tuple[RunStatus | None, str]:
    """The status, or None and the reason while there is no run."""
    try:
        return follower.poll(), ""
    except UsageError as error:
        return None, str(error)
