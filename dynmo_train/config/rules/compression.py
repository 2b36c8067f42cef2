"""Rules over compressed communication."""

from __future__ import annotations

from collections.abc import Iterator

from ...formats._document import Problem
from ..schema import Config
from .problem import Rule, conflict

FACTOR_BYTES = 4


def _boundaries(config: Config, _world_size: int) -> Iterator[Problem]:
    given, model = config.compression, config.model
    if not given.inter_grad_comp:
        if given.inter_grad_comp_epilogue_only:
            yield conflict("--inter-grad-comp-epilogue-only", "has no effect without --inter-grad-comp")
        return
    if config.parallel.pipeline_model_parallel_size == 1:
        yield conflict("--inter-grad-comp", "needs --pipeline-model-parallel-size 2 or more: one worker sends nothing")
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    rows = config.training.micro_batch_size * model.seq_length // parts
    rank = min(given.inter_grad_comp_rank, rows, model.hidden_size)
    whole = rows * model.hidden_size * (2 if config.precision.bf16 or config.precision.fp16 else 4)
    packed = (rows + model.hidden_size) * rank * FACTOR_BYTES
    if packed >= whole:
        yield conflict(
            "--inter-grad-comp-rank",
            f"{given.inter_grad_comp_rank}: its float32 factors take {packed:,} bytes, the gradient {whole:,};"
            " take a lower rank",
        )


def _feedback(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.compression
    if given.use_error_feedback and not given.inter_grad_comp:
        yield conflict("--use-error-feedback", "has no effect without --inter-grad-comp")


def _checks(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.compression
    flags = {
        "--check-orth-error-acti": given.check_orth_error_acti,
        "--check-comp-speed": given.check_comp_speed,
        "--check-comp-ratio": given.check_comp_ratio,
    }
    if not given.inter_grad_comp:
        for flag in (flag for flag, on in flags.items() if on):
            yield conflict(flag, "has nothing to measure without --inter-grad-comp")


COMPRESSION_RULES: tuple[Rule, ...] = (_boundaries, _feedback, _checks)
