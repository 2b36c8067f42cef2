"""Rules over the inverse cloze task."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..schema import Config
from .problem import Rule, conflict, later


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
        yield conflict("--micro-batch-size", "1 leaves each query its own block alone to find: give 2 or more")
    elif top and top[-1] > candidates:
        yield conflict(
            "--retriever-report-topk-accuracies",
            f"{top[-1]} is more than the {candidates} blocks that a query is compared with (--micro-batch-size x"
            " replicas)",
        )
    if given.retriever_seq_length not in (None, model.seq_length):
        yield conflict(
            "--retriever-seq-length",
            f"{given.retriever_seq_length} and --seq-length {model.seq_length} mean the same; give one",
        )
    if config.parallel.sequence_parallel:
        yield later("--sequence-parallel", "does not go with ict, whose head reads the first token; leave it out")
    if given.titles_data_path is not None and (len(config.data.blend) != 1 or any(config.data.part_blends)):
        yield later("--titles-data-path", "are the titles of one data set: give one --data-path")
    if given.biencoder_shared_query_context_model and config.pruning.sparsify:
        yield later(
            "--sparsify", "does not go with --biencoder-shared-query-context-model, whose towers would be cut twice"
        )


ICT_RULES: tuple[Rule, ...] = (_towers,)
