"""Rules over ``--fp8``."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..schema import Config
from .problem import Rule, conflict

FLAG = "--fp8"
# Of the kernel; on CPUs, too, so that a run that was tried there starts on GPUs.
MULTIPLE = 16


def _float8(config: Config, _world_size: int) -> Iterator[Problem]:
    options, model = config.precision, config.model
    if not options.uses_float8:
        return
    if not options.bf16:
        yield conflict(FLAG, "requires --bf16, in which the other operations run; add it")
    if options.fp8_recipe != "tensorwise" and options.float8_form == "hybrid":
        yield conflict(
            "--fp8-format", f"hybrid cannot be combined with --fp8-recipe {options.fp8_recipe}; use e4m3, or tensorwise"
        )
    excluded = options.num_layers_at_start_in_bf16 + options.num_layers_at_end_in_bf16
    if options.first_last_layers_bf16 and excluded >= model.num_layers:
        yield conflict(
            "--first-last-layers-bf16",
            f"keeps {excluded} of {model.num_layers} layers in bfloat16, and --fp8 has no effect; remove one, or reduce"
            " --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16",
        )
    ranks = config.parallel.tensor_model_parallel_size
    for flag, size, parts in (
        ("--hidden-size", model.hidden_size, 1),
        ("--ffn-hidden-size", model.ffn_hidden_size, ranks),
        ("--num-attention-heads", model.num_attention_heads * model.kv_channels, ranks),
        ("--num-query-groups", 2 * (model.num_query_groups or model.num_attention_heads) * model.kv_channels, ranks),
    ):
        if size // parts % MULTIPLE:
            per_rank = f" on each of {parts} tensor-parallel ranks" if parts > 1 else ""
            yield conflict(
                flag,
                f"gives a product of {size // parts} features{per_rank}; must be a multiple of {MULTIPLE} with {FLAG};"
                f" change it, or remove {FLAG}",
            )


FLOAT8_RULES: tuple[Rule, ...] = (_float8,)
