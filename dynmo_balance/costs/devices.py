"""Devices for analytic profiles: peak rates, memory, links; presets, or a TOML file with the same fields.

The peaks are the vendors' data-sheet figures for dense matrices (H100 and H200 SXM, A100 SXM 80GB, one direction of
their links). A matrix product of ``x`` operations reaches efficiency(x) = max_efficiency * x / (x + half_flops). The
efficiencies of products, memory and links were fitted on the A100 to the layer and step times that Korthikanti et al.
2022 (arXiv 2205.05198) publish in tables 4 and 5; a test checks that the model is within 10 % of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from .._common.document import MAX_CONFIG_BYTES, finite_number, parse_toml, read_text, short_repr
from .._common.errors import UsageError

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or processor, and the links to its neighbors.

    Attributes:
        name: of the device.
        kind: ``cuda`` or ``cpu``.
        flops_per_s: peak of matrix products, by dtype.
        memory_bandwidth_bytes_per_s: peak of memory accesses.
        memory_bytes: memory size.
        link_bandwidth_bytes_per_s, link_latency_ns: to a neighbor in the same node.
        node_size: devices per node.
        network_bandwidth_bytes_per_s, network_latency_ns: per device, to another node; None is as within the node.
        max_efficiency, memory_efficiency, link_efficiency: maximum share of the peaks that is reached.
        half_flops: the matrix product that reaches half of ``max_efficiency``, in operations.
        operation_ns: launch time of one operation.
    """

    name: str
    kind: str
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    link_bandwidth_bytes_per_s: int
    link_latency_ns: int
    node_size: int = 8
    network_bandwidth_bytes_per_s: int | None = None
    network_latency_ns: int | None = None
    max_efficiency: float = 0.79
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.65
    half_flops: float = 8e9
    operation_ns: int = 5_000

    def product_ns(self, flops: float, dtype: str) -> float:
        """The time in ns of one matrix product of ``flops`` floating-point operations."""
        if flops <= 0:
            return 0.0
        efficiency = self.max_efficiency * flops / (flops + self.half_flops)
        return 1e9 * flops / (self.flops_per_s[dtype] * efficiency)

    def touch_ns(self, size_bytes: float) -> float:
        """The time in ns to read or write ``size_bytes`` of memory."""
        return 1e9 * size_bytes / (self.memory_bandwidth_bytes_per_s * self.memory_efficiency)

    def reduce_ns(self, size_bytes: float, ranks: int) -> float:
        """The time in ns of a ring all-reduce of ``size_bytes`` among ``ranks`` devices of a node; 0 for one device.

        It moves ``2 (t - 1) / t`` of the bytes over the link, and adds its latency. A reduce-scatter followed by an
        all-gather, as in sequence parallelism, takes the same time.
        """
        if ranks == 1:
            return 0.0
        rate = self.link_bandwidth_bytes_per_s * self.link_efficiency
        return 2 * (ranks - 1) / ranks * 1e9 * size_bytes / rate + 2 * self.link_latency_ns

    def stage_link(self, devices: int, tensor_parallel: int) -> tuple[int, int]:
        """The link between neighboring stages of a pipeline on ``devices`` devices.

        Within a node each stage sends over one link. Between nodes the tensor-parallel ranks of a stage each send a
        share over the network and gather it within the node, as in Megatron (Narayanan et al. 2021, section 4.1). The
        slowest hop determines the result.

        Args:
            devices: number of devices of the pipeline, with its tensor-parallel ranks.
            tensor_parallel: number of tensor-parallel ranks of a stage.

        Returns:
            bandwidth in bytes per second, and latency in ns.
        """
        if devices <= self.node_size or self.network_bandwidth_bytes_per_s is None:
            return round(self.link_bandwidth_bytes_per_s * self.link_efficiency), self.link_latency_ns
        # The gather within the node is left out: in the presets the links there are about ten times as fast.
        rate = self.network_bandwidth_bytes_per_s * min(tensor_parallel, self.node_size) * self.link_efficiency
        latency = self.link_latency_ns if self.network_latency_ns is None else self.network_latency_ns
        return round(rate), latency


def _gpu(name: str, half: float, single: float, memory: float, size: int, link: int, network: int) -> Device:
    return Device(
        name=name,
        kind="cuda",
        flops_per_s={"bfloat16": half, "float16": half, "float32": single},
        memory_bandwidth_bytes_per_s=memory,
        memory_bytes=size,
        link_bandwidth_bytes_per_s=link,
        link_latency_ns=10_000,
        network_bandwidth_bytes_per_s=network,
        network_latency_ns=20_000,
    )


PRESETS: Mapping[str, Device] = {
    "h200": _gpu("h200", 989e12, 67e12, 4.8e12, 141 * 10**9, 450 * 10**9, 50 * 10**9),
    "h100": _gpu("h100", 989e12, 67e12, 3.35e12, 80 * 10**9, 450 * 10**9, 50 * 10**9),
    "a100": _gpu("a100", 312e12, 19.5e12, 2.0e12, 80 * 10**9, 300 * 10**9, 25 * 10**9),
    "cpu": Device(
        name="cpu",
        kind="cpu",
        # Without matrix instructions a CPU converts half precision to float32 and back, so it is slower.
        flops_per_s={"bfloat16": 50e9, "float16": 25e9, "float32": 100e9},
        memory_bandwidth_bytes_per_s=20e9,
        memory_bytes=16 * 10**9,
        link_bandwidth_bytes_per_s=10**9,
        link_latency_ns=100_000,
        # All processes are taken as one node, because the preset has no network.
        node_size=1_000_000,
        # Far below that of a GPU, whose many processors are idle in a small product.
        half_flops=2e6,
    ),
}


def load_device(name: str) -> Device:
    """A preset by name, or a device from a TOML file.

    Raises:
        UsageError: the name is neither, or the file is invalid.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"unknown device {name!r}: choose one of {', '.join(PRESETS)} or a TOML file")
    try:
        content = parse_toml(read_text(path, MAX_CONFIG_BYTES))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
    known = {field.name for field in fields(Device)}
    if unknown := sorted(content.keys() - known):
        raise UsageError(f"{name}: unknown fields {', '.join(unknown)}; the fields are {', '.join(sorted(known))}")
    missing = sorted(field.name for field in fields(Device) if field.default is MISSING and field.name not in content)
    # All problems at once, so that a hand-written file is corrected in one pass. The name defaults to the file's.
    problems = [f"{name} is missing" for name in missing if name != "name"]
    for key, value in content.items():
        problems += _field_problems(key, value)
    if problems:
        raise UsageError(f"{name}: {'; '.join(problems)}")
    return Device(**{"name": path.stem, **content})


def _field_problems(key: str, value: object) -> list[str]:
    """The problems of a field in a device's TOML file."""
    if key == "name":
        return [] if isinstance(value, str) else ["name must be a string"]
    if key == "kind":
        return [] if value in ("cpu", "cuda") else [f"kind must be cpu or cuda, is {short_repr(value)}"]
    if key == "flops_per_s":
        if not isinstance(value, dict) or not value:
            return ["flops_per_s must be a table of rates by dtype"]
        unknown = [f"flops_per_s has no dtype {dtype!r}" for dtype in value if dtype not in BYTES_PER_NUMBER]
        return unknown + [text for dtype, rate in value.items() for text in _rate(f"flops_per_s.{dtype}", rate)]
    if key.endswith("efficiency"):
        inside = _rate(key, value)
        return inside or ([] if isinstance(value, int | float) and value <= 1 else [f"{key} must be at most 1"])
    if key in _WHOLE:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return [] if whole else [f"{key} must be a whole number of at least 0, is {short_repr(value)}"]
    return _rate(key, value)


_WHOLE = (
    "memory_bytes",
    "link_bandwidth_bytes_per_s",
    "link_latency_ns",
    "node_size",
    "network_bandwidth_bytes_per_s",
    "network_latency_ns",
    "operation_ns",
)


def _rate(key: str, value: object) -> list[str]:
    # TOML has ``inf`` and ``nan``, and in Python true is an integer: none of them is a rate.
    return [] if (finite_number(value) or 0) > 0 else [f"{key} must be a number above 0, is {short_repr(value)}"]
