"""Runs lm-evaluation-harness on a trained model with local data, without a network.

--load --dynmo-ckpt convert--> Hugging Face directory --+
--task-data --write_task--> local task files -----------+--> lm_eval subprocess --results.json--> HarnessResult
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
from .._common.errors import DynmoError, MissingExtraError, UsageError
from ..config.evaluation import HarnessConfig
from ..launch.find_command import program_path
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


def export(path: Path, folder: Path) -> Path:
    """Return the model as a Hugging Face directory, converted into ``folder`` by ``dynmo-ckpt`` if needed.

    Args:
        path: a checkpoint, or already a Hugging Face directory.
        folder: directory for the conversion.

    Raises:
        UsageError: ``dynmo-ckpt`` is not installed, or it cannot convert the checkpoint.
    """
    if is_hugging_face(path):
        return path
    program = program_path("dynmo-ckpt")
    if program is None:
        raise UsageError(
            "dynmo-ckpt, which exports the model, is not installed; run: pip install 'dynmo-toolkit[ckpt]'"
        )
    target = folder / "hf"
    command = [program, "convert", str(path), str(target), "--to", "hf"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().removeprefix("dynmo-ckpt: error: ") or f"exit code {done.returncode}"
        raise UsageError(f"{path}: dynmo-ckpt cannot export it: {message}")
    return target


def run_harness(task: HarnessConfig) -> HarnessResult:
    """Evaluate the model of a checkpoint with lm-evaluation-harness on local data.

    Args:
        task: the model, the tasks and their data.

    Raises:
        UsageError: a task is unknown, its data is missing or not in its format, or the checkpoint cannot be exported.
        HarnessError: the harness failed; the message has the end of its stderr.
    """
    check_device(task.device)
    names, data = parse_tasks(task.tasks), Path(task.task_data)
    harness = harness_folder()
    rows = {name: read_rows(name, find_data(name, data)) for name in names}
    with tempfile.TemporaryDirectory(prefix="dynmo-harness-") as work:
        folder = Path(work)
        model = export(Path(task.load), folder)
        local = [write_task(name, rows[name], folder, harness / "tasks") for name in names]
        command = [
            *(sys.executable, "-m", "lm_eval"),
            # Newer releases of the harness have subcommands.
            *(("run",) if (harness / "_cli").is_dir() else ()),
            *("--model", "hf", "--model_args", f"pretrained={model},dtype={task.dtype}"),
            *("--tasks", ",".join(local), "--include_path", str(folder)),
            *("--device", task.device, "--batch_size", str(task.batch_size)),
            *("--output_path", str(folder / "out")),
            *(("--limit", str(task.limit)) if task.limit is not None else ()),
        ]
        print_message(f"lm-evaluation-harness: {', '.join(names)} on {model}")
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
