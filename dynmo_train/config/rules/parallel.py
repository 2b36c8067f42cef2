"""Rules over the layout of workers: tensor, pipeline, data and expert parallel, schedules, microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.document import MAX_MICROBATCHES, Problem
from ..._common.errors import UsageError
from ..schema import Config
from .problem import Rule, conflict


def _workers(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        yield conflict(
            "--pipeline-model-parallel-size",
            f"{pipeline} x --tensor-model-parallel-size {tensor} does not divide the {world_size} processes of this"
            f" run; start with --nproc {tensor * pipeline}",
        )


def _experts(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    size, flag = parallel.expert_model_parallel_size, "--expert-model-parallel-size"
    if size == 1:
        return
    if model.num_experts is None:
        yield conflict(flag, f"{size} needs --num-experts")
    elif model.num_experts % size:
        yield conflict(flag, f"{size} does not divide --num-experts {model.num_experts}")
    if parallel.data_parallel_size % size:
        yield conflict(flag, f"{size} does not divide the {parallel.data_parallel_size} data-parallel replicas")


def _cuts_answers(config: Config) -> bool:
    """Whether a decoder's stream is cut along its tokens."""
    return config.parallel.sequence_parallel and config.model.base_family == "t5"


def _tensor(config: Config, _world_size: int) -> Iterator[Problem]:
    """What tensor parallelism cuts must divide."""
    parallel, model = config.parallel, config.model
    size = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and size == 1:
        yield conflict("--sequence-parallel", "needs --tensor-model-parallel-size 2 or more")
    cut = [
        ("--num-attention-heads", model.num_attention_heads),
        ("--ffn-hidden-size", model.ffn_hidden_size),
    ]
    cut += [("--num-query-groups", model.num_query_groups)] if model.base_family == "llama" else []
    cut += [("--seq-length", model.seq_length)] if parallel.sequence_parallel else []
    cut += [("--decoder-seq-length", model.decoder_seq_length)] if _cuts_answers(config) else []
    for flag, value in cut:
        if value % size:
            yield conflict(flag, f"{value} is not a multiple of --tensor-model-parallel-size {size}, which cuts it")


def _stages(config: Config, _world_size: int) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.num_layers
    sublayer = config.balance.granularity == "sublayer"
    items = layers * (2 if sublayer else 1) + 2
    if config.model.base_family == "t5":
        items += config.model.decoder_num_layers * (3 if sublayer else 1) + (2 if sublayer else 1)
    if config.model.base_family == "ict":
        items = 2 * items if sublayer else 2 * items - 1
    if config.num_stages > items:
        parts = "blocks and MLPs apart" if sublayer else "blocks"
        yield conflict(
            "--pipeline-model-parallel-size",
            f"{config.num_stages} stages are more than the {items} items of the model: embedding, {items - 2} {parts},"
            " head",
        )
    virtual = parallel.virtual_stages_per_worker
    if parallel.schedule == "interleaved-1f1b" and virtual < 2:
        yield conflict(
            "--virtual-stages-per-worker", f"{virtual}: interleaved-1f1b needs 2 or more; or use --schedule 1f1b"
        )
    if parallel.schedule == "zb-v" and virtual != 2:
        yield conflict(
            "--virtual-stages-per-worker", f"{virtual}: zb-v runs 2 stages a worker; write 2 or leave it out"
        )
    if parallel.schedule in ("gpipe", "1f1b") and virtual > 1:
        yield conflict(
            "--virtual-stages-per-worker",
            f"{virtual}: {parallel.schedule} runs one stage a worker; use --schedule interleaved-1f1b or zero-bubble",
        )


def _virtual(config: Config, _world_size: int) -> Iterator[Problem]:
    """Megatron's conditions of interleaving by blocks."""
    parallel, model = config.parallel, config.model
    blocks, workers = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    flag = "--num-layers-per-virtual-pipeline-stage"
    if blocks is None:
        return
    if model.base_family in ("t5", "ict"):
        yield conflict(flag, f"{model.family} has two stacks of blocks; use --virtual-stages-per-worker")
        return
    if workers < 2:
        yield conflict(flag, f"{blocks} needs --pipeline-model-parallel-size 2 or more")
    if model.num_layers % (workers * blocks):
        yield conflict(
            flag,
            f"{blocks} x --pipeline-model-parallel-size {workers} does not divide --num-layers {model.num_layers}",
        )
    elif workers * blocks * parallel.virtual_stages_per_worker != model.num_layers:
        yield conflict(
            flag,
            f"{blocks} means {model.num_layers // workers // blocks} virtual stages, --virtual-stages-per-worker is"
            f" {parallel.virtual_stages_per_worker}; give one of them",
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
        if microbatches > MAX_MICROBATCHES:
            yield conflict(flag, f"{size} makes {microbatches:,} microbatches; a step has at most {MAX_MICROBATCHES:,}")
            return
        rounds = max(1, microbatches // workers)
        if parallel.schedule in ("interleaved-1f1b", "zero-bubble") and microbatches % rounds:
            yield conflict(
                flag,
                f"{size} makes {microbatches} microbatches; {parallel.schedule} on {workers} workers needs a multiple"
                f" of the {rounds} rounds, such as {workers * rounds}",
            )
            return


def _custom(config: Config, _world_size: int) -> Iterator[Problem]:
    """A plan's own operations are of one partition and one number of microbatches."""
    if config.parallel.schedule != "custom":
        return
    if config.balance.balance != "offline" or config.balance.plan is None:
        yield conflict("--schedule", "custom needs --balance offline and --plan FILE, whose operations it runs")
    if len(config.batch_sizes.sizes()) > 1:
        yield conflict("--schedule", "custom has one number of microbatches; leave --rampup-batch-size out")


PARALLEL_RULES: tuple[Rule, ...] = (
    _workers,
    _experts,
    _tensor,
    _stages,
    _virtual,
    _microbatches,
    _custom,
)
