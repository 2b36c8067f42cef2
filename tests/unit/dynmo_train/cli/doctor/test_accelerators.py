"""Findings about torch: supported versions, devices, formats by compute capability, instruction sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynmo_train.cli.doctor import accelerators


def cuda(capability, available=True):
    """A torch with two CUDA devices of one compute capability."""
    properties = SimpleNamespace(name="GPU", total_memory=80 * 10**9, major=capability[0], minor=capability[1])
    found = SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: 2,
        get_device_properties=lambda _: properties,
        get_device_capability=lambda *_: capability,
        nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
    )
    distributed = SimpleNamespace(
        is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: available
    )
    return SimpleNamespace(cuda=found, version=SimpleNamespace(cuda="12.8"), distributed=distributed)


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


def test_supported_torch_is_read_from_the_requirements():
    lines = ["numpy>=1.26", 'torch<2.14,>=2.11; extra == "train"']
    assert accelerators.supported_torch(lines) == ("2.11", "2.14")
    assert accelerators.supported_torch(["torch>=2.11,<2.14"]) == ("2.11", "2.14")
    assert accelerators.supported_torch(None) == ("0", "999")


@pytest.mark.parametrize(("version", "status"), [("2.12.1+cpu", "ok"), ("2.10.0", "warning"), ("2.14.0", "warning")])
def test_version_of_torch_outside_the_requirements_is_a_warning(monkeypatch, version, status):
    monkeypatch.setattr(accelerators.metadata, "requires", lambda _: ["torch>=2.11,<2.14"])
    assert accelerators.version_of(SimpleNamespace(__version__=version)).status == status


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), {"bf16": "missing", "fp8": "missing"}),
        ((8, 0), {"bf16": "ok", "fp8": "missing"}),
        ((9, 0), {"bf16": "ok", "fp8": "ok"}),
    ],
)
def test_formats_follow_the_compute_capability(capability, expected):
    assert statuses(accelerators.formats(cuda(capability))) == expected


def test_devices_are_listed_with_memory_and_capability():
    found = [(each.name, each.found) for each in accelerators.devices(cuda((9, 0)))]
    assert found[0] == ("CUDA", "12.8, 2 devices")
    assert found[2] == ("device 1", "GPU, 80.0 GB, capability 9.0")
    assert statuses(accelerators.devices(cuda((9, 0), available=False))) == {"CUDA": "missing"}


def test_communication_without_nccl_on_gpus_is_an_error():
    with_gpu = cuda((9, 0))
    assert statuses(accelerators.communication(with_gpu)) == {"gloo": "ok", "NCCL": "ok"}
    with_gpu.distributed.is_nccl_available = lambda: False
    assert statuses(accelerators.communication(with_gpu)) == {"gloo": "ok", "NCCL": "error"}


def test_cpu_flags_are_read_from_cpuinfo(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n")
    assert accelerators.cpu_flags(path) == {"fpu", "avx512_bf16", "amx_bf16"}
    assert accelerators.cpu_flags(tmp_path / "none") == set()


def test_torch_findings_without_torch_is_one_error(monkeypatch):
    monkeypatch.setattr(accelerators, "find_spec", lambda _: None)
    (found,) = accelerators.torch_findings()
    assert (found.status, found.remedy) == ("error", "pip install 'dynmo-toolkit[train]'")


def test_torch_findings_make_a_step_of_the_fused_optimizer(monkeypatch):
    assert accelerators.fused_adamw(torch).status == "ok"
    monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no fused kernel")))
    assert accelerators.fused_adamw(torch).status == "error"
