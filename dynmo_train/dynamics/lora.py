"""LoRA as a technique: its options, the model with adapters, and the parameters that receive no update.

The items before the first adapter are a frozen front, as with layer freezing: they run no backward, and no gradient
is sent to them. Frozen weights behind it pass gradients on, and have none: their product is not computed, and they have
no optimizer state. ``models/lora.py`` has the layers. This module does not import torch: ``--help`` loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .._common.document import Problem
from .._common.errors import UsageError
from ..config import panels
from ..config.extensions import TechniqueSpec
from ..config.options import option
from ..config.rules.problem import conflict, unsupported
from .technique import Technique, TechniqueBuilder, TechniqueContext

if TYPE_CHECKING:
    from ..config import Config
    from ..models.layer_list import ModelFamily
    from ..models.lora import LoraSettings


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation of a model whose weights are frozen."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    lora_rank: int | None = option(
        "Rank of LoRA adapters; other weights are frozen; none: no adapters.", default=None, minimum=1
    )
    lora_alpha: float | None = option(
        "Scale of adapters times their rank; none: twice the rank.", default=None, above=0
    )
    lora_dropout: float = option("Dropout probability of the input of adapters.", default=0.0, minimum=0, below=1)
    lora_target_modules: str = option(
        "Projections with adapters, such as q_proj,v_proj; all: every linear layer.", default="all"
    )
    lora_save_adapters: bool = option(
        "Save adapters without the frozen weights, which remain in --load.", default=False
    )


def saves_adapters_only(config: Config) -> bool:
    """Whether checkpoints have the adapters without the weights under them."""
    # Another registry of techniques may have no adapters.
    return any(isinstance(each, LoraConfig) and each.lora_save_adapters for each in config.extensions.values())


def settings_of(config: Config) -> LoraSettings | None:
    """The adapters of a run; None without any.

    Raises:
        UsageError: a target is not a projection of the model.
    """
    from ..config.schema import GATED_ACTIVATIONS
    from ..models.lora import LoraSettings, targets_of

    options, model = config.options_of(LoraConfig), config.model
    if options.lora_rank is None:
        return None
    experts = model.num_experts is not None
    return LoraSettings(
        rank=options.lora_rank,
        alpha=options.lora_alpha or 2.0 * options.lora_rank,
        dropout=options.lora_dropout,
        targets=targets_of(
            options.lora_target_modules,
            gated=model.activation in GATED_ACTIVATIONS,
            experts=experts,
            latent=model.multi_latent_attention,
        ),
    )


def _check(config: Config, _world_size: int) -> Iterator[Problem]:
    options = config.options_of(LoraConfig)
    if options.lora_rank is None:
        for flag, is_given in (
            ("--lora-alpha", options.lora_alpha is not None),
            ("--lora-dropout", options.lora_dropout > 0),
            ("--lora-target-modules", options.lora_target_modules != "all"),
            ("--lora-save-adapters", options.lora_save_adapters),
        ):
            if is_given:
                yield conflict(flag, "has no effect without --lora-rank")
        return
    if config.model.base_family not in ("gpt", "llama"):
        yield unsupported("--lora-rank", f"is for gpt and llama, not for {config.model.family}")
        return
    if options.lora_save_adapters and config.run.load is None:
        yield conflict("--lora-save-adapters", "needs the checkpoint that has the other weights; give --load BASE")
    try:
        settings_of(config)
    except UsageError as error:
        yield Problem("--lora-target-modules", "choice", str(error))
    excluded = {
        "--fp8": config.precision.fp8,
        "--sparsify": config.pruning.sparsify,
        "--freeze-schedule": config.freezing.freeze_schedule is not None,
        "--freeze-adaptive": bool(config.freezing.freeze_adaptive),
        "--mod-capacity": config.depth.mod_capacity is not None,
        "--early-exit-layers": config.exits.early_exit_layers is not None,
        "--inter-grad-comp": config.compression.inter_grad_comp,
        "--grad-comp": config.compression.grad_comp,
    }
    for flag in [flag for flag, is_on in excluded.items() if is_on]:
        yield unsupported("--lora-rank", f"is given with {flag}; remove one")


class FrozenBase(Technique):
    """No update of any parameter but those of adapters.

    Args:
        front: names of the items before the first adapter.
        context: what the technique works on.
    """

    def __init__(self, front: tuple[str, ...], context: TechniqueContext) -> None:
        self.frozen_items, self._store = front, context.store

    def frozen_parameters(self) -> set[str]:
        """Names of this process's parameters that receive no update."""
        from ..models.lora import is_adapter

        return {name for _, name, _ in self._store.parameters() if not is_adapter(name)}


def _build(config: Config) -> TechniqueBuilder | None:
    if config.options_of(LoraConfig).lora_rank is None:
        return None

    def build(context: TechniqueContext) -> Technique:
        from ..models.families.vocabulary_family import VocabularyShardedFamily
        from ..models.lora import LoraFamily

        family = context.family
        if isinstance(family, VocabularyShardedFamily):
            family = family.base
        return FrozenBase(family.frozen_front if isinstance(family, LoraFamily) else (), context)

    return build


def _wrap_family(config: Config, family: ModelFamily) -> ModelFamily:
    settings = settings_of(config)
    if settings is None:
        return family
    from ..models.lora import LoraFamily

    return LoraFamily(family, settings, seed=config.training.seed)


def _wrap_stored(model: Mapping[str, Any], family: ModelFamily) -> ModelFamily:
    from ..models.lora import LoraFamily, stored_settings

    settings = stored_settings(model)
    # The seed of initial weights does not matter to a model that is read.
    return family if settings is None else LoraFamily(family, settings, seed=0)


TECHNIQUE = TechniqueSpec(
    build=_build, options=LoraConfig, check=_check, wrap_family=_wrap_family, wrap_stored=_wrap_stored
)
