"""Tensor, context, pipeline, data and expert parallelism: ``[parallel]``."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..._common.document import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS
from ...formats.plan import V_SCHEDULES
from .. import panels
from ..options import DefaultContext, option
from ..pipeline_layout import blocks_per_stage, stages_of_layout

TWO_STAGE_SCHEDULES = ("interleaved-1f1b", *V_SCHEDULES)
DdpImpl = Literal["local", "torch"]
ZeroGradientSync = Literal["microbatch", "step"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zb-v", "dualpipe-v", "custom"]


def virtual_stages_from_blocks(values: Mapping[str, Any]) -> int:
    """Stages per pipeline rank by Megatron's rule: 24 blocks on 4 ranks in stages of 3 blocks are 2 stages per rank."""
    blocks, ranks = values["num_layers_per_virtual_pipeline_stage"], values["pipeline_model_parallel_size"]
    if blocks is None:
        return stages_of_layout(values["pipeline_model_parallel_layout"], ranks)
    ends = values["account_for_embedding_in_pipeline_split"] + values["account_for_loss_in_pipeline_split"]
    return max(1, int((values["num_layers"] + ends) // ranks // blocks))


def _implies_replicas(values: Mapping[str, Any], context: DefaultContext) -> bool:
    """Whether the given options imply a pipeline size of 1, as in Megatron."""
    return bool(
        values["zero_stage"] or context.given & {"tensor_model_parallel_size", "context_parallel_size", "DDP_impl"}
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Tensor, context, pipeline, data and expert parallelism."""

    PANEL: ClassVar[str] = panels.PARALLELISM

    tensor_model_parallel_size: int = option(
        "Tensor-parallel size in ranks.", default=1, minimum=1, maximum=MAX_RANKS, common=True
    )
    sequence_parallel: bool = option(
        "Shard activations along the sequence dimension across tensor-parallel ranks.", default=False, common=True
    )
    async_tensor_parallel: bool = option(
        "Overlap products with the collectives of --sequence-parallel (symmetric memory).", default=False
    )
    context_parallel_size: int = option(
        "Context-parallel size: ranks that share the tokens of each sample.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
        common=True,
    )
    pipeline_model_parallel_size: int = option(
        "Pipeline-parallel size in ranks.",
        minimum=1,
        maximum=MAX_RANKS,
        derive=(
            "world size; 1 as in Megatron if --tensor-model-parallel-size, --context-parallel-size,"
            " --zero-stage or --DDP-impl is given",
            lambda v, context: 1 if _implies_replicas(v, context) else max(1, context.world_size),
        ),
        common=True,
    )
    data_parallel_size: int = option(
        "Data-parallel size in replicas.",
        minimum=1,
        flag=False,
        derive=(
            "world size / (tensor x context x pipeline)",
            lambda v, context: max(
                1,
                context.world_size
                // (v["tensor_model_parallel_size"] * v["pipeline_model_parallel_size"] * v["context_parallel_size"]),
            ),
        ),
    )
    expert_model_parallel_size: int = option(
        "Expert-parallel size: replicas that share the experts of a layer.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
        common=True,
    )
    moe_expert_slots: int | None = option(
        "Experts and copies of a layer per rank; none: no copies.",
        default=None,
        minimum=1,
        maximum=MAX_EXPERTS,
    )
    moe_expert_chunk_rows: int = option(
        "Rows of an expert that one rank computes together, with copies.", default=128, minimum=1, maximum=1 << 20
    )
    DDP_impl: DdpImpl = option(
        "Gradient reduction: after the step (local) or overlapped with backward (torch).",
        default="local",
    )
    grad_reduce_in_bf16: bool = option(
        "Sum gradients over replicas in bf16: half of the traffic; float32 otherwise.", default=False
    )
    zero_stage: int = option(
        "ZeRO stage: shard optimizer states (1), gradients too (2), parameters too (3).",
        default=0,
        minimum=0,
        maximum=3,
        common=True,
    )
    zero_gradient_sync: ZeroGradientSync = option(
        "When ZeRO reduces gradients: per microbatch (sharded sums) or step (whole).",
        derive=(
            "microbatch for --zero-stage 2 and 3, and 1 with --grad-reduce-in-bf16; else step",
            lambda v, _: "microbatch" if v["zero_stage"] >= 2 - v["grad_reduce_in_bf16"] else "step",
        ),
    )
    hsdp: int = option(
        "Hybrid sharding: number of replicas of ZeRO's shards.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        "Transformer blocks per virtual stage (interleaved-1f1b); sets --virtual-stages-per-worker.",
        default=None,
        minimum=1,
        maximum=MAX_LAYERS,
    )
    pipeline_model_parallel_layout: str | None = option(
        "Layers of each stage, such as Et|tt|tt|tL: embedding, blocks, loss.", default=None
    )
    decoder_first_pipeline_num_layers: int | None = option(
        "Blocks of the first pipeline rank; the others share the rest.", default=None, minimum=1, maximum=MAX_LAYERS
    )
    decoder_last_pipeline_num_layers: int | None = option(
        "Blocks of the last pipeline rank; the others share the rest.", default=None, minimum=1, maximum=MAX_LAYERS
    )
    account_for_embedding_in_pipeline_split: bool = option(
        "Count the embedding as a block of the first stage.", default=False
    )
    account_for_loss_in_pipeline_split: bool = option("Count the loss as a block of the last stage.", default=False)
    vocabulary_parallel: int | None = option(
        "Shards of word table and output layer, over all pipeline ranks.",
        default=None,
        minimum=1,
        maximum=4096,
    )
    schedule: Schedule = option(
        "Pipeline schedule; custom executes the operations in --plan.",
        derive=(
            "interleaved-1f1b if --num-layers-per-virtual-pipeline-stage or the layout makes several stages per rank,"
            " else 1f1b",
            lambda v, _: "interleaved-1f1b" if virtual_stages_from_blocks(v) > 1 else "1f1b",
        ),
        common=True,
    )
    virtual_stages_per_worker: int = option(
        "Number of stages per pipeline rank.",
        minimum=1,
        maximum=MAX_LAYERS,
        derive=(
            "from --num-layers-per-virtual-pipeline-stage or the layout; else 2 for interleaved-1f1b, zb-v and"
            " dualpipe-v, else 1",
            lambda v, _: (
                2
                if v["num_layers_per_virtual_pipeline_stage"] is None
                and v["pipeline_model_parallel_layout"] is None
                and v["schedule"] in TWO_STAGE_SCHEDULES
                else virtual_stages_from_blocks(v)
            ),
        ),
        common=True,
    )

    @property
    def has_layout(self) -> bool:
        """Whether an option of Megatron sets the number of blocks of stages."""
        return self != self.without_layout()

    def without_layout(self) -> ParallelConfig:
        """The same without options that set the number of blocks of stages."""
        return replace(
            self,
            pipeline_model_parallel_layout=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )

    def blocks_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """The number of blocks of each stage, by the options of Megatron.

        Args:
            num_layers: blocks of the model.

        Raises:
            UsageError: they do not fit the number of blocks or ranks.
        """
        return blocks_per_stage(
            num_layers,
            self.pipeline_model_parallel_size,
            self.virtual_stages_per_worker,
            layout=self.pipeline_model_parallel_layout,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            counts_embedding=self.account_for_embedding_in_pipeline_split,
            counts_loss=self.account_for_loss_in_pipeline_split,
        )

    @property
    def data_ranks(self) -> int:
        """Ranks over which gradients are reduced and ZeRO shards: replicas times context-parallel ranks."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards a parameter; 1 without ZeRO."""
        return self.data_ranks // self.hsdp if self.zero_stage else 1
