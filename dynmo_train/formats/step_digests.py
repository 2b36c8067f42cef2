"""Reads and writes the digests of one step, one JSON object per line. The specification is ``step_digests.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from .._common.checks import Check, obj
from .._common.document import (
    DocumentError,
    Problem,
    envelope,
    envelope_problems,
    own_document,
    read_records,
    short_repr,
    write_whole,
)
from .step_digests_fields import HEADER, RESULT, TENSOR

FORMAT, VERSION, HASH = "dynmo.step_digests", 1, "blake2b-128"
Direction = Literal[
    "initial_weight", "activation", "activation_gradient", "accumulated_gradient", "weight_gradient", "weight"
]
DIRECTIONS: tuple[Direction, ...] = (
    "initial_weight",
    "activation",
    "activation_gradient",
    "accumulated_gradient",
    "weight_gradient",
    "weight",
)
_OF_ACTIVATIONS = ("activation", "activation_gradient")
_OF_MICROBATCHES = (*_OF_ACTIVATIONS, "accumulated_gradient")
_LINES: Mapping[str, Check] = {"header": HEADER, "tensor": TENSOR, "result": RESULT}


@dataclass(frozen=True, kw_only=True, order=True)
class TensorKey:
    """Which tensor of a step.

    Attributes:
        direction: where the tensor is computed.
        item: entry of the layer list.
        parameter: name of the parameter; None for activations.
        microbatch: global microbatch index; None for weights and for their gradients over the step.
        part: 0 for a whole tensor, else the rank that has this part.
    """

    direction: Direction
    item: str
    parameter: str | None = None
    microbatch: int | None = None
    part: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorDigest:
    """The digest of one tensor.

    Attributes:
        key: which tensor.
        dtype: such as ``float32``.
        shape: sizes of its dimensions.
        nonfinite: number of elements that are not finite.
        digest: 32 hexadecimal digits.
    """

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    nonfinite: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Loss and gradient norm of a step; None where they are not finite."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True, kw_only=True)
class DigestLayout:
    """What decides which tensors of two executions can have the same bits. Pipeline ranks and schedule do not.

    Attributes:
        tensor_parallel_size: ranks that share each matrix product.
        context_parallel_size: ranks that share the tokens of a sample.
        replicas: ranks, or groups of them, that read samples of their own.
        expert_parallel_size: replicas that share the experts of a layer.
        sequence_parallel: whether tensor-parallel ranks have different tokens between their products.
        vocabulary_shards: shards of word table and output layer; 0: they are whole.
        is_sharded: whether ranks share the rows of parameters (ZeRO, any stage).
        sums_microbatches: whether the gradients of each microbatch are summed over the replicas, not those of a step.
    """

    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    replicas: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = False
    vocabulary_shards: int = 0
    is_sharded: bool = False
    sums_microbatches: bool = False


@dataclass(frozen=True, kw_only=True)
class StepDigests:
    """The digests of one step, in the order of the computation.

    Attributes:
        run_id: id of the run.
        step: number of the step.
        loaded_step: step of the checkpoint that the replay started from.
        tensors: the digests.
        figures: loss and gradient norm.
        updated: whether the weights were updated.
        logged: loss and gradient norm in the run's metrics; None without a line of the step.
        layout: layout of the execution; None where the file does not name it.
    """

    run_id: str
    step: int
    loaded_step: int
    tensors: tuple[TensorDigest, ...]
    figures: StepFigures
    updated: bool
    logged: StepFigures | None
    layout: DigestLayout | None = None

    @property
    def matches(self) -> bool:
        """Whether loss and gradient norm are those of the run, bit for bit; False without a line of the step."""
        return self.logged == self.figures


def finite_or_none(value: float | None) -> float | None:
    """``value`` as the metrics have it: None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def write_step_digests(path: Path, digests: StepDigests) -> None:
    """Write a document of digests.

    Raises:
        WriterError: the document breaks the format.
        OSError: the file cannot be written.
    """
    payload = "".join(json.dumps(record, allow_nan=False) + "\n" for record in _records(digests)).encode()
    with own_document():
        _parse([json.loads(line) for line in payload.splitlines()], str(path))
    write_whole(path, payload)


def _records(digests: StepDigests) -> Iterator[dict[str, Any]]:
    yield {
        **envelope(FORMAT, VERSION, f"dynmo-train {__version__}"),
        "record": "header",
        "run_id": digests.run_id,
        "step": digests.step,
        "loaded_step": digests.loaded_step,
        "hash": HASH,
        **({} if digests.layout is None else {"layout": vars(digests.layout)}),
    }
    yield from (tensor_record(each) for each in digests.tensors)
    yield {
        "record": "result",
        **vars(digests.figures),
        "updated": digests.updated,
        "logged": None if digests.logged is None else vars(digests.logged),
    }


def tensor_record(tensor: TensorDigest) -> dict[str, Any]:
    """The line of a tensor."""
    return {
        "record": "tensor",
        **vars(tensor.key),
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "nonfinite": tensor.nonfinite,
        "digest": tensor.digest,
    }


def tensor_of_record(line: Mapping[str, Any]) -> TensorDigest:
    """The tensor of a valid line."""
    return TensorDigest(
        key=_key(line),
        dtype=line["dtype"],
        shape=tuple(line["shape"]),
        nonfinite=line["nonfinite"],
        digest=line["digest"],
    )


def read_step_digests(path: Path) -> StepDigests:
    """Read a document of digests.

    Raises:
        DocumentError: it cannot be read or breaks a rule; with every problem.
    """
    return _parse(list(read_records(path)), str(path))


def _parse(lines: list[Any], source: str) -> StepDigests:
    problems = [
        Problem(f"line {number}.{problem.path}".rstrip("."), problem.kind, problem.message)
        for number, line in enumerate(lines, 1)
        for problem in _line_problems(line)
    ]
    if not problems:
        problems = _problems_across(lines)
    if problems:
        raise DocumentError(source, problems)
    header, *tensors, result = lines
    logged = result["logged"]
    return StepDigests(
        run_id=header["run_id"],
        step=header["step"],
        loaded_step=header["loaded_step"],
        tensors=tuple(tensor_of_record(line) for line in tensors),
        figures=StepFigures(loss=result["loss"], grad_norm=result["grad_norm"]),
        updated=result["updated"],
        logged=None if logged is None else StepFigures(loss=logged["loss"], grad_norm=logged["grad_norm"]),
        layout=DigestLayout(**{each.name: header["layout"][each.name] for each in fields(DigestLayout)})
        if "layout" in header
        else None,
    )


def _key(line: Mapping[str, Any]) -> TensorKey:
    return TensorKey(**{name: line[name] for name in ("direction", "item", "parameter", "microbatch", "part")})


def _line_problems(line: Any) -> list[Problem]:
    problems: list[Problem] = []
    if not isinstance(line, dict):
        obj({})(line, "", problems)
        return problems
    kind = line.get("record")
    if kind == "header" and (refusal := envelope_problems(line, FORMAT, VERSION)):
        return refusal
    if not isinstance(kind, str) or kind not in _LINES:
        return [Problem("record", "choice", f"must be one of {', '.join(_LINES)}; is {short_repr(kind)}")]
    _LINES[kind](line, "", problems)
    return problems


def _problems_across(lines: list[Any]) -> list[Problem]:
    """What is wrong with lines that are valid by themselves."""
    kinds = [line["record"] for line in lines]
    if len(kinds) < 2 or kinds != ["header", *["tensor"] * (len(kinds) - 2), "result"]:
        return [Problem("record", "order", "must be one header, then tensors, then one result")]
    problems = []
    found: set[TensorKey] = set()
    for number, line in enumerate(lines[1:-1], 2):
        key = _key(line)
        if (key.microbatch is None) is (key.direction in _OF_MICROBATCHES):
            message = "activations, their gradients and accumulated gradients have a microbatch, other lines have none"
            problems.append(Problem(f"line {number}", "conflict", message))
        if (key.parameter is None) is not (key.direction in _OF_ACTIVATIONS):
            message = "weights and their gradients have a parameter, activations and their gradients have none"
            problems.append(Problem(f"line {number}", "conflict", message))
        if key in found:
            problems.append(Problem(f"line {number}", "repeated", "the tensor has two lines"))
        found.add(key)
    return problems
