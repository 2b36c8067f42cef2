"""Rules over batches, learning rate, precision, data and the run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..._common.document import Problem
from ..._common.errors import UsageError
from ..batch_schedule import parse_ranges
from ..parse import batch_sizes_of
from ..schema import Config
from .problem import Rule, conflict, unsupported


def _batch(config: Config, _world_size: int) -> Iterator[Problem]:
    training, replicas = config.training, config.parallel.data_parallel_size
    multiple = training.micro_batch_size * replicas
    if training.global_batch_size % multiple:
        yield conflict(
            "--global-batch-size",
            f"is {training.global_batch_size}; must be a multiple of --micro-batch-size {training.micro_batch_size}"
            f" x {replicas} data-parallel replicas",
        )
    accumulated = training.gradient_accumulation_steps
    if accumulated is not None and training.global_batch_size != multiple * accumulated:
        yield conflict(
            "--gradient-accumulation-steps",
            f"is {accumulated}; times --micro-batch-size {training.micro_batch_size} x {replicas} replicas it must be"
            f" --global-batch-size {training.global_batch_size}; remove one",
        )
    if training.step_batch_size_schedule is not None:
        yield from _stepped_batch(config, multiple)
    elif training.rampup_batch_size is not None:
        yield from _growing_batch(config, multiple)


def _growing_batch(config: Config, multiple: int) -> Iterator[Problem]:
    """Rules over ``--rampup-batch-size``; batch sizes are multiples of ``multiple``."""
    training, replicas = config.training, config.parallel.data_parallel_size
    try:
        sizes = batch_sizes_of(training.rampup_batch_size, training.global_batch_size)
    except UsageError as error:
        yield Problem("--rampup-batch-size", "form", str(error))
        return
    if sizes.start % multiple or sizes.increment % multiple:
        yield conflict(
            "--rampup-batch-size",
            f"is {training.rampup_batch_size}; START and INCREMENT must be multiples of --micro-batch-size"
            f" {training.micro_batch_size} x {replicas} data-parallel replicas",
        )
    if training.train_samples is None:
        yield conflict("--rampup-batch-size", "requires --train-samples instead of --train-iters")


def _stepped_batch(config: Config, multiple: int) -> Iterator[Problem]:
    """Rules over ``--step-batch-size-schedule``; batch sizes are multiples of ``multiple``."""
    flag, training, replicas = "--step-batch-size-schedule", config.training, config.parallel.data_parallel_size
    for other, value in (
        ("--rampup-batch-size", training.rampup_batch_size),
        ("--gradient-accumulation-steps", training.gradient_accumulation_steps),
    ):
        if value is not None:
            yield conflict(flag, f"cannot be combined with {other} {value}; remove one")
    try:
        sizes = config.batch_sizes
    except UsageError as error:
        yield Problem(flag, "form", str(error))
        return
    wrong = [size for size in sizes.sizes() if size % multiple]
    if wrong:
        yield conflict(
            flag,
            f"has the size {wrong[0]}; each must be a multiple of --micro-batch-size {training.micro_batch_size}"
            f" x {replicas} data-parallel replicas; sizes of steps that are done may be replaced",
        )
    # Iterations of the learning rate count as this number of samples, and evaluations have this batch size. Megatron
    # refuses the flag here, and has one microbatch of each replica.
    if training.global_batch_size not in (multiple, sizes.final):
        yield conflict(
            "--global-batch-size",
            f"is {training.global_batch_size}, but the last size of {flag} is {sizes.final}; remove one",
        )


def _evaluation(config: Config, _world_size: int) -> Iterator[Problem]:
    if not config.training.skip_train:
        return
    if not config.training.eval_iters:
        yield conflict("--skip-train", "requires --eval-iters above 0")
    if config.run.load is None:
        yield conflict("--skip-train", "requires --load")


def _learning_rate(config: Config, _world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    ending = "samples" if config.counts_samples else "iters"
    if optimizer.min_lr > optimizer.lr:
        yield conflict("--min-lr", f"is {optimizer.min_lr}; must be at most --lr {optimizer.lr}")
    if optimizer.decoupled_lr is None:
        if optimizer.decoupled_min_lr is not None:
            yield conflict("--decoupled-min-lr", f"is {optimizer.decoupled_min_lr}; requires --decoupled-lr")
    else:
        floor, flag = optimizer.decoupled_min_lr, "--decoupled-min-lr"
        if floor is None:
            floor, flag = optimizer.min_lr, "--min-lr"
        if floor > optimizer.decoupled_lr:
            yield conflict(flag, f"is {floor}; must be at most --decoupled-lr {optimizer.decoupled_lr}")
    if optimizer.lr_warmup_fraction is not None and (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples):
        yield conflict("--lr-warmup-fraction", f"cannot be combined with --lr-warmup-{ending}; remove one")
    elif config.warmup_samples > config.decay_samples:
        unit = 1 if config.counts_samples else config.training.global_batch_size
        warmup, decay = config.warmup_samples / unit, config.decay_samples // unit
        yield conflict(f"--lr-warmup-{ending}", f"is {warmup:g}; must be at most --lr-decay-{ending} {decay}")
    if optimizer.lr_warmup_init > optimizer.lr:
        yield conflict("--lr-warmup-init", f"is {optimizer.lr_warmup_init}; must be at most --lr {optimizer.lr}")
    given = optimizer.lr_wsd_decay_samples if config.counts_samples else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and given is None:
        yield conflict("--lr-decay-style", f"WSD requires --lr-wsd-decay-{ending}")
    elif optimizer.lr_decay_style != "WSD" and given is not None:
        yield conflict(f"--lr-wsd-decay-{ending}", "requires --lr-decay-style WSD; remove it, or use that style")


def _muon(config: Config, _world_size: int) -> Iterator[Problem]:
    given, steps = config.optimizer, config.optimizer.muon_num_ns_steps
    if given.optimizer != "muon":
        return
    if given.muon_coefficient_type == "quintic" and steps % 5:
        yield conflict(
            "--muon-num-ns-steps", f"is {steps}; must be a multiple of 5 with --muon-coefficient-type quintic"
        )
    if given.muon_coefficient_type == "polar_express" and steps < 8:
        yield conflict(
            "--muon-num-ns-steps", f"is {steps}; must be at least 8 with --muon-coefficient-type polar_express"
        )


def _moment_dtypes(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.optimizer
    if given.use_precision_aware_optimizer:
        if given.optimizer != "adam":
            yield conflict("--use-precision-aware-optimizer", f"requires --optimizer adam, not {given.optimizer}")
        return
    for flag, dtype in (("--exp-avg-dtype", given.exp_avg_dtype), ("--exp-avg-sq-dtype", given.exp_avg_sq_dtype)):
        if dtype != "fp32":
            yield conflict(flag, f"is {dtype}; requires --use-precision-aware-optimizer")


def _adafactor(config: Config, _world_size: int) -> Iterator[Problem]:
    if config.optimizer.optimizer != "adafactor":
        return
    parallel = config.parallel
    remedy = "which shards matrices: its means are over whole ones; remove one, or use --optimizer adam or muon"
    if parallel.tensor_model_parallel_size > 1:
        size = parallel.tensor_model_parallel_size
        yield conflict(
            "--optimizer", f"adafactor cannot be combined with --tensor-model-parallel-size {size}, {remedy}"
        )
    if parallel.zero_stage and parallel.data_ranks > 1:
        yield conflict("--optimizer", f"adafactor cannot be combined with --zero-stage {parallel.zero_stage}, {remedy}")


def _weight_decay(config: Config, _world_size: int) -> Iterator[Problem]:
    given = config.optimizer
    bounds = (("--start-weight-decay", given.start_weight_decay), ("--end-weight-decay", given.end_weight_decay))
    if given.weight_decay_incr_style == "constant":
        for flag, value in bounds:
            if value is not None:
                yield conflict(flag, f"is {value}; requires --weight-decay-incr-style linear or cosine")
        return
    missing = " and ".join(flag for flag, value in bounds if value is None)
    if missing:
        yield conflict("--weight-decay-incr-style", f"{given.weight_decay_incr_style} requires {missing}")
    if (given.start_weight_decay or 0.0) > (math.inf if given.end_weight_decay is None else given.end_weight_decay):
        yield conflict(
            "--start-weight-decay",
            f"is {given.start_weight_decay}; must be at most --end-weight-decay {given.end_weight_decay}",
        )


def _precision(config: Config, _world_size: int) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp16 and precision.bf16:
        yield conflict("--fp16", "cannot be combined with --bf16; remove one")
    if precision.loss_scale is not None and not precision.fp16:
        yield conflict("--loss-scale", f"is {precision.loss_scale}; requires --fp16")
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield conflict(
            "--min-loss-scale",
            f"is {precision.min_loss_scale}; must be at most --initial-loss-scale {precision.initial_loss_scale}",
        )
    if not precision.accumulate_allreduce_grads_in_fp32:
        yield unsupported(
            "--no-accumulate-allreduce-grads-in-fp32",
            "is not supported: gradients are always accumulated in float32; remove it",
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
            "--data-path",
            "cannot be combined with --train-data-path, --valid-data-path or --test-data-path; remove one",
        )
    elif blend and not shares[0]:
        yield conflict("--split", f"is {data.split!r}; the weight of the training split must be above 0")
    if data.hf_dataset is not None:
        yield from _stream(config)
    if data.sft:
        yield from _conversations(config)
    if data.tokenizer_type == "NullTokenizer" and (data.tokenizer_model or data.vocab_file or data.merge_file):
        yield conflict(
            "--tokenizer-type", "NullTokenizer reads no files; remove --tokenizer-model, --vocab-file and --merge-file"
        )


def _conversations(config: Config) -> Iterator[Problem]:
    """Rules over ``--sft``."""
    data = config.data
    for flag, is_given in (("--hf-dataset", data.hf_dataset is not None), ("--mock-data", data.mock_data)):
        if is_given:
            yield conflict(
                "--sft", f"reads a data set of dynmo-prep binarize-chat; give it as --data-path instead of {flag}"
            )
    if config.curriculum is not None:
        yield unsupported("--sft", "is given with --curriculum-shortest, which cuts samples; remove one")


def _stream(config: Config) -> Iterator[Problem]:
    """Rules over ``--hf-dataset``."""
    data = config.data
    if config.model.base_family not in ("gpt", "llama"):
        yield unsupported(
            "--hf-dataset",
            f"is for gpt and llama; for {config.model.family} write the documents with dynmo-prep binarize"
            " --split-sentences, and use --data-path",
        )
    if data.data_path or any(data.part_blends) or data.mock_data:
        yield conflict(
            "--hf-dataset", "cannot be combined with --data-path, --train-data-path, ... or --mock-data; remove one"
        )
    if not (data.tokenizer_model or data.vocab_file):
        yield conflict("--hf-dataset", "is text, and needs a tokenizer; give --tokenizer-model or --vocab-file")
    if config.training.eval_iters and not (data.hf_valid_split or data.hf_valid_dataset):
        yield conflict(
            "--hf-dataset",
            "needs data for validation; give --hf-valid-split or --hf-valid-dataset, or --eval-iters 0",
        )


def _run(config: Config, _world_size: int) -> Iterator[Problem]:
    run = config.run
    if run.run_dir is not None and run.save is not None and run.run_dir != run.save:
        yield conflict("--save", f"is {run.save!r}, but its alias --run-dir is {run.run_dir!r}; remove one")


def _loss_spikes(config: Config, _world_size: int) -> Iterator[Problem]:
    training, run = config.training, config.run
    try:
        skipped = parse_ranges("--skip-train-samples", training.skip_train_samples or "")
    except UsageError as error:
        yield Problem("--skip-train-samples", "form", str(error))
        return
    is_rolling_back = training.loss_spike_action == "rollback"
    flag = "--loss-spike-action" if is_rolling_back else "--skip-train-samples"
    if (is_rolling_back or skipped) and config.data.sample_order == "megatron":
        yield conflict(
            flag,
            "skips samples, so that a run reads more of them; --sample-order megatron would change their order: use"
            " --sample-order stable",
        )
    if not is_rolling_back:
        return
    if run.save_interval is None:
        yield conflict(flag, "rollback returns to a checkpoint; give --save-interval")
    if run.no_save_optim:
        yield conflict(flag, "rollback needs the optimizer state of checkpoints; remove --no-save-optim")
    for name in ("pack_to", "min_throughput_fraction"):
        if getattr(config.balance, name) is not None:
            other = f"--{name.replace('_', '-')}"
            yield conflict(flag, f"rollback cannot be combined with {other}: released ranks do not return; remove one")


def _peer_copies(config: Config, _world_size: int) -> Iterator[Problem]:
    """A copy has the whole state of its stage, and ranks are not released; one rank makes copies once others join."""
    interval, flag, parallel = config.run.peer_checkpoint_interval, "--peer-checkpoint-interval", config.parallel
    if interval is None:
        return
    has_replicas = parallel.data_parallel_size > 1
    others = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size > 1,
        "--context-parallel-size": parallel.context_parallel_size > 1,
        "--expert-model-parallel-size": parallel.expert_model_parallel_size > 1,
        "--zero-stage, of which no replica has the whole state": parallel.zero_stage > 0,
        "--grad-comp, whose error feedback belongs to one replica": config.compression.grad_comp and has_replicas,
        "--vocabulary-parallel": parallel.vocabulary_parallel is not None,
        "--pack-to": config.balance.pack_to is not None,
        "--min-throughput-fraction": config.balance.min_throughput_fraction is not None,
        "--device cuda": config.training.device == "cuda",
    }
    if given := [name for name, is_given in others.items() if is_given]:
        yield unsupported(flag, f"is {interval}; cannot be combined with {', '.join(given)}; remove one")


TRAINING_RULES: tuple[Rule, ...] = (
    _batch,
    _evaluation,
    _learning_rate,
    _moment_dtypes,
    _adafactor,
    _muon,
    _weight_decay,
    _precision,
    _data,
    _run,
    _loss_spikes,
    _peer_copies,
)
