"""Rules over parallelism: tensor, pipeline, data and expert parallel sizes, schedules, microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..._common.document import MAX_MICROBATCHES, Problem
from ..._common.errors import UsageError
from ...formats.plan import V_SCHEDULES
from ..pipeline_layout import EMBEDDING_FLAG, FIRST_FLAG, LAST_FLAG, LAYOUT_FLAG, LOSS_FLAG
from ..schema import Config
from .problem import Rule, conflict, unsupported


def _workers(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if world_size % (tensor * context * pipeline):
        others = f"--tensor-model-parallel-size {tensor}"
        others += f" and --context-parallel-size {context}" if context > 1 else ""
        yield conflict(
            "--pipeline-model-parallel-size",
            f"is {pipeline}; times {others} it must divide the world size {world_size};"
            f" start with --nproc {tensor * context * pipeline}",
        )


def _experts(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    size, flag = parallel.expert_model_parallel_size, "--expert-model-parallel-size"
    if size == 1:
        return
    if model.num_experts is None:
        yield conflict(flag, f"is {size}; requires --num-experts")
    elif model.num_experts % size:
        yield conflict(flag, f"is {size}; must divide --num-experts {model.num_experts}")
    if parallel.data_ranks % size:
        context = "" if parallel.context_parallel_size == 1 else ", context-parallel ranks counted"
        yield conflict(flag, f"is {size}; must divide the {parallel.data_ranks} data-parallel replicas{context}")
    slots, flag = parallel.moe_expert_slots, "--moe-expert-slots"
    if slots is None:
        return
    if slots * size < (model.num_experts or 0):
        least = -(-(model.num_experts or 0) // size)
        yield conflict(flag, f"is {slots} on {size} ranks; must be at least {least} for {model.num_experts} experts")
    if parallel.zero_stage:
        rule = "the gradients of copies are added to whole gradients, which ZeRO has not"
        yield unsupported(flag, f"cannot be combined with --zero-stage {parallel.zero_stage}: {rule}; remove one")
    if config.training.torch_compile:
        yield unsupported(flag, "cannot be combined with --torch-compile: chunks run uncompiled; remove one")


def _context(config: Config, _world_size: int) -> Iterator[Problem]:
    """Lengths that can be cut, and what does not know that a rank has a part of the tokens."""
    parallel, model, training = config.parallel, config.model, config.training
    size, flag = parallel.context_parallel_size, "--context-parallel-size"
    if size == 1:
        return
    parts = 2 * size
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 2:
        parts = size * math.lcm(2, parallel.tensor_model_parallel_size)
    if model.seq_length % parts:
        yield conflict("--seq-length", f"is {model.seq_length}; must be a multiple of {parts} with {flag} {size}")
    if model.base_family not in ("gpt", "llama"):
        yield unsupported(flag, f"requires family gpt or llama, is {model.family}; remove it")
    others = {
        "--torch-compile": training.torch_compile,
        "--cuda-graph": training.cuda_graph,
        "--curriculum-shortest": training.curriculum_shortest is not None,
        "--grad-comp": config.compression.grad_comp,
        "--inter-grad-comp": config.compression.inter_grad_comp,
        "--emulate": config.emulation.emulate is not None,
        "--mod-capacity": config.depth.mod_capacity is not None,
        "--early-exit-layers": config.exits.early_exit_layers is not None,
        "--sparse-attention": config.attention.sparse_attention,
    }
    given = [name for name, is_given in others.items() if is_given]
    if given:
        yield unsupported(flag, f"is {size}; cannot be combined with {', '.join(given)}; remove one")


def _shards_decoder(config: Config) -> bool:
    """Whether decoder activations are sharded along the sequence."""
    return config.parallel.sequence_parallel and config.model.base_family == "t5"


def _tensor(config: Config, _world_size: int) -> Iterator[Problem]:
    """Sizes of sharded dimensions."""
    parallel, model = config.parallel, config.model
    size = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and size == 1:
        yield conflict("--sequence-parallel", "requires --tensor-model-parallel-size of at least 2")
    sharded = [
        ("--num-attention-heads", model.num_attention_heads),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size or size),
        ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size or size),
    ]
    sharded += [("--num-query-groups", model.num_query_groups)] if model.base_family == "llama" else []
    sharded += [("--seq-length", model.seq_length)] if parallel.sequence_parallel else []
    sharded += [("--decoder-seq-length", model.decoder_seq_length)] if _shards_decoder(config) else []
    for flag, value in sharded:
        if value % size:
            yield conflict(flag, f"is {value}; must be a multiple of --tensor-model-parallel-size {size}")


def _stages(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.num_layers
    sublayer = config.balance.granularity == "sublayer"
    items = layers * (2 if sublayer else 1) + 2 + config.model.mtp_num_layers
    # The decoder adds its embedding and its blocks. Encoder norm and pooler are items of their own at the granularity
    # ``sublayer``, else a part of the last block before them. The towers of an ICT share the head.
    if config.model.base_family == "t5":
        items += config.model.decoder_num_layers * (3 if sublayer else 1) + (2 if sublayer else 1)
    if config.model.base_family == "ict":
        items = 2 * items if sublayer else 2 * items - 1
    if config.num_stages > items:
        unit = "attentions and MLPs" if sublayer else "block" if items == 3 else "blocks"
        yield conflict(
            "--pipeline-model-parallel-size",
            f"makes {config.num_stages} stages; must be at most the {items} layers of the model: embedding, {items - 2}"
            f" {unit}, head",
        )
    virtual = parallel.virtual_stages_per_worker
    if parallel.schedule == "interleaved-1f1b" and virtual < 2:
        yield conflict(
            "--virtual-stages-per-worker",
            f"is {virtual}; must be at least 2 with interleaved-1f1b; or use --schedule 1f1b",
        )
    if parallel.schedule in V_SCHEDULES and virtual != 2:
        yield conflict("--virtual-stages-per-worker", f"is {virtual}; must be 2 with --schedule {parallel.schedule}")
    if parallel.schedule in ("gpipe", "1f1b") and virtual > 1:
        yield conflict(
            "--virtual-stages-per-worker",
            f"is {virtual}; must be 1 with {parallel.schedule}; or use --schedule interleaved-1f1b or zero-bubble",
        )


def _virtual(config: Config, _world_size: int) -> Iterator[Problem]:
    """Megatron's conditions for interleaving."""
    parallel, model = config.parallel, config.model
    blocks, workers = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    flag = "--num-layers-per-virtual-pipeline-stage"
    if blocks is None:
        return
    if model.base_family in ("t5", "ict"):
        yield conflict(flag, f"is not supported for {model.family}; use --virtual-stages-per-worker")
        return
    if workers < 2:
        yield conflict(flag, f"is {blocks}; requires --pipeline-model-parallel-size of at least 2")
    ends = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    layers = model.num_layers + ends
    if layers % (workers * blocks):
        yield conflict(
            flag,
            f"is {blocks}; times --pipeline-model-parallel-size {workers} it must divide --num-layers"
            f" {model.num_layers}" + f" plus {ends}" * bool(ends),
        )
    elif workers * blocks * parallel.virtual_stages_per_worker != layers:
        yield conflict(
            flag,
            f"is {blocks}, which means {layers // workers // blocks} stages, but --virtual-stages-per-worker"
            f" is {parallel.virtual_stages_per_worker}; remove one",
        )


def _layout(config: Config, _world_size: int) -> Iterator[Problem]:
    """Megatron's conditions for options that set the blocks of stages."""
    parallel, model = config.parallel, config.model
    if not parallel.has_layout:
        return
    layout, ends = (
        parallel.pipeline_model_parallel_layout,
        (
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
        ),
    )
    flag = LAYOUT_FLAG if layout is not None else FIRST_FLAG if ends[0] is not None else LAST_FLAG
    if layout is None and ends == (None, None):
        flag = EMBEDDING_FLAG if parallel.account_for_embedding_in_pipeline_split else LOSS_FLAG
    if model.base_family in ("t5", "ict"):
        yield conflict(flag, f"is not supported for {model.family}; use --plan with a plan of dynmo-plan partition")
        return
    if parallel.schedule in (*V_SCHEDULES, "custom"):
        yield conflict(flag, f"is not supported with --schedule {parallel.schedule}; use 1f1b or interleaved-1f1b")
    accounts = parallel.account_for_embedding_in_pipeline_split or parallel.account_for_loss_in_pipeline_split
    groups = [layout is not None, ends != (None, None), accounts]
    if sum(groups) > 1:
        others = f"{LAYOUT_FLAG}, {FIRST_FLAG} and {LAST_FLAG}, {EMBEDDING_FLAG} and {LOSS_FLAG}"
        yield conflict(flag, f"excludes other options of stages; give one of {others}")
        return
    if parallel.num_layers_per_virtual_pipeline_stage is not None and not accounts:
        yield conflict("--num-layers-per-virtual-pipeline-stage", f"excludes {flag}; use --virtual-stages-per-worker")
        return
    if config.balance.plan is not None:
        yield conflict(flag, "excludes --plan, which has the stages; remove one")
        return
    try:
        stages = len(parallel.blocks_of_stages(model.num_layers))
    except UsageError as error:
        yield conflict(flag, str(error).removeprefix(f"{flag}: ").removeprefix(f"{flag} "))
        return
    if stages != config.num_stages:
        yield conflict(
            flag,
            f"has {stages} stages, but --virtual-stages-per-worker is {parallel.virtual_stages_per_worker}; remove one",
        )


def _batch_size_flag(config: Config) -> str:
    """The option that sets the batch sizes of a run."""
    training = config.training
    if training.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule"
    return "--global-batch-size" if training.rampup_batch_size is None else "--rampup-batch-size"


def _microbatches(config: Config, _world_size: int) -> Iterator[Problem]:
    """Conditions of the schedules of torch.distributed.pipelining, for all batch sizes."""
    parallel, workers = config.parallel, config.parallel.pipeline_model_parallel_size
    try:
        sizes = config.batch_sizes.sizes()
    except UsageError:
        return
    flag = _batch_size_flag(config) if len(sizes) > 1 else "--global-batch-size"
    for size in sizes:
        microbatches = size // (config.training.micro_batch_size * parallel.data_parallel_size)
        if not microbatches:
            return  # reported by the rule of --global-batch-size
        if microbatches > MAX_MICROBATCHES:
            yield conflict(
                flag, f"is {size}, which makes {microbatches:,} microbatches; must make at most {MAX_MICROBATCHES:,}"
            )
            return
        rounds = max(1, microbatches // workers)
        if parallel.schedule in ("interleaved-1f1b", "zero-bubble") and microbatches % rounds:
            yield conflict(
                flag,
                f"is {size}, which makes {microbatches} microbatches; must make a multiple of {rounds} with"
                f" {parallel.schedule} on {workers} pipeline ranks, such as {workers * rounds}",
            )
            return
        if parallel.schedule == "dualpipe-v" and microbatches < 2 * workers:
            yield conflict(
                flag,
                f"is {size}, which makes {microbatches} microbatches; must make at least {2 * workers} with dualpipe-v"
                f" on {workers} pipeline ranks, one per stage; or use --schedule zb-v",
            )
            return


def _custom(config: Config, _world_size: int) -> Iterator[Problem]:
    """A custom schedule is for one partition and one number of microbatches."""
    if config.parallel.schedule != "custom":
        return
    if config.balance.balance != "offline" or config.balance.plan is None:
        yield conflict("--schedule", "custom requires --balance offline and --plan FILE with operations")
    if len(config.batch_sizes.sizes()) > 1:
        flag = _batch_size_flag(config)
        yield conflict("--schedule", f"custom requires a constant number of microbatches; remove {flag}")


def _reduction(config: Config, _world_size: int) -> Iterator[Problem]:
    """ZeRO with one reduction per step would keep the sums over microbatches in bf16 as well."""
    parallel = config.parallel
    if parallel.grad_reduce_in_bf16 and parallel.zero_stage and parallel.zero_gradient_sync == "step":
        yield unsupported(
            "--grad-reduce-in-bf16",
            f"is given with --zero-stage {parallel.zero_stage} --zero-gradient-sync step; give --zero-gradient-sync"
            " microbatch",
        )


def _hybrid(config: Config, _world_size: int) -> Iterator[Problem]:
    """Sizes of the replicas of ZeRO's shards."""
    parallel = config.parallel
    copies, replicas, flag = parallel.hsdp, parallel.data_parallel_size, "--hsdp"
    if copies == 1 or not parallel.zero_stage or parallel.data_ranks == 1:
        return
    if replicas % copies:
        yield conflict(flag, f"is {copies}; must divide the {replicas} data-parallel replicas")
    elif parallel.data_ranks == copies:
        yield conflict(
            flag,
            f"is {copies}, the number of data-parallel replicas, so that nothing is sharded; must be smaller, or use"
            " --zero-stage 0",
        )
    elif parallel.data_ranks // copies % parallel.expert_model_parallel_size:
        yield conflict(
            flag,
            f"is {copies}, which shards over {parallel.data_ranks // copies} replicas; these must be a multiple of"
            f" --expert-model-parallel-size {parallel.expert_model_parallel_size}",
        )


def _vocabulary(config: Config, _world_size: int) -> Iterator[Problem]:
    """What the shards of the vocabulary do not combine with."""
    parallel, model, shards = config.parallel, config.model, config.parallel.vocabulary_parallel
    if shards is None:
        return
    flag = "--vocabulary-parallel"
    if shards < parallel.pipeline_model_parallel_size or shards > model.vocab_size:
        yield conflict(
            flag,
            f"is {shards}; must be at least --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} and"
            f" at most the {model.vocab_size:,} tokens of the vocabulary",
        )
    elif model.base_family not in ("gpt", "llama"):
        yield unsupported(flag, f"requires family gpt or llama, is {model.family}; remove it")
    given = {
        "--optimizer adafactor, whose state is not per row": config.optimizer.optimizer == "adafactor",
        "--early-exit-layers, whose exits need the whole output layer": config.exits.early_exit_layers is not None,
        "--inter-grad-comp, which knows the plain schedules": config.compression.inter_grad_comp,
        "--grad-comp, which compresses the items of stages": config.compression.grad_comp,
        "--emulate, whose profile has no times of shards": config.emulation.emulate is not None,
    }
    others = [name for name, is_given in given.items() if is_given]
    if others:
        yield unsupported(flag, f"cannot be combined with {', or '.join(others)}; remove one")


PARALLEL_RULES: tuple[Rule, ...] = (
    _workers,
    _reduction,
    _hybrid,
    _experts,
    _context,
    _tensor,
    _stages,
    _virtual,
    _layout,
    _microbatches,
    _custom,
    _vocabulary,
)
