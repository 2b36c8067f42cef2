"""Rules over ``--cuda-graph``."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..schema import Config
from .problem import Rule, conflict, unsupported

FLAG = "--cuda-graph"


def _graphs(config: Config, _world_size: int) -> Iterator[Problem]:
    training, parallel = config.training, config.parallel
    if not training.cuda_graph:
        return
    if training.device == "cpu":
        yield conflict(FLAG, "requires a GPU, and --device is cpu; remove one")
    if training.torch_compile:
        yield unsupported(FLAG, "cannot be combined with --torch-compile; remove one")
    if training.recompute_granularity != "none":
        yield unsupported(
            FLAG, f"cannot be combined with --recompute-granularity {training.recompute_granularity}; remove one"
        )
    if config.pruning.sparsify:
        yield unsupported(FLAG, "cannot be combined with --sparsify, whose kernels change with the mask; remove one")
    if parallel.tensor_model_parallel_size > 1:
        yield unsupported(
            FLAG,
            f"cannot be combined with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}, whose"
            " products have collectives; remove one",
        )
    if parallel.zero_stage and parallel.data_parallel_size > 1:
        yield unsupported(
            FLAG, f"cannot be combined with --zero-stage {parallel.zero_stage}, which gathers parameters; remove one"
        )
    if parallel.vocabulary_parallel:
        yield unsupported(FLAG, "cannot be combined with --vocabulary-parallel; remove one")
    if training.curriculum_shortest is not None:
        yield unsupported(FLAG, "captures again for every length of --curriculum-shortest; remove one")


GRAPH_RULES: tuple[Rule, ...] = (_graphs,)
