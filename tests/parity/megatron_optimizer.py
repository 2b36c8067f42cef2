"""Writes a checkpoint with Megatron-core's own optimizer and checkpointing on CPU; run as a program by each rank.

    python megatron_optimizer.py KIND MODEL DIRECTORY TENSOR_SIZE BUCKET_SIZE

``KIND`` is a form of the distributed optimizer's state, or ``plain`` for the optimizer without it. Next to the
checkpoint, ``DIRECTORY.state-RANK`` has what the optimizer of each rank holds in memory, by name of the parameter: it
does not come from any code that writes checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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


def trained(model_kind: str, kind: str, tensor_size: int, bucket_size: int | None) -> tuple[Any, Any]:
    """A model in bfloat16 and its optimizer, after steps with random gradients."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.parity import megatron_core

    config_of = megatron_core.config_of
    half = {"tensor_model_parallel_size": tensor_size, "bf16": True, "params_dtype": torch.bfloat16}
    with mock.patch.object(megatron_core, "config_of", lambda sizes, **more: config_of(sizes, **half, **more)):
        torch.manual_seed(0)
        model = megatron_core.decoder(model_kind, SIZES).bfloat16()
    is_distributed = kind != "plain"
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed, bucket_size=bucket_size, overlap_grad_reduce=bucket_size is not None
    )
    ddp = DistributedDataParallel(model.config, buckets, model)
    settings = OptimizerConfig(
        lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=is_distributed, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator) * 0.1
            # Tensor-parallel parts differ; replicas of a parameter have the same gradient.
            split = 1 + rank if getattr(parameter, "tensor_model_parallel", False) and tensor_size > 1 else 1
            parameter.main_grad.copy_(gradient * split)
            del name
        optimizer.step()
    return model, optimizer


def state_in_memory(model: Any, optimizer: Any, *, is_distributed: bool) -> dict[str, Any]:
    """For each parameter of this rank the state, the begin of its part in elements, and the shape."""
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    found = {}
    for name, parameter in model.named_parameters():
        if not is_distributed:
            moments = inner.optimizer.state[parameter.main_param]
            state, begin = {"param": parameter.main_param, **moments}, 0
        elif parameter in inner.model_param_group_index_map:
            group, order = inner.model_param_group_index_map[parameter]
            main = inner.optimizer.param_groups[group]["params"][order]
            state, begin = {"param": main, **inner.optimizer.state[main]}, _begin(inner, parameter)
        else:
            continue
        parts = {kind: state[kind].detach().reshape(-1).clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
        found[name] = (parts, begin, tuple(parameter.shape))
    return found


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
    kind, model_kind, directory, tensor_size, bucket_size = sys.argv[1:]
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    if not hasattr(np, "product"):  # releases before 0.14 use this name, which numpy 2 does not have
        np.product = np.prod
    torch.distributed.init_process_group("gloo", init_method="env://")
    tensor = int(tensor_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    fork = mock.patch.object(CudaRNGStatesTracker, "fork", side_effect=lambda *_: contextlib.nullcontext())
    # Without Transformer Engine, releases before 0.14 refuse to copy even when there is no float8.
    quantize = mock.patch.object(distrib_optimizer, "quantize_param_shard", return_value=None, create=True)
    with without_cuda(), fork, quantize:
        model, optimizer = trained(model_kind, kind, tensor, int(bucket_size) or None)
        weights = model.sharded_state_dict()
        options: dict[str, Any] = {}
        if kind != "plain":
            kind_of_optimizer = distrib_optimizer.DistributedOptimizer
            is_old = not hasattr(kind_of_optimizer, "checkpoint_fully_reshardable_formats")
            if is_old:  # they know Apex's Adam, which has one step for all; torch's has one for each parameter
                own = kind_of_optimizer._get_main_param_and_optimizer_states
                kind_of_optimizer._get_main_param_and_optimizer_states = lambda *arguments: {
                    name: value for name, value in own(*arguments).items() if name != "step"
                }
            options = {"sharding_type": kind} if is_old else {"metadata": {"distrib_optim_sharding_type": kind}}
        state = optimizer.sharded_state_dict(weights, **options)
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
            pipeline_model_parallel_size=1,
            data_parallel_size=world // tensor,
            ddp_bucket_size=int(bucket_size) or None,
            bf16=True,
            **(llama if model_kind == "llama" else {"layernorm_epsilon": 1e-5}),
        )
        saved = {"model": weights, "optimizer": state, "args": arguments, "iteration": STEPS, "checkpoint_version": 3.0}
        if rank == 0:
            Path(directory).mkdir()
        torch.distributed.barrier()
        with contextlib.ExitStack() as stack:
            if kind.startswith("fully_sharded"):
                stack.enter_context(_writing_as_before())
            dist_checkpointing.save(saved, directory)
    torch.save(state_in_memory(model, optimizer, is_distributed=kind != "plain"), f"{directory}.state-{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
