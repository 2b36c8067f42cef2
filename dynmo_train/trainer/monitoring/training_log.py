"""The training log on stdout of rank 0, and the scalars of TensorBoard, Weights & Biases and MLflow.

The first part formats lines, in Megatron's format where it has one. ``TrainingLog`` decides when a line is printed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.console import emit
from ...config import Config, TrainingConfig, config_document
from ...config.batch_schedule import SteppedBatchSizes
from ...data.batches import eval_samples
from ...optim.compression.stats import report_lines
from ...parallel.process_groups import World
from ...pipeline.partition import Partition
from ..run_directory import RunDirectory
from ..step_result import StepResult
from .scalar_writers import ScalarWriter

if TYPE_CHECKING:
    from ..rebalance.plan_controller import AppliedPlan

# Steps of the means before and after a migration, over which noise of single steps averages out.
AFTER_MOVE_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class IterationStats:
    """The values of an iteration line.

    Attributes:
        iteration: number of completed steps.
        train_iters: number of steps of the run.
        consumed_samples: number of consumed training samples.
        elapsed_ms: mean step time since the last line, in milliseconds.
        learning_rate: learning rate of the next update.
        global_batch_size: samples per step.
        lm_loss: mean loss of the updates since the last line; None without any.
        loss_scale: loss scale of the next step.
        grad_norm: gradient norm of the last step; None where it did not update the weights.
        skipped: number of steps without an update since the last line.
        nan: number of steps with a loss that was not finite since the last line.
        tflops: throughput per device in TFLOP/s; None without ``--log-throughput``.
        decoupled_learning_rate: learning rate of word embeddings and output layer; None without ``--decoupled-lr``.
        loss_name: printed name of the loss.
        others: further losses by name, printed after ``lm_loss``.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None
    loss_scale: float
    grad_norm: float | None
    skipped: int
    nan: int
    tflops: float | None = None
    decoupled_learning_rate: float | None = None
    loss_name: str = "lm loss"
    others: Mapping[str, float] = field(default_factory=dict)


def iteration_line(stats: IterationStats) -> str:
    """Megatron's ``training_log`` line."""
    parts = [
        f"iteration {stats.iteration:8d}/{stats.train_iters:8d}",
        f"consumed samples: {stats.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {stats.elapsed_ms:.1f}",
    ]
    if stats.tflops is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {stats.tflops:.1f}")
    parts.append(f"learning rate: {stats.learning_rate:.3E}")
    if stats.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {stats.decoupled_learning_rate:.3E}")
    parts.append(f"global batch size: {stats.global_batch_size:5d}")
    if stats.lm_loss is not None:
        parts.append(f"{stats.loss_name}: {stats.lm_loss:.6E}")
    parts += [f"{printed_name(name)}: {value:.6E}" for name, value in stats.others.items()]
    parts.append(f"loss scale: {stats.loss_scale:.1f}")
    if stats.grad_norm is not None:
        parts.append(f"grad norm: {stats.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {stats.skipped:3d}",
        f"number of nan iterations: {stats.nan:3d}",
    ]
    return " " + " | ".join(parts) + " |"


def tensorboard_scalars(stats: IterationStats) -> dict[str, float]:
    """The values of an iteration line under Megatron's tags."""
    scalars = {
        "learning-rate": stats.learning_rate,
        "decoupled-learning-rate": stats.decoupled_learning_rate,
        "batch-size": stats.global_batch_size,
        stats.loss_name: stats.lm_loss,
        "loss-scale": stats.loss_scale,
        "grad-norm": stats.grad_norm,
        "iteration-time": stats.elapsed_ms / 1e3,
        "throughput": stats.tflops,
        **{printed_name(name): value for name, value in stats.others.items()},
    }
    return {name: float(value) for name, value in scalars.items() if value is not None}


def printed_name(name: str, loss: str = "lm loss") -> str:
    """A loss's name as Megatron prints it; ``loss`` is its name for the loss of the model family."""
    return loss if name == "lm_loss" else name if name.endswith("_acc") else name.replace("_", " ")


def perplexity(loss: float) -> float:
    """Perplexity of a loss, limited to e^20 as in Megatron."""
    return math.exp(min(20.0, loss))


def evaluation_line(place: str, losses: Mapping[str, float], loss: str = "lm loss") -> str:
    """Megatron's line for an evaluation at ``place``, such as ``iteration 100``."""
    parts = [f" validation loss at {place}"]
    for name, value in losses.items():
        parts.append(f"{printed_name(name, loss)} value: {value:.6E}")
        if not name.endswith("_acc"):
            parts.append(f"{printed_name(name, loss)} PPL: {perplexity(value):.6E}")
    return " | ".join(parts) + " | "


def move_lines(plan_id: int, step: int, moves: list[tuple[str, int, int, int]], pause_ns: int) -> list[str]:
    """Lines for a migration: a summary, and one line per item.

    Args:
        plan_id: number of the applied plan.
        step: number of completed steps.
        moves: (item, source, target, bytes) of each moved item; source and target are ids of pipeline ranks.
        pause_ns: time for which training was paused, in nanoseconds.
    """
    total = sum(size for _, _, _, size in moves)
    items = f"{len(moves)} item{'' if len(moves) == 1 else 's'} ({total:,} bytes)"
    lines = [f" plan {plan_id} applied after iteration {step}: moved {items} in {pause_ns / 1e6:.1f} ms"]
    lines += [f"   {item}: worker {source} -> {target}, {size:,} bytes" for item, source, target, size in moves]
    return lines


def after_move_line(plan_id: int, before_ms: float, after_ms: float, steps: int) -> str:
    """The line on the effect of a migration.

    Args:
        plan_id: number of the applied plan.
        before_ms: mean step time before, in milliseconds.
        after_ms: mean step time after, in milliseconds.
        steps: number of steps of each mean.
    """
    return (
        f" plan {plan_id}: step time {before_ms:.1f} ms -> {after_ms:.1f} ms"
        f" (ratio {before_ms / after_ms:.2f}, means of {steps} steps)"
    )


class TrainingLog:
    """Prints the training log on rank 0, and hands its scalars to the writers.

    Args:
        config: configuration of the run.
        world: process groups of this rank.
        flops: model FLOPs of a step, from the number of samples and the tokens per sample.
        writers: writers of the scalars; none on other ranks than 0.

    Attributes:
        devices: number of devices, for the throughput per device.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        flops: Callable[[int, int], int],
        writers: Sequence[ScalarWriter] = (),
    ) -> None:
        self.config, self._is_rank0 = config, world.is_rank0
        self._flops, self.devices = flops, world.size
        self._writers = writers
        self._loss_name = "loss" if config.model.base_family == "ict" else "lm loss"
        self._window: list[StepResult] = []
        self._window_flops = 0
        # Step times in nanoseconds since the last migration, of which the last few are needed.
        self._recent: deque[int] = deque(maxlen=10)
        # The last migration and the mean step time before it, in milliseconds, until that after it is measured.
        self._move: tuple[AppliedPlan, float] | None = None

    def line(self, text: str) -> None:
        """Print a line."""
        if self._is_rank0:
            emit(text)

    def log_start(
        self, partition: Partition, first: int, parameters: Mapping[tuple[int, int], int], arguments: Sequence[str]
    ) -> None:
        """Print the options, the sizes of the model and the stages.

        Args:
            partition: active partition.
            first: number of the first step.
            parameters: number of parameters by (tensor, pipeline) rank.
            arguments: see :func:`argument_lines`.
        """
        for text in startup_lines(self.config, parameters, arguments):
            self.line(text)
        stages = " | ".join(f"{stage[0]} .. {stage[-1]}" if stage else "(empty)" for stage in partition.stages)
        self.line(f" {len(partition.stages)} stages on {partition.num_ranks} workers: {stages}")
        last, data = self.config.training.train_iters, self.config.data.name
        self.line(f" training from iteration {first} to {last} on {data}")

    def log_step(self, step: int, consumed: int, global_batch_size: int, length: int, result: StepResult) -> None:
        """Log a step: a line every ``--log-interval``, and the effect of the last migration once it is measured.

        Args:
            step: number of completed steps.
            consumed: number of consumed training samples.
            global_batch_size: samples of the step.
            length: tokens per sample.
            result: result of the step.
        """
        self._window.append(result)
        self._window_flops += self._flops(global_batch_size, length) if self.config.training.log_throughput else 0
        self._recent.append(result.step_ns)
        # One step more: the first one on the new partition allocates buffers and is not in the mean.
        if self._move is not None and len(self._recent) >= AFTER_MOVE_STEPS + 1:
            plan, before_ms = self._move
            after = list(self._recent)[-AFTER_MOVE_STEPS:]
            self._move = None
            self.line(after_move_line(plan.plan_id, before_ms, sum(after) / len(after) / 1e6, AFTER_MOVE_STEPS))
        if step % self.config.training.log_interval:
            return
        # As in Megatron: the losses of skipped steps, which may not be finite, are not in the mean; their times are.
        updates = [each for each in self._window if each.updated]
        window_s = sum(each.step_ns for each in self._window) / 1e9
        names = updates[0].losses if updates else {}
        means = {name: sum(each.losses[name] for each in updates) / len(updates) for name in names}
        stats = IterationStats(
            iteration=step,
            train_iters=self.config.training.train_iters,
            consumed_samples=consumed,
            elapsed_ms=window_s / len(self._window) * 1e3,
            learning_rate=result.next_rate,
            decoupled_learning_rate=result.next_decoupled_rate,
            global_batch_size=global_batch_size,
            lm_loss=means.pop("lm_loss", None),
            others=means,
            loss_name=self._loss_name,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm if result.updated else None,
            skipped=len(self._window) - len(updates),
            nan=sum(not math.isfinite(each.loss) for each in self._window),
            tflops=self._window_flops / window_s / self.devices / 1e12 if self._window_flops else None,
        )
        self._window.clear()
        self._window_flops = 0
        self.line(iteration_line(stats))
        compression = self.config.compression
        if result.compression:
            for text in report_lines(
                step,
                result.compression,
                error=compression.check_orth_error_acti,
                speed=compression.check_comp_speed,
                ratio=compression.check_comp_ratio,
            ):
                self.line(text)
        self._write(step, tensorboard_scalars(stats))

    def log_evaluation(self, step: int, losses: Mapping[str, float], place: str, part: str = "validation") -> None:
        """Log an evaluation.

        Args:
            step: number of completed steps.
            losses: mean loss, then the means of the head's other metrics, by name.
            place: when it ran, such as ``iteration 100``.
            part: data that it ran on: ``validation`` or ``test``.
        """
        text = evaluation_line(place, losses, self._loss_name)
        dashes = "-" * (len(text) + 1)
        for line in (dashes, text, dashes):
            self.line(line)
        for name, value in losses.items():
            tag = printed_name(name, self._loss_name)
            ppl = {} if name.endswith("_acc") else {f"{tag} {part} ppl": perplexity(value)}
            self._write(step, {f"{tag} {part}": value} | ppl)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.scalars(step, scalars)

    def close(self, exit_code: int | None = None) -> None:
        """End the writers of scalars.

        Args:
            exit_code: exit code of the training; None after an error.
        """
        for writer in self._writers:
            writer.close(exit_code)

    def log_move(self, plan: AppliedPlan, step: int) -> None:
        """Log a migration.

        Args:
            plan: plan that was applied.
            step: number of completed steps; the step time before the migration is the mean of the last of them.
        """
        before = list(self._recent)[-AFTER_MOVE_STEPS:]
        self._recent.clear()
        self._move = (plan, sum(before) / len(before) / 1e6)
        for text in move_lines(plan.plan_id, step, plan.moves, plan.pause_ns):
            self.line(text)


# Options that the launcher sets to the run directory when it restarts a run.
_RUN_PATHS = ("load", "run_dir", "save")
# Width of a name and its dots, as Megatron prints options.
_DOTS = 48
# Megatron's names; a Llama is its GPT with other options.
MODEL_NAMES = {
    "gpt": "GPT model",
    "llama": "GPT model",
    "bert": "BERT model",
    "t5": "T5 model",
    "ict": "BiEncoderModel",
}


def argument_lines(
    config: Config, run: Path, previous: Mapping[str, Mapping[str, Any]] | None, *, is_verbose: bool = False
) -> list[str]:
    """The options that were given or, after a restart, those that changed, in alphabetical order.

    ``run.json`` has every option; 250 lines at each restart would bury the rest of the log.

    Args:
        config: configuration of this start.
        run: run directory.
        previous: configuration of the previous start, as in ``run.json``; None at the first one.
        is_verbose: whether to print every option.
    """
    document = config_document(config)
    values, sources, before = (
        {name: value for concern in part.values() for name, value in concern.items()}
        for part in (document["config"], document["config_sources"], previous or {})
    )
    if is_verbose:
        texts = {name: str(value) for name, value in values.items()}
    elif previous is None:
        texts = {name: str(value) for name, value in values.items() if sources[name] != "default"}
    else:
        own = {name for name in _RUN_PATHS if values[name] and Path(values[name]).resolve() == run.resolve()}
        texts = {
            name: f"{before.get(name)} -> {value}"
            for name, value in values.items()
            if value != before.get(name) and name not in own
        }
        if not texts:
            return [f"arguments: as in the previous start, in {run / 'run.json'}"]
    lines = [f"  {name} {'.' * (_DOTS - len(name))} {text}" for name, text in texts.items()]
    rest = [] if is_verbose else [f"  all {len(values)} arguments: {run / 'run.json'}"]
    return [
        "------------------------ arguments ------------------------",
        *sorted(lines, key=str.lower),
        *rest,
        "-------------------- end of arguments ---------------------",
    ]


def run_argument_lines(config: Config, run: RunDirectory) -> list[str]:
    """See :func:`argument_lines`."""
    return argument_lines(config, run.path, run.previous_config, is_verbose=config.run.verbose)


def batch_line(config: Config) -> str:
    """The number of microbatches per step, or the ramp-up of the batch size."""
    sizes = config.batch_sizes
    if isinstance(sizes, SteppedBatchSizes):
        return f"using step batch size schedule: {config.training.step_batch_size_schedule}"
    if sizes.is_constant:
        return f"setting number of micro-batches to constant {config.microbatches}"
    return (
        f"will use batch size rampup starting from global batch size {sizes.start} to global batch size {sizes.final}"
        f" with batch size increments {sizes.increment} over {sizes.ramp_samples} samples."
    )


def vocabulary_line(config: Config) -> str:
    """The size of the vocabulary and its padded size."""
    size, padded = config.model.vocab_size, config.padded_vocab_size
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parameter_lines(counts: Mapping[tuple[int, int], int]) -> list[str]:
    """Parameters by (tensor, pipeline) rank."""
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline}): {count}"
        for (tensor, pipeline), count in sorted(counts.items(), key=lambda entry: entry[0][::-1])
    ]


def target_lines(train: int, valid: int, test: int) -> list[str]:
    """Megatron's lines on the data, with the number of ``train``, ``valid`` and ``test`` samples that the run reads."""
    return [
        " > datasets target sizes (minimum size):",
        f"    train:      {train}",
        f"    validation: {valid}",
        f"    test:       {test}",
    ]


def complete_line(run: Path, step: int, rule: str) -> str:
    """A message for a run that was loaded after its last ``step``; ``rule`` names the option that sets their number."""
    return f"the run in {run} is complete: {step:,} steps are done, {rule} to continue it"


def longer_run_rule(training: TrainingConfig) -> str:
    """The option that sets the number of steps and its remedy, for :func:`complete_line`."""
    samples, iters = training.train_samples, training.train_iters
    flag, number = ("--train-iters", iters) if samples is None else ("--train-samples", samples)
    return f"{flag} is {number:,}; give a larger {flag}"


def stop_line(run: Path, step: int, load: str | None, last_saved: str | None) -> str:
    """A message for a run that ended before its last step: what it saved, and how to resume it.

    Args:
        run: run directory.
        step: number of completed steps.
        load: ``--load`` of this start.
        last_saved: name of the last checkpoint; None without one. If it is of an earlier step, that of ``step`` was
            not saved because the model is not finite.
    """
    is_saved = last_saved == f"step-{step:08d}"
    command = "run the same command again"
    if load != str(run):
        command = f"run the same command with --load {run if is_saved else run / 'checkpoints' / (last_saved or '')}"
    if is_saved:
        return f"stopped after iteration {step:,}, saved; to resume, {command}"
    stopped = f"stopped after iteration {step:,}, not saved (not finite)"
    if last_saved is None:
        return f"{stopped}; no checkpoint was saved"
    return f"{stopped}; the last checkpoint is {last_saved}; to resume from it, {command}"


def graphs_line(items: Sequence[str], obstacles: Mapping[str, str]) -> str:
    """The line on which items of this worker are captured in CUDA graphs, and why others are not.

    Args:
        items: items of this worker.
        obstacles: item -> why it is not captured.
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in obstacles.items():
        reasons.setdefault(reason, []).append(name)
    others = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    captured = f" CUDA graphs: {len(items) - len(obstacles)} of {len(items)} items of worker 0 are captured"
    return f"{captured} | {others}" if others else captured


def startup_lines(config: Config, counts: Mapping[tuple[int, int], int], arguments: Sequence[str]) -> Sequence[str]:
    """The lines before training starts, in Megatron's order.

    Args:
        config: configuration of the run.
        counts: number of parameters by (tensor, pipeline) rank.
        arguments: see :func:`argument_lines`.
    """
    precision = "bfloat16" if config.precision.bf16 else "float16" if config.precision.fp16 else "float32"
    parallel, training = config.parallel, config.training
    return [
        f"using torch.{precision} for parameters ...",
        *arguments,
        batch_line(config),
        f"> building {config.data.tokenizer_type} tokenizer ...",
        vocabulary_line(config),
        "> initializing torch distributed ...",
        f"> initialized tensor model parallel with size {parallel.tensor_model_parallel_size}",
        f"> initialized pipeline model parallel with size {parallel.pipeline_model_parallel_size}",
        f"> setting random seeds to {training.seed} ...",
        f"building {MODEL_NAMES[config.model.base_family]} ...",
        *parameter_lines(counts),
        "> building train, validation, and test datasets ...",
        *target_lines(config.batch_sizes.consumed_after(training.train_iters), *eval_samples(config)),
    ]
