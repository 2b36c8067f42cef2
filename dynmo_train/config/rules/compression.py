"""Rules over compressed communication."""

from __future__ import annotations

from collections.abc import Iterator

from ...formats._document import Problem
from ..schema import Config
from .problem import Rule, conflict, later

FACTOR_BYTES = 4
AUTO = "auto"


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
    if given.use_error_feedback and not (given.inter_grad_comp or given.grad_comp):
        yield conflict("--use-error-feedback", "has no effect without --inter-grad-comp or --grad-comp")
    if given.error_feedback_across_steps and not (given.inter_grad_comp and given.use_error_feedback):
        yield conflict(
            "--error-feedback-across-steps", "has no effect without --inter-grad-comp and --use-error-feedback"
        )


def _replicas(config: Config, _world_size: int) -> Iterator[Problem]:
    given, parallel = config.compression, config.parallel
    if not given.grad_comp:
        if given.selective_grad_comp:
            yield conflict("--selective-grad-comp", "has no effect without --grad-comp")
        return
    if parallel.data_parallel_size == 1:
        yield conflict("--grad-comp", "needs two data-parallel replicas or more: one has nobody to add gradients with")
    if parallel.zero_stage:
        yield later("--grad-comp", f"does not go with --zero-stage {parallel.zero_stage}, which cuts matrices by rows")
    if parallel.expert_model_parallel_size > 1:
        yield later(
            "--grad-comp",
            f"does not go with --expert-model-parallel-size {parallel.expert_model_parallel_size}; leave one out",
        )


def _selection(config: Config, _world_size: int) -> Iterator[Problem]:
    given, workers = config.compression, config.parallel.pipeline_model_parallel_size
    way = given.selective_grad_comp_way
    if given.selective_grad_comp and way is None:
        yield conflict("--selective-grad-comp", "needs --selective-grad-comp-way: how many workers compress")
    if way is not None and not given.selective_grad_comp:
        yield conflict("--selective-grad-comp-way", "has no effect without --selective-grad-comp")
    elif way is not None and way != AUTO and not (way.isdecimal() and 1 <= int(way) <= workers):
        yield conflict(
            "--selective-grad-comp-way",
            f"is {way!r}: write auto, or how many workers: 1 to {workers}, as --pipeline-model-parallel-size has it",
        )


def _fused(config: Config, _world_size: int) -> Iterator[Problem]:
    if not config.compression.emb_comm_opt:
        return
    if config.model.untie_embeddings_and_output_weights:
        yield conflict(
            "--emb-comm-opt", "has no effect with --untie-embeddings-and-output-weights: there is nothing to fuse"
        )
    if config.parallel.zero_stage:
        yield later(
            "--emb-comm-opt", f"does not go with --zero-stage {config.parallel.zero_stage}, which cuts tables by rows"
        )


def _checks(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.compression
    flags = {
        "--check-orth-error-acti": given.check_orth_error_acti,
        "--check-comp-speed": given.check_comp_speed,
        "--check-comp-ratio": given.check_comp_ratio,
    }
    if not (given.inter_grad_comp or given.grad_comp):
        for flag in (flag for flag, on in flags.items() if on):
            yield conflict(flag, "has nothing to measure without --inter-grad-comp or --grad-comp")


COMPRESSION_RULES: tuple[Rule, ...] = (_boundaries, _feedback, _replicas, _selection, _fused, _checks)
