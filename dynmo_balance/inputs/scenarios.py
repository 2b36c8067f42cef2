"""Scripted trajectories: how the costs of a model change over a run under each dynamic technique.

Each is a stated model of what the technique does to each item; what that costs comes from formulas (``StatedCosts``) or
from measured operators (``MeasuredCosts``). All take the dense costs, the number of steps and a seed.

* ``pruning``: gradual pruning to a final sparsity by the cubic schedule of Zhu and Gupta (2017, arXiv 1710.01878).
  Global magnitude pruning makes layers uneven, modelled by a spread of the sparsity that increases with depth.
* ``freezing``: the frozen front grows in equal steps to a final share of the layers.
* ``moe``: the busiest expert of each layer sets the time of its MLP; the skew drifts over layers and steps.
* ``mod``: every other block computes only a share of the tokens, from the first step on (Raposo et al. 2024, arXiv
  2404.02258, which finds 12.5 % in every other block best).
* ``early-exit``: at each of some evenly spaced exits a share of the tokens leaves, which grows with training.
* ``sparse-attention``: the attention of each layer keeps a share of its scores that drifts between the sparsest and the
  densest. The projections stay dense.
* ``static``: nothing changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._common.errors import UsageError
from ..costs.cost_window import ItemCosts, scaled
from ..costs.sparsity import PRUNED_KINDS, SparsityModel
from ..costs.stated_costs import StatedCosts, TechniqueCosts
from ..formats.profile import Header
from ..partition.uniform import layer_starts


@dataclass(frozen=True, kw_only=True)
class ScenarioStep:
    """The costs at a step, and the event before it, if any."""

    step: int
    costs: ItemCosts
    event: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TrajectorySettings:
    """Length, strength and noise of a trajectory.

    Attributes:
        steps: number of steps.
        strength: final sparsity, frozen share, expert skew, share of the tokens that a routed block leaves out, or
            share of the tokens at an exit that leave; within [0, 1).
        noise: relative standard deviation of each time.
        seed: of the noise and the trajectory.
        sparsity: cost model of pruned items, where costs are not measured.
        exits: of ``early-exit``: number of evenly spaced exits.
        densest: of ``sparse-attention``: the largest share of its scores that a layer keeps.
        cache_hits: of ``freezing``: the share of the samples whose outputs of the frozen front are read from a cache
            instead of computed; 0 where no sample repeats.
        slope: of ``moe``: how much the skew increases with depth, within [0, 1]; 1 is from zero to twice the
            strength.
    """

    steps: int
    strength: float
    noise: float = 0.0
    seed: int = 0
    sparsity: SparsityModel = field(default_factory=SparsityModel)
    exits: int = 2
    densest: float = 1.0
    cache_hits: float = 0.0
    slope: float = 0.0


Changing = Iterator[tuple[ItemCosts, Mapping[str, Any] | None]]
"""Costs and event of each step."""


@dataclass(frozen=True, kw_only=True)
class _Script:
    """What a trajectory depends on."""

    header: Header
    dense: ItemCosts
    settings: TrajectorySettings
    costs: TechniqueCosts
    rng: random.Random


def depths_of(header: Header) -> list[float]:
    """The depth of each item as a share of the model, by layer."""
    order = list(dict.fromkeys(item.layer for item in header.items))
    return [order.index(item.layer) / max(1, len(order) - 1) for item in header.items]


def _event(kind: str, following: int | None, **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "detail": detail, "next_expected_step": following}


def _pruning(script: _Script) -> Changing:
    header, settings = script.header, script.settings
    depths = depths_of(header)
    # As the published program of DynMo: of 10,000 steps, four rounds from step 3,000 on, one every 1,000 steps.
    rounds = 4
    begin, every = settings.steps * 3 // 10, max(1, settings.steps // 10)
    costs = script.dense
    for step in range(1, settings.steps + 1):
        done, rest = divmod(step - begin, every)
        event = None
        if rest == 0 and 0 <= done < rounds:
            progress = (done + 1) / rounds
            mean = settings.strength * (1 - (1 - progress) ** 3)
            # Global magnitude pruning is modelled to remove more from later layers: at 90 % on average, from about two
            # thirds to 99 %. No layer loses all its weights.
            sparsity = [min(0.99, max(0.0, mean + (d - 0.5) * 0.5 * mean)) for d in depths]
            costs = script.costs.pruned(header, script.dense, sparsity)
            event = _event("pruned", begin + (done + 1) * every if done + 1 < rounds else None, sparsity=round(mean, 4))
        yield costs, event


def _moe(script: _Script) -> Changing:
    header, settings, rng = script.header, script.settings, script.rng
    strength = {
        item.layer: settings.strength * (1 + settings.slope * (2 * depth - 1))
        for item, depth in zip(header.items, depths_of(header), strict=True)
        if item.kind in ("mlp", "layer")
    }
    skew = {layer: abs(rng.gauss(0, deviation)) for layer, deviation in strength.items()}
    for _ in range(settings.steps):
        for layer, deviation in strength.items():
            # 0.995^2 + 0.1^2 is about 1: the skew drifts, but its deviation stays that of the start.
            skew[layer] = abs(0.995 * skew[layer] + 0.1 * deviation * rng.gauss(0, 1))
        excess = [skew.get(item.layer, 0.0) for item in header.items]
        yield script.costs.experts(header, script.dense, excess), None


def _mod(script: _Script) -> Changing:
    header = script.header
    blocks = list(dict.fromkeys(item.layer for item in header.items if item.kind in PRUNED_KINDS))
    routed = set(blocks[1::2])
    capacity = [1 - script.settings.strength if item.layer in routed else 1.0 for item in header.items]
    costs = script.costs.routed(header, script.dense, capacity)
    for _ in range(script.settings.steps):
        yield costs, None


def _early_exit(script: _Script) -> Changing:
    header, settings = script.header, script.settings
    blocks = list(dict.fromkeys(item.layer for item in header.items if item.kind in PRUNED_KINDS))
    # Exits at a third and two thirds of the blocks where there are two, as in the scripts of EE-LLM (2312.04916).
    last = [len(blocks) * (number + 1) // (settings.exits + 1) - 1 for number in range(settings.exits)]
    after = sorted({blocks[each] for each in last if 0 <= each < len(blocks) - 1}, key=blocks.index)
    ends = {item.layer: index for index, item in enumerate(header.items)}
    for step in range(1, settings.steps + 1):
        leaving = settings.strength * step / settings.steps
        share, shares, active, exits = 1.0, {}, [], {}
        for block in blocks:
            shares[block] = share
            if block in after:
                exits[ends[block]] = share
                share *= 1 - leaving
        active = [shares.get(item.layer, 1.0) for item in header.items]
        yield script.costs.exited(header, script.dense, active, exits), None


def _sparse_attention(script: _Script) -> Changing:
    header, settings = script.header, script.settings
    density = {item.layer: 1.0 for item in header.items if item.kind in ("attention", "layer")}
    floor = min(settings.densest, max(0.1 * settings.densest, 1 - settings.strength))
    for step in range(1, settings.steps + 1):
        for layer in density:
            target = floor + (settings.densest - floor) * ((hash_unit(layer) + step / settings.steps) % 1.0)
            density[layer] = 0.99 * density[layer] + 0.01 * target
        values = [density.get(item.layer, 1.0) for item in header.items]
        yield script.costs.sparse(header, script.dense, values), None


def _static(script: _Script) -> Changing:
    for _ in range(script.settings.steps):
        yield script.dense, None


def _freezing(script: _Script) -> Changing:
    header, settings = script.header, script.settings
    rounds = 6
    every = max(1, settings.steps // (rounds + 1))
    costs = script.dense
    for step in range(1, settings.steps + 1):
        done, rest = divmod(step - 1, every)
        event = None
        if rest == 0 and 1 <= done <= rounds:
            share = settings.strength * done / rounds
            costs = script.costs.frozen(header, script.dense, frozen_front(header, share), settings.cache_hits)
            event = _event("frozen", step - 1 + every if done < rounds else None, share=round(share, 4))
        yield costs, event


def hash_unit(text: str) -> float:
    """A number within [0, 1) that depends only on the text."""
    # ``hash`` of a string differs between processes; the seed of ``random.Random`` does not.
    return random.Random(text).random()


_SCRIPTS = {
    "static": (_static, 0.0),
    "pruning": (_pruning, 0.9),
    "moe": (_moe, 0.5),
    "mod": (_mod, 0.875),
    "early-exit": (_early_exit, 0.43),
    "sparse-attention": (_sparse_attention, 0.9),
    "freezing": (_freezing, 0.6),
}
TECHNIQUES = tuple(_SCRIPTS)
DEFAULT_STRENGTH = {name: strength for name, (_, strength) in _SCRIPTS.items()}


def _noisy(costs: ItemCosts, trajectory: TrajectorySettings, rng: random.Random) -> ItemCosts:
    if not trajectory.noise:
        return costs

    def noise() -> list[float]:
        # Times stay positive under strong noise, because the format has no negative ones and 0 means "did not run".
        return [max(0.1, 1 + trajectory.noise * rng.gauss(0, 1)) for _ in costs.forward_ns]

    # Forward and backward are measured separately, so their noise is independent.
    return scaled(scaled(costs, noise(), ("forward",)), noise(), ("backward",))


def scenario_steps(
    technique: str,
    header: Header,
    dense: ItemCosts,
    trajectory: TrajectorySettings,
    costs: TechniqueCosts | None = None,
) -> Iterator[ScenarioStep]:
    """The costs of every step of a technique.

    Args:
        technique: one of ``TECHNIQUES``.
        header: of the profile.
        dense: the costs without the technique.
        trajectory: number of steps, strength, noise and seed.
        costs: what the technique costs; None is by formulas.
    """
    # One generator for trajectory and noise: the seed alone determines every number of the profile.
    rng = random.Random(trajectory.seed)
    costs = costs or StatedCosts(trajectory.sparsity)
    script = _Script(header=header, dense=dense, settings=trajectory, costs=costs, rng=rng)
    for step, (changed, event) in enumerate(_SCRIPTS[technique][0](script), start=1):
        noisy = replace(_noisy(changed, trajectory, rng), from_step=step, to_step=step, records=1)
        yield ScenarioStep(step=step, costs=noisy, event=event)


def frozen_front(header: Header, share: float) -> int:
    """The number of frozen items if this ``share`` of the layers, in [0, 1), is frozen, the embedding included.

    Raises:
        UsageError: the share is out of range.
    """
    if not 0 <= share < 1:
        raise UsageError(f"the frozen share must be within [0, 1), is {share}")
    starts = layer_starts(header.items)
    count = round(share * len(starts))
    if count == 0:
        return 0
    return starts[count] if count < len(starts) else len(header.items)


def frozen_costs(header: Header, costs: ItemCosts, share: float, *, cache_hits: float = 0.0) -> ItemCosts:
    """The costs with this share of the layers frozen, from the front.

    Args:
        header: of the profile.
        costs: of all items.
        share: share of the layers, in [0, 1).
        cache_hits: share of the samples whose outputs of the front are read from a cache, so that its forward pass
            takes no time.

    Raises:
        UsageError: the share is out of range.
    """
    return StatedCosts().frozen(header, costs, frozen_front(header, share), cache_hits)
