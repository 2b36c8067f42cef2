"""Rules over the architecture of the model and the length of the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ..._common.document import MAX_ALL_EXPERTS, Problem
from ..._common.errors import UsageError
from ..parse import FACTOR_LISTS, SINKHORN
from ..resolve import ALIASES
from ..schema import Config
from ..sections.ict import IctConfig
from ..sections.layer_options import LayerOptions
from .problem import Rule, conflict, unsupported

MOE_FAMILIES = DECODERS = ("gpt", "llama")
DECODER_OPTIONS = (
    *("rotary_percent", "rotary_scaling", "normalization", "norm_placement", "qk_norm"),
    *("add_bias_linear", "add_qkv_bias", "mlp_bias", "embedding_scale", "attention_scale"),
    *("layer_types", "local_rotary_base", "attn_logit_softcapping", "final_logit_softcapping", "attention_sinks"),
    *("swiglu_alpha", "swiglu_limit", "swiglu_offset", "softmax_off_by_one"),
)
ENCODER_ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
FAMILY_OPTIONS: dict[str, tuple[str, ...]] = {
    "encoder_num_layers": ("t5",),
    "decoder_num_layers": ("t5",),
    "encoder_seq_length": ("t5",),
    "decoder_seq_length": ("t5",),
    "relative_attention_num_buckets": ("t5",),
    "relative_attention_max_distance": ("t5",),
    "num_query_groups": DECODERS,
    "kv_channels": (*DECODERS, "t5"),
    **dict.fromkeys(DECODER_OPTIONS, DECODERS),
    "rotary_base": DECODERS,
    "use_rope_scaling": DECODERS,
    "rope_scaling_factor": DECODERS,
    "attention_window": ("gpt", "llama"),
    "bert_no_binary_head": ("bert",),
    "untie_embeddings_and_output_weights": ("gpt", "llama"),
    "num_experts": MOE_FAMILIES,
    "moe_router_topk": MOE_FAMILIES,
    "moe_routing": MOE_FAMILIES,
    "moe_aux_loss_coeff": MOE_FAMILIES,
    "moe_router_load_balancing_type": MOE_FAMILIES,
    "moe_router_score_function": MOE_FAMILIES,
    "moe_router_pre_softmax": MOE_FAMILIES,
    "moe_router_topk_scaling_factor": MOE_FAMILIES,
    "moe_router_enable_expert_bias": MOE_FAMILIES,
    "moe_router_bias": MOE_FAMILIES,
    "moe_router_bias_update_rate": MOE_FAMILIES,
    "moe_router_num_groups": MOE_FAMILIES,
    "moe_router_group_topk": MOE_FAMILIES,
    "moe_z_loss_coeff": MOE_FAMILIES,
    "moe_expert_capacity_factor": MOE_FAMILIES,
    "moe_token_drop_policy": MOE_FAMILIES,
    "moe_pad_expert_input_to_capacity": MOE_FAMILIES,
    "moe_shared_expert_intermediate_size": MOE_FAMILIES,
    "moe_shared_expert_gate": MOE_FAMILIES,
    "reset_position_ids": ("gpt", "llama"),
    "reset_attention_mask": ("gpt", "llama"),
    "eod_mask_loss": ("gpt", "llama"),
    "calculate_per_token_loss": ("gpt", "llama", "t5"),
    **{spec.name: DECODERS for spec in fields(LayerOptions)},
    "sft": ("gpt", "llama"),
    **{spec.name: ("ict",) for spec in fields(IctConfig)},
}
POSITION_TYPES = {
    "gpt": ("learned", "rotary"),
    "bert": ("learned",),
    "ict": ("learned",),
    "llama": ("rotary",),
    "t5": ("learned", "relative"),
}


def _shape(config: Config, _world_size: int) -> Iterator[Problem]:
    model = config.model
    is_derived = config.sources.get("kv_channels") == "derived" and not model.multi_latent_attention
    if model.hidden_size % model.num_attention_heads and is_derived:
        yield conflict(
            "--hidden-size",
            f"is {model.hidden_size}; must be a multiple of --num-attention-heads {model.num_attention_heads}",
        )
    if model.seq_length > model.max_position_embeddings:
        yield conflict(
            "--seq-length",
            f"is {model.seq_length}; must be at most --max-position-embeddings {model.max_position_embeddings}",
        )


def _routing(config: Config, _world_size: int) -> Iterator[Problem]:
    """Experts and routing."""
    model = config.model
    if model.num_layers * (model.num_experts or 0) > MAX_ALL_EXPERTS:
        yield conflict(
            "--num-experts",
            f"is {model.num_experts} in {model.num_layers} layers; must be at most {MAX_ALL_EXPERTS:,} in total",
        )
    if model.moe_routing == "balanced" and model.moe_router_topk != 1:
        yield conflict("--moe-router-topk", f"is {model.moe_router_topk}; must be 1 with --moe-routing balanced")
    if model.moe_routing != "topk" and model.moe_expert_capacity_factor is not None:
        yield conflict(
            "--moe-expert-capacity-factor",
            f"has no effect with --moe-routing {model.moe_routing}; remove it",
        )
    if model.num_experts is not None:
        try:
            _ = model.expert_layers
        except UsageError as error:
            yield conflict(*str(error).split(": ", 1))
        yield from _balance(config)
        yield from _scores(config)


def _balance(config: Config) -> Iterator[Problem]:
    """Types of load balancing, and what they combine with."""
    model, flag = config.model, "--moe-router-load-balancing-type"
    try:
        coefficients = model.balance_coefficients
    except UsageError as error:
        yield conflict(*str(error).split(": ", 1))
        return
    types = " ".join(coefficients)
    is_sinkhorn = SINKHORN in coefficients
    by_sequence_or_batch = {"seq_aux_loss", "global_aux_loss"} & coefficients.keys()
    if (is_sinkhorn or by_sequence_or_batch) and model.moe_routing != "topk":
        yield conflict(flag, f"is {types}; requires --moe-routing topk, is {model.moe_routing}")
    if is_sinkhorn and model.moe_expert_capacity_factor is not None:
        yield conflict("--moe-expert-capacity-factor", f"cannot be combined with {flag} {types}; remove one")
    if is_sinkhorn and config.parallel.context_parallel_size > 1:
        size = config.parallel.context_parallel_size
        yield unsupported(flag, f"is {types}, which needs whole microbatches; --context-parallel-size is {size}")
    # Samples have different numbers of active tokens: the padding between them would be counted.
    counted = [name for name in coefficients if name in by_sequence_or_batch or name == SINKHORN]
    if counted and config.exits.early_exit_layers is not None:
        others = ", ".join(counted)
        yield unsupported(
            "--early-exit-layers", f"cannot be combined with {others}, which would count padding; remove one"
        )


def _scores(config: Config) -> Iterator[Problem]:
    """Scores of the router, weights of the chosen experts, the experts' biases and groups."""
    model = config.model
    given = {
        "--moe-router-score-function": model.moe_router_score_function != "softmax",
        "--moe-router-pre-softmax": model.moe_router_pre_softmax,
        "--moe-router-topk-scaling-factor": model.moe_router_topk_scaling_factor is not None,
        "--moe-router-enable-expert-bias": model.moe_router_enable_expert_bias,
        "--moe-router-group-topk": model.moe_router_group_topk is not None,
    }
    other = "--moe-routing " + model.moe_routing if model.moe_routing != "topk" else ""
    if model.moe_router_load_balancing_type.strip() == SINKHORN:
        other = "--moe-router-load-balancing-type " + SINKHORN
    if other and any(given.values()):
        flags = ", ".join(flag for flag, is_given in given.items() if is_given)
        yield conflict(flags, f"cannot be combined with {other}, which has scores of its own; remove one")
    if model.moe_router_score_function == "sigmoid" and model.moe_router_pre_softmax:
        yield conflict("--moe-router-pre-softmax", "has no effect with --moe-router-score-function sigmoid; remove it")
    softmax_of_one = model.moe_router_score_function == "softmax" and model.moe_router_topk == 1
    if softmax_of_one and not other and not model.moe_router_pre_softmax:
        yield conflict(
            "--moe-router-topk",
            "is 1, so that the softmax over the chosen expert is always 1 and the router gets no gradient of the loss;"
            " add --moe-router-pre-softmax",
        )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield conflict(
            "--moe-router-enable-expert-bias",
            f"requires --moe-router-score-function sigmoid, is {model.moe_router_score_function}",
        )
    yield from _groups(config)


def _groups(config: Config) -> Iterator[Problem]:
    """Routing limited to groups of experts."""
    model = config.model
    groups, chosen, experts = model.moe_router_num_groups, model.moe_router_group_topk, model.num_experts
    if (groups is None) != (chosen is None):
        yield conflict("--moe-router-num-groups", "and --moe-router-group-topk require each other; give both or none")
    if groups is None or chosen is None or experts is None:
        return
    if experts % groups:
        yield conflict("--moe-router-num-groups", f"is {groups}; must divide --num-experts {experts}")
    elif chosen > groups:
        yield conflict("--moe-router-group-topk", f"is {chosen}; must be at most --moe-router-num-groups {groups}")
    elif model.moe_router_topk > chosen * (experts // groups):
        yield conflict(
            "--moe-router-topk",
            f"is {model.moe_router_topk}; must be at most the {chosen * (experts // groups)} experts of"
            f" --moe-router-group-topk {chosen} groups",
        )
    elif model.moe_router_group_experts is not None and model.moe_router_group_experts > experts // groups:
        yield conflict(
            "--moe-router-group-experts",
            f"is {model.moe_router_group_experts}; must be at most the {experts // groups} experts of a group",
        )
    elif model.moe_router_group_experts is None and model.moe_router_topk % chosen:
        yield conflict(
            "--moe-router-topk",
            f"is {model.moe_router_topk}; must be a multiple of --moe-router-group-topk {chosen}, or use"
            " --moe-router-group-experts",
        )


def _family(config: Config, _world_size: int) -> Iterator[Problem]:
    """Options of other model families."""
    model = config.model
    for name, families in FAMILY_OPTIONS.items():
        if model.base_family not in families and config.sources.get(name) in ("flag", "file"):
            flag = "--" + name.replace("_", "-")
            yield conflict(flag, f"requires family {' or '.join(families)}, is {model.family}; remove it")
    positions = POSITION_TYPES[model.base_family]
    if model.position_embedding_type not in positions:
        yield conflict(
            "--position-embedding-type",
            f"is {model.position_embedding_type}; must be {' or '.join(positions)} for {model.family}",
        )
    if model.num_attention_heads % model.num_query_groups:
        yield conflict(
            "--num-query-groups",
            f"is {model.num_query_groups}; must divide --num-attention-heads {model.num_attention_heads}",
        )
    if model.position_embedding_type == "rotary":
        yield from _rotary(config)
    if model.position_embedding_type == "relative":
        exact = model.relative_attention_num_buckets // 4
        if model.relative_attention_max_distance <= 2 * exact:
            yield conflict(
                "--relative-attention-max-distance",
                f"is {model.relative_attention_max_distance}; must be above half of"
                f" --relative-attention-num-buckets {model.relative_attention_num_buckets}",
            )
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield conflict(
            "--moe-router-topk", f"is {model.moe_router_topk}; must be at most --num-experts {model.num_experts}"
        )
    for other, name in ALIASES.items():
        value, taken = getattr(model, other, None), getattr(model, name)
        if value is not None and value != taken:
            flags = ["--" + each.replace("_", "-") for each in (other, name)]
            yield conflict(flags[0], f"is {value}, but its alias {flags[1]} is {taken}; remove one")
    if model.base_family == "t5" and model.decoder_seq_length > model.max_position_embeddings:
        yield conflict(
            "--decoder-seq-length",
            f"is {model.decoder_seq_length}; must be at most --max-position-embeddings {model.max_position_embeddings}",
        )


def _rotary(config: Config) -> Iterator[Problem]:
    """Rotary positions."""
    model = config.model
    is_latent = model.multi_latent_attention
    width = model.qk_pos_emb_head_dim if is_latent else int(model.kv_channels * model.rotary_percent)
    if not is_latent and (width < 2 or width % 2):
        share = "" if model.rotary_percent == 1 else f" x --rotary-percent {model.rotary_percent}"
        yield conflict("--kv-channels", f"is {model.kv_channels}{share}; must be even for rotary embeddings")
    scalings = {
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-scaling": model.rotary_scaling is not None,
        "--rotary-scaling-factor": model.yarn_object is not None,
    }
    given = [flag for flag, is_given in scalings.items() if is_given]
    if len(given) > 1:
        yield conflict(given[0], f"cannot be combined with {' and '.join(given[1:])}; remove one")
    try:
        scaling = model.rotary_scaling_object or {}
    except UsageError as error:
        yield conflict(*str(error).split(": ", 1))
        return
    for name in FACTOR_LISTS:
        if name in scaling and len(scaling[name]) != width // 2:
            yield conflict(
                "--rotary-scaling",
                f"has {len(scaling[name])} numbers in {name}; must be {width // 2}, one for two elements",
            )


def _encoder(config: Config, _world_size: int) -> Iterator[Problem]:
    """The activation of encoders."""
    model = config.model
    if model.base_family not in DECODERS:
        allowed = ("relu",) if model.position_embedding_type == "relative" else ENCODER_ACTIVATIONS
        if model.activation not in allowed:
            yield conflict("--activation", f"is {model.activation}; must be {' or '.join(allowed)} for {model.family}")


def _decoder(config: Config, _world_size: int) -> Iterator[Problem]:
    """Norms of queries and keys, and positions that a model does not have."""
    model, parallel = config.model, config.parallel
    rotary = ("rotary_base", "rotary_percent", "rotary_scaling", "use_rope_scaling")
    for name in rotary if model.position_embedding_type != "rotary" else ():
        if model.base_family in DECODERS and config.sources.get(name) in ("flag", "file"):
            yield conflict("--" + name.replace("_", "-"), "requires --position-embedding-type rotary; remove it")
    yield from _attention(config)
    if model.qk_norm == "projection" and parallel.tensor_model_parallel_size > 1:
        yield unsupported(
            "--qk-norm",
            "is projection, a norm over all heads, which tensor-parallel ranks share; use"
            " --tensor-model-parallel-size 1",
        )
    if model.qk_norm == "projection" and config.pruning.sparsify and config.pruning.pruning_mode == "structured":
        yield unsupported("--qk-norm", "is projection, a norm over all heads; --pruning-mode structured removes heads")


def _latent(config: Config, _world_size: int) -> Iterator[Problem]:
    """Multi-head latent attention: what it needs, and what it does not implement."""
    model = config.model
    flag = "--multi-latent-attention"
    if not model.multi_latent_attention:
        if model.rotary_interleaved:
            yield unsupported("--rotary-interleaved", f"requires {flag}; leave it out")
        return
    if model.position_embedding_type != "rotary":
        yield conflict(flag, f"requires --position-embedding-type rotary, is {model.position_embedding_type}")
    if model.num_query_groups != model.num_attention_heads:
        yield conflict("--num-query-groups", f"has no effect with {flag}, which has a latent for all heads; remove it")
    if model.qk_pos_emb_head_dim % 2:
        yield conflict("--qk-pos-emb-head-dim", f"is {model.qk_pos_emb_head_dim}; must be even")
    if model.rotary_percent != 1:
        yield conflict("--rotary-percent", f"has no effect with {flag}; use --qk-pos-emb-head-dim")
    if model.qk_norm == "projection":
        yield conflict("--qk-norm", f"is projection; {flag} normalizes the latents: use head, or leave it out")
    others = {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--attention-sinks": model.attention_sinks,
        "--softmax-off-by-one": model.softmax_off_by_one,
        "--layer-types": model.layer_types is not None,
        "--local-rotary-base": model.local_rotary_base is not None,
        "--no-rope-freq": model.no_rope_freq is not None,
    }
    for other in [name for name, is_given in others.items() if is_given]:
        yield unsupported(other, f"cannot be combined with {flag}; remove one")


def _prediction(config: Config, _world_size: int) -> Iterator[Problem]:
    """Multi-token prediction: what reads the tokens of a sample, or the tables of the model, in other ways."""
    model, flag = config.model, "--mtp-num-layers"
    if not model.mtp_num_layers:
        return
    if model.position_embedding_type != "rotary":
        yield unsupported(flag, "requires --position-embedding-type rotary")
    if model.mtp_num_layers >= model.seq_length:
        yield conflict(flag, f"is {model.mtp_num_layers}; must be below --seq-length {model.seq_length}")


def _layers_that_differ(config: Config) -> Iterator[Problem]:
    """Windows and rotations of some layers."""
    model = config.model
    try:
        _ = model.layer_type_pattern, model.layers_without_rotation
    except UsageError as error:
        yield conflict(*str(error).split(": ", 1))
    for flag, value in (("--layer-types", model.layer_types), ("--local-rotary-base", model.local_rotary_base)):
        if value is not None and model.attention_window is None:
            yield conflict(flag, f"is {value}; requires --attention-window, the window of sliding layers")
    for flag, value in (("--local-rotary-base", model.local_rotary_base), ("--no-rope-freq", model.no_rope_freq)):
        if value is not None and model.position_embedding_type != "rotary":
            yield conflict(flag, "requires --position-embedding-type rotary; remove it")


def _attention(config: Config) -> Iterator[Problem]:
    """Soft caps and sinks, the gate that is clamped, and factors on sublayers."""
    model = config.model
    yield from _layers_that_differ(config)
    if model.residual_multiplier != 1 and model.norm_placement != "pre":
        yield unsupported("--residual-multiplier", f"is given with --norm-placement {model.norm_placement}; use pre")
    eager = {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--attention-sinks": model.attention_sinks,
        "--softmax-off-by-one": model.softmax_off_by_one,
    }
    if model.attention_sinks and model.softmax_off_by_one:
        yield conflict("--softmax-off-by-one", "is a sink of 0, with --attention-sinks, which are learned; remove one")
    without = {
        "--sparse-attention": config.attention.sparse_attention,
        "--context-parallel-size": config.parallel.context_parallel_size > 1,
    }
    for flag in [flag for flag, on in eager.items() if on]:
        for other in [other for other, on in without.items() if on]:
            if model.attention_dropout > 0:
                dropout = model.attention_dropout
                yield unsupported(flag, f"is given with {other} and --attention-dropout {dropout}; use a dropout of 0")
    sigmoid = ("clamped_swiglu", "quick_geglu")
    for name, activations in {"swiglu_alpha": sigmoid, "swiglu_limit": sigmoid[:1], "swiglu_offset": sigmoid}.items():
        if model.activation not in activations and config.sources.get(name) in ("flag", "file"):
            flag, allowed = "--" + name.replace("_", "-"), " or ".join(activations)
            yield conflict(flag, f"requires --activation {allowed}; remove it")


def _length(config: Config, _world_size: int) -> Iterator[Problem]:
    training, optimizer = config.training, config.optimizer
    by_steps = {
        "--train-iters": config.sources.get("train_iters") not in (None, "derived"),
        "--lr-decay-iters": config.sources.get("lr_decay_iters") not in (None, "derived"),
        "--lr-warmup-iters": optimizer.lr_warmup_iters > 0,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters is not None,
    }
    by_samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples is not None,
        "--lr-warmup-samples": optimizer.lr_warmup_samples > 0,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples is not None,
    }
    wrong = by_steps if config.counts_samples else by_samples
    for flag in (flag for flag, given in wrong.items() if given):
        ending = "-samples" if config.counts_samples else "-iters"
        yield conflict(flag, f"disagrees with --train{ending}; use {flag.rsplit('-', 1)[0]}{ending}")
    shortest, multiple = training.curriculum_shortest, training.curriculum_multiple
    if shortest is not None and shortest > config.model.seq_length:
        yield conflict(
            "--curriculum-shortest", f"is {shortest}; must be at most --seq-length {config.model.seq_length}"
        )
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    for flag, length in (("--curriculum-shortest", shortest or 0), ("--curriculum-multiple", multiple)):
        if shortest is not None and length % parts:
            yield conflict(
                flag,
                f"is {length}; must be a multiple of --tensor-model-parallel-size {parts} with --sequence-parallel",
            )
    if shortest is not None and config.model.base_family not in ("gpt", "llama"):
        yield unsupported("--curriculum-shortest", f"requires family gpt or llama, is {config.model.family}; remove it")


MODEL_RULES: tuple[Rule, ...] = (
    _shape,
    _routing,
    _family,
    _encoder,
    _decoder,
    _latent,
    _prediction,
    _length,
)
