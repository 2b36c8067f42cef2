"""Writes or loads a checkpoint with Megatron-core's own optimizer on CPU; run as a program by each rank.

    python megatron_optimizer.py save|load KIND MODEL DIRECTORY TENSOR_SIZE EXPERT_SIZE STAGES BUCKET_SIZE

``KIND`` is a form of the distributed optimizer's state, or ``plain`` for the optimizer without it. ``MODEL`` is
``gpt``, ``llama``, or a family and its names such as ``qwen3-moe/te``. Next to the checkpoint, ``DIRECTORY.state-RANK``
has what the optimizer of each rank holds in memory, by name of the parameter: it does not come from any code that
writes checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

SIZES = {"layers": 2, "width": 16, "heads": 4, "inner": 40, "vocabulary": 64, "tokens": 12, "groups": 2}
STEPS = 3


def without_cuda() -> contextlib.ExitStack:
    """Replaces the uses of CUDA that only place tensors or look at their type."""
    import torch

    own_type, stack = torch.Tensor.type, contextlib.ExitStack()

    def kind(self: Any, *arguments: Any, **options: Any) -> Any:
        found = own_type(self, *arguments, **options)
        return found if arguments or options else found.replace("torch.", "torch.cuda.")

    def on_cpu(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*arguments, **options)

        return made

    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "type", kind),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", mock.MagicMock()),
        (torch.cuda, "default_stream", mock.MagicMock()),
        *((torch, name, on_cpu(getattr(torch, name))) for name in ("empty", "zeros", "tensor", "full", "ones")),
    ]
    for owner, name, value in replaced:
        stack.enter_context(mock.patch.object(owner, name, value))
    return stack


def built(model_kind: str, tensor_size: int, expert_size: int) -> Any:
    """A model in bfloat16, or the layers of this stage."""
    import torch
    from megatron.core import parallel_state

    from tests.parity import megatron_core, megatron_families

    config_of = megatron_core.config_of
    half = {"tensor_model_parallel_size": tensor_size, "bf16": True, "params_dtype": torch.bfloat16}
    torch.manual_seed(0)
    if "/" in model_kind:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages > 1:
            half |= {"pipeline_model_parallel_size": stages, "pipeline_dtype": torch.bfloat16}
        model = megatron_families.built(
            *model_kind.split("/"),
            is_first=parallel_state.is_pipeline_first_stage(),
            is_last=parallel_state.is_pipeline_last_stage(),
            expert_model_parallel_size=expert_size,
            **half,
        )
        megatron_families.randomize(model, torch.distributed.get_rank() if expert_size > 1 else 0)
        return model.bfloat16()
    with mock.patch.object(megatron_core, "config_of", lambda sizes, **more: config_of(sizes, **half, **more)):
        return megatron_core.decoder(model_kind, SIZES).bfloat16()


def optimized(model: Any, kind: str, bucket_size: int | None) -> Any:
    """The optimizer of a model, before its first step."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_distributed = kind != "plain"
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed, bucket_size=bucket_size, overlap_grad_reduce=bucket_size is not None
    )
    ddp = DistributedDataParallel(model.config, buckets, model)
    settings = OptimizerConfig(
        lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=is_distributed, clip_grad=0.0
    )
    return get_megatron_optimizer(settings, [ddp])


def train(model: Any, optimizer: Any, tensor_size: int, steps: range = range(STEPS)) -> None:
    """Steps with random gradients, of the seeds ``steps``."""
    import torch

    from tests.parity.megatron_families import generator_of

    rank = torch.distributed.get_rank()
    for step in steps:
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator_of(model, name, step)) * 0.1
            # Tensor-parallel parts differ; replicas of a parameter have the same gradient.
            is_split = getattr(parameter, "tensor_model_parallel", False) and tensor_size > 1
            split = 1 + rank if is_split or not getattr(parameter, "allreduce", True) else 1
            parameter.main_grad.copy_(gradient * split)
        optimizer.step()


def state_in_memory(model: Any, optimizer: Any, *, is_distributed: bool) -> dict[str, Any]:
    """For each parameter of this rank the state, the begin of its part in elements, and the shape."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    found = {}
    for local_name, parameter in model.named_parameters():
        name = re.sub(
            r"^decoder\.layers\.(\d+)\.",
            lambda match: f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}.",
            local_name,
        )
        # The parameters of distributed experts have an optimizer of their own.
        inner = chained[0 if getattr(parameter, "allreduce", True) else -1]
        if not is_distributed:
            moments = inner.optimizer.state[parameter.main_param]
            state, begin = {"param": parameter.main_param, **moments}, 0
        elif parameter in inner.model_param_group_index_map:
            state, begin = state_of(inner, parameter), _begin(inner, parameter)
        else:
            continue
        parts = {kind: state[kind].detach().reshape(-1).clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
        found[name] = (parts, begin, tuple(parameter.shape))
    return found


def state_of(inner: Any, parameter: Any) -> dict[str, Any]:
    """What a distributed optimizer has of a parameter."""
    group, order = inner.model_param_group_index_map[parameter]
    main = inner.optimizer.param_groups[group]["params"][order]
    return {"param": main, **inner.optimizer.state[main]}


def _begin(inner: Any, parameter: Any) -> int:
    index, dtype, bucket = inner.model_param_gbuf_map[parameter]
    return int(inner.gbuf_ranges[index][dtype][bucket]["param_map"][parameter]["param"].start)


def _writing_as_before() -> Any:
    """Torch's writer of one item with its former arguments, which releases of Megatron-core before 0.14 pass."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    own = filesystem_async._write_item
    try:
        from torch.distributed.checkpoint.filesystem import SerializationFormat
    except ImportError:
        return contextlib.nullcontext()
    return mock.patch.object(
        filesystem_async, "_write_item", lambda *arguments: own(*arguments, SerializationFormat.TORCH_SAVE)
    )


def main() -> None:
    command, kind, model_kind, directory, tensor_size, expert_size, stages, bucket_size = sys.argv[1:]
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    if not hasattr(np, "product"):  # releases before 0.14 use this name, which numpy 2 does not have
        np.product = np.prod
    torch.distributed.init_process_group("gloo", init_method="env://")
    tensor, experts = int(tensor_size), int(expert_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=experts,
        pipeline_model_parallel_size=int(stages),
    )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    fork = mock.patch.object(CudaRNGStatesTracker, "fork", side_effect=lambda *_: contextlib.nullcontext())
    # Without Transformer Engine, releases before 0.14 refuse to copy even when there is no float8.
    quantize = mock.patch.object(distrib_optimizer, "quantize_param_shard", return_value=None, create=True)
    with without_cuda(), fork, quantize:
        model = built(model_kind, tensor, experts)
        optimizer = optimized(model, kind, int(bucket_size) or None)
        # What is loaded replaces other state: torch's Adam has none before its first step.
        train(model, optimizer, tensor, range(STEPS) if command == "save" else range(9, 10))
        own: dict[str, Any] = {}
        if "/" in model_kind:
            own["metadata"] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        weights = model.sharded_state_dict(**own)
        options: dict[str, Any] = {}
        if kind != "plain":
            kind_of_optimizer = distrib_optimizer.DistributedOptimizer
            is_old = not hasattr(kind_of_optimizer, "checkpoint_fully_reshardable_formats")
            if is_old:  # they know Apex's Adam, which has one step for all; torch's has one for each parameter
                own = kind_of_optimizer._get_main_param_and_optimizer_states
                kind_of_optimizer._get_main_param_and_optimizer_states = lambda *arguments: {
                    name: value for name, value in own(*arguments).items() if name != "step"
                }
            metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
            if command == "load":
                set_state = kind_of_optimizer._set_main_param_and_optimizer_states
                kind_of_optimizer._set_main_param_and_optimizer_states = lambda inner, parameter, tensors: set_state(
                    inner, parameter, {**tensors, "step": state_of(inner, parameter)["step"]}
                )
            options = {"sharding_type": kind} if is_old else {"metadata": metadata}
        state = optimizer.sharded_state_dict(weights, is_loading=command == "load", **options)
        if command == "load":
            loaded = dist_checkpointing.load({"model": weights, "optimizer": state}, directory)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            inner = optimizer.chained_optimizers[0].optimizer
            assert {float(each["step"]) for each in inner.state.values()} == {STEPS}
            assert [group["weight_decay"] > 0 for group in inner.param_groups] == [True, False]
        llama = {"group_query_attention": True, "num_query_groups": SIZES["groups"], "swiglu": True}
        llama |= {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
        llama |= {"untie_embeddings_and_output_weights": True, "rotary_base": 10000}
        arguments = argparse.Namespace(
            num_layers=SIZES["layers"],
            hidden_size=SIZES["width"],
            num_attention_heads=SIZES["heads"],
            kv_channels=SIZES["width"] // SIZES["heads"],
            ffn_hidden_size=SIZES["inner"],
            max_position_embeddings=SIZES["tokens"],
            padded_vocab_size=SIZES["vocabulary"],
            vocab_size=SIZES["vocabulary"],
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=int(stages),
            data_parallel_size=world // tensor // int(stages),
            ddp_bucket_size=int(bucket_size) or None,
            bf16=True,
            **(llama if model_kind == "llama" else {"layernorm_epsilon": 1e-5}),
        )
        if "/" in model_kind:
            from tests.parity.megatron_families import arguments as arguments_of

            listed = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "bf16")
            known = {name: vars(arguments)[name] for name in (*listed, "ddp_bucket_size")}
            arguments = argparse.Namespace(
                **vars(arguments_of(model_kind.split("/")[0])), **known, expert_model_parallel_size=experts
            )
        saved = {"model": weights, "optimizer": state, "args": arguments, "iteration": STEPS, "checkpoint_version": 3.0}
        if rank == 0:
            Path(directory).mkdir(exist_ok=command == "load")
        torch.distributed.barrier()
        with contextlib.ExitStack() as stack:
            if kind.startswith("fully_sharded"):
                stack.enter_context(_writing_as_before())
            if command == "save":
                dist_checkpointing.save(saved, directory)
                # As --ckpt-format torch: a file of each model-parallel rank, without its optimizer.
                place = Path(f"{directory}.ranks", f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}")
                numbers = [parallel_state.get_pipeline_model_parallel_rank()] * (int(stages) > 1)
                numbers += [parallel_state.get_expert_model_parallel_rank()] * (experts > 1)
                place = place.with_name("_".join([place.name, *(f"{number:03d}" for number in numbers)]))
                if parallel_state.get_expert_data_parallel_rank() == 0:
                    place.mkdir(parents=True, exist_ok=True)
                    of_rank = {name: value for name, value in saved.items() if name not in ("model", "optimizer")}
                    of_rank["model"] = model.state_dict_for_save_checkpoint()
                    torch.save(of_rank, place / "model_optim_rng.pt")
    torch.save(state_in_memory(model, optimizer, is_distributed=kind != "plain"), f"{directory}.state-{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
