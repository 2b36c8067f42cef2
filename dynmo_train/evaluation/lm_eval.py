"""Runs lm-evaluation-harness on a trained model with local data, without a network.

--load: a Hugging Face directory --transformers------+
--load: any other --harness_model.py-----------------+
--task-data --write_task--> local task files --------+--> subprocess --results.json--> HarnessResult
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._common.console import print_message
from .._common.document import read_any_json
from .._common.errors import DynmoError, MissingExtraError
from ..config.sections.evaluation import HarnessConfig
from ..parallel.process_groups import check_device
from ..trainer.checkpoint.load_checkpoint import is_hugging_face
from .lm_eval_data import find_data, parse_tasks, read_rows, write_task

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class HarnessError(DynmoError):
    """The harness failed."""


@dataclass(frozen=True, kw_only=True)
class HarnessResult:
    """Results by task and metric, and the number of samples of each task."""

    results: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints."""
        return {task: {"items": self.samples[task], **metrics} for task, metrics in self.results.items()}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Table rows: task, number of items, metric, value."""
        return [
            (task, str(self.samples[task]), metric, f"{value:.4f}")
            for task, metrics in self.results.items()
            for metric, value in metrics.items()
        ]


def harness_folder() -> Path:
    """The directory of the installed harness.

    Raises:
        MissingExtraError: it is not installed.
    """
    # ``find_spec`` does not import the harness, which takes seconds.
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        raise MissingExtraError("lm_eval", "lm-eval")
    return Path(found.origin).parent


def model_arguments(task: HarnessConfig) -> tuple[str, ...]:
    """The Python module that runs the harness, and its options of the model.

    A Hugging Face directory is read by transformers, as by the harness itself. Any other model runs in the engine of
    ``generate``, whatever its family.
    """
    path = Path(task.load)
    if is_hugging_face(path):
        return ("lm_eval", "--model", "hf", "--model_args", f"pretrained={path},dtype={task.dtype}")
    module = f"{__package__}.harness_model"
    return (module, "--model", "dynmo", "--model_args", f"load={path.absolute()},dtype={task.dtype}")


def run_harness(task: HarnessConfig) -> HarnessResult:
    """Evaluate the model of a checkpoint with lm-evaluation-harness on local data.

    Args:
        task: the model, the tasks and their data.

    Raises:
        UsageError: a task is unknown, or its data is missing or not in its format.
        HarnessError: the harness failed; the message has the end of its stderr.
    """
    check_device(task.device)
    names, data = parse_tasks(task.tasks), Path(task.task_data)
    harness = harness_folder()
    rows = {name: read_rows(name, find_data(name, data)) for name in names}
    with tempfile.TemporaryDirectory(prefix="dynmo-harness-") as work:
        folder = Path(work)
        local = [write_task(name, rows[name], folder, harness / "tasks") for name in names]
        module, *model = model_arguments(task)
        command = [
            *(sys.executable, "-m", module),
            # Newer releases of the harness have subcommands.
            *(("run",) if (harness / "_cli").is_dir() else ()),
            *model,
            *("--tasks", ",".join(local), "--include_path", str(folder)),
            *("--device", task.device, "--batch_size", str(task.batch_size)),
            *("--output_path", str(folder / "out")),
            *(("--limit", str(task.limit)) if task.limit is not None else ()),
        ]
        print_message(f"lm-evaluation-harness: {', '.join(names)} on {task.load}")
        environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "cache")}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
        )
        found = sorted((folder / "out").rglob("results*.json"))
        if done.returncode or not found:
            tail = "\n  ".join(done.stderr.strip().splitlines()[-8:])
            raise HarnessError(f"lm-evaluation-harness failed with exit code {done.returncode}:\n  {tail}")
        return _result(read_any_json(found[-1]), names)


def _result(document: Mapping[str, Any], names: list[str]) -> HarnessResult:
    results, samples = {}, {}
    for name in names:
        metrics = document["results"][f"local_{name}"]
        results[name] = {
            metric.removesuffix(",none"): float(value)
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "," in metric
        }
        samples[name] = int(document["n-samples"][f"local_{name}"]["effective"])
    return HarnessResult(results=results, samples=samples)
