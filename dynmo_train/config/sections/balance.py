"""Options of placement and migration."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..._common.document import MAX_RANKS
from .. import panels
from ..options import option

BalanceMode = Literal["off", "online", "offline"]
BalancePolicy = Literal["never", "always", "threshold", "regret"]
Granularity = Literal["layer", "sublayer"]
Planner = Literal["internal", "external"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Placement and migration of layers."""

    PANEL: ClassVar[str] = panels.BALANCING

    balance: BalanceMode = option(
        "Layer migration: off, online (dynmo-plan decides), or offline (--plan, no migration).",
        default="off",
        common=True,
    )
    plan: str | None = option("Initial partition plan.", default=None, refers_to="file", common=True)
    rebalance_interval: int = option("Steps between possible migrations.", default=10, minimum=1, common=True)
    granularity: Granularity = option(
        "Unit of placement: whole blocks, or attention and MLP separately.", default="layer", common=True
    )
    balancer: str = option(
        "Partitioning algorithm of the planner; `dynmo-plan partition --help` lists them.", default="exact", common=True
    )
    balance_policy: BalancePolicy = option("Policy that decides when to migrate.", default="threshold", common=True)
    balance_min_gain: float = option(
        "Minimum predicted gain of a migration, as a fraction of step time.",
        default=0.02,
        minimum=0,
        below=1,
    )
    balance_experts: bool = option("Migrate experts between their ranks, too, by the same plans.", default=False)
    balance_lockstep: bool = option("Wait for the planner's answer before continuing.", default=False)
    pack_to: int | None = option(
        "Number of pipeline ranks to shrink to; none: release none.",
        default=None,
        minimum=1,
        maximum=MAX_RANKS,
        common=True,
        panel=panels.ELASTICITY,
    )
    min_throughput_fraction: float | None = option(
        "Release pipeline ranks while this fraction of balanced throughput remains.",
        default=None,
        above=0,
        maximum=1,
        panel=panels.ELASTICITY,
    )
    expert_plan: str | None = option(
        "Initial placement of experts on ranks, from `dynmo-plan experts`.", default=None, refers_to="file"
    )
    expert_rebalance_interval: int | None = option(
        "Steps between possible migrations of experts; none: experts stay.", default=None, minimum=1
    )
    planner: Planner = option(
        "Start dynmo-plan watch (internal), or use one started elsewhere (external).", default="internal"
    )
    planner_timeout_s: float = option(
        "Seconds to wait for the planner; its heartbeat gets at least 10.",
        default=30.0,
        above=0,
    )
    profile_interval: int = option("Steps between profile records.", default=1, minimum=1, panel=panels.LOGGING)
