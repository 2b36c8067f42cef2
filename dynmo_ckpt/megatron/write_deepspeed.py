"""Plans a Megatron-DeepSpeed checkpoint: one module per tensor-parallel rank, optimizer state of ZeRO 1. Pure.

Each tensor-parallel rank has ``mp_rank_TT_model_states.pt`` and, with optimizer state, one shard. The float32 weights
of a parameter group are one flat buffer, and so is each of Adam's moments: the group with weight decay, then the one
without, each in the order of the module. DeepSpeed loads it with a data-parallel size of 1; its converter
``ds_to_universal`` changes that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._common.errors import UsageError
from ..io.errors import UnsupportedError
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..native.reshard import check_divisible
from ..tensors.copy_plan import OutputTensor
from ..torch_save.pickles import GlobalName
from ..torch_save.writer import ConstantStorages, NewCall, NewObject, NewTensor, TorchSaveFile
from .model_sizes import legacy_args, megatron_rows
from .read_optimizer import module_order
from .rng_state import rng_states
from .training_progress import TrainingProgress, adam_groups, megatron_args, progress_of
from .write import check_supported, nested_model
from .write_optimizer import MOMENTS, Moments, mapped_moments

VERSION = "0.9.0"  # of the file format; DeepSpeed compares it with the oldest version that it loads
ADDRESS = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
STAGE = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")


def plan_deepspeed(
    checkpoint: NativeCheckpoint, *, tensor_parallel_size: int, dtype: str | None = None, with_optimizer: bool = False
) -> tuple[list[TorchSaveFile], dict[str, bytes]]:
    """Plan the files of all ranks, and the file that names the step.

    Args:
        checkpoint: the input; pruned weights become zeros.
        tensor_parallel_size: number of tensor-parallel ranks.
        dtype: type of the weights, as in safetensors; None keeps the type of the input.
        with_optimizer: include the optimizer state.

    Raises:
        UnsupportedError: a family other than GPT and Llama, sizes that the ranks do not divide, or a tensor without a
            map.
        UsageError: weights of several types.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    if model["family"] not in ("gpt", "llama"):
        raise UnsupportedError(
            f"Megatron-DeepSpeed: the family {model['family']} is not supported, only gpt and llama; use --to native"
        )
    check_supported(model, 3.0, "Megatron-DeepSpeed")
    check_divisible(model, tensor_parallel_size)
    layout = layout_of(
        load_map(f"legacy_{model['family']}", "2"), model, foreign_vocab_size=megatron_rows(model, tensor_parallel_size)
    )
    stored = checkpoint.weights()
    masks = checkpoint.masks()
    types = {dtype or stored[name].dtype for name in stored}
    if with_optimizer and len(types) > 1:
        raise UsageError(f"weights have the types {', '.join(sorted(types))}; choose one with --dtype")
    tag = f"global_step{checkpoint.manifest['step']}"
    progress = progress_of(checkpoint.manifest)
    args = legacy_args(model, tensor_parallel_size, 1, 3.0, None, "Megatron-DeepSpeed") | megatron_args(progress)
    files = []
    for rank in range(tensor_parallel_size):
        mapped = {m.name: m for m in to_foreign(layout, stored, ties, masks, rank=rank, ranks=tensor_parallel_size)}
        groups = [[n for n in module_order(mapped) if (len(mapped[n].shape) > 1) is wide] for wide in (True, False)]
        tree = _model_tree(checkpoint, args, progress, groups if with_optimizer else None, mapped)
        files.append(_model_file(f"{tag}/mp_rank_{rank:02d}_model_states.pt", tree, mapped, progress, rank, dtype))
        if with_optimizer:
            moments = mapped_moments(checkpoint, layout, rank=rank, ranks=tensor_parallel_size)
            # The shards of DeepSpeed's BF16_Optimizer have this prefix; a loader searches for one name only.
            prefix = "bf16_" if types == {"BF16"} else ""
            name = f"{tag}/{prefix}zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
            files.append(_shard(name, checkpoint, progress, groups, mapped, moments))
    return files, {"latest": tag.encode()}


def _model_tree(
    checkpoint: NativeCheckpoint,
    args: Mapping[str, Any],
    progress: TrainingProgress,
    groups: Sequence[Sequence[str]] | None,
    mapped: Mapping[str, MappedTensor],
) -> dict[str, Any]:
    """The contents of a model file, except the module and the random states."""
    step = checkpoint.manifest["step"]
    tree: dict[str, Any] = {
        "buffer_names": [],
        "optimizer": None,
        "lr_scheduler": None if progress.scheduler is None else dict(progress.scheduler),
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": progress.consumed_train_samples,
        "dp_world_size": 1,
        "mp_world_size": args["tensor_model_parallel_size"],
        "ds_config": {},
        "ds_version": VERSION,
        "iteration": step,
        "args": NewObject(GlobalName("argparse", "Namespace"), args),
        "checkpoint_version": 3.0,
    }
    if groups is not None:
        # In the order of the flat buffers: ds_to_universal cuts them by these shapes alone.
        tree["param_shapes"] = [
            {n: NewCall(GlobalName("torch", "Size"), (mapped[n].shape,)) for n in g} for g in groups
        ]
        tree |= {"frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None}
    return tree


def _model_file(
    name: str,
    tree: dict[str, Any],
    mapped: Mapping[str, MappedTensor],
    progress: TrainingProgress,
    rank: int,
    dtype: str | None,
) -> TorchSaveFile:
    tensors: list[OutputTensor] = []
    constants = ConstantStorages()
    tree["module"] = nested_model(mapped, 3.0, tensors, dtype)
    tree["rng_state"] = rng_states(progress.seed, tensor_rank=rank, stage=0, constants=constants)
    return TorchSaveFile(name=name, tensors=tuple(tensors), tree=tree, constants=constants.payloads)


def _shard(
    name: str,
    checkpoint: NativeCheckpoint,
    progress: TrainingProgress,
    groups: Sequence[Sequence[str]],
    mapped: Mapping[str, MappedTensor],
    moments: Moments,
) -> TorchSaveFile:
    """The only shard: the flat buffers of each group, as in ZeRO 1."""
    optimizer = checkpoint.manifest["optimizer"]
    tensors: list[OutputTensor] = []
    lengths: list[int] = []

    def flat(kind: str, parameters: Sequence[MappedTensor]) -> NewTensor:
        for each in parameters:
            cast = None if each.content.dtype == "F32" else "F32"
            key = f"{kind}/{each.name}"
            tensors.append(OutputTensor(key=key, shape=each.shape, content=each.content, mask=each.mask, cast=cast))
        lengths.append(len(parameters))
        return NewTensor(len(lengths) - 1, "F32", (sum(math.prod(each.shape) for each in parameters),))

    decay = max((group["weight_decay"] for group in optimizer["groups"]), default=0.0)
    state, masters, described = {}, [], []
    for number, (names, fields) in enumerate(zip(groups, adam_groups(progress, decay), strict=True)):
        steps = {optimizer["steps"].get(mapped[n].source_name, 0) for n in names}
        if len(steps) > 1:
            raise UnsupportedError(
                f"{checkpoint.directory}: its parameters did {sorted(steps)} optimizer steps; DeepSpeed stores one "
                "number; use --no-optimizer or --to native"
            )
        done = max(steps, default=0)
        # ZeRO has one flat parameter for each group, so the optimizer state has one entry for each group.
        state[number] = {"step": done} | {kind: flat(kind, [moments[kind][n] for n in names]) for kind in MOMENTS}
        described.append({**fields, "step": done, "params": [number]})
        masters.append(flat("master", [mapped[n] for n in names]))
    optimizer_state: dict[str, Any] = {
        "dynamic_loss_scale": progress.loss_scale is not None,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": {"state": state, "param_groups": described},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": NewCall(STAGE, (1,)),
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "ds_version": VERSION,
        "param_slice_mappings": [_addresses(names, mapped) for names in groups],
    }
    if progress.loss_scale is not None:
        optimizer_state["loss_scaler"] = _loss_scaler(progress.loss_scale)
    tree = {"optimizer_state_dict": optimizer_state, "ds_config": {}, "ds_version": VERSION}
    return TorchSaveFile(name=name, tensors=tuple(tensors), tree=tree, lengths=tuple(lengths))


def _loss_scaler(scale: Mapping[str, int | float]) -> NewObject:
    """DeepSpeed's dynamic loss scaler, which counts from the last overflow and grows after each window."""
    # The window must be longer than the clean steps, which readers take modulo the window. 1000 is the default.
    window = 1000
    while window <= scale["clean_steps"]:
        window *= 2
    fields = {
        "cur_scale": float(scale["scale"]),
        "cur_iter": int(scale["clean_steps"]),
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": window,
        "min_scale": 1,
        "delayed_shift": max(1, int(scale["overflows_left"])),
        "cur_hysteresis": int(scale["overflows_left"]),
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": GlobalName("torch", "float16"),
    }
    return NewObject(GlobalName("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), fields)


def _addresses(names: Sequence[str], mapped: Mapping[str, MappedTensor]) -> dict[str, NewObject]:
    """Begin and length of each parameter in the flat buffer of its group."""
    found, at = {}, 0
    for name in names:
        count = math.prod(mapped[name].shape)
        found[name] = NewObject(ADDRESS, {"numel": count, "start": at})
        at += count
    return found
