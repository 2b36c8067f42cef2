"""Options of AdamW, of the learning rate and of the weight decay over time; names and defaults are Megatron's."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._common.document import MAX_SAMPLES
from .options import option

DecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncrementStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning rate over time, clipping."""

    lr: float = option("Peak learning rate.", above=0)
    min_lr: float = option("Lowest learning rate after the decay.", default=0.0, minimum=0)
    lr_decay_style: DecayStyle = option(
        "Schedule of the learning rate after the warm-up; WSD is constant until its last decay.", default="linear"
    )
    lr_decay_iters: int = option(
        "Steps over which the learning rate decays, warm-up included.",
        minimum=1,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    lr_decay_samples: int | None = option(
        "Samples over which it decays, with --train-samples; none is --train-samples.",
        default=None,
        minimum=1,
        maximum=MAX_SAMPLES,
    )
    lr_wsd_decay_style: WsdDecayStyle = option("Last decay of --lr-decay-style WSD.", default="exponential")
    lr_wsd_decay_iters: int | None = option("Steps of the last decay of WSD.", default=None, minimum=1)
    lr_wsd_decay_samples: int | None = option(
        "Samples of the last decay of WSD, with --train-samples.", default=None, minimum=1, maximum=MAX_SAMPLES
    )
    lr_warmup_iters: int = option("Steps of linear warm-up.", default=0, minimum=0)
    lr_warmup_samples: int = option(
        "Samples of linear warm-up, with --train-samples.", default=0, minimum=0, maximum=MAX_SAMPLES
    )
    lr_warmup_fraction: float | None = option(
        "Linear warm-up as a fraction of --lr-decay-iters or --lr-decay-samples.", default=None, minimum=0, maximum=1
    )
    lr_warmup_init: float = option("Learning rate at which the warm-up starts.", default=0.0, minimum=0)
    weight_decay: float = option("Decoupled weight decay of matrices.", default=0.01, minimum=0)
    start_weight_decay: float | None = option(
        "Weight decay at the start, with --weight-decay-incr-style.", default=None, minimum=0
    )
    end_weight_decay: float | None = option(
        "Weight decay at the end of the training, with --weight-decay-incr-style.", default=None, minimum=0
    )
    weight_decay_incr_style: IncrementStyle = option(
        "How the weight decay grows over the training.", default="constant"
    )
    adam_beta1: float = option("Decay of Adam's first moment.", default=0.9, minimum=0, below=1)
    adam_beta2: float = option("Decay of Adam's second moment.", default=0.999, minimum=0, below=1)
    adam_eps: float = option("Epsilon of Adam.", default=1e-8, above=0)
    clip_grad: float = option("Clip the global gradient norm to this; 0 clips never.", default=1.0, minimum=0)
