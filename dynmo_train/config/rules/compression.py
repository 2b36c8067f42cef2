"""Rules over gradient compression."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import (
    Problem,
    is_count,
)
from ..schema import Config
from .problem import Rule, conflict, unsupported

FACTOR_BYTES = 4
AUTO = "auto"


def _boundaries(config: Config, _world_size: int) -> Iterator[Problem]:
    given, model = config.compression, config.model
    if not given.inter_grad_comp:
        return
    if config.parallel.pipeline_model_parallel_size == 1:
        yield conflict("--inter-grad-comp", "requires --pipeline-model-parallel-size of at least 2")
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    rows = config.training.micro_batch_size * model.seq_length // parts
    rank = min(given.inter_grad_comp_rank, rows, model.hidden_size)
    whole = rows * model.hidden_size * (2 if config.precision.bf16 or config.precision.fp16 else 4)
    packed = (rows + model.hidden_size) * rank * FACTOR_BYTES
    if packed >= whole:
        yield conflict(
            "--inter-grad-comp-rank",
            f"is {given.inter_grad_comp_rank}; its float32 factors have {packed:,} bytes, the gradient has {whole:,};"
            " use a lower rank",
        )


def _replicas(config: Config, _world_size: int) -> Iterator[Problem]:
    given, parallel = config.compression, config.parallel
    if not given.grad_comp:
        return
    if parallel.data_parallel_size == 1:
        yield conflict("--grad-comp", "requires at least 2 data-parallel replicas; remove it, or start more processes")
    if parallel.zero_stage:
        yield unsupported(
            "--grad-comp",
            f"cannot be combined with --zero-stage {parallel.zero_stage}, which shards matrices; use --zero-stage 0",
        )
    if parallel.expert_model_parallel_size > 1:
        yield unsupported(
            "--grad-comp",
            f"cannot be combined with --expert-model-parallel-size {parallel.expert_model_parallel_size}; remove one",
        )


def _selection(config: Config, _world_size: int) -> Iterator[Problem]:
    given, workers = config.compression, config.parallel.pipeline_model_parallel_size
    stages = given.selective_grad_comp_way
    if not (given.grad_comp and given.selective_grad_comp):
        return
    if stages is None:
        yield conflict(
            "--selective-grad-comp", "requires --selective-grad-comp-way: the number of pipeline ranks that compress"
        )
    elif stages != AUTO and not (is_count(stages) and 1 <= int(stages) <= workers):
        yield conflict(
            "--selective-grad-comp-way",
            f"is {stages!r}; must be auto, or 1 to --pipeline-model-parallel-size {workers}",
        )


def _fused(config: Config, _world_size: int) -> Iterator[Problem]:
    if not config.compression.emb_comm_opt:
        return
    if not config.model.shares_embedding:
        yield conflict("--emb-comm-opt", "has no effect with --untie-embeddings-and-output-weights; remove it")
    if config.parallel.zero_stage:
        yield unsupported(
            "--emb-comm-opt", f"cannot be combined with --zero-stage {config.parallel.zero_stage}; remove one"
        )


COMPRESSION_RULES: tuple[Rule, ...] = (_boundaries, _replicas, _selection, _fused)
