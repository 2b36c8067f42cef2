"""What the fault campaign disturbs: training runs, steps of data preparation, and conversions of checkpoints.

A workload is a command that runs in an episode's folder with the inputs at ``in``; starting it again resumes or repeats
it. ``result`` reads the bits that an undisturbed run leaves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.cli.prep_steps import DERIVED_INPUTS, STEPS, outputs, write_inputs
from tests.distributed.whole_runs import arguments, tensors
from tests.faults.forked_programs import Command
from tests.unit.dynmo_ckpt import native_checkpoints

ITERATIONS, HALF = 16, 9
Result = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A command and what it leaves.

    Attributes:
        name: name in the table; ``area`` is the part before the first dash.
        command: the command line.
        result: bits that a finished run left in a folder.
        outputs: paths that the command writes, relative to the folder.
        inputs: patterns of the input files that it reads.
        row_output: the output that has the rows of the input, where one damaged row must not change others.
        reference: workload whose result this one must have.
        has_launcher: whether it restarts failed and hung ranks by itself.
    """

    name: str
    command: Command
    result: Callable[[Path], Result]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    row_output: str | None = None
    reference: str = ""
    has_launcher: bool = False

    @property
    def area(self) -> str:
        """``train``, ``prep`` or ``ckpt``."""
        return self.name.partition("-")[0]


# ---------------------------------------------------------------- training

MODEL = {
    "num_layers": "2",
    "hidden_size": "16",
    "num_attention_heads": "2",
    "seq_length": "16",
    "global_batch_size": "4",
    "train_iters": str(ITERATIONS),
    "lr_decay_iters": str(ITERATIONS),
    "vocab_size": "270",
    "split": "1",
    "eval_iters": "0",
    "eval_interval": "1000",
    "log_interval": "4",
    "save_interval": "3",
    "pruning_start_iter": "4",
    "pruning_end_iter": "12",
    "freeze_schedule": "6:1",
    "rebalance_interval": None,
}


def train_words(*extra: str) -> tuple[str, ...]:
    """A small run with pruning and freezing, which resumes itself.

    Without a launcher a rank waits for one that was killed, as long as a collective may take: below the campaign's
    limit of a hang.
    """
    run = Path("run")
    words = ("--save", "run", "--load", "run", "--distributed-timeout-minutes", "2")
    return tuple(arguments(Path("in/data_text_document"), run, *words, *extra, **MODEL))


def read_training(folder: Path) -> Result:
    """Loss and gradient norm of each step, and the checksum of each tensor of the last checkpoint."""
    steps = {}
    for line in (folder / "run" / "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # a damaged line: its step is missing
            continue
        if "lm_loss" in record:
            steps[f"step {record['step']}"] = repr((record["lm_loss"], record["grad_norm"]))
    return steps | tensors(folder / "run", ITERATIONS)


ONLINE = ("--balance", "online", "--rebalance-interval", "4", "--planner-timeout-s", "60")
LAUNCH = ("launch", "local", "--nproc", "2", "--max-restarts", "50", "--grace-s", "2", "--hang-min-s", "30")
LAUNCH += ("--log-dir", "logs", "--")


def _training(name: str, words: tuple[str, ...], ranks: int = 1, *, has_launcher: bool = False) -> Workload:
    return Workload(
        name=name,
        command=Command(program="dynmo-train", words=words, ranks=ranks),
        result=read_training,
        outputs=("run", "logs"),
        inputs=("in/data_text_document.*",),
        reference="train",
        has_launcher=has_launcher,
    )


TRAINING = (
    _training("train", train_words()),
    _training("train-async", train_words("--async-save")),
    _training("train-workers", train_words("--num-workers", "1")),
    _training("train-pipeline", train_words("--async-save"), 2),
    _training("train-planner", train_words(*ONLINE), 2),
    _training("train-launch", (*LAUNCH, *train_words()), has_launcher=True),
)
HALF_RUN = Command(program="dynmo-train", words=train_words("--exit-interval", str(HALF)))

# ---------------------------------------------------------------- data preparation


def read_outputs(folder: Path) -> Result:
    """A digest of each file that a step left, without times and the checksums of documents with one."""
    found = {
        name: re.sub(rb'"manifest_crc32": ?"[^"]*"|"conversion.json": ?{[^}]*}', b"", content)
        for name, content in outputs(folder).items()
        if not name.startswith(("in/", "log"))
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(found.items())}


ROW_OUTPUTS = {"merge": "out.jsonl", "add-id": "out.jsonl", "shuffle": "out.jsonl"}
PREP_STEPS = (
    "merge", "add-id", "clean", "dedup", "decontaminate", "shuffle", "train-tokenizer", "binarize", "split-sentences",
    "extract-wiki", "merge-indexed", "convert-indexed",
)  # fmt: skip
HAS_WORKERS = ("clean", "split-sentences", "binarize")


def _step(step: str, workers: int) -> Workload:
    words = [word.format(**{"in": "in"}).replace(".zst", "") for word in STEPS[step]]
    inputs = [word for word in words if word.startswith("in/") or "=in/" in word]
    written = [word for before, word in pairwise(words) if before in ("-o", "--save-dropped", "--save-dictionary")]
    return Workload(
        name=f"prep-{step}" + ("-workers" if workers > 1 else ""),
        command=Command(
            program="dynmo-prep",
            words=(step, *words, *(("--workers", str(workers)) if workers > 1 else ())),
        ),
        result=read_outputs,
        outputs=tuple(written),
        inputs=tuple(f"{word.partition('=')[2] or word}*" for word in inputs),
        row_output=ROW_OUTPUTS.get(step),
    )


PREPARATION = (*(_step(step, 1) for step in PREP_STEPS), *(_step(step, 2) for step in HAS_WORKERS))

# ---------------------------------------------------------------- checkpoints


def _conversion(name: str, *words: str) -> Workload:
    return Workload(
        name=f"ckpt-{name}",
        command=Command(program="dynmo-ckpt", words=(*words, "--overwrite")),
        result=read_outputs,
        outputs=("out",),
        inputs=("in/ckpt/*",),
    )


CONVERSIONS = (
    _conversion("merge", "merge", "in/ckpt", "out"),
    _conversion("reshard", "reshard", "in/ckpt", "out", "--tp", "1", "--pp", "2"),
    _conversion("to-megatron", "convert", "in/ckpt", "out", "--to", "legacy"),
)

WORKLOADS = {workload.name: workload for workload in (*TRAINING, *PREPARATION, *CONVERSIONS)}


def write_campaign_inputs(folder: Path, run: Callable[[Command, Path], None]) -> None:
    """The inputs of all workloads at ``folder / "in"``; ``run`` runs a command in a folder."""
    place = folder / "in"
    place.mkdir(parents=True)
    write_inputs(place)
    for words in DERIVED_INPUTS:
        run(Command(program="dynmo-prep", words=tuple(word.replace("{in}", "in") for word in words)), folder)
    model = native_checkpoints.model()
    parameters = native_checkpoints.parameters(model)
    native_checkpoints.save(place / "ckpt", parameters | native_checkpoints.optimizer_state(parameters), model, tp=2)
