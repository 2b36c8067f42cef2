"""The training log's lines, as pure text. The iteration line is Megatron's, word for word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IterationFigures:
    """What the iteration line says; ``elapsed_ms`` is the mean of a step since the last line."""

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    grad_norm: float


def iteration_line(figures: IterationFigures) -> str:
    """Megatron's ``training_log`` line."""
    parts = [
        f"iteration {figures.iteration:8d}/{figures.train_iters:8d}",
        f"consumed samples: {figures.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {figures.elapsed_ms:.1f}",
        f"learning rate: {figures.learning_rate:.6E}",
        f"global batch size: {figures.global_batch_size:5d}",
        f"lm loss: {figures.lm_loss:.6E}",
        "loss scale: 1.0",
        f"grad norm: {figures.grad_norm:.3f}",
        "number of skipped iterations:   0",
        "number of nan iterations:   0",
    ]
    return " " + " | ".join(parts) + " |"


def evaluation_line(step: int, loss: float, perplexity: float) -> str:
    """Megatron's line of a validation."""
    return f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"


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
