"""Where torch 2.11 and 2.13 differ: stand-ins for the version that is not installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynmo_train.parallel import zero


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({"_fsdp_param_groups": ["a", "b"]}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_groups_of_sharded_parameters(monkeypatch, state, groups):
    monkeypatch.setattr(zero, "fully_shard", SimpleNamespace(state=lambda _: SimpleNamespace(**state)))
    assert zero._groups(None) == groups
