"""Where torch 2.11 and 2.13 differ: stand-ins for the version that is not installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynmo_train.parallel import fsdp
from dynmo_train.parallel.collectives import all_gather_rows, reduce_scatter_rows


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({"_fsdp_param_groups": ["a", "b"]}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_param_groups_of_both_torch_versions(monkeypatch, state, groups):
    monkeypatch.setattr(fsdp, "fully_shard", SimpleNamespace(state=lambda _: SimpleNamespace(**state)))
    assert fsdp.param_groups(None) == groups


def test_collectives_use_the_names_of_torch():
    calls = []
    names = ("all_gather_single", "reduce_scatter_single"), ("all_gather_into_tensor", "reduce_scatter_tensor")
    newer, older = (
        SimpleNamespace(**{name: lambda *given, group, name=name: calls.append((name, *given, group)) for name in each})
        for each in names
    )
    for torch_names in (newer, older):
        all_gather_rows("whole", "own", "group", torch_names)
        reduce_scatter_rows("own", "whole", "group", torch_names)
    assert calls == [
        (name, *given, "group")
        for each in names
        for name, given in zip(each, (("whole", "own"), ("own", "whole")), strict=True)
    ]
