"""Rules over ``--torch-compile``: what it does not hold with."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..schema import Config
from .problem import Rule, later

FLAG = "--torch-compile"


def _compiled(config: Config, _world_size: int) -> Iterator[Problem]:
    training, parallel = config.training, config.parallel
    if not training.torch_compile:
        return
    if training.recompute_granularity == "selective":
        yield later(
            FLAG,
            "hides the products that --recompute-granularity selective would keep; use full or none, or leave it out",
        )
    if config.pruning.sparsify:
        yield later(
            FLAG, "cannot be combined with --sparsify: torch cannot compile the sparse products that weights turn to"
        )
    if parallel.tensor_model_parallel_size > 1:
        yield later(
            FLAG,
            f"cannot be combined with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}: products are"
            " followed by sums over processes",
        )
    if training.curriculum_shortest is not None:
        yield later(FLAG, "would compile every length of --curriculum-shortest anew; leave one of them out")


COMPILING_RULES: tuple[Rule, ...] = (_compiled,)
