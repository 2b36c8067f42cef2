"""Findings about a machine: programs of other versions, limits, disk and network."""

from __future__ import annotations

import os
import resource

import pytest

from dynmo_train.cli.doctor import system


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_programs_of_this_version_are_ok():
    assert {each.status for each in system.programs("1.2", lambda _: "1.2")} == {"ok"}


def test_programs_of_another_version_are_warnings(monkeypatch):
    monkeypatch.setattr(system, "program_path", lambda name: f"/here/{name}")
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/there/{name}")
    answers = {"/here/dynmo-plan": "1.2", "/there/dynmo-plan": "1.1"}
    found = [each for each in system.programs("1.2", answers.get) if each.name == "dynmo-plan"]
    assert [(each.status, each.found) for each in found] == [
        ("ok", "1.2 (/here/dynmo-plan)"),
        ("warning", "1.1 (/there/dynmo-plan)"),
    ]


def test_programs_that_are_not_installed_state_the_cost(monkeypatch):
    monkeypatch.setattr(system, "program_path", lambda _: None)
    monkeypatch.setattr(system.shutil, "which", lambda _: None)
    found = by_name(system.programs())
    assert found["dynmo-plan"].status == "missing"
    assert "--balance online" in found["dynmo-plan"].cost


def test_program_version_of_a_broken_program_is_none(tmp_path):
    path = tmp_path / "dynmo-plan"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    assert system.program_version(str(path)) is None
    path.write_text("#!/bin/sh\necho 'dynmo-plan 9.9 | distribution: x'\n")
    assert system.program_version(str(path)) == "9.9"


def test_limits_report_few_open_files_and_little_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    found = by_name(system.limits(tmp_path / "none"))
    assert (found["open files"].status, found["open files"].remedy) == ("warning", "ulimit -n 4096")
    assert found["shared memory"].status == "warning"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    assert by_name(system.limits())["open files"].status == "ok"


def test_disk_that_is_full_or_read_only_is_reported(monkeypatch, tmp_path):
    assert str(tmp_path) in system.disk(tmp_path / "a" / "b").found
    monkeypatch.setattr(system, "MIN_DISK_BYTES", 1 << 62)
    assert system.disk(tmp_path).status == "warning"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert system.disk(tmp_path).status == "error"


@pytest.mark.parametrize(
    ("environment", "status"), [({"GLOO_SOCKET_IFNAME": "lo"}, "ok"), ({"GLOO_SOCKET_IFNAME": "none0"}, "error")]
)
def test_network_checks_the_interface_of_gloo(environment, status):
    assert by_name(system.network(environment))["gloo"].status == status


def test_network_warns_of_a_host_name_without_address():
    def fail(_):
        raise OSError("unknown")

    assert by_name(system.network({}, fail))["gloo"].status == "warning"
    assert "for several machines" in by_name(system.network({}, lambda _: "127.0.1.1"))["gloo"].found
    assert by_name(system.network({}, lambda _: "10.0.0.7"))["gloo"].found.endswith("10.0.0.7")
