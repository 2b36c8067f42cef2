"""Muon: equal to torch's on matrices of layers, AdamW elsewhere, scales and parts as in Megatron."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.models.layer_list import masks_of
from dynmo_train.optim.item_sharding import ItemSharding
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.optim.optimizers.muon import Muon, MuonSettings, is_muon_matrix
from dynmo_train.optim.optimizers.newton_schulz import iteration_coefficients, orthogonalize
from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.parallel.tensor_parallel import TensorRegion
from tests.unit.dynmo_train.optim.optimizers.stores import (
    FAMILY,
    all_tensors,
    built_store,
    gradient_of,
    moved,
    plain_parameters,
    take_steps,
)

ADAMW = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
TORCH = MuonSettings(
    momentum=0.95,
    nesterov=True,
    num_ns_steps=5,
    coefficient_type="simple",
    scale_mode="shape_scaling",
    extra_scale_factor=1.0,
    split_qkv=False,
    tp_mode="duplicated",
    weight_decay=0.1,
    adamw=ADAMW,
)


def skip(name, step):
    return step < 3 and name == "layers.1.mlp.fc2.weight"


def torch_muon(settings, steps, **options):
    """The weights after ``steps`` of ``torch.optim.Muon`` for matrices of layers and ``AdamW`` for the rest."""
    parameters = plain_parameters()
    matrices = [p for name, p in parameters.items() if is_muon_matrix(name, p.dim())]
    rest = [p for name, p in parameters.items() if not is_muon_matrix(name, p.dim())]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=settings.momentum, **options)
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps)
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = None if skip(name, step) else gradient_of(name, step, parameter.shape)
        muon.step()
        adamw.step()
    assert len(matrices) == 8
    return parameters


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.9}, {"nesterov": False}),
        ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, {"adjust_lr_fn": "match_rms_adamw"}),
        ({"num_ns_steps": 3}, {"ns_steps": 3}),
    ],
)
def test_muon_ten_steps_with_a_move_equal_torch(changes, options):
    settings = replace(TORCH, **changes)
    store = built_store(settings)
    take_steps(store, range(1, 6), skip=skip)
    store = moved(store, settings)
    take_steps(store, range(6, 11), skip=skip)
    tensors = all_tensors(store)
    for name, parameter in torch_muon(settings, range(1, 11), **options).items():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)
    assert store.export("layers.1.mlp").steps["layers.1.mlp.fc2.weight"] == 8
    assert store.export("layers.1.mlp").steps["layers.1.mlp.fc1.weight"] == 10


def test_is_muon_matrix_leaves_out_tables_vectors_and_output():
    names = (
        "layers.0.attention.qkv.weight",
        "layers.3.mlp.experts.2.fc1.weight",
        "layers.3.mlp.router.weight",
        "head.dense.weight",
        "encoder.layers.0.attention.relative.weight",
        "embedding.word.weight",
        "decoder.embedding.position.weight",
        "query.embedding.tokentype.weight",
        "head.weight",
    )
    assert [name for name in names if is_muon_matrix(name, 2)] == list(names[:4])
    assert not is_muon_matrix("layers.0.attention.norm.weight", 1)


def test_muon_splits_query_key_and_value():
    """Rows of the fused matrix are grouped by head: queries, key, value."""
    settings = replace(TORCH, split_qkv=True, nesterov=False, momentum=0.0, scale_mode="unit_rms_norm")
    store = built_store(settings, ["layers.0.attention"])
    name = "layers.0.attention.qkv.weight"
    before = all_tensors(store)[name].clone()
    take_steps(store, [1], weight_decay=0.0)
    update = (all_tensors(store)[name] - before) / -1e-2
    # Two heads of width 4: [heads, 3, width, columns].
    gradient = gradient_of(name, 1, before.shape).view(2, 3, 4, 8)
    coefficients = iteration_coefficients("simple", 5)
    for index in range(3):
        matrix = gradient[:, index].reshape(8, 8).bfloat16()
        expected = orthogonalize([matrix], coefficients)[0].float() * settings.scale(8, 8)
        got = update.view(2, 3, 4, 8)[:, index].reshape(8, 8)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("mode", "expected"), [("spectral", 16.0), ("shape_scaling", 2.0), ("unit_rms_norm", 2.0)])
def test_scale_of_tall_and_wide_matrices(mode, expected):
    settings = replace(TORCH, scale_mode=mode, extra_scale_factor=0.5)
    assert settings.scale(256, 64) == 0.5 * expected
    assert settings.scale(64, 256) == 0.5 * {"spectral": 16.0, "shape_scaling": 1.0, "unit_rms_norm": 0.5}[mode]


def test_muon_pruned_weights_stay_zero():
    """Orthogonalization mixes the entries of a matrix: without the mask an update moves pruned weights."""
    item, name = "layers.0.mlp", "layers.0.mlp.fc1.weight"
    store = built_store(TORCH, [item])
    layer = masks_of(item, store.modules[item])[name]
    mask = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    store.prune(item, name, layer, mask)
    for step in (1, 2):
        for _, each, parameter in store.parameters():
            parameter.grad = gradient_of(each, step, parameter.shape) * (mask if each == name else 1)
        store.step(Update(lr=1e-2, weight_decay=0.1))
    tensors = all_tensors(store)
    assert not tensors[name][~mask].any()
    assert tensors[name][mask].all()


class _Slices(TensorRegion):
    """The second of two tensor-parallel ranks, without communication."""

    def __init__(self):
        self.rank, self.size = 1, 2

    def gather_slices(self, x, dim):
        raise AssertionError("a slice is orthogonalized alone")


def test_muon_blockwise_orthogonalizes_the_slice():
    name, settings = "layers.0.mlp.fc1.weight", replace(TORCH, tp_mode="blockwise", nesterov=False, momentum=0.0)
    muon = Muon(settings, ItemSharding(family=FAMILY, region=_Slices()))
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    muon.add({name: parameter})
    parameter.grad = gradient_of(name, 1, (8, 8))
    muon.step(Update(lr=1e-2, weight_decay=0.0))
    matrix = gradient_of(name, 1, (8, 8)).bfloat16()
    expected = -1e-2 * orthogonalize([matrix], iteration_coefficients("simple", 5))[0].float()
    torch.testing.assert_close(parameter.detach(), expected)


def test_muon_small_batches_change_no_bit(monkeypatch):
    expected, store = built_store(TORCH), built_store(TORCH)
    take_steps(expected, range(1, 4))
    monkeypatch.setattr("dynmo_train.optim.optimizers.muon.BATCH_ELEMENTS", 1)
    take_steps(store, range(1, 4))
    assert all(torch.equal(all_tensors(store)[name], tensor) for name, tensor in all_tensors(expected).items())


def test_muon_batch_has_matrices_of_one_item(monkeypatch):
    """Kernels are selected by the size of the batch, and other partitions have other local items."""
    batches = []
    update = Muon._update
    monkeypatch.setattr(Muon, "_update", lambda muon, batch, *rest: batches.append(batch) or update(muon, batch, *rest))
    take_steps(built_store(TORCH), range(1, 2))
    items = [{matrix.name.rpartition(".")[0].rpartition(".")[0] for matrix in batch} for batch in batches]
    assert {len(names) for names in items} == {1}
    assert len(set.union(*items)) > 1
