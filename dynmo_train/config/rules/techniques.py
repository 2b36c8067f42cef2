"""Rules over the dynamic techniques and balancing."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..schema import Config
from .problem import Rule, conflict, later

ONE_STREAM = ("gpt", "bert", "llama")


def _pruning(config: Config, _world_size: int) -> Iterator[Problem]:
    pruning = config.pruning
    if not pruning.sparsify:
        return
    if pruning.pruning_end_iter < pruning.pruning_start_iter:
        yield conflict(
            "--pruning-end-iter",
            f"{pruning.pruning_end_iter} is before --pruning-start-iter {pruning.pruning_start_iter}",
        )
    if pruning.final_sparsity < pruning.initial_sparsity:
        yield conflict(
            "--final-sparsity", f"{pruning.final_sparsity} is below --initial-sparsity {pruning.initial_sparsity}"
        )
    whole = pruning.pruning_mode != "unstructured" or pruning.pruning_scope != "global"
    if whole and config.parallel.zero_stage:
        yield later(
            "--pruning-mode",
            f"{pruning.pruning_mode} by --pruning-scope {pruning.pruning_scope} needs whole matrices; with --zero-stage"
            f" {config.parallel.zero_stage} use unstructured and global",
        )
    if pruning.pruning_mode == "2:4" and pruning.final_sparsity > 0.5:
        yield conflict("--final-sparsity", f"{pruning.final_sparsity}: --pruning-mode 2:4 prunes 0.5 at most")


def _freezing(config: Config, _world_size: int) -> Iterator[Problem]:
    try:
        steps = config.freezing.freeze_steps
    except UsageError as error:
        yield Problem("--freeze-schedule", "form", str(error))
        return
    for step, layers in steps:
        if layers > config.model.num_layers:
            yield conflict(
                "--freeze-schedule",
                f"{step}:{layers} freezes {layers} blocks; the model has --num-layers {config.model.num_layers}",
            )
    adaptive = config.freezing.freeze_adaptive
    if adaptive and steps:
        yield conflict("--freeze-adaptive", "cannot be combined with --freeze-schedule; give one of them")
    if not steps and not adaptive:
        return
    cached = config.freezing.freeze_cache_activations is not None
    if cached and not (config.model.untie_embeddings_and_output_weights or config.freezing.freeze_tied):
        yield conflict(
            "--freeze-cache-activations",
            "needs --freeze-tied or --untie-embeddings-and-output-weights: else the frozen embedding's weight goes on"
            " training through the head",
        )
    if adaptive and config.parallel.zero_stage:
        yield later(
            "--freeze-adaptive", f"cannot compare layers under --zero-stage {config.parallel.zero_stage}; write 0"
        )
    if cached and (config.depth.mod_capacity is not None or config.exits.early_exit_layers is not None):
        yield conflict(
            "--freeze-cache-activations",
            "cannot be combined with --mod-capacity or --early-exit-layers, where a sample's microbatch matters",
        )
    if config.freezing.freeze_tied and config.model.untie_embeddings_and_output_weights:
        yield conflict("--freeze-tied", "has no effect with --untie-embeddings-and-output-weights")


def _changed_model(config: Config, _world_size: int) -> Iterator[Problem]:
    """Mixture of depths, early exit and sparse attention change the model's items."""
    depth, exits, attention = config.depth, config.exits, config.attention
    asked = {
        "--mod-capacity": depth.mod_capacity is not None,
        "--early-exit-layers": exits.early_exit_layers is not None,
    }
    for flag in (flag for flag, on in asked.items() if on and config.model.base_family not in ONE_STREAM):
        yield later(flag, f"works with {', '.join(ONE_STREAM)}; the model is {config.model.family}")
    if attention.sparse_attention and config.model.base_family not in (*ONE_STREAM, "t5"):
        yield later(
            "--sparse-attention", f"works with {', '.join(ONE_STREAM)} and t5; the model is {config.model.family}"
        )
    if attention.sparse_attention and config.model.position_embedding_type == "relative":
        yield conflict(
            "--sparse-attention",
            "has no biases by distance: give --position-embedding-type learned, or leave it out",
        )
    if depth.mod_capacity is not None and depth.mod_every > config.model.num_layers:
        yield conflict("--mod-every", f"{depth.mod_every} routes none of --num-layers {config.model.num_layers} blocks")
    try:
        layers = exits.exit_layers
    except UsageError as error:
        yield Problem("--early-exit-layers", "form", str(error))
        return
    if layers and layers[-1] >= config.model.num_layers - 1:
        yield conflict(
            "--early-exit-layers",
            f"{layers[-1]}: behind the last of --num-layers {config.model.num_layers} blocks (numbered from 0) nothing"
            " is left to skip",
        )
    routed = [layer for layer in layers if depth.mod_capacity is not None and (layer + 1) % depth.mod_every == 0]
    if routed and exits.early_exit_measure == "saturation":
        yield conflict(
            "--early-exit-layers",
            f"{routed[0]}: of a routed block (--mod-every {depth.mod_every}) saturation would let every token leave"
            " that passes it by; name another block, or --early-exit-measure softmax",
        )
    if attention.sparse_attention and attention.sparse_attention_buckets % 2:
        yield conflict("--sparse-attention-buckets", f"{attention.sparse_attention_buckets} is not an even number")


def _balance(config: Config, _world_size: int) -> Iterator[Problem]:
    balance = config.balance
    if balance.balance == "offline" and balance.plan is None:
        yield conflict("--balance", "offline needs --plan FILE")
    if balance.balance_lockstep and balance.balance != "online":
        yield conflict("--balance-lockstep", f"needs --balance online, is {balance.balance}")
    asked = {"--pack-to": balance.pack_to, "--min-throughput-fraction": balance.min_throughput_fraction}
    for flag, value in asked.items():
        if value is not None and (balance.balance != "online" or balance.planner != "internal"):
            yield conflict(flag, f"{value}: the planner of --balance online --planner internal releases workers")


TECHNIQUES_RULES: tuple[Rule, ...] = (
    _pruning,
    _freezing,
    _changed_model,
    _balance,
)
