"""Placements of Megatron-core: which blocks each (virtual) stage of the pipeline has, by its own functions."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

LAYOUTS = ("Et|tt|tt|tL", "E|t|t|ttL", "Ettt|(tt|)*6tL", "Et*3|(tt|)*2,L", "Ett|t|L|", "E|(t|)*5L", "(E)*1t*4|t*4L")
CASES: list[dict[str, Any]] = [
    *({"layers": 24, "ranks": ranks, "virtual": virtual} for ranks in (2, 4, 8) for virtual in (1, 2, 3)),
    *(
        {"layers": layers, "ranks": ranks, "virtual": virtual, "embedding": embedding, "loss": loss}
        for layers, ranks, virtual in itertools.product((6, 7, 14, 15, 30, 31), (2, 4), (1, 2))
        for embedding, loss in ((True, False), (False, True), (True, True))
    ),
    *(
        {"layers": layers, "ranks": ranks, "virtual": virtual, "first": first, "last": last}
        for layers, ranks, virtual in itertools.product((10, 12, 16), (2, 4), (1, 2))
        for first, last in ((1, None), (4, None), (None, 2), (2, 2), (4, 4), (0, None))
    ),
    *({"layers": layers, "ranks": ranks, "layout": text} for text in LAYOUTS for ranks in (2, 4) for layers in (6, 8)),
]


def placement(layers: int, ranks: int, **options: Any) -> list[list[int]] | None:
    """First block and number of blocks of each stage, in the order of stages; None where Megatron refuses."""
    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual, layout = options.get("virtual", 1), options.get("layout")
    try:
        if layout:
            virtual = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // ranks
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_dtype="float32",
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            num_layers_in_first_pipeline_stage=options.get("first"),
            num_layers_in_last_pipeline_stage=options.get("last"),
            account_for_embedding_in_pipeline_split=options.get("embedding", False),
            account_for_loss_in_pipeline_split=options.get("loss", False),
            pipeline_model_parallel_layout=layout,
        )
        found = []
        for stage in range(ranks * virtual):
            rank, chunk = stage % ranks, stage // ranks if virtual > 1 else None
            with (
                mock.patch.object(parallel_state, "get_pipeline_model_parallel_rank", return_value=rank),
                mock.patch.object(
                    parallel_state,
                    "get_virtual_pipeline_model_parallel_world_size",
                    return_value=virtual if virtual > 1 else None,
                ),
            ):
                count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
                offset = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank)
            found.append([offset, count])
    except (AssertionError, ValueError, NotImplementedError):
        return None
    # Its functions do not check the sum: a model would lack blocks or have some twice.
    if sum(count for _, count in found) != layers:
        return None
    return found
