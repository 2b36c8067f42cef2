"""The training log that worker 0 prints: pure lines (the iteration line is Megatron's) and when they come."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._common.console import emit
from ...config import Config, config_document
from ...data.batches import held_out_targets
from ...optim.compression.stats import report_lines
from ...parallel.process_groups import World
from ...pipeline.partition import Partition
from ..engine import StepResult
from ..rebalance.plan_controller import AppliedPlan
from .tensorboard import EventWriter

AFTER_MOVE_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class IterationStats:
    """What the iteration line says; ``elapsed_ms`` and ``lm_loss`` are means of the steps since the last line.

    ``lm_loss`` is None where none of them updated the weights, ``grad_norm`` where the last did not; ``tflops`` is None
    where nobody asked. ``others`` are further losses by name, printed behind ``lm_loss``.
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
    loss_name: str = "lm loss"
    others: Mapping[str, float] = field(default_factory=dict)


def iteration_line(figures: IterationStats) -> str:
    """Megatron's ``training_log`` line."""
    parts = [
        f"iteration {figures.iteration:8d}/{figures.train_iters:8d}",
        f"consumed samples: {figures.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {figures.elapsed_ms:.1f}",
    ]
    if figures.tflops is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {figures.tflops:.1f}")
    parts += [f"learning rate: {figures.learning_rate:.3E}", f"global batch size: {figures.global_batch_size:5d}"]
    if figures.lm_loss is not None:
        parts.append(f"{figures.loss_name}: {figures.lm_loss:.6E}")
    parts += [f"{printed(name)}: {value:.6E}" for name, value in figures.others.items()]
    parts.append(f"loss scale: {figures.loss_scale:.1f}")
    if figures.grad_norm is not None:
        parts.append(f"grad norm: {figures.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {figures.skipped:3d}",
        f"number of nan iterations: {figures.nan:3d}",
    ]
    return " " + " | ".join(parts) + " |"


def scalars_of(figures: IterationStats) -> dict[str, float]:
    """The same for TensorBoard, under Megatron's names."""
    given = {
        "learning-rate": figures.learning_rate,
        "batch-size": figures.global_batch_size,
        figures.loss_name: figures.lm_loss,
        "loss-scale": figures.loss_scale,
        "grad-norm": figures.grad_norm,
        "iteration-time": figures.elapsed_ms / 1e3,
        "throughput": figures.tflops,
        **{printed(name): value for name, value in figures.others.items()},
    }
    return {name: float(value) for name, value in given.items() if value is not None}


def printed(name: str, loss: str = "lm loss") -> str:
    """A loss's name as Megatron prints it; ``loss`` is what it calls the loss of the family."""
    return loss if name == "lm_loss" else name if name.endswith("_acc") else name.replace("_", " ")


def perplexity(loss: float) -> float:
    """As Megatron's, which goes to e^20."""
    return math.exp(min(20.0, loss))


def evaluation_line(place: str, losses: Mapping[str, float], loss: str = "lm loss") -> str:
    """Megatron's line of an evaluation at ``place``, such as ``iteration 100``."""
    parts = [f" validation loss at {place}"]
    for name, value in losses.items():
        parts.append(f"{printed(name, loss)} value: {value:.6E}")
        if not name.endswith("_acc"):
            parts.append(f"{printed(name, loss)} PPL: {perplexity(value):.6E}")
    return " | ".join(parts) + " | "


def move_lines(plan_id: int, step: int, moves: list[tuple[str, int, int, int]], pause_ns: int) -> list[str]:
    """A committed move: a line in all, and one for each item (name, source, target, bytes)."""
    total = sum(size for _, _, _, size in moves)
    lines = [
        f" plan {plan_id} taken after iteration {step}: {len(moves)} items, {total:,} bytes moved"
        f" in {pause_ns / 1e6:.1f} ms"
    ]
    lines += [f"   {item}: worker {source} -> {target}, {size:,} bytes" for item, source, target, size in moves]
    return lines


def after_move_line(plan_id: int, before_ms: float, after_ms: float, steps: int) -> str:
    """What a move did to the step time."""
    return (
        f" plan {plan_id}: step time {before_ms:.1f} ms -> {after_ms:.1f} ms"
        f" (ratio {before_ms / after_ms:.2f}, means of {steps} steps)"
    )


class TrainingLog:
    """The lines that worker 0 prints, the step times that it needs for them, and the scalars of TensorBoard.

    ``devices`` is the number of processes that the work is shared by.

    Args:
        flops: of a step with so many samples of so many tokens.
    """

    def __init__(self, config: Config, world: World, flops: Callable[[int, int], int]) -> None:
        self.config, self._is_rank0 = config, world.is_rank0
        self._flops, self.devices = flops, world.size
        folder = config.run.tensorboard_dir
        self._board = EventWriter(Path(folder)) if folder is not None and world.is_rank0 else None
        self._loss_name = "loss" if config.model.base_family == "ict" else "lm loss"
        self._window: list[StepResult] = []
        self._window_flops = 0
        self._recent: deque[int] = deque(maxlen=10)
        self._move: tuple[AppliedPlan, float] | None = None

    def line(self, text: str) -> None:
        """One line."""
        if self._is_rank0:
            emit(text)

    def start(self, partition: Partition, first: int, parameters: Mapping[tuple[int, int], int]) -> None:
        """What is about to run, from iteration ``first`` on; ``parameters`` are counts by (tensor, pipeline) rank."""
        for text in startup_lines(self.config, parameters):
            self.line(text)
        sizes = " | ".join(f"{stage[0]} .. {stage[-1]}" if stage else "(empty)" for stage in partition.stages)
        self.line(f" {len(partition.stages)} stages on {partition.workers} workers: {sizes}")
        last, data = self.config.training.train_iters, self.config.data.name
        self.line(f" training from iteration {first} to {last} on {data}")

    def step(self, step: int, consumed: int, global_batch_size: int, length: int, result: StepResult) -> None:
        """After a step: a line every ``--log-interval``, and what the last move did once a few steps are measured.

        Args:
            length: tokens of a sample.
        """
        self._window.append(result)
        self._window_flops += self._flops(global_batch_size, length) if self.config.training.log_throughput else 0
        self._recent.append(result.step_ns)
        if self._move is not None and len(self._recent) >= AFTER_MOVE_STEPS + 1:
            taken, before = self._move
            after = list(self._recent)[-AFTER_MOVE_STEPS:]
            self._move = None
            self.line(after_move_line(taken.plan_id, before, sum(after) / len(after) / 1e6, AFTER_MOVE_STEPS))
        if step % self.config.training.log_interval:
            return
        updates = [each for each in self._window if each.updated]
        window_s = sum(each.step_ns for each in self._window) / 1e9
        names = updates[0].losses if updates else {}
        means = {name: sum(each.losses[name] for each in updates) / len(updates) for name in names}
        figures = IterationStats(
            iteration=step,
            train_iters=self.config.training.train_iters,
            consumed_samples=consumed,
            elapsed_ms=window_s / len(self._window) * 1e3,
            learning_rate=result.next_rate,
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
        self.line(iteration_line(figures))
        given = self.config.compression
        if result.compression:
            for text in report_lines(
                step,
                result.compression,
                error=given.check_orth_error_acti,
                speed=given.check_comp_speed,
                ratio=given.check_comp_ratio,
            ):
                self.line(text)
        if self._board is not None:
            self._board.scalars(step, scalars_of(figures))

    def evaluated(self, step: int, losses: Mapping[str, float], place: str, part: str = "validation") -> None:
        """After an evaluation at ``place``, on the ``validation`` or the ``test`` data."""
        text = evaluation_line(place, losses, self._loss_name)
        dashes = "-" * (len(text) + 1)
        for line in (dashes, text, dashes):
            self.line(line)
        if self._board is None:
            return
        for name, value in losses.items():
            shown = printed(name, self._loss_name)
            ppl = {} if name.endswith("_acc") else {f"{shown} {part} ppl": perplexity(value)}
            self._board.scalars(step, {f"{shown} {part}": value} | ppl)

    def close(self) -> None:
        """Close what is open."""
        if self._board is not None:
            self._board.close()

    def moved(self, taken: AppliedPlan, step: int) -> None:
        """After a move; the step time before it is the mean of the last steps."""
        before = list(self._recent)[-AFTER_MOVE_STEPS:]
        self._recent.clear()
        self._move = (taken, sum(before) / len(before) / 1e6)
        for text in move_lines(taken.plan_id, step, taken.moves, taken.pause_ns):
            self.line(text)


_DOTS = 48
# What Megatron calls them; it trains a Llama as a GPT.
MODEL_NAMES = {
    "gpt": "GPT model",
    "llama": "GPT model",
    "bert": "BERT model",
    "t5": "T5 model",
    "ict": "BiEncoderModel",
}


def argument_lines(config: Config) -> list[str]:
    """Every option with its value, in alphabetical order."""
    values: dict[str, Any] = {}
    for concern in config_document(config)["config"].values():
        values.update(concern)
    lines = [f"  {name} {'.' * (_DOTS - len(name))} {value}" for name, value in values.items()]
    return [
        "------------------------ arguments ------------------------",
        *sorted(lines, key=str.lower),
        "-------------------- end of arguments ---------------------",
    ]


def batch_line(config: Config) -> str:
    """How many microbatches a step has, or how its batch grows."""
    sizes = config.batch_sizes
    if not sizes.increment:
        return f"setting number of micro-batches to constant {config.microbatches}"
    return (
        f"will use batch size rampup starting from global batch size {sizes.start} to global batch size {sizes.final}"
        f" with batch size increments {sizes.increment} over {sizes.ramp_samples} samples."
    )


def vocabulary_line(config: Config) -> str:
    """The size of the vocabulary, and of what it is padded to."""
    size, padded = config.model.vocab_size, config.padded_vocab_size
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parameter_lines(counts: Mapping[tuple[int, int], int]) -> list[str]:
    """Parameters by (tensor, pipeline) rank."""
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline}): {count}"
        for (tensor, pipeline), count in sorted(counts.items(), key=lambda entry: entry[0][::-1])
    ]


def target_lines(train: int, valid: int, test: int) -> list[str]:
    """How many samples of each part a run asks for."""
    return [
        " > datasets target sizes (minimum size):",
        f"    train:      {train}",
        f"    validation: {valid}",
        f"    test:       {test}",
    ]


def complete_line(run: Path, step: int, rule: str) -> str:
    """A run that is loaded with all its steps done; ``rule`` says what sets their number and how to have more."""
    return f"the run in {run} is complete: {step:,} steps are done, {rule} to continue it"


def stop_line(run: Path, step: int, load: str | None, last_saved: str | None) -> str:
    """What a run that was ended before its last step has saved, and how to resume it.

    Args:
        run: run directory.
        step: last step.
        load: ``--load`` of this start.
        last_saved: name of the run's last checkpoint. One of an earlier step: that of ``step`` was refused, as the
            model is not finite.
    """
    is_saved = last_saved == f"step-{step:08d}"
    again = "run the same command again"
    if load != str(run):
        again = f"run the same command with --load {run if is_saved else run / 'checkpoints' / (last_saved or '')}"
    if is_saved:
        return f"stopped after iteration {step:,}, saved; to resume, {again}"
    stopped = f"stopped after iteration {step:,}, not saved (not finite)"
    if last_saved is None:
        return f"{stopped}; no checkpoint was saved"
    return f"{stopped}; the last checkpoint is {last_saved}; to resume from it, {again}"


def startup_lines(config: Config, counts: Mapping[tuple[int, int], int]) -> Sequence[str]:
    """All of them, in order."""
    precision = "bfloat16" if config.precision.bf16 else "float16" if config.precision.fp16 else "float32"
    parallel, training = config.parallel, config.training
    return [
        f"using torch.{precision} for parameters ...",
        *argument_lines(config),
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
        *target_lines(config.batch_sizes.consumed_after(training.train_iters), *held_out_targets(config)),
    ]
