"""The items that a worker holds, each with its own optimizer, so that an item moves with all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.blocks import Embedding
from ..models.compiled import compile_item
from ..models.embedding_grad import PendingRows, most_pending
from ..models.layer_list import ModelFamily, has_vocabulary_rows, masks_of, parameters_of, vocabulary_rows
from ..models.linear import PrunableLinear
from ..models.sharding import cut_item, cut_tensor, deal_experts, experts_of, is_of_expert, join_replicas
from ..models.sparse_formats import SparseTable
from ..parallel.collectives import ReplicaGather
from ..parallel.expert_parallel import TokenDispatcher
from ..parallel.fsdp import FsdpSharding
from ..parallel.tensor_parallel import TensorRegion
from .adamw import MOMENTS, AdamWSettings, ItemOptimizer, item_optimizer
from .apex import fuse_norms

REFERENCE = "reference"
MEMORIES = ("error", "factor")
ROLES = {
    "mask": "mask",
    REFERENCE: "buffer",
    "exp_avg": "optimizer",
    "exp_avg_sq": "optimizer",
    **dict.fromkeys(MEMORIES, "buffer"),
}


@dataclass(frozen=True, kw_only=True)
class ItemState:
    """All that an item is, by global names: what a move carries and a checkpoint stores.

    Attributes:
        tensors: parameters, ``NAME.mask`` (bool), ``NAME.exp_avg``, ``NAME.exp_avg_sq``, ``NAME.reference`` where
            adaptive freezing watches the item, and ``ITEM.memory.*`` where compression remembers, in a fixed order.
        steps: parameter name -> optimizer updates done, for parameters that have optimizer state.
    """

    tensors: Mapping[str, torch.Tensor]
    steps: Mapping[str, int]


def parameter_of(tensor_name: str) -> str:
    """The parameter that a tensor of an ``ItemState`` is or belongs to."""
    return tensor_name if role_of(tensor_name) == "parameter" else tensor_name.rpartition(".")[0]


def role_of(tensor_name: str) -> str:
    """``parameter``, ``mask``, ``buffer`` or ``optimizer``: what a tensor of an ``ItemState`` is, by its name."""
    return ROLES.get(tensor_name.rpartition(".")[2], "parameter")


def memory_name(item: str, *parts: str) -> str:
    """The name of what compression remembers of an item: ``ITEM.memory.PARTS``, the last one of ``MEMORIES``."""
    return ".".join((item, "memory", *parts))


def is_memory(item: str, tensor_name: str) -> bool:
    """Whether a tensor of an item's state is a memory of compression, by its name."""
    return tensor_name.startswith(memory_name(item, "")) and tensor_name.rpartition(".")[2] in MEMORIES


class ItemStore:
    """The items of one worker: modules and optimizers, built, exported, imported and dropped one by one.

    Args:
        fused_adam: NVIDIA's ``FusedAdam``, to update with it; None updates with torch's AdamW.
        region: the ranks that share each matrix product; None where each product is whole.
        shards: the replicas that share each parameter's rows (ZeRO); None where each holds all.
        exchange: the replicas that share the experts of each layer; None where each holds all.
        replicas: gathers what a loss over all replicas reads; None where there is one.
        fused_norms: what takes the place of torch's normalisations.
        compiled: the backend of torch.compile by which items are compiled; None where they are not.
    """

    def __init__(
        self,
        family: ModelFamily,
        settings: AdamWSettings,
        device: torch.device,
        sparse: SparseTable,
        fused_adam: type[Any] | None = None,
        region: TensorRegion | None = None,
        fsdp: FsdpSharding | None = None,
        dispatcher: TokenDispatcher | None = None,
        replicas: ReplicaGather | None = None,
        fused_norms: Mapping[type[nn.Module], type[nn.Module]] | None = None,
        compiled: str | None = None,
    ) -> None:
        self.family, self.settings, self.device = family, settings, device
        self.sparse, self.fused_adam, self.region = sparse, fused_adam, region
        self.fsdp, self.dispatcher, self.replicas = fsdp, dispatcher, replicas
        self._fused_norms, self._compiled = fused_norms or {}, compiled
        self.modules: dict[str, nn.Module] = {}
        # What a technique keeps of an item: item -> full tensor name -> tensor. It goes where the item goes.
        self.extras: dict[str, dict[str, torch.Tensor]] = {}
        # What compression remembers of an item: item -> full tensor name -> ``[1, ...]``. Each process has its own.
        self.memories: dict[str, dict[str, torch.Tensor]] = {}
        self._own: dict[str, dict[str, nn.Parameter]] = {}
        self._optimizers: dict[str, ItemOptimizer] = {}
        self._shared: dict[str, tuple[str, str]] = {}

    def build(self, name: str) -> None:
        """Hold an item with its initial weights and no optimizer state."""
        self.register(name, self._assemble(name, self.device))
        self._share()

    def is_shared(self, parameter_name: str) -> bool:
        """Whether a copy of a tied weight has its memory and moments from its owner, which is held here too."""
        return parameter_name in self._shared

    def _share(self) -> None:
        """Let each copy of a tied weight whose owner is held here too be the owner's memory, with the owner's moments.

        Their values are the same bits anyway: both get the same gradient. One update then serves both.
        """
        if self.fsdp is not None:
            return
        here = {name: (item, parameter) for item, name, parameter in self.parameters()}
        for copy_name, owner_name in self.family.ties.items():
            if copy_name in here and owner_name in here and copy_name not in self._shared:
                item, parameter = here[copy_name]
                owner_item, owner = here[owner_name]
                parameter.data = owner.data
                self._optimizers[item].forget(parameter)
                self._shared[copy_name] = owner_item, owner_name

    def _part(self, item: str) -> None:
        """Before an item is dropped: copies that share with its weights take their moments over."""
        for copy_name, (owner_item, owner_name) in list(self._shared.items()):
            if owner_item != item and copy_name not in self._own[item]:
                continue
            del self._shared[copy_name]
            if copy_name in self._own[item]:
                continue
            holder, copy = next((store, p) for store, name, p in self.parameters() if name == copy_name)
            owner = self._own[owner_item][owner_name]
            if moments := self.moments(owner_item, owner):
                self._optimizers[holder].load_state(copy, self._steps(owner_item, owner), moments)

    def _assemble(self, name: str, device: torch.device) -> nn.Module:
        whole = cut_item(
            name, fuse_norms(self.family.build(name, device), self._fused_norms), self.family.split_dim, self.region
        )
        return join_replicas(deal_experts(whole, self.dispatcher), self.replicas)

    def blueprint(self, name: str) -> nn.Module:
        """An item as this process would hold it, without memory for its weights."""
        return self._assemble(name, torch.device("meta"))

    def split_dim(self, tensor_name: str) -> int | None:
        """The dimension along which this process holds a slice of a parameter, mask or moment; None where the whole."""
        return None if self.region is None else self.family.split_dim(parameter_of(tensor_name))

    def local_slice(self, tensor_name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this process holds of a whole tensor; a view. Masks are cut with the products, never by rows."""
        cut = cut_tensor(whole, self.split_dim(tensor_name), self.region)
        return cut if role_of(tensor_name) == "mask" else self.local_rows(tensor_name, cut)

    def local_from_checkpoint(self, tensor_name: str, stored: torch.Tensor) -> torch.Tensor:
        """This process's part of a stored tensor: as :meth:`local_slice`, the rows of a vocabulary padded as here.

        Args:
            stored: the whole tensor of a checkpoint, of the true rows or, in older checkpoints, of padded ones.
        """
        if has_vocabulary_rows(parameter_of(tensor_name)):
            rows = vocabulary_rows(self.family)
            whole = stored.new_zeros(vocabulary_rows(self.family, padded=True), *stored.shape[1:])
            whole[:rows] = stored[:rows]
            stored = whole
        return self.local_slice(tensor_name, stored)

    def is_expert_local(self, tensor_name: str) -> bool:
        """Whether a tensor belongs to an expert that other replicas do not hold."""
        return self.dispatcher is not None and is_of_expert(tensor_name)

    def local_rows(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this process holds of a tensor that its replica holds; a view."""
        return tensor if self.fsdp is None else self.fsdp.rows(tensor, apart=self.is_expert_local(tensor_name))

    def gather_rows(self, tensor_name: str, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """What the replica holds of a tensor, from the rows of all that share it; all of them call this."""
        return rows if self.fsdp is None else self.fsdp.whole(rows, num_rows, apart=self.is_expert_local(tensor_name))

    def stores(self, tensor_name: str) -> bool:
        """Whether this process stores a whole tensor: the first of those that hold the same part of a replica does.

        Replicas that share experts are as one here.
        """
        if self.dispatcher is not None and self.dispatcher.rank and not is_of_expert(tensor_name):
            return False
        return self._is_first_in_region(tensor_name)

    def counts(self, tensor_name: str) -> bool:
        """Whether sums over processes count this one's part of a tensor; with ``fsdp`` that is its rows."""
        return self.stores(tensor_name) if self.fsdp is None else self._is_first_in_region(tensor_name)

    def _is_first_in_region(self, tensor_name: str) -> bool:
        return self.region is None or self.region.rank == 0 or self.split_dim(tensor_name) is not None

    def register(self, name: str, module: nn.Module) -> None:
        """Hold ``module`` as the item ``name``."""
        own = dict(module.named_parameters())
        if self._compiled is not None:
            compile_item(module, self._compiled)
        elif isinstance(module, Embedding) and self.fsdp is None and self.region is None:
            module.pending = PendingRows(module.word.weight, most_pending(len(module.word.weight)))
        if self.fsdp is not None:
            own = self.fsdp.wrap(module, [] if self.dispatcher is None else experts_of(module))
        self.modules[name] = module
        self._own[name] = {f"{name}.{child}": parameter for child, parameter in own.items()}
        self._optimizers[name] = item_optimizer(list(own.values()), self.settings, self.fused_adam)

    def drop(self, name: str) -> None:
        """Hold the item no longer."""
        self._part(name)
        del self.modules[name], self._own[name], self._optimizers[name]
        self.extras.pop(name, None)
        self.memories.pop(name, None)

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Every parameter: (item, global parameter name, parameter), in the order in which the items are held.

        With ``fsdp`` these are this replica's rows, which the modules' own parameters are made of.
        """
        for item, own in self._own.items():
            for name, parameter in own.items():
                yield item, name, parameter

    def own_parameters(self, item: str) -> Mapping[str, nn.Parameter]:
        """The parameters of one item by global name, as :meth:`parameters` gives them."""
        return self._own[item]

    @property
    def memory_bytes(self) -> int:
        """Bytes of what compression remembers here."""
        return sum(each.numel() * each.element_size() for kept in self.memories.values() for each in kept.values())

    def materialize_grads(self, item: str) -> None:
        """Give the parameters of an item the gradients that it has kept in another form."""
        pending = getattr(self.modules[item], "pending", None)
        if pending is not None:
            pending.materialize_grads()

    def reduce(self, item: str) -> None:
        """With ``fsdp``: add the replicas' gradients of an item, and keep this replica's rows of the sum."""
        if self.fsdp is not None:
            begin = len(item) + 1
            own = {name[begin:]: parameter for name, parameter in self._own[item].items()}
            self.fsdp.reduce(self.modules[item], own)

    def release(self) -> None:
        """With ``fsdp``: free what a forward without backward has made whole."""
        if self.fsdp is not None:
            for module in self.modules.values():
                self.fsdp.release(module)

    def update(self, rate: float, weight_decay: float | None = None) -> None:
        """One optimizer step on every parameter that has a gradient; the gradients are dropped.

        Args:
            weight_decay: of matrices; None is that of the settings.
        """
        decay = self.settings.weight_decay if weight_decay is None else weight_decay
        for _, name, parameter in self.parameters():
            if name in self._shared:
                parameter.grad = None
        for item, optimizer in self._optimizers.items():
            optimizer.update(rate, decay)
            for layer in masks_of(item, self.modules[item]).values():
                layer.weights_changed()

    def zero_grad(self) -> None:
        """Leave out an update: the gradients are dropped, nothing else changes."""
        for _, _, parameter in self.parameters():
            parameter.grad = None

    def drop_moments(self, parameter_names: set[str]) -> None:
        """Drop the optimizer state of parameters that will train no more."""
        for item, name, parameter in self.parameters():
            if name in parameter_names:
                self._optimizers[item].forget(parameter)

    def moments(self, item: str, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The moments of a parameter, empty before its first update."""
        item, parameter = self._keeper(item, parameter)
        return self._optimizers[item].moments(parameter)

    def _steps(self, item: str, parameter: nn.Parameter) -> int:
        item, parameter = self._keeper(item, parameter)
        return self._optimizers[item].steps(parameter)

    def _keeper(self, item: str, parameter: nn.Parameter) -> tuple[str, nn.Parameter]:
        """Who keeps the moments of a parameter: itself, or the weight that it shares with."""
        for copy_name, (owner_item, owner_name) in self._shared.items():
            if self._own[item].get(copy_name) is parameter:
                return owner_item, self._own[owner_item][owner_name]
        return item, parameter

    def export(self, item: str) -> ItemState:
        """The whole state of an item; the tensors are the live ones, not copies."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, int] = {}
        module = self.modules[item]
        masks = masks_of(item, module)
        for name, parameter in self._own[item].items():
            tensors[name] = parameter.detach()
            if name in masks and (mask := masks[name].mask) is not None:
                tensors[f"{name}.mask"] = mask
            moments = self.moments(item, parameter)
            tensors.update({f"{name}.{key}": value for key, value in moments.items()})
            if moments:
                steps[name] = self._steps(item, parameter)
        tensors.update(self.extras.get(item, {}))
        tensors.update(self.memories.get(item, {}))
        return ItemState(tensors=tensors, steps=steps)

    def export_whole(self, item: str) -> ItemState:
        """As :meth:`export`, with all rows; with ``fsdp`` every replica calls this for the same items.

        Memories of compression are this process's own all the same.
        """
        state = self.export(item)
        if self.fsdp is None:
            return state
        rows = {name: parameter.shape[0] for name, parameter in parameters_of(item, self.blueprint(item)).items()}
        tensors = {
            name: tensor
            if role_of(name) == "mask" or is_memory(item, name)
            else self.gather_rows(name, tensor, rows[parameter_of(name)])
            for name, tensor in state.tensors.items()
        }
        return ItemState(tensors=tensors, steps=state.steps)

    def load_state(self, item: str, state: ItemState, *, owned: bool = False) -> None:
        """Hold an item with exactly this state; raises ``KeyError`` where a parameter is missing.

        Args:
            owned: whether the tensors, on this process's device, are given away: they are not copied then.
        """
        module = self.blueprint(item).to_empty(device=self.device)
        self.register(item, module)
        with torch.no_grad():
            for name, parameter in self._own[item].items():
                if owned and self.fsdp is None:
                    parameter.data = state.tensors[name]
                else:
                    parameter.copy_(state.tensors[name])
        for name, layer in masks_of(item, module).items():
            if f"{name}.mask" in state.tensors:
                self.prune(item, name, layer, state.tensors[f"{name}.mask"].to(self.device))
        kept = {name: each.to(self.device) for name, each in state.tensors.items() if name.endswith(f".{REFERENCE}")}
        if kept:
            self.extras[item] = kept
        memories = {name: each.to(self.device) for name, each in state.tensors.items() if is_memory(item, name)}
        if memories:
            self.memories[item] = memories
        optimizer = self._optimizers[item]
        for name, parameter in self._own[item].items():
            if name in state.steps:
                moments = {key: state.tensors[f"{name}.{key}"].to(self.device) for key in MOMENTS}
                if not owned:
                    moments = {key: moment.clone() for key, moment in moments.items()}
                optimizer.load_state(parameter, state.steps[name], moments)
        self._share()

    def prune(self, item: str, name: str, layer: PrunableLinear, mask: torch.Tensor) -> None:
        """Prune the weight ``name`` of a held item to a whole ``mask``: weight and moments become zero elsewhere."""
        own = self._own[item][name]
        rows = self.local_rows(name, mask)
        with torch.no_grad():
            own.mul_(rows)
        for moment in self.moments(item, own).values():
            moment.mul_(rows)
        layer.set_mask(mask, self.sparse)

    def reorder(self, names: tuple[str, ...]) -> None:
        """Hold the items in this order; ``names`` are exactly the held ones."""
        self.modules = {name: self.modules[name] for name in names}
        self._own = {name: self._own[name] for name in names}
        self._optimizers = {name: self._optimizers[name] for name in names}
