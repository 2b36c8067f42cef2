"""ZeRO over the replicas by FSDP2: each replica has some rows of every parameter, its gradient and its moments.

Each item is sharded by itself (``fully_shard`` of its module alone), so that it moves as any other. Optimizer, norms
and migration see plain tensors, the local rows; FSDP2's ``DTensor`` parameters stay inside the modules.

    forward                all-gather of the rows by FSDP2, one item ahead
    backward               the same, and per microbatch (stages 2 and 3) a reduce-scatter that adds to the sharded sum;
                           reduced once per step, gradients accumulate unsharded instead
    end of the step        FsdpSharding.start_reduction, .finish_reduction: the rest of the reduce-scatters
                           -> grad of the local rows
    hybrid sharding        all-reduce of these over the replicas of the shards (GradientReducer)
    optimizer              updates the local rows, which share memory with the DTensors

Each item is a root of FSDP2, and all items of a process share one communication context (:func:`share_streams`): its
streams let gathers and reduce-scatters overlap with the arithmetic and with each other, as under a single root.

Hybrid sharding (HSDP) shards over ``data / hsdp`` neighboring ranks instead of all. FSDP2 sees a one-dimensional mesh
of these: its own sum over replicas of the shards would be an all-reduce in every backward, or a sum over microbatches
in the dtype of the reduction. Here it is one all-reduce of float32 sums per item and step.

Memory of the gradients, float32, of P parameters over D shards: ``4 P / D`` bytes and those of one item whole where
they are reduced per microbatch, ``4 P`` where they are reduced per step, with 1/microbatches of the communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx

from .collectives import all_gather_rows, reduce_scatter_rows
from .process_groups import World


class _ShardingGroup:
    """The replicas that share the rows of a parameter, and this process's ``rank`` among their ``size``.

    Args:
        group: These replicas; None: this process alone.
        ranks: Their ranks in the run.
        world: Processes of the run.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], world: World) -> None:
        self.rank, self.size = ranks.index(world.rank), len(ranks)
        # A process may be the only replica with its experts; FSDP2 needs a group of one then.
        self.group = group or dist.new_group([world.rank], use_local_synchronization=True)
        self.mesh = DeviceMesh.from_group(self.group, world.device.type)
        # Ranks of a group -> its second communicator: one for all items, where torch would create one for each.
        self._reduce_scatter_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def separate_reduce_scatters(self, module: FSDPModule) -> None:
        """Let reduce-scatters of ``module`` run next to its gathers: a communicator runs one collective at a time."""
        for each in param_groups(module):
            # Private and since torch 2.13; the public ``set_separate_reduce_scatter_group`` cannot share communicators.
            if hasattr(each, "_set_separate_reduce_scatter_group"):
                each._set_separate_reduce_scatter_group(True, self._reduce_scatter_groups)


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

    Attributes:
        is_first_copy: Whether this process is in the first of the replicas of the shards (``ParallelDims.hsdp``), which
            sums over processes count.

    Raises:
        ValueError: There is one replica to shard over.
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
        if world.groups.shard is None:
            raise ValueError("ZeRO needs at least two replicas to shard over")
        self._replicas = _ShardingGroup(world.groups.shard, dims.shard_ranks(world.rank), world)
        self._expert_replicas = self._replicas
        if dims.expert > 1:
            ranks = dims.shard_ranks(world.rank, expert_local=True)
            self._expert_replicas = _ShardingGroup(world.groups.expert_shard, ranks, world)
        self.is_first_copy = world.data_rank < dims.data // dims.hsdp
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
                group.separate_reduce_scatters(fsdp)
                self._begin_step(fsdp)
        return {name: nn.Parameter(_local_rows(parameter).detach()) for name, parameter in module.named_parameters()}

    def _begin_step(self, module: FSDPModule) -> None:
        module.set_requires_gradient_sync(self._sync_microbatches)
        # More microbatches may follow: FSDP2 then waits for its reduce-scatters in :meth:`reduce`, not in a backward.
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(self._reshard)

    def start_reduction(self, module: nn.Module) -> None:
        """Start what is left of the sums over replicas of an item, whose gradients no backward changes any more.

        Args:
            module: A module that :meth:`wrap` has sharded; another one is left alone.
        """
        for part in _parts(module):
            part.set_reshard_after_backward(True, recurse=False)
            part.set_requires_gradient_sync(True, recurse=False)
            # The same private calls as torch's own PipelineStage makes for a sharded module at the end of a step
            # (perform_reduce_grad, torch 2.11 to 2.13): FSDP2 has no public call that reduces accumulated gradients.
            for group in param_groups(part):
                group.post_backward()

    def finish_reduction(self, items: Iterable[tuple[nn.Module, dict[str, nn.Parameter]]]) -> None:
        """Wait for the sums of all items and set ``grad`` of each local parameter to its rows of the sum.

        Args:
            items: Each item's module, after :meth:`start_reduction`, and the parameters that :meth:`wrap` returned.
        """
        sharded = [(module, local) for module, local in items if isinstance(module, FSDPModule)]
        # Only after all reduce-scatters have started: this clears what the items share, and waits for all of them.
        for module, _ in sharded:
            module.set_is_last_backward(True)
            fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        for module, local in sharded:
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


def connect_items(items: Sequence[nn.Module], num_frozen: int = 0) -> None:
    """Let the items of a stage gather the parameters of their neighbors ahead; repeat after every change of the stage.

    The parameters of item k + 1 are gathered while item k runs, in the backward those of item k - 1. Modules that are
    not sharded are left alone.

    Args:
        items: Modules of the stage, in list order.
        num_frozen: Number of first items without a backward.
    """
    chain = [(parts, position < num_frozen) for position, item in enumerate(items) if (parts := _parts(item))]
    for at, (parts, _) in enumerate(chain):
        after = chain[at + 1][0] if at + 1 < len(chain) else []
        before, is_frozen = chain[at - 1] if at else ([], True)
        inner = parts[1:]
        parts[0].set_modules_to_forward_prefetch([*inner, *after])
        # Never an empty list: FSDP2 would then prefetch by the order of the forwards, where the first item of a stage
        # follows the last one of another microbatch. A module's own parameters are there already.
        parts[0].set_modules_to_backward_prefetch([*inner, *([] if is_frozen else before)] or parts[:1])
        for part in inner:
            part.set_modules_to_backward_prefetch([part])


def share_streams(items: Iterable[nn.Module]) -> None:
    """Let all items of a process use the same streams for their collectives; repeat after every change of the items.

    Args:
        items: Modules, on the device of the run, sharded or not; no collective of theirs is in flight.
    """
    parts: list[FSDPModule] = []
    for module in items:
        for part in _parts(module):
            # Each item stays its own root, so that it can leave without the others: before torch chooses the roots by
            # the first forward, which is the same choice, and creates their streams.
            fully_shard.state(part)._lazy_init()  # type: ignore[attr-defined]
            parts.append(part)
    if parts:
        share_comm_ctx(parts)


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


def accumulated_gradients(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """What the microbatches of a step have added so far to the gradients of a sharded module; changes nothing.

    Args:
        module: A module that :meth:`FsdpSharding.wrap` has sharded, after a backward.

    Yields:
        Name of the parameter; its gradient, of this replica alone and whole, or the local rows of the sum over the
        replicas; and whether it is the latter.
    """
    name_of = {
        (id(part), own): f"{prefix}.{own}" if prefix else own
        for prefix, part in module.named_modules()
        for own, _ in part.named_parameters(recurse=False)
    }
    for each in (each for part in _parts(module) for group in param_groups(part) for each in group.fsdp_params):
        name = name_of[id(each._module_info.module), each._module_info.param_name]
        # Private in torch 2.11 to 2.13. The sharded sum is that of the microbatches that were reduced; of those that
        # were not, FSDP2 has one or two unsharded sums, by the dtype of the reduction.
        whole = [each.unsharded_accumulated_grad, getattr(getattr(each, "_unsharded_param", None), "grad", None)]
        found = [gradient for gradient in whole if gradient is not None]
        if found:
            yield name, sum(found[1:], start=found[0]), False
        elif each.sharded_param.grad is not None:
            yield name, _local_rows(each.sharded_param.grad), True


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


def _parts(module: nn.Module) -> list[FSDPModule]:
    """Return what is sharded of an item: itself, then its experts; nothing of an item that is not sharded."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _fsdp_module(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not sharded")
    return module


def param_groups(module: nn.Module | FSDPModule) -> list[Any]:
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
