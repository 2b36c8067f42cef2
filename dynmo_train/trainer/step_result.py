"""What an optimizer step has given: a step that was launched, and its result once the device has reached its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..parallel.host_copy import HostCopy
from ..pipeline.profiler import CostGather, Measurements


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one optimizer step, equal on all ranks except for ``step_ns``.

    Attributes:
        loss: mean over the tokens of the step.
        grad_norm: global L2 norm before clipping.
        rate: learning rate of this step's update.
        next_rate: learning rate of the next update; Megatron's log line shows this one.
        decoupled_rate: learning rate of word embeddings and output layer in this update; None where it is ``rate``.
        next_decoupled_rate: the same of the next update.
        loss_scale: loss scale of the next step.
        updated: False where the loss or a gradient was not finite; weights and schedules are then unchanged.
        step_ns: wall time on this rank, in nanoseconds: from the launch of the step, or from the result of the step
            before if that came later, to its result.
        gathered_costs: costs of all ranks, on their way; None where the step was not profiled.
        is_scale_search: whether only scaled gradients overflowed and the dynamic loss scale can still be reduced.
        metrics: item -> metric -> one or more values, means over the microbatches, in list order. These are
            auxiliary losses and counts such as routed tokens.
        compression: measurements of the compression; empty where none are requested.
        compiled_graphs: graphs that the pipeline ranks of a replica have compiled since the engine was built.
    """

    loss: float
    grad_norm: float
    rate: float
    next_rate: float
    loss_scale: float
    updated: bool
    step_ns: int
    decoupled_rate: float | None = None
    next_decoupled_rate: float | None = None
    gathered_costs: CostGather | None = None
    is_scale_search: bool = False
    metrics: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    compression: Mapping[str, Any] = field(default_factory=dict)
    compiled_graphs: int = 0

    @cached_property
    def costs(self) -> list[dict[str, Any]] | None:
        """One dictionary per pipeline rank, in order; waits for the other ranks. None where the step was not profiled.

        ``items``, arrays as in the profile, ``busy_ns``, ``peak_memory_bytes``.
        """
        return None if self.gathered_costs is None else self.gathered_costs.wait()

    @property
    def losses(self) -> dict[str, float]:
        """``lm_loss``, followed by the scalar metrics of items, each a mean over the items that report it.

        With experts also ``expert_load``: the tokens of a layer's busiest expert over the mean, as a mean over layers.
        """
        scalars: dict[str, list[float]] = {}
        for metrics in self.metrics.values():
            for name, values in metrics.items():
                if len(values) == 1:
                    scalars.setdefault(name, []).append(values[0])
        means = {name: sum(values) / len(values) for name, values in scalars.items()}
        loads = [max(tokens) * len(tokens) / sum(tokens) for tokens in self._expert_tokens if sum(tokens) > 0]
        return {"lm_loss": self.loss} | means | ({"expert_load": sum(loads) / len(loads)} if loads else {})

    @property
    def _expert_tokens(self) -> list[list[float]]:
        return list(self.counts.get("expert_tokens", {}).values())

    @property
    def counts(self) -> dict[str, dict[str, list[float]]]:
        """Vector metrics of items, such as tokens per expert: metric -> item -> values, in list order."""
        counts: dict[str, dict[str, list[float]]] = {}
        for item, metrics in self.metrics.items():
            for name, values in metrics.items():
                if len(values) > 1:
                    counts.setdefault(name, {})[item] = values
        return counts


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step whose result has not been read.

    Attributes:
        sums: norm, loss and metrics on their way to the host.
        measured: what the profiler has measured; None where the step was not profiled.
        microbatches: number of microbatches.
        advance: samples by which the learning-rate schedule advances after an update.
        rates: learning rate of the update, and that of word embeddings and output layer; None where it is the same.
    """

    sums: HostCopy
    measured: Measurements | None
    microbatches: int
    advance: int
    rates: tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class UnloggedStep:
    """What the log of a step needs apart from its result.

    Attributes:
        step: number of the step.
        size: samples of its batch.
        tokens: tokens of a sample.
        consumed: samples consumed before it.
        plan_id: number of the active plan.
        problem: problem of this rank's data; None without one.
        data_ns: time that the step waited for its batch, in nanoseconds.
    """

    step: int
    size: int
    tokens: int
    consumed: int
    plan_id: int
    problem: str | None
    data_ns: int = 0
