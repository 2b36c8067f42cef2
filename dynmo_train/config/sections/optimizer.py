"""Options of the optimizer and of the learning-rate and weight-decay schedules; names and defaults are Megatron's."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..._common.document import MAX_SAMPLES
from .. import panels
from ..options import option

OptimizerName = Literal["adam", "sgd", "muon", "adafactor"]
MomentDtype = Literal["fp32", "bf16"]
MuonScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MuonCoefficientType = Literal["simple", "quintic", "polar_express"]
MuonTpMode = Literal["blockwise", "duplicated"]
DecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncrementStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, gradient clipping."""

    PANEL: ClassVar[str] = panels.OPTIMIZER

    optimizer: OptimizerName = option("Optimizer; adam is AdamW.", default="adam", common=True)
    lr: float = option("Peak learning rate.", above=0, common=True)
    min_lr: float = option("Minimum learning rate.", default=0.0, minimum=0, common=True)
    decoupled_lr: float | None = option(
        "Peak learning rate of word embeddings and output layer; none: --lr.", default=None, above=0
    )
    decoupled_min_lr: float | None = option(
        "Minimum learning rate of word embeddings and output layer; none: --min-lr.", default=None, minimum=0
    )
    lr_decay_style: DecayStyle = option(
        "Learning-rate schedule after warm-up; WSD is warm-up, stable, decay.", default="linear", common=True
    )
    lr_decay_iters: int = option(
        "Steps until the learning rate is minimal, including warm-up.",
        minimum=1,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    lr_decay_samples: int | None = option(
        "Samples until the learning rate is minimal; none: --train-samples.",
        default=None,
        minimum=1,
        maximum=MAX_SAMPLES,
    )
    lr_wsd_decay_style: WsdDecayStyle = option("Shape of the final WSD decay.", default="exponential")
    lr_wsd_decay_iters: int | None = option("Steps of the final WSD decay.", default=None, minimum=1)
    lr_wsd_decay_samples: int | None = option(
        "Samples of the final WSD decay, with --train-samples.", default=None, minimum=1, maximum=MAX_SAMPLES
    )
    lr_warmup_iters: int = option("Steps of linear warm-up.", default=0, minimum=0, common=True)
    lr_warmup_samples: int = option(
        "Samples of linear warm-up, with --train-samples.", default=0, minimum=0, maximum=MAX_SAMPLES
    )
    lr_warmup_fraction: float | None = option(
        "Linear warm-up as a fraction of the decay length.", default=None, minimum=0, maximum=1, common=True
    )
    lr_warmup_init: float = option("Initial learning rate of the warm-up.", default=0.0, minimum=0)
    use_checkpoint_opt_param_scheduler: bool = option(
        "Continue with the schedules that the checkpoint of --load records.", default=False
    )
    weight_decay: float = option(
        "Weight decay of weight matrices: decoupled; of sgd, L2.", default=0.01, minimum=0, common=True
    )
    start_weight_decay: float | None = option(
        "Initial weight decay for --weight-decay-incr-style linear or cosine.", default=None, minimum=0
    )
    end_weight_decay: float | None = option(
        "Final weight decay for --weight-decay-incr-style linear or cosine.", default=None, minimum=0
    )
    weight_decay_incr_style: IncrementStyle = option("Weight-decay schedule.", default="constant")
    adam_beta1: float = option("Decay rate of Adam's first moment.", default=0.9, minimum=0, below=1)
    adam_beta2: float = option("Decay rate of Adam's second moment.", default=0.999, minimum=0, below=1)
    adam_eps: float = option("Epsilon of Adam.", default=1e-8, above=0)
    use_precision_aware_optimizer: bool = option("Allow moments of Adam in other types than fp32.", default=False)
    exp_avg_dtype: MomentDtype = option("Type of Adam's first moment between steps.", default="fp32")
    exp_avg_sq_dtype: MomentDtype = option("Type of Adam's second moment between steps.", default="fp32")
    sgd_momentum: float = option("Momentum of SGD; 0 keeps no optimizer state.", default=0.9, minimum=0, below=1)
    muon_momentum: float = option("Momentum of Muon.", default=0.9, minimum=0, below=1)
    muon_nesterov: bool = option("Use Nesterov momentum in Muon.", default=False)
    muon_num_ns_steps: int = option("Newton-Schulz iterations of Muon.", default=5, minimum=1, maximum=99)
    muon_coefficient_type: MuonCoefficientType = option(
        "Coefficients of the Newton-Schulz iterations; simple is torch's.", default="quintic"
    )
    muon_scale_mode: MuonScaleMode = option(
        "Scale of Muon's updates by matrix shape; shape_scaling is torch's.", default="spectral"
    )
    muon_extra_scale_factor: float = option(
        "Factor of Muon's updates; 0.2 with spectral is near AdamW's.", default=1.0, above=0
    )
    muon_split_qkv: bool = option("Orthogonalize query, key and value matrices separately.", default=True)
    muon_tp_mode: MuonTpMode = option(
        "With tensor parallelism, orthogonalize slices (blockwise) or whole matrices.", default="duplicated"
    )
    clip_grad: float = option("Maximum global gradient norm; 0 disables clipping.", default=1.0, minimum=0, common=True)
