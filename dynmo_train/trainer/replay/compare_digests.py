"""The first tensor in which two executions of a step differ, or that is not finite; pure functions of digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..._common.errors import UsageError
from ...formats.step_digests import DIRECTIONS, DigestLayout, Direction, StepDigests, TensorDigest, TensorKey

_TITLES = {
    "initial_weight": "weight before the step",
    "activation": "activation of the forward",
    "activation_gradient": "gradient of the backward",
    "accumulated_gradient": "weight gradient up to the microbatch",
    "weight_gradient": "weight gradient",
    "weight": "weight after the update",
}


# Layouts that differ in a field: its words in messages, and the directions whose bits do not depend on it.
_WEIGHTS = frozenset[Direction](["initial_weight"])
_ACTIVATIONS = frozenset[Direction]([*_WEIGHTS, "activation", "activation_gradient"])
_LOCAL = frozenset[Direction]([*_ACTIVATIONS, "accumulated_gradient"])
_FIELDS: Mapping[str, tuple[str, frozenset[Direction]]] = {
    "tensor_parallel_size": ("tensor-parallel size", _WEIGHTS),
    "context_parallel_size": ("context-parallel size", _WEIGHTS),
    "replicas": ("number of replicas", _ACTIVATIONS),
    "expert_parallel_size": ("expert-parallel size", _WEIGHTS),
    "sequence_parallel": ("sequence parallelism", _WEIGHTS),
    "vocabulary_shards": ("vocabulary shards", _WEIGHTS),
    # All-reduce and reduce-scatter may add replicas in another order, and the norm is summed over other parts.
    "is_sharded": ("ZeRO", _LOCAL),
    "sums_microbatches": ("sum over replicas in each microbatch", _ACTIVATIONS),
}


@dataclass(frozen=True, kw_only=True)
class Comparability:
    """Which tensors of two executions can be compared.

    Attributes:
        directions: whose bits the difference of the layouts does not change.
        reasons: how the layouts differ; empty if they are the same, or if a file does not name its layout.
    """

    directions: frozenset[Direction]
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, one: DigestLayout | None, other: DigestLayout | None) -> Comparability:
        """Compare two layouts."""
        everything = frozenset(DIRECTIONS)
        if one is None or other is None:
            return cls(directions=everything)
        values = {name: (getattr(one, name), getattr(other, name)) for name in _FIELDS}
        different = [name for name, (first, second) in values.items() if first != second]
        return cls(
            directions=everything.intersection(*(_FIELDS[name][1] for name in different)),
            reasons=tuple(
                f"{_FIELDS[name][0]} {_word(values[name][0])} and {_word(values[name][1])}" for name in different
            ),
        )

    def select(self, one: StepDigests, other: StepDigests) -> tuple[StepDigests, StepDigests]:
        """The tensors to compare: all, or with different layouts those of these directions that both have whole.

        Args:
            one: digests of the first execution.
            other: digests of the second.
        """
        if not self.reasons:
            return one, other
        of_one, of_other = ({each.key: each.shape for each in digests.tensors} for digests in (one, other))

        def is_compared(key: TensorKey) -> bool:
            return key.direction in self.directions and of_one.get(key) == of_other.get(key)

        first, second = (
            replace(each, tensors=tuple(tensor for tensor in each.tensors if is_compared(tensor.key)))
            for each in (one, other)
        )
        return first, second

    def line(self) -> str:
        """The differences as a sentence."""
        compared = ", ".join(_TITLES[each] for each in DIRECTIONS if each in self.directions)
        return f"layouts differ: {'; '.join(self.reasons)}: compared {compared}; the other tensors have other bits"


def _word(value: int | bool) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class DifferentElements:
    """Where two tensors of the same shape differ.

    Attributes:
        count: number of elements with different bits.
        elements: number of elements.
        first: index of the first one.
        values: its value in both.
    """

    count: int
    elements: int
    first: tuple[int, ...]
    values: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class FirstTensor:
    """The first tensor, in the order of the computation, that differs or is not finite.

    Attributes:
        step: step of the run.
        key: which tensor.
        reason: ``differs``, ``missing`` (one execution lacks it), ``shape`` (another shape or dtype) or ``not_finite``.
        nonfinite: number of elements that are not finite, in the first execution and, if there is one, the second.
        elements: where they differ; None if the tensors are not there.
    """

    step: int
    key: TensorKey
    reason: str
    nonfinite: tuple[int, ...]
    elements: DifferentElements | None = None

    def document(self) -> dict[str, Any]:
        """The finding as a JSON document."""
        found: dict[str, Any] = {"step": self.step, **vars(self.key), "reason": self.reason}
        found["nonfinite"] = list(self.nonfinite)
        if self.elements is not None:
            each = self.elements
            found |= {"different_elements": each.count, "elements": each.elements, "first_index": list(each.first)}
        return found

    def line(self) -> str:
        """The finding as a sentence."""
        key = self.key
        place = f"step {self.step:,}, {_TITLES[key.direction]}: {key.parameter or key.item}"
        if key.microbatch is not None:
            place += f", microbatch {key.microbatch}"
        if key.part:
            place += f", part {key.part}"
        return f"{place}: {self._reason()}"

    def _reason(self) -> str:
        if self.elements is not None:
            each = self.elements
            at = ", ".join(map(str, each.first))
            one, other = each.values
            return (
                f"{each.count:,} of {each.elements:,} elements {'differ' if each.count > 1 else 'differs'};"
                f" first at [{at}]: {one:.9g} and {other:.9g}"
            )
        counts = " and ".join(f"{count:,}" for count in self.nonfinite)
        return {
            "differs": "the digests differ" + (f"; not finite: {counts}" if any(self.nonfinite) else ""),
            "missing": "only one of the two has this tensor",
            "shape": "shape or dtype differ",
            "not_finite": f"{counts} element{'s'[: self.nonfinite != (1,)]} not finite",
        }[self.reason]


def first_different_tensor(one: StepDigests, other: StepDigests) -> FirstTensor | None:
    """The first tensor in which two executions of a step differ; None if all are equal.

    Args:
        one: digests of the first execution.
        other: digests of the second.

    Raises:
        UsageError: the digests are of different steps.
    """
    if one.step != other.step:
        raise UsageError(f"digests of step {one.step:,} and of step {other.step:,}; give digests of the same step")
    found = {each.key: each for each in other.tensors}
    names = {each.key for each in one.tensors}
    for each in one.tensors:
        second = found.get(each.key)
        if second != each:
            return _finding(one.step, each, second)
    alone = next((each for each in other.tensors if each.key not in names), None)
    return None if alone is None else _finding(one.step, alone, None)


def _finding(step: int, one: TensorDigest, other: TensorDigest | None) -> FirstTensor:
    if other is None:
        return FirstTensor(step=step, key=one.key, reason="missing", nonfinite=(one.nonfinite,))
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    counts = (one.nonfinite, other.nonfinite)
    return FirstTensor(step=step, key=one.key, reason="differs" if same else "shape", nonfinite=counts)


def first_nonfinite_tensor(digests: StepDigests) -> FirstTensor | None:
    """The first tensor with an element that is not finite; None without one."""
    each = next((each for each in digests.tensors if each.nonfinite), None)
    if each is None:
        return None
    return FirstTensor(step=digests.step, key=each.key, reason="not_finite", nonfinite=(each.nonfinite,))


def with_elements(
    finding: FirstTensor, one: Mapping[TensorKey, torch.Tensor], other: Mapping[TensorKey, torch.Tensor]
) -> FirstTensor:
    """The finding with the number of different elements, where both have copies of the tensor.

    Args:
        finding: a difference.
        one: copies of the first execution, on the CPU.
        other: copies of the second.
    """
    first, second = one.get(finding.key), other.get(finding.key)
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return finding
    size = first.element_size()
    bytes_of = [tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for tensor in (first, second)]
    different = (bytes_of[0] != bytes_of[1]).any(dim=1)
    places = different.nonzero()
    if not len(places):
        return finding
    at = int(places[0])
    index: list[int] = []
    rest = at
    for length in reversed(first.shape):
        index.insert(0, rest % length)
        rest //= length
    values = float(first.reshape(-1)[at]), float(second.reshape(-1)[at])
    elements = DifferentElements(count=len(places), elements=first.numel(), first=tuple(index), values=values)
    return replace(finding, elements=elements)
