"""Rules over the inverse cloze task."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..schema import Config
from .problem import Rule, conflict, unsupported


def _towers(config: Config, _world_size: int) -> Iterator[Problem]:
    if config.model.base_family != "ict":
        return
    given, model, training = config.ict, config.model, config.training
    try:
        top = given.top_k
    except UsageError as error:
        yield Problem("--retriever-report-topk-accuracies", "form", str(error))
        top = ()
    candidates = training.micro_batch_size * config.parallel.data_parallel_size
    if candidates < 2:
        yield conflict(
            "--micro-batch-size",
            "is 1; must be at least 2 without replicas: a query needs several blocks to choose from",
        )
    elif top and top[-1] > candidates:
        yield conflict(
            "--retriever-report-topk-accuracies",
            f"has {top[-1]}; must be at most the {candidates} blocks per query (--micro-batch-size x replicas)",
        )
    if given.retriever_seq_length not in (None, model.seq_length):
        yield conflict(
            "--retriever-seq-length",
            f"is {given.retriever_seq_length}, but its alias --seq-length is {model.seq_length}; remove one",
        )
    if config.parallel.sequence_parallel:
        yield unsupported(
            "--sequence-parallel", "is not supported for ict, whose head reads the first token; remove it"
        )
    if given.titles_data_path is not None and (len(config.data.blend) != 1 or any(config.data.part_blends)):
        yield unsupported("--titles-data-path", "requires a single dataset in --data-path")
    if given.biencoder_shared_query_context_model and config.pruning.sparsify:
        yield unsupported("--sparsify", "cannot be combined with --biencoder-shared-query-context-model; remove one")


ICT_RULES: tuple[Rule, ...] = (_towers,)
