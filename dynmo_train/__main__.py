"""Entry point of ``dynmo-train`` and of ``python -m dynmo_train``, which ``launch`` runs for each worker."""

from __future__ import annotations

import os

from ._common.streams import keep_running
from .cli import main
from .launch.failure_record import recording_failure
from .launch.worker import exit_process, watch_launcher
from .trainer.garbage_collection import collect_rarely


def run() -> None:
    """Run the command and end the process with its exit code."""
    collect_rarely()
    keep_running("stderr")
    watch_launcher(os.environ)
    try:
        with recording_failure(os.environ):
            main()
    except SystemExit as exit_:
        exit_process(exit_.code, os.environ)
        raise


if __name__ == "__main__":
    run()
