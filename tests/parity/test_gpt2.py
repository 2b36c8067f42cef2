"""Our GPT against transformers' GPT-2: logits, loss and gradients from the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dynmo_train.models.families.gpt import Gpt, GptShape

SHAPE = GptShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=192,
    num_attention_heads=4,
    max_position_embeddings=24,
    vocab_size=101,
    padded_vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.2,
)


def regrouped(qkv: torch.Tensor) -> torch.Tensor:
    """Rows grouped by head, [heads, 3, head width], to transformers' [3, heads, head width]."""
    heads, width = SHAPE.num_attention_heads, SHAPE.hidden_size // SHAPE.num_attention_heads
    return qkv.reshape(heads, 3, width, *qkv.shape[1:]).transpose(0, 1).reshape(qkv.shape)


def models_of_gpt2():
    """Items of our GPT, and the GPT-2 of transformers with their weights."""
    cpu = torch.device("cpu")
    family = Gpt(SHAPE)
    items = {item.name: family.build(item.name, cpu) for item in family.items}
    for module in items.values():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    config = GPT2Config(
        vocab_size=SHAPE.vocab_size,
        n_positions=SHAPE.max_position_embeddings,
        n_embd=SHAPE.hidden_size,
        n_layer=SHAPE.num_layers,
        n_head=SHAPE.num_attention_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    theirs = GPT2LMHeadModel(config)
    with torch.no_grad():
        theirs.transformer.wte.weight.copy_(items["embedding"].word.weight[: SHAPE.vocab_size])
        theirs.transformer.wpe.weight.copy_(items["embedding"].position.weight)
        for index, block in enumerate(theirs.transformer.h):
            attention, mlp = items[f"layers.{index}.attention"], items[f"layers.{index}.mlp"]
            block.ln_1.load_state_dict(attention.norm.state_dict())
            block.ln_2.load_state_dict(mlp.norm.state_dict())
            block.attn.c_attn.weight.copy_(regrouped(attention.qkv.weight).t())
            block.attn.c_attn.bias.copy_(regrouped(attention.qkv.bias))
            for conv, linear in (
                (block.attn.c_proj, attention.dense),
                (block.mlp.c_fc, mlp.fc1),
                (block.mlp.c_proj, mlp.fc2),
            ):
                conv.weight.copy_(linear.weight.t())
                conv.bias.copy_(linear.bias)
        theirs.transformer.ln_f.load_state_dict(items["head"].norm.state_dict())
    return items, theirs


@pytest.fixture
def models():
    return models_of_gpt2()


def test_gpt2_logits_loss_and_gradients_equal_transformers(models):
    items, theirs = models
    tokens = torch.randint(0, SHAPE.vocab_size, (3, 21), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    x = items["embedding"](ids)
    for name, module in items.items():
        if name not in ("embedding", "head"):
            x = module(x)
    head = items["head"]
    logits, loss = head.logits(x), head(x, labels)
    expected = theirs(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    their_loss = torch.nn.functional.cross_entropy(expected.reshape(-1, SHAPE.vocab_size), labels.reshape(-1))
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    their_loss.backward()
    tied = items["embedding"].word.weight.grad + head.weight.grad
    torch.testing.assert_close(tied[: SHAPE.vocab_size], theirs.transformer.wte.weight.grad, rtol=0, atol=1e-4)
    assert not tied[SHAPE.vocab_size :].any()
    for index, block in enumerate(theirs.transformer.h):
        attention, mlp = items[f"layers.{index}.attention"], items[f"layers.{index}.mlp"]
        torch.testing.assert_close(
            regrouped(attention.qkv.weight.grad).t(), block.attn.c_attn.weight.grad, rtol=0, atol=1e-4
        )
        torch.testing.assert_close(mlp.fc2.weight.grad.t(), block.mlp.c_proj.weight.grad, rtol=0, atol=1e-4)
        torch.testing.assert_close(attention.norm.weight.grad, block.ln_1.weight.grad, rtol=0, atol=1e-4)
