"""Weights & Biases, through its own client.

A run has the id of the run directory (``run_id`` of ``run.json``), so that each start of a run continues one W&B run.
A resume from an older checkpoint repeats steps, and W&B drops rows whose step is not above the last one. The steps are
therefore a metric, ``iteration``, which is the x-axis of all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...._common.console import print_message
from ...._common.errors import MissingExtraError
from .tracker_thread import ScalarRecord

MODULE, EXTRA = "wandb", "wandb"
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 20.0
EVENT_COLUMNS = ("time_utc", "step", "kind", "message")


def check_wandb() -> None:
    """Import the client.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import_module(MODULE)
    except ImportError as error:
        raise MissingExtraError(MODULE, EXTRA) from error


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """What identifies a run on W&B.

    Attributes:
        project: name of the project.
        name: name of the run.
        entity: user or team; None: that of the account.
        run_id: id of the run.
        folder: W&B writes to ``folder/wandb``.
    """

    project: str
    name: str
    entity: str | None
    run_id: str
    folder: Path


class WandbClient:
    """Writes a run to W&B; offline where W&B cannot be reached at the start.

    Args:
        run: names and id.
        config: option name -> value.
    """

    name = "Weights & Biases"

    def __init__(self, run: WandbRun, config: Mapping[str, Any]) -> None:
        self._wandb = import_module(MODULE)
        self._names, self._config = run, dict(config)
        self._run: Any = None

    def start(self) -> None:
        """Open the run; offline if that fails, so that ``wandb sync`` can upload it later."""
        try:
            problem = self._login_problem()
            if problem is None:
                self._init()
        except self._wandb.Error as error:
            problem = " ".join(str(error).split())[:300]
        if problem is not None:
            self._init(mode="offline")
            print_message(
                f"warning: {self.name}: {problem}; the run is written offline: upload it with `wandb sync"
                f" {self._run.settings.sync_dir}`"
            )
        # Values of an earlier start may differ.
        self._run.config.update(self._config, allow_val_change=True)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def _login_problem(self) -> str | None:
        # Without an API key the client would ask for one on a terminal, in the middle of the training log.
        if self._wandb.setup().settings.mode not in ("online", "shared") or self._wandb.login(prompt=False):
            return None
        return "not logged in: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"

    def _init(self, **options: Any) -> None:
        run = self._names
        # W&B falls back to the temporary folder if its folder does not exist.
        os.makedirs(run.folder, exist_ok=True)
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            entity=run.entity,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            # The training log stays on stdout as it is.
            settings=self._wandb.Settings(
                console="off", silent=True, init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S
            ),
            **options,
        )

    def write(self, records: Sequence[ScalarRecord]) -> None:
        """Queue scalars in the process of the client."""
        for record in records:
            self._run.log({**record.scalars, "iteration": record.step, "_timestamp": record.time_s})

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the events as a table."""
        rows = [[event.get(column) for column in EVENT_COLUMNS] for event in events]
        self._run.log({"events": self._wandb.Table(columns=list(EVENT_COLUMNS), data=rows)})

    def finish(self, exit_code: int | None) -> None:
        """End the run; W&B shows it as failed if the exit code is not 0.

        Args:
            exit_code: exit code of the training; None after an error.
        """
        self._run.finish(exit_code=1 if exit_code is None else exit_code)
