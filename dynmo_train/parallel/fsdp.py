"""ZeRO over the replicas by FSDP2: each replica has some rows of every parameter, its gradient and its moments.

Each item is sharded by itself (``fully_shard`` of its module alone), so that it moves as any other. Optimizer, norms
and migration see plain tensors, the local rows; FSDP2's ``DTensor`` parameters stay inside the modules.

    forward                all-gather of the rows by FSDP2
    backward               the same, and per microbatch (stages 2 and 3) a reduce-scatter that adds to the sharded sum;
                           reduced once per step, gradients accumulate unsharded instead
    end of the step        FsdpSharding.reduce: the rest of the reduce-scatters -> grad of the local rows
    optimizer              updates the local rows, which share memory with the DTensors

Memory of the gradients, float32, of P parameters over D replicas: ``4 P / D`` bytes and those of one item whole where
they are reduced per microbatch, ``4 P`` where they are reduced per step, with 1/microbatches of the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .collectives import all_gather_rows, reduce_scatter_rows
from .process_groups import World


class _ShardingGroup:
    """The replicas that share the rows of a parameter, and this process's ``rank`` among their ``size``."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, world: World) -> None:
        self.rank, self.size = rank, size
        # A process may be the only replica with its experts; FSDP2 needs a group of one then.
        self.group = group or dist.new_group([world.rank], use_local_synchronization=True)
        self.mesh = DeviceMesh.from_group(self.group, world.device.type)


class FsdpSharding:
    """How this process shares the rows of parameters with other replicas.

    With expert parallelism, the parameters of an expert are shared only among the replicas that have that expert
    (``expert_local``).

    Args:
        world: Processes of the run; at least two replicas.
        reshard: Free the gathered parameters after each forward and backward (stage 3); False frees them at the end of
            a step (stages 1 and 2).
        compute: dtype of the arithmetic.
        sync_microbatches: Reduce-scatter the gradients of every microbatch; False does so once per step.
        reduce_dtype: dtype of these sums over replicas; sums over microbatches are float32.

    Raises:
        ValueError: There is one replica.
    """

    def __init__(
        self,
        world: World,
        *,
        reshard: bool,
        compute: torch.dtype,
        sync_microbatches: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        dims = world.dims
        if world.groups.data is None:
            raise ValueError("ZeRO needs at least two replicas")
        self._replicas = _ShardingGroup(world.groups.data, world.data_rank, dims.data, world)
        self._expert_replicas = self._replicas
        if dims.expert > 1:
            rank, size = world.data_rank // dims.expert, dims.data // dims.expert
            self._expert_replicas = _ShardingGroup(world.groups.expert_data, rank, size, world)
        self._reshard, self._sync_microbatches = reshard, sync_microbatches
        casts = compute != torch.float32
        # None: the dtype of the parameters, float32. FSDP2 adds sharded sums in the dtype of the sharded parameters.
        self._policy = MixedPrecisionPolicy(
            param_dtype=compute if casts else None,
            reduce_dtype=reduce_dtype if casts or reduce_dtype != torch.float32 else None,
            cast_forward_inputs=casts,
        )

    def _group(self, expert_local: bool) -> _ShardingGroup:
        return self._expert_replicas if expert_local else self._replicas

    def rank(self, *, expert_local: bool) -> int:
        """Return this process's rank among the replicas that share a parameter."""
        return self._group(expert_local).rank

    def wrap(self, module: nn.Module, experts: Sequence[nn.Module] = ()) -> dict[str, nn.Parameter]:
        """Shard a module in place.

        Args:
            module: An item.
            experts: Parts of the module with this process's experts.

        Returns:
            The local rows of its parameters by name, as plain parameters that share memory with the module's.
        """
        # Experts first: the module then shards only the parameters that are not sharded yet.
        for part, group in [(each, self._expert_replicas) for each in experts] + [(module, self._replicas)]:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=group.mesh, reshard_after_forward=self._reshard, mp_policy=self._policy)
                fsdp = _fsdp_module(part)
                # Gradients are sums over replicas, as those of plain replicas; FSDP2 would divide them.
                fsdp.set_gradient_divide_factor(1.0)
                fsdp.set_force_sum_reduction_for_comms(True)
                self._begin_step(fsdp)
        return {name: nn.Parameter(_local_rows(parameter).detach()) for name, parameter in module.named_parameters()}

    def _begin_step(self, module: FSDPModule) -> None:
        module.set_requires_gradient_sync(self._sync_microbatches)
        # More microbatches may follow: FSDP2 then waits for its reduce-scatters in :meth:`reduce`, not in a backward.
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(self._reshard)

    def reduce(self, module: nn.Module, local: dict[str, nn.Parameter]) -> None:
        """Sum the replicas' gradients of an item and set ``grad`` of each local parameter to its rows of the sum.

        Args:
            module: A module that :meth:`wrap` has sharded; another one is left alone.
            local: Parameters that :meth:`wrap` returned for it.
        """
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)
        # The same private calls as torch's own PipelineStage makes for a sharded module at the end of a step
        # (perform_reduce_grad, torch 2.11 to 2.13): FSDP2 has no public call that reduces accumulated gradients.
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        for part in module.modules():
            if isinstance(part, FSDPModule):
                for group in param_groups(part):
                    group.post_backward()
        state._root_post_backward_final_callback()
        self._begin_step(module)
        for name, parameter in module.named_parameters():
            local[name].grad = None if parameter.grad is None else _local_rows(parameter.grad)
            parameter.grad = None

    def reshard(self, module: nn.Module) -> None:
        """Free the parameters that a forward without backward has gathered."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def rows(self, tensor: torch.Tensor, *, expert_local: bool = False) -> torch.Tensor:
        """Return the local rows of a replica's tensor, as a view.

        Args:
            tensor: Tensor of the replica, ``[num_rows, ...]``.
            expert_local: Whether the tensor belongs to an expert.

        Returns:
            ``[n, ...]`` with n = ceil(num_rows / replicas); fewer rows, or none, on the last replicas.
        """
        group = self._group(expert_local)
        return row_chunks(tensor, group.size)[group.rank]

    def gather_rows(self, rows: torch.Tensor, num_rows: int, *, expert_local: bool = False) -> torch.Tensor:
        """Return the replica's tensor; a collective over the replicas that share it.

        Args:
            rows: Local rows, ``[n, ...]``.
            num_rows: Number of rows of the result.
            expert_local: Whether the tensor belongs to an expert.

        Returns:
            ``[num_rows, ...]``.
        """
        group = self._group(expert_local)
        chunk = -(-num_rows // group.size)
        # The collective needs the same number of rows from each replica.
        padded = rows.new_zeros((chunk, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty((chunk * group.size, *rows.shape[1:]))
        all_gather_rows(gathered, padded, group.group)
        return gathered[:num_rows]

    def sum_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the replicas' tensors; a collective over the replicas.

        Args:
            tensor: Tensor of this replica, ``[num_rows, ...]``.

        Returns:
            The local rows of the sum, ``[n, ...]`` as of :meth:`rows`, in the dtype of the tensor.
        """
        group, num_rows = self._replicas, len(self.rows(tensor))
        chunk = -(-tensor.shape[0] // group.size)
        # The collective needs the same number of rows for each replica.
        sent = tensor.new_zeros(
            (chunk * group.size, *tensor.shape[1:]), dtype=self._policy.reduce_dtype or tensor.dtype
        )
        sent[: tensor.shape[0]] = tensor
        own = sent.new_empty((chunk, *tensor.shape[1:]))
        reduce_scatter_rows(own, sent, group.group)
        return own[:num_rows].to(tensor.dtype)


def accumulate_sharded_grads(module: nn.Module) -> None:
    """Add the gradients of a split backward to the float32 sums, sharded or not, as FSDP2 does after a full backward.

    FSDP2 does this in a hook on the inputs of a module, which a backward of the weights alone does not run.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in param_groups(part):
                # Without synchronization it only accumulates; parameters stay as they are, since a split backward
                # needs them gathered (``BackwardCase``).
                group.post_backward()


def row_chunks(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """Split the rows as FSDP2 does: equal chunks, the last ones shorter or empty.

    Args:
        tensor: ``[rows, ...]``.
        num_chunks: Number of chunks.

    Returns:
        ``num_chunks`` views ``[n, ...]``, n = ceil(rows / num_chunks) or less.
    """
    # torch.chunk returns fewer chunks where the rows do not suffice.
    chunks = list(torch.chunk(tensor, num_chunks, dim=0))
    return chunks + [tensor[:0]] * (num_chunks - len(chunks))


def _fsdp_module(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not sharded")
    return module


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's private parameter groups of a module: a list in torch 2.13, at most one in torch 2.11."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = state._fsdp_param_group
        groups = [] if only is None else [only]
    return list(groups)


def _local_rows(parameter: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined] # a DTensor
    return rows
