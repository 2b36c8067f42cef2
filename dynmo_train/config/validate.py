"""What contradicts what: rules over several options, each a small pure function; all problems are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import UsageError
from ..formats._document import DocumentError, Problem
from .resolve import OTHER_NAMES
from .schema import Config

SPLIT_BACKWARD = ("zero-bubble", "zb-v")
ONE_STREAM = ("gpt", "bert", "llama")
Rule = Callable[[Config, int], Iterator[Problem]]
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
}
POSITIONS_OF = {"gpt": ("learned",), "bert": ("learned",), "llama": ("rotary",), "t5": ("learned", "relative")}


def _conflict(flag: str, message: str) -> Problem:
    return Problem(flag, "conflict", message)


def _later(flag: str, message: str) -> Problem:
    return Problem(flag, "unsupported", message)


def _shape(config: Config, _world_size: int) -> Iterator[Problem]:
    model = config.model
    if model.hidden_size % model.num_attention_heads and config.sources.get("kv_channels") == "derived":
        yield _conflict(
            "--hidden-size",
            f"{model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}",
        )
    if model.seq_length > model.max_position_embeddings:
        yield _conflict(
            "--seq-length",
            f"{model.seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )


def _routing(config: Config, _world_size: int) -> Iterator[Problem]:
    """How experts and tokens find each other."""
    model = config.model
    if model.moe_routing == "balanced" and model.moe_router_topk != 1:
        yield _conflict("--moe-router-topk", f"{model.moe_router_topk}: --moe-routing balanced gives a token 1 expert")
    if model.moe_routing != "topk" and model.moe_expert_capacity_factor is not None:
        yield _conflict(
            "--moe-expert-capacity-factor",
            f"has no effect with --moe-routing {model.moe_routing}: no expert overflows",
        )


def _family(config: Config, _world_size: int) -> Iterator[Problem]:
    """Options that belong to other families than the run's."""
    model = config.model
    for name, families in OF_FAMILIES.items():
        if model.family not in families and config.sources.get(name) in ("flag", "file"):
            flag = "--" + name.replace("_", "-")
            yield _conflict(flag, f"belongs to {' and '.join(families)}; this is pretrain {model.family}")
    positions = POSITIONS_OF[model.family]
    if model.position_embedding_type not in positions:
        yield _conflict(
            "--position-embedding-type",
            f"{model.position_embedding_type}: {model.family} has {' or '.join(positions)} positions",
        )
    if model.num_attention_heads % model.num_query_groups:
        yield _conflict(
            "--num-query-groups",
            f"{model.num_query_groups} does not divide --num-attention-heads {model.num_attention_heads}",
        )
    if model.family == "llama" and model.kv_channels % 2:
        yield _conflict("--kv-channels", f"{model.kv_channels} is odd; rotary positions turn pairs: give an even width")
    if model.position_embedding_type == "relative":
        exact = model.relative_attention_num_buckets // 4
        if model.relative_attention_max_distance <= 2 * exact:
            yield _conflict(
                "--relative-attention-max-distance",
                f"{model.relative_attention_max_distance} is not above half of"
                f" --relative-attention-num-buckets {model.relative_attention_num_buckets}",
            )
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield _conflict(
            "--moe-router-topk", f"{model.moe_router_topk} is more than the {model.num_experts} of --num-experts"
        )
    for other, name in OTHER_NAMES.items():
        value, taken = getattr(model, other), getattr(model, name)
        if value is not None and value != taken:
            flags = ["--" + each.replace("_", "-") for each in (other, name)]
            yield _conflict(flags[0], f"{value} and {flags[1]} {taken} mean the same; give one")
    if model.family == "t5" and model.decoder_seq_length > model.max_position_embeddings:
        yield _conflict(
            "--decoder-seq-length",
            f"{model.decoder_seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}",
        )


def _batch(config: Config, _world_size: int) -> Iterator[Problem]:
    training, replicas = config.training, config.parallel.data_parallel_size
    multiple = training.micro_batch_size * replicas
    if training.global_batch_size % multiple:
        yield _conflict(
            "--global-batch-size",
            f"{training.global_batch_size} is not a multiple of --micro-batch-size {training.micro_batch_size}"
            f" x {replicas} data-parallel replicas",
        )
    accumulated = training.gradient_accumulation_steps
    if accumulated is not None and training.global_batch_size != multiple * accumulated:
        yield _conflict(
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
        yield _conflict(
            "--rampup-batch-size",
            f"{training.rampup_batch_size}: start and increment must be multiples of --micro-batch-size"
            f" {training.micro_batch_size} x {replicas} data-parallel replicas",
        )
    if training.train_samples is None:
        yield _conflict("--rampup-batch-size", "needs --train-samples in place of --train-iters")


def _length(config: Config, _world_size: int) -> Iterator[Problem]:
    training, optimizer = config.training, config.optimizer
    by_steps = {
        "--train-iters": config.sources.get("train_iters") not in (None, "derived"),
        "--lr-decay-iters": config.sources.get("lr_decay_iters") not in (None, "derived"),
        "--lr-warmup-iters": optimizer.lr_warmup_iters > 0,
    }
    by_samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples is not None,
        "--lr-warmup-samples": optimizer.lr_warmup_samples > 0,
    }
    wrong = by_steps if config.counts_samples else by_samples
    other = "counts samples: write" if config.counts_samples else "counts steps: write"
    for flag in (flag for flag, given in wrong.items() if given):
        ending = "-samples" if config.counts_samples else "-iters"
        yield _conflict(flag, f"a run with --train{ending} {other} {flag.rsplit('-', 1)[0]}{ending}")
    shortest = training.curriculum_shortest
    if shortest is not None and shortest > config.model.seq_length:
        yield _conflict("--curriculum-shortest", f"{shortest} is longer than --seq-length {config.model.seq_length}")
    if shortest is not None and config.parallel.sequence_parallel:
        yield _conflict("--curriculum-shortest", "cannot be combined with --sequence-parallel; give one of them")
    if shortest is not None and config.model.family not in ("gpt", "llama"):
        yield _later(
            "--curriculum-shortest", f"shortens the samples of gpt and llama; the model is {config.model.family}"
        )


def _workers(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        yield _conflict(
            "--pipeline-model-parallel-size",
            f"{pipeline} x --tensor-model-parallel-size {tensor} does not divide the {world_size} processes of this"
            f" run; start with --nproc {tensor * pipeline}",
        )


def _zero(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.zero_stage and parallel.schedule in SPLIT_BACKWARD:
        yield _conflict(
            "--zero-stage",
            f"{parallel.zero_stage} does not go with --schedule {parallel.schedule}, whose split backward loses the"
            " gradients of sharded layers; use 1f1b or interleaved-1f1b, or --zero-stage 0",
        )


def _experts(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    size, flag = parallel.expert_model_parallel_size, "--expert-model-parallel-size"
    if size == 1:
        return
    if model.num_experts is None:
        yield _conflict(flag, f"{size} needs --num-experts")
    elif model.num_experts % size:
        yield _conflict(flag, f"{size} does not divide --num-experts {model.num_experts}")
    if parallel.data_parallel_size % size:
        yield _conflict(flag, f"{size} does not divide the {parallel.data_parallel_size} data-parallel replicas")
    if parallel.zero_stage:
        yield _later(flag, f"{size} does not go with --zero-stage {parallel.zero_stage}; leave one of them out")


def _cuts_answers(config: Config) -> bool:
    """Whether a decoder's stream is cut along its tokens."""
    return config.parallel.sequence_parallel and config.model.family == "t5"


def _tensor(config: Config, _world_size: int) -> Iterator[Problem]:
    """What tensor parallelism cuts must divide."""
    parallel, model = config.parallel, config.model
    size = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and size == 1:
        yield _conflict("--sequence-parallel", "needs --tensor-model-parallel-size 2 or more")
    cut = [
        ("--num-attention-heads", model.num_attention_heads),
        ("--ffn-hidden-size", model.ffn_hidden_size),
    ]
    cut += [("--num-query-groups", model.num_query_groups)] if model.family == "llama" else []
    cut += [("--seq-length", model.seq_length)] if parallel.sequence_parallel else []
    cut += [("--decoder-seq-length", model.decoder_seq_length)] if _cuts_answers(config) else []
    for flag, value in cut:
        if value % size:
            yield _conflict(flag, f"{value} is not a multiple of --tensor-model-parallel-size {size}, which cuts it")


def _sequence(config: Config, _world_size: int) -> Iterator[Problem]:
    """What looks at all tokens outside of the tensor-parallel products cannot see a stream that is cut along them."""
    model = config.model
    whole = {
        "--num-experts": model.num_experts is not None,
        "--mod-capacity": config.depth.mod_capacity is not None,
        "--early-exit-layers": config.exits.early_exit_layers is not None,
        "--sparse-attention": config.attention.sparse_attention,
        "bert without --bert-no-binary-head": model.family == "bert" and not model.bert_no_binary_head,
    }
    if config.parallel.sequence_parallel:
        for flag in (flag for flag, on in whole.items() if on):
            yield _later("--sequence-parallel", f"does not go with {flag}; leave one of them out")


def _stages(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.num_layers
    sublayer = config.balance.granularity == "sublayer"
    items = layers * (2 if sublayer else 1) + 2
    if config.model.family == "t5":
        items += config.model.decoder_num_layers * (3 if sublayer else 1) + (2 if sublayer else 1)
    if config.num_stages > items:
        parts = "blocks and MLPs apart" if sublayer else "blocks"
        yield _conflict(
            "--pipeline-model-parallel-size",
            f"{config.num_stages} stages are more than the {items} items of the model: embedding, {items - 2} {parts},"
            " head",
        )
    virtual = parallel.virtual_stages_per_worker
    if parallel.schedule == "interleaved-1f1b" and virtual < 2:
        yield _conflict(
            "--virtual-stages-per-worker", f"{virtual}: interleaved-1f1b needs 2 or more; or use --schedule 1f1b"
        )
    if parallel.schedule == "zb-v" and virtual != 2:
        yield _conflict(
            "--virtual-stages-per-worker", f"{virtual}: zb-v runs 2 stages a worker; write 2 or leave it out"
        )
    if parallel.schedule in ("gpipe", "1f1b") and virtual > 1:
        yield _conflict(
            "--virtual-stages-per-worker",
            f"{virtual}: {parallel.schedule} runs one stage a worker; use --schedule interleaved-1f1b or zero-bubble",
        )


def _microbatches(config: Config, _world_size: int) -> Iterator[Problem]:
    """The conditions of torch.distributed.pipelining's schedules, of the first batch size that breaks one."""
    parallel, workers = config.parallel, config.parallel.pipeline_model_parallel_size
    try:
        sizes = config.batch_sizes.sizes()
    except UsageError:
        return
    flag = "--global-batch-size" if len(sizes) == 1 else "--rampup-batch-size"
    for size in sizes:
        microbatches = size // (config.training.micro_batch_size * parallel.data_parallel_size)
        if not microbatches:
            return  # told by another rule
        if parallel.schedule == "1f1b" and microbatches < workers:
            yield _conflict(
                flag,
                f"{size} makes {microbatches} microbatches; 1f1b on {workers} stages needs at least {workers}, or use"
                " --schedule gpipe",
            )
            return
        rounds = max(1, microbatches // workers)
        if parallel.schedule in ("interleaved-1f1b", "zero-bubble") and microbatches % rounds:
            yield _conflict(
                flag,
                f"{size} makes {microbatches} microbatches; {parallel.schedule} on {workers} workers needs a multiple"
                f" of the {rounds} rounds, such as {workers * rounds}",
            )
            return


def _learning_rate(config: Config, _world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    ending = "samples" if config.counts_samples else "iters"
    if optimizer.min_lr > optimizer.lr:
        yield _conflict("--min-lr", f"{optimizer.min_lr} is above --lr {optimizer.lr}")
    if optimizer.lr_warmup_fraction is not None and (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples):
        yield _conflict("--lr-warmup-fraction", f"cannot be combined with --lr-warmup-{ending}; give one of them")
    elif config.warmup_units > config.decay_units:
        yield _conflict(
            f"--lr-warmup-{ending}", f"{config.warmup_units} is above --lr-decay-{ending} {config.decay_units}"
        )


def _precision(config: Config, _world_size: int) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp16 and precision.bf16:
        yield _conflict("--fp16", "cannot be combined with --bf16; give one of them")
    if precision.loss_scale is not None and not precision.fp16:
        yield _conflict("--loss-scale", f"{precision.loss_scale}: only --fp16 scales the loss")
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield _conflict(
            "--min-loss-scale",
            f"{precision.min_loss_scale} is above --initial-loss-scale {precision.initial_loss_scale}",
        )
    if not precision.accumulate_allreduce_grads_in_fp32:
        yield _later(
            "--no-accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in float32; leave it out"
        )


def _pruning(config: Config, _world_size: int) -> Iterator[Problem]:
    pruning = config.pruning
    if not pruning.sparsify:
        return
    if pruning.pruning_end_iter < pruning.pruning_start_iter:
        yield _conflict(
            "--pruning-end-iter",
            f"{pruning.pruning_end_iter} is before --pruning-start-iter {pruning.pruning_start_iter}",
        )
    if pruning.final_sparsity < pruning.initial_sparsity:
        yield _conflict(
            "--final-sparsity", f"{pruning.final_sparsity} is below --initial-sparsity {pruning.initial_sparsity}"
        )
    whole = pruning.pruning_mode != "unstructured" or pruning.pruning_scope != "global"
    if whole and config.parallel.zero_stage:
        yield _later(
            "--pruning-mode",
            f"{pruning.pruning_mode} by --pruning-scope {pruning.pruning_scope} needs whole matrices; with --zero-stage"
            f" {config.parallel.zero_stage} use unstructured and global",
        )
    if pruning.pruning_mode == "2:4" and pruning.final_sparsity > 0.5:
        yield _conflict("--final-sparsity", f"{pruning.final_sparsity}: --pruning-mode 2:4 prunes 0.5 at most")


def _freezing(config: Config, _world_size: int) -> Iterator[Problem]:
    try:
        steps = config.freezing.freeze_steps
    except UsageError as error:
        yield Problem("--freeze-schedule", "form", str(error))
        return
    for step, layers in steps:
        if layers > config.model.num_layers:
            yield _conflict(
                "--freeze-schedule",
                f"{step}:{layers} freezes {layers} blocks; the model has --num-layers {config.model.num_layers}",
            )
    adaptive = config.freezing.freeze_adaptive
    if adaptive and steps:
        yield _conflict("--freeze-adaptive", "cannot be combined with --freeze-schedule; give one of them")
    if config.freezing.freeze_tied and not steps and not adaptive:
        yield _conflict("--freeze-tied", "has no effect without --freeze-schedule or --freeze-adaptive")
    cached = config.freezing.freeze_cache_activations is not None
    if cached and not steps and not adaptive:
        yield _conflict("--freeze-cache-activations", "has no effect without --freeze-schedule or --freeze-adaptive")
    elif cached and not (config.model.untie_embeddings_and_output_weights or config.freezing.freeze_tied):
        yield _conflict(
            "--freeze-cache-activations",
            "needs --freeze-tied or --untie-embeddings-and-output-weights: else the frozen embedding's weight goes on"
            " training through the head",
        )
    if adaptive and config.parallel.zero_stage:
        yield _later(
            "--freeze-adaptive", f"cannot compare layers under --zero-stage {config.parallel.zero_stage}; write 0"
        )
    if cached and (config.depth.mod_capacity is not None or config.exits.early_exit_layers is not None):
        yield _conflict(
            "--freeze-cache-activations",
            "cannot be combined with --mod-capacity or --early-exit-layers, where a sample's microbatch matters",
        )
    if config.freezing.freeze_tied and config.model.untie_embeddings_and_output_weights:
        yield _conflict("--freeze-tied", "has no effect with --untie-embeddings-and-output-weights")


def _changed_model(config: Config, _world_size: int) -> Iterator[Problem]:
    """Mixture of depths, early exit and sparse attention change the model's items."""
    depth, exits, attention = config.depth, config.exits, config.attention
    asked = {
        "--mod-capacity": depth.mod_capacity is not None,
        "--early-exit-layers": exits.early_exit_layers is not None,
        "--sparse-attention": attention.sparse_attention,
    }
    for flag in (flag for flag, on in asked.items() if on and config.model.family not in ONE_STREAM):
        yield _later(flag, f"works with {', '.join(ONE_STREAM)}; the model is {config.model.family}")
    if depth.mod_capacity is not None and depth.mod_every > config.model.num_layers:
        yield _conflict(
            "--mod-every", f"{depth.mod_every} routes none of --num-layers {config.model.num_layers} blocks"
        )
    try:
        layers = exits.exit_layers
    except UsageError as error:
        yield Problem("--early-exit-layers", "form", str(error))
        return
    if layers and layers[-1] >= config.model.num_layers - 1:
        yield _conflict(
            "--early-exit-layers",
            f"{layers[-1]}: behind the last of --num-layers {config.model.num_layers} blocks (numbered from 0) nothing"
            " is left to skip",
        )
    if layers and depth.mod_capacity is not None:
        yield _conflict("--early-exit-layers", "cannot be combined with --mod-capacity; give one of them")
    if layers and config.parallel.tensor_model_parallel_size > 1:
        yield _later(
            "--early-exit-layers",
            f"its heads are not cut by --tensor-model-parallel-size {config.parallel.tensor_model_parallel_size};"
            " write 1",
        )
    if attention.sparse_attention and attention.sparse_attention_buckets % 2:
        yield _conflict("--sparse-attention-buckets", f"{attention.sparse_attention_buckets} is not an even number")


def _data(config: Config, _world_size: int) -> Iterator[Problem]:
    data = config.data
    try:
        shares, own = data.split_shares, data.part_blends
        blend = data.blend
    except UsageError as error:
        yield Problem(str(error).split(" ", 1)[0], "form", str(error))
        return
    if blend and any(own):
        yield _conflict(
            "--data-path", "cannot be combined with --train-data-path and its kin; they make --split needless"
        )
    elif blend and not shares[0]:
        yield _conflict("--split", f"{data.split!r} leaves nothing to train on")
    if data.tokenizer_type == "NullTokenizer" and (data.tokenizer_model or data.vocab_file or data.merge_file):
        yield _conflict("--tokenizer-type", "NullTokenizer reads no file; leave the files out, or give their type")


def _balance(config: Config, _world_size: int) -> Iterator[Problem]:
    balance = config.balance
    if balance.balance == "offline" and balance.plan is None:
        yield _conflict("--balance", "offline needs --plan FILE")
    if balance.balance_lockstep and balance.balance != "online":
        yield _conflict("--balance-lockstep", f"needs --balance online, is {balance.balance}")
    if balance.balance == "online" and config.parallel.pipeline_model_parallel_size < 2:
        yield _conflict("--balance", "online needs two or more pipeline positions to move layers between")


def _run(config: Config, _world_size: int) -> Iterator[Problem]:
    run = config.run
    if run.run_dir is not None and run.save is not None and run.run_dir != run.save:
        yield _conflict("--save", f"{run.save!r} and --run-dir {run.run_dir!r} both name the run directory; give one")


RULES: tuple[Rule, ...] = (
    _shape,
    _family,
    _routing,
    _batch,
    _length,
    _workers,
    _tensor,
    _sequence,
    _experts,
    _zero,
    _stages,
    _microbatches,
    _learning_rate,
    _precision,
    _pruning,
    _freezing,
    _changed_model,
    _data,
    _balance,
    _run,
)


def validate(config: Config, world_size: int) -> list[Problem]:
    """Every contradiction between options, for a run of ``world_size`` processes."""
    return [problem for rule in RULES for problem in rule(config, world_size)]


def check(config: Config, world_size: int) -> None:
    """Raise ``DocumentError``, exit code 2, with every contradiction if there is any."""
    problems = validate(config, world_size)
    if problems:
        raise DocumentError("the configuration", problems)
