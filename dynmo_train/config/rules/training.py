"""Rules over batches, learning rate, precision, data and the run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..schema import Config
from .problem import Rule, conflict, later


def _batch(config: Config, _world_size: int) -> Iterator[Problem]:
    training, replicas = config.training, config.parallel.data_parallel_size
    multiple = training.micro_batch_size * replicas
    if training.global_batch_size % multiple:
        yield conflict(
            "--global-batch-size",
            f"{training.global_batch_size} is not a multiple of --micro-batch-size {training.micro_batch_size}"
            f" x {replicas} data-parallel replicas",
        )
    accumulated = training.gradient_accumulation_steps
    if accumulated is not None and training.global_batch_size != multiple * accumulated:
        yield conflict(
            "--gradient-accumulation-steps",
            f"{accumulated} x --micro-batch-size {training.micro_batch_size} x {replicas} replicas is not"
            f" --global-batch-size {training.global_batch_size}; leave one of them out",
        )
    if training.rampup_batch_size is None:
        return
    try:
        sizes = config.batch_sizes
    except UsageError as error:
        yield Problem("--rampup-batch-size", "form", str(error))
        return
    if sizes.start % multiple or sizes.increment % multiple:
        yield conflict(
            "--rampup-batch-size",
            f"{training.rampup_batch_size}: start and increment must be multiples of --micro-batch-size"
            f" {training.micro_batch_size} x {replicas} data-parallel replicas",
        )
    if training.train_samples is None:
        yield conflict("--rampup-batch-size", "needs --train-samples in place of --train-iters")


def _evaluation(config: Config, _world_size: int) -> Iterator[Problem]:
    if not config.training.skip_train:
        return
    if not config.training.eval_iters:
        yield conflict("--skip-train", "leaves nothing to do with --eval-iters 0; give a number of batches")
    if config.run.load is None:
        yield conflict("--skip-train", "evaluates a trained model: give --load")


def _learning_rate(config: Config, _world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    ending = "samples" if config.counts_samples else "iters"
    if optimizer.min_lr > optimizer.lr:
        yield conflict("--min-lr", f"{optimizer.min_lr} is above --lr {optimizer.lr}")
    if optimizer.lr_warmup_fraction is not None and (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples):
        yield conflict("--lr-warmup-fraction", f"cannot be combined with --lr-warmup-{ending}; give one of them")
    elif config.warmup_samples > config.decay_samples:
        unit = 1 if config.counts_samples else config.training.global_batch_size
        warmup, decay = config.warmup_samples / unit, config.decay_samples // unit
        yield conflict(f"--lr-warmup-{ending}", f"{warmup:g} is above --lr-decay-{ending} {decay}")
    if optimizer.lr_warmup_init > optimizer.lr:
        yield conflict("--lr-warmup-init", f"{optimizer.lr_warmup_init} is above --lr {optimizer.lr}")
    given = optimizer.lr_wsd_decay_samples if config.counts_samples else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and given is None:
        yield conflict("--lr-decay-style", f"WSD needs the length of its last decay: give --lr-wsd-decay-{ending}")
    elif optimizer.lr_decay_style != "WSD" and given is not None:
        yield conflict(f"--lr-wsd-decay-{ending}", "is of --lr-decay-style WSD; leave it out, or give that style")


def _weight_decay(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.optimizer
    bounds = (("--start-weight-decay", given.start_weight_decay), ("--end-weight-decay", given.end_weight_decay))
    if given.weight_decay_incr_style == "constant":
        for flag, value in bounds:
            if value is not None:
                yield conflict(flag, f"{value} needs --weight-decay-incr-style linear or cosine")
        return
    missing = " and ".join(flag for flag, value in bounds if value is None)
    if missing:
        yield conflict("--weight-decay-incr-style", f"{given.weight_decay_incr_style} needs {missing}")
    if (given.start_weight_decay or 0.0) > (math.inf if given.end_weight_decay is None else given.end_weight_decay):
        yield conflict(
            "--start-weight-decay", f"{given.start_weight_decay} is above --end-weight-decay {given.end_weight_decay}"
        )


def _precision(config: Config, _world_size: int) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp16 and precision.bf16:
        yield conflict("--fp16", "cannot be combined with --bf16; give one of them")
    if precision.loss_scale is not None and not precision.fp16:
        yield conflict("--loss-scale", f"{precision.loss_scale}: only --fp16 scales the loss")
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield conflict(
            "--min-loss-scale",
            f"{precision.min_loss_scale} is above --initial-loss-scale {precision.initial_loss_scale}",
        )
    if not precision.accumulate_allreduce_grads_in_fp32:
        yield later(
            "--no-accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in float32; leave it out"
        )


def _data(config: Config, _world_size: int) -> Iterator[Problem]:
    data = config.data
    try:
        shares, own = data.split_shares, data.part_blends
        blend = data.blend
    except UsageError as error:
        yield Problem(str(error).split(" ", 1)[0], "form", str(error))
        return
    if blend and any(own):
        yield conflict(
            "--data-path", "cannot be combined with --train-data-path and its kin; they make --split needless"
        )
    elif blend and not shares[0]:
        yield conflict("--split", f"{data.split!r} leaves nothing to train on")
    if data.tokenizer_type == "NullTokenizer" and (data.tokenizer_model or data.vocab_file or data.merge_file):
        yield conflict("--tokenizer-type", "NullTokenizer reads no file; leave the files out, or give their type")


def _run(config: Config, _world_size: int) -> Iterator[Problem]:
    run = config.run
    if run.run_dir is not None and run.save is not None and run.run_dir != run.save:
        yield conflict("--save", f"{run.save!r} and --run-dir {run.run_dir!r} both name the run directory; give one")


TRAINING_RULES: tuple[Rule, ...] = (
    _batch,
    _evaluation,
    _learning_rate,
    _weight_decay,
    _precision,
    _data,
    _run,
)
