"""Errors of this package: one root, and the exit code that each kind ends a command with.

Kinds that belong to one package derive from these in that package's own modules.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_RELAUNCH = 75
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class DynmoError(Exception):
    """An error that is reported in one message, without a traceback.

    The message states the values, the rule that they break and the remedy.
    """

    exit_code = EXIT_FAILURE


class UsageError(DynmoError):
    """Bad input or a wrong use of a command; ends it with exit code 2."""

    exit_code = EXIT_USAGE


class MissingExtraError(UsageError):
    """A command needs an optional dependency that is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"the module {module!r} is not installed; run: pip install 'dynmo-toolkit[{extra}]'")
