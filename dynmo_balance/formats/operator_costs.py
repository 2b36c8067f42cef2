"""Measured costs of operators: reads what ``dynmo-train measure-costs`` writes.

The specification is ``dynmo_train/formats/operator_costs.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import DocumentError, Problem, envelope_problems, read_json
from .operator_costs_fields import DOCUMENT

FORMAT = "dynmo.operator_costs"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of one microbatch in ns."""

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int

    @property
    def total_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_input_ns + self.backward_weight_ns


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """A measured operator; the fields are those of ``operator_costs.md``."""

    case: str
    operator: str
    setting: Mapping[str, float | str]
    sequence_length: int
    times: PassTimes
    dense: PassTimes
    spread: float


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """The measured operators of one model on one device; the fields are those of ``operator_costs.md``."""

    device: str
    device_type: str
    threads: int | None
    torch: str
    dtype: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_experts: int
    micro_batch_size: int
    sequence_lengths: tuple[int, ...]
    rows: tuple[OperatorRow, ...]

    @property
    def label(self) -> str:
        """Where and with what the rows were measured."""
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.device}{threads}, {self.dtype}, torch {self.torch}"


def parse_operator_costs(document: Any, source: str) -> OperatorTable:
    """The table of a JSON document.

    Raises:
        DocumentError: with every problem of the document.
    """
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems:
        lengths = document["shape"]["sequence_lengths"]
        problems += [
            Problem(f"rows[{index}].sequence_length", "choice", f"must be one of {lengths}, is {length}")
            for index, row in enumerate(document["rows"])
            if (length := row["sequence_length"]) not in lengths
        ]
    if problems:
        raise DocumentError(source, problems)
    shape, device = document["shape"], document["device"]
    return OperatorTable(
        device=device["name"],
        device_type=device["type"],
        threads=device["threads"],
        torch=document["torch"],
        dtype=document["dtype"],
        **{name: shape[name] for name in shape if name != "sequence_lengths" and not name.startswith("x_")},
        sequence_lengths=tuple(shape["sequence_lengths"]),
        rows=tuple(_row(row) for row in document["rows"]),
    )


def _row(value: Mapping[str, Any]) -> OperatorRow:
    return OperatorRow(
        case=value["case"],
        operator=value["operator"],
        setting=value["setting"],
        sequence_length=value["sequence_length"],
        times=_times(value),
        dense=_times(value["dense"]),
        spread=value["spread"],
    )


def _times(value: Mapping[str, Any]) -> PassTimes:
    names = ("forward_ns", "backward_input_ns", "backward_weight_ns")
    return PassTimes(**{name: value[name] for name in names})


def read_operator_costs(path: Path) -> OperatorTable:
    """The table of a file.

    Raises:
        UsageError: the file cannot be read.
        DocumentError: it violates the format.
    """
    return parse_operator_costs(read_json(path), str(path))
