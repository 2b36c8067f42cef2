"""The command: findings of this machine, and with ``--bandwidth`` measurements between ranks.

Under a launcher each rank runs the command, and rank 0 reports for all machines. Otherwise this process reports, and
starts ranks of its own for the measurements, which they write to a file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._common.console import Format, emit, emit_json, emit_table, human_bytes, print_message
from ..._common.document import MAX_DOCUMENT_BYTES, MAX_JOBS, MAX_SIZE, read_any_json, write_whole
from ..._common.errors import EXIT_FAILURE, UsageError
from ...launch.options import SINGLE_NODE, ExitOptions
from ..common import DeviceName, is_rank0, world_size
from ..launch import run_processes
from .accelerators import torch_findings
from .findings import Finding, is_usable, report_lines
from .system import disk, limits, network, packages, programs

if TYPE_CHECKING:
    from ...parallel.process_groups import World


def doctor(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder whose free space is reported.")] = Path("runs"),
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure latency and bandwidth between ranks, and of the device.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, max=MAX_JOBS, help="Ranks of --bandwidth; default: one per GPU, at least 2."),
    ] = None,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=2, max=MAX_SIZE, help="Size of the largest measured message.")
    ] = 1 << 28,
    device: Annotated[
        DeviceName, typer.Option("--device", help="Device type; auto: cuda if available, else cpu.")
    ] = DeviceName.AUTO,
    device_file: Annotated[
        Path | None,
        typer.Option("--device-file", help="TOML file to write the measurements to, for dynmo-plan --device."),
    ] = None,
    report: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    measurements: Annotated[Path | None, typer.Option("--measurements", hidden=True)] = None,
) -> None:
    """Report what is installed, what is missing, what that costs, and how to change it.

    With --bandwidth also the latency and bandwidth of messages and of all-reduces between ranks: those of a launcher
    (`dynmo-train launch ... -- doctor --bandwidth`, torchrun), else of new ones on this machine. Exits with code 1 if
    something that training requires is missing.
    """
    if device_file is not None and not bandwidth:
        raise UsageError("--device-file: needs --bandwidth, whose measurements it has")
    if "RANK" in os.environ and world_size() > 1:
        _as_rank(run_dir, bandwidth, max_bytes, device, device_file, report, measurements)
        return
    findings = _findings(run_dir)
    measured = None
    if bandwidth and is_usable(findings):
        measured = _in_new_ranks(nproc or _default_ranks(device), max_bytes, device)
    _report(findings, measured, device_file, report)


def _findings(run_dir: Path) -> list[Finding]:
    return [
        *programs(),
        *packages(),
        *torch_findings(),
        *limits(),
        disk(run_dir),
        *network(os.environ),
    ]


def _default_ranks(device: DeviceName) -> int:
    import torch

    return max(2, 0 if device is DeviceName.CPU else torch.cuda.device_count())


def _in_new_ranks(nproc: int, max_bytes: int, device: DeviceName) -> dict[str, Any]:
    """The measurements of ranks that are started on this machine."""
    if nproc < 2:
        raise UsageError(f"--nproc {nproc}: must be at least 2; one rank has no links")
    with tempfile.TemporaryDirectory(prefix="dynmo-doctor-") as folder:
        file = Path(folder) / "measurements.json"
        words = ["doctor", "--bandwidth", "--max-bytes", str(max_bytes), "--device", device.value]
        code = run_processes([*words, "--measurements", str(file)], nproc, None, ExitOptions(), SINGLE_NODE)
        if code:
            raise typer.Exit(code)
        measured: dict[str, Any] = read_any_json(file, MAX_DOCUMENT_BYTES)
    return measured


def _as_rank(
    run_dir: Path,
    bandwidth: bool,
    max_bytes: int,
    device: DeviceName,
    device_file: Path | None,
    report: Format,
    measurements: Path | None,
) -> None:
    """Measure as one rank of a launcher; rank 0 reports, or writes the measurements to a file."""
    from ...parallel.process_groups import all_gather_objects, destroy_world, init_world

    world = init_world(device.value)
    try:
        measured = _measure(world, max_bytes) if bandwidth else None
        found: list[Finding] = []
        if measurements is None:
            first_on_host = os.environ.get("LOCAL_RANK", "0") == "0"
            own = [each.document() for each in _findings(run_dir)] if first_on_host else []
            gathered = all_gather_objects(world, [world.host, own])
            found = _of_all_hosts(world.host, gathered)
    finally:
        destroy_world()
    if not is_rank0():
        return
    if measurements is not None:
        write_whole(measurements, json.dumps(measured).encode())
        return
    _report(found, measured, device_file, report)


def _of_all_hosts(host: str, gathered: Sequence[Sequence[Any]]) -> list[Finding]:
    """The findings of this machine, and those of other machines that are not ok."""
    here, others = [], []
    for other, rows in gathered:
        for row in rows:
            finding = Finding(**row)
            if other == host:
                here.append(finding)
            elif finding.status != "ok":
                others.append(Finding(**{**row, "group": f"Machine {other}"}))
    return [*here, *others]


def _measure(world: World, max_bytes: int) -> dict[str, Any]:
    """Measure links, all-reduces and this rank's device; a collective.

    Returns:
        A JSON object with times in nanoseconds, and bandwidths in bytes per second.
    """
    from ...parallel import link_speed
    from ...parallel.process_groups import all_gather_objects

    all_sizes = link_speed.CUDA_SIZES if world.device.type == "cuda" else link_speed.SIZES
    sizes = [size for size in all_sizes if size <= max_bytes]
    hosts = all_gather_objects(world, world.host)
    pairs = link_speed.measure_pairs(world, sizes)
    reduces = link_speed.measure_all_reduce(world, sizes)
    links = {}
    for name, same in (("link", True), ("network", False)):
        found = link_speed.link_of(pair for pair in pairs if (hosts[pair.here] == hosts[pair.there]) is same)
        links[name] = None if found is None else {"bandwidth_bytes_per_s": found[0], "latency_ns": found[1]}
    return {
        "backend": "nccl" if world.device.type == "cuda" else "gloo",
        "hosts": hosts,
        "pairs": [
            {"from": row.here, "to": row.there, "bytes": row.num_bytes, "ns": row.ns, "bytes_per_s": row.bytes_per_s}
            for row in pairs
        ],
        "all_reduce": [
            {"ranks": row.num_ranks, "bytes": row.num_bytes, "ns": row.ns, "bus_bytes_per_s": row.bus_bytes_per_s}
            for row in reduces
        ],
        **links,
        "device": link_speed.device_speed(world.device),
    }


def _report(findings: Sequence[Finding], measured: Any, device_file: Path | None, report: Format) -> None:
    """Print everything, write the device file, and exit with code 1 if something required is missing."""
    if report is Format.JSON:
        rows = [finding.document() for finding in findings]
        emit_json({"usable": is_usable(findings), "findings": rows, "bandwidth": measured})
    else:
        emit("\n".join(report_lines(findings)))
        if measured is not None:
            _print_measurements(measured)
    if device_file is not None and measured is not None:
        write_whole(device_file, device_toml(measured).encode())
        print_message(f"wrote {device_file}")
    if not is_usable(findings):
        raise typer.Exit(EXIT_FAILURE)


def _microseconds(ns: float) -> str:
    return f"{ns / 1000:,.1f}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3f}"


def _print_measurements(measured: dict[str, Any]) -> None:
    rows = []
    for reduce in measured["all_reduce"]:
        pairs = [pair for pair in measured["pairs"] if pair["bytes"] == reduce["bytes"]]
        if not pairs:  # an element of an all-reduce has 4 bytes
            pairs = [pair for pair in measured["pairs"] if pair["bytes"] == 1]
        slowest, fastest = (pick(pairs, key=lambda pair: pair["ns"]) for pick in (max, min))
        rows.append(
            (
                human_bytes(slowest["bytes"]),
                *(_microseconds(pair["ns"]) for pair in (fastest, slowest)),
                _gigabytes(slowest["bytes_per_s"]),
                _microseconds(reduce["ns"]),
                _gigabytes(reduce["bus_bytes_per_s"]),
            )
        )
    num_hosts, num_ranks = len(set(measured["hosts"])), len(measured["hosts"])
    columns = ("message", "fastest pair, us", "slowest pair, us", "GB/s", "all-reduce, us", "bus GB/s")
    emit("")
    title = f"{num_ranks} ranks on {num_hosts} machine{'' if num_hosts == 1 else 's'}, {measured['backend']}"
    emit_table(title, columns, rows)
    for name, label in (("link", "slowest link within a machine"), ("network", "slowest link between machines")):
        if measured[name] is not None:
            link = measured[name]
            rate, latency = _gigabytes(link["bandwidth_bytes_per_s"]), _microseconds(link["latency_ns"])
            emit(f"{label}: {rate} GB/s | latency: {latency} us")
    speed = measured["device"]
    products = ", ".join(f"{dtype} {rate / 1e12:.3f}" for dtype, rate in speed["flops_per_s"].items())
    emit(f"matrix products, TFLOP/s: {products} | memory: {_gigabytes(speed['memory_bandwidth_bytes_per_s'])} GB/s")


def device_toml(measured: dict[str, Any]) -> str:
    """A device file for ``dynmo-plan --device``: the measured speed of rank 0's device and of the slowest links.

    Args:
        measured: what ``_measure`` returns.
    """
    speed, hosts = measured["device"], measured["hosts"]
    network, link = measured["network"], measured["link"] or measured["network"]
    lines = [
        "# Measured by dynmo-train doctor --bandwidth. The rates are what was reached, not peaks.",
        f"name = {json.dumps(speed['name'])}",
        f'kind = "{speed["kind"]}"',
        f"memory_bandwidth_bytes_per_s = {round(speed['memory_bandwidth_bytes_per_s'])}",
        f"memory_bytes = {speed['memory_bytes']}",
        f"link_bandwidth_bytes_per_s = {link['bandwidth_bytes_per_s']}",
        f"link_latency_ns = {link['latency_ns']}",
        f"node_size = {max(hosts.count(host) for host in hosts)}",
    ]
    if network is not None:
        lines += [
            f"network_bandwidth_bytes_per_s = {network['bandwidth_bytes_per_s']}",
            f"network_latency_ns = {network['latency_ns']}",
        ]
    lines += ["max_efficiency = 1.0", "memory_efficiency = 1.0", "link_efficiency = 1.0"]
    lines += [f"half_flops = {speed['half_flops']}", "", "[flops_per_s]"]
    lines += [f"{dtype} = {round(rate)}" for dtype, rate in speed["flops_per_s"].items()]
    return "\n".join(lines) + "\n"
