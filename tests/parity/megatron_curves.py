"""Losses of fifty steps of Megatron's command lines: ours, and those of Megatron-core, from the same weights and data.

Theirs is the model of Megatron-core and its ``OptimizerParamScheduler``, with torch's AdamW over its two groups of
parameters and torch's clipping: its own optimizers need CUDA. What Megatron's ``get_optimizer_param_scheduler`` makes
of a command line is written out here, so that a mistake in the configuration does not reach both sides.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import typer
from torch import nn

from dynmo_train.cli import app
from dynmo_train.cli.run_script.launchers import OurCommand, translate_program
from dynmo_train.config import option_specs, resolve_checked
from dynmo_train.config.compat.translate import translate
from dynmo_train.config.options import DefaultContext
from dynmo_train.data.batch import Batch
from dynmo_train.models.registry import family_of
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings, initial_partition
from tests.parity import megatron_core
from tests.parity.item_stream import copy_into

STEPS, SAMPLES, MICROBATCHES = 50, 4, 2
SIZES = {"layers": 2, "width": 32, "heads": 4, "inner": 64, "groups": 2, "experts": 4, "tokens": 16, "vocabulary": 64}
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16"
    " --max-position-embeddings 16 --vocab-size 64 --make-vocab-size-divisible-by 1 --attention-dropout 0"
    " --hidden-dropout 0 --transformer-impl local --mock-data --init-method-std 0.1"
)
TRAINING = (
    f" --micro-batch-size {SAMPLES} --global-batch-size {SAMPLES * MICROBATCHES} --lr 3e-3 --min-lr 3e-4"
    " --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95"
)
LLAMA = (
    " --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Options of a command line, and what the training of Megatron makes of them for its scheduler, in samples."""

    words: str
    arguments: Mapping[str, Any]


ITERATIONS = f" --train-iters {STEPS} --lr-warmup-iters 10 --lr-decay-iters {STEPS}"
IN_SAMPLES = " --train-samples 400 --lr-warmup-samples 80 --lr-decay-samples 360"
DECAY = " --weight-decay 0.1"
# Decays of zero to one, so that the losses of the styles differ by more than the tolerance.
GROWING = " --start-weight-decay 0 --end-weight-decay 1 --weight-decay-incr-style "
WSD = " --lr-decay-style WSD --lr-wsd-decay-iters 30 --lr-wsd-decay-style "
COSINE = {"lr_decay_style": "cosine"}
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def wsd(style: str, **more: Any) -> dict[str, Any]:
    return {"lr_decay_style": "WSD", "wsd_decay_steps": 240, "lr_wsd_decay_style": style, **more}


def growing(style: str) -> dict[str, Any]:
    return {"start_wd": 0.0, "end_wd": 1.0, "wd_incr_style": style}


SCHEDULES = {
    "cosine": Schedule(words=ITERATIONS + DECAY + " --lr-decay-style cosine", arguments=COSINE),
    **{f"WSD {style}": Schedule(words=ITERATIONS + DECAY + WSD + style, arguments=wsd(style)) for style in WSD_STYLES},
    "cosine, linear weight decay": Schedule(
        words=ITERATIONS + GROWING + "linear --lr-decay-style cosine", arguments=COSINE | growing("linear")
    ),
    "WSD, cosine weight decay": Schedule(
        words=ITERATIONS + GROWING + "cosine" + WSD + "minus_sqrt", arguments=wsd("minus_sqrt") | growing("cosine")
    ),
    "WSD in samples": Schedule(
        words=IN_SAMPLES + GROWING + "linear --lr-decay-style WSD --lr-wsd-decay-samples 160 --lr-warmup-init 1e-3",
        arguments=wsd("exponential", wsd_decay_steps=160, lr_decay_steps=360, init_lr=1e-3) | growing("linear"),
    ),
}
FAMILIES = {
    "gpt": ("gpt", MODEL),
    "llama": ("gpt", MODEL + LLAMA),
    "experts": (
        "gpt",
        MODEL + LLAMA + " --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm"
        " --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type allgather",
    ),
    "gpt-exact": ("gpt", MODEL + " --no-bias-gelu-fusion"),
    "quick-geglu": ("gpt", MODEL + LLAMA.replace("--swiglu", "--quick-geglu")),
    "quick-geglu-offset": ("gpt", MODEL + LLAMA.replace("--swiglu", "--quick-geglu --glu-linear-offset 1.0")),
    "clamped-swiglu": ("gpt", MODEL + LLAMA + " --activation-func-clamp-value 0.25"),
    "off-by-one": ("gpt", MODEL + LLAMA + " --softmax-type off-by-one"),
    "gpt-oss": (
        "gpt",
        MODEL
        + LLAMA.replace("--swiglu", "--quick-geglu").replace("embedding-type rope", "embedding-type yarn")
        + " --glu-linear-offset 1.0 --activation-func-clamp-value 0.25 --softmax-type learnable --window-size 3,0"
        " --window-attn-skip-freq 2 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
        " --no-yarn-correction-range-round-to-int",
    ),
    "bert": ("bert", MODEL),
    "bert-exact": ("bert", MODEL + " --no-bias-gelu-fusion"),
    "t5": ("t5", MODEL + " --encoder-seq-length 16 --decoder-seq-length 16"),
    "t5-per-token": ("t5", MODEL + " --encoder-seq-length 16 --decoder-seq-length 16 --calculate-per-token-loss"),
}
# Families that differ from another one in an option: one schedule is enough.
VARIANTS = (
    "gpt-exact",
    "quick-geglu",
    "quick-geglu-offset",
    "clamped-swiglu",
    "off-by-one",
    "gpt-oss",
    "bert-exact",
    "t5-per-token",
)
CASES = [(kind, name) for kind in FAMILIES for name in SCHEDULES if kind not in VARIANTS or name == "cosine"]


def config_from(words: str, family: str) -> Any:
    """The configuration of the command that a command line of Megatron becomes."""
    ours = translate_program(["python", f"pretrain_{family}.py", *shlex.split(words)], "", {})
    assert isinstance(ours, OurCommand)
    assert ours.words[:3] == ["dynmo-train", "pretrain", family]
    command = typer.main.get_command(app).commands["pretrain"].commands[family]
    declared = {
        name: 0 if option.is_flag else option.nargs
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    translation = translate(ours.words[3:], family, declared)
    assert not translation.problems
    values = command.make_context(family, list(translation.arguments)).params
    flags = {name: value for name, value in values.items() if name in option_specs() and value is not None}
    return resolve_checked(flags=flags, file={}, command={"family": family}, context=DefaultContext(world_size=1))


def batch_of(kind: str, step: int) -> dict[str, torch.Tensor]:
    """Token sequences with a rule that can be learned, and the masks of the family."""
    random = torch.Generator().manual_seed(step)
    samples = SAMPLES * MICROBATCHES
    steps = torch.randint(1, 4, (samples, SIZES["tokens"] + 1), generator=random)
    ids = steps.cumsum(1) % SIZES["vocabulary"]
    if not kind.startswith(("bert", "t5")):
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    masked = torch.rand((samples, SIZES["tokens"]), generator=random) < 0.3
    masked[:, 0] = True
    present = torch.ones_like(masked)
    present[::2, -3:] = False
    masked &= present
    labels = ids[:, :-1].contiguous()
    if kind.startswith("bert"):
        return {
            "ids": labels.masked_fill(masked, 1),
            "types": (torch.arange(SIZES["tokens"]) >= 8).long().expand(samples, -1).contiguous(),
            "attention_mask": present,
            "labels": labels,
            "loss_mask": masked.long(),
            "order": torch.randint(0, 2, (samples,), generator=random),
        }
    counts = present.long().flip(1)
    if kind == "t5-per-token":
        counts[:SAMPLES, 4:] = 0  # the first microbatch counts fewer tokens than the second
    return {
        "encoder_ids": labels,
        "encoder_attention_mask": present,
        "decoder_ids": ids.flip(0)[:, :-1].contiguous(),
        "labels": ids.flip(0)[:, 1:].contiguous(),
        "loss_mask": counts,
    }


def loss_of(kind: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a microbatch as Megatron's ``pretrain_*.py`` compute it; by token, the sum."""
    T = SIZES["tokens"]
    causal = torch.ones(1, 1, T, T).triu(1).bool()
    if not kind.startswith(("bert", "t5")):
        positions = torch.arange(T).expand(SAMPLES, -1)
        return model(batch["ids"], positions, causal, labels=batch["labels"]).mean()
    mask = batch["loss_mask"].float()
    if kind.startswith("bert"):
        losses, order = model(
            batch["ids"], batch["attention_mask"].long(), tokentype_ids=batch["types"], lm_labels=batch["labels"]
        )
        masked = (losses * mask).sum() / mask.sum()
        return masked + nn.functional.cross_entropy(order.float(), batch["order"])
    absent = ~batch["encoder_attention_mask"]
    padding = absent[:, None, None, :].expand(-1, 1, T, -1)
    losses = model(
        batch["encoder_ids"],
        batch["decoder_ids"],
        padding,
        causal.expand(SAMPLES, -1, -1, -1),
        padding,
        lm_labels=batch["labels"],
    )
    return (losses * mask).sum() / (1 if kind == "t5-per-token" else mask.sum())


def theirs(kind: str, schedule: Schedule, weights: dict[str, torch.Tensor]) -> Callable[[int], float]:
    """What trains Megatron-core's model a step, and returns the loss before it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # Its schedules of the pipeline do this before each microbatch.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / MICROBATCHES))
    if kind.startswith("bert"):
        model = megatron_core.bert(SIZES, kind)
    else:
        model = megatron_core.t5(SIZES) if kind.startswith("t5") else megatron_core.decoder(kind, SIZES)
    copy_into(model, megatron_core.names_of(kind, weights))
    own = list(model.parameters())
    groups = [
        {"params": [p for p in own if p.dim() > 1], "wd_mult": 1.0, "lr_mult": 1.0},
        {"params": [p for p in own if p.dim() == 1], "wd_mult": 0.0, "lr_mult": 1.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    samples = SAMPLES * MICROBATCHES
    plain: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 3e-3,
        "min_lr": 3e-4,
        "lr_warmup_steps": 10 * samples,
        "lr_decay_steps": STEPS * samples,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": STEPS * samples,
        "wd_incr_style": "constant",
    }
    scheduler = OptimizerParamScheduler(optimizer, **(plain | dict(schedule.arguments)))

    def train(step: int) -> float:
        batch = batch_of(kind, step)
        total = 0.0
        # By token the sums of all microbatches are over the number of tokens that count in the step.
        parts = float(batch["loss_mask"].sum()) if kind == "t5-per-token" else MICROBATCHES
        for at in range(0, samples, SAMPLES):
            loss = loss_of(kind, model, {name: value[at : at + SAMPLES] for name, value in batch.items()})
            (loss / parts).backward()
            total += loss.item() / parts
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step(samples)
        return total

    return train


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Of each step: our loss, that of Megatron-core, and our norm of the gradients before clipping."""

    ours: list[float]
    theirs: list[float]
    norms: list[float]

    @property
    def difference(self) -> float:
        """The largest difference of the losses of a step."""
        return max(abs(mine - other) for mine, other in zip(self.ours, self.theirs, strict=True))


@functools.cache
def curves(kind: str, schedule: str) -> Curves:
    """Train both models from the same weights on the same batches."""
    name, model = FAMILIES[kind]
    config = config_from(model + TRAINING + SCHEDULES[schedule].words, name)
    family, world = family_of(config), init_world("cpu")
    found = Curves(ours=[], theirs=[], norms=[])
    try:
        engine = Engine(family, engine_settings(config), initial_partition(config, family, None), world)
        engine.build()
        weights = {name: parameter.detach().clone() for _, name, parameter in engine.item_store.parameters()}
        with megatron_core.on_cpu():
            train = theirs(kind, SCHEDULES[schedule], weights)
            for step in range(1, STEPS + 1):
                batch = Batch(inputs=batch_of(kind, step), first_microbatch=step * MICROBATCHES, step=step)
                result = engine.train_step(batch, sampled=False, advance=SAMPLES * MICROBATCHES)
                found.ours.append(result.loss)
                found.norms.append(result.grad_norm)
                found.theirs.append(train(step))
    finally:
        destroy_world()
    return found
