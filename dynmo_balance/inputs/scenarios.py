"""Scripted trajectories: how the costs of a model change over a run under each dynamic technique.

Each is a stated model, not a measurement. All take the dense costs, the number of steps and a seed.

* ``pruning``: gradual pruning to a final sparsity by the cubic schedule of Zhu and Gupta (2017, arXiv 1710.01878).
  Global magnitude pruning makes layers uneven, modelled by a spread of the sparsity that increases with depth.
* ``freezing``: the frozen front grows in equal steps to a final share of the layers.
* ``moe``: the busiest expert of each layer sets the time of its MLP; the skew drifts over layers and steps.
* ``mod``: every other block computes only a share of the tokens, between 12.5 % and 50 % (Raposo et al. 2024, arXiv
  2404.02258, which finds 12.5 % in every other block best).
* ``early-exit``: the share of active tokens decreases exponentially with depth, and with training.
* ``sparse-attention``: the attention of each layer keeps a share of its blocks that drifts between 10 % and 100 % of
  the densest. The projections stay dense, so only the scores' share of the item, ``s / (s + 2 h)``, shrinks.
* ``static``: nothing changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._common.errors import UsageError
from ..costs.cost_window import ItemCosts, scaled
from ..costs.sparsity import PRUNED_KINDS, SparsityModel
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
        strength: final sparsity, frozen share or expert skew, depending on the technique; within [0, 1).
        noise: relative standard deviation of each time.
        seed: of the noise and the trajectory.
        sparsity: cost model of pruned items.
        exit_rate: of ``early-exit``: at the end, the share ``exp(-exit_rate * strength * depth)`` of the tokens is
            active.
        densest: of ``sparse-attention``: the largest share of blocks that a layer keeps.
        cached_forward: of ``freezing``: the outputs of the frozen front are read from a cache instead of computed.
        slope: of ``moe``: how much the skew increases with depth, within [0, 1]; 1 is from zero to twice the
            strength.
    """

    steps: int
    strength: float
    noise: float = 0.0
    seed: int = 0
    sparsity: SparsityModel = field(default_factory=SparsityModel)
    exit_rate: float = 2.5
    densest: float = 1.0
    cached_forward: bool = False
    slope: float = 0.0


Factors = Callable[[Header, TrajectorySettings, random.Random], Iterator[tuple[list[float], Mapping[str, Any] | None]]]


def depths_of(header: Header) -> list[float]:
    """The depth of each item as a share of the model, by layer."""
    order = list(dict.fromkeys(item.layer for item in header.items))
    return [order.index(item.layer) / max(1, len(order) - 1) for item in header.items]


def _event(kind: str, following: int | None, **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "detail": detail, "next_expected_step": following}


def _pruning(header: Header, trajectory: TrajectorySettings, rng: random.Random) -> Iterator[tuple[list[float], Any]]:
    model = trajectory.sparsity
    depths = depths_of(header)
    # As the published program of DynMo: of 10,000 steps, four rounds from step 3,000 on, one every 1,000 steps.
    rounds = 4
    begin, every = trajectory.steps * 3 // 10, max(1, trajectory.steps // 10)
    factors = [1.0] * len(depths)
    for step in range(1, trajectory.steps + 1):
        done, rest = divmod(step - begin, every)
        event = None
        if rest == 0 and 0 <= done < rounds:
            progress = (done + 1) / rounds
            mean = trajectory.strength * (1 - (1 - progress) ** 3)
            # Global magnitude pruning is modelled to remove more from later layers: at 90 % on average, from about two
            # thirds to 99 %. No layer loses all its weights.
            sparsity = [min(0.99, max(0.0, mean + (d - 0.5) * 0.5 * mean)) for d in depths]
            pairs = zip(header.items, sparsity, strict=True)
            factors = [model.factor(s) if item.kind in PRUNED_KINDS else 1.0 for item, s in pairs]
            event = _event("pruned", begin + (done + 1) * every if done + 1 < rounds else None, sparsity=round(mean, 4))
        yield factors, event


def _moe(header: Header, trajectory: TrajectorySettings, rng: random.Random) -> Iterator[tuple[list[float], Any]]:
    strength = {
        item.layer: trajectory.strength * (1 + trajectory.slope * (2 * depth - 1))
        for item, depth in zip(header.items, depths_of(header), strict=True)
        if item.kind in ("mlp", "layer")
    }
    skew = {layer: abs(rng.gauss(0, deviation)) for layer, deviation in strength.items()}
    for _ in range(trajectory.steps):
        for layer, deviation in strength.items():
            # 0.995^2 + 0.1^2 is about 1: the skew drifts, but its deviation stays that of the start.
            skew[layer] = abs(0.995 * skew[layer] + 0.1 * deviation * rng.gauss(0, 1))
        yield [1 + skew[i.layer] if i.kind in ("mlp", "layer") else 1.0 for i in header.items], None


def _mod(header: Header, trajectory: TrajectorySettings, rng: random.Random) -> Iterator[tuple[list[float], Any]]:
    routed = {item.layer: index for index, item in enumerate(header.items) if item.kind in PRUNED_KINDS}
    chosen = set(list(routed)[1::2])
    for step in range(1, trajectory.steps + 1):
        capacity = 0.125 + 0.375 * (0.5 + 0.5 * math.cos(2 * math.pi * step / trajectory.steps))
        share = 1 - trajectory.strength * (1 - capacity)
        yield [share if item.layer in chosen else 1.0 for item in header.items], None


def _early_exit(
    header: Header, trajectory: TrajectorySettings, rng: random.Random
) -> Iterator[tuple[list[float], Any]]:
    depths = depths_of(header)
    for step in range(1, trajectory.steps + 1):
        rate = trajectory.exit_rate * trajectory.strength * step / trajectory.steps
        pairs = zip(header.items, depths, strict=True)
        yield [math.exp(-rate * d) if item.kind in PRUNED_KINDS else 1.0 for item, d in pairs], None


def _sparse_attention(
    header: Header, trajectory: TrajectorySettings, rng: random.Random
) -> Iterator[tuple[list[float], Any]]:
    density = {item.layer: 1.0 for item in header.items if item.kind in ("attention", "layer")}
    floor = min(trajectory.densest, max(0.1 * trajectory.densest, 1 - trajectory.strength))
    tokens, hidden = header.model.sequence_length, header.model.hidden_size
    # Scores 4 s^2 h, projections 8 s h^2; a whole layer has 16 s h^2 more in its MLP
    shares = {"attention": tokens / (tokens + 2 * hidden), "layer": tokens / (tokens + 6 * hidden)}
    for step in range(1, trajectory.steps + 1):
        for layer in density:
            target = floor + (trajectory.densest - floor) * ((hash_unit(layer) + step / trajectory.steps) % 1.0)
            density[layer] = 0.99 * density[layer] + 0.01 * target
        yield [1 - shares.get(i.kind, 0.0) * (1 - density.get(i.layer, 1.0)) for i in header.items], None


def _static(header: Header, trajectory: TrajectorySettings, rng: random.Random) -> Iterator[tuple[list[float], Any]]:
    for _ in range(trajectory.steps):
        yield [1.0] * len(header.items), None


def hash_unit(text: str) -> float:
    """A number within [0, 1) that depends only on the text."""
    # ``hash`` of a string differs between processes; the seed of ``random.Random`` does not.
    return random.Random(text).random()


_FACTORS: Mapping[str, tuple[Factors, float]] = {
    "static": (_static, 0.0),
    "pruning": (_pruning, 0.9),
    "moe": (_moe, 0.5),
    "mod": (_mod, 0.9),
    "early-exit": (_early_exit, 0.9),
    "sparse-attention": (_sparse_attention, 0.9),
}
TECHNIQUES = (*_FACTORS, "freezing")
DEFAULT_STRENGTH = {**{name: strength for name, (_, strength) in _FACTORS.items()}, "freezing": 0.6}


def _noisy(costs: ItemCosts, trajectory: TrajectorySettings, rng: random.Random) -> ItemCosts:
    if not trajectory.noise:
        return costs

    def noise() -> list[float]:
        # Times stay positive under strong noise, because the format has no negative ones and 0 means "did not run".
        return [max(0.1, 1 + trajectory.noise * rng.gauss(0, 1)) for _ in costs.forward_ns]

    # Forward and backward are measured separately, so their noise is independent.
    return scaled(scaled(costs, noise(), ("forward",)), noise(), ("backward",))


def _freezing(header: Header, dense: ItemCosts, trajectory: TrajectorySettings) -> Iterator[tuple[ItemCosts, Any]]:
    rounds = 6
    every = max(1, trajectory.steps // (rounds + 1))
    costs = dense
    for step in range(1, trajectory.steps + 1):
        done, rest = divmod(step - 1, every)
        event = None
        if rest == 0 and 1 <= done <= rounds:
            share = trajectory.strength * done / rounds
            costs = frozen_costs(header, dense, share, cached_forward=trajectory.cached_forward)
            event = _event("frozen", step - 1 + every if done < rounds else None, share=round(share, 4))
        yield costs, event


def scenario_steps(
    technique: str, header: Header, dense: ItemCosts, trajectory: TrajectorySettings
) -> Iterator[ScenarioStep]:
    """The costs of every step of a technique.

    Args:
        technique: one of ``TECHNIQUES``.
        header: of the profile.
        dense: the costs without the technique.
        trajectory: number of steps, strength, noise and seed.
    """
    # One generator for trajectory and noise: the seed alone determines every number of the profile.
    rng = random.Random(trajectory.seed)
    if technique == "freezing":
        changing = _freezing(header, dense, trajectory)
    else:
        factors = _FACTORS[technique][0](header, trajectory, rng)
        changing = ((scaled(dense, factor), event) for factor, event in factors)
    for step, (costs, event) in enumerate(changing, start=1):
        noisy = replace(_noisy(costs, trajectory, rng), from_step=step, to_step=step, records=1)
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


def frozen_costs(header: Header, costs: ItemCosts, share: float, *, cached_forward: bool = False) -> ItemCosts:
    """The costs with this share of the layers frozen, from the front.

    Args:
        header: of the profile.
        costs: of all items.
        share: share of the layers, in [0, 1).
        cached_forward: whether the outputs of the front are read from a cache, so that its forward pass takes no time.

    Raises:
        UsageError: the share is out of range.
    """
    # No gradient passes through the front, so it needs neither backward pass nor activations.
    front = frozen_front(header, share)

    def zero(values: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) * front + values[front:]

    return replace(
        costs,
        forward_ns=zero(costs.forward_ns) if cached_forward else costs.forward_ns,
        backward_input_ns=zero(costs.backward_input_ns),
        backward_weight_ns=zero(costs.backward_weight_ns),
        activation_bytes=zero(costs.activation_bytes),
    )
