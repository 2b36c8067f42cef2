"""What holds for every test process: levels, distribution over processes, signals, and what a run prints at its end.

A test that carries the marker ``complete`` runs with ``--all`` only; a module that carries it (``pytestmark``) is not
even imported without. All modules whose tests play in pools of processes (``tests/distributed/workers.py``) run in one
process of xdist, so that there is one pool for each world size.
"""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path

import pytest

from tests.levels import IS_COMPLETE

FOLDER = Path(__file__).parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
USES_POOLS = re.compile(r"^from tests\.distributed\.(?:workers|random_placements) import ", re.MULTILINE)
# What a test records under these names (``record_property``) is printed at the end of the run.
RECORDED = ("layouts", "documents")

# A shell that starts a command in the background makes it ignore SIGINT, and its children inherit that. The tests
# that press Ctrl-C need the ordinary disposition, whoever starts them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of processes: the first one compiles the packages for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several processes of tests share the cores; threads of torch that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's token authentication depends on a file in the home directory, and a local cluster creates it there.
os.environ["RAY_AUTH_MODE"] = "disabled"

# xdist gives each process one module after the other; with the long ones first all processes end at the same time.
LONG_FIRST = ("distributed", "e2e", "faults", "parity", "cli", "mutants")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked complete")
    parser.addoption("--no-skips", action="store_true", help="fail where a test is skipped")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and "skipped" in reporter.stats:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of the complete level; one that is named on the command line is a mistake."""
    if config.getoption("all") or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if not IS_COMPLETE.search(text_of(collection_path)):
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if collection_path in named:
        raise pytest.UsageError(f"{collection_path.relative_to(FOLDER.parent)} is marked complete: add --all")
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of the complete level, and put the folders whose modules take long in front."""
    if not config.getoption("all"):
        complete = [item for item in items if item.get_closest_marker("complete")]
        config.hook.pytest_deselected(items=complete)
        left_out = set(complete)
        items[:] = [item for item in items if item not in left_out]

    def place(item: pytest.Item) -> int:
        if USES_POOLS.search(text_of(item.path)):
            return -1
        folder = item.path.relative_to(FOLDER).parts[0]
        return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One module after the other for each process; all modules with pools count as one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "pools" if USES_POOLS.search(text_of(FOLDER.parent / module)) else module

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded: the layouts that were drawn, the documents that were run."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name in RECORDED and report.when == "call":
                    terminalreporter.write_sep("-", name)
                    terminalreporter.write_line(str(value))


@pytest.fixture(autouse=True)
def restored_signals():
    """Put the handlers of signals back: commands that run in this process set some, which later processes inherit."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
