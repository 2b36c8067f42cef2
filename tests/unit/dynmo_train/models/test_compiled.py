"""Which methods of an item are compiled."""

import torch
from torch import nn

from dynmo_train.models.attention.documents import PackedAttention
from dynmo_train.models.compiled import (
    CompileSettings,
    compile_item,
    compiled_regions,
    is_compiled,
    num_compiled_graphs,
)
from dynmo_train.models.layers.feed_forward import Mlp
from dynmo_train.models.vocabulary.embedding import PackedEmbedding

META = torch.device("meta")


def test_attention_in_documents_leaves_the_kernel_outside():
    attention = PackedAttention(
        reset_positions=True, reset_mask=True, width=8, heads=2, norm=nn.LayerNorm(8), device=META
    )
    assert [(region.method, region.dim) for region in compiled_regions(attention)] == [("project", None)]
    embedding = PackedEmbedding(vocabulary=8, width=8, device=META)
    assert [region.method for region in compiled_regions(embedding)] == ["forward"]


def test_item_of_another_package_is_not_compiled():
    class Other(Mlp):
        pass

    other = Other(width=8, inner=8, activation="relu", norm=nn.LayerNorm(8), device=META)
    compile_item(other, CompileSettings(backend="eager"))
    assert not is_compiled(other)


def test_region_with_one_token_runs_eagerly():
    mlp = Mlp(width=8, inner=8, activation="relu", norm=nn.LayerNorm(8), device=torch.device("cpu"))
    for layer in (mlp.fc1, mlp.fc2):
        nn.init.normal_(layer.weight)
    x = torch.randn(2, 1, 8)
    expected = mlp(x)
    before = num_compiled_graphs()
    compile_item(mlp, CompileSettings(backend="eager", any_length=True))
    assert torch.equal(mlp(x), expected)
    assert num_compiled_graphs() == before
