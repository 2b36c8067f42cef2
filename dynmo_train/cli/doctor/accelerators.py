"""Findings about torch and what it can use here: devices, NCCL, number formats, fused and sparse kernels, compilers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..._common.console import human_bytes
from ..._common.errors import UsageError
from .findings import Finding, ok

# Compute capabilities of the first devices with the tensor cores of a format.
BF16, FP8, SEMI_STRUCTURED = (8, 0), (8, 9), (8, 0)


def supported_torch(requirements: list[str] | None) -> tuple[str, str]:
    """The first supported version of torch and the first one that is not, from the requirements of the package."""
    for line in requirements or ():
        if found := re.match(r"torch[<>=!]*(?=.*>=([\d.]+))(?=.*<([\d.]+))", line.replace(" ", "")):
            return found[1], found[2]
    return "0", "999"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def torch_findings() -> list[Finding]:
    """The findings of torch, and everything that depends on it; a single error where it cannot be imported."""
    if find_spec("torch") is None:
        cost, remedy = "training does not start", "pip install 'dynmo-toolkit[train]'"
        return [Finding(group="torch", name="torch", status="error", found="not installed", cost=cost, remedy=remedy)]
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        remedy = "install torch again: pip install --force-reinstall 'dynmo-toolkit[train]'"
        found = f"{type(error).__name__}: {error}"
        return [
            Finding(
                group="torch", name="torch", status="error", found=found, cost="training does not start", remedy=remedy
            )
        ]
    return [
        version_of(torch),
        *devices(torch),
        *communication(torch),
        *formats(torch),
        *kernels(torch),
        *compilers(torch),
    ]


def version_of(torch: Any) -> Finding:
    """The version of torch, and whether it is one of those that are tested."""
    version = str(torch.__version__)
    try:
        first, end = supported_torch(metadata.requires("dynmo-toolkit"))
    except metadata.PackageNotFoundError:
        first, end = supported_torch(None)
    if _numbers(first) <= _numbers(version) < _numbers(end):
        return ok("torch", "torch", version)
    cost = f"must be at least {first} and below {end}; other versions are not tested"
    remedy = f"pip install 'torch>={first},<{end}'"
    return Finding(group="torch", name="torch", status="warning", found=version, cost=cost, remedy=remedy)


def devices(torch: Any) -> Iterator[Finding]:
    """CUDA and its devices."""
    if not torch.cuda.is_available():
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device found"
        remedy = (
            "install a build of torch with CUDA"
            if torch.version.cuda is None
            else "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        )
        cost = "training runs on the CPU, with gloo"
        yield Finding(group="torch", name="CUDA", status="missing", found=build, cost=cost, remedy=remedy)
        return
    yield ok("torch", "CUDA", f"{torch.version.cuda}, {torch.cuda.device_count()} devices")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = human_bytes(found.total_memory)
        yield ok("torch", f"device {index}", f"{found.name}, {size}, capability {found.major}.{found.minor}")


def communication(torch: Any) -> Iterator[Finding]:
    """Backends of process groups: gloo and NCCL."""
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield ok("torch", "gloo", "available")
    else:
        cost, remedy = "no process groups: training does not start", "install a build of torch with distributed"
        yield Finding(group="torch", name="gloo", status="error", found="missing", cost=cost, remedy=remedy)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield ok("torch", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        cost, remedy = "tensors on GPUs cannot be sent between ranks", "install a build of torch with NCCL"
        yield Finding(group="torch", name="NCCL", status="error", found="missing", cost=cost, remedy=remedy)
    else:
        cost, remedy = "none without CUDA devices", "a build of torch with CUDA has it"
        yield Finding(group="torch", name="NCCL", status="missing", found="missing", cost=cost, remedy=remedy)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of this machine's processors, in Linux's names."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def formats(torch: Any) -> Iterator[Finding]:
    """Number formats with fast matrix products: bfloat16 and FP8."""
    if torch.cuda.is_available():
        capability = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
        for name, first, remedy in (("bf16", BF16, "use --fp16"), ("fp8", FP8, "leave out --fp8")):
            if capability >= first:
                yield ok("Kernels", name, "tensor cores")
            else:
                cost = f"no tensor cores below compute capability {first[0]}.{first[1]}"
                found = f"capability {capability[0]}.{capability[1]}"
                yield Finding(group="Kernels", name=name, status="missing", found=found, cost=cost, remedy=remedy)
        return
    flags = cpu_flags()
    fast = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags]
    if fast:
        yield ok("Kernels", "bf16", f"{', '.join(fast)} ({torch.backends.cpu.get_cpu_capability()})")
    else:
        cost = "--bf16 is emulated on this processor, and slower than float32"
        yield Finding(
            group="Kernels",
            name="bf16",
            status="missing",
            found=torch.backends.cpu.get_cpu_capability(),
            cost=cost,
            remedy="train in float32, or on a processor with AVX512_BF16 or AMX",
        )


def kernels(torch: Any) -> Iterator[Finding]:
    """Optimizers, attention and sparse products."""
    from ...optim.apex import find_apex

    has_cuda = torch.cuda.is_available()
    apex = find_apex()
    if apex.state == "present":
        yield ok("Kernels", "apex", "FusedAdam")
    else:
        found = "not installed" if apex.state == "absent" else "a package of that name that is not NVIDIA's"
        cost = "torch's fused AdamW and normalizations are used" if has_cuda else "none here: apex needs CUDA"
        remedy = "build it from github.com/NVIDIA/apex with --cpp_ext --cuda_ext"
        yield Finding(group="Kernels", name="apex", status="missing", found=found, cost=cost, remedy=remedy)
    yield fused_adamw(torch)
    if has_cuda and not torch.backends.cuda.is_flash_attention_available():
        cost = "attention takes memory that is quadratic in the sequence length"
        remedy = "install a build of torch with flash attention, or --recompute-granularity selective"
        yield Finding(
            group="Kernels", name="flash attention", status="missing", found="missing", cost=cost, remedy=remedy
        )
    else:
        yield ok("Kernels", "flash attention", "in scaled_dot_product_attention")
    yield from sparse_products(torch)


def fused_adamw(torch: Any) -> Finding:
    """The fused AdamW of torch, which every run without apex uses; one step is made."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.nn.Parameter(torch.ones(8, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except (RuntimeError, ValueError) as error:
        remedy = "install a version of torch that is supported"
        cost = "training does not start"
        return Finding(group="Kernels", name="fused AdamW", status="error", found=str(error), cost=cost, remedy=remedy)
    return ok("Kernels", "fused AdamW", device)


def sparse_products(torch: Any) -> Iterator[Finding]:
    """The sparse products of pruned weights: CSR on CPUs, whose blocks need no kernel; block, CSR and 2:4 on GPUs."""
    if not torch.cuda.is_available():
        if torch.backends.mkl.is_available():
            yield ok("Kernels", "sparse CSR", "MKL")
        else:
            cost = "pruned weights are multiplied as dense ones, or slower"
            remedy = "install a build of torch with MKL, and run dynmo-train tune-sparse"
            yield Finding(
                group="Kernels", name="sparse CSR", status="missing", found="no MKL", cost=cost, remedy=remedy
            )
        return
    if find_spec("triton") is None:
        cost, remedy = "no block-sparse products, and no --torch-compile", "pip install triton"
        yield Finding(group="Kernels", name="block (BSR)", status="missing", found="", cost=cost, remedy=remedy)
    else:
        yield ok("Kernels", "block (BSR)", f"triton {metadata.version('triton')}")
    capability = torch.cuda.get_device_capability()
    if capability >= SEMI_STRUCTURED:
        yield ok("Kernels", "2:4 sparsity", f"capability {capability[0]}.{capability[1]}")
    else:
        found = f"capability {capability[0]}.{capability[1]}"
        cost, remedy = "--pruning-mode 2:4 is not faster than dense products", "a GPU of compute capability 8.0"
        yield Finding(group="Kernels", name="2:4 sparsity", status="missing", found=found, cost=cost, remedy=remedy)


def compilers(torch: Any) -> Iterator[Finding]:
    """What ``--torch-compile`` needs."""
    from ...models.compiled import INDUCTOR, check_compiler

    try:
        check_compiler("cuda" if torch.cuda.is_available() else "cpu", INDUCTOR, os.environ)
    except UsageError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield Finding(
            group="Kernels",
            name="torch.compile",
            status="missing",
            found=found,
            cost="no --torch-compile",
            remedy=remedy,
        )
    else:
        yield ok("Kernels", "torch.compile", INDUCTOR)
