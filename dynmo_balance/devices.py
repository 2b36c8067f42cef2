"""Devices for analytic profiles: peak rates, memory, link; presets, or a TOML file with the same fields.

The peaks are the vendors' data-sheet figures for dense matrices (H100 and H200 SXM, A100 SXM 80GB). ``half_flops`` is
the size of a matrix product that reaches half of ``max_efficiency``: efficiency(x) = max_efficiency * x / (x + half).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or processor, and the link to its neighbour."""

    name: str
    kind: str
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    link_bandwidth_bytes_per_s: int
    link_latency_ns: int
    max_efficiency: float = 0.75
    half_flops: float = 2e9
    operation_ns: int = 5_000

    def product_ns(self, flops: float, dtype: str) -> float:
        """The time of one matrix product of so many floating-point operations."""
        if flops <= 0:
            return 0.0
        efficiency = self.max_efficiency * flops / (flops + self.half_flops)
        return 1e9 * flops / (self.flops_per_s[dtype] * efficiency)

    def touch_ns(self, size_bytes: float) -> float:
        """The time to read or write so many bytes of memory."""
        return 1e9 * size_bytes / self.memory_bandwidth_bytes_per_s


def _gpu(name: str, half: float, single: float, memory: float, size: int, link: int) -> Device:
    return Device(
        name=name,
        kind="cuda",
        flops_per_s={"bfloat16": half, "float16": half, "float32": single},
        memory_bandwidth_bytes_per_s=memory,
        memory_bytes=size,
        link_bandwidth_bytes_per_s=link,
        link_latency_ns=10_000,
    )


PRESETS: Mapping[str, Device] = {
    "h200": _gpu("h200", 989e12, 67e12, 4.8e12, 141 * 10**9, 450 * 10**9),
    "h100": _gpu("h100", 989e12, 67e12, 3.35e12, 80 * 10**9, 450 * 10**9),
    "a100": _gpu("a100", 312e12, 19.5e12, 2.0e12, 80 * 10**9, 300 * 10**9),
    "cpu": Device(
        name="cpu",
        kind="cpu",
        flops_per_s={"bfloat16": 50e9, "float16": 25e9, "float32": 100e9},
        memory_bandwidth_bytes_per_s=20e9,
        memory_bytes=16 * 10**9,
        link_bandwidth_bytes_per_s=10**9,
        link_latency_ns=100_000,
        half_flops=2e6,
    ),
}


def load_device(name: str) -> Device:
    """A preset by name, or a device from a TOML file; raises ``UsageError`` where it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"unknown device {name!r}: use one of {', '.join(PRESETS)} or a TOML file")
    try:
        content = tomllib.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
    known = {field.name for field in fields(Device)}
    if unknown := sorted(content.keys() - known):
        raise UsageError(f"{name}: unknown fields {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    try:
        return Device(**{"name": path.stem, **content})
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from error
