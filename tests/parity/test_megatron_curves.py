"""Fifty steps of Megatron's command lines have the losses of Megatron-core, from the same weights and data.

Theirs is the model of Megatron-core and its ``OptimizerParamScheduler``, with torch's AdamW over its two groups of
parameters and torch's clipping: its own optimizers need CUDA.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typer
from torch import nn

from dynmo_train.cli import app
from dynmo_train.cli.run_script.launchers import OurCommand, translate_program
from dynmo_train.config import option_specs, resolve_checked
from dynmo_train.config.compat import translate
from dynmo_train.config.options import DefaultContext
from dynmo_train.data.batch import Batch
from dynmo_train.models.registry import family_of
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings, initial_partition
from tests.parity import megatron_core
from tests.parity.item_stream import copy_into

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

STEPS, SAMPLES, MICROBATCHES = 50, 4, 2
SIZES = {"layers": 2, "width": 32, "heads": 4, "inner": 64, "groups": 2, "experts": 4, "tokens": 16, "vocabulary": 64}
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16"
    " --max-position-embeddings 16 --vocab-size 64 --make-vocab-size-divisible-by 1 --attention-dropout 0"
    " --hidden-dropout 0 --transformer-impl local --mock-data --init-method-std 0.1"
)
TRAINING = (
    f" --micro-batch-size {SAMPLES} --global-batch-size {SAMPLES * MICROBATCHES} --train-iters {STEPS} --lr 3e-3"
    " --min-lr 3e-4 --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 0.5 --adam-beta1 0.9 --adam-beta2 0.95"
)
LLAMA = (
    " --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
)
SCHEDULES = {
    "cosine": f" --lr-decay-style cosine --lr-decay-iters {STEPS}",
    "wsd": f" --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 20 --lr-decay-iters {STEPS}",
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
}
# Families that differ from another one in an option: one schedule is enough.
VARIANTS = ("gpt-exact", "quick-geglu", "quick-geglu-offset", "clamped-swiglu", "off-by-one", "gpt-oss", "bert-exact")
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
    return {
        "encoder_ids": labels,
        "encoder_attention_mask": present,
        "decoder_ids": ids.flip(0)[:, :-1].contiguous(),
        "labels": ids.flip(0)[:, 1:].contiguous(),
        "loss_mask": present.long().flip(1),
    }


def loss_of(kind: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a microbatch as Megatron's ``pretrain_*.py`` compute it."""
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
    return (losses * mask).sum() / mask.sum()


def theirs(kind: str, config: Any, weights: dict[str, torch.Tensor]) -> Callable[[int], float]:
    """What trains Megatron-core's model a step, and returns the loss before it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # Its schedules of the pipeline do this before each microbatch.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / MICROBATCHES))
    if kind.startswith("bert"):
        model = megatron_core.bert(SIZES, kind)
    else:
        model = megatron_core.t5(SIZES) if kind == "t5" else megatron_core.decoder(kind, SIZES)
    copy_into(model, megatron_core.names_of(kind, weights))
    own, options = list(model.parameters()), config.optimizer
    groups = [
        {"params": [p for p in own if p.dim() > 1], "wd_mult": 1.0, "lr_mult": 1.0},
        {"params": [p for p in own if p.dim() == 1], "wd_mult": 0.0, "lr_mult": 1.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), eps=options.adam_eps)
    samples = SAMPLES * MICROBATCHES
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=10 * samples,
        lr_decay_steps=STEPS * samples,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=STEPS * samples,
        wd_incr_style="constant",
        lr_wsd_decay_style=options.lr_wsd_decay_style,
        wsd_decay_steps=20 * samples,
    )

    def train(step: int) -> float:
        batch = batch_of(kind, step)
        total = 0.0
        for at in range(0, samples, SAMPLES):
            loss = loss_of(kind, model, {name: value[at : at + SAMPLES] for name, value in batch.items()})
            (loss / MICROBATCHES).backward()
            total += loss.item() / MICROBATCHES
        nn.utils.clip_grad_norm_(own, options.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step(samples)
        return total

    return train


def curves(kind: str, schedule: str) -> list[tuple[float, float]]:
    """The losses of all steps: ours, theirs."""
    name, model = FAMILIES[kind]
    config = config_from(model + TRAINING + SCHEDULES[schedule], name)
    family, world = family_of(config), init_world("cpu")
    engine = Engine(family, engine_settings(config), initial_partition(config, family, None), world)
    engine.build()
    weights = {name: parameter.detach().clone() for _, name, parameter in engine.item_store.parameters()}
    found = []
    with megatron_core.on_cpu():
        train = theirs(kind, config, weights)
        for step in range(1, STEPS + 1):
            batch = Batch(inputs=batch_of(kind, step), first_microbatch=step * MICROBATCHES, step=step)
            mine = engine.train_step(batch, sampled=False, advance=SAMPLES * MICROBATCHES).loss
            found.append((mine, train(step)))
    return found


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_losses_of_fifty_steps_are_those_of_megatron_core(kind, schedule):
    pytest.importorskip("megatron.core.transformer", reason="megatron-core is not installed (an optional peer)")
    try:
        losses = curves(kind, schedule)
    finally:
        destroy_world()
    assert max(abs(mine - other) for mine, other in losses) < 1e-4
    assert losses[-1][0] < losses[0][0] - 0.2
