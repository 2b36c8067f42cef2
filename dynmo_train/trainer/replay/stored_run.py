"""What a replay reads of a run: configuration, metrics of steps, checkpoints. Pure functions of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..._common.document import UnreadableError, read_records
from ..._common.errors import UsageError
from ...config import Config, DefaultContext, check, resolve
from ...config.batch_schedule import Range, merged_ranges, parse_ranges
from ...data.tokenizer import read_vocab_size
from ...formats.checkpoint import list_checkpoints, step_of
from ...formats.checkpoint.reader import load_manifest
from ...formats.plan import read_plan
from ...formats.run import read_run
from ...formats.step_digests import StepFigures, finite_or_none

# Tables of options without effect on a replay: it moves no layers, emulates nothing and writes no logs.
_LEFT_OUT = ("balance", "emulation", "tracking")
# Options of the placement, which a replay chooses.
PLACEMENT = (
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "virtual_stages_per_worker",
    "schedule",
)
_GIVEN = ("file", "flag", "command")
# Options of the layout, which decides the bits of a step.
_LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "zero_stage",
    "zero_gradient_sync",
    "hsdp",
    "vocabulary_parallel",
)


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A line of ``metrics.jsonl``.

    Attributes:
        figures: loss and gradient norm.
        first_sample: number of samples before the batch.
        size: samples of the batch.
    """

    figures: StepFigures
    first_sample: int
    size: int


@dataclass(frozen=True, kw_only=True)
class LossyPlacement:
    """What the bits of a step depend on with lossy compression.

    Attributes:
        stages: items of each stage.
        ranks: number of pipeline ranks.
        schedule: schedule of the pipeline.
    """

    stages: tuple[tuple[str, ...], ...]
    ranks: int
    schedule: str

    @property
    def text(self) -> str:
        """The placement in words, with the number of items of each stage."""
        items = "+".join(str(len(stage)) for stage in self.stages)
        return f"{self.ranks} pipeline rank{'s'[: self.ranks != 1]}, {self.schedule}, {items} items"


@dataclass(frozen=True, kw_only=True)
class PlacementChange:
    """A change during a run of what lossy compression depends on.

    Attributes:
        step: last step before it.
        kind: kind of its event: ``plan_applied`` or ``selective_grad_comp``.
    """

    step: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run on disk.

    Attributes:
        path: run directory.
        document: contents of ``run.json``.
        steps: step -> its last line in the metrics: a run that resumed or rolled back has executed some steps twice.
        skipped: samples that rollbacks of the run skipped.
        changes: changes of what lossy compression depends on.
    """

    path: Path
    document: Mapping[str, Any]
    steps: Mapping[int, LoggedStep]
    skipped: tuple[Range, ...] = ()
    changes: tuple[PlacementChange, ...] = ()

    @classmethod
    def read(cls, path: Path) -> StoredRun:
        """Read a run directory.

        Raises:
            UsageError: it is not a run directory, or a file of it breaks its format.
        """
        document = read_run(path / "run.json")
        events = _lines(path / "events.jsonl")
        return cls(
            path=path,
            document=document,
            steps=_logged_steps(path / "metrics.jsonl"),
            skipped=merged_ranges(
                (begin, end)
                for line in events
                if line.get("incident") == "rollback"
                for begin, end in [line["skipped_samples"]]
            ),
            changes=tuple(
                PlacementChange(step=line["step"], kind=line["kind"])
                for line in events
                if line.get("kind") in ("plan_applied", "selective_grad_comp") and line.get("step") is not None
            ),
        )

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return str(self.document["run_id"])

    def checkpoint_before(self, step: int) -> Path | None:
        """The newest checkpoint with fewer than ``step`` completed steps; None without one."""
        if not (self.path / "checkpoints").is_dir() or not any((self.path / "checkpoints").glob("step-*")):
            return None
        found = [path for path in list_checkpoints(self.path) if step_of(path) < step]
        return max(found, key=step_of, default=None)

    @property
    def is_lossy(self) -> bool:
        """Whether gradients are compressed with loss, so that their bits depend on the placement."""
        compression = self.document["config"].get("compression", {})
        return bool(compression.get("inter_grad_comp") or compression.get("grad_comp"))

    def lossy_problem(self, checkpoint: Path | None, last: int, placement: LossyPlacement) -> str | None:
        """Why lossy compression would give other bits than in the run; None if it does not.

        The error feedback and the factors of the compression are in the checkpoint, of which each rank reads its own.
        They belong to the boundaries of the partition, and to the pipeline ranks that compress.

        Args:
            checkpoint: checkpoint to start from; None starts as the run did.
            last: last step to execute.
            placement: placement of the replay.
        """
        if not self.is_lossy:
            return None
        loaded = 0 if checkpoint is None else step_of(checkpoint)
        changed = next((each for each in self.changes if loaded <= each.step < last), None)
        if changed is not None:
            what = "a plan was applied" if changed.kind == "plan_applied" else "compressing pipeline ranks were chosen"
            return (
                f"would need every plan from step {loaded:,} on: {what} after step {changed.step:,}; give a step up to"
                f" {changed.step:,}, or one after the next checkpoint"
            )
        expected = self._placement_at(checkpoint)
        if placement == expected:
            return None
        return (
            f"needs the placement of the run: {expected.text}, not {placement.text}; start the same number of"
            " processes, without --plan and --schedule"
        )

    def _placement_at(self, checkpoint: Path | None) -> LossyPlacement:
        """The placement at a checkpoint, or at the start of the run."""
        if checkpoint is None:
            plan = read_plan(self.path / "plans" / "plan-000000.json")
            parallel = self.document["config"]["parallel"]
            return LossyPlacement(
                stages=plan.stages, ranks=parallel["pipeline_model_parallel_size"], schedule=parallel["schedule"]
            )
        topology = load_manifest(checkpoint)["topology"]
        return LossyPlacement(
            stages=tuple(tuple(stage) for stage in topology["partition"]),
            ranks=topology["pipeline_parallel_size"],
            schedule=topology["schedule"],
        )

    def layout(self) -> dict[str, Any]:
        """Option -> value of the parallel dimensions that a replay keeps, as given on the command line."""
        parallel = self.document["config"]["parallel"]
        return {f"--{name.replace('_', '-')}": parallel.get(name) for name in _LAYOUT}

    def fixed_processes(self) -> int:
        """Tensor- x context- x data-parallel size, which a replay keeps."""
        parallel = self.document["config"]["parallel"]
        sizes = (parallel[f"{name}_parallel_size"] for name in ("tensor_model", "context", "data"))
        first, second, third = (int(size) for size in sizes)
        return first * second * third

    def _skipping(self, given: str | None) -> dict[str, str]:
        """``--skip-train-samples`` with the ranges of the rollbacks; empty without any."""
        ranges = merged_ranges(parse_ranges("--skip-train-samples", given or ""), self.skipped)
        return {"skip_train_samples": " ".join(f"{begin}:{end}" for begin, end in ranges)} if ranges else {}

    def config(self, flags: Mapping[str, Any], processes: int, checkpoint: Path | None) -> Config:
        """The configuration of a replay.

        Args:
            flags: options of the placement and the device; None: as in the run where it fits.
            processes: number of processes.
            checkpoint: checkpoint to load; None starts as the run did.

        Raises:
            UsageError: the number of processes does not fit, or options conflict.
        """
        fixed = self.fixed_processes()
        if processes % fixed:
            raise UsageError(
                f"{self.path}: a replay keeps the {fixed} tensor-, context- and data-parallel ranks of the run;"
                f" start a multiple of {fixed} processes, not {processes}"
            )
        stored, sources = self.document["config"], self.document["config_sources"]
        given = {
            name: value
            for concern, values in stored.items()
            for name, value in values.items()
            if concern not in _LEFT_OUT and sources[concern][name] in _GIVEN and name not in PLACEMENT
        }
        family = given.pop("family", stored["model"]["family"])
        given["granularity"] = stored["balance"]["granularity"]
        given["pipeline_model_parallel_size"] = processes // fixed
        parallel = stored["parallel"]
        if processes // fixed == parallel["pipeline_model_parallel_size"] and parallel["schedule"] != "custom":
            given |= {name: parallel[name] for name in ("schedule", "virtual_stages_per_worker")}
        else:
            given["schedule"] = "1f1b"
        chosen = {name: value for name, value in flags.items() if value is not None}
        if "schedule" in chosen and "virtual_stages_per_worker" not in chosen:
            given.pop("virtual_stages_per_worker", None)
        if checkpoint is not None:
            given |= {"load": str(checkpoint), "finetune": False, "no_load_optim": False}
        elif given.get("load") and Path(given["load"]).resolve().is_relative_to(self.path.resolve()):
            del given["load"]
        # The data have more samples by those that were skipped.
        given.update(self._skipping(given.get("skip_train_samples")))
        given = {name: value for name, value in given.items() if value is not None} | chosen
        context = DefaultContext(world_size=processes, tokenizer_vocab_size=read_vocab_size)
        config = resolve(flags=given, command={"family": family}, context=context)
        check(config, processes)
        # A replay writes nothing into the run, and evaluates nothing.
        return replace(config, training=replace(config.training, eval_iters=0))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; empty without a file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return list(read_records(path)) if path.exists() else []
    except UnreadableError as error:
        raise UsageError(f"{path}: cannot be read ({error.reason}); give a run directory") from error


def _logged_steps(path: Path) -> dict[int, LoggedStep]:
    """Step -> its last line; empty without a file."""
    return {
        line["step"]: LoggedStep(
            figures=StepFigures(loss=finite_or_none(line["lm_loss"]), grad_norm=finite_or_none(line.get("grad_norm"))),
            first_sample=line["consumed_train_samples"] - line["global_batch_size"],
            size=line["global_batch_size"],
        )
        for line in _lines(path)
        if "lm_loss" in line
    }


def first_different_step(one: StoredRun, other: StoredRun, last: int) -> int | None:
    """The first step up to ``last`` whose logged loss or gradient norm differs; None without one."""
    common = sorted(step for step in one.steps.keys() & other.steps.keys() if step <= last)
    return next((step for step in common if one.steps[step].figures != other.steps[step].figures), None)


def common_checkpoints(one: StoredRun, other: StoredRun, before: int) -> list[tuple[int, bool]]:
    """Common checkpoints with fewer than ``before`` steps, ascending: step, and whether all stored bytes are equal."""

    def by_step(run: StoredRun) -> dict[int, Path]:
        folder = run.path / "checkpoints"
        return {step_of(path): path for path in folder.glob("step-*") if (path / "manifest.json").is_file()}

    first, second = by_step(one), by_step(other)
    steps = sorted(step for step in first.keys() & second.keys() if step < before)
    return [(step, _checksums(first[step]) == _checksums(second[step])) for step in steps]


def _checksums(checkpoint: Path) -> dict[str, list[tuple[str, str]]]:
    """Tensor -> range and CRC-32 of each shard; files and pipeline ranks do not matter."""
    tensors = load_manifest(checkpoint)["tensors"]
    return {
        name: sorted((str(shard["index"]), shard["crc32"]) for shard in entry["shards"])
        for name, entry in tensors.items()
    }
