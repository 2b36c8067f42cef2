"""NVIDIA's apex is distinguished from the package of the same name by its optimizers."""

from __future__ import annotations

import sys

import pytest
import torch

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.layer_list import parameters_of
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.optim.apex import find_apex
from dynmo_train.optim.item_sharding import ItemBuilder, ItemSharding
from dynmo_train.optim.item_store import ItemStore, OptimizerStates
from dynmo_train.optim.optimizers.adamw import AdamWSettings

NVIDIA = {"__init__.py": "", "optimizers/__init__.py": "class FusedAdam:\n    pass\n"}
OTHERS = {
    "no optimizers": {"__init__.py": ""},
    "another meaning": {"__init__.py": "", "optimizers/__init__.py": "FusedAdam = 'a string'\n"},
    "no FusedAdam": {"__init__.py": "", "optimizers/__init__.py": "class Adam:\n    pass\n"},
    "broken": {"__init__.py": "raise RuntimeError('needs a web server')\n"},
    "missing parts": {"__init__.py": "import a_module_that_is_not_there\n"},
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    def write(files):
        for name, text in files.items():
            path = tmp_path / "apex" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def test_find_apex_with_nvidias_is_present(install):
    install(NVIDIA)
    apex = find_apex()
    assert apex.state == "present"
    assert apex.fused_adam.__name__ == "FusedAdam"
    assert apex.line(used=True) == "apex: NVIDIA's; using FusedAdam"
    assert "not used" in apex.line(used=False)


@pytest.mark.parametrize("kind", OTHERS)
def test_find_apex_with_another_project_is_other(install, kind):
    install(OTHERS[kind])
    apex = find_apex()
    assert (apex.state, apex.fused_adam) == ("other", None)
    assert "is not NVIDIA's (apex on the package index is another project)" in apex.line(used=False)


def test_find_apex_without_a_package_is_absent():
    apex = find_apex(find=lambda name: None)
    assert apex.state == "absent"
    assert "not installed" in apex.line(used=False)


NORMS = {
    **NVIDIA,
    "normalization/__init__.py": """
import torch
from torch import nn

class FusedLayerNorm(nn.Module):
    def __init__(self, shape, eps):
        super().__init__()
        self.shape, self.eps = shape, eps
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias

class FusedRMSNorm(nn.Module):
    def __init__(self, shape, eps):
        super().__init__()
        self.shape, self.eps = shape, eps
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
""",
}
SIZES = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "vocab_size": 20,
    "padded_vocab_size": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
FAMILIES = {
    "FusedLayerNorm": Gpt(GptShape(**SIZES)),
    "FusedRMSNorm": Llama(LlamaShape(**SIZES, num_key_value_heads=2, head_dim=8)),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_fuse_norms_match_torchs(install, kind):
    """Same names, same values; what they give is what torch's give."""
    install(NORMS)
    apex = find_apex()
    assert apex.line(used=True) == "apex: NVIDIA's; using FusedAdam, FusedLayerNorm and FusedRMSNorm"
    family, settings = FAMILIES[kind], AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    store, plain = (
        ItemStore(
            ItemBuilder(sharding=ItemSharding(family=family), device=torch.device("cpu"), fused_norms=norms),
            OptimizerStates(settings),
            SparseTable(),
        )
        for norms in (apex.fused_norms, {})
    )
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    for item in ("layers.0.attention", "layers.0.mlp"):
        for each in (store, plain):
            each.build(item)
        fused, torchs = store.modules[item], plain.modules[item]
        assert type(fused.norm).__name__ == kind
        assert list(parameters_of(item, fused)) == list(parameters_of(item, torchs))
        with torch.no_grad():
            fused.norm.weight.mul_(3.0)
            torchs.norm.weight.mul_(3.0)
        torch.testing.assert_close(fused(x), torchs(x))
        again = store.export(item)
        store.load_state(item, again)
        torch.testing.assert_close(store.modules[item](x), torchs(x))


def test_find_apex_without_kernels_keeps_torchs_norms(install):
    install(NVIDIA | {"normalization/__init__.py": "raise ImportError('fused_layer_norm_cuda')\n"})
    apex = find_apex()
    assert apex.fused_norms == {}
    assert apex.line(used=True) == "apex: NVIDIA's; using FusedAdam"
