"""Rules over compressed communication."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..schema import Config
from .problem import Rule, conflict, later

FACTOR_BYTES = 4
AUTO = "auto"


def _boundaries(config: Config, _world_size: int) -> Iterator[Problem]:
    given, model = config.compression, config.model
    if not given.inter_grad_comp:
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


def _replicas(config: Config, _world_size: int) -> Iterator[Problem]:
    given, parallel = config.compression, config.parallel
    if not given.grad_comp:
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
    if not (given.grad_comp and given.selective_grad_comp):
        return
    if way is None:
        yield conflict("--selective-grad-comp", "needs --selective-grad-comp-way: how many workers compress")
    elif way != AUTO and not (way.isdecimal() and 1 <= int(way) <= workers):
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


COMPRESSION_RULES: tuple[Rule, ...] = (_boundaries, _replicas, _selection, _fused)
