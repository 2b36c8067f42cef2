"""``python -m dynmo_train``, in which form ``launch`` starts its workers, and the console script ``dynmo-train``."""

from __future__ import annotations

import os

from .cli import main
from .launch.worker import end, watch_launcher
from .trainer.garbage_collection import collect_rarely


def run() -> None:
    """The command in a process of its own, to that process's end."""
    collect_rarely()
    watch_launcher(os.environ)
    try:
        main()
    except SystemExit as ended:
        end(ended.code, os.environ)
        raise


if __name__ == "__main__":
    run()
