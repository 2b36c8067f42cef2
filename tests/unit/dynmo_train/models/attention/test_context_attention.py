"""Context-parallel attention without processes: each rank's part is that of one process, by masks and by kernels."""

from __future__ import annotations

import torch
from torch import nn

from dynmo_train.models.attention import documents
from dynmo_train.models.attention import self_attention as blocks
from dynmo_train.models.attention.context_attention import document_chunk_offsets
from dynmo_train.models.attention.documents import STARTS, PackedAttention
from dynmo_train.models.attention.positions import Rotary
from dynmo_train.parallel.context_parallel import ContextRegion
from tests.tables import table
from tests.unit.dynmo_train.models.attention.test_varlen import D, H, on_cpu  # noqa: F401

T, G = 16, 2
# Documents that begin within a chunk, at its first and last token, that span chunks, and of one token.
STARTS_BT = torch.tensor(
    [
        [0, 0, 2, 2, 2, 2, 2, 7, 8, 8, 8, 8, 12, 13, 13, 13],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 15],
        [0, 1, 1, 1, 1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 14, 14],
    ]
)


class WholeRegion(ContextRegion):
    """A rank whose gathers have a known result: the keys and values of all tokens, in the order of their parts."""

    def __init__(self, rank, size, whole):
        super().__init__(None, rank, size)
        self.whole = list(whole)

    def start_gather(self, k, v):
        [keys, values] = self.whole.pop(0)
        assert torch.equal(k, self.cut(keys, 2))
        assert torch.equal(v, self.cut(values, 2))
        return type("Started", (), {"wait": lambda _: (keys, values)})()


@table("path", ["mask", "kernel"])
@table("window", [None, 3])
@table("resets", [(True, True), (False, True), (True, False), (False, False)], ids=str)
@table("size", [2, 4])
def test_context_rank_attends_as_one_process(monkeypatch, on_cpu, size, resets, window, path):  # noqa: F811
    torch.manual_seed(0)
    rotary = Rotary(D // H, 10000.0)
    options = {"reset_positions": resets[0], "reset_mask": resets[1], "window": window, "groups": G, "rotary": rotary}
    module = PackedAttention(width=D, heads=H, norm=nn.LayerNorm(D), device=torch.device("cpu"), **options)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, T, D)
    expected = module(x, STARTS_BT)
    _, k, v = module.project(x, documents.positions_in_documents(STARTS_BT) if resets[0] else 0)
    if path == "kernel":
        on_cpu()
        monkeypatch.setattr(blocks, "has_kernel", lambda *_: True)
    for rank in range(size):
        halves = zip(k.chunk(2, dim=1), v.chunk(2, dim=1), strict=True)
        region = module.context = WholeRegion(rank, size, halves)
        starts = region.cut(STARTS_BT, 1)
        module.prepare_batch({STARTS: starts})
        torch.testing.assert_close(module(region.cut(x, 1), starts), region.cut(expected, 1))


def test_document_chunk_offsets_are_those_of_the_drawing():
    starts = torch.tensor([[2, 5, 5, 5], [0, 0, 0, 0]])
    queries, keys = document_chunk_offsets(starts, 8, 2)
    assert queries.tolist() == [0, 0, 1, 4, 4, 8, 8]
    assert keys.tolist() == [0, 2, 5, 8, 8, 16, 16]
    assert queries.dtype == keys.dtype == torch.int32


def test_context_attention_on_a_device_reads_no_mask():
    """On CUDA in half precision there are sequences of variable length; meta tensors run the same path."""
    module = PackedAttention(
        width=32,
        heads=4,
        norm=nn.LayerNorm(32, device="meta"),
        device=torch.device("meta"),
        reset_positions=True,
        reset_mask=True,
    ).to(torch.bfloat16)
    module.context = ContextRegion(None, 0, 2)
    starts = module.context.cut(STARTS_BT, 1)
    module.prepare_batch({STARTS: starts})
    x = torch.empty(3, T // 2, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x, starts.to("meta")).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("varlen" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)
