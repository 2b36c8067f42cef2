r"""The local items of a pipeline rank: modules, parameters and optimizer state that move and are saved per item.

Three classes share the work::

                       ItemStore                 modules, parameters, extras, memories by item
                      /         \
          ItemBuilder            OptimizerStates  optimizer of all items; state by parameter name
         /
    ItemSharding                                  which part of a global tensor is local

    build(name)        initial weights, no optimizer state
    export(name)       -> ItemState -> migration or checkpoint -> load_state(name, state)
    step(lr, decay)    one optimizer update of all items

State is kept per parameter, never per stage, and the update of a parameter does not depend on the others, so that any
partition gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..models.layer_list import expert_biases_of, masks_of, parameters_of
from ..models.layers.feed_forward import join_gated_layers
from ..models.layers.linear import PrunableLinear
from ..models.layers.sparse_formats import SparseTable
from ..models.sharding import experts_of
from ..models.vocabulary.embedding import Embedding
from ..models.vocabulary.embedding_grad import PendingRows, most_pending
from ..models.vocabulary.vocabulary_shards import VocabularyShard
from .expert_bias import update_expert_biases
from .item_sharding import ItemBuilder, ItemSharding
from .item_state import FACTORS, REFERENCE, ItemState, is_memory, is_whole, parameter_of
from .optimizers.protocol import OptimizerContext, OptimizerSettings, StateShapes, Update


class OptimizerStates:
    """Optimizer of the local items: one for all of them, addressed by global parameter names.

    A tied copy whose owner is local, too, is an *alias*: it shares the owner's storage and moments, and one update
    serves both. Their values are the same bits anyway, because both get the same gradient.

    Args:
        settings: Hyperparameters.
        fused_adam: apex's ``FusedAdam``; None uses torch's AdamW.
        sharding: The part of each tensor that this process has; None: the whole tensor.
    """

    def __init__(
        self, settings: OptimizerSettings, fused_adam: type[Any] | None = None, sharding: ItemSharding | None = None
    ) -> None:
        self.settings = settings
        self._optimizer = settings.make(OptimizerContext(fused_adam=fused_adam, sharding=sharding))
        self._items: dict[str, tuple[str, ...]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._owners: dict[str, str] = {}

    def add(self, item: str, parameters: Mapping[str, nn.Parameter], num_rows: Mapping[str, int] | None = None) -> None:
        """Add the parameters of an item, without state; they replace those that the item had.

        Args:
            item: Name of the item.
            parameters: Global name -> local parameter.
            num_rows: Global name -> number of rows before ZeRO; None: those of the parameters.
        """
        if item in self._items:
            self.remove(item)
        self._items[item] = tuple(parameters)
        self._parameters.update(parameters)
        self._optimizer.add(parameters, num_rows)

    def remove(self, item: str) -> None:
        """Drop the parameters of an item; an alias that stays takes over the moments of an owner that leaves."""
        leaving = self._items.pop(item)
        for copy, owner in list(self._owners.items()):
            if copy in leaving or owner in leaving:
                del self._owners[copy]
                if copy not in leaving and (moments := self.moments(owner)):
                    self.load(copy, self.steps(owner), moments)
        self._optimizer.remove([self._parameters.pop(name) for name in leaving])

    def alias(self, ties: Mapping[str, str]) -> None:
        """Make an alias of each tied copy whose owner is local.

        Args:
            ties: Parameter that is a copy -> parameter that owns the value.
        """
        for copy, owner in ties.items():
            if copy in self._parameters and owner in self._parameters and copy not in self._owners:
                parameter = self._parameters[copy]
                # ``data``, not the Parameter object: modules and the optimizer keep their references.
                parameter.data = self._parameters[owner].data
                # Equal by construction: both copies had the same gradients in every update.
                self._optimizer.drop_state(parameter)
                self._owners[copy] = owner

    def is_alias(self, parameter_name: str) -> bool:
        """Whether a tied copy shares storage and moments with its owner."""
        return parameter_name in self._owners

    @property
    def skips_on_device(self) -> bool:
        """Whether a skipped update does not wait for the device."""
        return self._optimizer.skips_on_device

    def step(self, update: Update) -> None:
        """Update every parameter that has a gradient, as ``update`` describes, and drop the gradients."""
        # The owner has the same gradient; a second update of the shared storage would apply it twice.
        for copy in self._owners:
            self._parameters[copy].grad = None
        self._optimizer.step(update)

    def moments(self, parameter_name: str) -> dict[str, torch.Tensor]:
        """Return the live state tensors of a parameter, such as ``exp_avg``; empty before its first update."""
        return self._optimizer.moments(self._parameters[self._owners.get(parameter_name, parameter_name)])

    def steps(self, parameter_name: str) -> int:
        """Return the number of updates of a parameter."""
        return self._optimizer.steps(self._parameters[self._owners.get(parameter_name, parameter_name)])

    def load(self, parameter_name: str, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue a parameter from this state.

        Args:
            parameter_name: Global name.
            steps: Number of updates.
            moments: State tensors of the shapes of :meth:`state_shapes`; not copied, except to another dtype.
        """
        # A checkpoint may be of a run with other dtypes.
        cast = {key: moment.to(self.settings.state_dtype(key)) for key, moment in moments.items()}
        self._optimizer.load_state(self._parameters[parameter_name], steps, cast)

    def state_shapes(self, parameter_name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return the shape of each state tensor of a parameter of this ``shape`` after an update, by name."""
        return self.settings.state_shapes(parameter_name, shape)

    def drop(self, parameter_names: set[str]) -> None:
        """Drop the state of parameters that will not train any more."""
        for name in parameter_names & self._parameters.keys():
            self._optimizer.drop_state(self._parameters[name])


class ItemStore:
    """The items of this process: built, exported, loaded and dropped one by one.

    Args:
        builder: Builds the local part of an item.
        optimizers: Optimizer state of the items.
        sparse: Thresholds above which pruned products run in CSR form.

    Attributes:
        modules: Item -> module, in list order after :meth:`reorder`.
        extras: Item -> tensor name -> tensor of a technique. It moves and is saved with the item.
        memories: Item -> tensor name -> ``[1, ...]`` tensor of gradient compression; each process has its own.
    """

    def __init__(self, builder: ItemBuilder, optimizers: OptimizerStates, sparse: SparseTable) -> None:
        self.builder, self.optimizers, self._sparse = builder, optimizers, sparse
        self.sharding, self.family, self.device = builder.sharding, builder.sharding.family, builder.device
        self.modules: dict[str, nn.Module] = {}
        self.extras: dict[str, dict[str, torch.Tensor]] = {}
        self.memories: dict[str, dict[str, torch.Tensor]] = {}
        self._local: dict[str, dict[str, nn.Parameter]] = {}
        # With ZeRO: shards of the vocabulary of which other replicas have newer rows.
        self._stale: set[str] = set()

    def build(self, name: str) -> None:
        """Add an item with its initial weights and no optimizer state."""
        self.register(name, self.builder.build(name))
        self._alias_ties()

    def initial_values(self, item: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return initial values of some parameters of an item, such as adapters that a checkpoint does not have.

        With ZeRO these are the local rows.
        """
        initial = parameters_of(item, self.builder.build(item)) if names else {}
        return {name: self.sharding.local_rows(name, initial[name].detach()) for name in names}

    def blueprint(self, name: str) -> nn.Module:
        """Build this process's part of an item on the meta device."""
        return self.builder.blueprint(name)

    def _alias_ties(self) -> None:
        # ZeRO keeps its own storage for the rows of each parameter; a copy cannot share it.
        if self.sharding.fsdp is None:
            self.optimizers.alias(self.family.ties)

    def register(self, name: str, module: nn.Module) -> None:
        """Add ``module`` as the item ``name``."""
        sharding = self.sharding
        if sharding.fsdp is None:
            join_gated_layers(module)
        local = dict(module.named_parameters())
        self.builder.compile(module)
        # Gradients by token need the module's own lookup: FSDP2 and tensor parallelism replace its table, and a
        # compiler traces it.
        plain = self.builder.compiling is None and sharding.fsdp is None and sharding.region is None
        if plain and isinstance(module, Embedding):
            module.pending = PendingRows(module.word.weight, most_pending(len(module.word.weight)))
        if isinstance(module, VocabularyShard):
            module.collect_gradients()
        num_rows = {f"{name}.{child}": parameter.shape[0] for child, parameter in local.items() if parameter.dim()}
        if sharding.fsdp is not None and isinstance(module, VocabularyShard):
            # FSDP2 gathers around the forward and backward of a module, which S and T are not. Parameters and gradients
            # stay whole, and the replicas share the optimizer: each updates its rows in place.
            rows = {child: (sharding.fsdp.rows(p.detach()), p.requires_grad) for child, p in local.items()}
            local = {child: nn.Parameter(*each) for child, each in rows.items()}
        elif sharding.fsdp is not None:
            local = sharding.fsdp.wrap(module, [] if sharding.dispatcher is None else experts_of(module))
        self.modules[name] = module
        self._local[name] = {f"{name}.{child}": parameter for child, parameter in local.items()}
        self.optimizers.add(name, self._local[name], num_rows)

    def drop(self, name: str) -> None:
        """Remove an item with its state."""
        self.optimizers.remove(name)
        del self.modules[name], self._local[name]
        self._stale.discard(name)
        self.extras.pop(name, None)
        self.memories.pop(name, None)

    def reorder(self, names: tuple[str, ...]) -> None:
        """Put the items in this order; ``names`` are exactly those of the store."""
        self.modules = {name: self.modules[name] for name in names}
        self._local = {name: self._local[name] for name in names}

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield (item, global parameter name, parameter), in the order of the items; with ZeRO, the local rows."""
        for item, local in self._local.items():
            for name, parameter in local.items():
                yield item, name, parameter

    def local_parameters(self, item: str) -> Mapping[str, nn.Parameter]:
        """Return the parameters of one item by global name, as :meth:`parameters` yields them."""
        return self._local[item]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tensors of gradient compression."""
        return sum(tensor.nbytes for memories in self.memories.values() for tensor in memories.values())

    def materialize_grads(self, item: str) -> None:
        """Write gradients that are pending by token (embedding tables) to ``grad``."""
        pending = getattr(self.modules[item], "pending", None)
        if pending is not None:
            pending.materialize_grads()

    def start_sharded_reduction(self, item: str) -> None:
        """With ZeRO: start to sum the replicas' gradients of an item."""
        fsdp, module = self.sharding.fsdp, self.modules[item]
        if fsdp is not None and isinstance(module, VocabularyShard):
            for name, whole in parameters_of(item, module).items():
                self._local[item][name].grad = None if whole.grad is None else fsdp.sum_rows(whole.grad)
                whole.grad = None
        elif fsdp is not None:
            fsdp.start_reduction(module)

    def finish_sharded_reduction(self) -> None:
        """With ZeRO: wait for the sums of all items and keep this replica's rows of them."""
        if self.sharding.fsdp is not None:
            self.sharding.fsdp.finish_reduction(
                (module, {name[len(item) + 1 :]: parameter for name, parameter in self._local[item].items()})
                for item, module in self.modules.items()
            )

    def gather_shards(self) -> None:
        """With ZeRO: gather the rows that other replicas have updated or loaded; a collective over the replicas."""
        for item, module in self.modules.items():
            if item in self._stale:
                with torch.no_grad():
                    for name, whole in parameters_of(item, module).items():
                        whole.copy_(self.sharding.gather_rows(name, self._local[item][name], whole.shape[0]))
        self._stale.clear()

    def _mark_stale(self, item: str) -> None:
        if self.sharding.fsdp is not None and isinstance(self.modules[item], VocabularyShard):
            self._stale.add(item)

    def reshard(self) -> None:
        """With ZeRO: free the parameters that a forward without backward has gathered."""
        if self.sharding.fsdp is not None:
            for module in self.modules.values():
                self.sharding.fsdp.reshard(module)

    def step(self, update: Update, group: dist.ProcessGroup | None = None) -> None:
        """Update every parameter that has a gradient, and the biases of experts; drop the gradients.

        Args:
            update: Learning rates, clipping, and whether the step is skipped.
            group: Ranks that have other tokens of the step; None with one.
        """
        self.optimizers.step(update)
        update_expert_biases(self.modules.values(), group, update.skip)
        for item, module in self.modules.items():
            self._mark_stale(item)
            # A sparse form of a weight is a copy of its values, which the update has changed.
            for name, layer in masks_of(item, module).items():
                if self.optimizers.settings.MOVES_PRUNED and layer.mask is not None:
                    parameter = self._local[item][name]
                    parameter.detach().mul_(self.sharding.local_rows(name, layer.mask))
                layer.weights_changed()

    def export(self, item: str) -> ItemState:
        """Return the local state of an item; the tensors are the live ones, not copies."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, int] = {}
        masks = masks_of(item, self.modules[item])
        for name, parameter in self._local[item].items():
            tensors[name] = parameter.detach()
            if name in masks and (mask := masks[name].mask) is not None:
                tensors[f"{name}.mask"] = mask
            if moments := self.optimizers.moments(name):
                tensors.update({f"{name}.{key}": value for key, value in moments.items()})
                steps[name] = self.optimizers.steps(name)
        tensors.update(expert_biases_of(item, self.modules[item]))
        tensors.update(self.extras.get(item, {}))
        tensors.update(self.memories.get(item, {}))
        return ItemState(tensors=tensors, steps=steps)

    def export_unsharded(self, item: str) -> ItemState:
        """Return the state of an item with all rows; with ZeRO a collective over the replicas.

        Tensors of gradient compression differ by process and stay as they are.
        """
        state = self.export(item)
        if self.sharding.fsdp is None:
            return state
        rows = {name: parameter.shape[0] for name, parameter in parameters_of(item, self.blueprint(item)).items()}
        tensors = {
            name: tensor
            if is_whole(name) or is_memory(item, name)
            else self.sharding.gather_rows(name, tensor, rows[parameter_of(name)])
            for name, tensor in state.tensors.items()
        }
        return ItemState(tensors=tensors, steps=state.steps)

    def load_state(self, item: str, state: ItemState, *, owned: bool = False) -> None:
        """Add an item with exactly this state.

        Args:
            item: Name of the item; it replaces an item of that name.
            state: Local tensors, as :meth:`export` returns them.
            owned: Use the tensors, which are on this device, as they are; False copies them.

        Raises:
            KeyError: A parameter or the bias of a router is missing in ``state``.
        """

        def here(name: str) -> torch.Tensor:
            tensor = state.tensors[name].to(self.device)
            # What is not copied must not be a view of the caller's memory, which may be overwritten.
            return tensor if owned or tensor is not state.tensors[name] else tensor.clone()

        # From the meta device: initial weights would cost time, and memory next to those that arrive.
        module = self.blueprint(item).to_empty(device=self.device)
        self.register(item, module)
        self._mark_stale(item)
        local = self._local[item]
        with torch.no_grad():
            for name, parameter in local.items():
                # With ZeRO the rows stay in place: FSDP2's parameters in the module share their memory.
                if owned and self.sharding.fsdp is None:
                    parameter.data = state.tensors[name]
                else:
                    parameter.copy_(state.tensors[name])
            for name, bias in expert_biases_of(item, module).items():
                bias.copy_(state.tensors[name])
            if owned and self.sharding.fsdp is None:
                join_gated_layers(module)
        for name, layer in masks_of(item, module).items():
            if f"{name}.mask" in state.tensors:
                self.prune(item, name, layer, here(f"{name}.mask"))
        references = [name for name in state.tensors if name.endswith(f".{REFERENCE}")]
        if references:
            self.extras[item] = {name: here(name) for name in references}
        memories = [name for name in state.tensors if is_memory(item, name)]
        if memories:
            self.memories[item] = {name: here(name) for name in memories}
        for name in [name for name in local if name in state.steps]:
            keys = self.optimizers.state_shapes(name, local[name].shape)
            self.optimizers.load(name, state.steps[name], {key: here(f"{name}.{key}") for key in keys})
        self._alias_ties()

    def prune(self, item: str, name: str, layer: PrunableLinear, mask: torch.Tensor) -> None:
        """Prune a weight: set it and its moments to zero outside of the mask.

        Args:
            item: Item of the weight.
            name: Global name of the weight.
            layer: Layer that has the weight.
            mask: bool, ``[O, I]``, the shape of the layer's weight before ZeRO; True keeps an entry.
        """
        parameter = self._local[item][name]
        rows = self.sharding.local_rows(name, mask)
        with torch.no_grad():
            parameter.mul_(rows)
        # AdamW would move a pruned weight away from zero as long as its moments are not zero.
        for key, moment in self.optimizers.moments(name).items():
            # A factor is a mean over pruned and other weights. The update is a multiple of the gradient: zero here.
            if key not in FACTORS:
                moment.mul_(rows)
        layer.set_mask(mask, self._sparse)
