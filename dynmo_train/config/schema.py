"""Every option of a training run, declared once, one dataclass per concern.

Names are Megatron's wherever Megatron has the flag. From these fields come the command line, the keys of ``--config``
files, the ``config`` of ``run.json`` and the reference in the package's README. The types are final: a ``Config`` is
complete, with every derived default filled in.
"""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .._common.document import MAX_EXPERTS, MAX_JOBS, MAX_LAYERS, MAX_MICROBATCHES, MAX_RANKS, MAX_SAMPLES
from .batch_schedule import BatchSizes, Curriculum
from .compression import CompressionConfig
from .data import DataConfig
from .emulation import EmulationConfig
from .extensions import base_family
from .ict import IctConfig
from .optimizer import OptimizerConfig
from .options import Facts, Source, option
from .parse import batch_sizes_of, iters_of_samples
from .precision import PrecisionConfig
from .techniques import DepthConfig, ExitConfig, FreezingConfig, PruningConfig, SparseAttentionConfig

MoeRouting = Literal["topk", "expert-choice", "balanced"]
Positions = Literal["learned", "rotary", "relative"]
Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "full"]
TWO_STAGES = ("interleaved-1f1b", "zb-v")
CurriculumSchedule = Literal["fixed_linear", "fixed_root"]
DdpImpl = Literal["local", "torch"]
ReportFormat = Literal["text", "json"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zb-v", "custom"]
BalanceMode = Literal["off", "online", "offline"]
Granularity = Literal["layer", "sublayer"]
Planner = Literal["internal", "external"]
Balancer = Literal[
    "exact",
    "time",
    "parameters",
    "uniform",
    "deepspeed",
    "deepspeed_param",
    "deepspeed_static",
    "diffusion",
    "diffusion_param",
]
BalancePolicy = Literal["never", "always", "threshold", "regret"]
Options = TypeVar("Options")


def blocks_make_stages(values: Mapping[str, Any]) -> int:
    """Virtual stages of a worker, as Megatron counts them: 24 blocks on 4 workers in stages of 3 blocks make 2."""
    blocks = values["num_layers_per_virtual_pipeline_stage"]
    if blocks is None:
        return 1
    return max(1, int(values["num_layers"] // values["pipeline_model_parallel_size"] // blocks))


def _is_llama(values: Mapping[str, Any]) -> bool:
    return base_family(values["family"]) == "llama"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model."""

    family: str = option("Family of the model, which the subcommand names.", default="gpt", flag=False)
    num_layers: int = option(
        "Number of transformer blocks; of a T5 those of the encoder.", minimum=1, maximum=MAX_LAYERS
    )
    encoder_num_layers: int | None = option(
        "--num-layers under the name of T5.", default=None, minimum=1, maximum=MAX_LAYERS
    )
    decoder_num_layers: int = option(
        "Blocks of a T5's decoder.",
        minimum=1,
        maximum=MAX_LAYERS,
        derive=("--num-layers", lambda v, _: v["num_layers"]),
    )
    hidden_size: int = option("Width of the residual stream.", minimum=1)
    ffn_hidden_size: int = option(
        "Width inside the MLP.",
        minimum=1,
        derive=(
            "4 x --hidden-size; of a Llama 2/3 of that, in multiples of 64",
            lambda v, _: max(64, 8 * v["hidden_size"] // 3 // 64 * 64) if _is_llama(v) else 4 * v["hidden_size"],
        ),
    )
    num_attention_heads: int = option("Number of attention heads.", minimum=1)
    num_query_groups: int = option(
        "Groups of attention heads that share keys and values (llama).",
        minimum=1,
        derive=("--num-attention-heads", lambda v, _: v["num_attention_heads"]),
    )
    kv_channels: int = option(
        "Width of an attention head (llama, t5).",
        minimum=1,
        derive=(
            "--hidden-size / --num-attention-heads",
            lambda v, _: max(1, v["hidden_size"] // v["num_attention_heads"]),
        ),
    )
    seq_length: int = option("Length of a training sample in tokens; of a T5 what its encoder reads.", minimum=1)
    encoder_seq_length: int | None = option("--seq-length under the name of T5.", default=None, minimum=1)
    decoder_seq_length: int = option(
        "Tokens that a T5's decoder writes.",
        minimum=1,
        derive=("a quarter of --seq-length", lambda v, _: max(1, v["seq_length"] // 4)),
    )
    position_embedding_type: Positions = option(
        "How tokens know their places: learned (a table), rotary (llama) or relative (t5).",
        derive=("rotary for llama, else learned", lambda v, _: "rotary" if _is_llama(v) else "learned"),
    )
    max_position_embeddings: int = option(
        "Number of learned positions, in tokens.",
        minimum=1,
        derive=(
            "--seq-length (of a T5 the longer side)",
            lambda v, _: max(v["seq_length"], v["decoder_seq_length"] if base_family(v["family"]) == "t5" else 1),
        ),
    )
    rotary_base: float = option("Base of the rotary frequencies (llama).", default=10000.0, above=0)
    use_rope_scaling: bool = option("Slow the long waves of rotary positions as Llama 3.1 does.", default=False)
    rope_scaling_factor: float = option("Factor of --use-rope-scaling.", default=8.0, above=0)
    relative_attention_num_buckets: int = option("Buckets of distances (t5, relative).", default=32, minimum=4)
    relative_attention_max_distance: int = option("Distance of the last bucket (t5, relative).", default=128, minimum=4)
    bert_no_binary_head: bool = option("Train BERT on masked words alone, without token types.", default=False)
    num_experts: int | None = option(
        "Experts in place of each MLP (gpt, llama).", default=None, minimum=2, maximum=MAX_EXPERTS
    )
    moe_router_topk: int = option("Experts of a token.", default=2, minimum=1, maximum=MAX_EXPERTS)
    moe_routing: MoeRouting = option(
        "In training each token takes its likeliest experts (topk), each expert its likeliest tokens (expert-choice),"
        " or each token one expert and all experts as many tokens (balanced).",
        default="topk",
    )
    moe_aux_loss_coeff: float = option("Weight of the experts' load-balancing loss.", default=0.0, minimum=0)
    moe_z_loss_coeff: float = option("Weight of the router's z-loss.", default=0.0, minimum=0)
    moe_expert_capacity_factor: float | None = option(
        "Times its even share that an expert takes at most, the likeliest tokens first; none drops no token.",
        default=None,
        above=0,
    )
    make_vocab_size_divisible_by: int = option("Pad the vocabulary to a multiple of this.", default=128, minimum=1)
    vocab_size: int = option(
        "Number of token ids before padding.",
        minimum=1,
        derive=(
            "that of the tokenizer",
            lambda v, facts: None if facts.tokenizer_vocab_size is None else facts.tokenizer_vocab_size(v),
        ),
    )
    attention_dropout: float = option(
        "Dropout probability of attention weights.",
        minimum=0,
        below=1,
        derive=("0.1; 0 for llama", lambda v, _: 0.0 if _is_llama(v) else 0.1),
    )
    hidden_dropout: float = option(
        "Dropout probability of the residual stream.",
        minimum=0,
        below=1,
        derive=("0.1; 0 for llama", lambda v, _: 0.0 if _is_llama(v) else 0.1),
    )
    layernorm_epsilon: float = option("Epsilon of the layer norms.", default=1e-5, above=0)
    init_method_std: float = option("Standard deviation of the initial weights.", default=0.02, above=0)
    untie_embeddings_and_output_weights: bool = option(
        "Give the head a weight of its own, apart from the embedding's.",
        derive=("true for llama", lambda v, _: _is_llama(v)),
    )

    @property
    def base_family(self) -> str:
        """The built-in family whose samples, defaults and option rules the family has."""
        return base_family(self.family)


def _implies_replicas(values: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the options are those of a script that has replicas unless it sets a pipeline size."""
    return bool(values["zero_stage"] or facts.given & {"tensor_model_parallel_size", "DDP_impl"})


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is spread over workers."""

    tensor_model_parallel_size: int = option(
        "Ranks that share each matrix product.", default=1, minimum=1, maximum=MAX_RANKS
    )
    sequence_parallel: bool = option("Cut the stream between tensor-parallel products along the tokens.", default=False)
    pipeline_model_parallel_size: int = option(
        "Pipeline positions.",
        minimum=1,
        maximum=MAX_RANKS,
        derive=(
            "world size; as Megatron's 1 where --tensor-model-parallel-size, --zero-stage or --DDP-impl is given",
            lambda v, facts: 1 if _implies_replicas(v, facts) else max(1, facts.world_size),
        ),
    )
    data_parallel_size: int = option(
        "Replicas of the model.",
        minimum=1,
        flag=False,
        derive=(
            "world size / (tensor x pipeline)",
            lambda v, facts: max(
                1, facts.world_size // (v["tensor_model_parallel_size"] * v["pipeline_model_parallel_size"])
            ),
        ),
    )
    expert_model_parallel_size: int = option(
        "Replicas that share the experts of each layer.", default=1, minimum=1, maximum=MAX_RANKS
    )
    DDP_impl: DdpImpl = option(
        "When replicas add their gradients: at the end of a step (local), or each layer's when it is final (torch).",
        default="local",
    )
    zero_stage: int = option(
        "ZeRO: what replicas share of each layer between steps (1, 2: parameters, gradients, moments) or always (3).",
        default=0,
        minimum=0,
        maximum=3,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        "Blocks of a virtual stage, Megatron's way to say --virtual-stages-per-worker; interleaved-1f1b.",
        default=None,
        minimum=1,
        maximum=MAX_LAYERS,
    )
    schedule: Schedule = option(
        "Order of microbatches in the pipeline; custom is that of the operations in --plan.",
        derive=(
            "interleaved-1f1b where --num-layers-per-virtual-pipeline-stage makes several stages, else 1f1b",
            lambda v, _: "interleaved-1f1b" if blocks_make_stages(v) > 1 else "1f1b",
        ),
    )
    virtual_stages_per_worker: int = option(
        "Stages on each worker.",
        minimum=1,
        maximum=MAX_LAYERS,
        derive=(
            "--num-layers / pipeline size / --num-layers-per-virtual-pipeline-stage where that is given, else 2 if"
            " interleaved-1f1b or zb-v, else 1",
            lambda v, _: (
                2
                if v["num_layers_per_virtual_pipeline_stage"] is None and v["schedule"] in TWO_STAGES
                else blocks_make_stages(v)
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long and how to train."""

    micro_batch_size: int = option("Samples in a microbatch.", minimum=1, maximum=MAX_RANKS)
    global_batch_size: int = option(
        "Samples in an optimizer step.",
        minimum=1,
        derive=(
            "--micro-batch-size x replicas x --gradient-accumulation-steps",
            lambda v, _: v["micro_batch_size"] * v["data_parallel_size"] * (v["gradient_accumulation_steps"] or 1),
        ),
    )
    gradient_accumulation_steps: int | None = option(
        "Microbatches of a step, for each replica; none follows from --global-batch-size.",
        default=None,
        minimum=1,
        maximum=MAX_MICROBATCHES,
    )
    rampup_batch_size: str | None = option(
        "START INCREMENT SAMPLES: begin with START samples a step, and grow by INCREMENT to --global-batch-size over"
        " SAMPLES; needs --train-samples.",
        default=None,
    )
    train_samples: int | None = option(
        "Samples to train for, in place of --train-iters.", default=None, minimum=1, maximum=MAX_SAMPLES
    )
    train_iters: int = option(
        "Optimizer steps to train for.",
        minimum=1,
        derive=("those that --train-samples make", lambda v, _: iters_of_samples(v)),
    )
    seed: int = option("Seed of weights, dropout and the order of samples.", default=1234, minimum=0, maximum=2**32 - 1)
    recompute_granularity: Recompute = option(
        "Activation checkpointing: full computes each layer again in its backward pass; selective computes all but its"
        " matrix products again.",
        default="none",
    )
    torch_compile: bool = option(
        "Compile embeddings, attentions and MLPs by torch.compile, each item by itself.", default=False
    )
    torch_compile_backend: str = option("Backend of --torch-compile.", default="inductor")
    skip_train: bool = option(
        "Train nothing: evaluate the model of --load on the validation and the test data.", default=False
    )
    eval_interval: int = option("Steps between evaluations on the validation split.", default=1000, minimum=1)
    eval_iters: int = option("Batches of an evaluation; 0 evaluates never.", default=100, minimum=0)
    log_interval: int = option("Steps between log lines.", default=100, minimum=1)
    log_throughput: bool = option("Log model FLOPs per second and device as well.", default=False)
    check_for_nan_in_loss_and_grad: bool = option(
        "Report steps whose loss or gradients are not finite, save no checkpoint after them, end after too many.",
        default=True,
    )
    max_skipped_iterations: int = option(
        "Steps in a row that are not finite until the run ends with exit code 3.", default=10, minimum=1
    )
    exit_interval: int | None = option(
        "Leave the run, saved, after a step that is a multiple of this.", default=None, minimum=1
    )
    exit_duration_in_mins: float | None = option(
        "Save and exit after the first step that ends N minutes after the start.", default=None, above=0
    )
    curriculum_shortest: int | None = option(
        "Curriculum: tokens of a sample at the first step, growing to --seq-length; none trains on whole samples.",
        default=None,
        minimum=1,
    )
    curriculum_steps: int = option(
        "Curriculum: steps until samples are whole.",
        minimum=1,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    curriculum_multiple: int = option("Curriculum: lengths are multiples of this.", default=8, minimum=1)
    curriculum_schedule: CurriculumSchedule = option(
        "Curriculum: lengths grow with the steps, or with a root of them.", default="fixed_linear"
    )
    curriculum_root_degree: float = option("Curriculum: the root of fixed_root.", default=2.0, above=0)
    num_threads: int = option("Threads of arithmetic in each process on CPU.", default=1, minimum=1, maximum=MAX_JOBS)
    device: Device = option("Where to compute; auto is cuda where it is present, else cpu.", default="auto")


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How layers are placed, and moved while training continues."""

    balance: BalanceMode = option(
        "Move layers between workers: off, online (a planner reads the profile), or offline (--plan and no moves).",
        default="off",
    )
    plan: str | None = option("Partition plan to start with.", default=None, refers_to="file")
    rebalance_interval: int = option("Steps between boundaries at which layers may move.", default=10, minimum=1)
    granularity: Granularity = option("Where a stage may begin: before a block, or inside it as well.", default="layer")
    balancer: Balancer = option("Algorithm of the planner.", default="exact")
    balance_policy: BalancePolicy = option("Rule by which the planner decides that a move pays.", default="threshold")
    balance_min_gain: float = option(
        "Smallest predicted gain that is worth a move, as a fraction of the step time.",
        default=0.02,
        minimum=0,
        below=1,
    )
    balance_lockstep: bool = option("Wait at each boundary for the planner's answer.", default=False)
    pack_to: int | None = option(
        "Release workers until N are left, as soon as memory allows; none releases no worker.",
        default=None,
        minimum=1,
        maximum=MAX_RANKS,
    )
    min_throughput_fraction: float | None = option(
        "Release workers as long as this share of the balanced pipeline's throughput is kept.",
        default=None,
        above=0,
        maximum=1,
    )
    planner: Planner = option("Start dynmo-plan watch (internal), or leave it to somebody else.", default="internal")
    planner_timeout_s: float = option(
        "Seconds to wait for the planner's answer in lockstep, and for its heartbeat (at least 10).",
        default=30.0,
        above=0,
    )
    profile_interval: int = option("Steps between lines of the profile.", default=1, minimum=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lies, and what it keeps."""

    deepspeed_config: str | None = option(
        "DeepSpeed JSON file, read for batch, precision, ZeRO, optimizer, clipping and curriculum.",
        default=None,
        refers_to="place",
    )
    dry_run: bool = option(
        "Print parameters, operations of a step and memory of each worker, and train nothing.", default=False
    )
    dry_run_device: str = option(
        "Device of the --dry-run: h200, h100, a100, cpu, or a TOML file of dynmo-plan.", default="h200"
    )
    dry_run_processes: int | None = option(
        "Devices of the --dry-run; none is tensor x pipeline parallel size.", default=None, minimum=1, maximum=MAX_RANKS
    )
    dry_run_format: ReportFormat = option("How the --dry-run reports.", default="text")
    run_dir: str | None = option(
        "Run directory; by default --save, else runs/UTC-model.", default=None, refers_to="place"
    )
    save: str | None = option("Run directory, under Megatron's name.", default=None, refers_to="place")
    load: str | None = option(
        "Run, step or checkpoint to resume from, or one of Megatron, DeepSpeed or Hugging Face; none: from scratch.",
        default=None,
        refers_to="place",
    )
    exit_on_missing_checkpoint: bool | None = option(
        "End where --load holds no checkpoint; by default where it is a run that has saved some.", default=None
    )
    cache_dir: str | None = option(
        "Folder for Hugging Face input in native form; none is $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo.",
        default=None,
        refers_to="place",
    )
    tensorboard_dir: str | None = option(
        "Folder for TensorBoard's event files; none writes none.", default=None, refers_to="place"
    )
    finetune: bool = option(
        "Take the weights of --load alone, and begin at step 0 with fresh moments; leave it out to resume later.",
        default=False,
    )
    no_load_optim: bool = option("Take no optimizer state from --load.", default=False)
    no_load_rng: bool = option(
        "Nothing to do: random numbers follow from --seed and the step, and are in no checkpoint.", default=False
    )
    no_save_optim: bool = option("Leave the optimizer state out of checkpoints.", default=False)
    no_save_rng: bool = option("Nothing to do, as --no-load-rng.", default=False)
    async_save: bool = option(
        "Write checkpoints while training continues, from a copy of the state in host memory.", default=False
    )
    save_interval: int | None = option(
        "Steps between checkpoints; none saves at the end only.", default=None, minimum=1
    )
    keep_checkpoints: int | None = option("Number of checkpoints to keep; none keeps all.", default=None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete training run: every option has its value. Derived defaults are filled in, in this order.

    Attributes:
        extensions: options that installed packages declare, by the name of their table.
        sources: where the value of each option came from; two equal runs may differ in it.
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
        """Microbatches of a step, for each data-parallel replica."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.data_parallel_size)

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all workers."""
        return self.parallel.pipeline_model_parallel_size * self.parallel.virtual_stages_per_worker

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary up to the next multiple, for each tensor-parallel rank."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-self.model.vocab_size // multiple) * multiple

    @property
    def counts_samples(self) -> bool:
        """Whether the options count samples, and not steps."""
        return self.training.train_samples is not None

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size over the consumed samples."""
        training = self.training
        return batch_sizes_of(training.rampup_batch_size, training.global_batch_size)

    @property
    def curriculum(self) -> Curriculum | None:
        """The tokens of a sample over the steps; None where samples are whole throughout."""
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
        """Samples over which the learning rate decays, warm-up included."""
        if self.training.train_samples is None:
            return self.optimizer.lr_decay_iters * self.training.global_batch_size
        return self.optimizer.lr_decay_samples or self.training.train_samples

    @property
    def warmup_samples(self) -> float:
        """Samples of linear warm-up; of ``--lr-warmup-fraction`` not rounded, as in Megatron."""
        optimizer = self.optimizer
        if optimizer.lr_warmup_fraction is not None:
            return optimizer.lr_warmup_fraction * self.decay_samples
        if self.counts_samples:
            return optimizer.lr_warmup_samples
        return optimizer.lr_warmup_iters * self.training.global_batch_size

    @property
    def wsd_decay_samples(self) -> int | None:
        """Samples of the last decay of the style WSD; None where they are not given."""
        optimizer = self.optimizer
        if self.counts_samples:
            return optimizer.lr_wsd_decay_samples
        iterations = optimizer.lr_wsd_decay_iters
        return None if iterations is None else iterations * self.training.global_batch_size

    @property
    def weight_decay_samples(self) -> int:
        """Samples over which the weight decay grows."""
        training = self.training
        return training.train_samples or training.train_iters * training.global_batch_size
