"""Every option of a training run, declared once, one dataclass per concern.

Names are Megatron's wherever Megatron has the flag. Everything else is generated from these fields::

    flags     ──┐
    --config  ──┼─> resolve.py ──> Config ──> validate.py ──> trainer
    --recipe  ──┘                    │
                                     └─> --help, run.json, cli/OPTIONS.md

A ``Config`` is complete: every derived default is filled in.
"""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from .._common.document import MAX_EXPERTS, MAX_LAYERS
from . import panels
from .batch_schedule import (
    AnyBatchSizes,
    BatchPositions,
    Curriculum,
    Range,
    merged_ranges,
    parse_batch_size_schedule,
    parse_ranges,
)
from .extensions import base_family
from .layer_freq import parse_layer_freq, parse_no_rope_freq
from .options import Source, option
from .parse import batch_sizes_of, parse_balance, parse_layer_types, parse_rotary_scaling
from .sections.balance import BalanceConfig
from .sections.compression import CompressionConfig
from .sections.data import DataConfig
from .sections.emulation import EmulationConfig
from .sections.ict import IctConfig
from .sections.layer_options import LayerOptions
from .sections.optimizer import OptimizerConfig
from .sections.parallel import ParallelConfig
from .sections.precision import PrecisionConfig
from .sections.run import RunConfig
from .sections.techniques import DepthConfig, ExitConfig, FreezingConfig, PruningConfig, SparseAttentionConfig
from .sections.tracking import TrackingConfig
from .sections.training import TrainingConfig

MoeRouting = Literal["topk", "expert-choice", "balanced"]
ScoreFunction = Literal["softmax", "sigmoid"]
TokenDropPolicy = Literal["probs", "position"]
Positions = Literal["learned", "rotary", "relative"]
Activation = Literal["gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu", "clamped_swiglu", "quick_geglu"]
GATED_ACTIVATIONS = ("swiglu", "geglu", "clamped_swiglu", "quick_geglu")
Normalization = Literal["layernorm", "rmsnorm", "rmsnorm_1p"]
NormPlacement = Literal["pre", "sandwich", "post"]
QkNorm = Literal["none", "head", "projection"]
Options = TypeVar("Options")


def _is_llama(values: Mapping[str, Any]) -> bool:
    return base_family(values["family"]) == "llama"


def _activation(values: Mapping[str, Any]) -> str:
    family = base_family(values["family"])
    relative = family == "t5" and values.get("position_embedding_type") == "relative"
    return {"llama": "swiglu", "gpt": "gelu_tanh"}.get(family, "relu" if relative else "gelu")


def _is_gated(values: Mapping[str, Any]) -> bool:
    return (values.get("activation") or _activation(values)) in GATED_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerOptions):
    """Architecture of the model."""

    PANEL: ClassVar[str] = panels.MODEL

    family: str = option("Model family, set by the subcommand.", default="gpt", flag=False)
    num_layers: int = option(
        "Number of transformer blocks; for t5, of the encoder.", minimum=1, maximum=MAX_LAYERS, common=True
    )
    encoder_num_layers: int | None = option("Alias of --num-layers (t5).", default=None, minimum=1, maximum=MAX_LAYERS)
    decoder_num_layers: int = option(
        "Number of decoder blocks (t5).",
        minimum=1,
        maximum=MAX_LAYERS,
        derive=("--num-layers", lambda v, _: v["num_layers"]),
    )
    hidden_size: int = option("Hidden size of the transformer.", minimum=1, common=True)
    ffn_hidden_size: int = option(
        "Hidden size of the MLP.",
        minimum=1,
        derive=(
            "4 x --hidden-size; for gated activations 8/3 x, rounded down to a multiple of 64",
            lambda v, _: max(64, 8 * v["hidden_size"] // 3 // 64 * 64) if _is_gated(v) else 4 * v["hidden_size"],
        ),
        common=True,
    )
    num_attention_heads: int = option("Number of attention heads.", minimum=1, common=True)
    num_query_groups: int = option(
        "Number of key-value heads for grouped-query attention (gpt, llama).",
        minimum=1,
        derive=("--num-attention-heads", lambda v, _: v["num_attention_heads"]),
        common=True,
    )
    kv_channels: int = option(
        "Size of an attention head (gpt, llama, t5).",
        minimum=1,
        derive=(
            "--hidden-size / --num-attention-heads",
            lambda v, _: max(1, v["hidden_size"] // v["num_attention_heads"]),
        ),
    )
    seq_length: int = option("Sequence length in tokens; for t5, of the encoder.", minimum=1, common=True)
    encoder_seq_length: int | None = option("Alias of --seq-length (t5).", default=None, minimum=1)
    decoder_seq_length: int = option(
        "Decoder sequence length in tokens (t5).",
        minimum=1,
        derive=("--seq-length / 4", lambda v, _: max(1, v["seq_length"] // 4)),
    )
    position_embedding_type: Positions = option(
        "Position embedding: learned, rotary (gpt, llama) or relative (t5).",
        derive=("rotary for llama, else learned", lambda v, _: "rotary" if _is_llama(v) else "learned"),
        common=True,
    )
    max_position_embeddings: int = option(
        "Number of learned positions in tokens.",
        minimum=1,
        derive=(
            "--seq-length; for t5 the longer of encoder and decoder",
            lambda v, _: max(v["seq_length"], v["decoder_seq_length"] if base_family(v["family"]) == "t5" else 1),
        ),
        common=True,
    )
    rotary_base: float = option("Base of the rotary frequencies.", default=10000.0, above=0)
    rotary_percent: float = option("Share of each head that rotary embeddings rotate.", default=1.0, above=0, maximum=1)
    use_rope_scaling: bool = option("Scale rotary frequencies as Llama 3.1 does.", default=False)
    rope_scaling_factor: float = option("Scaling factor of --use-rope-scaling.", default=8.0, above=0)
    rotary_scaling: str | None = option(
        "Scaling of rotary frequencies: Hugging Face's rope_scaling as JSON; none: none.", default=None
    )
    activation: Activation = option(
        "Activation of the MLP.",
        derive=("gelu_tanh for gpt, swiglu for llama, gelu for bert and t5", lambda v, _: _activation(v)),
    )
    swiglu_alpha: float = option("Slope of the sigmoid of clamped_swiglu and quick_geglu.", default=1.702, above=0)
    swiglu_limit: float = option("Limit of gate and up of clamped_swiglu.", default=7.0, above=0)
    normalization: Normalization = option(
        "Normalization; rmsnorm_1p multiplies by 1 + weight.",
        derive=("rmsnorm for llama, else layernorm", lambda v, _: "rmsnorm" if _is_llama(v) else "layernorm"),
    )
    norm_placement: NormPlacement = option(
        "Normalize before each sublayer, before and after, or after it.", default="pre"
    )
    qk_norm: QkNorm = option("Normalize queries and keys: each head, or the whole projection.", default="none")
    add_bias_linear: bool = option(
        "Give linear layers biases.", derive=("false for llama", lambda v, _: not _is_llama(v))
    )
    add_qkv_bias: bool = option("Give queries, keys and values a bias.", default=False)
    mlp_bias: bool = option(
        "Give the linear layers of the MLP biases.", derive=("--add-bias-linear", lambda v, _: v["add_bias_linear"])
    )
    embedding_scale: float = option("Factor on word embeddings; the head reads them unscaled.", default=1.0, above=0)
    attention_scale: float | None = option(
        "Factor on attention scores; none: 1 / square root of head size.", default=None, above=0
    )
    attention_window: int | None = option(
        "Sliding window of attention in tokens, itself included (gpt, llama).",
        default=None,
        minimum=1,
    )
    layer_types: str | None = option(
        "Pattern of layers: sliding or full, such as sliding,full; none: all alike.", default=None, words=True
    )
    local_rotary_base: float | None = option(
        "Rotary base of sliding layers, without scaling; none: as all.", default=None, above=0
    )
    attn_logit_softcapping: float | None = option("Soft cap of attention scores; none: no cap.", default=None, above=0)
    final_logit_softcapping: float | None = option(
        "Soft cap of the output layer's logits; none: no cap.", default=None, above=0
    )
    attention_sinks: bool = option("Give each attention head a learned sink in its softmax.", default=False)
    relative_attention_num_buckets: int = option("Number of relative-position buckets (t5).", default=32, minimum=4)
    relative_attention_max_distance: int = option(
        "Distance in tokens of the last relative-position bucket (t5).", default=128, minimum=4
    )
    bert_no_binary_head: bool = option("Train BERT without sentence-order prediction and token types.", default=False)
    num_experts: int | None = option(
        "Number of experts per MLP (gpt, llama); none: dense.",
        default=None,
        minimum=2,
        maximum=MAX_EXPERTS,
        common=True,
    )
    moe_router_topk: int = option("Number of experts per token.", default=2, minimum=1, maximum=MAX_EXPERTS)
    moe_routing: MoeRouting = option(
        "Expert routing: top-k per token, expert choice, or balanced assignment.",
        default="topk",
    )
    moe_router_load_balancing_type: str = option(
        "Balance losses: aux_loss, seq_aux_loss, global_aux_loss; or sinkhorn or none.",
        default="aux_loss",
        words=True,
    )
    moe_aux_loss_coeff: str = option(
        "Coefficient of each loss of --moe-router-load-balancing-type.", default="0.0", words=True
    )
    moe_z_loss_coeff: float = option("Coefficient of the router z-loss.", default=0.0, minimum=0)
    moe_router_score_function: ScoreFunction = option(
        "Scores of the router: over all experts, or of each expert alone.", default="softmax"
    )
    moe_router_pre_softmax: bool = option("Do not normalize the softmax over the chosen experts.", default=False)
    moe_router_topk_scaling_factor: float | None = option(
        "Factor on the weights of the chosen experts; none: 1.", default=None, above=0
    )
    moe_router_enable_expert_bias: bool = option(
        "Balance by a bias of each expert, which only the choice reads.", default=False
    )
    moe_router_bias_update_rate: float = option("Change of an expert's bias per step.", default=1e-3, minimum=0)
    moe_router_bias: bool = option("Give the logits of the router a learned bias.", default=False)
    moe_router_num_groups: int | None = option(
        "Number of groups of experts that limit a token's choice.",
        default=None,
        minimum=1,
        maximum=MAX_EXPERTS,
    )
    moe_router_group_topk: int | None = option(
        "Number of groups whose experts a token may use.", default=None, minimum=1, maximum=MAX_EXPERTS
    )
    moe_expert_capacity_factor: float | None = option(
        "Expert capacity factor; tokens beyond it are dropped; none: no limit.",
        default=None,
        above=0,
    )
    moe_eval_capacity_factor: float | None = option(
        "Expert capacity factor in evaluation; none: --moe-expert-capacity-factor.",
        default=None,
        above=0,
    )
    moe_min_capacity: int = option("Minimum capacity of an expert in tokens of a microbatch.", default=0, minimum=0)
    moe_token_drop_policy: TokenDropPolicy = option(
        "Tokens that a full expert drops: lowest probability, or last position.",
        default="probs",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        "Pad the input of each expert to its capacity.",
        default=False,
    )
    moe_shared_expert_intermediate_size: int | None = option(
        "Inner size of the shared experts of a layer; none: none.",
        default=None,
        minimum=1,
    )
    moe_shared_expert_gate: bool = option(
        "Multiply the output of the shared experts by a learned sigmoid gate.",
        default=False,
    )
    make_vocab_size_divisible_by: int = option(
        "Multiple to which the vocabulary size is padded.", default=128, minimum=1
    )
    vocab_size: int = option(
        "Vocabulary size before padding.",
        minimum=1,
        derive=(
            "vocabulary size of the tokenizer",
            lambda v, context: None if context.tokenizer_vocab_size is None else context.tokenizer_vocab_size(v),
        ),
        common=True,
    )
    attention_dropout: float = option(
        "Dropout probability of attention weights.",
        minimum=0,
        below=1,
        derive=("0.1; 0 for llama", lambda v, _: 0.0 if _is_llama(v) else 0.1),
        common=True,
    )
    hidden_dropout: float = option(
        "Dropout probability of hidden states.",
        minimum=0,
        below=1,
        derive=("0.1; 0 for llama", lambda v, _: 0.0 if _is_llama(v) else 0.1),
        common=True,
    )
    layernorm_epsilon: float = option("Epsilon of layer normalization.", default=1e-5, above=0)
    init_method_std: float = option("Standard deviation of the initial weights.", default=0.02, above=0)
    untie_embeddings_and_output_weights: bool = option(
        "Give the output layer its own weight instead of the embedding's.",
        derive=("true for llama", lambda v, _: _is_llama(v)),
    )

    @property
    def base_family(self) -> str:
        """The built-in family whose samples, defaults and option rules the family has."""
        return base_family(self.family)

    @property
    def shares_embedding(self) -> bool:
        """Whether later layers have the word table too: the output layer, or those of multi-token prediction."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers > 0

    @property
    def layer_type_pattern(self) -> tuple[str, ...] | None:
        """The pattern of ``--layer-types`` in Hugging Face's names; None where all layers are alike.

        Raises:
            UsageError: it has another form.
        """
        return None if self.layer_types is None else parse_layer_types(self.layer_types)

    @property
    def rotary_scaling_object(self) -> Mapping[str, Any] | None:
        """The scaling of the rotary frequencies as Hugging Face's object; None where there is none.

        Raises:
            UsageError: ``--rotary-scaling`` has another form.
        """
        if self.use_rope_scaling:
            # Llama 3.1's own values; only the factor differs between its sizes.
            return {
                "rope_type": "llama3",
                "factor": self.rope_scaling_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return self.yarn_object if self.rotary_scaling is None else parse_rotary_scaling(self.rotary_scaling)

    @property
    def expert_layers(self) -> tuple[int, ...] | None:
        """1 for each block that has experts, else 0; None where all blocks have them.

        Raises:
            UsageError: ``--moe-layer-freq`` has another form.
        """
        pattern = parse_layer_freq(self.moe_layer_freq, self.num_layers)
        return None if all(pattern) else pattern

    @property
    def layers_without_rotation(self) -> tuple[int, ...] | None:
        """1 for each layer without rotation, else 0; None where all layers rotate.

        Raises:
            UsageError: ``--no-rope-freq`` has another form.
        """
        pattern = () if self.no_rope_freq is None else parse_no_rope_freq(self.no_rope_freq, self.num_layers)
        return pattern if any(pattern) else None

    @property
    def balance_coefficients(self) -> Mapping[str, float]:
        """Type of load balancing -> its coefficient, 0 for ``sinkhorn`` and ``none``."""
        return parse_balance(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete configuration of a training run; derived defaults are filled in, in this order.

    Attributes:
        extensions: options that installed packages declare, by the name of their table.
        sources: option name to the source of its value; not part of comparisons.
    """

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    data: DataConfig
    pruning: PruningConfig
    freezing: FreezingConfig
    depth: DepthConfig
    exits: ExitConfig
    attention: SparseAttentionConfig
    ict: IctConfig
    compression: CompressionConfig
    balance: BalanceConfig
    emulation: EmulationConfig
    tracking: TrackingConfig
    run: RunConfig
    extensions: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)

    def concern(self, name: str) -> Any:
        """The options of one table, built in or of an installed package."""
        return self.extensions[name] if name in self.extensions else getattr(self, name)

    def options_of(self, kind: type[Options]) -> Options:
        """The options that an installed package declares by the dataclass ``kind``."""
        return next(values for values in self.extensions.values() if isinstance(values, kind))

    @property
    def microbatches(self) -> int:
        """Number of microbatches per optimizer step and data-parallel replica, at the last batch size."""
        return self.batch_sizes.final // (self.training.micro_batch_size * self.parallel.data_parallel_size)

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline, over all ranks."""
        return self.parallel.pipeline_model_parallel_size * self.parallel.virtual_stages_per_worker

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary size, padded to a multiple per tensor-parallel rank."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-self.model.vocab_size // multiple) * multiple

    @property
    def counts_samples(self) -> bool:
        """Whether the training length is given in samples instead of steps."""
        return self.training.train_samples is not None

    @property
    def batch_sizes(self) -> AnyBatchSizes:
        """The global batch size as a function of the consumed samples."""
        training = self.training
        if training.step_batch_size_schedule is not None:
            return parse_batch_size_schedule(training.step_batch_size_schedule, self.model.seq_length)
        return batch_sizes_of(training.rampup_batch_size, training.global_batch_size)

    def batch_positions(self, skipped: Iterable[Range] = ()) -> BatchPositions:
        """Where batches begin.

        Args:
            skipped: ranges of samples that are skipped in addition to ``--skip-train-samples``.
        """
        given = parse_ranges("--skip-train-samples", self.training.skip_train_samples or "")
        return BatchPositions(sizes=self.batch_sizes, skipped=merged_ranges(given, skipped))

    @property
    def curriculum(self) -> Curriculum | None:
        """The sequence length as a function of the step; None without a curriculum."""
        training = self.training
        if training.curriculum_shortest is None:
            return None
        return Curriculum(
            shortest=training.curriculum_shortest,
            longest=self.model.seq_length,
            steps=training.curriculum_steps,
            multiple=training.curriculum_multiple,
            root=1.0 if training.curriculum_schedule == "fixed_linear" else training.curriculum_root_degree,
        )

    @property
    def decay_samples(self) -> int:
        """Samples over which the learning rate decays, including warm-up."""
        if self.training.train_samples is None:
            return self.optimizer.lr_decay_iters * self.training.global_batch_size
        return self.optimizer.lr_decay_samples or self.training.train_samples

    @property
    def warmup_samples(self) -> float:
        """Samples of linear warm-up; not rounded for ``--lr-warmup-fraction``, as in Megatron."""
        optimizer = self.optimizer
        if optimizer.lr_warmup_fraction is not None:
            return optimizer.lr_warmup_fraction * self.decay_samples
        if self.counts_samples:
            return optimizer.lr_warmup_samples
        return optimizer.lr_warmup_iters * self.training.global_batch_size

    @property
    def wsd_decay_samples(self) -> int | None:
        """Samples of the final WSD decay; None if not given."""
        optimizer = self.optimizer
        if self.counts_samples:
            return optimizer.lr_wsd_decay_samples
        iterations = optimizer.lr_wsd_decay_iters
        return None if iterations is None else iterations * self.training.global_batch_size

    @property
    def weight_decay_samples(self) -> int:
        """Samples over which the weight decay changes."""
        training = self.training
        return training.train_samples or training.train_iters * training.global_batch_size
