"""Rules over the shape of the model and its family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ..._common.document import MAX_ALL_EXPERTS, Problem
from ..ict import IctConfig
from ..resolve import OTHER_NAMES
from ..schema import Config
from .problem import Rule, conflict, later

EXPERTS = ("gpt", "llama")
OF_FAMILIES: dict[str, tuple[str, ...]] = {
    "encoder_num_layers": ("t5",),
    "decoder_num_layers": ("t5",),
    "encoder_seq_length": ("t5",),
    "decoder_seq_length": ("t5",),
    "relative_attention_num_buckets": ("t5",),
    "relative_attention_max_distance": ("t5",),
    "num_query_groups": ("llama",),
    "kv_channels": ("llama", "t5"),
    "rotary_base": ("llama",),
    "use_rope_scaling": ("llama",),
    "rope_scaling_factor": ("llama",),
    "bert_no_binary_head": ("bert",),
    "untie_embeddings_and_output_weights": ("gpt", "llama"),
    "num_experts": EXPERTS,
    "moe_router_topk": EXPERTS,
    "moe_routing": EXPERTS,
    "moe_aux_loss_coeff": EXPERTS,
    "moe_z_loss_coeff": EXPERTS,
    "moe_expert_capacity_factor": EXPERTS,
    **{spec.name: ("ict",) for spec in fields(IctConfig)},
}
POSITIONS_OF = {
    "gpt": ("learned",),
    "bert": ("learned",),
    "ict": ("learned",),
    "llama": ("rotary",),
    "t5": ("learned", "relative"),
}


def _shape(config: Config, _world_size: int) -> Iterator[Problem]:
    model = config.model
    if model.hidden_size % model.num_attention_heads and config.sources.get("kv_channels") == "derived":
        yield conflict(
            "--hidden-size",
            f"{model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}",
        )
    if model.seq_length > model.max_position_embeddings:
        yield conflict(
            "--seq-length",
            f"{model.seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )


def _routing(config: Config, _world_size: int) -> Iterator[Problem]:
    """How experts and tokens find each other."""
    model = config.model
    if model.num_layers * (model.num_experts or 0) > MAX_ALL_EXPERTS:
        yield conflict(
            "--num-experts",
            f"{model.num_experts} in each of {model.num_layers} layers: at most {MAX_ALL_EXPERTS:,} in all layers",
        )
    if model.moe_routing == "balanced" and model.moe_router_topk != 1:
        yield conflict("--moe-router-topk", f"{model.moe_router_topk}: --moe-routing balanced gives a token 1 expert")
    if model.moe_routing != "topk" and model.moe_expert_capacity_factor is not None:
        yield conflict(
            "--moe-expert-capacity-factor",
            f"has no effect with --moe-routing {model.moe_routing}: no expert overflows",
        )


def _family(config: Config, _world_size: int) -> Iterator[Problem]:
    """Options that belong to other families than the run's."""
    model = config.model
    for name, families in OF_FAMILIES.items():
        if model.base_family not in families and config.sources.get(name) in ("flag", "file"):
            flag = "--" + name.replace("_", "-")
            yield conflict(flag, f"belongs to {' and '.join(families)}; this is pretrain {model.family}")
    positions = POSITIONS_OF[model.base_family]
    if model.position_embedding_type not in positions:
        yield conflict(
            "--position-embedding-type",
            f"{model.position_embedding_type}: {model.family} has {' or '.join(positions)} positions",
        )
    if model.num_attention_heads % model.num_query_groups:
        yield conflict(
            "--num-query-groups",
            f"{model.num_query_groups} does not divide --num-attention-heads {model.num_attention_heads}",
        )
    if model.base_family == "llama" and model.kv_channels % 2:
        yield conflict("--kv-channels", f"{model.kv_channels} is odd; rotary positions turn pairs: give an even width")
    if model.position_embedding_type == "relative":
        exact = model.relative_attention_num_buckets // 4
        if model.relative_attention_max_distance <= 2 * exact:
            yield conflict(
                "--relative-attention-max-distance",
                f"{model.relative_attention_max_distance} is not above half of"
                f" --relative-attention-num-buckets {model.relative_attention_num_buckets}",
            )
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield conflict(
            "--moe-router-topk", f"{model.moe_router_topk} is more than the {model.num_experts} of --num-experts"
        )
    for other, name in OTHER_NAMES.items():
        value, taken = getattr(model, other, None), getattr(model, name)
        if value is not None and value != taken:
            flags = ["--" + each.replace("_", "-") for each in (other, name)]
            yield conflict(flags[0], f"{value} and {flags[1]} {taken} mean the same; give one")
    if model.base_family == "t5" and model.decoder_seq_length > model.max_position_embeddings:
        yield conflict(
            "--decoder-seq-length",
            f"{model.decoder_seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )


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
    other = "counts samples: write" if config.counts_samples else "counts steps: write"
    for flag in (flag for flag, given in wrong.items() if given):
        ending = "-samples" if config.counts_samples else "-iters"
        yield conflict(flag, f"a run with --train{ending} {other} {flag.rsplit('-', 1)[0]}{ending}")
    shortest, multiple = training.curriculum_shortest, training.curriculum_multiple
    if shortest is not None and shortest > config.model.seq_length:
        yield conflict("--curriculum-shortest", f"{shortest} is longer than --seq-length {config.model.seq_length}")
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    for flag, length in (("--curriculum-shortest", shortest or 0), ("--curriculum-multiple", multiple)):
        if shortest is not None and length % parts:
            yield conflict(
                flag,
                f"{length} is not a multiple of --tensor-model-parallel-size {parts}, whose ranks share the tokens",
            )
    if shortest is not None and config.model.base_family not in ("gpt", "llama"):
        yield later(
            "--curriculum-shortest", f"shortens the samples of gpt and llama; the model is {config.model.family}"
        )


MODEL_RULES: tuple[Rule, ...] = (
    _shape,
    _routing,
    _family,
    _length,
)
