"""Rules over ``--torch-compile``."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..schema import Config
from .problem import Rule, unsupported

FLAG = "--torch-compile"


def _compiled(config: Config, _world_size: int) -> Iterator[Problem]:
    training, parallel = config.training, config.parallel
    if not training.torch_compile:
        return
    if training.recompute_granularity == "selective":
        yield unsupported(
            FLAG,
            "cannot be combined with --recompute-granularity selective; use full or none",
        )
    if config.pruning.sparsify:
        yield unsupported(
            FLAG, "cannot be combined with --sparsify: torch cannot compile sparse matrix products; remove one"
        )
    if parallel.tensor_model_parallel_size > 1:
        yield unsupported(
            FLAG,
            f"cannot be combined with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}, whose"
            " products have collectives; remove one",
        )
    if training.curriculum_shortest is not None:
        yield unsupported(FLAG, "recompiles for every length of --curriculum-shortest; remove one")


COMPILING_RULES: tuple[Rule, ...] = (_compiled,)
