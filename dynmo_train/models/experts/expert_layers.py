"""Which blocks of a model have experts, and the width of an expert.

DeepSeek's first blocks are dense (Dai et al. 2024, arXiv:2401.06066, section 4.1), Qwen3-MoE may have every N-th one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...config import Config


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """Blocks with experts.

    Attributes:
        ffn_size: width inside each expert; None is that of the dense MLPs.
        layers: 1 for each block that has experts, 0 for each that has a dense MLP; None means that all have experts.
    """

    ffn_size: int | None = None
    layers: tuple[int, ...] | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether block ``layer``, from 0, has experts; the blocks of multi-token prediction are as the last one."""
        return self.layers is None or bool(self.layers[min(layer, len(self.layers) - 1)])

    def layout(self) -> dict[str, object]:
        """The fields of a manifest's ``model`` object: those that differ from experts of one width in all blocks."""
        found: dict[str, object] = {}
        if self.layers is not None:
            found["moe_layer_pattern"] = list(self.layers)
        if self.ffn_size is not None:
            found["moe_ffn_hidden_size"] = self.ffn_size
        return found


def layout_of_config(config: Config) -> dict[str, Any]:
    """The fields of :class:`ExpertLayers` of a run."""
    model = config.model
    own = model.moe_ffn_hidden_size
    return {"ffn_size": None if own in (None, model.ffn_hidden_size) else own, "layers": model.expert_layers}


def layout_of_manifest(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`ExpertLayers` of a manifest's ``model`` object; older manifests have none of them."""
    pattern = model.get("moe_layer_pattern")
    return {"ffn_size": model.get("moe_ffn_hidden_size"), "layers": None if pattern is None else tuple(pattern)}
