"""Rules over dynamic techniques and load balancing."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..extensions import balancer_names
from ..schema import Config
from .problem import Rule, conflict, unsupported

BLOCK_SIZES = (16, 32, 64, 128)
SINGLE_STACK_FAMILIES = ("gpt", "bert", "llama")


def _pruning(config: Config, _world_size: int) -> Iterator[Problem]:
    pruning = config.pruning
    if not pruning.sparsify:
        return
    if pruning.pruning_end_iter < pruning.pruning_start_iter:
        yield conflict(
            "--pruning-end-iter",
            f"is {pruning.pruning_end_iter}; must be at least --pruning-start-iter {pruning.pruning_start_iter}",
        )
    if pruning.final_sparsity < pruning.initial_sparsity:
        yield conflict(
            "--final-sparsity",
            f"is {pruning.final_sparsity}; must be at least --initial-sparsity {pruning.initial_sparsity}",
        )
    whole = pruning.pruning_mode != "unstructured" or pruning.pruning_scope != "global"
    if whole and config.parallel.zero_stage:
        yield unsupported(
            "--pruning-mode",
            f"is {pruning.pruning_mode} with --pruning-scope {pruning.pruning_scope}; must be unstructured and global"
            f" with --zero-stage {config.parallel.zero_stage}, which shards matrices",
        )
    if pruning.pruning_mode.startswith("2:4") and pruning.final_sparsity > 0.5:
        yield conflict(
            "--final-sparsity",
            f"is {pruning.final_sparsity}; must be at most 0.5 with --pruning-mode {pruning.pruning_mode}",
        )
    if pruning.pruning_block_size not in BLOCK_SIZES:
        yield conflict("--pruning-block-size", f"is {pruning.pruning_block_size}; must be 16, 32, 64 or 128")


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
                f"is {step}:{layers}; must freeze at most --num-layers {config.model.num_layers} blocks",
            )
    adaptive = config.freezing.freeze_adaptive
    if adaptive and steps:
        yield conflict("--freeze-adaptive", "cannot be combined with --freeze-schedule; remove one")
    if not steps and not adaptive:
        return
    cached = config.freezing.freeze_cache_activations is not None
    model = config.model
    if cached and model.shares_embedding and not config.freezing.freeze_tied:
        remedy, trainer = "--freeze-tied or --untie-embeddings-and-output-weights", "the output layer keeps training"
        if model.mtp_num_layers:
            remedy, trainer = "--freeze-tied", "the layers of --mtp-num-layers keep training"
        yield conflict("--freeze-cache-activations", f"requires {remedy}: else {trainer} the frozen embedding")
    if adaptive and config.parallel.zero_stage:
        yield unsupported(
            "--freeze-adaptive",
            f"cannot be combined with --zero-stage {config.parallel.zero_stage}; use --zero-stage 0",
        )
    if cached:
        for flag in _depend_on_microbatch(config):
            yield conflict(
                "--freeze-cache-activations",
                f"cannot be combined with {flag}: activations of a sample depend on its microbatch; remove one",
            )
    if config.freezing.freeze_tied and not model.shares_embedding:
        yield conflict("--freeze-tied", "has no effect with --untie-embeddings-and-output-weights; remove it")


def _depend_on_microbatch(config: Config) -> list[str]:
    """The flags that let a sample's activations depend on the other samples of its microbatch."""
    model, precision = config.model, config.precision
    flags = {
        "--mod-capacity": config.depth.mod_capacity is not None,
        "--early-exit-layers": config.exits.early_exit_layers is not None,
        # One scale for the tensor of a microbatch; others are of a row.
        "--fp8-recipe tensorwise": precision.uses_float8 and precision.fp8_recipe == "tensorwise",
    }
    if model.num_experts is not None:
        flags["--moe-expert-capacity-factor"] = model.moe_expert_capacity_factor is not None
        flags[f"--moe-routing {model.moe_routing}"] = model.moe_routing != "topk"
        flags["--moe-router-load-balancing-type sinkhorn"] = "sinkhorn" in model.moe_router_load_balancing_type
    return [flag for flag, is_on in flags.items() if is_on]


def _changed_model(config: Config, _world_size: int) -> Iterator[Problem]:
    """Mixture of depths, early exit and sparse attention, which change the modules of the model."""
    depth, exits, attention = config.depth, config.exits, config.attention
    enabled = {
        "--mod-capacity": depth.mod_capacity is not None,
        "--early-exit-layers": exits.early_exit_layers is not None,
    }
    for flag in (flag for flag, on in enabled.items() if on and config.model.base_family not in SINGLE_STACK_FAMILIES):
        yield unsupported(flag, f"requires family {', '.join(SINGLE_STACK_FAMILIES)}; is {config.model.family}")
    if attention.sparse_attention and config.model.base_family not in (*SINGLE_STACK_FAMILIES, "t5"):
        yield unsupported(
            "--sparse-attention", f"requires family {', '.join(SINGLE_STACK_FAMILIES)} or t5; is {config.model.family}"
        )
    if attention.sparse_attention and config.model.position_embedding_type == "relative":
        yield conflict(
            "--sparse-attention",
            "cannot be combined with --position-embedding-type relative; use learned",
        )
    if depth.mod_capacity is not None and depth.mod_every > config.model.num_layers:
        yield conflict("--mod-every", f"is {depth.mod_every}; must be at most --num-layers {config.model.num_layers}")
    try:
        layers = exits.exit_layers
    except UsageError as error:
        yield Problem("--early-exit-layers", "form", str(error))
        return
    if layers and layers[-1] >= config.model.num_layers - 1:
        yield conflict(
            "--early-exit-layers",
            f"has {layers[-1]}; must be below the last of --num-layers {config.model.num_layers} blocks (from 0)",
        )
    try:
        weights = exits.layer_weights if layers else ()
    except UsageError as error:
        yield Problem("--exit-layer-weight", "form", str(error))
        return
    if weights and len(weights) != len(layers):
        yield conflict(
            "--exit-layer-weight", f"has {len(weights)} weights; --early-exit-layers has {len(layers)} exits, one each"
        )
    if layers and exits.early_exit_loss_vocabulary and config.parallel.tensor_model_parallel_size > 1:
        yield unsupported(
            "--early-exit-loss-vocabulary",
            "needs the whole vocabulary on a rank; remove it with --tensor-model-parallel-size"
            f" {config.parallel.tensor_model_parallel_size}",
        )
    routed = [layer for layer in layers if depth.mod_capacity is not None and (layer + 1) % depth.mod_every == 0]
    if routed and exits.early_exit_measure == "saturation":
        yield conflict(
            "--early-exit-layers",
            f"has {routed[0]}, a routed block (--mod-every {depth.mod_every}); --early-exit-measure saturation exits"
            " all tokens that bypass it; use another block, or --early-exit-measure softmax",
        )
    if attention.sparse_attention and attention.sparse_attention_buckets % 2:
        yield conflict("--sparse-attention-buckets", f"is {attention.sparse_attention_buckets}; must be even")


def _packing(config: Config, _world_size: int) -> Iterator[Problem]:
    """Techniques that select tokens do not read where documents begin."""
    data = config.data
    flags = {
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--sft": data.sft and data.sft_packing,
    }
    given = [flag for flag, on in flags.items() if on]
    techniques = {
        "--mod-capacity": config.depth.mod_capacity is not None,
        "--early-exit-layers": config.exits.early_exit_layers is not None,
        "--sparse-attention": config.attention.sparse_attention,
    }
    for technique in [name for name, on in techniques.items() if on]:
        if given:
            yield unsupported(given[0], f"is given with {technique}; remove one")
        if data.masks_loss and not given and technique == "--early-exit-layers":
            flag = "--sft" if data.sft else "--eod-mask-loss"
            yield unsupported(flag, f"is given with {technique}, whose exits count every token; remove one")


def _balance(config: Config, _world_size: int) -> Iterator[Problem]:
    balance = config.balance
    if balance.balance == "offline" and balance.plan is None:
        yield conflict("--balance", "offline requires --plan FILE")
    if balance.balance_lockstep and balance.balance != "online":
        yield conflict("--balance-lockstep", f"requires --balance online, is {balance.balance}")
    for flag, given in (
        ("--expert-plan", balance.expert_plan),
        ("--expert-rebalance-interval", balance.expert_rebalance_interval),
    ):
        if balance.balance_experts and given is not None:
            yield conflict(flag, f"is {given}; remove it, or --balance-experts, whose plans place the experts")
    internal = balance.balance == "online" and balance.planner == "internal"
    if internal and balance.balancer not in (known := balancer_names()):
        yield conflict(
            "--balancer", f"is {balance.balancer!r}; must be one of {', '.join(known)}, or install its package"
        )
    values = {"--pack-to": balance.pack_to, "--min-throughput-fraction": balance.min_throughput_fraction}
    for flag, value in values.items():
        if value is not None and (balance.balance != "online" or balance.planner != "internal"):
            yield conflict(flag, f"is {value}; requires --balance online and --planner internal")


TECHNIQUES_RULES: tuple[Rule, ...] = (
    _pruning,
    _freezing,
    _changed_model,
    _packing,
    _balance,
)
