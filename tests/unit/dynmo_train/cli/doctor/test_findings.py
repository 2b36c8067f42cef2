"""The report of ``dynmo-train doctor``: cost and remedy below a component, and the last line."""

from __future__ import annotations

from dynmo_train.cli.doctor.findings import Finding, is_usable, ok, report_lines

MISSING = Finding(group="Kernels", name="apex", status="missing", found="not installed", cost="slow", remedy="build it")
ERROR = Finding(
    group="torch", name="torch", status="error", found="not installed", cost="no training", remedy="install"
)


def test_report_has_cost_and_remedy_below_a_missing_component():
    lines = report_lines([ok("Kernels", "fused AdamW", "cpu"), MISSING])
    assert lines == [
        "Kernels",
        "  ok       fused AdamW  cpu",
        "  missing  apex         not installed",
        "                        cost: slow",
        "                        fix: build it",
        "",
        "usable | error: 0 | warning: 0 | missing: 1",
    ]


def test_report_of_an_error_is_not_usable():
    assert report_lines([ERROR])[-1] == "not usable | error: 1 | warning: 0 | missing: 0"
    assert is_usable([MISSING])
    assert not is_usable([MISSING, ERROR])
