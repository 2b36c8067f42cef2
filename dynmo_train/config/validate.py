"""Validation of a complete configuration: every rule over several options."""

from __future__ import annotations

from .._common.document import DocumentError, Problem
from .extensions import installed_techniques, package_techniques
from .rules.compression import COMPRESSION_RULES
from .rules.effect import EFFECT_RULES
from .rules.float8 import FLOAT8_RULES
from .rules.graphs import GRAPH_RULES
from .rules.ict import ICT_RULES
from .rules.model import MODEL_RULES
from .rules.parallel import PARALLEL_RULES
from .rules.problem import Rule
from .rules.techniques import TECHNIQUES_RULES
from .rules.training import TRAINING_RULES
from .schema import Config

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *ICT_RULES,
    *PARALLEL_RULES,
    *TRAINING_RULES,
    *TECHNIQUES_RULES,
    *COMPRESSION_RULES,
    *FLOAT8_RULES,
    *GRAPH_RULES,
    *EFFECT_RULES,
)


def validate(config: Config, world_size: int) -> list[Problem]:
    """All conflicts between options, for a run of ``world_size`` processes."""
    specs = (*package_techniques().values(), *installed_techniques().values())
    rules = (*RULES, *(spec.check for spec in specs if spec.check is not None))
    return [problem for rule in rules for problem in rule(config, world_size)]


def check(config: Config, world_size: int) -> None:
    """Check all rules over several options, for a run of ``world_size`` processes.

    Raises:
        DocumentError: options conflict (exit code 2); reports all conflicts.
    """
    problems = validate(config, world_size)
    if problems:
        raise DocumentError("the configuration", problems)
