"""What holds for every test process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A shell that starts a command in the background makes it ignore SIGINT, and its children inherit that. The tests
# that press Ctrl-C need the ordinary disposition, whoever starts them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of processes: the first one compiles the packages for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ray's token authentication depends on a file in the home directory, and a local cluster creates it there.
os.environ["RAY_AUTH_MODE"] = "disabled"

# xdist gives each process one module after the other; with the long ones first both processes end at the same time.
LONG_FIRST = ("distributed", "e2e", "faults", "parity", "cli", "mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders whose modules take long in front; within a folder the order stays."""
    folders = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(folders).parts[0]
        return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def restored_signals():
    """Put the handlers of signals back: commands that run in this process set some, which later processes inherit."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
