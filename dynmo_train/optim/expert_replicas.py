"""Copies of experts on other ranks: weights from the owner before a step, weight gradients to the owner after it.

::

    before a step    owner: weights in the compute dtype --one message per item and pair of ranks--> copies
                     in flight until the item first runs
    backward         each rank adds the gradients of its chunks (models/experts/expert_sums.py)
    item is final    copies: float64 sums --one message per item and pair--> owner: + own sums -> float32 ``grad``
                     in flight until GradientReducer.finish

Only owners have parameters: norms, clipping, updates, checkpoints and migration are those of a run without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..models.experts.expert_sums import ExpertSums
from ..models.experts.moe import Experts
from ..models.sharding import experts_of
from ..parallel.expert_replicas import ReplicaDispatcher
from .item_store import ItemStore


class Transfer(Protocol):
    """A collective in progress."""

    def finish(self) -> None:
        """Wait for it."""


AllReduce = Callable[[list[nn.Parameter]], Sequence[Transfer]]


class ExpertReplicas:
    """The copies of the experts of a process.

    Args:
        store: Local items.
        dispatcher: Ranks that share the experts.
        compute: dtype of the arithmetic, in which copies are.
    """

    def __init__(self, store: ItemStore, dispatcher: ReplicaDispatcher, compute: torch.dtype) -> None:
        self._store, self.dispatcher, self._compute = store, dispatcher, compute
        # Items whose copies have the weights of their owners; an item that is built again is another module.
        self._fresh: dict[str, nn.Module] = {}

    def outdate(self) -> None:
        """Note that the owners' weights have changed."""
        self._fresh.clear()

    def begin(self, scale: float) -> None:
        """Start to send the weights of owners to copies that are outdated; a collective of the dispatcher's ranks.

        Args:
            scale: Loss scale of the step.
        """
        for item, module in self._store.modules.items():
            layers = experts_of(module)
            for experts in layers:
                if experts.sums is not None:
                    experts.sums.scale, experts.sums.is_due = scale, False
            if layers and self._fresh.get(item) is not module:
                self._fresh[item] = module
                for experts in layers:
                    self._refresh(experts)

    def _refresh(self, experts: Experts) -> None:
        if experts.before_use is not None:
            experts.before_use()
        with torch.no_grad():
            sent = {
                peer: torch.cat([p.detach().reshape(-1).to(self._compute) for _, p in _parameters(experts, numbers)])
                for peer, numbers in self._copies_at(experts).items()
            }
        received: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for peer, numbers in self._copies_of(experts).items():
            for number in numbers:
                _materialize(experts.copies[number], self._store.device, self._compute)
            targets = [parameter.data for _, parameter in _parameters(experts, numbers)]
            received[peer] = (targets[0].new_empty(sum(each.numel() for each in targets)), targets)
        works = self._start(sent, {peer: block for peer, (block, _) in received.items()})

        def finish() -> None:
            for work in works:
                work.wait()
            # Until here: the transfers read them.
            sent.clear()
            for block, targets in received.values():
                for target, part in zip(targets, block.split([each.numel() for each in targets]), strict=True):
                    target.copy_(part.view_as(target))

        experts.before_use = finish if works else None

    def reduce(self, item: str, all_reduce: AllReduce) -> ExpertReduction | None:
        """Start to send the gradients of an item's copies to their owners; None where it has no backward.

        Args:
            item: Item whose gradients no backward of this step changes any more.
            all_reduce: Sums gradients over other groups of ranks that have the same experts.
        """
        started = [
            self._start_gradients(experts, experts.sums)
            for experts in experts_of(self._store.modules[item])
            if experts.sums is not None and experts.sums.is_due
        ]
        return ExpertReduction(started, all_reduce) if started else None

    def _start_gradients(self, experts: Experts, sums: ExpertSums) -> Callable[[], list[nn.Parameter]]:
        sums.is_due = False
        sent = {
            peer: torch.cat([sums.take(*key, like=p).reshape(-1) for key, p in _parameters(experts, numbers)])
            for peer, numbers in self._copies_of(experts).items()
        }
        received = {
            peer: torch.empty(
                sum(p.numel() for _, p in _parameters(experts, numbers)),
                dtype=torch.float64,
                device=self._store.device,
            )
            for peer, numbers in self._copies_at(experts).items()
        }
        works = self._start(sent, received)

        def finish() -> list[nn.Parameter]:
            for work in works:
                work.wait()
            sent.clear()
            for peer, block in received.items():
                parameters = list(_parameters(experts, self._copies_at(experts)[peer]))
                parts = block.split([p.numel() for _, p in parameters])
                for ((number, name), parameter), part in zip(parameters, parts, strict=True):
                    sums.add_rounded(number, name, part.view(parameter.shape))
            own = list(_parameters(experts, [int(number) for number in experts]))
            for (number, name), parameter in own:
                parameter.grad = sums.take(number, name, like=parameter).float()
            return [parameter for _, parameter in own]

        return finish

    def _copies_at(self, experts: Experts) -> dict[int, list[int]]:
        """Rank -> experts of this process of which it has copies."""
        found: dict[int, list[int]] = {}
        for number, (owner, *others) in enumerate(experts.hosts):
            for rank in others if owner == self.dispatcher.rank else ():
                found.setdefault(rank, []).append(number)
        return found

    def _copies_of(self, experts: Experts) -> dict[int, list[int]]:
        """Rank -> experts of it of which this process has copies."""
        found: dict[int, list[int]] = {}
        for number in sorted(experts.copies):
            found.setdefault(experts.hosts[number][0], []).append(number)
        return found

    def _start(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> list[dist.Work]:
        group = self.dispatcher.group
        operations = [
            dist.P2POp(dist.irecv, block, dist.get_global_rank(group, peer), group)
            for peer, block in sorted(received.items())
        ]
        operations += [
            dist.P2POp(dist.isend, block, dist.get_global_rank(group, peer), group)
            for peer, block in sorted(sent.items())
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []


class ExpertReduction:
    """The sums of the gradients of an item's experts, in progress: over their copies, then over other groups of ranks.

    Args:
        started: For each layer, waits for the sums over copies, sets ``grad``, and returns the parameters.
        all_reduce: Starts the sums over other groups of ranks.
    """

    def __init__(self, started: Sequence[Callable[[], list[nn.Parameter]]], all_reduce: AllReduce) -> None:
        self._started, self._all_reduce = started, all_reduce
        self._second: list[Transfer] = []

    def advance(self) -> None:
        """Wait for the sums over copies and start the sums over other groups."""
        parameters = [parameter for finish in self._started for parameter in finish()]
        self._second = list(self._all_reduce(parameters))

    def finish(self) -> None:
        """Wait for the sums over other groups."""
        for each in self._second:
            each.finish()


def _parameters(experts: Experts, numbers: Sequence[int]) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
    """Yield ``(expert, name)`` and parameter, in the order in which all ranks have them."""
    for number in sorted(numbers):
        for name, parameter in experts.expert(number).named_parameters():
            yield (number, name), parameter


def _materialize(expert: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the weights of a copy, in place, where it has none in this dtype."""
    for parameter in expert.parameters():
        if parameter.device.type == "meta" or parameter.dtype != dtype:
            parameter.requires_grad_(False)
            expert.to(dtype).to_empty(device=device)
            return
