"""ZeRO over the replicas by FSDP2: each holds a part of every parameter's rows, its gradient and its moments.

An item is sharded by itself (``fully_shard`` of its module alone), so that it moves as any other. A replica's gradients
accumulate whole over the microbatches and are reduced once a step, as plain replicas add them: plain, DDP and ZeRO give
the same bits on two replicas. What optimizer, norms and moves see are plain tensors, the replica's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .collectives import gather_parts
from .process_groups import World


class _Ring:
    """Processes that share parameters, as one of them sees it: its place ``rank`` among ``size``."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, world: World) -> None:
        self.rank, self.size = rank, size
        self.group = group or dist.new_group([world.rank], use_local_synchronization=True)
        self.mesh = DeviceMesh.from_group(self.group, world.device.type)


class FsdpSharding:
    """How a process shares parameters with the other replicas.

    Where replicas share the experts of a layer, an expert's parameters are shared among those that hold the same
    experts: of what stands *apart* these alone have a part.

    Args:
        reshard: free the whole parameters behind each forward and backward (stage 3), or at the end of a step (1, 2).
        compute: the type of the arithmetic; reductions are in float32.
    """

    def __init__(self, world: World, *, reshard: bool, compute: torch.dtype) -> None:
        dims = world.dims
        if world.groups.data is None:
            raise ValueError("one replica has nobody to share parameters with")
        self._all = _Ring(world.groups.data, world.data_rank, dims.data, world)
        self._apart = self._all
        if dims.expert > 1:
            of_experts = world.groups.expert_data
            self._apart = _Ring(of_experts, world.data_rank // dims.expert, dims.data // dims.expert, world)
        self._reshard = reshard
        casts = compute != torch.float32
        self._policy = MixedPrecisionPolicy(
            param_dtype=compute if casts else None,
            reduce_dtype=torch.float32 if casts else None,
            cast_forward_inputs=casts,
        )

    def place(self, *, apart: bool) -> tuple[int, int]:
        """This process's place among those that share a parameter, and how many they are."""
        ring = self._ring(apart)
        return ring.rank, ring.size

    def _ring(self, apart: bool) -> _Ring:
        return self._apart if apart else self._all

    def wrap(self, module: nn.Module, apart: Sequence[nn.Module] = ()) -> dict[str, nn.Parameter]:
        """Shard a module in place; the process's rows of its parameters, by name, as plain parameters of their own.

        Args:
            apart: parts of the module that hold this process's experts.
        """
        for part, ring in [(each, self._apart) for each in apart] + [(module, self._all)]:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=ring.mesh, reshard_after_forward=self._reshard, mp_policy=self._policy)
                fsdp = _fsdp(part)
                fsdp.set_gradient_divide_factor(1.0)
                fsdp.set_force_sum_reduction_for_comms(True)
                self._between_reductions(fsdp)
        return {name: nn.Parameter(_rows_of(parameter).detach()) for name, parameter in module.named_parameters()}

    def _between_reductions(self, module: FSDPModule) -> None:
        module.set_requires_gradient_sync(False)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(self._reshard)

    def reduce(self, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """Add the replicas' gradients, and give each of ``own`` its rows of the sum."""
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)
        # What torch's own pipeline stage does for a sharded module at the end of a step.
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        for part in module.modules():
            if isinstance(part, FSDPModule):
                for group in _groups(part):
                    group.post_backward()
        state._root_post_backward_final_callback()
        self._between_reductions(module)
        for name, parameter in module.named_parameters():
            own[name].grad = None if parameter.grad is None else _rows_of(parameter.grad)
            parameter.grad = None

    def release(self, module: nn.Module) -> None:
        """Free the whole parameters that a forward without backward has left."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def rows(self, whole: torch.Tensor, *, apart: bool = False) -> torch.Tensor:
        """This process's rows of a whole tensor; a view."""
        rank, size = self.place(apart=apart)
        return row_parts(whole, size)[rank]

    def whole(self, rows: torch.Tensor, num_rows: int, *, apart: bool = False) -> torch.Tensor:
        """The whole tensor of ``num_rows`` rows from those of all that share it; all of them call this."""
        ring = self._ring(apart)
        part = -(-num_rows // ring.size)
        padded = rows.new_zeros((part, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty((part * ring.size, *rows.shape[1:]))
        gather_parts(gathered, padded, ring.group)
        return gathered[:num_rows]


def accumulate_sharded_grads(module: nn.Module) -> None:
    """Add the gradients of a backward that was split to those kept in float32, as FSDP2 does behind a whole one."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _groups(part):
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def row_parts(whole: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """A tensor's rows dealt out as FSDP2 deals them: equal blocks, the last ones shorter or empty."""
    chunks = list(torch.chunk(whole, parts, dim=0))
    return chunks + [whole[:0]] * (parts - len(chunks))


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} has not been sharded")
    return module


def _groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of a module's parameters: torch 2.13 has several, 2.11 one or none."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = state._fsdp_param_group
        groups = [] if only is None else [only]
    return list(groups)


def _rows_of(parameter: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined] # a DTensor
    return rows
