"""Low-rank adaptation (LoRA, Hu et al., arXiv:2106.09685): frozen layers with trained products of two small matrices.

    y = x W^T + alpha / rank * dropout(x) A^T B^T          W frozen, A [r, I] and B [O, r] trained

A layer has one adapter per projection, by the names of Hugging Face's modules. Queries, keys and values are rows of one
weight, grouped by key-value head; their adapters are separate, and the update is assembled in the order of the rows.

    layers.N.attention.qkv    q_proj, k_proj, v_proj        layers.N.mlp.gate, up, fc2    gate_proj, up_proj, down_proj
    layers.N.attention.dense  o_proj                        layers.N.mlp.fc1              fc1

``LoraFamily`` wraps any decoder: the adapters are parameters of their item (``layers.0.attention.qkv.adapter.lora_A.
q_proj``), so that they move, are saved and optimized with it. B starts from zero: the first loss is that of the model.
Under tensor parallelism the adapter of a column-parallel layer has the whole A and its rows of B, that of a
row-parallel one its columns of A and the whole B.

Shapes in names: I input features, O output features, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._common.errors import UsageError
from ..parallel.random_stream import item_dropout
from ..parallel.seeding import stable_seed
from .attention.self_attention import SelfAttention
from .layer_list import ItemSpec, ModelFamily
from .layers.feed_forward import FeedForward
from .layers.linear import PrunableLinear

FIELD = "x_lora"
"""Key of a manifest's model that states the adapters."""
QUERY, KEY, VALUE = "q_proj", "k_proj", "v_proj"
FUSED = (QUERY, KEY, VALUE)
# Layer of an item -> its projections.
PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "qkv": FUSED,
    "dense": ("o_proj",),
    "gate": ("gate_proj",),
    "up": ("up_proj",),
    "fc1": ("fc1",),
    "fc2": ("down_proj",),
}
TARGETS = tuple(name for names in PROJECTIONS.values() for name in names)
ADAPTER = ".adapter.lora_"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Rank, scale and place of the adapters.

    Attributes:
        rank: rank r of the products.
        alpha: the update is scaled by alpha / rank.
        targets: projections that have an adapter, of ``TARGETS``.
        dropout: dropout probability of an adapter's input.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor on the update."""
        return self.alpha / self.rank


class Adapter(nn.Module):
    """The update of one linear layer: a product for each of its projections that has one.

    Args:
        settings: rank and scale.
        rows: projection -> output features, for all projections of the layer in their order.
        inputs: input features I.
        heads: heads per key-value head, where the rows are those of queries, keys and values; 0 for other layers.
        head_width: width of a head.
        device: where the parameters are created.
    """

    def __init__(
        self,
        settings: LoraSettings,
        *,
        rows: Mapping[str, int],
        inputs: int,
        device: torch.device,
        heads: int = 0,
        head_width: int = 0,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = settings.scale, settings.dropout
        self.projections, self.heads, self.head_width = tuple(rows), heads, head_width
        chosen = [name for name in rows if name in settings.targets]
        rank = settings.rank
        self.lora_A = nn.ParameterDict({name: torch.empty(rank, inputs, device=device) for name in chosen})
        self.lora_B = nn.ParameterDict({name: torch.zeros(rows[name], rank, device=device) for name in chosen})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The update of the layer's output: ``x`` ``[..., I]`` to ``[..., O]``."""
        parts: dict[str, torch.Tensor] = {}
        for name, a_rI in self.lora_A.items():
            dropped = item_dropout(x, self.dropout, self.training)
            parts[name] = self.scale * F.linear(F.linear(dropped, a_rI), self.lora_B[name])
        if not self.heads:
            (update,) = parts.values()
            return update
        return self._in_order_of_rows({name: parts.get(name) for name in self.projections}, x)

    def _in_order_of_rows(self, parts: Mapping[str, torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values ``[..., rows]`` in the layer's order: by key-value head, its queries first."""
        heads = {name: self.heads if name == QUERY else 1 for name in parts}
        # Read off a part: a tensor-parallel slice has fewer key-value heads.
        groups = next(
            part.shape[-1] // (heads[name] * self.head_width) for name, part in parts.items() if part is not None
        )
        grouped = [
            x.new_zeros(*x.shape[:-1], groups, heads[name], self.head_width)
            if part is None
            else part.unflatten(-1, (groups, heads[name], self.head_width))
            for name, part in parts.items()
        ]
        return torch.cat(grouped, dim=-2).flatten(-3)

    def delta(self) -> torch.Tensor:
        """What the adapter adds to the layer's weight, ``[O, I]``."""
        parts: dict[str, torch.Tensor] = {
            name: self.scale * (self.lora_B[name] @ a_rI) for name, a_rI in self.lora_A.items()
        }
        if not self.heads:
            (delta,) = parts.values()
            return delta
        (inputs,) = {a_rI.shape[1] for a_rI in self.lora_A.values()}
        transposed = {name: parts[name].t() if name in parts else None for name in self.projections}
        some = next(iter(self.lora_A.values()))
        return self._in_order_of_rows(transposed, some.new_zeros(inputs, 1)).t()


def is_adapter(parameter: str) -> bool:
    """Whether a parameter is an adapter's, by its global name."""
    return ADAPTER in parameter


def targets_of(text: str, *, gated: bool, experts: bool, latent: bool = False) -> tuple[str, ...]:
    """The projections of ``--lora-target-modules``.

    Args:
        text: names separated by commas; ``all`` are all linear layers of the blocks, without experts.
        gated: whether the MLP of the model is gated.
        experts: whether the model has experts.
        latent: whether queries, keys and values are products of latents, which have no adapters.

    Raises:
        UsageError: a name is not a projection of this model.
    """
    mlp = () if experts else ("gate_proj", "up_proj", "down_proj") if gated else ("fc1", "down_proj")
    known = (*(() if latent else FUSED), "o_proj", *mlp)
    names = known if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        without = (("products of latents", latent, set(FUSED)), ("experts", experts, set(TARGETS) - set(FUSED)))
        parts = [part for part, is_on, theirs in without if is_on and theirs & set(unknown)]
        because = f"; {' and '.join(parts)} have no adapters" if parts and set(unknown) <= set(TARGETS) else ""
        raise UsageError(
            f"--lora-target-modules {text}: {', '.join(map(repr, unknown))} is not a projection of this model"
            f"{because}; name some of {', '.join(known)}, or all"
        )
    # In the order of the table: the manifest, and the order of parameters, do not depend on that of the option.
    return tuple(name for name in TARGETS if name in names)


class LoraFamily:
    """``base`` with adapters, and all other parameters frozen; satisfies ``layer_list.ModelFamily``.

    Args:
        base: a decoder.
        settings: the adapters.
        seed: of the run.
    """

    def __init__(self, base: ModelFamily, settings: LoraSettings, *, seed: int) -> None:
        self.base, self.settings, self.seed = base, settings, seed

    @property
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list of the base family."""
        return self.base.items

    @property
    def ties(self) -> Mapping[str, str]:
        """The ties of the base family."""
        return self.base.ties

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        module = self.base.build(name, device).requires_grad_(False)
        for layer_name, layer in adapted_layers(module, self.settings).items():
            layer.adapter = _adapter_of(module, layer_name, layer, self.settings)
            if device.type == "meta":
                continue
            for projection, a_rI in layer.adapter.lora_A.items():
                seed = stable_seed(self.seed, "initial", f"{name}.{layer_name}{ADAPTER}A.{projection}")
                # As torch's linear layers are: uniform within 1 / sqrt(I).
                drawn = torch.rand(a_rI.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
                with torch.no_grad():
                    a_rI.copy_(drawn / math.sqrt(a_rI.shape[1]))
        return module

    def split_dim(self, parameter: str) -> int | None:
        """As in the base family; an adapter is split as its layer is, B along the outputs or A along the inputs."""
        if not is_adapter(parameter):
            return self.base.split_dim(parameter)
        layer, _, matrix = parameter.partition(ADAPTER)
        dim = self.base.split_dim(f"{layer}.weight")
        # The other matrix is whole, and each rank computes a part of its gradient: see ``add_partial_gradients``.
        return dim if dim == (1 if matrix.startswith("A.") else 0) else None

    @cached_property
    def frozen_front(self) -> tuple[str, ...]:
        """Names of the items before the first one with an adapter: no backward passes through them."""
        meta = torch.device("meta")
        names = [item.name for item in self.items]
        has_adapter = (bool(adapted_layers(self.base.build(name, meta), self.settings)) for name in names)
        return tuple(names[: next((at for at, found in enumerate(has_adapter) if found), len(names))])

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest, with the adapters."""
        stated = {**asdict(self.settings), "targets": list(self.settings.targets)}
        del stated["dropout"]  # of the training, not of the model
        return {**self.base.manifest(), FIELD: stated}


def adapted_layers(module: nn.Module, settings: LoraSettings) -> dict[str, PrunableLinear]:
    """The linear layers of an item that have an adapter, by their names."""
    if not isinstance(module, SelfAttention | FeedForward):
        return {}
    layers = {name: layer for name, layer in module.named_children() if isinstance(layer, PrunableLinear)}
    return {name: layer for name, layer in layers.items() if set(PROJECTIONS.get(name, ())) & set(settings.targets)}


def _adapter_of(module: nn.Module, name: str, layer: PrunableLinear, settings: LoraSettings) -> Adapter:
    outputs, inputs = layer.weight.shape
    device = layer.weight.device
    if not (isinstance(module, SelfAttention) and name == "qkv"):
        return Adapter(settings, rows={PROJECTIONS[name][0]: outputs}, inputs=inputs, device=device)
    heads, width = module.queries_per_group, module.head_width
    groups = outputs // ((heads + 2) * width)
    rows = {QUERY: groups * heads * width, KEY: groups * width, VALUE: groups * width}
    return Adapter(settings, rows=rows, inputs=inputs, device=device, heads=heads, head_width=width)


@torch.no_grad()
def merge_adapters(module: nn.Module) -> None:
    """Add the adapters of an item to its weights, in place, and remove them."""
    for layer in module.modules():
        if isinstance(layer, PrunableLinear) and isinstance(layer.adapter, Adapter):
            layer.weight.add_(layer.adapter.delta().to(layer.weight.dtype))
            layer.adapter = None
            layer.weights_changed()


def stored_settings(model: Mapping[str, Any]) -> LoraSettings | None:
    """The adapters that the ``model`` object of a manifest states; None without any.

    Raises:
        KeyError, TypeError: the statement is not complete.
    """
    stated = model.get(FIELD)
    if stated is None:
        return None
    return LoraSettings(rank=stated["rank"], alpha=stated["alpha"], targets=tuple(stated["targets"]))


def compare_adapters(
    stored: Mapping[str, Any], expected: Mapping[str, Any], *, resumes: bool
) -> tuple[dict[str, Any], list[str]]:
    """What a checkpoint's model must still state, and the difference if its adapters cannot be those of a run.

    Args:
        stored: ``model`` object of the checkpoint.
        expected: that of the run.
        resumes: whether the run resumes training.
    """
    remaining = dict(expected)
    if FIELD in stored and FIELD in expected and stored.get("kv_lora_rank") is not None:
        # Earlier versions stated targets that no layer of a model with latents has: its adapters are the same.
        targets = [name for name in stored[FIELD]["targets"] if name not in FUSED]
        if expected[FIELD] == {**stored[FIELD], "targets": targets}:
            remaining[FIELD] = stored[FIELD]
    if FIELD in stored and FIELD not in expected:
        rank = stored[FIELD]["rank"]
        return remaining, [
            f"it has adapters of rank {rank}, and this run has none: give --lora-rank, or merge them with"
            " dynmo-train export-adapter --merge"
        ]
    if FIELD not in stored and not resumes:
        # Adapters start from their initial values on any model.
        remaining.pop(FIELD, None)
    return remaining, []
