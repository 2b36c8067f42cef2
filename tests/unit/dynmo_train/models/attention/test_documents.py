"""Samples of several documents: the same losses and gradients as each document alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dynmo_train.data.gpt_dataset import document_starts
from dynmo_train.models.attention.documents import (
    STARTS,
    PackedAttention,
    document_mask,
    document_offsets,
    positions_in_documents,
)
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.llama import Llama, LlamaShape

EOD = 9
IDS = torch.tensor([[1, 2, 9, 3, 4, 5, 9, 6], [9, 9, 1, 2, 3, 4, 5, 9]])
COMMON = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 32,
    "vocab_size": 11,
    "padded_vocab_size": 16,
    "max_position_embeddings": 8,
    "num_layers": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "reset_position_ids": True,
    "reset_attention_mask": True,
}
FAMILIES = {
    "gpt": Gpt(GptShape(**COMMON)),
    "llama": Llama(LlamaShape(**COMMON, num_key_value_heads=2, head_dim=4)),
}


def test_document_starts_follow_each_end_of_document():
    starts = document_starts(IDS, EOD)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7], [0, 1, 2, 2, 2, 2, 2, 2]]
    assert positions_in_documents(starts).tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4, 5]]


def test_document_mask_equals_megatrons_loop():
    """Megatron's definition: after each end of document, what follows does not attend to what came before."""
    mask = document_mask(document_starts(IDS, EOD))
    for sample, tokens in enumerate(IDS.tolist()):
        expected = torch.ones(8, 8).tril().bool()
        for place in [place for place, token in enumerate(tokens) if token == EOD]:
            expected[place + 1 :, : place + 1] = False
        assert torch.equal(mask[sample, 0], expected)


def test_document_offsets_fill_up_with_empty_documents():
    assert document_offsets(document_starts(IDS, EOD), 4).tolist() == [0, 3, 7, 8, 8, 9, 10, 16, 16]


def losses(family, ids, starts=None):
    """Each token's loss, and the modules that gave it."""
    modules = {item.name: family.build(item.name, torch.device("cpu")) for item in family.items}
    x, tensors = None, {"ids": ids, STARTS: starts}
    for item in family.items[:-1]:
        values = [] if x is None else [x]
        x = modules[item.name](*values, *(tensors[name] for name in item.inputs))
    head = modules["head"]
    logits = head.norm(x) @ head.weight[:11].t()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), (ids + 1) % 11, reduction="none"), modules


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(name):
    family = FAMILIES[name]
    packed, modules = losses(family, IDS, document_starts(IDS, EOD))
    packed.sum().backward()
    alone = type(family)(replace(family.shape, reset_position_ids=False, reset_attention_mask=False))
    total = None
    for sample, bounds in ((0, (0, 3, 7, 8)), (1, (0, 1, 2, 8))):
        for begin, end in pairwise(bounds):
            each, parts = losses(alone, IDS[sample : sample + 1, begin:end])
            torch.testing.assert_close(packed[sample, begin:end], each[0], rtol=1e-5, atol=1e-6)
            each.sum().backward()
            grads = {f"{item}.{n}": p.grad for item, m in parts.items() for n, p in m.named_parameters()}
            total = grads if total is None else {key: add(total[key], grad) for key, grad in grads.items()}
    for item, module in modules.items():
        for child, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, total[f"{item}.{child}"], rtol=1e-4, atol=1e-6)


def add(first, second):
    return second if first is None else first if second is None else first + second


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask"])
def test_packed_documents_without_one_flag_differ(flag):
    family = Gpt(GptShape(**{**COMMON, flag: False}))
    whole, _ = losses(FAMILIES["gpt"], IDS, document_starts(IDS, EOD))
    other, _ = losses(family, IDS, document_starts(IDS, EOD))
    assert not torch.allclose(whole, other)


def test_packed_attention_on_a_device_reads_no_mask():
    """On CUDA in half precision the documents are sequences of variable length; meta tensors run the same path."""
    attention = PackedAttention(
        width=32,
        heads=4,
        norm=torch.nn.LayerNorm(32, device="meta", dtype=torch.bfloat16),
        device=torch.device("meta"),
        reset_positions=True,
        reset_mask=True,
    ).to(torch.bfloat16)
    starts = document_starts(IDS, EOD)
    attention.prepare_batch({STARTS: starts})
    assert (attention.most_documents, attention.longest_document) == (3, 6)
    x = torch.empty(2, 8, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output = attention(x, starts.to("meta"))
        output.sum().backward()
    assert output.shape == x.shape == x.grad.shape
    names = {event.key for event in profile.key_averages()}
    assert any("varlen" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)
